"""The gated activation of SwiGLU (Shazeer, 2020, arXiv:2002.05202), and its derivative.

The technique's switch: `gpu.silu_mul_backward(..., fused=False)` computes the gradients of the gate
and of what it gates in two passes over the same memory.
"""

import torch
from torch import Tensor
from torch.nn import functional

from billfish.kernels.general._gated import gated


def silu_mul_reference(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return gate * torch.sigmoid(gate) * up


def silu_mul_backward_reference(dy: Tensor, gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    s = torch.sigmoid(gate)
    return torch.cat((dy * up * s * (1 + gate * (1 - s)), dy * gate * s), -1)


def _cpu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    if gate_up.dtype == torch.float32:
        return functional.silu(gate).mul_(up).contiguous()
    return functional.silu(gate.float(), inplace=True).mul_(up).to(gate_up.dtype).contiguous()


_silu_mul = gated("silu_mul", _cpu, silu_mul_backward_reference)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, where gate_up [..., 2 * I] holds gate first; returns [..., I], contiguous.

    float32, bfloat16 or float16, any strides; computed in float32, rounded once. Differentiable
    once. Deterministic, forward and backward.

    Raises KernelArgumentError: dtype or device is wrong, the last dimension is odd or empty.
    """
    return _silu_mul(gate_up)
