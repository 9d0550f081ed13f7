"""The radix sort on a GPU, in Triton; see `sort.py`."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from billfish.kernels.general._arguments import FLOATS
from billfish.kernels.general._triton import AGGREGATE, PREFIX, _read, publish
from billfish.kernels.general.gpu import _on
from billfish.kernels.general.scan_gpu import scan

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_INFINITY = {torch.float64: 0x7FF << 52, torch.float32: 0xFF << 23, torch.bfloat16: 0xFF << 7,
             torch.float16: 0x1F << 10}  # fmt: skip

DIGITS: tl.constexpr = tl.constexpr(256)
WARPS = 8
STRETCH = 2048
"""Keys that a warp takes, at most: eight times that is a tile."""

TILES = 1024
"""Tiles for which stretches are shortened, where there are fewer keys: some for each
multiprocessor."""

PROGRAMS = 1024
"""Programs that count the digits of all passes, at most."""


@triton.jit
def _digit(
    key, shift, FLOAT: tl.constexpr, SIGN: tl.constexpr, INFINITY: tl.constexpr,
    DESCENDING: tl.constexpr,
):  # fmt: skip
    """8 bits of what keys are ordered by. SIGN: the value of the highest bit, 0 where unsigned."""
    if key.dtype.primitive_bitwidth == 64:
        bits = key.to(tl.uint64, bitcast=True)
    elif key.dtype.primitive_bitwidth == 32:
        bits = key.to(tl.uint32, bitcast=True)
    elif key.dtype.primitive_bitwidth == 16:
        bits = key.to(tl.uint16, bitcast=True).to(tl.uint32)
    else:
        bits = key.to(tl.uint8, bitcast=True).to(tl.uint32)
    if FLOAT:
        size = bits & (SIGN - 1)
        order = tl.where(bits >= SIGN, (2 * SIGN - 1) - bits, bits | SIGN)
        order = tl.where(size > INFINITY, 2 * SIGN - 1, order)
        bits = tl.where(size == 0, SIGN, order).to(bits.dtype)
    elif SIGN > 0:
        bits = bits ^ SIGN
    digit = ((bits >> shift) & 255).to(tl.int32)
    if DESCENDING:
        digit = 255 - digit
    return digit


@triton.jit
def _ones(word):
    """How many bits of an int32 are set (Hacker's Delight, 5-1)."""
    x = word.to(tl.uint32, bitcast=True)
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return ((x * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def _tally(digit, there, lane, d):
    """(how many lower lanes of its row have a key's digit [W, 32], how many lanes of a row have
    each digit [W, 256]).

    A row's votes on a bit are the sum of its bits, each in the place of its lane. A word that has
    the votes for bits that are 1 and their complement for bits that are 0, all bits together, has
    the lanes of that digit.
    """
    votes = tl.sum(tl.where(there, 1 << lane, 0), 1)[:, None]
    equals = votes + tl.zeros_like(digit)
    holders = votes + tl.zeros_like(d)
    for b in tl.static_range(8):
        bit = (digit >> b) & 1
        votes = tl.sum(tl.where(there, bit << lane, 0), 1)[:, None]
        equals &= votes ^ (bit - 1)
        holders &= votes ^ (((d >> b) & 1) - 1)
    return _ones(equals & ((1 << lane) - 1)), _ones(holders)


@triton.jit
def _count(
    keys, begin, end, stretch, shift, FLOAT: tl.constexpr, SIGN: tl.constexpr,
    INFINITY: tl.constexpr, DESCENDING: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Digits of each warp's stretch of a tile that begins at key `begin`: [WARPS, 256]."""
    lane = tl.arange(0, 32)[None, :]
    d = tl.arange(0, DIGITS)[None, :]
    first = begin + tl.arange(0, WARPS)[:, None] * stretch + lane
    counts = tl.zeros([WARPS, DIGITS], tl.int32)
    key = tl.load(keys + first, mask=first < end, other=0)
    for start in range(0, stretch, 32):
        i = first + start
        # The next keys are on their way while these are counted.
        coming = tl.load(keys + i + 32, mask=(i + 32 < end) & (start + 32 < stretch), other=0)
        digit = _digit(key, shift, FLOAT, SIGN, INFINITY, DESCENDING)
        counts += _tally(digit, i < end, lane, d + tl.zeros([WARPS, 1], tl.int32))[1]
        key = coming
    return counts


@triton.jit
def _look_back(state, first, tile, d):
    """How many keys the tiles first..tile - 1 have of each digit.

    Tile by tile, for all digits whose prefix has not been met; it is met at `first` at the latest.
    """
    before = tl.zeros([DIGITS], tl.int32)
    wanted = tl.full([DIGITS], 1, tl.int32)
    nearest = tile - 1
    going = nearest >= first
    while going:
        word = _read(state + nearest * DIGITS + d, wanted == 1)
        status = (word >> 32).to(tl.int32)
        ready = tl.min(status, 0) > 0
        before += tl.where(ready & (wanted == 1), word.to(tl.int32), 0)
        wanted = tl.where(ready & (status == PREFIX), 0, wanted)
        nearest = tl.where(ready, nearest - 1, nearest)
        going = tl.max(wanted, 0) > 0
    return before


@triton.jit
def _move(
    keys, values, out, values_out, place, begin, end, stretch, shift, FLOAT: tl.constexpr,
    SIGN: tl.constexpr, INFINITY: tl.constexpr, DESCENDING: tl.constexpr, PAIRS: tl.constexpr,
    WARPS: tl.constexpr,
):  # fmt: skip
    """place: [WARPS, 256], where the first key of each digit of each stretch goes."""
    lane = tl.arange(0, 32)[None, :]
    d = tl.arange(0, DIGITS)[None, :]
    first = begin + tl.arange(0, WARPS)[:, None] * stretch + lane
    key = tl.load(keys + first, mask=first < end, other=0)
    if PAIRS:
        value = tl.load(values + first, mask=first < end, other=0)
    for start in range(0, stretch, 32):
        i = first + start
        next = (i + 32 < end) & (start + 32 < stretch)
        coming = tl.load(keys + i + 32, mask=next, other=0)
        if PAIRS:
            value_coming = tl.load(values + i + 32, mask=next, other=0)
        digit = _digit(key, shift, FLOAT, SIGN, INFINITY, DESCENDING)
        rank, counts = _tally(digit, i < end, lane, d + tl.zeros([WARPS, 1], tl.int32))
        # Flat, or the compiler would exchange them between threads to write another way.
        own = tl.reshape(digit + tl.arange(0, WARPS)[:, None] * DIGITS, [WARPS * 32])
        to = tl.gather(tl.reshape(place, [WARPS * DIGITS]), own, 0)
        to += tl.reshape(rank, [WARPS * 32])
        there = tl.reshape(i < end, [WARPS * 32])
        tl.store(out + to, tl.reshape(key, [WARPS * 32]), mask=there)
        if PAIRS:
            tl.store(values_out + to, tl.reshape(value, [WARPS * 32]), mask=there)
            value = value_coming
        place += counts
        key = coming


@triton.jit
def _pass_kernel(
    keys, values, out, values_out, begins, state, ticket, n, tiles, stretch, shift, begins_row,
    FLOAT: tl.constexpr, SIGN: tl.constexpr, INFINITY: tl.constexpr, DESCENDING: tl.constexpr,
    PAIRS: tl.constexpr, ALONE: tl.constexpr, ONE_SWEEP: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Tile t is the (t % tiles)-th of row t // tiles. ALONE: each row is one tile.

    begins: int64, where each digit of a row begins [rows, 256]; without ONE_SWEEP, where each digit
    of each tile does [rows, 256, tiles].
    """
    tile = tl.program_id(0).to(tl.int64)
    if ONE_SWEEP and not ALONE:
        tile = tl.atomic_add(ticket, 1, sem="relaxed")
    row, nth = tile // tiles, tile % tiles
    begin = nth * WARPS * stretch
    d = tl.arange(0, DIGITS)
    counts = _count(
        keys + row * n, begin, n, stretch, shift, FLOAT, SIGN, INFINITY, DESCENDING, WARPS
    )
    total = tl.sum(counts, 0)
    if ALONE:
        place = tl.cumsum(total, 0) - total
    elif ONE_SWEEP:
        place = tl.load(begins + row * begins_row + d).to(tl.int32)
        before = tl.zeros([DIGITS], tl.int32)
        if nth > 0:
            publish(state, tile * DIGITS + d, total, AGGREGATE)
            before = _look_back(state, row * tiles, tile, d)
        publish(state, tile * DIGITS + d, before + total, PREFIX)
        place += before
    else:
        place = tl.load(begins + row * begins_row + d * tiles + nth).to(tl.int32)
    stretches = place[None, :] + tl.cumsum(counts, 0) - counts
    _move(
        keys + row * n, values + row * n, out + row * n, values_out + row * n, stretches, begin, n,
        stretch, shift, FLOAT, SIGN, INFINITY, DESCENDING, PAIRS, WARPS,
    )  # fmt: skip


@triton.jit
def _count_kernel(
    keys, counts, n, tiles, stretch, shift, FLOAT: tl.constexpr, SIGN: tl.constexpr,
    INFINITY: tl.constexpr, DESCENDING: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """counts: int32 [rows, 256, tiles], of a pass."""
    tile = tl.program_id(0).to(tl.int64)
    row, nth = tile // tiles, tile % tiles
    found = _count(
        keys + row * n, nth * WARPS * stretch, n, stretch, shift, FLOAT, SIGN, INFINITY,
        DESCENDING, WARPS,
    )  # fmt: skip
    d = tl.arange(0, DIGITS)
    tl.store(counts + (row * DIGITS + d) * tiles + nth, tl.sum(found, 0))


@triton.jit
def _all_digits_kernel(
    keys, counts, n, run, runs, FLOAT: tl.constexpr, SIGN: tl.constexpr, INFINITY: tl.constexpr,
    DESCENDING: tl.constexpr, PASSES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """counts: int64 [PASSES, rows, 256], 0 at the start. A program counts a run of a row's keys."""
    program = tl.program_id(0).to(tl.int64)
    row = program // runs
    rows = tl.num_programs(0) // runs
    begin = (program % runs) * run
    end = tl.minimum(begin + run, n)
    d = tl.arange(0, DIGITS)
    keys += row * n
    for p in tl.static_range(PASSES):
        found = tl.zeros([DIGITS], tl.int32)
        for start in range(begin, end, BLOCK):
            i = start + tl.arange(0, BLOCK)
            key = tl.load(keys + i, mask=i < end, other=0)
            digit = _digit(key, 8 * p, FLOAT, SIGN, INFINITY, DESCENDING)
            found += tl.histogram(digit, DIGITS, mask=i < end)
        place = counts + (p * rows + row) * DIGITS + d
        tl.atomic_add(place, found.to(tl.int64), mask=found > 0, sem="relaxed")


def sort(keys: Tensor, descending: bool, *, one_sweep: bool = True) -> Tensor:
    """keys: [rows, n]."""
    return _sorted(keys, None, descending, one_sweep)[0]


def sort_pairs(
    keys: Tensor, values: Tensor, descending: bool, *, one_sweep: bool = True
) -> tuple[Tensor, Tensor]:
    """keys, values: [rows, n]."""
    return _sorted(keys, values, descending, one_sweep)


def _sorted(
    keys: Tensor, values: Tensor | None, descending: bool, one_sweep: bool
) -> tuple[Tensor, Tensor]:
    rows, n = keys.shape
    pairs = values is not None
    moving = [x.contiguous().view(_BITS[x.dtype.itemsize]) for x in (keys, values) if x is not None]
    if not keys.numel():
        return torch.empty_like(keys), torch.empty_like(keys if values is None else values)
    size = keys.dtype.itemsize
    sign = 0 if keys.dtype == torch.uint8 else 1 << (8 * size - 1)
    kind: dict[str, Any] = {
        "FLOAT": keys.dtype in FLOATS, "SIGN": sign, "DESCENDING": descending,
        "INFINITY": _INFINITY.get(keys.dtype, 0),
    }  # fmt: skip
    wanted = triton.next_power_of_2(triton.cdiv(rows * n, TILES * WARPS))
    stretch = min(STRETCH, max(32, min(wanted, triton.next_power_of_2(triton.cdiv(n, WARPS)))))
    tiles = triton.cdiv(n, stretch * WARPS)
    # Each pass reads what the last one wrote; the caller's tensors are only read.
    pools = [[torch.empty_like(x) for _ in range(min(size, 2))] for x in moving]
    with _on(keys):
        alone = tiles == 1  # its digits are all there are
        begins, states = (
            _prepared(moving[0], tiles, size, kind) if one_sweep and not alone else (None, None)
        )
        where = state = torch.empty(1, dtype=torch.int64, device=keys.device)
        source = moving
        for p in range(size):
            target = [pool[p % len(pool)] for pool in pools]
            row_size = 256 if one_sweep else 256 * tiles
            if begins is not None and states is not None:
                where, state = begins[p], states[p]
            elif not alone:
                where = state = _begins_of_tiles(source[0], tiles, stretch, 8 * p, kind)
            _pass_kernel[(rows * tiles,)](
                source[0], source[-1], target[0], target[-1], where, state, state[-1:], n, tiles,
                stretch, 8 * p, row_size, PAIRS=pairs, ALONE=alone,
                ONE_SWEEP=one_sweep, WARPS=WARPS,
                num_warps=WARPS, **kind,
            )  # fmt: skip
            source = target
    last = source[-1] if values is None else source[-1].view(values.dtype)
    return source[0].view(keys.dtype), last


def _prepared(keys: Tensor, tiles: int, passes: int, kind: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """(where the digits of each pass begin [passes, rows, 256], its tiles' states and ticket)."""
    rows, n = keys.shape
    counts = torch.zeros(passes, rows, 256, dtype=torch.int64, device=keys.device)
    block = min(2048, max(256, triton.next_power_of_2(n)))
    runs = max(1, min(PROGRAMS // rows, triton.cdiv(n, block)))
    run = triton.cdiv(triton.cdiv(n, runs), block) * block
    runs = triton.cdiv(n, run)
    _all_digits_kernel[(rows * runs,)](
        keys, counts, n, run, runs, PASSES=passes, BLOCK=block, num_warps=8, **kind
    )
    begins = counts.cumsum(2).sub_(counts)
    return begins, torch.zeros(
        passes, rows * tiles * 256 + 1, dtype=torch.int64, device=keys.device
    )


def _begins_of_tiles(
    keys: Tensor, tiles: int, stretch: int, shift: int, kind: dict[str, Any]
) -> Tensor:
    """Where each digit of each tile begins: a launch that counts, and one that adds up."""
    rows, n = keys.shape
    counts = torch.empty(rows, 256 * tiles, dtype=torch.int32, device=keys.device)
    _count_kernel[(rows * tiles,)](
        keys, counts, n, tiles, stretch, shift, WARPS=WARPS, num_warps=WARPS, **kind
    )
    return scan(counts, True, "sum", False)
