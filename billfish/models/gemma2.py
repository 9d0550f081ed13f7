"""Gemma 2 (arXiv:2408.00118): norms before and behind each sub-layer, whose weights are what is
added to 1; GELU; scaled embeddings; capped logits; every other layer sees a window."""

import math
from typing import Any

from billfish.checkpoint.gguf import GGUFFile
from billfish.checkpoint.metadata import Metadata
from billfish.config import LayerConfig, ModelConfig, RopeConfig
from billfish.models.architecture import Architecture
from billfish.models.gguf_config import gguf_config
from billfish.models.hf_config import hf_config, window_layers


def from_hf(config: Metadata) -> ModelConfig:
    config = config.with_defaults(
        **HF_DEFAULTS,
        max_position_embeddings=8192,
        attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0,
    )
    layers = window_layers(config, lambda index: index % 2 == 0)
    return hf_config(config, layers=layers, **gemma_options(config))


HF_DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
    "tie_word_embeddings": True,
}
"""What both Gemmas take for granted."""


def gemma_options(config: Metadata) -> dict[str, Any]:
    """What sets both Gemmas apart from Llama, from config.json."""
    if config.get("use_bidirectional_attention"):
        config.fail("use_bidirectional_attention", "is not supported: it does not continue texts")
    bias = config.flag("attention_bias", False)
    return {
        "qkv_bias": bias,
        "o_bias": bias,
        "post_norms": True,
        "embedding_scale": math.sqrt(config.integer("hidden_size", 1, 2**31 - 1)),
        "attention_scale": config.number("query_pre_attn_scalar", 1e-3, 1e9) ** -0.5,
        "attention_soft_cap": soft_cap(config, "attn_logit_softcapping"),
        "logit_soft_cap": soft_cap(config, "final_logit_softcapping"),
    }


def soft_cap(metadata: Metadata, key: str) -> float | None:
    return None if metadata.get(key) is None else metadata.number(key, 1e-3, 1e9)


def from_gguf(file: GGUFFile) -> ModelConfig:
    window = file.metadata.integer("gemma2.attention.sliding_window", 1, 2**24, 4096)

    def layers(number: int, rope: RopeConfig) -> tuple[LayerConfig, ...]:
        every = (LayerConfig(rope=rope, sliding_window=window), LayerConfig(rope=rope))
        return tuple(every[index % 2] for index in range(number))

    return gguf_config(file, layers=layers, **gguf_options(file, largest=46))


def gguf_options(file: GGUFFile, largest: int) -> dict[str, Any]:
    """What sets both Gemmas apart from Llama. largest: layers of the 27B model, whose attention
    scale follows from its width, which the file does not say."""
    metadata, name = file.metadata, file.metadata.text("general.architecture")
    hidden = metadata.integer(f"{name}.embedding_length", 1, 2**24)
    heads = metadata.integer(f"{name}.attention.head_count", 1, 2**24)
    scalar = None
    if metadata.integer(f"{name}.block_count", 1, 2**24) == largest:
        scalar = (hidden / heads) ** -0.5
    return {
        "activation": "gelu_tanh",
        "post_norms": True,
        "embedding_scale": math.sqrt(hidden),
        "attention_scale": scalar,
        "attention_soft_cap": soft_cap(metadata, f"{name}.attn_logit_softcapping"),
        "logit_soft_cap": soft_cap(metadata, f"{name}.final_logit_softcapping"),
    }


ARCHITECTURE = Architecture(
    model_type="gemma2",
    classes=("Gemma2ForCausalLM",),
    from_hf=from_hf,
    gguf="gemma2",
    from_gguf=from_gguf,
    zero_centred_norms=True,
)
