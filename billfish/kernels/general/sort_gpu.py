"""The radix sort on a GPU, in Triton; see `sort.py`."""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from billfish.kernels.general._arguments import BITS, FLOATS
from billfish.kernels.general._ptx import split, tally
from billfish.kernels.general._ptx_look_back import DIGITS_AT_ONCE, look_back_at_digits
from billfish.kernels.general._triton import AGGREGATE, PREFIX, _read, publish
from billfish.kernels.general.gpu import _on
from billfish.kernels.general.scan_gpu import scan

_INFINITY = {torch.float64: 0x7FF << 52, torch.float32: 0xFF << 23, torch.bfloat16: 0xFF << 7,
             torch.float16: 0x1F << 10}  # fmt: skip

DIGITS: tl.constexpr = tl.constexpr(256)

WARPS, ITEMS = 8, 16
"""Warps of a program, one for every 32 digits, and keys of a thread, at most: their product times
32 is a tile. What is declared in PTX and what Triton takes for itself have to fit into 48 KiB of
shared memory: Triton asks for more by its own part alone."""

REGISTERS = 80
"""Of a thread: some spill a few, and three programs share a multiprocessor instead of two."""

TILES = 1024
"""Tiles for which tiles are made smaller, where there are fewer keys: some for each
multiprocessor."""

PROGRAMS = 1024
"""Programs that count the digits of all passes, at most."""

MANY = 1 << 24
"""Keys from which one launch for every 8 bits is faster than three, where more than a word moves
with each: a tile waits for those before it, and three launches read twice, though keys alone."""


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
def _words(x):
    """Bits as one or two int32."""
    if x.dtype.primitive_bitwidth == 64:
        return x.to(tl.int32), (x >> 32).to(tl.int32)
    else:
        return (x.to(tl.int32),)


@triton.jit
def _joined(low, high):
    return (high.to(tl.int64) << 32) | (low.to(tl.int64) & 0xFFFFFFFF)


