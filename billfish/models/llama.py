"""Llama, and all that is built as it is, such as SmolLM2 (arXiv:2302.13971, arXiv:2407.21783)."""

from billfish.checkpoint.metadata import Metadata
from billfish.config import ModelConfig
from billfish.models.architecture import Architecture
from billfish.models.gguf_config import gguf_config
from billfish.models.hf_config import hf_config


def from_hf(config: Metadata) -> ModelConfig:
    bias = config.flag("attention_bias", False)
    return hf_config(config, qkv_bias=bias, o_bias=bias, mlp_bias=config.flag("mlp_bias", False))


ARCHITECTURE = Architecture(
    model_type="llama",
    classes=("LlamaForCausalLM",),
    from_hf=from_hf,
    gguf="llama",
    from_gguf=gguf_config,
    interleaved=True,
)
