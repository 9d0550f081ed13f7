"""What compiling without a GPU looks out for."""

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from tests.compile.offline import fake_device

if triton.knobs.runtime.interpret:
    pytest.skip("compiles, so not with TRITON_INTERPRET=1", allow_module_level=True)


@triton.jit
def _delayed_kernel(x, out, n, APART: tl.constexpr):
    """out[i] = x[i - 2]: what is read goes through two variables."""
    nothing = tl.zeros([16], tl.float32)
    older, old = nothing, tl.zeros([16], tl.float32) if APART else nothing
    for i in range(n):
        tl.store(out + i * 16 + tl.arange(0, 16), older)
        older, old = old, tl.load(x + i * 16 + tl.arange(0, 16))


def test_a_loop_that_would_lose_a_variable(monkeypatch):
    monkeypatch.setattr(triton.knobs.compilation, "always_compile", True)
    x = torch.empty(64)
    with fake_device():
        kernel = _delayed_kernel.warmup(x, x, 4, True, grid=(1,))
        assert "iter_args(%older" in kernel.asm["ttir"]
        with pytest.raises(Exception, match="would lose older"):
            _delayed_kernel.warmup(x, x, 4, False, grid=(1,))
