"""The texts of PTX that count and split in shared memory, on an emulator."""

import numpy as np
import pytest

from billfish.kernels.general import _ptx, _ptx_look_back
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
    text, constraints = _ptx_look_back.look_back(op, kind)
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
    got = Emulator(32, operands, words).run(_ptx_look_back.look_back(op, kind)[0])["$0"]
    assert np.isnan(got.astype(f"u{each * 4}").view(dtype)).all()


@pytest.mark.parametrize("share", [0.0, 0.05, 0.5, 1.0])
@pytest.mark.parametrize(
    ("tile", "warps", "items", "words", "behind"),
    [(0, 8, 16, 1, 9000), (1, 4, 16, 2, 1000), (70, 4, 8, 1, -3), (3, 2, 4, 1, -130)],
)
def test_gather(tile, warps, items, words, behind, share):
    """behind: how many elements come after the tile; below 0: it is not full, and the last."""
    rng = np.random.default_rng(tile)
    threads, size = 32 * warps, 32 * warps * items
    there = min(size, size + behind)
    before = rng.integers(0, 99, tile)
    given = states(before, "int32", 0, 1)
    given = np.append(given, np.zeros(2, np.uint64))  # its own, and the count
    keep = (rng.random(size) < share) * rng.integers(1, 256, size)
    keep[there:] = 0
    moving = [rng.integers(0, 2**32, size) for _ in range(words)]
    # Element g * 4 threads + 4 thread + j is a thread's (4 g + j)-th.
    mine = lambda x: x.reshape(items // 4, threads, 4)  # noqa: E731
    columns = [column[:, j] for x in moving for column in mine(x) for j in range(4)]
    columns += [np.full(threads, x) for x in (tile, size + behind) for _ in range(items)]
    columns += [np.full(threads, 8 * x) for x in (tile, tile + 1) for _ in range(items)]
    packed = [(group << np.array([0, 8, 16, 24])).sum(1) for group in mine(keep)]
    first = (words + 1) * items
    operands = dict(enumerate(packed + columns, first))
    text, constraints = _ptx_look_back.gather(words, warps, items)
    assert constraints.split(",") == (
        ["=&r"] * first + ["r"] * (items // 4 + (words + 2) * items) + ["l"] * 2 * items
    )
    found = Emulator(threads, operands, given).run(text)
    kept = np.flatnonzero(keep)
    n = size + behind  # from the tile's first on
    want = {before.sum() + i: [x[e] for x in moving] for i, e in enumerate(kept)}
    zeros = n - 1 + before.sum() - np.arange(there - len(kept))
    want |= {int(place): [0] * words for place in zeros}
    got = {}
    for k in range(items):
        to = found[f"${words * items + k}"].astype(np.uint32).astype(np.int32)
        for thread in np.flatnonzero(to >= 0):
            assert to[thread] not in got
            got[int(to[thread])] = [int(found[f"${w * items + k}"][thread]) for w in range(words)]
    assert got == want
    assert given[tile] == (2 << 32) + before.sum() + len(kept)
    assert given[tile + 1] == (before.sum() + len(kept) if behind <= 0 else 0)


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


@pytest.mark.parametrize("at_once", [1, 4])
@pytest.mark.parametrize(("tiles", "nearest"), [(1, 0), (3, 0), (9, 2), (20, 18)])
def test_look_back_at_digits(at_once, tiles, nearest):
    """A digit a thread, each of which finds the nearest prefix of its own."""
    rng = np.random.default_rng(tiles)
    sums = rng.integers(0, 99, (tiles, 256))
    prefixes = sums.cumsum(0)
    prefixed = np.arange(tiles)[:, None] <= rng.integers(0, nearest + 1, 256)
    words = np.where(prefixed, (2 << 32) + prefixes, (1 << 32) + sums).astype(np.uint64)
    # What is read before the first tile is another's, and not to be counted.
    before = np.full(256 * (at_once - 1), (1 << 32) + 5, np.uint64)
    given = np.concatenate([before, words.ravel()])
    late = [int(i) for i in len(before) + rng.permutation(words.size)[: words.size // 50]]
    coming = [(i, given[i]) for i in late]
    given[late] = 0
    text = _ptx_look_back.look_back_at_digits(at_once)
    address = 8 * (len(before) + 256 * (tiles - 1) + np.arange(256))
    crowd = Crowd(256, {1: address}, given, coming=coming)
    assert np.array_equal(crowd.run(text)["$0"], prefixes[-1])


@pytest.mark.parametrize(("warps", "items"), [(8, 4), (16, 2)])
def test_halves(warps, items):
    """One bin is so full that its half overflows; its neighbour in the word stays as it is."""
    rng = np.random.default_rng(warps)
    threads = 32 * warps
    clear, count, add, constraints = _ptx.halves(warps, items)
    assert constraints.split(",") == ["=&r"] * items + ["r"] * items + ["l"] * items
    out = np.zeros(3 + _ptx.SPAN, np.uint64)
    emulator = Emulator(threads, {}, out)
    emulator.run(clear)
    want = np.zeros(_ptx.SPAN, int)
    for turn in range(3 + 40_000 // (threads * items)):
        bins = rng.integers(0, _ptx.SPAN + 9, (items, threads))
        if turn > 2:
            bins[:] = 7
            bins[0, 0] = 6
        want += np.bincount(bins[bins < _ptx.SPAN], minlength=_ptx.SPAN)
        for k in range(items):
            emulator.words[f"${items + k}"] = bins[k].astype(np.uint64)
            emulator.words[f"${2 * items + k}"] = np.full(threads, 24, np.uint64)
        emulator.run(count)
    assert out[3 + 7] == 32768
    emulator.words["$1"] = np.full(threads, 24, np.uint64)
    emulator.run(add)
    assert np.array_equal(out[3:], want)
    assert not out[:3].any()
