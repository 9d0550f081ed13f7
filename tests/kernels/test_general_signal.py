"""Fourier transforms by their public functions, on the CPU; how sizes are cut for a GPU."""

import math

import pytest
import torch
from torch.library import opcheck

from billfish.errors import KernelArgumentError
from billfish.kernels import general
from billfish.kernels.general import _fft_plan as plan

DOUBLES = (torch.float64, torch.complex128)


def draw(*shape, dtype=torch.float32, seed=0):
    rng = torch.Generator().manual_seed(seed)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    return torch.randn(*shape, generator=rng, dtype=wide).to(dtype)


def near(got, want, double):
    assert (got.dtype in DOUBLES) == double
    assert got.shape == want.shape
    assert (got - want).norm() <= (1e-14 if double else 1e-6) * want.norm()


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128, torch.float32, torch.float16])
def test_fft_against_its_definition(dtype):
    for n in (1, 2, 5, 16, 30, 77):
        x = draw(2, n, dtype=dtype)
        for kind in ("fft", "ifft") if dtype.is_complex else ("fft", "ifft", "rfft"):
            scale = 1 / n if kind == "ifft" else 1.0
            want = general.fft_reference(x, n, kind, scale)
            near(getattr(general, kind)(x), want, dtype == torch.complex128)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_irfft_against_its_definition(dtype):
    for n in (1, 2, 7, 24):
        x = draw(2, n // 2 + 1, dtype=dtype)
        want = general.fft_reference(x, n, "irfft", 1 / n)
        near(general.irfft(x, n), want, dtype == torch.complex128)


@pytest.mark.parametrize("norm", ["backward", "ortho", "forward"])
def test_fft_as_torch_has_it(norm):
    x = draw(3, 12, 4, dtype=torch.complex64)
    for dim, n in ((0, None), (1, 20), (-1, 3), (1, None)):
        for kind in ("fft", "ifft", "irfft"):
            got = getattr(general, kind)(x, n, dim, norm)
            torch.testing.assert_close(got, getattr(torch.fft, kind)(x, n, dim, norm))
            assert got.is_contiguous()
    got = general.rfft(x.real, 9, 1, norm)
    torch.testing.assert_close(got, torch.fft.rfft(x.real, 9, 1, norm))


def test_fft_of_nothing_and_of_views():
    assert general.fft(draw(0, 5)).shape == (0, 5)
    assert general.rfft(draw(0, 5)).shape == (0, 3)
    assert not general.fft(draw(2, 0), 3).any()
    x = draw(6, 20, dtype=torch.complex64)[::2, 1::3].conj()
    near(general.fft(x), general.fft_reference(x.resolve_conj(), 7), False)


def test_sizes_are_cut_into_passes():
    for n in (2, 12, 360, 1000, 2**12, 3**5, 7**4):
        assert math.prod(plan.radices(n)) == n
        assert set(plan.radices(n)) <= set(plan.RADICES)
    assert plan.radices(4096) == (16, 16, 16)
    assert plan.size(1000) < 4 * 1000


def test_sizes_are_split():
    """Powers of two up to 2^22 in two launches, up to 2^27 in three; others with few exceptions."""
    for dtype, limit in plan.LIMIT.items():
        for power in range(1, 28):
            parts = plan.split(2**power, limit)
            assert math.prod(parts) == 2**power
            most = 1 if 2**power <= limit else 2 if power <= 20 else 3
            assert len(parts) <= most, (dtype, power)
        for n in (3**9, 44_100, 5**9, 7**8, 2**13 * 7**4, 10**7, 6**10, 7**4 * 3):
            parts = plan.split(n, limit)
            assert math.prod(parts) == n
            columns = plan.COLUMNS if len(parts) > 1 else 1
            assert all(plan.fits(part, limit, columns) for part in parts)
        assert plan.split(11, limit) == ()
        assert plan.split(3**16, limit) in ((), (243, 243, 729), (243, 729, 243), (729, 243, 243))


BAD = {
    "fft scalar": lambda: general.fft(draw(1)[0]),
    "fft list": lambda: general.fft([1.0]),
    "fft integers": lambda: general.fft(torch.arange(4)),
    "fft dim": lambda: general.fft(draw(3), dim=1),
    "fft no points": lambda: general.fft(draw(3), 0),
    "fft nothing": lambda: general.fft(draw(2, 0)),
    "fft points": lambda: general.fft(draw(3), 2**26 + 1),
    "fft norm": lambda: general.fft(draw(3), norm="orthogonal"),
    "fft device": lambda: general.fft(draw(3).to("meta")),
    "fft gradient": lambda: general.fft(draw(3).requires_grad_()),
    "rfft complex": lambda: general.rfft(draw(3, dtype=torch.complex64)),
    "irfft of one": lambda: general.irfft(draw(1)),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(name):
    with pytest.raises(KernelArgumentError):
        BAD[name]()


def test_operations_as_torch_sees_them():
    ops = torch.ops.billfish
    for op, arguments in (
        (ops.fft, (draw(3, 9), 9, "rfft", 1.0)),
        (ops.fft, (draw(3, 9, dtype=torch.complex64), 12, "ifft", 0.5)),
        (ops.fft, (draw(3, 9, dtype=torch.complex128), 16, "irfft", 1.0)),
    ):
        opcheck(op.default, arguments)
