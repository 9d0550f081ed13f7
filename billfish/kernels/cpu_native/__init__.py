"""Decoding steps of few requests on a CPU, compiled on the user's machine by numba's LLVM.

Optional: without numba, or where a processor or a model is of another kind, the operations of the
other kernel packages do the same. Nothing here imports numba before `load` is called.

    vector    LLVM's instructions on vectors; inner loops of attention and activations
    products  inner loops of products with INT4, 8-bit and bfloat16 weights
    step      all layers of a model, and its head, as two compiled functions
    threads   several threads in one compiled function
"""

import importlib.util
import os
import sys
from types import ModuleType

import torch

from billfish.kernels.marlin.cpu import int4_block_rows

SWITCH = "BILLFISH_CPU_NATIVE"
"""Environment variable; 0: as if numba were not there."""

_BLOCK_ROWS = (32, 64)  # with AVX2, with AVX-512


def why_not() -> str | None:
    """What is missing on this machine, None where steps can be compiled."""
    if os.environ.get(SWITCH) == "0":
        return f"{SWITCH} is 0"
    if sys.platform != "linux":
        return "it is for Linux only"
    if importlib.util.find_spec("numba") is None:
        return "numba is not installed"
    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        return "the processor has no AVX2"
    if int4_block_rows() not in _BLOCK_ROWS:
        return "torch packs INT4 weights in another way"
    return None


def load() -> ModuleType:
    """The module `step`. ImportError or RuntimeError where numba does not work here."""
    from billfish.kernels.cpu_native import step

    return step
