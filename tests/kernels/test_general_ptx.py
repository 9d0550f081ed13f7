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
