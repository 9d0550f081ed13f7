"""Sum, maximum or minimum of each segment of a vector (of each row of a CSR matrix, of each bag).

One program a segment is simple, and idle where lengths are skewed: a long segment keeps one program
busy long after all others ended. Here all values are cut at the multiples of a fixed size: a
segment has a program for what lies before the first cut in it, and each cut one for what follows it
of the segment that goes on there, which it finds by a search. So the grid is known from sizes
alone, and most segments, which no cut meets, are as cheap as with a program each. The pieces of one
that is cut are added in their order by the program that ends last, as in `reduce.py`.

The technique's switch: `segment_reduce_gpu.segment_reduce(..., balanced=False)` gives each segment
to one program. A program a segment is too much for segments of a few values: for those a scan
and differences of it are better (for integers; floats would cancel).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from billfish.kernels._library import bad_argument, register
from billfish.kernels.general._arguments import (
    check_numbers,
    check_operator,
    check_same_device,
    identity,
    result,
)


def segment_reduce_reference(x: Tensor, offsets: Tensor, op: str = "sum") -> Tensor:
    """One segment after another; those out of order are empty."""
    dtype = result(x.dtype, op)
    bounds = offsets.tolist()
    out = torch.full((len(bounds) - 1,), identity(dtype, op), dtype=dtype, device=x.device)
    for i in range(len(bounds) - 1):
        segment = x[bounds[i] : bounds[i + 1]]
        if len(segment):
            out[i] = segment.sum(dtype=dtype) if op == "sum" else getattr(segment, op)()
    return out


def _cpu(x: Tensor, offsets: Tensor, op: str) -> Tensor:
    dtype = result(x.dtype, op)
    lengths = offsets.diff().clamp_(min=0)
    segment = torch.arange(len(lengths)).repeat_interleave(lengths)
    # Half floats are added in float32, and integers by index, for which torch has no dtype of sums.
    wide = torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else dtype
    out = torch.full((len(lengths),), identity(dtype, op), dtype=wide)
    how = {"sum": "sum", "max": "amax", "min": "amin"}[op]
    out.scatter_reduce_(0, segment, x[offsets[0] : offsets[-1]].to(wide), how)
    return out.to(dtype)


def _fake(x: Tensor, offsets: Tensor, op: str) -> Tensor:
    return x.new_empty((offsets.shape[0] - 1,), dtype=result(x.dtype, op))


_segment_reduce: Callable[..., Tensor] = register(
    "segment_reduce(Tensor x, Tensor offsets, str op) -> Tensor",
    fake=_fake,
    cpu=_cpu,
    gpu="billfish.kernels.general.segment_reduce_gpu",
)


def segment_reduce(x: Tensor, offsets: Tensor, op: str = "sum") -> Tensor:
    """out[i] = the sum, max or min of x[offsets[i] : offsets[i + 1]]; of nothing, the identity.

    x: [n] floats (64, 32, bf16, fp16) or integers (8 to 64 bits), any stride. offsets: [S + 1]
    int32 or int64, never decreasing, from 0 or more to n or less. Returns [S]: int64 for sums of
    integers, else x's dtype; half floats are added in float32 and rounded once; NaN spreads.

    Deterministic: the same bits for the same offsets on the same device.

    Raises KernelArgumentError: dtype, device, shape or op is wrong, x requires a gradient, and, on
    a CPU only (a GPU's would have to be waited for), offsets that decrease or leave x. On a GPU
    what those say of x is wrong, but nothing outside x is read.
    """
    check_numbers("x", x)
    check_operator(op)
    if x.dim() != 1:
        raise bad_argument("x", tuple(x.shape), "[n]")
    check_same_device("offsets", offsets, "x", x)
    if offsets.dtype not in (torch.int32, torch.int64) or offsets.dim() != 1 or not len(offsets):
        got = f"{offsets.dtype} {tuple(offsets.shape)}"
        raise bad_argument("offsets", got, "int32 or int64 [segments + 1]")
    if offsets.is_cpu and not torch.compiler.is_compiling() and type(offsets) is Tensor:
        inside = int(offsets[0]) >= 0 and int(offsets[-1]) <= len(x)
        if not inside or bool((offsets.diff() < 0).any()):
            raise bad_argument("offsets", "values out of order or of x", f"0 to {len(x)}, in order")
    return _segment_reduce(x, offsets, op)
