"""The kernels of images and signals, compiled without a GPU: what their machine code must hold."""

import pytest
import torch

pytest.importorskip("triton")

import triton

from billfish.kernels.general import bilateral_gpu, convolve2d_gpu, fft_gpu, fir_gpu, sobel_gpu
from tests.compile.test_general_compile import of_both

if triton.knobs.runtime.interpret:
    pytest.skip("compiles, so not with TRITON_INTERPRET=1", allow_module_level=True)


def test_fft(monkeypatch):
    x = torch.empty(64, 512, dtype=torch.complex64)
    launch = lambda: fft_gpu.fft(x, 512, "fft", 1.0)  # noqa: E731
    code = of_both(monkeypatch, fft_gpu, "_fft_kernel", launch)
    # A thread reads 8 values of 8 bytes, besides its roots, and writes as many.
    assert code.count("LDG.E.64") >= 8
    assert code.count("STG.E.64") == 8
    # Three passes: two exchanges of either part, of two barriers each, the first of one.
    assert code.count("BAR.SYNC") <= 7


def test_fft_of_columns(monkeypatch):
    """The last launch of a split transform: tiles of 8 columns, turned around once a pass."""
    x = torch.empty(1, 1 << 16, dtype=torch.complex64)
    launch = lambda: fft_gpu.fft(x, 1 << 16, "fft", 1.0)  # noqa: E731
    code = of_both(monkeypatch, fft_gpu, "_fft_kernel", launch)
    assert code.count("BAR.SYNC") <= 7


def test_fft_of_doubles_and_halves(monkeypatch):
    x = torch.empty(64, 9, dtype=torch.complex128)
    launch = lambda: fft_gpu.fft(x, 16, "irfft", 1.0)  # noqa: E731
    code = of_both(monkeypatch, fft_gpu, "_fft_kernel", launch)
    assert code.count("DADD") > 0


def test_fft_of_pairs_of_reals(monkeypatch):
    x = torch.empty(64, 512)
    launch = lambda: fft_gpu.fft(x, 512, "rfft", 1.0)  # noqa: E731
    code = of_both(monkeypatch, fft_gpu, "_fft_kernel", launch)
    # 256 points, in two passes: mirrors, 8 of either part, go through shared memory one by one, and
    # nothing else but what the passes exchange. They are written where they are, and point 256.
    assert code.count("SHFL") == 0
    assert code.count("BAR.SYNC") <= 7
    assert code.count("STG.E.64") <= 18


def test_fft_a_pass_at_a_time(monkeypatch):
    x = torch.empty(64, 512, dtype=torch.complex64)
    launch = lambda: fft_gpu.fft(x, 512, "fft", 1.0, fused=False)  # noqa: E731
    code = of_both(monkeypatch, fft_gpu, "_stage_kernel", launch)
    assert code.count("BAR.SYNC") == 0


def test_convolve2d(monkeypatch):
    x, weights = torch.empty(1, 4096, 4096), torch.empty(7, 7)
    launch = lambda: convolve2d_gpu.convolve2d(x, weights, "reflect", 0.0)  # noqa: E731
    code = of_both(monkeypatch, convolve2d_gpu, "_convolve2d_kernel", launch)
    # Products by values of the image, of which each is read once for all rows that it serves.
    assert code.count("FFMA") > 3 * code.count("LDG.E")
    alone = lambda: convolve2d_gpu.convolve2d(  # noqa: E731
        x, weights, "reflect", 0.0, reuse=False
    )
    code = of_both(monkeypatch, convolve2d_gpu, "_convolve2d_kernel", alone)
    assert code.count("FFMA") < 3 * code.count("LDG.E")


def test_separable_convolve2d(monkeypatch):
    x, side = torch.empty(1, 4096, 4096, dtype=torch.uint8), torch.empty(9)
    launch = lambda: convolve2d_gpu.separable_convolve2d(  # noqa: E731
        x, side, side, "reflect", 0.0, fused=True
    )
    code = of_both(monkeypatch, convolve2d_gpu, "_separable_kernel", launch)
    assert code.count("FFMA") > 3 * code.count("LDG.E.U8")


@pytest.mark.parametrize(("window", "rows"), [(3, 8), (5, 4)])
def test_separable_convolve2d_of_short_sides(monkeypatch, window, rows):
    x, side = torch.empty(1, 4096, 4096), torch.empty(window)
    launch = lambda: convolve2d_gpu.separable_convolve2d(  # noqa: E731
        x, side, side, "reflect", 0.0
    )
    code = of_both(monkeypatch, convolve2d_gpu, "_side_kernel", launch)
    # Each row of four columns is read once.
    assert code.count("LDG.E.128") == rows + window - 1
    assert code.count("STG.E.128") == rows


def test_separable_convolve2d_in_two_launches(monkeypatch):
    x, side = torch.empty(1, 4096, 4096), torch.empty(11)
    launch = lambda: convolve2d_gpu.separable_convolve2d(  # noqa: E731
        x, side, side, "reflect", 0.0
    )
    code = of_both(monkeypatch, convolve2d_gpu, "_side_kernel", launch)
    # The second: 16 rows of 4 columns, of 26 rows that are each read once.
    assert code.count("LDG.E.128") == 26
    assert code.count("STG.E.128") == 16


def test_sobel(monkeypatch):
    x = torch.empty(1, 4096, 4096)
    launch = lambda: sobel_gpu.sobel(x, "reflect")  # noqa: E731
    code = of_both(monkeypatch, sobel_gpu, "_gradient_kernel", launch)
    # 8 rows of both results, pairs of columns, of 10 rows read.
    assert code.count("STG.E.64") == 16
    launch = lambda: sobel_gpu.sobel(x, "reflect", fused=False)  # noqa: E731
    code = of_both(monkeypatch, sobel_gpu, "_polar_kernel", launch)
    assert code.count("LDG.E.128") > 0


def test_bilateral(monkeypatch):
    x = torch.empty(1, 4096, 4096)
    launch = lambda: bilateral_gpu.bilateral(x, 5, 2.0, 0.1, "reflect")  # noqa: E731
    code = of_both(monkeypatch, bilateral_gpu, "_bilateral_kernel", launch)
    # One exponential for each neighbour of each pixel: a column's 11, of 4 rows, of 2 columns.
    assert code.count("MUFU.EX2") == 11 * 4 * 2
    launch = lambda: bilateral_gpu.bilateral(  # noqa: E731
        x, 5, 2.0, 0.1, "reflect", table=False
    )
    code = of_both(monkeypatch, bilateral_gpu, "_bilateral_kernel", launch)
    assert code.count("MUFU.EX2") > 11 * 4 * 2


def test_fir(monkeypatch):
    x, taps, state = torch.empty(4, 1 << 20), torch.empty(64), torch.empty(4, 63)
    launch = lambda: fir_gpu.fir(x, taps, state)  # noqa: E731
    code = of_both(monkeypatch, fir_gpu, "_fir_kernel", launch)
    assert code.count("LDG.E.128") > 0
    assert code.count("FFMA") > 32
