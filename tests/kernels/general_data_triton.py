"""The kernels of parallel data processing, run in Triton's interpreter against their definitions.

Run by test_general_data_triton.py in a process of its own. By hand:
TRITON_INTERPRET=1 pytest tests/kernels/general_data_triton.py
"""

import pytest
import torch
import triton
import triton.language as tl

from billfish.kernels import general
from billfish.kernels.general import (
    _triton,
    compact_gpu,
    histogram_gpu,
    reduce_gpu,
    scan_gpu,
    segment_reduce_gpu,
    sort_gpu,
    transpose_gpu,
)
from billfish.kernels.general._arguments import BITS
from tests.kernels.general_inputs import draw, exact

SUM_TYPES = [torch.float32, torch.float16, torch.float64, torch.int32, torch.uint8]
SOME_TYPES = [torch.float32, torch.float16, torch.uint8]


def close(got, want):
    """want: in float64, or integers. Half floats are rounded once."""
    if not got.dtype.is_floating_point:
        assert got.dtype == want.dtype
        assert torch.equal(got, want)
        return
    relative = {torch.float64: 1e-14, torch.float32: 1e-6, torch.float16: 2.0**-11}[got.dtype]
    absolute = {torch.float64: 1e-12, torch.float32: 1e-4, torch.float16: 1e-4}[got.dtype]
    torch.testing.assert_close(got.double(), want, rtol=relative, atol=absolute)


@pytest.mark.parametrize("exclusive", [False, True])
@pytest.mark.parametrize("dtype", SUM_TYPES)
def test_scan(dtype, exclusive):
    for shape in ((1, 1), (3, 129), (2, 700)):
        x = draw(*shape, dtype=dtype)
        want = general.scan_reference(exact(x), exclusive)
        for deterministic in (False, True):
            close(scan_gpu.scan(x, exclusive, "sum", deterministic, block=128), want)


@pytest.mark.parametrize(("op", "dtype"), [("max", torch.float32), ("min", torch.int16)])
def test_scan_of_extremes(op, dtype):
    x = draw(2, 100, dtype=dtype)
    if dtype == torch.float32:
        x[1, 40] = torch.nan
    for exclusive in (False, True):
        want = general.scan_reference(x, exclusive, op)
        got = scan_gpu.scan(x, exclusive, op, False, block=32)
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def test_scan_of_views_and_of_nothing():
    x = draw(6, 500)[::2, 100:400:2]
    close(scan_gpu.scan(x, False, "sum", False, block=64), x.double().cumsum(1))
    assert scan_gpu.scan(draw(3, 0), False, "sum", False).shape == (3, 0)
    assert scan_gpu.scan(draw(0, 3), True, "sum", False).shape == (0, 3)


@triton.jit
def _look_back_kernel(state, out, tile, WIDE: tl.constexpr, CHAIN: tl.constexpr):
    nothing = tl.full((), 0, tl.int64 if WIDE else tl.int32)
    tl.store(out, _triton.look_back(state, 2, tile, nothing, "sum", CHAIN).to(tl.int64))


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("distance", [1, 2, 31, 32, 33, 64, 100])
def test_look_back_over_aggregates(wide, distance):
    """The interpreter runs programs in turn, so that each meets a prefix at once: here is a state
    of which the nearest prefix is far, as when all programs run at the same time."""
    tile, least = 110, -(2**40) if wide else -1000
    values = torch.randint(
        least, -least, (tile,), generator=torch.Generator().manual_seed(distance)
    )
    status = torch.ones(tile, dtype=torch.int64)
    status[: tile - distance + 1] = 2
    status[:2] = 0  # belong to another row
    words = [values & 0xFFFFFFFF, (values >> 32) & 0xFFFFFFFF][: 1 + wide]
    state = torch.stack([word | (status << 32) for word in words], 1).flatten().contiguous()
    out = torch.zeros(1, dtype=torch.int64)
    _look_back_kernel[(1,)](state, out, tile, wide, False)
    assert out.item() == values[tile - distance :].sum().item()
    if distance == 1:
        _look_back_kernel[(1,)](state, out, tile, wide, True)
        assert out.item() == values[tile - 1].item()


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("dtype", SOME_TYPES)
def test_reduce(dtype, fused):
    for shape in ((1, 1, 1), (1, 3000, 1), (2, 300, 5), (2, 1, 70)):
        x = draw(*shape, dtype=dtype)
        want = torch.sum(exact(x), 1, dtype=None if dtype.is_floating_point else torch.int64)
        close(reduce_gpu.reduce(x, "sum", fused=fused, block=64), want)


