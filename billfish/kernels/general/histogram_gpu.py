"""The histogram on a GPU, in Triton; see `histogram.py`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from billfish.kernels.general._arguments import FLOATS
from billfish.kernels.general.gpu import _on

PRIVATE_BINS = 2048
"""Bins a program holds, at most: beyond, clearing and adding them costs more than it saves."""

PROGRAMS = 1024


@triton.jit
def _histogram_kernel(
    x, out, n, run, bins, low, scale, FLOAT: tl.constexpr, PRIVATE: tl.constexpr,
    BINS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program p: values p * run to (p + 1) * run - 1. BINS: bins, up to a power of two."""
    begin = tl.program_id(0).to(tl.int64) * run
    counts = tl.zeros([BINS], tl.int32)
    for start in range(begin, tl.minimum(begin + run, n), BLOCK):
        i = start + tl.arange(0, BLOCK)
        value = tl.load(x + i, mask=i < n, other=0)
        if FLOAT:
            at = (value.to(tl.float32) - low) * scale
            counted = (i < n) & (at >= 0) & (at <= bins)
            # Converted only where it is a number within bounds: the rest is undefined.
            bin = tl.minimum(tl.where(counted, at, 0.0).to(tl.int32), bins - 1)
        else:
            counted = (i < n) & (value >= 0) & (value.to(tl.int64) < bins)
            bin = tl.where(counted, value, 0).to(tl.int32)
        if PRIVATE:
            counts += tl.histogram(bin, BINS, mask=counted)
        else:
            tl.atomic_add(out + bin, tl.full([BLOCK], 1, tl.int64), mask=counted, sem="relaxed")
    if PRIVATE:
        b = tl.arange(0, BINS)
        some = (b < bins) & (counts > 0)
        tl.atomic_add(out + b, counts.to(tl.int64), mask=some, sem="relaxed")


def histogram(
    x: Tensor, bins: int, low: float, scale: float, *, private: bool = True, block: int = 2048
) -> Tensor:
    """x: [n]. block: values read at a time."""
    out = torch.zeros(bins, dtype=torch.int64, device=x.device)
    n = x.shape[0]
    if not n:
        return out
    x = x.contiguous()
    private = private and bins <= PRIVATE_BINS
    # Runs are long, that adding the bins weighs little; the sums are integers, any order will do.
    run = max(block, triton.cdiv(triton.cdiv(n, PROGRAMS), block) * block)
    with _on(x):
        _histogram_kernel[(triton.cdiv(n, run),)](
            x, out, n, run, bins, low, scale, FLOAT=x.dtype in FLOATS, PRIVATE=private,
            BINS=max(32, triton.next_power_of_2(bins)) if private else 32, BLOCK=block,
            num_warps=8,
        )  # fmt: skip
    return out
