"""Tokenizers and chat templates, rebuilt from what a model file says. No torch."""

from billfish.tokenizer.gguf import from_gguf
from billfish.tokenizer.tokenizer import Tokenizer

__all__ = ["Tokenizer", "from_gguf"]
