"""The segmented reduction on a GPU, in Triton; see `segment_reduce.py`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from billfish.kernels.general._arguments import accumulator, identity, result
from billfish.kernels.general._triton import TYPES, combine, fold
from billfish.kernels.general.gpu import _on

PIECE = 8192


@triton.jit
def _piece_kernel(
    x, offsets, first_piece, partial, n, x_step, segments, piece_size,
    EMPTY: tl.constexpr, DTYPE: tl.constexpr, OP: tl.constexpr, SEARCH: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Program p reduces piece p. first_piece: int64 [segments + 1]. Without SEARCH: segment p."""
    piece = tl.program_id(0).to(tl.int64)
    segment = piece
    nth = tl.full((), 0, tl.int64)
    there = piece < segments
    if SEARCH:
        there = piece < tl.load(first_piece + segments)
        # The last segment whose first piece is not past this one; each has one piece at least.
        low = tl.full((), 0, tl.int64)
        high = tl.full((), 0, tl.int64) + segments
        while high - low > 1:
            middle = (low + high) // 2
            after = tl.load(first_piece + middle) > piece
            high = tl.where(after, middle, high)
            low = tl.where(after, low, middle)
        segment = low
        nth = piece - tl.load(first_piece + segment)
    if there:
        begin = tl.maximum(tl.load(offsets + segment).to(tl.int64), 0) + nth * piece_size
        end = tl.minimum(tl.load(offsets + segment + 1).to(tl.int64), n)
        if SEARCH:
            end = tl.minimum(end, begin + piece_size)
        nothing = tl.full((), EMPTY, DTYPE)
        total = tl.full([BLOCK], EMPTY, DTYPE)
        for start in range(begin, end, BLOCK):
            i = start + tl.arange(0, BLOCK)
            value = tl.load(x + i * x_step, mask=i < end, other=0).to(DTYPE)
            total = combine(total, tl.where(i < end, value, nothing), OP)
        tl.store(partial + piece, fold(total, 0, OP).to(partial.dtype.element_ty))


@triton.jit
def _pieces_kernel(
    partial, first_piece, out, EMPTY: tl.constexpr, DTYPE: tl.constexpr, OP: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Program s: the pieces of segment s, in their order."""
    segment = tl.program_id(0).to(tl.int64)
    begin, end = tl.load(first_piece + segment), tl.load(first_piece + segment + 1)
    nothing = tl.full((), EMPTY, DTYPE)
    total = tl.full([BLOCK], EMPTY, DTYPE)
    for start in range(begin, end, BLOCK):
        i = start + tl.arange(0, BLOCK)
        value = tl.load(partial + i, mask=i < end, other=0)
        total = combine(total, tl.where(i < end, value, nothing), OP)
    tl.store(out + segment, fold(total, 0, OP).to(out.dtype.element_ty))


def segment_reduce(
    x: Tensor, offsets: Tensor, op: str, *, balanced: bool = True, piece_size: int = PIECE
) -> Tensor:
    """x: [n]; offsets: [S + 1]. piece_size: values a program reduces, where balanced."""
    n, segments = x.shape[0], offsets.shape[0] - 1
    dtype, kind = result(x.dtype, op), accumulator(x.dtype, op)
    out = torch.empty(segments, dtype=dtype, device=x.device)
    if not segments:
        return out
    options = {"EMPTY": identity(dtype, op), "DTYPE": TYPES[kind], "OP": op}
    offsets = offsets.contiguous()
    block = min(2048, triton.next_power_of_2(piece_size))
    with _on(x):
        if not balanced:
            _piece_kernel[(segments,)](
                x, offsets, offsets, out, n, x.stride(0), segments, piece_size,
                SEARCH=False, BLOCK=block, **options,
            )  # fmt: skip
            return out
        pieces = offsets.diff().add_(piece_size - 1).floor_divide_(piece_size).clamp_(min=1)
        first_piece = torch.zeros(segments + 1, dtype=torch.int64, device=x.device)
        torch.cumsum(pieces, 0, out=first_piece[1:])
        # Each segment has less than one piece more than its values fill.
        bound = n // piece_size + segments
        partial = torch.empty(bound, dtype=kind, device=x.device)
        _piece_kernel[(bound,)](
            x, offsets, first_piece, partial, n, x.stride(0), segments, piece_size,
            SEARCH=True, BLOCK=block, **options,
        )  # fmt: skip
        _pieces_kernel[(segments,)](
            partial, first_piece, out, BLOCK=128, num_warps=1, **options
        )  # fmt: skip
    return out
