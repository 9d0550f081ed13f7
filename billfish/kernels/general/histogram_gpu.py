"""The histogram on a GPU, in Triton; see `histogram.py`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from billfish.kernels.general._arguments import FLOATS
from billfish.kernels.general._ptx import SPAN, halves, tally
from billfish.kernels.general.gpu import _on

PRIVATE_BINS = 8192
"""Bins of 32 bits that a program holds, at most: beyond, clearing and adding them for a few values
each costs more than it saves, and shared memory has its end."""

PROGRAMS = 1024

ITEMS = 16
"""Values of a thread that a program with bins of its own counts at a time."""

SPANS = 8
"""Programs that read the same values, at most, each for a span of many bins."""

SPAN_WARPS, SPAN_PROGRAMS = 16, 792
"""Of programs with a span of bins: thrice as many as an H200 runs at once, for one span may have
more to count than others."""

MANY = 1 << 22
"""Values from which it is worth while to clear and add spans of bins."""


@triton.jit
def _bin(value, there, bins, low, scale, FLOAT: tl.constexpr):
    """(the bin of a value, 0 of one without; whether it has one)"""
    if FLOAT:
        at = (value.to(tl.float32) - low) * scale
        counted = there & (at >= 0) & (at <= bins)
        # Converted only where it is a number within bounds: the rest is undefined.
        return tl.minimum(tl.where(counted, at, 0.0).to(tl.int32), bins - 1), counted
    else:
        counted = there & (value >= 0) & (value.to(tl.int64) < bins)
        return tl.where(counted, value, 0).to(tl.int32), counted


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
        bin, counted = _bin(value, there, bins, low, scale, FLOAT)
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


@triton.jit
def _spans_kernel(
    x, out, n, run, spans, bins, low, scale, FLOAT: tl.constexpr, SPAN: tl.constexpr,
    CLEAR: tl.constexpr, COUNT: tl.constexpr, CONSTRAINTS: tl.constexpr, ADD: tl.constexpr,
    THREADS: tl.constexpr, ITEMS: tl.constexpr,
):  # fmt: skip
    """Program p counts the (p % spans)-th SPAN bins of the (p // spans)-th run of values: those of
    one run read it at once, all but the first from the L2 cache. out: spans * SPAN bins.

    CLEAR, COUNT, ADD: `_ptx.halves`.
    """
    begin = (tl.program_id(0) // spans).to(tl.int64) * run
    end = tl.minimum(begin + run, n)
    first = (tl.program_id(0) % spans) * SPAN
    out += first
    thread = tl.arange(0, THREADS)
    tl.inline_asm_elementwise(CLEAR, "=r,r", [thread], dtype=tl.int32, is_pure=False, pack=1)
    slot = tl.arange(0, THREADS * ITEMS)
    for start in range(begin, end, THREADS * ITEMS):
        there = slot < end - start
        value = tl.load(x + start + slot, mask=there, other=0)
        bin, counted = _bin(value, there, bins, low, scale, FLOAT)
        mine = tl.where(counted & (bin >= first), bin - first, SPAN)
        tl.inline_asm_elementwise(
            COUNT, CONSTRAINTS, [mine, out], dtype=tl.int32, is_pure=False, pack=ITEMS
        )
    tl.inline_asm_elementwise(
        ADD, "=r,l", [out + thread * 0], dtype=tl.int32, is_pure=False, pack=1
    )


def histogram(
    x: Tensor, bins: int, low: float, scale: float, *, private: bool = True, block: int = 2048
) -> Tensor:
    """x: [n]. block: values read at a time, where a program has no bins of its own."""
    n = x.shape[0]
    if not n:
        return torch.zeros(bins, dtype=torch.int64, device=x.device)
    x = x.contiguous()
    compiled = not triton.knobs.runtime.interpret
    if private and compiled and PRIVATE_BINS < bins <= SPANS * SPAN and n >= MANY:
        return _in_spans(x, bins, low, scale)
    out = torch.zeros(bins, dtype=torch.int64, device=x.device)
    private = private and bins <= PRIVATE_BINS
    ptx, constraints, warps = None, None, 8
    if private and compiled:
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


def _in_spans(x: Tensor, bins: int, low: float, scale: float) -> Tensor:
    n, spans = x.shape[0], triton.cdiv(bins, SPAN)
    out = torch.zeros(spans * SPAN, dtype=torch.int64, device=x.device)
    clear, count, add, constraints = halves(SPAN_WARPS, ITEMS)
    block = 32 * SPAN_WARPS * ITEMS
    run = triton.cdiv(triton.cdiv(n, SPAN_PROGRAMS // spans), block) * block
    with _on(x):
        _spans_kernel[(triton.cdiv(n, run) * spans,)](
            x, out, n, run, spans, bins, low, scale, FLOAT=x.dtype in FLOATS, SPAN=SPAN,
            CLEAR=clear, COUNT=count, CONSTRAINTS=constraints, ADD=add, THREADS=32 * SPAN_WARPS,
            ITEMS=ITEMS, num_warps=SPAN_WARPS,
        )  # fmt: skip
    return out[:bins]
