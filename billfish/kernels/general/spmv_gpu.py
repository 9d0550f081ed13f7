"""The sparse matrix times a vector on a GPU, in Triton; see `spmv.py`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from billfish.kernels.general._arguments import accumulator
from billfish.kernels.general._triton import TYPES
from billfish.kernels.general.gpu import _on

PIECE = 512
"""Elements from which a row counts as long, and of its pieces; more where rows are long anyway."""

VECTORS = 8
"""Columns of x that a program does at a time, at most."""

PROGRAMS = 2048
"""Programs that work off the list of pieces, at most."""


@triton.jit
def _products(
    values, columns, x, at, inside, count, vectors, x_row, x_column, first, DTYPE: tl.constexpr,
    VECTORS: tl.constexpr,
):  # fmt: skip
    """Elements `at` [n] times their elements of x: [n], or [n, VECTORS]. Of a column that is none
    of x's nothing is read."""
    column = tl.load(columns + at, mask=inside, other=0).to(tl.int64)
    inside = inside & (column >= 0) & (column < count)
    value = tl.load(values + at, mask=inside, other=0).to(DTYPE)
    source = x + column * x_row
    if VECTORS == 1:
        return value * tl.load(source + first * x_column, mask=inside, other=0).to(DTYPE)
    else:
        v = first + tl.arange(0, VECTORS)[None, :]
        there = inside[:, None] & (v < vectors)
        other = tl.load(source[:, None] + v * x_column, mask=there, other=0)
        return value[:, None] * other.to(DTYPE)


@triton.jit
def _put(out, sums, row, there, vectors, first, VECTORS: tl.constexpr):
    """sums: [rows] or [rows, VECTORS], to out [., vectors]."""
    if VECTORS == 1:
        tl.store(out + row * vectors + first, sums.to(out.dtype.element_ty), mask=there)
    else:
        v = first + tl.arange(0, VECTORS)[None, :]
        to = out + row[:, None] * vectors + v
        tl.store(to, sums.to(out.dtype.element_ty), mask=there[:, None] & (v < vectors))


@triton.jit
def _bounds(offsets, row, there, stored):
    """(first element, how many) of rows."""
    begin = tl.maximum(tl.load(offsets + row, mask=there, other=0).to(tl.int64), 0)
    end = tl.minimum(tl.load(offsets + row + 1, mask=there, other=0).to(tl.int64), stored)
    return begin, tl.maximum(end - begin, 0)


