"""Runs general_elementwise_triton.py with Triton's interpreter, which needs no GPU."""

import pytest

pytest.importorskip("triton")

from tests.kernels.interpreter import run_in_interpreter


def test_in_interpreter():
    run_in_interpreter("general_elementwise_triton.py")
