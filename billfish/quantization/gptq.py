"""GPTQ checkpoints as AutoGPTQ and GPTQModel write them.

A weight [N, K] of G groups, eight codes in an int32, the first in its lowest bits:

    qweight int32 [K / 8, N]   codes along K
    qzeros  int32 [G, N / 8]   zero points along N: minus 1 in checkpoint_format "gptq", as they are
                               in "gptq_v2"
    scales  float [G, N]
    g_idx   int32 [K]          group of each column; may be missing where they are in order

    W[n, k] = scales[g, n] * (code[n, k] - zero[g, n]),  g = g_idx[k]

"gptq" stores (zero - 1) mod 16, so a stored 15 is the zero point 0. Symmetric weights have the zero
point 8 and store it too. Source: the packing and dequantization of both projects' torch layers.
"""

import re
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

_FORMATS = {"gptq": 1, "gptq_v2": 0}  # what is added to a stored zero point


@dataclass(frozen=True, slots=True)
class GPTQScheme:
    """How a GPTQ checkpoint stores one layer. zero_shift: added to stored zero points."""

    group_size: int
    in_order: bool
    zero_shift: int

    def tensors(self, n: int, k: int) -> dict[str, TensorSpec]:
        if n % 8 or k % 8:
            raise KernelArgumentError(f"GPTQ packs by eights, which [{n}, {k}] is no multiple of")
        groups = 1 if self.group_size == -1 else -(-k // self.group_size)
        return {
            "qweight": TensorSpec((k // 8, n), INT32),
            "qzeros": TensorSpec((groups, n // 8), INT32),
            "scales": TensorSpec((groups, n), FLOATS),
            "g_idx": TensorSpec((k,), INT32, required=not self.in_order),
        }

    def int4_groups(self, tensors: Mapping[str, Tensor], n: int, k: int) -> Int4Groups:
        check_tensors(tensors, self.tensors(n, k))
        codes = nibbles(tensors["qweight"].t())
        zeros = (nibbles(tensors["qzeros"]) + self.zero_shift) & 15
        scales = floats("scales", tensors["scales"])
        g_idx = tensors.get("g_idx")
        weight = simplified(
            Int4Groups(
                codes, scales.t().contiguous(), zeros.t().contiguous(), None, self.group_size, g_idx
            )
        )
        if self.in_order and weight.g_idx is not None:
            raise KernelArgumentError("g_idx: is not in order, though desc_act is false")
        return weight


class GPTQFormat:
    """quantization_config, or an older checkpoint's quantize_config.json, of a GPTQ checkpoint."""

    name = "gptq"

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        if settings.text("pack_dtype", "int32") != "int32":
            settings.fail("pack_dtype", "only int32 is supported")
        if "is_marlin_format" in settings and settings.boolean("is_marlin_format"):
            settings.fail(
                "is_marlin_format", "GPTQ in the order of the Marlin kernel is not supported"
            )
        self._zero_shift = self._read_zero_shift()
        self._scheme = self._read_scheme({})
        self._lm_head = settings.boolean("lm_head", False)
        self._modules = self._read_modules()
        self._dynamic = self._read_dynamic()

    def scheme(self, layer: str) -> GPTQScheme | None:
        if layer == "lm_head" and not self._lm_head:
            return None
        if self._modules and not any(layer.endswith(f".{module}") for module in self._modules):
            return None
        for pattern, overrides in self._dynamic:
            if pattern.match(layer):
                return None if overrides is None else self._read_scheme(overrides)
        return self._scheme

    def _read_zero_shift(self) -> int:
        settings = self._settings
        key = "checkpoint_format" if "checkpoint_format" in settings else "format"
        kind = settings.text(key, "gptq").lower()
        if kind not in _FORMATS:
            settings.fail(
                key, f"GPTQ stored as {kind[:40]!r} is not supported (supported: gptq, gptq_v2)"
            )
        return _FORMATS[kind]

    def _read_scheme(self, overrides: Mapping[str, Any]) -> GPTQScheme:
        settings = Settings({**self._settings.values, **overrides}, self._settings.file)
        settings.bits("bits", "GPTQ")
        return GPTQScheme(
            group_size=settings.group_size("group_size"),
            in_order=not settings.boolean("desc_act", False),
            zero_shift=self._zero_shift,
        )

    def _read_modules(self) -> list[str]:
        """Names of the quantized layers within a block, where only some are: lists of lists."""
        key = "modules_in_block_to_quantize"
        if key not in self._settings:
            return []
        value = self._settings.values[key]
        lists = value if isinstance(value, list) else [value]
        names = [name for each in lists for name in (each if isinstance(each, list) else [each])]
        if not all(type(name) is str for name in names):
            self._settings.fail(key, "must be lists of names of layers")
        return names

    def _read_dynamic(self) -> list[tuple[re.Pattern[str], Mapping[str, Any] | None]]:
        """Expressions, the first that matches a layer counts: None leaves it dense."""
        if "dynamic" not in self._settings:
            return []
        section = self._settings.section("dynamic")
        rules: list[tuple[re.Pattern[str], Mapping[str, Any] | None]] = []
        for text, overrides in section.values.items():
            pattern = section.pattern("pattern", text.removeprefix("-:").removeprefix("+:"))
            if text.startswith("-:"):
                rules.append((pattern, None))
            else:
                rules.append((pattern, section.section(text).values if overrides else {}))
        return rules
