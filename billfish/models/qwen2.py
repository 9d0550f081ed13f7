"""Qwen2 and Qwen2.5 (arXiv:2407.10671): Llama with biases on query, key and value."""

from billfish.checkpoint.gguf import GGUFFile
from billfish.checkpoint.metadata import Metadata
from billfish.config import ModelConfig
from billfish.models.architecture import Architecture
from billfish.models.gguf_config import gguf_config
from billfish.models.hf_config import Layers, hf_config, window_layers


def from_hf(config: Metadata) -> ModelConfig:
    config = config.with_defaults(max_position_embeddings=32768)
    return hf_config(config, layers=upper_layers_slide(config), qkv_bias=True)


def upper_layers_slide(config: Metadata) -> Layers:
    """Layers from `max_window_layers` up see a window, where `use_sliding_window` says so."""
    config = config.with_defaults(sliding_window=4096)
    if not config.flag("use_sliding_window", False):
        return window_layers(config.with_values(sliding_window=None), lambda index: False)
    first = config.integer("max_window_layers", 0, 2**31 - 1, 28)
    return window_layers(config, lambda index: index >= first)


def from_gguf(file: GGUFFile) -> ModelConfig:
    return gguf_config(file, qkv_bias=True)


ARCHITECTURE = Architecture(
    model_type="qwen2",
    classes=("Qwen2ForCausalLM",),
    from_hf=from_hf,
    gguf="qwen2",
    from_gguf=from_gguf,
)
