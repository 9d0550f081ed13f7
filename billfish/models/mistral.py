"""Mistral (arXiv:2310.06825): Llama whose layers see a sliding window.

Its GGUF files call themselves Llama, and do not say what the window is.
"""

from billfish.checkpoint.metadata import Metadata
from billfish.config import ModelConfig
from billfish.models.architecture import Architecture
from billfish.models.hf_config import hf_config, window_layers


def from_hf(config: Metadata) -> ModelConfig:
    config = config.with_defaults(
        num_key_value_heads=8, max_position_embeddings=131072, sliding_window=4096
    )
    return hf_config(config, layers=window_layers(config, lambda index: True))


ARCHITECTURE = Architecture(model_type="mistral", classes=("MistralForCausalLM",), from_hf=from_hf)
