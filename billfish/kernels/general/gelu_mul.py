"""The gated activation of GeGLU (Shazeer, 2020, arXiv:2002.05202), GELU approximated by tanh, and
its derivative.

The technique's switch: `gpu.gelu_tanh_mul_backward(..., fused=False)`, as of `silu_mul.py`.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from billfish.kernels._library import bad_argument, check_activation, differentiate, register

_GPU = "billfish.kernels.general.gpu"


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


def _backward_cpu(dy: Tensor, gate_up: Tensor) -> Tensor:
    return gelu_tanh_mul_backward_reference(dy.float(), gate_up.float()).to(gate_up.dtype)


def _backward_fake(dy: Tensor, gate_up: Tensor) -> Tensor:
    return gate_up.new_empty(gate_up.shape)


def _fake(gate_up: Tensor) -> Tensor:
    return gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2))


_gelu_tanh_mul: Callable[..., Tensor] = register(
    "gelu_tanh_mul(Tensor gate_up) -> Tensor", fake=_fake, cpu=_cpu, gpu=_GPU
)
_gelu_tanh_mul_backward: Callable[..., Tensor] = register(
    "gelu_tanh_mul_backward(Tensor dy, Tensor gate_up) -> Tensor",
    fake=_backward_fake,
    cpu=_backward_cpu,
    gpu=_GPU,
)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, dy: Tensor) -> Tensor:
    return _gelu_tanh_mul_backward(dy, *ctx.saved_tensors)


differentiate("gelu_tanh_mul", _save, _backward)


def gelu_tanh_mul(gate_up: Tensor) -> Tensor:
    """gelu(gate) * up, where gate_up [..., 2 * I] holds gate first; returns [..., I], contiguous.

    gelu(x) = x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))) (Hendrycks & Gimpel, 2016,
    arXiv:1606.08415). float32, bfloat16 or float16, any strides; computed in float32, rounded once.
    Differentiable once. Deterministic, forward and backward.

    Raises KernelArgumentError: dtype or device is wrong, the last dimension is odd or empty.
    """
    check_activation("gate_up", gate_up)
    if gate_up.dim() == 0 or gate_up.shape[-1] % 2 or gate_up.shape[-1] == 0:
        raise bad_argument("gate_up", tuple(gate_up.shape), "[..., 2 * I]")
    return _gelu_tanh_mul(gate_up)
