"""The one INT4 form that every format becomes, and the plainest way to make it: rounding."""

from dataclasses import dataclass

import torch
from torch import Tensor

from billfish.errors import KernelArgumentError


@dataclass(frozen=True, slots=True)
class Int4Groups:
    """INT4 weights with one scale a group: with g = k // group_size,

        W[n, k] = scales[n, g] * (codes[n, k] - zeros[n, g])     zeros None: 8
        W[n, k] = scales[n, g] * codes[n, k] + offsets[n, g]     offsets given

    codes: uint8 [N, K], 0..15. scales, offsets: float32 [N, G]. zeros: uint8 [N, G], for formats
    with integer zero points. group_size: columns of a group, -1 for all; the last may be short.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    offsets: Tensor | None
    group_size: int


def round_to_nearest(weight: Tensor, group_size: int, *, symmetric: bool = True) -> Int4Groups:
    """The nearest INT4 weights, group by group, without regard to any data.

    weight: floating point [N, K]. symmetric: codes stand for -8..7 times the scale, which is such
    that the value of largest magnitude is exact; else for 0..15 times the scale above the smallest
    value, an offset, so that both extremes are exact. The error of any weight is at most half of
    its group's scale (in the symmetric form twice that at the end opposite to the largest
    magnitude).

    Raises KernelArgumentError for a weight that is not a matrix of finite floating-point numbers,
    or for a group size below 1 other than -1.
    """
    if weight.dim() != 2 or not weight.is_floating_point() or 0 in weight.shape:
        got = f"{weight.dtype} {tuple(weight.shape)}"
        raise KernelArgumentError(f"weight: got {got}, expected floating point [N, K], not empty")
    if group_size < 1 and group_size != -1:
        raise KernelArgumentError(f"group_size: got {group_size}, expected at least 1, or -1")
    if not bool(weight.isfinite().all()):
        raise KernelArgumentError("weight: got values that are not finite")
    n, k = weight.shape
    size = k if group_size == -1 else group_size
    groups = -(-k // size)
    # A short last group is filled up with its own last column, which changes none of its extremes.
    wide = torch.nn.functional.pad(
        weight.float()[None], (0, groups * size - k), mode="replicate"
    ).view(n, groups, size)
    low, high = wide.amin(-1), wide.amax(-1)
    offsets = None
    if symmetric:
        # The end of larger magnitude becomes -8 steps, so the scale has the opposite sign.
        scales = torch.where(-low >= high, low, high) / -8
    else:
        scales, offsets = (high - low) / 15, low
    steps = (wide if offsets is None else wide - offsets[..., None]) / scales[..., None]
    steps = steps.nan_to_num(0.0).round() + (
        8 if offsets is None else 0
    )  # 0 / 0: a group of equals
    codes = steps.clamp_(0, 15).to(torch.uint8).view(n, -1)[:, :k].contiguous()
    return Int4Groups(codes, scales, None, offsets, group_size)
