"""Phi-3 and Phi-4 (arXiv:2404.14219): Llama whose query, key and value are one tensor, and gate and
up too; a part of each head may not be turned, and long contexts have other frequencies.

Which of the two sets of frequencies is used follows from the longest sequence that is served, as in
llama.cpp; transformers decides anew with every token, which fits no cache that was written before.
"""

from billfish.checkpoint.gguf import GGUFFile
from billfish.checkpoint.metadata import Metadata
from billfish.config import LayerConfig, ModelConfig, RopeConfig
from billfish.models.architecture import Architecture
from billfish.models.gguf_config import gguf_config
from billfish.models.hf_config import hf_config, rope_config, window_of


def from_hf(config: Metadata) -> ModelConfig:
    config = config.with_defaults(
        max_position_embeddings=4096, original_max_position_embeddings=4096, rms_norm_eps=1e-5
    )
    heads = config.integer("num_attention_heads", 1, 2**31 - 1)
    head_dim = config.integer("hidden_size", 1, 2**31 - 1) // heads
    scaling = config.section("rope_parameters") or config.section("rope_scaling")
    scaling = scaling or Metadata({}, config.path, "rope_parameters.")
    part = config.number("partial_rotary_factor", 0.0, 1.0, 1.0)
    part = scaling.number("partial_rotary_factor", 0.0, 1.0, part)
    if scaling.text("rope_type", scaling.text("type", "default")) in ("su", "yarn"):
        scaling = scaling.with_values(rope_type="longrope")  # what it was called at first

    def layers(number: int) -> tuple[LayerConfig, ...]:
        rope = rope_config(config, scaling)
        return (LayerConfig(rope=rope, sliding_window=window_of(config)),) * number

    return hf_config(config, layers=layers, rotary_dim=int(head_dim * part), fused=True)


def from_gguf(file: GGUFFile) -> ModelConfig:
    window = file.metadata.integer("phi3.attention.sliding_window", 0, 2**24, 0) or None

    def layers(number: int, rope: RopeConfig) -> tuple[LayerConfig, ...]:
        return (LayerConfig(rope=rope, sliding_window=window),) * number

    return gguf_config(file, layers=layers, fused=True)


ARCHITECTURE = Architecture(
    model_type="phi3",
    classes=("Phi3ForCausalLM",),
    from_hf=from_hf,
    gguf="phi3",
    from_gguf=from_gguf,
)
