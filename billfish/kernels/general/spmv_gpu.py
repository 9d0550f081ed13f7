"""The sparse matrix times a vector on a GPU, in Triton; see `spmv.py`."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from billfish.kernels.general._arguments import accumulator
from billfish.kernels.general._triton import TYPES
from billfish.kernels.general.gpu import _on

PIECE = 1024
"""Elements from which a row counts as long, and of its pieces; more where rows are long anyway."""

VECTORS = 8
"""Columns of x that a program does at a time, at most."""

PROGRAMS = 2048
"""Programs that fill any GPU."""


@triton.jit
def _elements(values, columns, at, inside, count, DTYPE: tl.constexpr):
    """(column, value, whether it counts) of elements `at`: each is read once. One of a column that
    is none of x's does not count."""
    column = tl.load(columns + at, mask=inside, other=0, eviction_policy="evict_first")
    value = tl.load(values + at, mask=inside, other=0, eviction_policy="evict_first").to(DTYPE)
    return column, value, inside & (column >= 0) & (column < count)


@triton.jit
def _products(
    column, value, inside, x, vectors, x_row, x_column, first, ALIGNED: tl.constexpr,
    VECTORS: tl.constexpr,
):  # fmt: skip
    """Elements [n] times their elements of x: [n], or [n, VECTORS]. ALIGNED: x has all of these
    columns, next to each other, from multiples of VECTORS on."""
    if VECTORS == 1:
        source = x + column.to(tl.int64) * x_row + first * x_column
        other = tl.load(source, mask=inside, other=0, eviction_policy="evict_last")
        return value * other.to(value.dtype)
    else:
        v = first + tl.arange(0, VECTORS)[None, :]
        there, stride = inside[:, None], x_row
        if ALIGNED:
            # Of a product the compiler sees what divides it, and reads that much of a row at once.
            stride = x_row // VECTORS * VECTORS
        else:
            there, v = there & (v < vectors), v * x_column
        source = x + (column.to(tl.int64) * stride)[:, None] + v
        other = tl.load(source, mask=there, other=0, eviction_policy="evict_last")
        return value[:, None] * other.to(value.dtype)


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
    begin = tl.maximum(tl.load(offsets + row, mask=there, other=0), 0)
    end = tl.minimum(tl.load(offsets + row + 1, mask=there, other=0), stored)
    return begin, tl.maximum(end - begin, 0)


