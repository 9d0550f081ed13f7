"""The kernels of images and signals, run in Triton's interpreter against their definitions.

Run by test_general_signal_triton.py in a process of its own. By hand:
TRITON_INTERPRET=1 pytest tests/kernels/general_signal_triton.py
"""

import pytest
import torch

from billfish.kernels import general
from billfish.kernels.general import fft_gpu


def draw(*shape, dtype=torch.float32, seed=0):
    rng = torch.Generator().manual_seed(seed)
    if dtype == torch.uint8:
        return torch.randint(0, 256, shape, generator=rng, dtype=dtype)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    return torch.randn(*shape, generator=rng, dtype=wide).to(dtype)


def check_fft(x, n, kind="fft", **options):
    want = general.fft_reference(x, n, kind, 0.5)
    got = fft_gpu.fft(x, n, kind, 0.5, **options)
    assert got.shape == want.shape
    double = got.dtype in (torch.float64, torch.complex128)
    assert (got - want).norm() <= (2e-15 if double else 3e-7) * want.norm()


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("n", [1, 2, 14, 60, 64, 75])
def test_fft(n, fused):
    """One pass, two, three; with slots that hold no point, and without."""
    check_fft(draw(3, n, dtype=torch.complex64), n, fused=fused)


@pytest.mark.parametrize("kind", ["ifft", "rfft", "irfft"])
@pytest.mark.parametrize("fused", [True, False])
def test_kinds_of_fft(kind, fused):
    for n in (6, 15):
        for dtype in (torch.complex64, torch.complex128):
            count = n // 2 + 1 if kind == "irfft" else n
            x = draw(2, count, dtype=dtype)
            check_fft(x.real.contiguous() if kind == "rfft" else x, n, kind, fused=fused)


def test_fft_cut_and_filled():
    x = draw(5, 12, dtype=torch.complex64)[::2]
    for n in (9, 16):
        check_fft(x, n)
        check_fft(x, n, "irfft")
    check_fft(draw(2, 7, dtype=torch.float16), 8)
    assert fft_gpu.fft(draw(0, 4), 4, "rfft", 1.0).shape == (0, 3)


@pytest.mark.parametrize(("n", "limit"), [(120, 64), (192, 128)])
def test_fft_split(n, limit):
    """In two launches and in three."""
    check_fft(draw(1, n, dtype=torch.complex64), n, limit=limit)
    if n == 192:
        check_fft(draw(2, 97, dtype=torch.complex64), n, "irfft", limit=limit)


@pytest.mark.parametrize("kind", ["fft", "ifft", "rfft", "irfft"])
def test_fft_of_other_sizes(kind):
    x = draw(2, 11, dtype=torch.float32 if kind == "rfft" else torch.complex64)
    check_fft(x, 11, kind)
    check_fft(x, 11, kind, fused=False)
