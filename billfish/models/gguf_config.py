"""A model's shape from the metadata of a GGUF file: what its architectures have in common.

The keys are those of the GGUF specification (ggml, docs/gguf.md) and of llama.cpp's
gguf-py/gguf/constants.py.
"""

import math
from collections.abc import Callable
from typing import Any

from billfish.checkpoint.gguf import GGUFFile
from billfish.config import LayerConfig, ModelConfig, RopeConfig
from billfish.errors import CheckpointError, ConfigError, shown
from billfish.quantization import gguf as gguf_types

ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
"""Part of the configuration, though they stand among the weights."""
Layers = Callable[[int, RopeConfig], tuple[LayerConfig, ...]]
"""Makes the layers from their number and the file's rotary embedding."""


def gguf_config(
    file: GGUFFile,
    *,
    layers: Layers = lambda number, rope: (LayerConfig(rope=rope),) * number,
    **differences: Any,
) -> ModelConfig:
    """The shape that the file states, with an architecture's own `differences`.

    layers: by default all alike. Raises CheckpointError.
    """
    architecture = file.metadata.text("general.architecture")

    def count(key: str, default: int | None = None) -> int:
        return file.metadata.integer(f"{architecture}.{key}", 1, 2**24, default)

    _check_supported(file, architecture)
    num_layers = count("block_count")
    if num_layers > len(file.tensors):
        raise CheckpointError(
            file.path,
            f"{num_layers} layers cannot be made of {len(file.tensors)} tensors",
            tensor=f"{architecture}.block_count",
        )
    hidden_size, num_heads = count("embedding_length"), count("attention.head_count")
    head_dim = count("attention.key_length", max(1, hidden_size // num_heads))
    if count("attention.value_length", head_dim) != head_dim:
        raise CheckpointError(file.path, "keys and values of different sizes are not supported")
    rotary_dim = count("rope.dimension_count", head_dim)
    context_length = count("context_length")
    try:
        rope = _rope(file, architecture, rotary_dim, context_length)
        fields: dict[str, Any] = {
            "architecture": architecture,
            "vocab_size": file.tensors["token_embd.weight"].shape[0],
            "hidden_size": hidden_size,
            "intermediate_size": count("feed_forward_length"),
            "num_heads": num_heads,
            "num_kv_heads": count("attention.head_count_kv", num_heads),
            "head_dim": head_dim,
            "rotary_dim": rotary_dim,
            "context_length": context_length,
            "rms_norm_eps": file.metadata.number(
                f"{architecture}.attention.layer_norm_rms_epsilon", 0.0, 1.0
            ),
            "tie_embeddings": "output.weight" not in file.tensors,
            "layers": layers(num_layers, rope),
            "qkv_bias": "blk.0.attn_q.bias" in file.tensors,
            "o_bias": "blk.0.attn_output.bias" in file.tensors,
            "mlp_bias": "blk.0.ffn_down.bias" in file.tensors,
        }
        return ModelConfig(**{**fields, **differences})
    except ConfigError as error:
        raise CheckpointError(file.path, str(error)) from error


def _check_supported(file: GGUFFile, architecture: str) -> None:
    if file.metadata.integer("split.count", 0, 2**16, default=0) > 1:
        raise CheckpointError(file.path, "is one part of a split model; join the parts first")
    if "token_embd.weight" not in file.tensors:
        raise CheckpointError(file.path, "is missing", tensor="token_embd.weight")
    if file.metadata.integer(f"{architecture}.expert_count", 0, 2**16, default=0) > 0:
        raise CheckpointError(file.path, "mixture-of-experts models are not supported")


def _rope(file: GGUFFile, architecture: str, rotary_dim: int, context_length: int) -> RopeConfig:
    """A factor without a type is linear, as llama.cpp reads it; files older than the key
    rope.scaling.factor call it rope.scale_linear."""
    metadata, prefix = file.metadata, f"{architecture}.rope"
    theta = metadata.number(f"{prefix}.freq_base", 1.0, 1e12, 10000.0)
    old_factor = metadata.number(f"{prefix}.scale_linear", 1e-3, 1e6, 1.0)
    factor = metadata.number(f"{prefix}.scaling.factor", 1e-3, 1e6, old_factor)
    original = metadata.integer(
        f"{prefix}.scaling.original_context_length", 1, 2**24, context_length
    )
    attention_factor = metadata.number(f"{prefix}.scaling.attn_factor", 1e-3, 1e3, 1.0)
    kind = metadata.text(f"{prefix}.scaling.type", "linear")
    if kind == "yarn":
        return RopeConfig(
            theta=theta, scaling="yarn", factor=factor, original_context=original,
            attention_factor=attention_factor * (0.1 * math.log(max(1.0, factor)) + 1.0),
            beta_fast=metadata.number(f"{prefix}.scaling.yarn_beta_fast", 1e-3, 1e6, 32.0),
            beta_slow=metadata.number(f"{prefix}.scaling.yarn_beta_slow", 1e-3, 1e6, 1.0),
        )  # fmt: skip
    if kind not in ("none", "linear", "longrope"):
        reason = f"{shown(kind)} is not supported (supported: none, linear, yarn, longrope)"
        raise CheckpointError(file.path, reason, tensor=f"{prefix}.scaling.type")
    always, short, long = (_divisors(file, name, rotary_dim) for name in ROPE_TENSORS)
    return RopeConfig(
        theta=theta,
        factor=factor if kind == "linear" else 1.0,
        original_context=original,
        attention_factor=attention_factor,
        short_divisors=short or always,
        long_divisors=long or always,
    )


def _divisors(file: GGUFFile, name: str, rotary_dim: int) -> tuple[float, ...]:
    info = file.tensors.get(name)
    if info is None:
        return ()
    if info.shape != (rotary_dim // 2,):
        reason = f"has shape {list(info.shape)}, expected {[rotary_dim // 2]}"
        raise CheckpointError(file.path, reason, tensor=name)
    values = gguf_types.dequantize(file.data(name), info.type, info.shape)
    if not bool((values > 0).all() and values.isfinite().all()):
        reason = "divides frequencies, so all of it must be finite and above 0"
        raise CheckpointError(file.path, reason, tensor=name)
    return tuple(values.tolist())
