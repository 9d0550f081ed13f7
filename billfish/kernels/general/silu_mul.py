"""The gated activation of SwiGLU (Shazeer, 2020, arXiv:2002.05202), and its derivative.

The technique's switch: `gpu.silu_mul_backward(..., fused=False)` computes the gradients of the gate
and of what it gates in two passes over the same memory.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from billfish.kernels._library import bad_argument, check_activation, differentiate, register

_GPU = "billfish.kernels.general.gpu"


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


def _backward_cpu(dy: Tensor, gate_up: Tensor) -> Tensor:
    return silu_mul_backward_reference(dy.float(), gate_up.float()).to(gate_up.dtype)


def _backward_fake(dy: Tensor, gate_up: Tensor) -> Tensor:
    return gate_up.new_empty(gate_up.shape)


def _fake(gate_up: Tensor) -> Tensor:
    return gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2))


_silu_mul: Callable[..., Tensor] = register(
    "silu_mul(Tensor gate_up) -> Tensor", fake=_fake, cpu=_cpu, gpu=_GPU
)
_silu_mul_backward: Callable[..., Tensor] = register(
    "silu_mul_backward(Tensor dy, Tensor gate_up) -> Tensor",
    fake=_backward_fake,
    cpu=_backward_cpu,
    gpu=_GPU,
)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, dy: Tensor) -> Tensor:
    return _silu_mul_backward(dy, *ctx.saved_tensors)


differentiate("silu_mul", _save, _backward)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, where gate_up [..., 2 * I] holds gate first; returns [..., I], contiguous.

    float32, bfloat16 or float16, any strides; computed in float32, rounded once. Differentiable
    once. Deterministic, forward and backward.

    Raises KernelArgumentError: dtype or device is wrong, the last dimension is odd or empty.
    """
    check_activation("gate_up", gate_up)
    if gate_up.dim() == 0 or gate_up.shape[-1] % 2 or gate_up.shape[-1] == 0:
        raise bad_argument("gate_up", tuple(gate_up.shape), "[..., 2 * I]")
    return _silu_mul(gate_up)