@triton.jit
def _run(words, PTX: tl.constexpr, CONSTRAINTS: tl.constexpr, ITEMS: tl.constexpr):
    if len(words) == 3:
        return tl.inline_asm_elementwise(
            PTX, CONSTRAINTS, words, dtype=(tl.int32, tl.int32), is_pure=False, pack=ITEMS
        )
    elif len(words) == 4:
        return tl.inline_asm_elementwise(
            PTX, CONSTRAINTS, words, dtype=(tl.int32, tl.int32, tl.int32), is_pure=False,
            pack=ITEMS,
        )  # fmt: skip
    elif len(words) == 5:
        return tl.inline_asm_elementwise(
            PTX, CONSTRAINTS, words, dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=False, pack=ITEMS,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            PTX, CONSTRAINTS, words, dtype=(tl.int32, tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=False, pack=ITEMS,
        )  # fmt: skip


@triton.jit
def _split(
    digit, slot, key, value, PAIRS: tl.constexpr, PTX: tl.constexpr, CONSTRAINTS: tl.constexpr,
    ITEMS: tl.constexpr,
):  # fmt: skip
    """(how many keys have the digit that is a slot's number, keys in the order of their digits,
    their values): of a tile."""
    if PTX is not None:
        WIDE: tl.constexpr = key.dtype.primitive_bitwidth == 64
        WIDE_VALUE: tl.constexpr = value.dtype.primitive_bitwidth == 64
        words = (slot, digit)
        words += _words(key)
        if PAIRS:
            words += _words(value)
        moved = _run(words, PTX, CONSTRAINTS, ITEMS)
        keys = _joined(moved[1], moved[2]) if WIDE else moved[1].to(key.dtype)
        values = value
        if PAIRS:
            first: tl.constexpr = 3 if WIDE else 2
            if WIDE_VALUE:
                values = _joined(moved[first], moved[first + 1])
            else:
                values = moved[first].to(value.dtype)
        return moved[0], keys, values
    else:
        mine, other = digit[:, None], digit[None, :]
        first = (other < mine) | ((other == mine) & (slot[None, :] < slot[:, None]))
        comes = tl.sum(first.to(tl.int32), 1)[None, :] == slot[:, None]
        counts = tl.sum((other == slot[:, None]).to(tl.int32), 1)
        keys = tl.sum(tl.where(comes, key[None, :], 0), 1).to(key.dtype)
        return counts, keys, tl.sum(tl.where(comes, value[None, :], 0), 1).to(value.dtype)


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


@triton.jit(do_not_specialize=["step"])
def _pass_kernel(
    keys, values, out, values_out, begins, state, ticket, n, tiles, shift, begins_row, step,
    FLOAT: tl.constexpr, SIGN: tl.constexpr, INFINITY: tl.constexpr, DESCENDING: tl.constexpr,
    PAIRS: tl.constexpr, ALONE: tl.constexpr, ONE_SWEEP: tl.constexpr, TILE: tl.constexpr,
    PTX: tl.constexpr, CONSTRAINTS: tl.constexpr, BACK: tl.constexpr, ITEMS: tl.constexpr,
):  # fmt: skip
    """Tile t is the (t % tiles)-th of row t // tiles. ALONE: each row is one tile.

    begins: int64, where each digit of a row begins [rows, 256]; without ONE_SWEEP, where each digit
    of each tile does [rows, 256, tiles]. step is 1, unknown to the compiler, which would give a
    thread several neighbours if it knew, and then exchange them.
    """
    tile = tl.program_id(0).to(tl.int64)
    if ONE_SWEEP and not ALONE:
        tile = tl.atomic_add(ticket, 1, sem="relaxed")
    row, nth = tile // tiles, tile % tiles
    begin = row * n + nth * TILE
    size = tl.minimum(n - nth * TILE, TILE).to(tl.int32)
    slot = tl.arange(0, TILE)
    there = slot < size
    key = tl.load(keys + begin + slot * step, mask=there, other=0)
    value = key
    if PAIRS:
        value = tl.load(values + begin + slot * step, mask=there, other=0)
    # What is not there comes last.
    digit = tl.where(there, _digit(key, shift, FLOAT, SIGN, INFINITY, DESCENDING), DIGITS - 1)
    counts, key, value = _split(digit, slot, key, value, PAIRS, PTX, CONSTRAINTS, ITEMS)
    to = slot
    if not ALONE:
        d = tl.arange(0, DIGITS)
        total = tl.gather(counts, d, 0)
        total -= tl.where(d == DIGITS - 1, TILE - size, 0)
        if ONE_SWEEP:
            place = tl.load(begins + row * begins_row + d).to(tl.int32)
            before = tl.zeros([DIGITS], tl.int32)
            if nth > 0:
                publish(state, tile * DIGITS + d, total, AGGREGATE)
                if PTX is not None:
                    before = tl.inline_asm_elementwise(
                        BACK, "=r,l", [state + (tile - 1) * DIGITS + d], dtype=tl.int32,
                        is_pure=False, pack=1,
                    )  # fmt: skip
                else:
                    before = _look_back(state, row * tiles, tile, d)
            publish(state, tile * DIGITS + d, before + total, PREFIX)
            place += before
        else:
            place = tl.load(begins + row * begins_row + d * tiles + nth).to(tl.int32)
        # Of keys of one digit, the first is at its cumulative count in the tile.
        place -= tl.cumsum(total, 0) - total
        to = slot + tl.gather(place, _digit(key, shift, FLOAT, SIGN, INFINITY, DESCENDING), 0)
    tl.store(out + row * n + to, key, mask=there)
    if PAIRS:
        tl.store(values_out + row * n + to, value, mask=there)


@triton.jit(do_not_specialize=["step"])
def _count_kernel(
    keys, counts, n, tiles, shift, step, FLOAT: tl.constexpr, SIGN: tl.constexpr,
    INFINITY: tl.constexpr, DESCENDING: tl.constexpr, TILE: tl.constexpr, PTX: tl.constexpr,
    CONSTRAINTS: tl.constexpr, ITEMS: tl.constexpr,
):  # fmt: skip
    """counts: int32 [rows, 256, tiles], of a pass."""
    tile = tl.program_id(0).to(tl.int64)
    row, nth = tile // tiles, tile % tiles
    slot = tl.arange(0, TILE)
    there = slot < n - nth * TILE
    key = tl.load(keys + row * n + nth * TILE + slot * step, mask=there, other=0)
    digit = _digit(key, shift, FLOAT, SIGN, INFINITY, DESCENDING)
    if PTX is not None:
        found = tl.inline_asm_elementwise(
            PTX, CONSTRAINTS, [slot, tl.where(there, digit, -1)], dtype=tl.int32, is_pure=False,
            pack=ITEMS,
        )  # fmt: skip
        tl.store(counts + (row * DIGITS + slot) * tiles + nth, found, mask=slot < DIGITS)
    else:
        d = tl.arange(0, DIGITS)
        found = tl.histogram(digit, DIGITS, mask=there)
        tl.store(counts + (row * DIGITS + d) * tiles + nth, found)


@triton.jit(do_not_specialize=["step"])
def _all_digits_kernel(
    keys, counts, n, run, runs, step, FLOAT: tl.constexpr, SIGN: tl.constexpr,
    INFINITY: tl.constexpr, DESCENDING: tl.constexpr, PASSES: tl.constexpr, BLOCK: tl.constexpr,
    PTX: tl.constexpr, CONSTRAINTS: tl.constexpr, ITEMS: tl.constexpr,
):  # fmt: skip
    """counts: int64 [PASSES, rows, 256], 0 at the start. A program counts a run of a row's keys."""
    program = tl.program_id(0).to(tl.int64)
    row = program // runs
    rows = tl.num_programs(0) // runs
    begin = (program % runs) * run
    end = tl.minimum(begin + run, n)
    slot = tl.arange(0, BLOCK)
    keys += row * n
    if PTX is not None:
        found = tl.zeros([BLOCK], tl.int32)
        for start in range(begin, end, BLOCK):
            there = slot < end - start
            key = tl.load(keys + start + slot * step, mask=there, other=0)
            operands = (slot,)
            for p in tl.static_range(PASSES):
                digit = _digit(key, 8 * p, FLOAT, SIGN, INFINITY, DESCENDING)
                operands += (tl.where(there, digit, -1),)  # type: ignore[assignment]
            found += tl.inline_asm_elementwise(
                PTX, CONSTRAINTS, operands, dtype=tl.int32, is_pure=False, pack=ITEMS
            )
        place = counts + ((slot // DIGITS) * rows + row) * DIGITS + slot % DIGITS
        mask = (slot < PASSES * DIGITS) & (found > 0)
        tl.atomic_add(place, found.to(tl.int64), mask=mask, sem="relaxed")
    else:
        d = tl.arange(0, DIGITS)
        for p in tl.static_range(PASSES):
            tally = tl.zeros([DIGITS], tl.int32)
            for start in range(begin, end, BLOCK):
                there = slot < end - start
                key = tl.load(keys + start + slot * step, mask=there, other=0)
                digit = _digit(key, 8 * p, FLOAT, SIGN, INFINITY, DESCENDING)
                tally += tl.histogram(digit, DIGITS, mask=there)
            place = counts + (p * rows + row) * DIGITS + d
            tl.atomic_add(place, tally.to(tl.int64), mask=tally > 0, sem="relaxed")


def sort(keys: Tensor, descending: bool, *, one_sweep: bool | None = None) -> Tensor:
    """keys: [rows, n]. one_sweep: None for what is faster."""
    return _sorted(keys, None, descending, one_sweep)[0]


def sort_pairs(
    keys: Tensor, values: Tensor, descending: bool, *, one_sweep: bool | None = None
) -> tuple[Tensor, Tensor]:
    """keys, values: [rows, n]. one_sweep: None for what is faster."""
    return _sorted(keys, values, descending, one_sweep)


def _sorted(
    keys: Tensor, values: Tensor | None, descending: bool, one_sweep: bool | None
) -> tuple[Tensor, Tensor]:
    rows, n = keys.shape
    pairs = values is not None
    moving = [x.contiguous().view(BITS[x.dtype.itemsize]) for x in (keys, values) if x is not None]
    if not keys.numel():
        return torch.empty_like(keys), torch.empty_like(keys if values is None else values)
    size = keys.dtype.itemsize
    sign = 0 if keys.dtype == torch.uint8 else 1 << (8 * size - 1)
    kind: dict[str, Any] = {
        "FLOAT": keys.dtype in FLOATS, "SIGN": sign, "DESCENDING": descending,
        "INFINITY": _INFINITY.get(keys.dtype, 0),
    }  # fmt: skip
    words = sum((x.dtype.itemsize + 3) // 4 for x in moving)
    if one_sweep is None:
        one_sweep = words > 1 and keys.numel() >= MANY
    items = _items(rows, n, words)
    tile = 32 * WARPS * items
    limit = {} if triton.knobs.runtime.interpret else {"maxnreg": REGISTERS}
    tiles = triton.cdiv(n, tile)
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
                where = state = _begins_of_tiles(source[0], tiles, items, 8 * p, kind)
            _pass_kernel[(rows * tiles,)](
                source[0], source[-1], target[0], target[-1], where, state, state[-1:], n, tiles,
                8 * p, row_size, 1, PAIRS=pairs, ALONE=alone, ONE_SWEEP=one_sweep, TILE=tile,
                BACK=look_back_at_digits(), ITEMS=items, num_warps=WARPS,
                **_text(split, words, WARPS, items), **kind, **limit,
            )  # fmt: skip
            source = target
    last = source[-1] if values is None else source[-1].view(values.dtype)
    return source[0].view(keys.dtype), last


def _items(rows: int, n: int, words: int) -> int:
    """Keys of a thread: fewer where rows are short, there are few in all, or they are wide."""
    if triton.knobs.runtime.interpret:
        return 1
    most = ITEMS if words < 3 else ITEMS // 2
    wanted = min(triton.cdiv(rows * n, TILES), n)
    return min(most, max(1, triton.next_power_of_2(triton.cdiv(wanted, 32 * WARPS))))


def _text(make: Callable[..., tuple[str, str]], *what: int) -> dict[str, str | None]:
    """What the interpreter does without."""
    if triton.knobs.runtime.interpret:
        return {"PTX": None, "CONSTRAINTS": None}
    ptx, constraints = make(*what)
    return {"PTX": ptx, "CONSTRAINTS": constraints}


def _prepared(keys: Tensor, tiles: int, passes: int, kind: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """(where the digits of each pass begin [passes, rows, 256], its tiles' states and ticket)."""
    rows, n = keys.shape
    counts = torch.zeros(passes, rows, 256, dtype=torch.int64, device=keys.device)
    items = ITEMS if passes <= 4 else max(1, ITEMS // 2)
    block = 256 if triton.knobs.runtime.interpret else 32 * WARPS * items
    runs = max(1, min(PROGRAMS // rows, triton.cdiv(n, block)))
    run = triton.cdiv(triton.cdiv(n, runs), block) * block
    runs = triton.cdiv(n, run)
    _all_digits_kernel[(rows * runs,)](
        keys, counts, n, run, runs, 1, PASSES=passes, BLOCK=block, ITEMS=items, num_warps=WARPS,
        **_text(tally, 256, passes, WARPS, items), **kind,
    )  # fmt: skip
    begins = counts.cumsum(2).sub_(counts)
    # What a walk reads beyond the first tile's states, to no end, is there too.
    room = (DIGITS_AT_ONCE - 1) * 256
    states = torch.zeros(
        passes, room + rows * tiles * 256 + 1, dtype=torch.int64, device=keys.device
    )
    return begins, states[:, room:]


def _begins_of_tiles(
    keys: Tensor, tiles: int, items: int, shift: int, kind: dict[str, Any]
) -> Tensor:
    """Where each digit of each tile begins: a launch that counts, and one that adds up."""
    rows, n = keys.shape
    counts = torch.empty(rows, 256 * tiles, dtype=torch.int32, device=keys.device)
    _count_kernel[(rows * tiles,)](
        keys, counts, n, tiles, shift, 1, TILE=32 * WARPS * items, ITEMS=items, num_warps=WARPS,
        **_text(tally, 256, 1, WARPS, items), **kind,
    )  # fmt: skip
    return scan(counts, True, "sum", False)