@triton.jit
def _rows_kernel(
    values, columns, offsets, x, out, listed, list_size, rows, stored, count, vectors, x_row,
    x_column, piece, CUT: tl.constexpr, DTYPE: tl.constexpr, ROWS: tl.constexpr,
    WIDTH: tl.constexpr, VECTORS: tl.constexpr,
):  # fmt: skip
    """Program (tile, group): ROWS rows times VECTORS columns of x, WIDTH elements a row at a time.

    CUT: rows of more than `piece` elements go on the list, which is of `list_size` entries:
    listed[0] is how many there are, then come their rows, then which of their row's pieces.
    """
    first = tl.program_id(1) * VECTORS
    top = tl.program_id(0).to(tl.int64) * ROWS
    row = top + tl.arange(0, ROWS)
    there = row < rows
    if CUT:
        _, length = _bounds(offsets, row, there, stored)
        pieces = tl.where(length > piece, (length + piece - 1) // piece, 0)
        here = tl.sum(pieces, 0)
        if (here > 0) & (first == 0):
            _enlist(listed, list_size, row, pieces, here, ROWS)
        there = there & (pieces == 0)
    # All of the tile as one line of threads: neighbours read neighbours, of the same row or next.
    line = tl.arange(0, ROWS * WIDTH)
    begin, length = _bounds(offsets, top + line // WIDTH, top + line // WIDTH < rows, stored)
    if CUT:
        length = tl.where(length > piece, 0, length)
    total = tl.zeros([ROWS * WIDTH] if VECTORS == 1 else [ROWS * WIDTH, VECTORS], DTYPE)
    for start in range(0, tl.max(length, 0), WIDTH):
        e = start + line % WIDTH
        total += _products(
            values, columns, x, begin + e, e < length, count, vectors, x_row, x_column, first,
            DTYPE, VECTORS,
        )  # fmt: skip
    each = tl.reshape(total, [ROWS, WIDTH] if VECTORS == 1 else [ROWS, WIDTH, VECTORS])
    _put(out, tl.sum(each, 1), row, there, vectors, first, VECTORS)


@triton.jit
def _enlist(listed, list_size, row, pieces, total, ROWS: tl.constexpr):
    """Put pieces of rows on the list. Places are taken in the order in which programs come; within
    a row pieces are in theirs."""
    AT_ONCE: tl.constexpr = 256 // ROWS if ROWS < 256 else 1
    place = tl.atomic_add(listed, total, sem="relaxed") + tl.cumsum(pieces, 0) - pieces
    for start in range(0, tl.max(pieces, 0), AT_ONCE):
        nth = start + tl.broadcast_to(tl.arange(0, AT_ONCE)[None, :], [ROWS, AT_ONCE])
        slot = place[:, None] + nth
        fits = (nth < pieces[:, None]) & (slot < list_size)
        tl.store(listed + 1 + slot, tl.broadcast_to(row[:, None], slot.shape), mask=fits)
        tl.store(listed + 1 + list_size + slot, nth.to(tl.int64), mask=fits)


@triton.jit
def _pieces_kernel(
    values, columns, offsets, x, partial, listed, list_size, stored, count, vectors, x_row,
    x_column, piece, DTYPE: tl.constexpr, BLOCK: tl.constexpr, VECTORS: tl.constexpr,
):  # fmt: skip
    """The list's pieces, each a row of partial [list_size, vectors]."""
    first = tl.program_id(1) * VECTORS
    entries = tl.minimum(tl.load(listed), list_size)
    for entry in range(tl.program_id(0).to(tl.int64), entries, tl.num_programs(0)):
        row = tl.load(listed + 1 + entry)
        begin, length = _bounds(offsets, row, True, stored)
        done = tl.load(listed + 1 + list_size + entry) * piece
        total = tl.zeros([BLOCK] if VECTORS == 1 else [BLOCK, VECTORS], DTYPE)
        for start in range(0, piece, BLOCK):
            e = done + start + tl.arange(0, BLOCK)
            inside = (e < length) & (e < done + piece)
            total += _products(
                values, columns, x, begin + e, inside, count, vectors, x_row, x_column, first,
                DTYPE, VECTORS,
            )  # fmt: skip
        sums = tl.sum(total, 0)
        if VECTORS == 1:
            tl.store(partial + entry * vectors + first, sums)
        else:
            v = first + tl.arange(0, VECTORS)
            tl.store(partial + entry * vectors + v, sums, mask=v < vectors)


@triton.jit
def _long_rows_kernel(
    offsets, out, partial, listed, list_size, stored, vectors, piece, DTYPE: tl.constexpr,
    BLOCK: tl.constexpr, VECTORS: tl.constexpr,
):  # fmt: skip
    """Rows on the list: the sum of their pieces, in order, which lie in a row too."""
    v = tl.program_id(1) * VECTORS + tl.arange(0, VECTORS)
    entries = tl.minimum(tl.load(listed), list_size)
    for entry in range(tl.program_id(0).to(tl.int64), entries, tl.num_programs(0)):
        if tl.load(listed + 1 + list_size + entry) == 0:
            row = tl.load(listed + 1 + entry)
            _, length = _bounds(offsets, row, True, stored)
            pieces = tl.minimum((length + piece - 1) // piece, entries - entry)
            total = tl.zeros([BLOCK, VECTORS], DTYPE)
            for start in range(0, pieces, BLOCK):
                p = start + tl.arange(0, BLOCK)[:, None]
                there = (p < pieces) & (v < vectors)[None, :]
                total += tl.load(partial + (entry + p) * vectors + v, mask=there, other=0)
            sums = tl.sum(total, 0).to(out.dtype.element_ty)
            tl.store(out + row * vectors + v, sums, mask=v < vectors)


def spmv(
    values: Tensor, columns: Tensor, offsets: Tensor, x: Tensor, *, balanced: bool = True,
    piece: int | None = None,
) -> Tensor:  # fmt: skip
    """x: [columns of A, k]. piece: elements of a long row's pieces."""
    rows, stored, vectors = offsets.shape[0] - 1, values.shape[0], x.shape[1]
    out = torch.empty(rows, vectors, dtype=values.dtype, device=values.device)
    if not out.numel():
        return out
    kind = accumulator(values.dtype, "sum")
    values, columns, offsets = values.contiguous(), columns.contiguous(), offsets.contiguous()
    at_once = min(VECTORS, triton.next_power_of_2(vectors))
    width = min(32, max(2, triton.next_power_of_2(triton.cdiv(stored, rows))))
    piece = piece or max(PIECE, 32 * width)
    # A row of n elements, more than a piece, has less than 2 n / piece of them.
    list_size = 2 * (stored // piece) if balanced else 0
    listed = torch.empty(1 + 2 * list_size, dtype=torch.int64, device=values.device)
    listed[:1].zero_()
    groups = triton.cdiv(vectors, at_once)
    options = {"DTYPE": TYPES[kind], "VECTORS": at_once}
    tile = max(1, 512 // width // at_once)
    sizes = (stored, x.shape[0], vectors, *x.stride(), piece)
    with _on(values):
        _rows_kernel[(triton.cdiv(rows, tile), groups)](
            values, columns, offsets, x, out, listed, list_size, rows, *sizes, CUT=list_size > 0,
            ROWS=tile, WIDTH=width, **options,
        )  # fmt: skip
        if list_size:
            partial = torch.empty(list_size, vectors, dtype=kind, device=values.device)
            _pieces_kernel[(min(list_size, PROGRAMS), groups)](
                values, columns, offsets, x, partial, listed, list_size, *sizes,
                BLOCK=min(512, piece) // at_once, **options,
            )  # fmt: skip
            _long_rows_kernel[(min(list_size, PROGRAMS // 4), groups)](
                offsets, out, partial, listed, list_size, stored, vectors, piece, BLOCK=64,
                num_warps=1, **options,
            )  # fmt: skip
    return out
