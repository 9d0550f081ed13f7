"""Reduction, scan, transpose, histogram and compaction by their public functions, on the CPU."""

import pytest
import torch
from torch.library import opcheck

from billfish.errors import KernelArgumentError
from billfish.kernels import general
from tests.kernels.general_inputs import draw, exact

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
ROUNDING = {
    torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11,
}  # fmt: skip


def close(got, want):
    if not got.dtype.is_floating_point:
        assert got.dtype == want.dtype
        assert torch.equal(got, want)
        return
    tolerance = ROUNDING[got.dtype]
    absolute = 1e-12 if got.dtype == torch.float64 else 1e-4
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=absolute)


@pytest.mark.parametrize("op", ["sum", "max", "min"])
@pytest.mark.parametrize("dtype", FLOATS + INTEGERS)
def test_scan(dtype, op):
    x = draw(3, 4, 5, dtype=dtype)
    for dim in (0, 1, -1):
        for exclusive in (False, True):
            got = general.scan(x, dim, exclusive, op)
            want = general.scan_reference(exact(x).movedim(dim, -1), exclusive, op).movedim(-1, dim)
            if exclusive and op != "sum" and not dtype.is_floating_point:
                assert got.select(dim, 0).unique().numel() == 1
            close(got, want)
            assert got.is_contiguous()


def test_scan_sizes():
    for shape in ((0,), (1,), (3, 0), (0, 3), (2, 10007)):
        x = draw(*shape)
        assert general.scan(x).shape == shape
        close(general.scan(x), x.double().cumsum(-1))
        for op in ("sum", "max", "min"):
            assert torch.equal(general.scan_reference(x, op=op), general.scan(x, op=op)) or (
                op == "sum" and x.numel()
            )
    assert general.scan(torch.tensor([1, 2, 3]), exclusive=True).tolist() == [0, 1, 3]
    assert general.scan(draw(4, 9)[:, ::2].t()).shape == (5, 4)


@pytest.mark.parametrize("op", ["sum", "max", "min"])
@pytest.mark.parametrize("dtype", FLOATS + INTEGERS)
def test_reduce(dtype, op):
    x = draw(3, 7, 5, dtype=dtype)
    for dim in (0, 1, -1):
        close(general.reduce(x, dim, op), general.reduce_reference(exact(x).movedim(dim, -1), op))
    close(general.reduce(x, op=op), general.reduce_reference(exact(x).flatten(), op))
    assert general.reduce(x, op=op).shape == ()


def test_reduce_nothing():
    assert general.reduce(draw(0)).item() == 0
    assert general.reduce(draw(0, dtype=torch.int8), op="max").item() == -128
    assert general.reduce(draw(2, 0), 1, "min").tolist() == [torch.inf] * 2
    assert general.reduce(draw(0, 2), 1).shape == (0,)


@pytest.mark.parametrize("op", ["sum", "max", "min"])
@pytest.mark.parametrize("dtype", FLOATS + INTEGERS)
def test_segment_reduce(dtype, op):
    x = draw(50, dtype=dtype)
    for offsets in ([0, 50], [3, 3, 4, 30, 30, 47], [0, 0], [50, 50], [7]):
        bounds = torch.tensor(offsets)
        want = general.segment_reduce_reference(x, bounds, op)
        if dtype.is_floating_point:
            want = general.segment_reduce_reference(x.double(), bounds, op)
        close(general.segment_reduce(x, bounds, op), want)


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, torch.bool, torch.complex64])
def test_transpose(dtype):
    for shape in ((1, 1), (3, 5), (2, 0), (2, 4, 3), (2, 1, 3, 65)):
        x = draw(*shape).to(dtype)
        got = general.transpose(x)
        assert torch.equal(got, general.transpose_reference(x) if x.numel() else x.mT)
        assert got.is_contiguous()
        assert torch.equal(general.transpose(x.mT), x)


