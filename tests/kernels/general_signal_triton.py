"""The kernels of images and signals, run in Triton's interpreter against their definitions.

Run by test_general_signal_triton.py in a process of its own. By hand:
TRITON_INTERPRET=1 pytest tests/kernels/general_signal_triton.py
"""

import pytest
import torch

from billfish.kernels import general
from billfish.kernels.general import bilateral_gpu, convolve2d_gpu, fft_gpu, fir_gpu, sobel_gpu
from billfish.kernels.general._image import rounded
from tests.kernels.general_inputs import draw


def check_fft(x, n, kind="fft", **options):
    want = general.fft_reference(x, n, kind, 0.5)
    got = fft_gpu.fft(x, n, kind, 0.5, **options)
    assert got.shape == want.shape
    double = got.dtype in (torch.float64, torch.complex128)
    assert (got - want).norm() <= (2e-15 if double else 3e-7) * want.norm()


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("n", [1, 2, 14, 60, 75])
def test_fft(n, fused):
    """One pass, two, three; with slots that hold no point, and without."""
    check_fft(draw(3, n, dtype=torch.complex64), n, fused=fused)


@pytest.mark.parametrize("kind", ["ifft", "rfft", "irfft"])
@pytest.mark.parametrize("fused", [True, False])
def test_kinds_of_fft(kind, fused):
    for n, dtype in ((6, torch.complex64), (15, torch.complex128)):
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


