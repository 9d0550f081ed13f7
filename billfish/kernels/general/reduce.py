"""Sum, maximum or minimum of a tensor or along one of its dimensions.

A reduction is a read, so its time is that of memory, if enough reads are in flight. One program a
result starves a GPU where results are few: the values of one result are cut into parts, one program
each. The parts' results must meet. Adding them by atomics would group floats by chance; a second
launch costs microseconds. Here the last program to finish adds the parts, in their order: each
stores its part, then counts itself in with an acquire-release atomic, and who counts to the end
knows that all parts are there to be read.

Any dimension is reduced where it lies: values are seen as [outer, n, inner], and a program reads
pieces contiguous in memory, along n where inner is 1, else along inner.

The technique's switch: `reduce_gpu.reduce(..., fused=False)` makes it two launches.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from billfish.kernels._library import bad_argument, register
from billfish.kernels.general._arguments import (
    COMBINE,
    check_numbers,
    check_operator,
    dimension,
    identity,
    result,
)


def reduce_reference(x: Tensor, op: str = "sum") -> Tensor:
    """Of the last dimension, one element after another."""
    dtype = result(x.dtype, op)
    combine = COMBINE[op]
    total = torch.full(x.shape[:-1], identity(dtype, op), dtype=dtype, device=x.device)
    for i in range(x.shape[-1]):
        total = combine(total, x[..., i])
    return total


def _cpu(x: Tensor, op: str) -> Tensor:
    dtype = result(x.dtype, op)
    if not x.shape[1]:
        return torch.full((x.shape[0], x.shape[2]), identity(dtype, op), dtype=dtype)
    if op == "sum":
        return torch.sum(x, 1, dtype=dtype).contiguous()
    return (torch.amax if op == "max" else torch.amin)(x, 1).contiguous()


def _fake(x: Tensor, op: str) -> Tensor:
    return x.new_empty((x.shape[0], x.shape[2]), dtype=result(x.dtype, op))


_reduce: Callable[..., Tensor] = register(
    "reduce(Tensor x, str op) -> Tensor",
    fake=_fake,
    cpu=_cpu,
    gpu="billfish.kernels.general.reduce_gpu",
)


def reduce(x: Tensor, dim: int | None = None, op: str = "sum") -> Tensor:
    """The sum, max or min of all of x (dim None: a scalar tensor), or along dim, which goes away.

    x: floats (64, 32, bf16, fp16) or integers (8 to 64 bits), any shape and strides (what cannot be
    seen as [outer, n, inner] is copied first). Sums of integers are int64 (they wrap), else x's
    dtype; half floats are added in float32 and rounded once; NaN spreads. Of nothing: the identity,
    0 or the least or largest value.

    Deterministic: the same bits for the same shape on the same device.

    Raises KernelArgumentError: dtype, device, dim or op is wrong, x requires a gradient, or more
    than 2^31 - 1 results.
    """
    check_numbers("x", x)
    check_operator(op)
    if dim is None:
        return _reduce(x.reshape(1, -1, 1), op).view(())
    dim = dimension(dim, x)
    before, after = x.shape[:dim], x.shape[dim + 1 :]
    if before.numel() * after.numel() >= 2**31:
        raise bad_argument("x", tuple(x.shape), "less than 2^31 results")
    whole = x.reshape(before.numel(), x.shape[dim], after.numel())
    return _reduce(whole, op).view(before + after)