@pytest.mark.parametrize("dtype", INTEGERS)
def test_histogram_of_integers(dtype):
    x = draw(7, 40, dtype=dtype)
    for bins in (1, 3, 100, 300):
        want = torch.tensor([(x.long() == i).sum() for i in range(bins)])
        assert torch.equal(general.histogram(x, bins), want)
        assert torch.equal(general.histogram_reference(x, bins), want)
    assert general.histogram(x[:0], 2).tolist() == [0, 0]


@pytest.mark.parametrize("dtype", FLOATS)
def test_histogram_of_floats(dtype):
    x = draw(1000, dtype=dtype).clamp(-1.9, 1.9)
    x[:5] = torch.tensor([-2.0, 2.0, torch.nan, torch.inf, -3.0])
    got = general.histogram(x, 32, -2.0, 2.0)
    inside = x[(x >= -2) & (x <= 2)].float()
    assert torch.equal(got, torch.histc(inside, 32, -2.0, 2.0).long())
    assert torch.equal(got, general.histogram_reference(x, 32, -2.0, 2.0))


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, torch.bool])
def test_compact(dtype):
    for n in (0, 1, 999):
        x, keep = draw(n).to(dtype), draw(n, seed=1) > 0
        out, count = general.compact(x, keep)
        assert torch.equal(out[: count.item()], x[keep])
        assert not out[count.item() :].any()
    x = draw(30)
    third = x[::3]
    for got, want in zip(
        general.compact(third, third > 0), general.compact(third.clone(), third > 0), strict=True
    ):
        assert torch.equal(got, want)


def keys_to_sort(*shape, dtype, seed=0):
    """With equal keys, and of floats all that is special, in both signs."""
    x = draw(*shape, dtype=dtype, seed=seed)
    if dtype.is_floating_point and x.shape[-1] > 20:
        x = (x * 4).round() / 4
        nan = torch.tensor(torch.nan, dtype=dtype)
        special = torch.tensor([0.0, -0.0, 0.0, torch.inf, -torch.inf, -0.0, 1e-7], dtype=dtype)
        x[..., 3:10], x[..., 11], x[..., 14] = special, nan, nan.neg()
    return x


def bits_of(x):
    return x.view(torch.uint8)


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("dtype", FLOATS + INTEGERS)
def test_sort(dtype, descending):
    x = keys_to_sort(3, 70, dtype=dtype)
    values = torch.arange(210).view(3, 70)
    keys, moved = general.sort(x, values, descending=descending)
    want = general.sort_reference(x, values, descending)
    assert torch.equal(moved, want[1])
    assert torch.equal(bits_of(keys), bits_of(want[0]))
    alone = general.sort(x, descending=descending)
    assert torch.equal(bits_of(alone), bits_of(keys))
    assert alone.is_contiguous()
    # As torch does it, stable.
    places = torch.sort(x, dim=-1, descending=descending, stable=True).indices
    assert torch.equal(moved, values.gather(-1, places))


def test_sort_dimensions_views_and_nothing():
    x = draw(4, 30, 6)
    assert torch.equal(general.sort(x, dim=1), x.sort(1).values)
    keys, values = general.sort(x[::2, 3:20:2].mT, x[::2, 3:20:2].mT.half(), dim=0)
    assert torch.equal(keys, x[::2, 3:20:2].mT.sort(0).values)
    assert keys.is_contiguous()
    assert torch.equal(values, keys.half())
    for shape in ((0,), (3, 0), (0, 3)):
        assert general.sort(draw(*shape)).shape == shape
    pair = general.sort(draw(0), draw(0, dtype=torch.int8))
    assert [x.dtype for x in pair] == [torch.float32, torch.int8]
    flags = general.sort(torch.tensor([3, 1, 2]), torch.tensor([True, False, False]))[1]
    assert flags.tolist() == [False, False, True]


