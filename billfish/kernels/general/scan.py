"""Inclusive and exclusive scan: running sum, maximum or minimum along a dimension.

A scan moves little and adds little, so its time is that of memory: on a GPU, the best is to read
every value once and write every result once. The textbook's three passes (sums of tiles, their
scan, the tiles again) read twice; here tiles hand their sums on while the others still read
(decoupled look-back, explained in `_triton.py`), one pass, one launch.

The technique's switch: `scan_gpu.scan(..., deterministic=True)` has each tile wait for the one
before it. That is slower, and the only way to have one grouping of float additions for all time.
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


def scan_reference(x: Tensor, exclusive: bool = False, op: str = "sum") -> Tensor:
    """Along the last dimension, one element after another."""
    out = torch.empty(x.shape, dtype=result(x.dtype, op), device=x.device)
    total = torch.full(x.shape[:-1], identity(out.dtype, op), dtype=out.dtype, device=x.device)
    combine = COMBINE[op]
    for i in range(x.shape[-1]):
        after = combine(total, x[..., i])
        out[..., i] = total if exclusive else after
        total = after
    return out


def _cpu(x: Tensor, exclusive: bool, op: str, deterministic: bool) -> Tensor:
    dtype = result(x.dtype, op)
    source = x[:, : max(x.shape[1] - 1, 0)] if exclusive else x
    if op == "sum":
        done = torch.cumsum(source, 1, dtype=dtype)
    else:
        done = (torch.cummax if op == "max" else torch.cummin)(source, 1).values
    if not exclusive or not x.shape[1]:
        return done.contiguous()
    return torch.cat((done.new_full((x.shape[0], 1), identity(dtype, op)), done), 1)


def _fake(x: Tensor, exclusive: bool, op: str, deterministic: bool) -> Tensor:
    return x.new_empty(x.shape, dtype=result(x.dtype, op))


_scan: Callable[..., Tensor] = register(
    "scan(Tensor x, bool exclusive, str op, bool deterministic) -> Tensor",
    fake=_fake,
    cpu=_cpu,
    gpu="billfish.kernels.general.scan_gpu",
)


def scan(
    x: Tensor,
    dim: int = -1,
    exclusive: bool = False,
    op: str = "sum",
    deterministic: bool = False,
) -> Tensor:
    """The running sum, max or min of x along dim; exclusive: of what comes before each element.

    x: floats (64, 32, bf16, fp16) or integers (8 to 64 bits), any shape but a scalar, any strides
    (a dimension that is not contiguous is copied first). Returns x's shape, contiguous: sums of
    integers in int64 (they wrap), else in x's dtype. An exclusive scan starts with the identity: 0,
    or the least or largest value. Half floats are added in float32 and rounded once; NaN spreads.

    Deterministic: always for integers, max and min. Sums of floats may differ in the last bits from
    run to run on a GPU, unless `deterministic`, which is slower.

    Raises KernelArgumentError: dtype, device, dim or op is wrong, or x requires a gradient.
    """
    check_numbers("x", x)
    check_operator(op)
    for name, flag in (("exclusive", exclusive), ("deterministic", deterministic)):
        if not isinstance(flag, bool):
            raise bad_argument(name, flag, "True or False")
    dim = dimension(dim, x)
    moved = x.movedim(dim, -1)
    rows = moved.reshape(moved.shape[:-1].numel(), moved.shape[-1])
    out = _scan(rows, exclusive, op, deterministic)
    return out.view(moved.shape).movedim(-1, dim).contiguous()
