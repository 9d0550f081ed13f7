"""Finite impulse response filters on a GPU, in Triton; see `fir.py`."""

# ruff: noqa: RUF005 (Triton knows no starred tuples)
# mypy: disable-error-code="assignment"

import torch
import triton
import triton.language as tl
from torch import Tensor

from billfish.kernels.general._triton import TYPES
from billfish.kernels.general.gpu import _on

THREADS = 128


@triton.jit
def _four(x, state, at, n, before, EDGE: tl.constexpr, DTYPE: tl.constexpr):
    """Values at..at + 3 of a row, as four tensors; EDGE: some may come before it, in its state."""
    i = at[:, None] + tl.arange(0, 4)[None, :]
    got = tl.load(x + i, mask=(i >= 0) & (i < n), other=0.0).to(DTYPE)
    if EDGE:
        past = before + i
        old = tl.load(state + past, mask=(i < 0) & (past >= 0), other=0.0).to(DTYPE)
        got = tl.where(i < 0, old, got)
    even, odd = tl.split(got.reshape(at.shape[0], 2, 2))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@triton.jit
def _accumulate(
    total, x, state, taps, at, n, before, first, last, EDGE: tl.constexpr, CHECK: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """Adds what values 4 c..4 c + 3 from `at` on give the 8 samples there, for chunks c in
    first..last - 1. taps: tap k is at 8 + k. CHECK: some values are outside of a sample's window,
    where taps are 0, but a NaN times 0 would not be."""
    for chunk in range(first, last):
        values = _four(x, state, at + 4 * chunk, n, before, EDGE, DTYPE)
        near = ()
        for k in tl.static_range(11):  # tap of value 3, sample 0, to that of value 0, sample 7
            near = near + (tl.load(taps + 8 + k - 3 - 4 * chunk),)
        more = ()
        for t in tl.static_range(8):
            value = total[t]
            for s in tl.static_range(4):
                if CHECK:
                    k = t - s - 4 * chunk
                    seen = (k >= 0) & (k <= before)
                    value = tl.where(seen, value + values[s] * near[t - s + 3], value)
                else:
                    value += values[s] * near[t - s + 3]
            more = more + (value,)
        total = more
    return total


@triton.jit
def _fir_kernel(
    x, state, taps, out, n, before, chunks, tiles, BLOCK: tl.constexpr, DTYPE: tl.constexpr
):
    """Program (tile, row): 8 BLOCK samples, 8 neighbours a lane. chunks: of 4 values before those
    that reach it."""
    program = tl.program_id(0)
    row = (program // tiles).to(tl.int64)
    start = (program % tiles).to(tl.int64) * (8 * BLOCK)
    at = start + 8 * tl.arange(0, BLOCK).to(tl.int64)
    x += row * n
    state += row * before
    total = ()
    for _ in tl.static_range(8):
        total = total + (tl.zeros([BLOCK], DTYPE),)
    if start < before:
        total = _accumulate(total, x, state, taps, at, n, before, -chunks, 2, True, True, DTYPE)
    else:
        all = tl.minimum(3 - chunks, 0)  # from here on to 0, all values are in all windows
        total = _accumulate(total, x, state, taps, at, n, before, -chunks, all, False, True, DTYPE)
        total = _accumulate(total, x, state, taps, at, n, before, all, 0, False, False, DTYPE)
        total = _accumulate(total, x, state, taps, at, n, before, 0, 2, False, True, DTYPE)
    out += row * n
    for t in tl.static_range(8):
        result = total[t].to(out.dtype.element_ty)
        tl.store(out + at + t, result, mask=at + t < n)


@triton.jit
def _single_kernel(x, state, taps, out, n, before, tiles, BLOCK: tl.constexpr, DTYPE: tl.constexpr):
    """The switched-off technique. taps: tap k is at 8 + k."""
    program = tl.program_id(0)
    row = (program // tiles).to(tl.int64)
    i = (program % tiles).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x += row * n
    state += row * before
    total = tl.zeros([BLOCK], DTYPE)
    for k in range(before + 1):
        at = i - k
        got = tl.load(x + at, mask=(at >= 0) & (at < n), other=0.0)
        old = tl.load(state + before + at, mask=(at < 0) & (before + at >= 0), other=0.0)
        total += tl.where(at < 0, old, got).to(DTYPE) * tl.load(taps + 8 + k)
    tl.store(out + row * n + i, total.to(out.dtype.element_ty), mask=i < n)


def fir(x: Tensor, taps: Tensor, state: Tensor, *, reuse: bool = True) -> Tensor:
    """x: [rows, n]; state: [rows, taps - 1]."""
    rows, n = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not x.numel():
        return out
    x, state = x.contiguous(), state.contiguous()
    before = taps.shape[0] - 1
    around = torch.nn.functional.pad(taps, (8, 16))
    block = THREADS if reuse else 8 * THREADS
    tiles = triton.cdiv(n, 8 * THREADS)
    with _on(x):
        if reuse:
            _fir_kernel[(tiles * rows,)](
                x, state, around, out, n, before, triton.cdiv(before, 4), tiles, BLOCK=block,
                DTYPE=TYPES[taps.dtype], num_warps=4,
            )  # fmt: skip
        else:
            _single_kernel[(tiles * rows,)](
                x, state, around, out, n, before, tiles, BLOCK=block, DTYPE=TYPES[taps.dtype],
                num_warps=4,
            )  # fmt: skip
    return out
