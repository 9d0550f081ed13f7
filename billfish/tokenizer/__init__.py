"""Tokenizers and chat templates, rebuilt from what a model file says. No torch."""

from billfish.tokenizer.gguf import from_gguf
from billfish.tokenizer.hf import from_directory
from billfish.tokenizer.tokenizer import Tokenizer

__all__ = ["Tokenizer", "from_directory", "from_gguf"]
