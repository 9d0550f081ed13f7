"""Cross-entropy of logits, and fused with the linear layer that makes them.

Of a row of logits, the loss needs the logarithm of the sum of exponentials and one logit; torch's
operators write all logarithms of probabilities and read them again. Here a row is read once,
maximum and sum together (the online sum of `softmax.py`), and nothing as long as the row is written
before the backward pass, which writes softmax - one_hot.

With a large vocabulary, the logits are the largest thing in training: 8192 tokens of 128256 logits
in bfloat16 are 2 GB, and their gradient as much again. The loss is a sum over tokens, so
`linear_cross_entropy` takes some rows at a time: their logits, their loss, then the gradient of the
logits in their place, and from it at once the gradients of x and weight. Memory is a chunk's,
whatever the number of tokens (the idea of Liger-Kernel: Hsu et al., 2024, arXiv:2410.10989).
Every chunk but the first reads and writes the weight's gradient, in float32, once more. So chunks
are as large as still costs little memory: D rows, whose logits take what the weight takes. Three
times as many of bfloat16 are a single chunk, whose gradient of the weight needs no float32.

The techniques' switches: `cross_entropy_gpu.cross_entropy(..., online=False)` reads a row twice,
for its maximum first; `chunk` as large as x has rows.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from billfish.kernels._library import (
    bad_argument,
    check_activation,
    check_like,
    differentiate,
    register,
)
from billfish.kernels.general._arguments import check_same_device

SHORTEST_CHUNK = 1024
"""Rows of a chunk, at least, where the caller names none: fewer do not fill a GPU."""

_GPU = "billfish.kernels.general.cross_entropy_gpu"


def cross_entropy_reference(logits: Tensor, target: Tensor, ignore_index: int = -100) -> Tensor:
    """The loss of each row; 0 where it is ignored."""
    picked = logits.gather(1, target.clamp(min=0).unsqueeze(1)).squeeze(1)
    loss = torch.logsumexp(logits, 1) - picked
    return torch.where(target == ignore_index, 0.0, loss)


def _cpu(logits: Tensor, target: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    total = torch.logsumexp(logits.float(), 1)
    kept = target != ignore_index
    picked = logits.gather(1, torch.where(kept, target, 0).unsqueeze(1)).squeeze(1)
    return torch.where(kept, total - picked.float(), 0.0), total


def _fake(logits: Tensor, target: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    rows = logits.new_empty((logits.shape[0],), dtype=torch.float32)
    return rows, torch.empty_like(rows)


def _backward_cpu(
    dloss: Tensor, logits: Tensor, total: Tensor, target: Tensor, ignore_index: int
) -> Tensor:
    kept = target != ignore_index
    grad = (logits.float() - total.unsqueeze(1)).exp_()
    grad.scatter_add_(
        1, torch.where(kept, target, 0).unsqueeze(1), torch.full_like(grad[:, :1], -1.0)
    )
    # Not a product with 0: the logits of an ignored row may be anything.
    grad = torch.where(kept.unsqueeze(1), grad * dloss.unsqueeze(1), 0.0)
    return grad.to(logits.dtype)


def _backward_fake(
    dloss: Tensor, logits: Tensor, total: Tensor, target: Tensor, ignore_index: int
) -> Tensor:
    return logits.new_empty(logits.shape)


_cross_entropy: Callable[..., tuple[Tensor, Tensor]] = register(
    "cross_entropy(Tensor logits, Tensor target, int ignore_index) -> (Tensor, Tensor)",
    fake=_fake,
    cpu=_cpu,
    gpu=_GPU,
)
_cross_entropy_backward: Callable[..., Tensor] = register(
    "cross_entropy_backward(Tensor dloss, Tensor logits, Tensor total, Tensor target,"
    " int ignore_index) -> Tensor",
    fake=_backward_fake,
    cpu=_backward_cpu,
    gpu=_GPU,
)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    logits, target, ctx.ignore_index = inputs
    ctx.save_for_backward(logits, output[1], target)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, dloss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    logits, total, target = ctx.saved_tensors
    return (
        _cross_entropy_backward(dloss, logits, total, target, ctx.ignore_index),
        None,
        None,
    )


differentiate("cross_entropy", _save, _backward)


def _kind(weight: Tensor, rows: int, chunk: int) -> torch.dtype:
    """In which the weight's gradient is added up: in bfloat16 there is nothing to add to a single
    chunk's, and no sum is too large for it."""
    alone = weight.dtype == torch.bfloat16 and rows <= chunk
    return torch.bfloat16 if alone else torch.float32


