"""The Fourier transform on a GPU, in Triton; see `fft.py`.

Nothing is told of strides and alignment to the compiler, on purpose: it would load 16 bytes a
thread, which is another arrangement of threads than that of the butterflies, and turn each load
around in shared memory. 8 bytes a thread, neighbours side by side, are whole lines of memory too.
"""

# ruff: noqa: RUF005 (Triton knows no starred tuples)
# mypy: disable-error-code="assignment"

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from billfish.kernels.general import _fft_plan as plan
from billfish.kernels.general._fft_memory import look_up, read, write
from billfish.kernels.general._fft_triton import (
    cosine,
    dft,
    digits,
    exchange,
    log2,
    mirrored,
    multiply,
    sine,
    slots,
)
from billfish.kernels.general.fft import FORMS, complex_type
from billfish.kernels.general.gpu import _on

_UNTOLD = {
    "do_not_specialize": ["n_in", "n_out", "limit", "tiles", "rows", "middles", "x_batch",
                          "in_middle", "in_row", "in_point", "out_batch", "out_middle", "out_row",
                          "out_point", "zero"],
    "do_not_specialize_on_alignment": ["x", "out", "table", "turns", "before", "after"],
}  # fmt: skip


@triton.jit
def _turned(re, im, table, b, STEP: tl.constexpr, R: tl.constexpr, WIDE: tl.constexpr):
    """Values r times w^r, where w^1, w^2, w^4, .. are read and the others products of those."""
    w_re, w_im = (re[0],), (im[0],)
    out_re, out_im = (re[0],), (im[0],)
    for r in tl.static_range(1, R):
        if r == slots(r):
            c, d = look_up(table + log2(r) * STEP * (2 if WIDE else 1), b, WIDE)
        else:
            other = w_re[r - slots(r) // 2], w_im[r - slots(r) // 2]
            c, d = multiply(w_re[slots(r) // 2], w_im[slots(r) // 2], other[0], other[1])
        w_re, w_im = w_re + (c,), w_im + (d,)
        a, e = multiply(re[r], im[r], c, d)
        out_re, out_im = out_re + (a,), out_im + (e,)
    return out_re, out_im


@triton.jit
def _passes(
    re, im, table, over, S: tl.constexpr, RADICES: tl.constexpr, DONE: tl.constexpr,
    AT: tl.constexpr, NEXT: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Passes NEXT and on. DONE: slots of the passes before the last; AT: where the roots are.
    over: [rows, 1, columns] of zeros, of which the compiler does not know. Else it would read the
    roots once for all rows, in an arrangement of threads of its own, and move the values to it."""
    if len(RADICES) == NEXT:
        return re, im
    else:
        R: tl.constexpr = RADICES[NEXT]
        NOW: tl.constexpr = DONE * slots(RADICES[NEXT - 1])
        re, im = exchange(re, im, S, DONE, RADICES[NEXT - 1], R)
        b = (tl.arange(0, S // slots(R)) % NOW)[None, :, None] + over
        if re[0].shape[2] > 1:
            b = tl.max_contiguous(b, [1, 1, re[0].shape[2]])
        re, im = _turned(re, im, table + AT * (2 if WIDE else 1), b, NOW, R, WIDE)
        re, im = dft(re, im, R)
        AFTER: tl.constexpr = AT + log2(slots(R)) * NOW
        return _passes(re, im, table, over, S, RADICES, NOW, AFTER, NEXT + 1, WIDE)


@triton.jit
def _unfolded(
    re, im, k, over, after, zero, N: tl.constexpr, RADICES: tl.constexpr, COUNT: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Twice the first N values of the transform of 2 N reals x, of Z: of x[2 j] + i x[2 j + 1].

    Evens have E[p] = (Z[p] + conj Z[N - p]) / 2, odds O[p] = (Z[p] - conj Z[N - p]) / 2i, and value
    p is E[p] + exp(-pi i p / N) O[p]. after: these roots.
    """
    R: tl.constexpr = RADICES[COUNT - 1]
    m_re, m_im = mirrored(re, im, k, zero, N, RADICES, COUNT)
    w_re, w_im = look_up(after, k % (N // R) + over, WIDE)
    out_re, out_im = (), ()
    for r in tl.static_range(R):
        c = w_re * cosine(r, 2 * R) + w_im * sine(r, 2 * R)
        d = w_im * cosine(r, 2 * R) - w_re * sine(r, 2 * R)
        o_re, o_im = multiply(im[r] + m_im[r], m_re[r] - re[r], c, d)
        out_re, out_im = out_re + (re[r] + m_re[r] + o_re,), out_im + (im[r] - m_im[r] + o_im,)
    return out_re, out_im


@triton.jit(**_UNTOLD)
def _fft_kernel(
    x, out, table, turns, before, after, n_in, n_out, limit, tiles, rows, middles,
    x_batch, in_middle, in_row, in_point, out_batch, out_middle, out_row, out_point, zero,
    N: tl.constexpr, S: tl.constexpr, RADICES: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, SCALE: tl.constexpr, READ: tl.constexpr, WRITE: tl.constexpr,
    WIDE: tl.constexpr, SWAP_IN: tl.constexpr, SWAP_OUT: tl.constexpr, BEFORE: tl.constexpr,
    AFTER: tl.constexpr, TURN: tl.constexpr, FOLDED: tl.constexpr,
):  # fmt: skip
    """A tile of transforms of N points, in S slots: [ROWS, points, 1], which follow each other in
    memory, or, of a split one, [1, points, COLUMNS], which lie side by side.

    Program (tile, middle, batch). Point p of a row is at middle in_middle + row in_row + p in_point
    of its batch entry; of ROWS, each is an entry, and its points are side by side. TURN: times
    exp(-2 pi i row k / m), of which `turns` has the values (`_fft_plan.turns`). FOLDED: the points
    are pairs of 2 N reals, of whose transform the first half is written; `after` is the roots that
    unfold it. zero: 0, of which the compiler does not know, see `_passes`.

    That columns are side by side is said of both ends, where it may be so of one only: it decides
    which values neighbouring threads take, which has to be the same all through.
    """
    COUNT: tl.constexpr = len(RADICES)
    FIRST: tl.constexpr = RADICES[0]
    LAST: tl.constexpr = RADICES[COUNT - 1]
    program = tl.program_id(0)
    tile = program % tiles
    middle = (program // tiles % middles).to(tl.int64)
    batch = (program // tiles // middles).to(tl.int64)
    row = tl.arange(0, ROWS)[:, None, None] + tl.arange(0, COLUMNS)[None, None, :]
    row = tile.to(tl.int64) * (ROWS * COLUMNS) + row
    there = row < rows
    entry = batch if COLUMNS > 1 else row
    source = x + entry * x_batch * (2 if WIDE and READ != "real" else 1)
    target = out + entry * out_batch * (2 if WIDE and WRITE != "real" else 1)
    j, point = digits(tl.arange(0, S // slots(FIRST)), RADICES, COUNT - 1, False, COUNT - 1)
    j, inside = j[None, :, None], there & point[None, :, None]
    re, im = (), ()
    for r in tl.static_range(FIRST):
        place = row * 0 + j + r * (N // FIRST)
        if COLUMNS > 1:
            place = middle * in_middle + row * in_row + place * in_point
            place = tl.max_contiguous(place, [1, 1, COLUMNS])
        a, b = read(source, place, inside, n_in, limit, before, READ, WIDE, SWAP_IN, BEFORE)
        re, im = re + (a,), im + (b,)
    re, im = dft(re, im, FIRST)
    over = (row * zero).to(tl.int32)
    re, im = _passes(re, im, table, over, S, RADICES, 1, 0, 1, WIDE)
    k, point = digits(tl.arange(0, S // slots(LAST)), RADICES, 0, True, COUNT - 1)
    k, inside = k[None, :, None], there & point[None, :, None]
    if FOLDED:
        last = 2 * (re[0] - im[0])
        re, im = _unfolded(re, im, k, over, after, zero, N, RADICES, COUNT, WIDE)
        write(target, row * 0 + N + k, inside & (k == 0), last, last * 0, n_out, after, SCALE,
               WRITE, WIDE, SWAP_OUT, False)  # fmt: skip
    for r in tl.static_range(LAST):
        a, b = re[r], im[r]
        place = row * 0 + k + r * (N // LAST)
        if TURN:
            turn = (row * place).to(tl.int32)  # below m
            c, d = look_up(turns, tl.max_contiguous(turn % 1024, [1, 1, COLUMNS]), WIDE)
            turn = 1024 + turn // 1024
            e, f = look_up(turns, tl.max_contiguous(turn, [1, 1, COLUMNS]), WIDE)
            c, d = multiply(c, d, e, f)
            a, b = multiply(a, b, c, d)
        if COLUMNS > 1:
            place = middle * out_middle + row * out_row + place * out_point
            place = tl.max_contiguous(place, [1, 1, COLUMNS])
        write(target, place, inside, a, b, n_out, after, SCALE, WRITE, WIDE, SWAP_OUT, AFTER)


@triton.jit(**_UNTOLD)
def _stage_kernel(
    x, out, table, before, after, n_in, n_out, limit, tiles, x_batch, out_batch, n, done, at,
    R: tl.constexpr, BLOCK: tl.constexpr, SCALE: tl.constexpr, READ: tl.constexpr,
    WRITE: tl.constexpr, WIDE: tl.constexpr, SWAP_IN: tl.constexpr, SWAP_OUT: tl.constexpr,
    BEFORE: tl.constexpr, AFTER: tl.constexpr, ALONE: tl.constexpr,
):  # fmt: skip
    """One pass of radix R of a transform of n points, from memory to memory; done: the product of
    the radices before. ALONE: it is the first. Program (tile, row): BLOCK butterflies."""
    program = tl.program_id(0)
    row = (program // tiles).to(tl.int64)
    source = x + row * x_batch * (2 if WIDE and READ != "real" else 1)
    target = out + row * out_batch * (2 if WIDE and WRITE != "real" else 1)
    j = program % tiles * BLOCK + tl.arange(0, BLOCK)
    inside = j < n // R
    re, im = (), ()
    for r in tl.static_range(R):
        a, b = read(
            source, j + r * (n // R), inside, n_in, limit, before, READ, WIDE, SWAP_IN, BEFORE
        )
        re, im = re + (a,), im + (b,)
    if not ALONE:
        re, im = _turned(re, im, table + at * (2 if WIDE else 1), j % done, done, R, WIDE)
    re, im = dft(re, im, R)
    first = (j // done) * (done * R) + j % done
    for r in tl.static_range(R):
        write(
            target, first + r * done, inside, re[r], im[r], n_out, after, SCALE, WRITE, WIDE,
            SWAP_OUT, AFTER,
        )  # fmt: skip


@dataclass(frozen=True)
class _End:
    """One end of a transform: how a row is laid in memory, and what is done with its values.

    kind: complex, real or half. n: its points; limit: how many of its values are there. swap: of
    the parts. table: what the values are multiplied by, between swap and transform.
    """

    data: Tensor
    kind: str
    n: int
    limit: int = 0
    swap: bool = False
    table: Tensor | None = None

    def pointer(self) -> Tensor:
        return self.data if self.kind == "real" else _words(self.data)


def _words(values: Tensor) -> Tensor:
    """Complex values as the kernels read them: whole, as integers, or as pairs of float64."""
    return values.view(torch.int64 if values.dtype == torch.complex64 else torch.float64)


def _switches(source: _End, target: _End, scale: float, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "SCALE": scale, "READ": source.kind, "WRITE": target.kind,
        "WIDE": dtype == torch.complex128, "SWAP_IN": source.swap, "SWAP_OUT": target.swap,
        "BEFORE": source.table is not None, "AFTER": target.table is not None,
    }  # fmt: skip


def _launch(
    source: _End, target: _End, scale: float, n: int, dtype: torch.dtype, *,
    batch: int, rows: int, middles: int = 1, at: tuple[int, ...] = (0, 0, 1, 0, 0, 1),
    turn: int = 0, columns: int = 1, folded: bool = False,
) -> None:  # fmt: skip
    """at: strides of (middle, row, point) of the source, then of the target. turn: see TURN."""
    device = source.data.device
    passes = plan.table(n, dtype, device)
    roots = _words(passes.roots)
    # As many threads as butterflies of the widest pass, so that none holds less than one.
    threads = passes.slots // max(map(plan.slots, passes.radices)) * columns
    in_tile = 1 if columns > 1 else max(1, 64 // threads)
    tiles = triton.cdiv(rows, columns if columns > 1 else in_tile)
    turns = _words(plan.turns(turn, dtype, device)) if turn else roots
    before = roots if source.table is None else _words(source.table)
    after = roots if target.table is None else _words(target.table)
    switches = _switches(source, target, scale, dtype)
    if folded:
        switches |= {"AFTER": False, "SCALE": scale / 2}
    _fft_kernel[(tiles * middles * batch,)](
        source.pointer(), target.pointer(), roots, turns, before, after, source.n, target.n,
        source.limit, tiles, rows, middles, source.data.stride(0), *at[:3],
        target.data.stride(0), *at[3:], 0, N=n, S=passes.slots, RADICES=passes.radices,
        ROWS=in_tile, COLUMNS=columns, TURN=turn > 0, FOLDED=folded, **switches,
        num_warps=max(1, threads * in_tile // 32),
    )  # fmt: skip


def _stages(source: _End, target: _End, scale: float, n: int, dtype: torch.dtype) -> None:
    """The switched-off technique: a launch for each pass."""
    batch, device = source.data.shape[0], source.data.device
    radices = plan.table(n, dtype, device).radices
    roots, done, at = _words(plan.unpadded(n, dtype, device)), 1, 0
    for i, radix in enumerate(radices):
        last = i == len(radices) - 1
        data = target.data if last else torch.empty(batch, n, dtype=dtype, device=device)
        into = target if last else _End(data, "complex", n)
        before = roots if source.table is None else _words(source.table)
        after = roots if into.table is None else _words(into.table)
        block = min(1024, triton.next_power_of_2(n // radix))
        tiles = triton.cdiv(n // radix, block)
        _stage_kernel[(tiles * batch,)](
            source.pointer(), into.pointer(), roots, before, after, source.n, into.n,
            source.limit, tiles, source.data.stride(0), into.data.stride(0), n, done, at,
            R=radix, BLOCK=block, ALONE=i == 0,
            **_switches(source, into, scale if last else 1.0, dtype),
        )  # fmt: skip
        if i:
            at += done * (radix - 1).bit_length()
        done *= radix
        source = _End(data, "complex", n, limit=n)


def _transform(
    source: _End, target: _End, scale: float, n: int, dtype: torch.dtype, fused: bool, limit: int
) -> None:
    """A forward transform of n points, which is split or needs not be."""
    batch, device = source.data.shape[0], source.data.device
    if not fused:
        return _stages(source, target, scale, n, dtype)
    sizes = plan.split(n, limit)
    if len(sizes) == 1:
        return _launch(source, target, scale, n, dtype, batch=1, rows=batch)
    columns = plan.COLUMNS
    a, rest = sizes[0], n // sizes[0]
    between = _End(torch.empty(batch, n, dtype=dtype, device=device), "complex", n, n)
    aside = (0, 1, rest, 0, 1, rest)
    _launch(
        source, between, 1.0, a, dtype, batch=batch, rows=rest, at=aside, turn=n, columns=columns
    )
    if len(sizes) == 2:
        at: tuple[int, ...] = (0, rest, 1, 0, 1, a)
        return _launch(
            between, target, scale, rest, dtype, batch=batch, rows=a, at=at, columns=columns
        )
    b, c = sizes[1:]
    again = replace(between, data=torch.empty_like(between.data))
    _launch(
        between, again, 1.0, b, dtype, batch=batch, rows=c, middles=a,
        at=(rest, 1, c, rest, 1, c), turn=rest, columns=columns,
    )  # fmt: skip
    at = (c, rest, 1, a, 1, a * b)
    return _launch(
        again, target, scale, c, dtype, batch=batch, rows=a, middles=b, at=at, columns=columns
    )


def _bluestein(
    source: _End, target: _End, scale: float, n: int, dtype: torch.dtype, fused: bool, limit: int
) -> None:
    """Any n, as a convolution with a chirp (Bluestein, 1970), by two transforms of another size.

    The second is the inverse one: the first swaps the parts of what it writes, and a swap of the
    result times the chirp is the swap of the result times its conjugate.
    """
    values, spectrum = plan.chirp(n, dtype, source.data.device)
    m = plan.convolution_size(n)
    data = torch.empty(source.data.shape[0], m, dtype=dtype, device=source.data.device)
    between = _End(data, "complex", m, m, swap=True, table=spectrum / m)
    _transform(replace(source, table=values), between, 1.0, m, dtype, fused, limit)
    back = replace(target, swap=not target.swap, table=values.conj().resolve_conj())
    between = _End(data, "complex", m, m)
    _transform(between, back, scale, m, dtype, fused, limit)


def _folded(x: Tensor, target: _End, scale: float, n: int, dtype: torch.dtype) -> None:
    """The first half of the transform of n reals, by a transform of n / 2 points."""
    half = -(-min(x.shape[1], n) // 2)
    if x.shape[1] != 2 * half or x.data_ptr() % dtype.itemsize:
        # Rows of pairs, each where it can be read at once.
        x = torch.nn.functional.pad(x, (0, 2 * half - x.shape[1])).contiguous()
    values = torch.view_as_complex(x.view(x.shape[0], half, 2))
    source = _End(values, "complex", n // 2, half)
    target = replace(target, table=plan.unfolding(n, dtype, x.device))
    _launch(source, target, scale, n // 2, dtype, batch=1, rows=x.shape[0], folded=True)


def fft(
    x: Tensor, n: int, kind: str, scale: float, *, fused: bool = True, folded: bool = True,
    limit: int | None = None,
) -> Tensor:  # fmt: skip
    """x: [batch, m]. folded: rfft takes pairs of reals as complex values, half as many, where n is
    even, one launch transforms them, and x needs no conversion. limit: slots of a row that one
    launch transforms."""
    form = FORMS[kind]
    dtype = complex_type(x.dtype)
    out = torch.empty(x.shape[0], form.points(n), dtype=form.result(dtype), device=x.device)
    if not out.numel():
        return out
    values = x.contiguous().resolve_conj().resolve_neg()
    reads = "half" if form.half_in else "complex" if x.is_complex() else "real"
    writes = "half" if form.half_out else "real" if form.half_in else "complex"
    source = _End(values, reads, n, min(x.shape[1], n), swap=form.inverse)
    target = _End(out, writes, n, swap=form.inverse)
    limit = limit or plan.LIMIT[dtype]
    if kind == "rfft" and x.dtype == dtype.to_real() and fused and folded:
        half = n // 2
        if n % 2 == 0 and plan.split(half, limit) == (half,):
            with _on(x):
                _folded(values, target, scale, n, dtype)
            return out
    run = _transform if plan.split(n, limit) else _bluestein
    with _on(x):
        run(source, target, scale, n, dtype, fused, limit)
    return out
