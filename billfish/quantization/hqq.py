"""HQQ checkpoints of four bits, grouped along the input, as the package hqq saves them.

A weight [N, K] is read as rows of group_size columns, R = N K / group_size of them, each with a
scale and a floating zero point. Beside the numbers a layer carries its settings, each a tensor:

    W_q   uint8 [R / 2, group_size]   rows 0..R/2-1 in high halves of the bytes, the others in low
    scale float [R, 1]
    zero  float [R, 1]
    shape int64 [2], nbits, group_size, axis int32, view_as_float, ... and text as its bytes

    W = scale * (code - zero) = scale * code + offset,  offset = -scale * zero

With scale and zero of 16 bits the offset is exact in float32. Text is never evaluated, nor needed.
Source: the package hqq, its quantizer, bit packing and HQQLinear.state_dict; the method: Badri and
Shaji, "Half-Quadratic Quantization of Large Machine Learning Models" (2023).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from billfish.errors import KernelArgumentError
from billfish.quantization.int4 import Int4Groups, simplified
from billfish.quantization.scheme import (
    FLOATS,
    INT32,
    Settings,
    TensorSpec,
    check_tensors,
    floats,
    nibbles,
)

_BYTE = frozenset({"U8"})
_SHAPE = frozenset({"I64", "I32"})
_FLAGS = ("view_as_float", "quant_scale", "quant_zero")  # all of them must be off
_UNREAD = (
    "packing", "unpack_view_dtype", "compute_dtype", "offload_meta", "encoded_state_dict",
    "stores_quant_config", "channel_wise", "optimize", "round_zero",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class HQQScheme:
    """How an HQQ checkpoint stores one layer. group_size: -1 for the whole row."""

    group_size: int

    def tensors(self, n: int, k: int) -> dict[str, TensorSpec]:
        size = k if self.group_size == -1 else self.group_size
        rows = n * k // size
        if k % size or rows % 2:
            raise KernelArgumentError(
                f"HQQ packs pairs of whole groups of {size}, which [{n}, {k}] is not made of"
            )
        return {
            "W_q": TensorSpec((rows // 2, size), _BYTE),
            "scale": TensorSpec((rows, 1), FLOATS),
            "zero": TensorSpec((rows, 1), FLOATS),
            "shape": TensorSpec((2,), _SHAPE),
            **{name: TensorSpec((), INT32) for name in ("nbits", "group_size", "axis")},
            **{name: TensorSpec((), _BYTE, required=False) for name in _FLAGS},
            **{name: TensorSpec(None, _BYTE, required=False) for name in _UNREAD},
        }

    def int4_groups(self, tensors: Mapping[str, Tensor], n: int, k: int) -> Int4Groups:
        check_tensors(tensors, self.tensors(n, k))
        size = k if self.group_size == -1 else self.group_size
        expected: dict[str, Any] = {"shape": [n, k], "nbits": 4, "group_size": size, "axis": 1}
        expected |= {name: 0 for name in _FLAGS if name in tensors}
        for name, value in expected.items():
            if tensors[name].tolist() != value:
                raise KernelArgumentError(
                    f"{name}: holds {tensors[name].tolist()}, expected {value}"
                )
        halves = nibbles(tensors["W_q"]).view(-1, size, 2)  # low half, high half
        codes = halves.new_empty(2, *halves.shape[:2])
        codes[0], codes[1] = halves[..., 1], halves[..., 0]
        scales, zeros = (
            floats(name, tensors[name]).view(n, k // size) for name in ("scale", "zero")
        )
        offsets = floats("scale * zero", -scales * zeros)
        return simplified(Int4Groups(codes.view(n, k), scales, None, offsets, self.group_size))


class HQQFormat:
    """quantization_config of an HQQ checkpoint: one for all layers, or one for each kind."""

    name = "hqq"

    def __init__(self, settings: Settings) -> None:
        quant = settings.section("quant_config")
        self._dense = set(settings.texts("skip_modules"))
        self._scheme: HQQScheme | None = None
        self._by_kind: dict[str, HQQScheme] = {}
        if "weight_quant_params" in quant:
            self._scheme = self._read_scheme(quant)
        else:
            self._by_kind = {key: self._read_scheme(quant.section(key)) for key in quant.values}

    def scheme(self, layer: str) -> HQQScheme | None:
        """The kind of a layer is its name without those of the blocks: self_attn.q_proj."""
        parts = layer.split(".")
        kind = ".".join(p for p in parts if p not in ("model", "layers") and not p.isnumeric())
        if not self._dense.isdisjoint((layer, kind)):
            return None
        return self._scheme if self._scheme else self._by_kind.get(kind)

    def _read_scheme(self, quant: Settings) -> HQQScheme:
        for key in ("scale_quant_params", "zero_quant_params"):
            if key in quant:
                quant.fail(key, "scales or zero points that are quantized are not supported")
        weights = quant.section("weight_quant_params")
        weights.bits("nbits", "HQQ")
        if weights.integer("axis", 0) != 1:  # as the package's own default
            weights.fail("axis", "HQQ grouped along the output (axis 0) is not supported")
        if "view_as_float" in weights and weights.boolean("view_as_float"):
            weights.fail("view_as_float", "HQQ with codes stored as floats is not supported")
        return HQQScheme(weights.group_size("group_size", -1))
