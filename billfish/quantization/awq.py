"""AWQ checkpoints in the "gemm" order, as AutoAWQ writes them.

A weight [N, K] of G groups, eight values along N in an int32, in the order 0 2 4 6 1 3 5 7 from its
lowest bits:

    qweight int32 [K, N / 8]
    qzeros  int32 [G, N / 8]   zero points, as they are
    scales  float [G, N]

    W[n, k] = scales[g, n] * (code[n, k] - zero[g, n]),  g = k // group_size

Source: AutoAWQ's WQLinear_GEMM, and Lin et al., "AWQ" (arXiv:2306.00978).
"""

from collections.abc import Mapping
from dataclasses import dataclass

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

_PLACE = (0, 4, 1, 5, 2, 6, 3, 7)  # of value 0, 1, 2, ... among the eight of an int32


@dataclass(frozen=True, slots=True)
class AWQScheme:
    """How an AWQ checkpoint stores one layer."""

    group_size: int

    def tensors(self, n: int, k: int) -> dict[str, TensorSpec]:
        size = k if self.group_size == -1 else self.group_size
        if n % 8 or k % size:
            raise KernelArgumentError(
                f"AWQ packs eight rows and whole groups of {size}, which [{n}, {k}] is not made of"
            )
        return {
            "qweight": TensorSpec((k, n // 8), INT32),
            "qzeros": TensorSpec((k // size, n // 8), INT32),
            "scales": TensorSpec((k // size, n), FLOATS),
        }

    def int4_groups(self, tensors: Mapping[str, Tensor], n: int, k: int) -> Int4Groups:
        check_tensors(tensors, self.tensors(n, k))
        codes, zeros = (_rows(tensors[name]) for name in ("qweight", "qzeros"))
        scales = floats("scales", tensors["scales"]).t().contiguous()
        return simplified(Int4Groups(codes, scales, zeros, None, self.group_size))


def _rows(packed: Tensor) -> Tensor:
    """int32 [R, N / 8] -> uint8 [N, R], rows in order."""
    values = nibbles(packed).view(packed.shape[0], -1, 8)[:, :, list(_PLACE)]
    return values.view(packed.shape[0], -1).t().contiguous()


class AWQFormat:
    """quantization_config, or an older checkpoint's quant_config.json, of an AWQ checkpoint."""

    name = "awq"

    def __init__(self, settings: Settings) -> None:
        bits, size = ("w_bit", "q_group_size") if "w_bit" in settings else ("bits", "group_size")
        settings.bits(bits, "AWQ")
        key = "version" if "version" in settings else "format"
        version = settings.text(key, "gemm").lower()
        if version != "gemm":
            settings.fail(key, f"AWQ stored as {version[:40]!r} is not supported (supported: gemm)")
        self._scheme = AWQScheme(settings.group_size(size))
        self._dense = settings.texts("modules_to_not_convert")

    def scheme(self, layer: str) -> AWQScheme | None:
        """AutoAWQ quantizes the layers of blocks only, and takes names as parts of names."""
        if layer == "lm_head" or any(part in layer for part in self._dense):
            return None
        return self._scheme
