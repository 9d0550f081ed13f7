"""The gated activation of GeGLU (Shazeer, 2020, arXiv:2002.05202), GELU approximated by tanh, and
its derivative.

The technique's switch: `gpu.gelu_tanh_mul_backward(..., fused=False)`, as of `silu_mul.py`.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional

from billfish.kernels.general._gated import gated


def gelu_tanh_mul_reference(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    return 0.5 * gate * (1 + torch.tanh(inner)) * up


def gelu_tanh_mul_backward_reference(dy: Tensor, gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    near = gate.clamp(-100, 100)  # beyond, tanh is 1 and its slope 0, which times infinity is NaN
    slope = math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * near**2)
    t = torch.tanh(math.sqrt(2 / math.pi) * (near + 0.044715 * near**3))
    of_gate = 0.5 * (1 + t) + 0.5 * near * (1 - t * t) * slope
    return torch.cat((dy * up * of_gate, dy * 0.5 * gate * (1 + t)), -1)


def _cpu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    wide = gate.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    return functional.gelu(wide, approximate="tanh").mul_(up).to(gate_up.dtype)


_gelu_tanh_mul = gated("gelu_tanh_mul", _cpu, gelu_tanh_mul_backward_reference)


def gelu_tanh_mul(gate_up: Tensor) -> Tensor:
    """gelu(gate) * up, where gate_up [..., 2 * I] holds gate first; returns [..., I], contiguous.

    gelu(x) = x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))) (Hendrycks & Gimpel, 2016,
    arXiv:1606.08415). float32, bfloat16 or float16, any strides; computed in float32, rounded once.
    Differentiable once. Deterministic, forward and backward.

    Raises KernelArgumentError: dtype or device is wrong, the last dimension is odd or empty.
    """
    return _gelu_tanh_mul(gate_up)