BAD = {
    "scan dim": lambda: general.scan(draw(3), 1),
    "scan scalar": lambda: general.scan(draw(1)[0]),
    "scan bool": lambda: general.scan(draw(3) > 0),
    "scan op": lambda: general.scan(draw(3), op="product"),
    "scan gradient": lambda: general.scan(draw(3).requires_grad_()),
    "reduce dim": lambda: general.reduce(draw(3), -2),
    "reduce device": lambda: general.reduce(draw(3).to("meta")),
    "segment shape": lambda: general.segment_reduce(draw(3, 3), torch.tensor([0, 3])),
    "segment dtype": lambda: general.segment_reduce(draw(3), torch.tensor([0.0, 3.0])),
    "segment none": lambda: general.segment_reduce(draw(3), torch.zeros(0, dtype=torch.int64)),
    "segment order": lambda: general.segment_reduce(draw(3), torch.tensor([0, 2, 1, 3])),
    "segment end": lambda: general.segment_reduce(draw(3), torch.tensor([0, 4])),
    "segment start": lambda: general.segment_reduce(draw(3), torch.tensor([-1, 3])),
    "transpose shape": lambda: general.transpose(draw(3)),
    "transpose size": lambda: general.transpose(draw(3, 3).to(torch.complex128)),
    "histogram no range": lambda: general.histogram(draw(3), 3),
    "histogram empty range": lambda: general.histogram(draw(3), 3, 1.0, 1.0),
    "histogram endless range": lambda: general.histogram(draw(3), 3, 0.0, torch.inf),
    "histogram range": lambda: general.histogram(draw(3, dtype=torch.int8), 3, 0.0, 1.0),
    "histogram bins": lambda: general.histogram(draw(3, dtype=torch.int8), 0),
    "compact mask": lambda: general.compact(draw(3), draw(3)),
    "compact shape": lambda: general.compact(draw(3), draw(4) > 0),
    "sort scalar": lambda: general.sort(draw(1)[0]),
    "sort dim": lambda: general.sort(draw(3), dim=1),
    "sort bool": lambda: general.sort(draw(3) > 0),
    "sort gradient": lambda: general.sort(draw(3).requires_grad_()),
    "sort values": lambda: general.sort(draw(3), draw(4)),
    "sort values' gradient": lambda: general.sort(draw(3), draw(3).requires_grad_()),
    "sort values' size": lambda: general.sort(draw(3), draw(3).to(torch.complex128)),
    "compact matrix": lambda: general.compact(draw(3, 3), draw(3, 3) > 0),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(name):
    with pytest.raises(KernelArgumentError):
        BAD[name]()


def test_operations_as_torch_sees_them():
    ops = torch.ops.billfish
    offsets = torch.tensor([0, 2, 2, 9])
    for op, arguments in (
        (ops.scan, (draw(3, 9), True, "sum", False)),
        (ops.scan, (draw(3, 9, dtype=torch.int8), False, "max", True)),
        (ops.reduce, (draw(2, 9, 3, dtype=torch.uint8), "sum")),
        (ops.segment_reduce, (draw(9), offsets, "max")),
        (ops.transpose_copy, (draw(2, 3, 4),)),
        (ops.histogram, (draw(9), 4, -1.0, 2.0)),
        (ops.compact, (draw(9), draw(9) > 0)),
        (ops.sort, (draw(2, 9), True)),
        (ops.sort_pairs, (draw(2, 9), draw(2, 9, dtype=torch.int8), False)),
    ):
        opcheck(op.default, arguments)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sort_keeps_the_bits_of_nan(dtype):
    bits = torch.tensor([0x7FC1, 0, -0x3F, 0x3C00, 0x7FFF], dtype=torch.int16)
    keys, values = general.sort(bits.view(dtype), bits.view(dtype))
    places = torch.tensor([1, 3, 0, 2, 4])
    assert torch.equal(keys.view(torch.int16), bits[places])
    assert torch.equal(values.view(torch.int16), bits[places])
