"""SmolLM3 (Hugging Face, 2025): Llama in which every fourth layer does not encode positions (NoPE,
arXiv:2305.19466; after arXiv:2501.18795)."""

from billfish.checkpoint.gguf import GGUFFile
from billfish.checkpoint.metadata import Metadata
from billfish.config import LayerConfig, ModelConfig, RopeConfig
from billfish.models.architecture import Architecture
from billfish.models.gguf_config import gguf_config
from billfish.models.hf_config import hf_config, rope_config, sliding_layers, window_of

_INTERVAL = 4


def from_hf(config: Metadata) -> ModelConfig:
    config = config.with_defaults(
        num_key_value_heads=4,
        max_position_embeddings=32768,
        rope_theta=2e6,
        tie_word_embeddings=True,
    )

    def layers(number: int) -> tuple[LayerConfig, ...]:
        rope, turned = rope_config(config), _turned(config, number)
        window = window_of(config) if config.flag("use_sliding_window", False) else None
        sliding = sliding_layers(config, number, lambda index: not turned[index])
        return tuple(
            LayerConfig(rope=rope if turn else None, sliding_window=window if slide else None)
            for turn, slide in zip(turned, sliding, strict=True)
        )

    bias = config.flag("attention_bias", False)
    mlp_bias = config.flag("mlp_bias", False)
    return hf_config(config, layers=layers, qkv_bias=bias, o_bias=bias, mlp_bias=mlp_bias)


def _turned(config: Metadata, number: int) -> list[bool]:
    """Whether each layer encodes positions; `no_rope_layers` has a 0 for those that do not."""
    if config.get("no_rope_layers") is not None:
        return [bool(entry) for entry in config.integers("no_rope_layers", number)]
    interval = config.integer("no_rope_layer_interval", 1, 2**31 - 1, _INTERVAL)
    return [(index + 1) % interval != 0 for index in range(number)]


def from_gguf(file: GGUFFile) -> ModelConfig:
    def layers(number: int, rope: RopeConfig) -> tuple[LayerConfig, ...]:
        return tuple(
            LayerConfig(rope=None if (index + 1) % _INTERVAL == 0 else rope)
            for index in range(number)
        )

    return gguf_config(file, layers=layers)


ARCHITECTURE = Architecture(
    model_type="smollm3",
    classes=("SmolLM3ForCausalLM",),
    from_hf=from_hf,
    gguf="smollm3",
    from_gguf=from_gguf,
    interleaved=True,
)