def in_chunks(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    ignore_index: int,
    chunk: int,
    gradients: bool,
    step: Callable[[Tensor, Tensor], Tensor],
    add_product: Callable[[Tensor, Tensor, Tensor, bool], object],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(mean loss, gradients of the loss's sum by x and by weight, the latter as `_kind` says, one
    over the number of rows that count).

    Gradients of the sum, not of the mean: that of a logit among many classes, by many rows, is too
    small for float16, and what has vanished no scaling of the loss brings back.

    step: (logits, target) to the loss of each row, the logits' gradient left in the logits.
    add_product: (sum, a, b, first) adds a @ b, or sets sum to it where it is the first.
    """
    loss = torch.zeros((), dtype=torch.float32, device=x.device)
    dx = torch.empty(x.shape if gradients else 0, dtype=x.dtype, device=x.device)
    kind = _kind(weight, x.shape[0], chunk)
    dw = torch.empty(weight.shape if gradients else 0, dtype=kind, device=x.device)
    if not x.shape[0]:
        dw.zero_()
    for first in range(0, x.shape[0], chunk):
        rows = x[first : first + chunk]
        logits = rows @ weight.t()
        loss += step(logits, target[first : first + chunk]).sum()
        if gradients:
            torch.mm(logits, weight, out=dx[first : first + chunk])
            add_product(dw, logits.t(), rows, first == 0)
    counted = (target != ignore_index).sum().float()
    return loss / counted, dx, dw, 1.0 / counted.clamp(min=1)


def _step_cpu(ignore_index: int) -> Callable[[Tensor, Tensor], Tensor]:
    def step(logits: Tensor, target: Tensor) -> Tensor:
        loss, total = _cpu(logits, target, ignore_index)
        ones = torch.ones_like(loss)
        logits.copy_(_backward_cpu(ones, logits, total, target, ignore_index))
        return loss

    return step


def _linear_cpu(
    x: Tensor, weight: Tensor, target: Tensor, ignore_index: int, chunk: int, gradients: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    def add_product(total: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
        if total.dtype == a.dtype:
            total.addmm_(a, b, beta=0 if first else 1)
        else:
            total.addmm_(a.float(), b.float(), beta=0 if first else 1)

    step = _step_cpu(ignore_index)
    return in_chunks(x, weight, target, ignore_index, chunk, gradients, step, add_product)


def _linear_fake(
    x: Tensor, weight: Tensor, target: Tensor, ignore_index: int, chunk: int, gradients: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (
        x.new_empty((), dtype=torch.float32),
        x.new_empty(x.shape if gradients else (0,)),
        weight.new_empty(
            weight.shape if gradients else (0,), dtype=_kind(weight, x.shape[0], chunk)
        ),
        x.new_empty((), dtype=torch.float32),
    )


_linear_cross_entropy: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]] = register(
    "linear_cross_entropy(Tensor x, Tensor weight, Tensor target, int ignore_index, int chunk,"
    " bool gradients) -> (Tensor, Tensor, Tensor, Tensor)",
    fake=_linear_fake,
    cpu=_linear_cpu,
    gpu=_GPU,
)


def _linear_save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.dtype = inputs[0].dtype
    ctx.save_for_backward(*output[1:])
    ctx.mark_non_differentiable(*output[1:])


def _linear_backward(ctx: Any, dloss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    *sums, scale = ctx.saved_tensors
    # Of one dimension, or it would be rounded to the dtype of what it scales.
    factor = (dloss * scale).view(1)
    dx, dw = (torch.mul(part, factor, out=torch.empty_like(part, dtype=ctx.dtype)) for part in sums)
    return dx, dw, None, None, None, None


differentiate("linear_cross_entropy", _linear_save, _linear_backward)


def _check_target(target: Tensor, rows: int, classes: int, ignore_index: int) -> None:
    if target.dtype != torch.int64 or target.shape != (rows,):
        raise bad_argument("target", f"{target.dtype} {tuple(target.shape)}", f"int64 ({rows},)")
    if target.is_cpu and not torch.compiler.is_compiling() and type(target) is Tensor:
        wrong = ((target < 0) | (target >= classes)) & (target != ignore_index)
        if bool(wrong.any()):
            got = target[wrong][0].item()
            raise bad_argument("target", got, f"0 to {classes - 1}, or {ignore_index}")


def cross_entropy(
    logits: Tensor, target: Tensor, ignore_index: int = -100, reduction: str = "mean"
) -> Tensor:
    """-log(softmax(logits)[target]), a float32 scalar, or [N] without reduction.

    logits: [N, V] float32, bfloat16 or float16, any strides; target: int64 [N], each 0 to V - 1 or
    ignore_index, for which the loss is 0. reduction: "mean" (of those not ignored: NaN if all are),
    "sum" or "none". In float32 inside; the gradient is rounded once to the logits' dtype.
    Differentiable once.

    Deterministic, forward and backward.

    Raises KernelArgumentError: dtype, device, shape or reduction is wrong, and, on a CPU only (a
    GPU's would have to be waited for, and gives NaN), a target out of range.
    """
    check_activation("logits", logits)
    if logits.dim() != 2 or not logits.shape[1]:
        raise bad_argument("logits", tuple(logits.shape), "[N, V]")
    if reduction not in ("mean", "sum", "none"):
        raise bad_argument("reduction", repr(reduction), "mean, sum or none")
    check_same_device("target", target, "logits", logits)
    _check_target(target, logits.shape[0], logits.shape[1], ignore_index)
    loss, _ = _cross_entropy(logits, target, ignore_index)
    if reduction == "none":
        return loss
    total = loss.sum()
    if reduction == "sum":
        return total
    return total / (target != ignore_index).sum(dtype=torch.float32)


def linear_cross_entropy(
    x: Tensor, weight: Tensor, target: Tensor, ignore_index: int = -100, chunk: int | None = None
) -> Tensor:
    """cross_entropy(x @ weight.T, target), the mean, with the logits of `chunk` rows at a time.

    x: [N, D], weight: [V, D] of the same dtype, float32, bfloat16 or float16; target: int64 [N] as
    for `cross_entropy`. chunk: None for D rows, and 1024 at least; of bfloat16 all rows, where
    several chunks would need as much memory (up to 3 D rows, from D = 1024 on). Besides the
    gradients (and the weight's in float32, but for a single chunk of bfloat16), memory is for
    chunk * V logits, twice where there are several. Where a gradient is wanted it is computed in
    the forward pass, together with the loss; differentiable once. Returns a float32 scalar.

    Deterministic as far as torch's matmul is.

    Raises KernelArgumentError: dtype, device, shape or chunk is wrong, or, on a CPU, a target out
    of range.
    """
    check_activation("x", x)
    if x.dim() != 2:
        raise bad_argument("x", tuple(x.shape), "[N, D]")
    check_like("weight", weight, "x", x)
    if weight.dim() != 2 or weight.shape[1] != x.shape[1] or not weight.shape[0]:
        raise bad_argument("weight", tuple(weight.shape), f"[V, {x.shape[1]}]")
    check_same_device("target", target, "x", x)
    if chunk is None:
        chunk = max(SHORTEST_CHUNK, x.shape[1])
        # Several chunks need as much: logits of two, of which one is made while the other is still
        # there, and a gradient of the weight in float32 instead of bfloat16.
        if weight.dtype == torch.bfloat16 and x.shape[0] <= 2 * chunk + x.shape[1]:
            chunk = max(1, x.shape[0])
    if not isinstance(chunk, int) or chunk < 1:
        raise bad_argument("chunk", chunk, "1 or more rows")
    _check_target(target, x.shape[0], weight.shape[0], ignore_index)
    wanted = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    return _linear_cross_entropy(x, weight, target, ignore_index, chunk, wanted)[0]
