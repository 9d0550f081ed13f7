"""Softmax and its derivative along a dimension.

Written as torch operators, a softmax is five passes over memory (maximum, difference, exponential,
sum, quotient). Here a row stays in registers: one read, one write. A longer row is shared by
several programs, which tell each other their maximum and sum; and one that is too long even for
them, or not aligned, is read twice: first its maximum and sum together, the sum rescaled whenever
the maximum grows (Milakov & Gimelshein, 2018, arXiv:1805.02867), then for the result.

The technique's switch: `softmax_gpu.softmax(..., resident=False)` reads every row twice.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from billfish.kernels._library import bad_argument, check_activation, differentiate, register
from billfish.kernels.general._arguments import dimension

_GPU = "billfish.kernels.general.softmax_gpu"


def softmax_reference(x: Tensor) -> Tensor:
    """Along the last dimension."""
    powers = (x - x.amax(-1, keepdim=True)).exp()
    return powers / powers.sum(-1, keepdim=True)


def softmax_backward_reference(dy: Tensor, y: Tensor) -> Tensor:
    return y * (dy - (dy * y).sum(-1, keepdim=True))


def _cpu(x: Tensor) -> Tensor:
    return torch.softmax(x, -1).contiguous()


def _backward_cpu(dy: Tensor, y: Tensor) -> Tensor:
    return torch._softmax_backward_data(dy, y, -1, y.dtype).contiguous()


def _fake(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _backward_fake(dy: Tensor, y: Tensor) -> Tensor:
    return y.new_empty(y.shape)


_softmax: Callable[..., Tensor] = register(
    "softmax(Tensor x) -> Tensor", fake=_fake, cpu=_cpu, gpu=_GPU
)
_softmax_backward: Callable[..., Tensor] = register(
    "softmax_backward(Tensor dy, Tensor y) -> Tensor",
    fake=_backward_fake,
    cpu=_backward_cpu,
    gpu=_GPU,
)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(output)


def _backward(ctx: Any, dy: Tensor) -> Tensor:
    return _softmax_backward(dy, *ctx.saved_tensors)


differentiate("softmax", _save, _backward)


def softmax(x: Tensor, dim: int = -1) -> Tensor:
    """exp(x) / sum(exp(x)) along dim, differentiable once; returns x's shape, contiguous.

    x: float32, bfloat16 or float16, any shape but a scalar, any strides (a dimension that is not
    the last is copied). In float32 inside, rounded once. A row of minus infinities is NaN.

    Deterministic, forward and backward.

    Raises KernelArgumentError: dtype, device or dim is wrong.
    """
    check_activation("x", x)
    if x.dim() == 0:
        raise bad_argument("x", "a scalar", "a dimension at least")
    dim = dimension(dim, x)
    moved = x.movedim(dim, -1)
    rows = moved.reshape(moved.shape[:-1].numel(), moved.shape[-1])
    return _softmax(rows).view(moved.shape).movedim(-1, dim).contiguous()
