"""What the Triton kernels of this folder share: operators, and the look-back of single-pass scans.

**Decoupled look-back** (Merrill & Garland, 2016, NVIDIA technical report NVR-2016-002). A scan in
one pass reads every value once: a tile needs the sum of all tiles before it, which other programs
compute at the same time. Each tile has a state, published twice: first its own sum (AGGREGATE), as
soon as it has read its values, then the sum from the start to its end (PREFIX). A tile walks back
over the states of its predecessors, adding aggregates, until it meets a prefix.

*It ends.* A program takes its tile number from a counter when it runs, not from its place in the
grid, whose order of execution nothing promises. So when a tile waits, every tile before it belongs
to a program that runs already, and the first of them waits for nobody.

*It needs no fence.* A status and 32 bits of value share one aligned 64-bit word, and such a word is
written and read whole (PTX memory model, single-copy atomicity). Whoever sees the status sees the
value: nothing else in memory has to be ordered by it, so relaxed atomics do. A value of 64 bits
takes two words, each with the status: two words of unlike status are a state caught in the middle
of an update, and are read again; those of one status belong together, for each is published once.

*Its order.* Which tile meets a prefix where depends on timing, so sums of floats are grouped in
another way each time: they may differ in the last bits between runs. CHAIN waits for the prefix of
the tile right before, which fixes the grouping: prefix(t) = prefix(t - 1) + sum(t). It is the scan
without the technique too: tiles then finish one after another.
"""

from typing import Any

import torch
import triton
import triton.language as tl

TYPES: dict[torch.dtype, Any] = {
    torch.float64: tl.float64, torch.float32: tl.float32,
    torch.int64: tl.int64, torch.int32: tl.int32,
}  # fmt: skip

AGGREGATE: tl.constexpr = tl.constexpr(1)
PREFIX: tl.constexpr = tl.constexpr(2)


@triton.jit
def add(a, b):
    return a + b


@triton.jit
def larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def smaller(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def combine(a, b, OP: tl.constexpr):
    if OP == "sum":
        return a + b
    elif OP == "max":
        return larger(a, b)
    else:
        return smaller(a, b)


@triton.jit
def fold(values, AXIS: tl.constexpr, OP: tl.constexpr):
    """values reduced along AXIS, NaN if any is."""
    if OP == "sum":
        return tl.sum(values, AXIS)
    elif OP == "max":
        return tl.reduce(values, AXIS, larger)
    else:
        return tl.reduce(values, AXIS, smaller)


@triton.jit
def running(values, OP: tl.constexpr):
    """The inclusive scan of a tile."""
    if OP == "sum":
        return tl.cumsum(values, 0)
    elif OP == "max":
        return tl.associative_scan(values, 0, larger)
    else:
        return tl.associative_scan(values, 0, smaller)


@triton.jit
def publish(state, tile, value, STATUS: tl.constexpr):
    """state: int64 words, 0 at the start; one a tile for values of 32 bits, two for 64."""
    status = tl.full((), STATUS, tl.int64) << 32
    if value.dtype.primitive_bitwidth == 64:
        bits = value.to(tl.int64, bitcast=True)
        tl.atomic_xchg(state + 2 * tile, status | (bits & 0xFFFFFFFF), sem="relaxed")
        tl.atomic_xchg(state + 2 * tile + 1, status | ((bits >> 32) & 0xFFFFFFFF), sem="relaxed")
    else:
        bits = value.to(tl.int32, bitcast=True).to(tl.int64)
        tl.atomic_xchg(state + tile, status | (bits & 0xFFFFFFFF), sem="relaxed")


@triton.jit
def _read(words, there):
    """Words that others write. Atomics, not loads: of an atomic one thread's result is handed to
    all threads of the program, while each warp would load for itself, see another state than its
    neighbours, and leave the loop around the walk at another turn than they."""
    word = tl.atomic_add(words, tl.zeros(words.shape, tl.int64), mask=there, sem="relaxed")
    return tl.where(there, word, 2 << 32)


@triton.jit
def _peek(state, tile, there, DTYPE: tl.constexpr):
    """(status, value) of tiles; PREFIX and nothing of those that are not there."""
    if DTYPE.primitive_bitwidth == 64:
        if tile.shape[0] == 1:
            low = _read(state + 2 * tile, there)
            high = _read(state + 2 * tile + 1, there)
        else:
            # Both words at once, for each read is a memory latency.
            words = state + 2 * tile[:, None] + tl.arange(0, 2)[None, :]
            low, high = tl.split(_read(words, tl.broadcast_to(there[:, None], words.shape)))
        status = tl.where((low >> 32) == (high >> 32), low >> 32, 0).to(tl.int32)
        bits = (low & 0xFFFFFFFF) | (high << 32)
        return status, bits.to(DTYPE, bitcast=True)
    else:
        word = _read(state + tile, there)
        return (word >> 32).to(tl.int32), word.to(tl.int32).to(DTYPE, bitcast=True)


@triton.jit
def look_back(state, first, tile, nothing, OP: tl.constexpr, CHAIN: tl.constexpr):
    """What tiles first..tile - 1 come to; `nothing` is the operator's identity, and says the type.

    A window of 32 states is read at once: a walk one by one would take a memory latency each.
    """
    WINDOW: tl.constexpr = 1 if CHAIN else 32
    lane = tl.arange(0, WINDOW)
    prefix = nothing
    nearest = tile - 1
    going = nearest >= first
    while going:
        there = nearest - lane >= first
        status, value = _peek(state, nearest - lane, there, nothing.dtype)
        if CHAIN:
            status = tl.where(status == PREFIX, status, 0)
        stop = tl.min(tl.where(status == PREFIX, lane, WINDOW), 0)  # the nearest prefix
        ready = tl.min(tl.where((lane < stop) & (status == 0), 0, 1), 0) == 1
        part = fold(tl.where(there & (lane <= stop), value, nothing), 0, OP)
        prefix = tl.where(ready, combine(part, prefix, OP), prefix)
        nearest = tl.where(ready, nearest - WINDOW, nearest)
        going = (not ready) | (stop == WINDOW)
    return prefix
