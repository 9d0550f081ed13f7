"""The segmented reduction on a GPU, in Triton; see `segment_reduce.py`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from billfish.kernels.general._arguments import accumulator, identity, result
from billfish.kernels.general._triton import TYPES, combine, fold
from billfish.kernels.general.gpu import _on

PIECE = 32768


@triton.jit
def _owner(offsets, segments, place, WIDTH: tl.constexpr):
    """The last segment that begins before a place; -1: none. WIDTH offsets are looked at at once,
    for each look costs a memory latency."""
    low = tl.full((), -1, tl.int64)  # begins before it, or is none
    high = tl.full((), 0, tl.int64) + segments
    while high - low > 1:
        step = (high - low + WIDTH - 1) // WIDTH
        probe = low + (tl.arange(0, WIDTH) + 1) * step
        inside = probe < high
        begin = tl.load(offsets + probe, mask=inside, other=0).to(tl.int64)
        before = tl.sum((inside & (begin < place)).to(tl.int64), 0)
        low += before * step
        high = tl.minimum(high, low + step)
    return low


@triton.jit
def _total(
    x, begin, end, x_step, EMPTY: tl.constexpr, DTYPE: tl.constexpr, OP: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    nothing = tl.full((), EMPTY, DTYPE)
    total = tl.full([BLOCK], EMPTY, DTYPE)
    for start in range(begin, end, BLOCK):
        i = start + tl.arange(0, BLOCK)
        value = tl.load(x + i * x_step, mask=i < end, other=0).to(DTYPE)
        total = combine(total, tl.where(i < end, value, nothing), OP)
    return fold(total, 0, OP)


@triton.jit
def _segment_kernel(
    x, offsets, out, partial, count, n, x_step, segments, piece_size,
    EMPTY: tl.constexpr, DTYPE: tl.constexpr, OP: tl.constexpr, BALANCED: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Values are cut at the multiples of piece_size. The first `segments` programs reduce a segment
    up to the first cut in it, program segments + k what is between cuts k + 1 and k + 2 of the
    segment that goes on there. partial: by program; count: int32 [segments], 0 at the start.
    """
    program = tl.program_id(0).to(tl.int64)
    segment = program
    cut = (program - segments + 1) * piece_size
    if program >= segments:
        segment = _owner(offsets, segments, cut, WIDTH)
    begin = tl.full((), 0, tl.int64)
    end = tl.full((), 0, tl.int64)
    if segment >= 0:
        begin = tl.maximum(tl.load(offsets + segment).to(tl.int64), 0)
        end = tl.minimum(tl.load(offsets + segment + 1).to(tl.int64), n)
    last = tl.where(end > begin, (end - 1) // piece_size, 0)
    pieces = tl.where(end > begin, last - begin // piece_size + 1, 1)
    if not BALANCED:
        pieces = tl.full((), 1, tl.int64)
    if pieces == 1:
        if program < segments:
            whole = _total(x, begin, end, x_step, EMPTY, DTYPE, OP, BLOCK)
            tl.store(out + segment, whole.to(out.dtype.element_ty))
    elif (program < segments) | (end > cut):
        first = tl.where(program < segments, begin, cut)
        after = tl.minimum((first // piece_size + 1) * piece_size, end)
        part = _total(x, first, after, x_step, EMPTY, DTYPE, OP, BLOCK)
        tl.store(partial + program, part)
        # As in `reduce_gpu.py`: who counts to the end knows that all parts are there.
        tl.debug_barrier()
        before = tl.atomic_add(count + segment, 1, sem="acq_rel")
        if before == pieces - 1:
            _finish(
                partial, out, segment, segments + begin // piece_size, pieces, EMPTY, DTYPE, OP,
                BLOCK,
            )  # fmt: skip


@triton.jit
def _finish(
    partial, out, segment, rest, pieces, EMPTY: tl.constexpr, DTYPE: tl.constexpr,
    OP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The pieces of a segment, in their order: its own program's, then those from `rest` on."""
    nothing = tl.full((), EMPTY, DTYPE)
    total = tl.full([BLOCK], EMPTY, DTYPE)
    for start in range(0, pieces, BLOCK):
        i = start + tl.arange(0, BLOCK)
        place = tl.where(i == 0, segment, rest + i - 1)
        # .cg: what other multiprocessors wrote is in L2, and an L1 line of it might be old.
        value = tl.load(partial + place, mask=i < pieces, other=0, cache_modifier=".cg")
        total = combine(total, tl.where(i < pieces, value, nothing), OP)
    tl.store(out + segment, fold(total, 0, OP).to(out.dtype.element_ty))


def segment_reduce(
    x: Tensor, offsets: Tensor, op: str, *, balanced: bool = True, piece_size: int = PIECE
) -> Tensor:
    """x: [n]; offsets: [S + 1]. piece_size: values a program reduces, at most, where balanced."""
    n, segments = x.shape[0], offsets.shape[0] - 1
    dtype, kind = result(x.dtype, op), accumulator(x.dtype, op)
    out = torch.empty(segments, dtype=dtype, device=x.device)
    if not segments:
        return out
    # A block about as long as segments are, of few warps: many programs are under way at once.
    usual = triton.next_power_of_2(max(1, n // segments))
    block = max(64, min(1024, usual, triton.next_power_of_2(piece_size)))
    cuts = max(0, triton.cdiv(n, piece_size) - 1) if balanced else 0
    partial = torch.empty(segments + cuts if cuts else 0, dtype=kind, device=x.device)
    count = torch.zeros(segments if cuts else 0, dtype=torch.int32, device=x.device)
    with _on(x):
        _segment_kernel[(segments + cuts,)](
            x, offsets.contiguous(), out, partial, count, n, x.stride(0), segments, piece_size,
            EMPTY=identity(dtype, op), DTYPE=TYPES[kind], OP=op, BALANCED=balanced, WIDTH=128,
            BLOCK=block, num_warps=max(1, block // 512),
        )  # fmt: skip
    return out
