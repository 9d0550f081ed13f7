"""Llama, and all that is built as it is, such as SmolLM2 (arXiv:2302.13971, arXiv:2307.09288)."""

from billfish.models.architecture import Architecture
from billfish.models.gguf_config import gguf_config

ARCHITECTURE = Architecture(gguf="llama", from_gguf=gguf_config, interleaved=True)