@triton.jit
def _rows_kernel(
    values, columns, offsets, x, out, listed, list_size, rows, stored, count, vectors, x_row,
    x_column, piece, CUT: tl.constexpr, DTYPE: tl.constexpr, ROWS: tl.constexpr,
    WIDTH: tl.constexpr, STEPS: tl.constexpr, ALIGNED: tl.constexpr, VECTORS: tl.constexpr,
):  # fmt: skip
    """Program (first tile, group): tiles of ROWS rows times VECTORS columns of x. WIDTH lanes take
    a row, and ask for STEPS elements each at once.

    CUT: rows of more than `piece` elements go on the list, which is of `list_size` entries:
    listed[0] is how many there are, then come their rows, then which of their row's pieces.
    """
    first = tl.program_id(1) * VECTORS
    # All of the tile as one line of threads: neighbours read neighbours, of the same row or next.
    line = tl.arange(0, ROWS * WIDTH)
    lane = line % WIDTH
    stride = tl.num_programs(0).to(tl.int64) * ROWS
    top = tl.program_id(0).to(tl.int64) * ROWS
    behind, lengths = _bounds(offsets, top + line // WIDTH, top + line // WIDTH < rows, stored)
    while top < rows:
        begin, length = behind, lengths
        if CUT:
            length = tl.where(length > piece, 0, length)
        else:
            begin, length = begin.to(tl.int64), length.to(tl.int64)
        # All of the first steps are asked for, and where the next tile begins, before one is waited
        # for.
        near = ()
        for step in tl.static_range(STEPS):
            e = step * WIDTH + lane
            asked = _elements(values, columns, begin + e, e < length, count, DTYPE)
            near += (asked,)  # type: ignore[assignment]
        longest = tl.max(lengths, 0)
        here = top + tl.arange(0, ROWS)
        mine = here < rows
        if CUT:  # noqa: SIM102 (the compiler decides this one, the GPU the next)
            if longest > piece:
                _, each = _bounds(offsets, here, mine, stored)
                mine = mine & (each <= piece)
                if first == 0:
                    _enlist(listed, list_size, here, each, piece, ROWS)
                longest = tl.max(tl.where(mine, each, 0), 0)
        following = top + stride + line // WIDTH
        behind, lengths = _bounds(offsets, following, following < rows, stored)
        total = tl.zeros([ROWS * WIDTH] if VECTORS == 1 else [ROWS * WIDTH, VECTORS], DTYPE)
        for step in tl.static_range(STEPS):
            total += _products(*near[step], x, vectors, x_row, x_column, first, ALIGNED, VECTORS)
        for start in range(STEPS * WIDTH, longest, WIDTH):
            far = start + lane
            found = _elements(values, columns, begin + far, far < length, count, DTYPE)
            total += _products(*found, x, vectors, x_row, x_column, first, ALIGNED, VECTORS)
        each = tl.reshape(total, [ROWS, WIDTH] if VECTORS == 1 else [ROWS, WIDTH, VECTORS])
        _put(out, tl.sum(each, 1), here, mine, vectors, first, VECTORS)
        top += stride


@triton.jit
def _enlist(listed, list_size, row, length, piece, ROWS: tl.constexpr):
    """Put pieces of long rows on the list. Places are taken in the order in which programs come;
    within a row pieces are in theirs."""
    AT_ONCE: tl.constexpr = 256 // ROWS if ROWS < 256 else 1
    length = length.to(tl.int64)
    pieces = tl.where(length > piece, (length + piece - 1) // piece, 0)
    place = tl.atomic_add(listed, tl.sum(pieces, 0), sem="relaxed")
    place += tl.cumsum(pieces, 0) - pieces
    for start in range(0, tl.max(pieces, 0), AT_ONCE):
        nth = start + tl.broadcast_to(tl.arange(0, AT_ONCE)[None, :], [ROWS, AT_ONCE])
        slot = place[:, None] + nth
        fits = (nth < pieces[:, None]) & (slot < list_size)
        tl.store(listed + 1 + slot, tl.broadcast_to(row[:, None], slot.shape), mask=fits)
        tl.store(listed + 1 + list_size + slot, nth.to(tl.int64), mask=fits)


@triton.jit
def _pieces_kernel(
    values, columns, offsets, x, partial, listed, list_size, stored, count, vectors, x_row,
    x_column, piece, DTYPE: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr,
    VECTORS: tl.constexpr,
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
            found = _elements(values, columns, begin + e, inside, count, DTYPE)
            total += _products(*found, x, vectors, x_row, x_column, first, ALIGNED, VECTORS)
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
            pieces = tl.minimum((length.to(tl.int64) + piece - 1) // piece, entries - entry)
            total = tl.zeros([BLOCK, VECTORS], DTYPE)
            for start in range(0, pieces, BLOCK):
                p = start + tl.arange(0, BLOCK)[:, None]
                there = (p < pieces) & (v < vectors)[None, :]
                total += tl.load(partial + (entry + p) * vectors + v, mask=there, other=0)
            sums = tl.sum(total, 0).to(out.dtype.element_ty)
            tl.store(out + row * vectors + v, sums, mask=v < vectors)


@dataclass(frozen=True)
class Config:
    """A tile: how many lanes take a row, how many elements each asks for at once, of all lanes
    together; and how many tiles a program does."""

    width: int
    steps: int
    elements: int
    tiles: int = 8


def config(rows: int, stored: int, vectors: int) -> Config:
    """Of a row of as many elements as there are on average, all are asked for at once. Short rows
    have few lanes with four elements each, as each lane reads where its row begins and ends; a warp
    is worth more than steps where it reads whole lines of memory."""
    mean = max(2, triton.next_power_of_2(triton.cdiv(stored, rows)))
    if vectors > 1:
        return Config(max(1, min(16, mean // 2)), 2, 512)
    steps = min(4, mean) if mean < 64 else min(4, mean // 32)
    return Config(min(32, mean // steps), steps, 1024)


def spmv(
    values: Tensor, columns: Tensor, offsets: Tensor, x: Tensor, *, balanced: bool = True,
    piece: int | None = None, settings: Config | None = None,
) -> Tensor:  # fmt: skip
    """x: [columns of A, k]. piece: elements of a long row's pieces."""
    rows, stored, vectors = offsets.shape[0] - 1, values.shape[0], x.shape[1]
    out = torch.empty(rows, vectors, dtype=values.dtype, device=values.device)
    if not out.numel():
        return out
    kind = accumulator(values.dtype, "sum")
    values, columns, offsets = values.contiguous(), columns.contiguous(), offsets.contiguous()
    at_once = min(VECTORS, triton.next_power_of_2(vectors))
    c = settings or config(rows, stored, at_once)
    piece = piece or max(PIECE, 32 * c.width)
    # A row of n elements, more than a piece, has less than 2 n / piece of them.
    list_size = 2 * (stored // piece) if balanced else 0
    listed = torch.empty(1 + 2 * list_size, dtype=torch.int64, device=values.device)
    listed[:1].zero_()
    groups = triton.cdiv(vectors, at_once)
    aligned = x.stride(1) == 1 and x.stride(0) % at_once == 0 and vectors % at_once == 0
    options = {"DTYPE": TYPES[kind], "VECTORS": at_once}
    reading = {"ALIGNED": aligned, **options}
    # Where all fits into so few registers, more programs wait for memory at a time.
    small = at_once == 1 and kind == torch.float32 and offsets.dtype == torch.int32
    tile = max(1, c.elements // c.width // c.steps)
    tiles = triton.cdiv(rows, tile)
    sizes = (stored, x.shape[0], vectors, *x.stride(), piece)
    with _on(values):
        _rows_kernel[(max(min(tiles, PROGRAMS), triton.cdiv(tiles, c.tiles)), groups)](
            values, columns, offsets, x, out, listed, list_size, rows, *sizes, CUT=list_size > 0,
            ROWS=tile, WIDTH=c.width, STEPS=c.steps, **reading, maxnreg=64 if small else None,
        )  # fmt: skip
        if list_size:
            partial = torch.empty(list_size, vectors, dtype=kind, device=values.device)
            _pieces_kernel[(min(list_size, PROGRAMS), groups)](
                values, columns, offsets, x, partial, listed, list_size, *sizes,
                BLOCK=min(1024, triton.next_power_of_2(piece)) // at_once, **reading,
            )  # fmt: skip
            _long_rows_kernel[(min(list_size, PROGRAMS), groups)](
                offsets, out, partial, listed, list_size, stored, vectors, piece,
                BLOCK=512 // at_once, **options,
            )  # fmt: skip
    return out
