"""The kernels of images and signals, compiled without a GPU: what their machine code must hold."""

import pytest
import torch

pytest.importorskip("triton")

import triton

from billfish.kernels.general import fft_gpu
from tests.compile.test_general_compile import of_both

if triton.knobs.runtime.interpret:
    pytest.skip("compiles, so not with TRITON_INTERPRET=1", allow_module_level=True)


@pytest.mark.parametrize("n", [64, 512])
def test_fft(monkeypatch, n):
    x = torch.empty(64, n, dtype=torch.complex64)
    launch = lambda: fft_gpu.fft(x, n, "fft", 1.0)  # noqa: E731
    code = of_both(monkeypatch, fft_gpu, "_fft_kernel", launch)
    # A thread reads 8 values of 8 bytes, besides its roots, and writes as many.
    assert code.count("LDG.E.64") >= 8
    assert code.count("STG.E.64") == 8
    # Two barriers an exchange of each part but the first: no other move through shared memory.
    exchanges = 2 * (2 if n == 512 else 1)
    assert code.count("BAR.SYNC") <= 2 * exchanges - 1


def test_fft_of_columns(monkeypatch):
    """The last launch of a split transform: tiles of 8 columns, turned around once a pass."""
    x = torch.empty(1, 1 << 18, dtype=torch.complex64)
    launch = lambda: fft_gpu.fft(x, 1 << 18, "fft", 1.0)  # noqa: E731
    code = of_both(monkeypatch, fft_gpu, "_fft_kernel", launch)
    assert code.count("BAR.SYNC") <= 7


def test_fft_of_doubles_and_halves(monkeypatch):
    x = torch.empty(64, 33, dtype=torch.complex128)
    launch = lambda: fft_gpu.fft(x, 64, "irfft", 1.0)  # noqa: E731
    code = of_both(monkeypatch, fft_gpu, "_fft_kernel", launch)
    assert code.count("DADD") > 0


def test_fft_a_pass_at_a_time(monkeypatch):
    x = torch.empty(64, 512, dtype=torch.complex64)
    launch = lambda: fft_gpu.fft(x, 512, "fft", 1.0, fused=False)  # noqa: E731
    code = of_both(monkeypatch, fft_gpu, "_stage_kernel", launch)
    assert code.count("BAR.SYNC") == 0
