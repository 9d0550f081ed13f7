"""A model's shape from config.json: what its architectures have in common.

The keys, and what counts where one is missing, are those of transformers' configuration classes.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

from billfish.checkpoint.metadata import Metadata
from billfish.config import LayerConfig, ModelConfig, RopeConfig
from billfish.errors import CheckpointError, ConfigError, shown

Layers = Callable[[int], tuple[LayerConfig, ...]]
"""Makes the layers from their number."""

_MOST_LAYERS = 1 << 14


def hf_config(
    config: Metadata,
    *,
    layers: Layers | None = None,
    **differences: Any,
) -> ModelConfig:
    """The shape that config.json states, with an architecture's own `differences`.

    layers: by default all alike. Raises CheckpointError for a value that is missing, of the wrong
    type or impossible.
    """
    num_layers = config.integer("num_hidden_layers", 1, _MOST_LAYERS)
    hidden_size, num_heads = _count(config, "hidden_size"), _count(config, "num_attention_heads")
    head_dim = _count(config, "head_dim", max(1, hidden_size // num_heads))
    activation = config.text("hidden_activation", config.text("hidden_act", "silu"))
    try:
        fields: dict[str, Any] = {
            "architecture": config.text("model_type"),
            "vocab_size": _count(config, "vocab_size"),
            "hidden_size": hidden_size,
            "intermediate_size": _count(config, "intermediate_size"),
            "num_heads": num_heads,
            "num_kv_heads": _count(config, "num_key_value_heads", num_heads),
            "head_dim": head_dim,
            "rotary_dim": head_dim,
            "context_length": context_length(config),
            "rms_norm_eps": config.number("rms_norm_eps", 0.0, 1.0, 1e-6),
            "tie_embeddings": config.flag("tie_word_embeddings", False),
            "layers": (layers or _like_layers(config))(num_layers),
            "activation": _ACTIVATIONS.get(activation, activation),
        }
        return ModelConfig(**{**fields, **differences})
    except ConfigError as error:
        raise CheckpointError(config.path, str(error)) from error


_ACTIVATIONS = {"gelu_pytorch_tanh": "gelu_tanh"}


def _like_layers(config: Metadata) -> Layers:
    """Layers that see everything before them."""
    return lambda number: (LayerConfig(rope=rope_config(config)),) * number


def window_layers(config: Metadata, is_sliding: Callable[[int], bool]) -> Layers:
    """Layers of which some see a window: those that `layer_types` says, else `is_sliding`."""

    def layers(number: int) -> tuple[LayerConfig, ...]:
        rope, window = rope_config(config), window_of(config)
        sliding = sliding_layers(config, number, is_sliding)
        return tuple(LayerConfig(rope=rope, sliding_window=window if s else None) for s in sliding)

    return layers


def window_of(config: Metadata) -> int | None:
    """`sliding_window` in tokens; null: there is none."""
    if config.get("sliding_window") is None:
        return None
    return config.integer("sliding_window", 1, 2**31 - 1)


def sliding_layers(
    config: Metadata, number: int, default: Callable[[int], bool]
) -> tuple[bool, ...]:
    """Which layers see a sliding window: `layer_types`, or `default` of the number of each."""
    if config.get("layer_types") is None:
        return tuple(default(i) for i in range(number))
    kinds = config.strings("layer_types")
    if len(kinds) != number:
        config.fail("layer_types", f"has {len(kinds)} entries for {number} layers")
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            config.fail("layer_types", f"{shown(kind)} is not supported")
    return tuple(kind == "sliding_attention" for kind in kinds)


def context_length(config: Metadata) -> int:
    """Longest sequence in tokens. What YaRN stretches counts where it is longer: configurations
    name either length."""
    length = _count(config, "max_position_embeddings", 2048)
    scaling = config.section("rope_parameters") or config.section("rope_scaling")
    if scaling is not None and _kind(scaling) == "yarn" and "factor" in scaling:
        original = scaling.integer("original_max_position_embeddings", 1, 2**31 - 1, length)
        return max(length, int(original * scaling.number("factor", 1.0, 1e6)))
    return length


def rope_config(
    config: Metadata, scaling: Metadata | None = None, theta: float | None = None
) -> RopeConfig:
    """The rotary embedding, from `rope_parameters`, or from `rope_theta` and `rope_scaling` in
    files older than that. scaling, theta: what to read in their place, where there are several."""
    if scaling is None:
        scaling = config.section("rope_parameters") or config.section("rope_scaling")
    if scaling is None:
        scaling = Metadata({}, config.path, "rope_parameters.")
    if theta is None:
        theta = config.number("rope_theta", 0.0, 1e300, 10000.0)
    base = scaling.number("rope_theta", 0.0, 1e300, theta)
    kind = _kind(scaling)
    if kind not in _ROPES:
        scaling.fail(
            "rope_type", f"{shown(kind)} is not supported (supported: {', '.join(_ROPES)})"
        )
    try:
        return RopeConfig(theta=base, **_ROPES[kind](config, scaling))
    except ConfigError as error:
        raise CheckpointError(config.path, str(error), tensor="rope_parameters") from error


def _kind(scaling: Metadata) -> str:
    return scaling.text("rope_type", scaling.text("type", "default"))


def _factor(scaling: Metadata) -> float:
    return scaling.number("factor", 1e-3, 1e6)


def _original(config: Metadata, scaling: Metadata) -> int:
    """The context of the first training. transformers prefers what stands outside of the object."""
    default = scaling.integer(
        "original_max_position_embeddings", 1, 2**31 - 1, _count(config, "max_position_embeddings")
    )
    return config.integer("original_max_position_embeddings", 1, 2**31 - 1, default)


def _plain(config: Metadata, scaling: Metadata) -> dict[str, Any]:
    """Also "dynamic": it changes the frequencies of sequences longer than the context, and those
    are not served, because they would change what is in the cache."""
    return {}


def _linear(config: Metadata, scaling: Metadata) -> dict[str, Any]:
    return {"factor": _factor(scaling)}


def _llama3(config: Metadata, scaling: Metadata) -> dict[str, Any]:
    return {
        "scaling": "llama3",
        "factor": _factor(scaling),
        "original_context": _original(config, scaling),
        "low_freq_factor": scaling.number("low_freq_factor", 1e-6, 1e6),
        "high_freq_factor": scaling.number("high_freq_factor", 1e-6, 1e6),
    }


def _yarn(config: Metadata, scaling: Metadata) -> dict[str, Any]:
    factor, original = scaling.get("factor"), _original(config, scaling)
    factor = _factor(scaling) if factor is not None else context_length(config) / original
    mscale, all_dim = (scaling.number(k, 0.0, 1e3, 0.0) for k in ("mscale", "mscale_all_dim"))

    def magnitude(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    # Section 3.3 of the paper, and DeepSeek's variant of it.
    default = magnitude(mscale) / magnitude(all_dim) if mscale and all_dim else magnitude(1.0)
    return {
        "scaling": "yarn",
        "factor": factor,
        "original_context": original,
        "attention_factor": scaling.number("attention_factor", 1e-3, 1e3, default),
        "beta_fast": scaling.number("beta_fast", 0.0, 1e6, 32.0) or 32.0,
        "beta_slow": scaling.number("beta_slow", 0.0, 1e6, 1.0) or 1.0,
        "truncate": scaling.flag("truncate", True),
    }


def _longrope(config: Metadata, scaling: Metadata) -> dict[str, Any]:
    original = _original(config, scaling)
    factor = scaling.number("factor", 1e-3, 1e6, context_length(config) / original)
    # Section 3.2 of the paper.
    scaled = factor > 1 and original > 1
    default = math.sqrt(1 + math.log(factor) / math.log(original)) if scaled else 1.0
    divisors = {
        f"{length}_divisors": tuple(map(float, _numbers(scaling, f"{length}_factor")))
        for length in ("short", "long")
    }
    return {
        "original_context": original,
        "attention_factor": scaling.number("attention_factor", 1e-3, 1e3, default),
        **divisors,
    }


def _numbers(scaling: Metadata, key: str) -> list[float]:
    return scaling.numbers(key, len(scaling.array(key)))


_ROPES: Mapping[str, Callable[[Metadata, Metadata], dict[str, Any]]] = {
    "default": _plain,
    "linear": _linear,
    "dynamic": _plain,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}


def _count(config: Metadata, key: str, default: int | None = None) -> int:
    return config.integer(key, 1, 2**31 - 1, default)
