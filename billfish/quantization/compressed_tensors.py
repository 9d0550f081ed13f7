"""compressed-tensors checkpoints in the format "pack-quantized", four bits.

A weight [N, K] of G groups, eight values in an int32, the first in its lowest bits. Codes stand for
-8..7, and are stored with 8 added to them; so are zero points.

    weight_packed     int32 [N, ceil(K / 8)]   codes along K
    weight_scale      float [N, G]             G = 1 for the strategy "channel"
    weight_zero_point int32 [ceil(N / 8), G]   along N; of asymmetric weights only
    weight_shape      int   [2]                N, K
    weight_g_idx      int32 [K]                group of each column, of actorder "group" only; what
                                               holds -1 has never been set, and means in order

    W[n, k] = scale[n, g] * (code[n, k] - zero[n, g])

actorder "weight" (or "static") changes how weights were found, not how they are stored.
Source: the package compressed-tensors, its packed compressor and quantization arguments.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from billfish.errors import KernelArgumentError, shown
from billfish.quantization.int4 import Int4Groups, simplified
from billfish.quantization.scheme import (
    FLOATS,
    INT32,
    Settings,
    TensorSpec,
    any_matches,
    check_tensors,
    floats,
    nibbles,
)

FORMAT = "pack-quantized"
_INTEGERS = frozenset({"I64", "I32"})


@dataclass(frozen=True, slots=True)
class PackedScheme:
    """How a compressed-tensors checkpoint stores one layer. group_size: -1 for "channel"."""

    group_size: int
    symmetric: bool
    act_order: bool

    def tensors(self, n: int, k: int) -> dict[str, TensorSpec]:
        groups = 1 if self.group_size == -1 else -(-k // self.group_size)
        specs = {
            "weight_packed": TensorSpec((n, -(-k // 8)), INT32),
            "weight_scale": TensorSpec((n, groups), FLOATS),
            "weight_shape": TensorSpec((2,), _INTEGERS),
        }
        if not self.symmetric:
            specs["weight_zero_point"] = TensorSpec((-(-n // 8), groups), INT32)
        if self.act_order:
            specs["weight_g_idx"] = TensorSpec((k,), INT32)
        return specs

    def int4_groups(self, tensors: Mapping[str, Tensor], n: int, k: int) -> Int4Groups:
        check_tensors(tensors, self.tensors(n, k))
        shape = tensors["weight_shape"].tolist()
        if shape != [n, k]:
            raise KernelArgumentError(f"weight_shape: holds {shape}, expected {[n, k]}")
        codes = nibbles(tensors["weight_packed"])[:, :k].contiguous()
        scales = floats("weight_scale", tensors["weight_scale"])
        zeros = None
        if not self.symmetric:
            zeros = nibbles(tensors["weight_zero_point"].t())[:, :n].t().contiguous()
        g_idx = tensors["weight_g_idx"] if self.act_order else None
        if g_idx is not None and bool((g_idx == -1).all()):
            g_idx = None
        return simplified(Int4Groups(codes, scales, zeros, None, self.group_size, g_idx))


class CompressedTensorsFormat:
    """quantization_config of a compressed-tensors checkpoint."""

    name = "compressed-tensors"

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        for key in ("kv_cache_scheme", "sparsity_config", "transform_config"):
            self._refuse(key)
        format = settings.text("format", FORMAT)
        self._ignore = [
            self._pattern(settings, "ignore", text) for text in settings.texts("ignore")
        ]
        groups = settings.section("config_groups")
        schemes = {}
        for key in groups.values:
            group = groups.section(key)
            scheme = self._read_scheme(group, format)
            schemes.update(dict.fromkeys(group.texts("targets"), (group, scheme)))
        self._default = schemes.pop("Linear", (None, None))[1]
        # Exact names count more than expressions, and those more than the class of layers; of
        # several expressions the first in the order of the alphabet counts.
        self._targets = [
            (self._pattern(group, "targets", target), scheme)
            for target, (group, scheme) in sorted(
                schemes.items(), key=lambda item: ("re:" in item[0], item[0])
            )
        ]

    def scheme(self, layer: str) -> PackedScheme | None:
        if "Linear" in self._ignore or any_matches(self._ignore, layer):
            return None
        for target, scheme in self._targets:
            if any_matches([target], layer):
                return scheme
        return self._default

    def _refuse(self, key: str) -> None:
        """Refuses what changes the meaning of the checkpoint, unless it says that it is nothing."""
        value = self._settings.values.get(key)
        if value and not (isinstance(value, Mapping) and value.get("format") == "dense"):
            self._settings.fail(key, "is not supported")

    def _read_scheme(self, group: Settings, default: str) -> PackedScheme | None:
        for key in ("input_activations", "output_activations"):
            if key in group:
                group.fail(key, "quantized activations are not supported")
        if "weights" not in group:
            return None
        format = group.text("format", default)
        weights = group.section("weights")
        bits, kind = weights.integer("num_bits", 8), weights.text("type", "int")
        if format != FORMAT or kind != "int" or bits != 4:
            what = f"compressed-tensors {format[:40]!r} of {bits}-bit {kind[:20]!r}"
            group.fail("format", f"{what} is not supported (supported: {FORMAT} of 4-bit int)")
        if weights.values.get("dynamic"):
            weights.fail("dynamic", "weights quantized when they are used are not supported")
        return PackedScheme(
            group_size=self._group_size(weights),
            symmetric=weights.boolean("symmetric", True),
            act_order=self._act_order(weights),
        )

    def _group_size(self, weights: Settings) -> int:
        size = weights.integer("group_size", -1)
        strategy = weights.text("strategy", "channel" if size == -1 else "group")
        if strategy == "channel":
            return -1
        if strategy != "group":
            weights.fail(
                "strategy", f"{strategy[:40]!r} is not supported (supported: group, channel)"
            )
        return weights.group_size("group_size")

    def _act_order(self, weights: Settings) -> bool:
        """Whether columns have their group from weight_g_idx."""
        value = weights.values.get("actorder")
        if value in (None, False, "weight", "static"):
            return False
        if value in (True, "group", "dynamic"):
            return True
        weights.fail("actorder", f"{shown(value)} is not supported (supported: weight, group)")

    @staticmethod
    def _pattern(settings: Settings, key: str, text: str) -> str | re.Pattern[str]:
        return settings.pattern(key, text[3:]) if text.startswith("re:") else text


def tensors_of(weight: Int4Groups, scale_dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors of a layer, by the names after the layer's: the inverse of `int4_groups`.

    Raises KernelArgumentError for what the format cannot hold: floating offsets, act-order (current
    versions of the package read no weight_g_idx), and scales that are not exact in scale_dtype.
    """
    if weight.offsets is not None or weight.g_idx is not None:
        raise KernelArgumentError("weight: floating offsets and act-order cannot be written")
    scales = weight.scales.to(scale_dtype)
    if not torch.equal(scales.float(), weight.scales):
        raise KernelArgumentError(f"scales: are not exact in {scale_dtype}")
    tensors = {
        "weight_packed": _packed(weight.codes),
        "weight_scale": scales,
        "weight_shape": torch.tensor(weight.codes.shape),
    }
    if weight.zeros is not None:
        tensors["weight_zero_point"] = _packed(weight.zeros.t()).t().contiguous()
    return tensors


