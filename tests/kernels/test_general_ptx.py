"""The texts of PTX that count and split in shared memory, on an emulator."""

import numpy as np
import pytest

from billfish.kernels.general import _ptx
from tests.kernels.ptx_emulator import Emulator


def slots(layout, threads, items):
    """Which elements of a tile the threads hold: [items, threads]."""
    if layout == "apart":
        return np.arange(items)[:, None] * threads + np.arange(threads)
    return np.arange(threads) * items + np.arange(items)[:, None]


def run(text, threads, items, slot, outputs, inputs):
    """outputs: how many. inputs: of each element, by its slot. Returns the outputs by slot."""
    columns = [given[slot[k]] for given in inputs for k in range(items)]
    operands = {outputs * items + i: column for i, column in enumerate(columns)}
    words = Emulator(threads, operands).run(text[0])
    assert text[1].count("=&r") == outputs * items
    assert text[1].count(",") + 1 == (outputs + len(inputs)) * items
    found = np.zeros((outputs, threads * items), np.uint32)
    for i in range(outputs * items):
        found[i // items, slot[i % items]] = words[f"${i}"]
    return found


@pytest.mark.parametrize("layout", ["apart", "together"])
@pytest.mark.parametrize("digits", [(0, 256), (200, 203), (255, 256)])
@pytest.mark.parametrize(("warps", "items", "words"), [(8, 1, 1), (8, 4, 3), (16, 2, 2)])
def test_split(warps, items, words, digits, layout):
    rng = np.random.default_rng(warps + items)
    threads, size = 32 * warps, 32 * warps * items
    slot = slots(layout, threads, items)
    digit = rng.integers(*digits, size)
    moving = [rng.integers(0, 2**32, size) for _ in range(words)]
    inputs = [np.arange(size), digit, *moving]
    counts, *moved = run(_ptx.split(words, warps, items), threads, items, slot, 1 + words, inputs)
    assert np.array_equal(counts[:256], np.bincount(digit, minlength=256))
    order = np.argsort(digit, kind="stable")
    for got, given in zip(moved, moving, strict=True):
        assert np.array_equal(got, given[order])


class Crowd(Emulator):
    """Others publish at every poll: states of (tile, word), in order."""

    def __init__(self, *arguments, coming=()):
        super().__init__(*arguments)
        self.coming = list(coming)

    def polled(self):
        if self.coming:
            place, word = self.coming.pop(0)
            self.states[place] = word


def states(values, kind, nearest, given):
    """Words of tiles that published `values`: prefixes up to `nearest`, aggregates behind."""
    dtype = np.dtype(kind)
    bits = dtype.itemsize * 8
    words = []
    for tile, value in enumerate(values):
        word = int(np.array([value], dtype).view(f"u{dtype.itemsize}")[0])
        status = 2 if tile <= nearest else 1
        for low in range(0, bits, 32):
            words.append((status << 32) | (word >> low & 0xFFFFFFFF))
    return np.array(words, np.uint64) * np.array(given, np.uint64)


OPERATORS = {"sum": np.add, "max": np.maximum, "min": np.minimum}


@pytest.mark.parametrize("op", OPERATORS)
@pytest.mark.parametrize("kind", ["s32", "f32", "s64", "f64"])
@pytest.mark.parametrize(("tiles", "nearest"), [(1, 0), (32, 0), (33, 0), (40, 38), (100, 3)])
def test_look_back(op, kind, tiles, nearest):
    rng = np.random.default_rng(tiles)
    dtype = {"s": "int", "f": "float"}[kind[0]] + kind[1:]
    sums = rng.integers(-(2**31 if kind == "s64" else 99), 99, tiles).astype(dtype)
    if kind[0] == "f":
        sums[0] = -0.5
    prefixes = OPERATORS[op].accumulate(sums)
    values = [prefixes[t] if t <= nearest else sums[t] for t in range(tiles)]
    words = states(values, dtype, nearest, 1)
    each = len(words) // tiles
    # Some of the states come later, the two words of one not at once.
    late = [int(i) for i in rng.permutation(len(words))[: len(words) // 2]]
    coming = [(i, words[i]) for i in late]
    words[late] = 0
    address = np.full(32, 8 * each * (tiles - 1))
    text, constraints = _ptx.look_back(op, kind)
    assert constraints == ("=l,l,r" if each == 2 else "=r,l,r")
    crowd = Crowd(32, {1: address, 2: np.full(32, tiles)}, words, coming=coming)
    got = crowd.run(text)["$0"].astype(f"u{4 * each}").view(dtype)
    assert len(crowd.coming) < len(late) or tiles == 1
    assert not crowd.coming or nearest > 0
    assert np.array_equal(got, np.full(32, prefixes[-1]))


@pytest.mark.parametrize("kind", ["f32", "f64"])
@pytest.mark.parametrize("op", OPERATORS)
def test_look_back_at_nan(op, kind):
    dtype = "float" + kind[1:]
    words = states([1.0, np.nan, 2.0], dtype, 0, 1)
    each = len(words) // 3
    operands = {1: np.full(32, 8 * each * 2), 2: np.full(32, 3)}
    got = Emulator(32, operands, words).run(_ptx.look_back(op, kind)[0])["$0"]
    assert np.isnan(got.astype(f"u{each * 4}").view(dtype)).all()


@pytest.mark.parametrize(("tile", "warps", "items"), [(0, 8, 16), (1, 2, 16), (70, 16, 4)])
def test_places(tile, warps, items):
    rng = np.random.default_rng(tile)
    threads, size = 32 * warps, 32 * warps * items
    before = rng.integers(0, 99, tile)
    words = states(before, "int32", 0, 1)
    words = np.append(words, np.zeros(1, np.uint64))
    keep = rng.integers(0, 2, size) * rng.integers(1, 256, size)
    operands = {}
    for k in range(items):
        operands[items + k] = keep[k * threads : (k + 1) * threads]
        operands[2 * items + k] = np.full(threads, tile)
        operands[3 * items + k] = np.full(threads, 8 * tile)
    text, constraints = _ptx.places(warps, items)
    assert constraints.split(",") == ["=&r"] * items + ["r"] * (2 * items) + ["l"] * items
    found = Emulator(threads, operands, words).run(text)
    places = np.concatenate([found[f"${k}"] for k in range(items)])
    kept = keep != 0
    assert np.array_equal(places[kept], before.sum() + np.arange(kept.sum()))
    assert np.array_equal(places, before.sum() + np.cumsum(kept) - kept)
    assert words[tile] == (2 << 32) + before.sum() + kept.sum()


@pytest.mark.parametrize(("bins", "fields", "warps", "items"), [(256, 4, 8, 4), (300, 1, 16, 2)])
def test_tally(bins, fields, warps, items):
    rng = np.random.default_rng(bins)
    threads, size = 32 * warps, 32 * warps * items
    given = rng.integers(-3, bins, (fields, size))
    slot = slots("apart", threads, items)
    inputs = [np.arange(size), *given]
    (counts,) = run(_ptx.tally(bins, fields, warps, items), threads, items, slot, 1, inputs)
    want = np.concatenate([np.bincount(row[row >= 0], minlength=bins) for row in given])
    assert np.array_equal(counts[: fields * bins], want)
