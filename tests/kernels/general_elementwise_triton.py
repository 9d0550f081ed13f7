"""Chains of element-wise operations in Triton's interpreter.

Run by test_general_elementwise_triton.py in a process of its own. By hand:
TRITON_INTERPRET=1 pytest tests/kernels/general_elementwise_triton.py
"""

import pytest
import torch

from billfish.kernels import general
from billfish.kernels.general import elementwise_gpu
from tests.kernels.elementwise_cases import CHAINS, draw


@pytest.mark.parametrize("expression", CHAINS)
def test_chains(expression):
    inputs = CHAINS[expression]()
    want = general.elementwise_reference(expression, **inputs)
    for fused in (True, False):
        got = elementwise_gpu.elementwise(
            list(inputs.values()), expression, list(inputs), fused=fused, block=32
        )
        assert (got.dtype, got.shape) == (want.dtype, want.shape)
        assert got.is_contiguous()
        torch.testing.assert_close(got, want, equal_nan=True)


def test_dimensions_collapse():
    x = draw(4, 5, 6)
    sizes, strides = elementwise_gpu.collapsed((4, 5, 6), [x, x.clone()])
    assert (sizes, strides) == ((120,), [(1,), (1,)])
    sizes, strides = elementwise_gpu.collapsed((4, 5, 6), [x, draw(6), draw(4, 1, 1)])
    assert (sizes, strides) == ((4, 5, 6), [(30, 6, 1), (0, 0, 1), (1, 0, 0)])
    sizes, strides = elementwise_gpu.collapsed((4, 5, 6), [x, draw(5, 6)])
    assert (sizes, strides) == ((4, 30), [(30, 1), (0, 1)])
    assert elementwise_gpu.collapsed((), [draw(1)[0]]) == ((1,), [(0,)])