@pytest.mark.parametrize("n", [2, 6, 60, 98, 256])
def test_fft_of_pairs_of_reals(n):
    """Of one pass to three, of slots that hold no point; cut and filled, from any address."""
    for points in {n, n - 1, n + 1, n // 2} if n == 60 else {n}:
        check_fft(draw(3, points), n, "rfft")
    check_fft(draw(2 * n + 1)[1:].view(2, n), n, "rfft")
    check_fft(draw(2, n, dtype=torch.float64), n, "rfft", folded=n == 60)


@pytest.mark.parametrize(("n", "limit"), [(120, 64), (192, 128)])
def test_fft_split(n, limit):
    """In two launches and in three."""
    kind, count = ("irfft", n // 2 + 1) if n == 192 else ("fft", n)
    check_fft(draw(1, count, dtype=torch.complex64), n, kind, limit=limit)


@pytest.mark.parametrize("kind", ["fft", "ifft", "rfft", "irfft"])
def test_fft_of_other_sizes(kind):
    x = draw(1, 11, dtype=torch.float32 if kind == "rfft" else torch.complex64)
    check_fft(x, 11, kind, fused=kind in ("fft", "irfft"))


def close(got, want):
    """want: in float64. Half floats and bytes are rounded once."""
    want = rounded(want, got.dtype) if got.dtype == torch.uint8 else want
    relative = {torch.float64: 1e-14, torch.float32: 1e-6, torch.float16: 2.0**-11}
    absolute = {torch.float64: 1e-13, torch.float32: 1e-5, torch.float16: 1e-3}
    torch.testing.assert_close(
        got.double(), want.double(), rtol=relative.get(got.dtype, 0),
        atol=absolute.get(got.dtype, 0),
    )  # fmt: skip


IMAGES = [
    ("constant", torch.float64), ("reflect", torch.uint8), ("replicate", torch.float32),
    ("circular", torch.float16),
]  # fmt: skip


@pytest.mark.parametrize(("mode", "dtype"), IMAGES)
def test_convolve2d(mode, dtype):
    """One strip of rows and two, and two of columns; windows of all but one shape."""
    value = 0.1 if mode == "constant" else 0.0
    for shape, window in (((2, 5, 6), (3, 5)), ((1, 9, 3), (1, 5)), ((1, 3, 258), (3, 1))):
        x, weights = draw(*shape, dtype=dtype), draw(*window, dtype=torch.float64, seed=1)
        if dtype == torch.uint8:
            weights = (8 * weights).round() / 64  # no sum is rounded
        weights = weights.to(torch.float64 if dtype == torch.float64 else torch.float32)
        want = general.convolve2d_reference(x.double(), weights.double(), mode, value, True)
        for reuse in (True, False) if shape[2] > 99 else (True,):
            close(convolve2d_gpu.convolve2d(x, weights, mode, value, reuse=reuse), want)


@pytest.mark.parametrize(("mode", "dtype"), IMAGES)
def test_separable_convolve2d(mode, dtype):
    value = 0.1 if mode == "constant" else 0.0
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for shape, window in (
        ((2, 5, 6), (3, 5)), ((1, 9, 4), (3, 1)), ((1, 2, 1540), (1, 3)), ((1, 4, 5), (7, 3)),
    ):  # fmt: skip
        x = draw(*shape, dtype=dtype)
        column, row = (draw(size, dtype=wide, seed=size) for size in window)
        if dtype == torch.uint8:
            column, row = (8 * column).round() / 8, (8 * row).round() / 64
        kernel = column.double()[:, None] * row.double()
        want = general.convolve2d_reference(x.double(), kernel, mode, value, True)
        for fused in (True, False) if shape[0] == 2 else (True,):
            got = convolve2d_gpu.separable_convolve2d(x, column, row, mode, value, fused=fused)
            close(got, want)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(("mode", "dtype"), [m for m in IMAGES if m[1] != torch.float64])
def test_sobel(mode, dtype, fused):
    x = draw(2, 10, 7, dtype=dtype)
    x[0, :4, :4] = 3
    magnitude, direction = sobel_gpu.sobel(x, mode, fused=fused)
    want, angle = general.sobel_reference(x.double(), mode)
    close(magnitude, want)
    turn = (direction - angle + torch.pi) % (2 * torch.pi) - torch.pi
    assert turn.abs().max() < 2e-6 if dtype == torch.uint8 else (turn * want).abs().max() < 1e-5


def test_angles():
    around = torch.arange(0, 360, 7.5, dtype=torch.float64).deg2rad()
    x = torch.stack([around.cos(), around.sin()])
    for scale in (1e-15, 1.0, 1e15):
        across, down = (x * scale).float()
        out = [torch.empty_like(across) for _ in range(2)]
        sobel_gpu._polar_kernel[(1,)](across, down, *out, across.numel(), BLOCK=64)
        want = torch.atan2(down.double(), across.double())
        assert (out[1] - want).abs().max() < 1e-6


@pytest.mark.parametrize(
    ("mode", "dtype", "options"),
    [
        ("constant", torch.float32, {}), ("reflect", torch.uint8, {"table": False}),
        ("replicate", torch.float16, {"reuse": False}), ("circular", torch.float32, {}),
    ],
)  # fmt: skip
def test_bilateral(mode, dtype, options):
    x = draw(1, 5, 6, dtype=dtype)
    sigma = 40.0 if dtype == torch.uint8 else 0.8
    want = general.bilateral_reference(x.double(), 1, 1.3, sigma, mode)
    got = bilateral_gpu.bilateral(x, 1, 1.3, sigma, mode, **options)
    if dtype == torch.uint8:  # a half may go either way
        assert (got - want).abs().max() < 0.5001
    else:
        close(got, want)


def test_images_of_nothing():
    for shape in ((0, 3, 4), (2, 0, 4), (2, 3, 0)):
        x, one = draw(*shape), torch.ones(1)
        assert convolve2d_gpu.convolve2d(x, one[None], "constant", 0.0).shape == shape
        assert convolve2d_gpu.separable_convolve2d(x, one, one, "constant", 0.0).shape == shape
        assert sobel_gpu.sobel(x, "constant")[1].shape == shape
        assert bilateral_gpu.bilateral(x, 1, 1.0, 1.0, "constant").shape == shape


@pytest.mark.parametrize("reuse", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_fir(dtype, reuse):
    """Taps of one, few and many chunks; a signal of one tile and of two."""
    for n, taps in ((1, 1), (3, 6), (50, 20)) if dtype != torch.float32 else ((1040, 17),):
        x, state = draw(2, n, dtype=dtype), draw(2, taps - 1, dtype=dtype, seed=2)
        weights = draw(taps, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
        want = general.fir_reference(x.double(), weights.double(), state.double())
        close(fir_gpu.fir(x, weights, state, reuse=reuse), want)
    assert fir_gpu.fir(draw(2, 0), draw(3), draw(2, 2), reuse=reuse).shape == (2, 0)


@pytest.mark.parametrize("at", [0, 1023, 1026])
def test_fir_of_a_nan(at):
    """It spoils the samples that see it, and no others."""
    x, state = torch.ones(1, 1040), torch.zeros(1, 4)
    x[0, at] = torch.nan
    spoilt = fir_gpu.fir(x, torch.ones(5), state).isnan().nonzero()[:, 1]
    assert spoilt.tolist() == [i for i in range(at, at + 5) if i < 1040]
