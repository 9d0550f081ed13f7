"""A dense product of matrices with what follows it: the example of tiles, queues and tensor cores.

A program computes a tile of the result. Each of its values needs a row of a and a column of b, so a
tile of 128 by 256 does 85 multiplications for each element that it reads: enough for the tensor
cores to be the limit, if the tiles of a and b along k are there when they are due. They are read
some steps ahead, into a queue in shared memory (on Hopper by its copy engine, whole tiles at a
time). Programs that run together take tiles of a block, not of a row, so that in L2 they share what
they read. A product too small to fill the machine is cut along k, and the parts added in their
order.

Tensor cores do not multiply float32 as it is. For that each thread adds up results of its own, and
what counts is how few reads of shared memory that takes (`matmul_hopper.py`).

A bias, an activation and a residual are applied to the sums while they are in registers, before
their one rounding.

The techniques' switches: `matmul_gpu.matmul(..., fused=False)` writes the product and reads it
again for the rest; `group=1` takes tiles row by row; `stages=` 1 to 4 is the depth of the queue;
`tma=False` copies by threads; `split=` how often k is cut.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from billfish.kernels._library import (
    bad_argument,
    check_activation,
    check_like,
    check_no_grad,
    check_tensors,
    register,
)

ACTIVATIONS = ("none", "relu", "gelu_tanh", "silu")
PRECISIONS = ("ieee", "tf32x3", "tf32")


def matmul_reference(
    a: Tensor, b: Tensor, bias: Tensor | None = None, activation: str = "none",
    residual: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """One operation after another."""
    y = a @ b
    if bias is not None:
        y = y + bias
    if activation == "relu":
        y = y.relu()
    elif activation == "gelu_tanh":
        y = functional.gelu(y, approximate="tanh")
    elif activation == "silu":
        y = functional.silu(y)
    return y if residual is None else y + residual


def _cpu(
    a: Tensor, b: Tensor, bias: Tensor | None, activation: str, residual: Tensor | None,
    precision: str,
) -> Tensor:  # fmt: skip
    """Half floats in float32, so that they are rounded once."""
    more = [None if t is None else t.float() for t in (bias, residual)]
    return matmul_reference(a.float(), b.float(), more[0], activation, more[1]).to(a.dtype)


def _fake(
    a: Tensor, b: Tensor, bias: Tensor | None, activation: str, residual: Tensor | None,
    precision: str,
) -> Tensor:  # fmt: skip
    return a.new_empty((a.shape[0], b.shape[1]))


_matmul: Callable[..., Tensor] = register(
    "matmul(Tensor a, Tensor b, Tensor? bias, str activation, Tensor? residual, str precision)"
    " -> Tensor",
    fake=_fake,
    cpu=_cpu,
    gpu="billfish.kernels.general.matmul_gpu",
)


def matmul(
    a: Tensor, b: Tensor, bias: Tensor | None = None, activation: str = "none",
    residual: Tensor | None = None, precision: str = "ieee",
) -> Tensor:  # fmt: skip
    """activation(a @ b + bias) + residual, in one pass.

    a: [..., M, K], b: [K, N]; float32, bfloat16 or float16, the same for all; any size (0 included)
    and strides (fast: one dimension contiguous, so b may be a weight's transpose). bias: [N].
    activation: "none", "relu", "gelu_tanh" or "silu". residual: [..., M, N]. Returns [..., M, N],
    contiguous, of a's dtype. Sums are float32; all follows before the one rounding. precision, of
    float32 on a GPU: "ieee", "tf32x3" (tensor cores, three products of TF32 for nearly all of
    float32's bits) or "tf32" (one: inputs keep 10 bits of their fractions). Elsewhere it changes
    nothing.

    Deterministic: the same bits from run to run for the same shape on the same device.

    Raises KernelArgumentError: dtype, device or shape is wrong, activation or precision is none of
    the above, or a tensor requires a gradient.
    """
    check_activation("a", a)
    check_tensors(b=b)
    if a.dim() < 2 or b.dim() != 2 or a.shape[-1] != b.shape[0]:
        raise bad_argument("a and b", (tuple(a.shape), tuple(b.shape)), "[..., M, K] and [K, N]")
    shape = (*a.shape[:-1], b.shape[1])
    for name, tensor, expected in (
        ("a", a, a.shape), ("b", b, b.shape), ("bias", bias, shape[-1:]),
        ("residual", residual, shape),
    ):  # fmt: skip
        if tensor is None:
            continue
        check_tensors(**{name: tensor})
        check_like(name, tensor, "a", a)
        check_no_grad(name, tensor)
        if tensor.shape != expected:
            raise bad_argument(name, tuple(tensor.shape), str(tuple(expected)))
    if activation not in ACTIVATIONS:
        raise bad_argument("activation", repr(activation), " or ".join(ACTIVATIONS))
    if precision not in PRECISIONS:
        raise bad_argument("precision", repr(precision), " or ".join(PRECISIONS))
    rows = torch.Size(shape[:-1]).numel()
    flat = None if residual is None else residual.reshape(rows, shape[-1])
    return _matmul(
        a.reshape(rows, a.shape[-1]), b, bias, activation, flat, precision
    ).view(shape)  # fmt: skip
