"""The histogram on a GPU, in Triton; see `histogram.py`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from billfish.kernels.general._arguments import FLOATS
from billfish.kernels.general._ptx import tally
from billfish.kernels.general.gpu import _on

PRIVATE_BINS = 8192
"""Bins a program holds, at most: beyond, clearing and adding them costs more than it saves, and
shared memory has its end."""

PROGRAMS = 1024

ITEMS = 16
"""Values of a thread that a program with bins of its own counts at a time."""


@triton.jit(do_not_specialize=["step"])
def _histogram_kernel(
    x, out, n, run, bins, low, scale, step, FLOAT: tl.constexpr, PRIVATE: tl.constexpr,
    BINS: tl.constexpr, BLOCK: tl.constexpr, PTX: tl.constexpr, CONSTRAINTS: tl.constexpr,
    ITEMS: tl.constexpr,
):  # fmt: skip
    """Program p: values p * run to (p + 1) * run - 1. BINS: bins, up to a power of two.

    step is 1, unknown to the compiler, so that neighbours go to neighbouring threads.
    """
    begin = tl.program_id(0).to(tl.int64) * run
    end = tl.minimum(begin + run, n)
    slot = tl.arange(0, BLOCK)
    counts = tl.zeros([BLOCK if PTX is not None else BINS], tl.int32)
    for start in range(begin, end, BLOCK):
        there = slot < end - start
        value = tl.load(x + start + slot * step, mask=there, other=0)
        if FLOAT:
            at = (value.to(tl.float32) - low) * scale
            counted = there & (at >= 0) & (at <= bins)
            # Converted only where it is a number within bounds: the rest is undefined.
            bin = tl.minimum(tl.where(counted, at, 0.0).to(tl.int32), bins - 1)
        else:
            counted = there & (value >= 0) & (value.to(tl.int64) < bins)
            bin = tl.where(counted, value, 0).to(tl.int32)
        if not PRIVATE:
            tl.atomic_add(out + bin, tl.full([BLOCK], 1, tl.int64), mask=counted, sem="relaxed")
        elif PTX is not None:
            counts += tl.inline_asm_elementwise(
                PTX, CONSTRAINTS, [slot, tl.where(counted, bin, -1)], dtype=tl.int32,
                is_pure=False, pack=ITEMS,
            )  # fmt: skip
        else:
            counts += tl.histogram(bin, BINS, mask=counted)
    if PRIVATE:
        b = tl.arange(0, BLOCK if PTX is not None else BINS)
        some = (b < bins) & (counts > 0)
        tl.atomic_add(out + b, counts.to(tl.int64), mask=some, sem="relaxed")


def histogram(
    x: Tensor, bins: int, low: float, scale: float, *, private: bool = True, block: int = 2048
) -> Tensor:
    """x: [n]. block: values read at a time, where a program has no bins of its own."""
    out = torch.zeros(bins, dtype=torch.int64, device=x.device)
    n = x.shape[0]
    if not n:
        return out
    x = x.contiguous()
    private = private and bins <= PRIVATE_BINS
    ptx, constraints, warps = None, None, 8
    if private and not triton.knobs.runtime.interpret:
        warps = 8 if bins <= 4096 else 16  # as many values at a time as there are bins
        block = 32 * warps * ITEMS
        ptx, constraints = tally(triton.next_power_of_2(bins), 1, warps, ITEMS)
    # Runs are long, that adding the bins weighs little; the sums are integers, any order will do.
    run = max(block, triton.cdiv(triton.cdiv(n, PROGRAMS), block) * block)
    with _on(x):
        _histogram_kernel[(triton.cdiv(n, run),)](
            x, out, n, run, bins, low, scale, 1, FLOAT=x.dtype in FLOATS, PRIVATE=private,
            BINS=max(32, triton.next_power_of_2(bins)) if private else 32, BLOCK=block, PTX=ptx,
            CONSTRAINTS=constraints, ITEMS=ITEMS, num_warps=warps,
        )  # fmt: skip
    return out
