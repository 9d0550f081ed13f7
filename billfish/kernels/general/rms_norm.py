"""Root-mean-square normalization (Zhang & Sennrich, 2019, arXiv:1910.07467), residual add fused."""

from collections.abc import Callable
from typing import overload

import torch
from torch import Tensor
from torch.nn import functional

from billfish.kernels._library import bad_argument, check_activation, check_like, register

_GPU = "billfish.kernels.general.gpu"


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def _cpu(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if x.dtype == torch.float32:
        return functional.rms_norm(x, weight.shape, weight, eps).contiguous()
    # torch has no fused RMS norm on a CPU, but it has a layer norm, in float32 inside and rounded
    # once. x followed by -x has mean 0 and the variance mean(x^2): its layer norm is x's RMS norm.
    both = torch.layer_norm(
        torch.cat((x, -x), -1), (2 * weight.shape[0],), torch.cat((weight, weight)), None, eps
    )
    return both.narrow(-1, 0, weight.shape[0]).contiguous()


def _add_cpu(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = (x + residual).contiguous()
    return _cpu(total, weight, eps), total


def _fake(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x.new_empty(x.shape)


def _add_fake(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


_rms_norm: Callable[..., Tensor] = register(
    "rms_norm(Tensor x, Tensor weight, float eps) -> Tensor", fake=_fake, cpu=_cpu, gpu=_GPU
)
_add_rms_norm: Callable[..., tuple[Tensor, Tensor]] = register(
    "add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor)",
    fake=_add_fake,
    cpu=_add_cpu,
    gpu=_GPU,
)


def check_eps(eps: float) -> None:
    if not isinstance(eps, (int, float)) or not eps >= 0:
        raise bad_argument("eps", eps, "a number that is not negative")


@overload
def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: None = None) -> Tensor: ...
@overload
def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor) -> tuple[Tensor, Tensor]: ...
def rms_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension.

    x: [..., D] float32, bfloat16 or float16, any strides; weight: [D] of the same dtype; eps >= 0.
    Computed in float32, rounded once. With residual [..., D], like x: returns (the norm of the sum,
    the sum), where the sum x + residual is rounded to the dtype first and the norm is of the
    rounded sum, so that it is exactly the norm of what the next layer adds to. Results are new,
    contiguous tensors. Differentiable once (`layer_norm.py`).

    Deterministic, forward and backward.

    Raises KernelArgumentError: dtype, device or shape of an argument is wrong, eps is negative.
    """
    check_activation("x", x)
    check_like("weight", weight, "x", x)
    if weight.dim() != 1 or x.dim() == 0 or weight.shape[0] != x.shape[-1] or x.shape[-1] == 0:
        raise bad_argument("weight", tuple(weight.shape), f"[D] for x {tuple(x.shape)}")
    check_eps(eps)
    if residual is None:
        return _rms_norm(x, weight, eps)
    check_like("residual", residual, "x", x)
    if residual.shape != x.shape:
        raise bad_argument("residual", tuple(residual.shape), f"the shape of x, {tuple(x.shape)}")
    return _add_rms_norm(x, residual, weight, eps)
