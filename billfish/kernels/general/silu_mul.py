"""The gated activation of SwiGLU (Shazeer, 2020, arXiv:2002.05202)."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from billfish.kernels._library import bad_argument, check_activation, register


def silu_mul_reference(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return gate * torch.sigmoid(gate) * up


def _cpu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    if gate_up.dtype == torch.float32:
        return functional.silu(gate).mul_(up).contiguous()
    return functional.silu(gate.float(), inplace=True).mul_(up).to(gate_up.dtype).contiguous()


def _fake(gate_up: Tensor) -> Tensor:
    return gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2))


_silu_mul: Callable[..., Tensor] = register(
    "silu_mul(Tensor gate_up) -> Tensor",
    fake=_fake,
    cpu=_cpu,
    gpu="billfish.kernels.general.gpu",
)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, where gate_up [..., 2 * I] holds gate first; returns [..., I], contiguous.

    float32, bfloat16 or float16, any strides; computed in float32, rounded once.

    Raises KernelArgumentError: dtype or device is wrong, the last dimension is odd or empty.
    """
    check_activation("gate_up", gate_up)
    if gate_up.dim() == 0 or gate_up.shape[-1] % 2 or gate_up.shape[-1] == 0:
        raise bad_argument("gate_up", tuple(gate_up.shape), "[..., 2 * I]")
    return _silu_mul(gate_up)
