"""The kernels of images and signals on a GPU, against their definitions and torch in float64."""

import pytest
import torch

from billfish.kernels import general
from billfish.kernels.general import fft_gpu

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

DOUBLES = (torch.float64, torch.complex128)


def draw(*shape, dtype=torch.float32, seed=0):
    rng = torch.Generator("cuda").manual_seed(seed)
    if dtype == torch.uint8:
        return torch.randint(0, 256, shape, generator=rng, dtype=dtype, device="cuda")
    wide = torch.complex128 if dtype.is_complex else torch.float64
    return torch.randn(*shape, generator=rng, dtype=wide, device="cuda").to(dtype)


def check_fft(kind, x, n, bound=1.0, **options):
    wide = x.to(torch.complex128 if x.is_complex() else torch.float64)
    norm = "forward" if kind in ("ifft", "irfft") else "backward"
    want = getattr(torch.fft, kind)(wide, n, norm=norm)
    got = fft_gpu.fft(x, n, kind, 1.0, **options)
    assert got.shape == want.shape
    limit = (1e-14 if got.dtype in DOUBLES else 1e-6) * bound
    assert (got - want).norm() <= limit * want.norm()
    return got


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
@pytest.mark.parametrize(
    "n",
    [*(2**i for i in range(15)), 3, 7, 25, 100, 243, 360, 625, 1000, 1440, 2401, 3125, 10_000],
)
def test_fft(n, dtype):
    for rows in (1, 3, 130):
        x = draw(rows, n, dtype=dtype)
        check_fft("fft", x, n)
        check_fft("fft", x, n, fused=False)


@pytest.mark.parametrize("kind", ["fft", "ifft", "rfft", "irfft"])
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
@pytest.mark.parametrize("n", [1, 2, 60, 127, 512, 999, 4096, 48_000])
def test_kinds_of_fft(kind, dtype, n):
    x = draw(5, n // 2 + 1 if kind == "irfft" else n, dtype=dtype)
    x = x.real.contiguous() if kind == "rfft" else x
    check_fft(kind, x, n, 4.0)
    check_fft(kind, x, n, 4.0, fused=False)


@pytest.mark.parametrize("n", [2**15, 2**18, 2**20, 2**22, 2**24, 44_100, 10**6, 3**13, 1_234_567])
def test_fft_of_large_sizes(n):
    x = draw(1 if n > 10**6 else 3, n, dtype=torch.complex64)
    check_fft("fft", x, n, 4.0)
    half = x[:, : n // 2 + 1]
    check_fft("irfft", half, n, 4.0)


def test_fft_is_the_same_from_run_to_run():
    for n in (512, 1000, 2**20):
        x = draw(4, n, dtype=torch.complex64)
        first = general.fft(x)
        for _ in range(20):
            assert torch.equal(general.fft(x), first)


@pytest.mark.sanitize
def test_fft_of_a_few_rows():
    for n in (12, 64, 11):
        check_fft("fft", draw(3, n, dtype=torch.complex64), n)
    check_fft("irfft", draw(3, 97, dtype=torch.complex64), 192, limit=128)
