"""Gemma 3 (arXiv:2503.19786), its language model: Gemma 2 with normalized query and key heads in
place of capped logits; five layers of six see a window, and turn positions by another base."""

from billfish.checkpoint.gguf import GGUFFile
from billfish.checkpoint.metadata import Metadata
from billfish.config import LayerConfig, ModelConfig, RopeConfig
from billfish.models.architecture import Architecture
from billfish.models.gemma2 import HF_DEFAULTS, gemma_options, gguf_options
from billfish.models.gguf_config import gguf_config
from billfish.models.hf_config import hf_config, rope_config, sliding_layers, window_of

_PATTERN = 6


def from_hf(config: Metadata) -> ModelConfig:
    config = (config.section("text_config") or config).with_defaults(
        **HF_DEFAULTS,
        model_type="gemma3_text",
        vocab_size=262208,
        num_attention_heads=8,
        max_position_embeddings=131072,
    )

    def layers(number: int) -> tuple[LayerConfig, ...]:
        window = window_of(config)
        pattern = config.integer("sliding_window_pattern", 1, 2**31 - 1, _PATTERN)
        sliding = sliding_layers(config, number, lambda index: (index + 1) % pattern != 0)
        local, full = _ropes(config)
        return tuple(
            LayerConfig(rope=local, sliding_window=window) if s else LayerConfig(rope=full)
            for s in sliding
        )

    return hf_config(config, layers=layers, qk_norm=True, **gemma_options(config))


def _ropes(config: Metadata) -> tuple[RopeConfig, RopeConfig]:
    """Of layers with a window, and of those without."""
    empty = Metadata({}, config.path, "rope_parameters.")
    parameters = config.section("rope_parameters") or empty
    local = parameters.section("sliding_attention") or empty
    full = parameters.section("full_attention") or config.section("rope_scaling") or empty
    return (
        rope_config(config, local, config.number("rope_local_base_freq", 0.0, 1e300, 1e4)),
        rope_config(config, full, config.number("rope_theta", 0.0, 1e300, 1e6)),
    )


def from_gguf(file: GGUFFile) -> ModelConfig:
    metadata = file.metadata
    pattern = metadata.integer("gemma3.attention.sliding_window_pattern", 1, 2**24, _PATTERN)
    window, local = None, RopeConfig(theta=1e4)
    if "gemma3.attention.sliding_window" in metadata:
        window = metadata.integer("gemma3.attention.sliding_window", 1, 2**24)
    if "gemma3.rope.freq_base_swa" in metadata:
        local = RopeConfig(theta=metadata.number("gemma3.rope.freq_base_swa", 1.0, 1e12))

    def layers(number: int, rope: RopeConfig) -> tuple[LayerConfig, ...]:
        return tuple(
            LayerConfig(rope=rope)
            if window is None or (index + 1) % pattern == 0
            else LayerConfig(rope=local, sliding_window=window)
            for index in range(number)
        )

    return gguf_config(file, layers=layers, qk_norm=True, **gguf_options(file, largest=62))


ARCHITECTURE = Architecture(
    model_type="gemma3_text",
    classes=("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
    from_hf=from_hf,
    gguf="gemma3",
    from_gguf=from_gguf,
    zero_centred_norms=True,
    renamed=(
        ("language_model.model.", "model."),
        ("language_model.lm_head.", "lm_head."),
        ("model.language_model.", "model."),
    ),
    others=(
        "vision_tower.", "multi_modal_projector.", "model.vision_tower.",
        "model.multi_modal_projector.",
    ),
)  # fmt: skip