@pytest.mark.parametrize("op", ["max", "min"])
def test_reduce_extremes(op):
    x = draw(3, 90, 2)
    x[1, 70, 1] = torch.nan
    want = getattr(torch, f"a{op}")(x, 1)
    got = reduce_gpu.reduce(x, op, block=32)
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def test_reduce_views_and_nothing():
    x = draw(4, 80, 6)[::2, 5:70:3, 1:4]
    close(reduce_gpu.reduce(x, "sum", block=16), x.double().sum(1))
    assert torch.equal(reduce_gpu.reduce(draw(2, 0, 3), "max"), torch.full((2, 3), -torch.inf))
    assert reduce_gpu.reduce(draw(0, 4, 3), "sum").shape == (0, 3)


@pytest.mark.parametrize("balanced", [True, False])
@pytest.mark.parametrize("dtype", SOME_TYPES)
def test_segment_reduce(dtype, balanced):
    x = draw(600, dtype=dtype)
    for offsets in ([0, 600], [3, 3, 4, 404, 404, 590], [0, 0, 0], [600, 600], [7]):
        bounds = torch.tensor(offsets, dtype=torch.int32 if balanced else torch.int64)
        want = general.segment_reduce_reference(exact(x), bounds)
        got = segment_reduce_gpu.segment_reduce(x, bounds, "sum", balanced=balanced, piece_size=64)
        close(got, want)


@triton.jit
def _owner_kernel(offsets, out, segments, place, WIDTH: tl.constexpr):
    tl.store(out, segment_reduce_gpu._owner(offsets, segments, place, WIDTH))


@pytest.mark.parametrize(("segments", "width"), [(1, 4), (5, 4), (300, 4), (300, 128), (128, 128)])
def test_the_segment_that_goes_on_at_a_place(segments, width):
    lengths = torch.randint(0, 4, (segments,), generator=torch.Generator().manual_seed(segments))
    offsets = torch.cat((torch.tensor([2]), 2 + lengths.cumsum(0)))
    for place in {0, 1, 2, 3, 4, int(offsets[-1]) // 2, int(offsets[-1]) - 1, int(offsets[-1])}:
        out = torch.zeros(1, dtype=torch.int64)
        _owner_kernel[(1,)](offsets, out, segments, place, width)
        assert out.item() == int((offsets[:-1] < place).sum()) - 1


def test_segment_reduce_extremes_strides_and_bad_offsets():
    x = draw(800)[::2]
    bounds = torch.tensor([0, 5, 5, 300, 400])
    for op in ("max", "min"):
        got = segment_reduce_gpu.segment_reduce(x, bounds, op, piece_size=128)
        assert torch.equal(got, general.segment_reduce_reference(x, bounds, op))
    # What is wrong with offsets a GPU cannot say, but it reads nothing outside of x.
    wild = torch.tensor([-50, 10, 4, 9999])
    got = segment_reduce_gpu.segment_reduce(x, wild, "sum", piece_size=128)
    assert got[1] == 0


@pytest.mark.parametrize("tiled", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8, torch.int64])
def test_transpose(dtype, tiled):
    for shape in ((1, 1, 1), (2, 33, 70), (1, 129, 3), (0, 3, 4), (2, 0, 5)):
        x = draw(*shape, dtype=torch.int16).to(dtype)
        got = transpose_gpu.transpose_copy(x, tiled=tiled)
        assert torch.equal(got, x.transpose(1, 2))
        assert got.is_contiguous()
    x = draw(4, 60, 70, dtype=torch.int16).to(dtype)[::2, 3:50:3, 1:60]
    assert torch.equal(transpose_gpu.transpose_copy(x, tiled=tiled), x.transpose(1, 2))


@pytest.mark.parametrize("private", [True, False])
def test_histogram(private):
    x = draw(1500, dtype=torch.int32)
    skewed = torch.where(x > -80, 7, x)
    for values in (x, skewed, skewed.to(torch.int64), x[:1], x[:0], skewed.clamp(min=0).byte()):
        for bins in (1, 40, 100):
            want = general.histogram_reference(values, bins)
            got = histogram_gpu.histogram(values, bins, 0.0, 1.0, private=private, block=256)
            close(got, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_histogram_of_floats(dtype):
    x = draw(1000, dtype=dtype)
    x[:8] = torch.tensor([-2.0, 2.0, torch.nan, torch.inf, -torch.inf, 1.9999, -0.0, 2.001])
    for bins in (1, 7, 64):
        want = general.histogram_reference(x, bins, -2.0, 2.0)
        got = histogram_gpu.histogram(x, bins, -2.0, bins / 4.0, block=256)
        close(got, want)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.int64])
