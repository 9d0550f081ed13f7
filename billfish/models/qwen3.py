"""Qwen3 (arXiv:2505.09388): Llama whose query and key heads are normalized, without biases."""

from billfish.checkpoint.gguf import GGUFFile
from billfish.checkpoint.metadata import Metadata
from billfish.config import ModelConfig
from billfish.models.architecture import Architecture
from billfish.models.gguf_config import gguf_config
from billfish.models.hf_config import hf_config
from billfish.models.qwen2 import upper_layers_slide


def from_hf(config: Metadata) -> ModelConfig:
    config = config.with_defaults(max_position_embeddings=32768, head_dim=128)
    bias = config.flag("attention_bias", False)
    return hf_config(
        config, layers=upper_layers_slide(config), qk_norm=True, qkv_bias=bias, o_bias=bias
    )


def from_gguf(file: GGUFFile) -> ModelConfig:
    return gguf_config(file, qk_norm=True)


ARCHITECTURE = Architecture(
    model_type="qwen3",
    classes=("Qwen3ForCausalLM",),
    from_hf=from_hf,
    gguf="qwen3",
    from_gguf=from_gguf,
)
