"""Layer normalization (Ba et al., 2016, arXiv:1607.06450); derivatives of it and of RMSNorm.

Both read a row, reduce it and write a row: their time is that of memory, so a row stays in
registers between its statistics and its result. The backward pass reads x and the gradient once and
computes the statistics again from the row it holds, so the forward pass has nothing to save but x.
The gradient of the weights is a sum over all rows: a program takes a run of rows, keeps its sum in
registers, and writes it once; the programs' sums are reduced in a fixed order.

The technique's switch: `layer_norm_gpu.norm_backward(..., fused=False)` computes the gradients of x
and of the weights in two passes over the same memory.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from billfish.kernels._library import (
    bad_argument,
    check_activation,
    check_like,
    differentiate,
    register,
)

# Its operations get their derivatives here.
from billfish.kernels.general.rms_norm import check_eps

_GPU = "billfish.kernels.general.layer_norm_gpu"


def layer_norm_reference(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    scaled = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps) * weight
    return scaled if bias is None else scaled + bias


def norm_backward_reference(
    dy: Tensor, x: Tensor, weight: Tensor, eps: float, centre: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(of x, of weight, of bias), for x [rows, D]. centre: of layer norm, else of RMSNorm."""
    centred = x - x.mean(-1, keepdim=True) if centre else x
    inverse = torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    unit = centred * inverse
    g = dy * weight
    dx = g - unit * (g * unit).mean(-1, keepdim=True)
    if centre:
        dx = dx - g.mean(-1, keepdim=True)
    return dx * inverse, (dy * unit).sum(0), dy.sum(0)


def _cpu(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    return functional.layer_norm(x, weight.shape, weight, bias, eps).contiguous()


def _fake(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    return x.new_empty(x.shape)


def _backward_cpu(
    dy: Tensor, x: Tensor, weight: Tensor, eps: float, centre: bool
) -> tuple[Tensor, Tensor, Tensor]:
    if centre:
        wide = torch.float32
        mean = x.to(wide).mean(-1, keepdim=True)
        inverse = torch.rsqrt((x.to(wide) - mean).square().mean(-1, keepdim=True) + eps)
        found = torch.ops.aten.native_layer_norm_backward(
            dy.to(wide), x.to(wide), weight.shape, mean, inverse, weight.to(wide),
            torch.zeros_like(weight, dtype=wide), [True, True, True],
        )  # fmt: skip
    else:
        found = norm_backward_reference(dy.float(), x.float(), weight.float(), eps, False)
    dx, dw, db = (part.to(x.dtype).contiguous() for part in found)
    return dx, dw, db


def _backward_fake(
    dy: Tensor, x: Tensor, weight: Tensor, eps: float, centre: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape), weight.new_empty(weight.shape)


_layer_norm: Callable[..., Tensor] = register(
    "layer_norm(Tensor x, Tensor weight, Tensor? bias, float eps) -> Tensor",
    fake=_fake,
    cpu=_cpu,
    gpu=_GPU,
)
_norm_backward: Callable[..., tuple[Tensor, Tensor, Tensor]] = register(
    "norm_backward(Tensor dy, Tensor x, Tensor weight, float eps, bool centre)"
    " -> (Tensor, Tensor, Tensor)",
    fake=_backward_fake,
    cpu=_backward_cpu,
    gpu=_GPU,
)


def _rows_backward(
    dy: Tensor, x: Tensor, weight: Tensor, eps: float, centre: bool
) -> tuple[Tensor, Tensor, Tensor]:
    d = x.shape[-1]
    dx, dw, db = _norm_backward(dy.reshape(-1, d), x.reshape(-1, d), weight, eps, centre)
    return dx.view(x.shape), dw, db


def _save_layer(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, eps = inputs
    ctx.save_for_backward(x, weight)
    ctx.eps, ctx.has_bias = eps, bias is not None


def _layer_backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    dx, dw, db = _rows_backward(dy, x, weight, ctx.eps, True)
    return dx, dw, db if ctx.has_bias else None, None


def _save_rms(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, eps = inputs
    ctx.save_for_backward(x, weight)
    ctx.eps = eps


def _rms_backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    dx, dw, _ = _rows_backward(dy, x, weight, ctx.eps, False)
    return dx, dw, None


def _save_add_rms(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(output[1], inputs[2])
    ctx.eps = inputs[3]


def _add_rms_backward(ctx: Any, dy: Tensor, dtotal: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    dx, dw, _ = _rows_backward(dy, x, weight, ctx.eps, False)
    dx = dx + dtotal
    return dx, dx, dw, None


differentiate("layer_norm", _save_layer, _layer_backward)
differentiate("rms_norm", _save_rms, _rms_backward)
differentiate("add_rms_norm", _save_add_rms, _add_rms_backward)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """(x - mean) / sqrt(var + eps) * weight + bias over the last dimension; differentiable once.

    x: [..., D] float32, bfloat16 or float16, any strides; weight, bias: [D] of the same dtype. In
    float32 inside, rounded once; var is of the whole population. Returns a new, contiguous tensor.

    Deterministic, forward and backward.

    Raises KernelArgumentError: dtype, device or shape of an argument is wrong, eps is negative.
    """
    check_activation("x", x)
    vectors = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
    for name, vector in vectors.items():
        check_like(name, vector, "x", x)
        if x.dim() == 0 or vector.shape != x.shape[-1:] or not vector.numel():
            raise bad_argument(name, tuple(vector.shape), f"[D] for x {tuple(x.shape)}")
    check_eps(eps)
    return _layer_norm(x, weight, bias, eps)