def test_compact(dtype, fused):
    for n in (0, 1, 127, 128, 1000):
        x = draw(n, dtype=dtype, seed=n)
        for keep in (draw(n, seed=1) > 0, draw(n) > 9, draw(n) < 9):
            out, count = compact_gpu.compact(x, keep, fused=fused, block=128)
            want, how_many = general.compact_reference(x, keep)
            assert torch.equal(count, how_many)
            assert torch.equal(out, want)
    x, keep = draw(300, dtype=dtype)[::3], (draw(300) > 0)[100:200]
    want = general.compact_reference(x, keep)[0]
    assert torch.equal(compact_gpu.compact(x, keep, block=32)[0], want)


@pytest.mark.parametrize(
    ("dtype", "rows", "n", "descending", "one_sweep"),
    [
        (torch.float16, 1, 600, False, True),  # three tiles, which look back
        (torch.int8, 2, 300, True, False),
        (torch.int8, 2, 300, False, True),
        (torch.uint8, 1, 1, True, True),
        (torch.float16, 2, 40, True, True),  # rows of one tile
    ],
)
def test_sort(dtype, rows, n, descending, one_sweep):
    x = draw(rows, n, dtype=dtype)
    if dtype.is_floating_point:
        x = (x * 8).round() / 8
        x[0, 3:10] = torch.tensor([0.0, -0.0, torch.inf, 0.0, -torch.inf, -0.0, -torch.nan])
        x[0, 17] = torch.nan
    values = torch.arange(rows * n, dtype=torch.int16).view(rows, n)
    want = general.sort_reference(x, values, descending)
    got = sort_gpu.sort_pairs(x, values, descending, one_sweep=one_sweep)
    assert torch.equal(got[1], want[1])
    assert torch.equal(got[0].view(torch.uint8), want[0].view(torch.uint8))
    if n < 100:
        alone = sort_gpu.sort(x, descending, one_sweep=one_sweep)
        assert torch.equal(alone.view(torch.uint8), want[0].view(torch.uint8))


@triton.jit
def _digit_kernel(keys, out, shift, FLOAT: tl.constexpr, SIGN: tl.constexpr, TOP: tl.constexpr):
    i = tl.arange(0, 32)
    tl.store(out + i, sort_gpu._digit(tl.load(keys + i), shift, FLOAT, SIGN, TOP, False))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.int64,
                                   torch.int32, torch.int16, torch.uint8])  # fmt: skip
def test_digits_order_as_keys_do(dtype):
    keys = draw(32, dtype=dtype)
    if dtype.is_floating_point:
        keys[:8] = torch.tensor([0, -0.0, torch.inf, -torch.inf, torch.nan, -torch.nan, 1e-7, -1])
    elif dtype != torch.uint8:
        keys[:2] = torch.tensor([torch.iinfo(dtype).min, torch.iinfo(dtype).max])
    size = dtype.itemsize
    digits = torch.zeros(size, 32, dtype=torch.int32)
    for p in range(size):
        _digit_kernel[(1,)](
            keys.view(BITS[size]), digits[p], 8 * p, dtype.is_floating_point,
            0 if dtype == torch.uint8 else 1 << (8 * size - 1), sort_gpu._INFINITY.get(dtype, 0),
        )  # fmt: skip
    whole = [sum(int(digits[p, i]) << (8 * p) for p in range(size)) for i in range(32)]
    places = sorted(range(32), key=whole.__getitem__)
    want = torch.sort(keys, stable=True).indices.tolist()
    assert places == want


def test_sort_nothing():
    keys, values = sort_gpu.sort_pairs(draw(0, 3), draw(0, 3, dtype=torch.int8), False)
    assert (keys.shape, values.dtype) == ((0, 3), torch.int8)
    assert sort_gpu.sort(draw(3, 0), True).shape == (3, 0)


@triton.jit
def _look_back_of_digits_kernel(state, out, tile):
    d = tl.arange(0, 256)
    tl.store(out + d, sort_gpu._look_back(state, 2, tile, d))


def test_sort_looks_back_for_each_digit():
    """Digit d meets a prefix d % 7 tiles back, before which there are aggregates."""
    tile = 12
    rng = torch.Generator().manual_seed(1)
    counts = torch.randint(0, 1 << 30, (tile, 256), generator=rng)
    distance = 1 + torch.arange(256) % 7
    nth = torch.arange(tile).unsqueeze(1)
    status = torch.where(nth <= tile - distance, 2, 1)
    status[2] = 2
    counts //= 16
    state = counts | (status << 32)
    out = torch.zeros(256, dtype=torch.int32)
    _look_back_of_digits_kernel[(1,)](state, out, tile)
    seen = nth >= tile - distance
    assert torch.equal(out.long(), (counts * seen).sum(0))