def settings_of(
    groups: Mapping[str, int], *, symmetric: bool, act_order: bool, ignore: Sequence[str]
) -> dict[str, Any]:
    """quantization_config of a checkpoint. groups: the group size of every quantized layer.

    The size that most layers have is that of the class "Linear"; of others, which have so many
    columns that it does not divide them, the layers are named.
    """
    sizes = Counter(groups.values())
    most = max(sizes, key=lambda size: sizes[size])
    config_groups = {}
    for number, size in enumerate(sorted(sizes, key=lambda size: size == most)):
        weights = {
            "num_bits": 4, "type": "int", "symmetric": symmetric, "dynamic": False,
            "strategy": "channel" if size == -1 else "group",
            "group_size": None if size == -1 else size,
            "actorder": "static" if act_order else None,
        }  # fmt: skip
        named = sorted(layer for layer in groups if groups[layer] == size)
        config_groups[f"group_{number}"] = {
            "targets": ["Linear"] if size == most else named,
            "weights": weights, "input_activations": None, "output_activations": None,
            "format": FORMAT,
        }  # fmt: skip
    return {
        "quant_method": CompressedTensorsFormat.name,
        "format": FORMAT,
        "quantization_status": "compressed",
        "config_groups": config_groups,
        "ignore": list(ignore),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def _packed(values: Tensor) -> Tensor:
    """uint8 [R, C], 0..15 -> int32 [R, ceil(C / 8)], the first of eight in the lowest bits."""
    rows, columns = values.shape
    pairs = torch.nn.functional.pad(values, (0, -columns % 8)).reshape(rows, -1, 2)
    return (pairs[..., 0] | pairs[..., 1] << 4).contiguous().view(torch.int32)
