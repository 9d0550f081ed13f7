"""The one INT4 form that every format becomes, and the plainest way to make it: rounding."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from billfish.errors import KernelArgumentError


@dataclass(frozen=True, slots=True)
class Int4Groups:
    """INT4 weights with one scale a group: with g = k // group_size, or g_idx[k] where given,

        W[n, k] = scales[n, g] * (codes[n, k] - zeros[n, g])     zeros None: 8
        W[n, k] = scales[n, g] * codes[n, k] + offsets[n, g]     offsets given

    codes: uint8 [N, K], 0..15. scales, offsets: float32 [N, G]. zeros: uint8 [N, G], for formats
    with integer zero points. group_size: columns of a group, -1 for all; the last may be short.
    g_idx: int32 [K], the group of each column where they are not in order (act-order).
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    offsets: Tensor | None
    group_size: int
    g_idx: Tensor | None = None

    def group_of_column(self) -> Tensor:
        """int64 [K]: the group of each column."""
        if self.g_idx is not None:
            return self.g_idx.long()
        return _plain_groups(self.codes.shape[1], self.group_size, self.codes.device)

    def dequantize(self) -> Tensor:
        """The weights, float32 [N, K]. With zeros the product is rounded once; with offsets the
        product and the sum are, once each."""
        group = self.group_of_column()
        scales = self.scales[:, group]
        if self.offsets is not None:
            return scales.mul_(self.codes).add_(self.offsets[:, group])
        zeros = 8.0 if self.zeros is None else self.zeros.float()[:, group]
        return scales.mul_(self.codes.float() - zeros)


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


_KERNEL_GROUP_SIZES = (128, 64, 32, 16)


def simplified(weight: Int4Groups) -> Int4Groups:
    """The same weights in the form that kernels read: nothing is rounded.

    Groups that are in order lose their g_idx; zero points that are all 8 are left out; a group of
    a whole row is -1; and a group of any other size becomes several of the largest size that
    divides it, of 128, 64, 32 and 16.

    Raises KernelArgumentError for a g_idx out of range, or for group sizes that none divides.
    """
    k = weight.codes.shape[1]
    size, g_idx, zeros = weight.group_size, weight.g_idx, weight.zeros
    if g_idx is not None and not 0 <= int(g_idx.min()) <= int(g_idx.max()) < weight.scales.shape[1]:
        raise KernelArgumentError(
            f"g_idx: got groups {int(g_idx.min())} to {int(g_idx.max())}, expected 0 to "
            f"{weight.scales.shape[1] - 1}"
        )
    if zeros is not None and bool((zeros == 8).all()):
        zeros = None
    if size == -1 or (size >= k and weight.scales.shape[1] == 1):
        size = -1
    if g_idx is not None and torch.equal(g_idx.long(), _plain_groups(k, size, g_idx.device)):
        g_idx = None
    weight = replace(weight, group_size=size, g_idx=g_idx, zeros=zeros)
    return weight if size in (-1, *_KERNEL_GROUP_SIZES) else _with_smaller_groups(weight)


def _with_smaller_groups(weight: Int4Groups) -> Int4Groups:
    k, size = weight.codes.shape[1], weight.group_size
    smaller = next((s for s in _KERNEL_GROUP_SIZES if size % s == 0), None)
    if smaller is None:
        raise KernelArgumentError(f"group_size: got {size}, expected -1 or a multiple of 16")
    g_idx = weight.g_idx
    if g_idx is not None:
        ordered, perm = g_idx.long().sort(stable=True)
        if not torch.equal(ordered, _plain_groups(k, size, g_idx.device)):
            raise KernelArgumentError(f"g_idx: its groups are not of {size} columns each")
        g_idx = torch.empty_like(g_idx)
        g_idx[perm] = _plain_groups(k, smaller, perm.device).int()

    def repeated(values: Tensor | None) -> Tensor | None:
        if values is None:
            return None
        # The last group may be short, and then has fewer parts.
        return values.repeat_interleave(size // smaller, dim=1)[:, : -(-k // smaller)].contiguous()

    scales = repeated(weight.scales)
    assert scales is not None
    return Int4Groups(
        weight.codes, scales, repeated(weight.zeros), repeated(weight.offsets), smaller, g_idx
    )


def merge(parts: Sequence[Int4Groups]) -> Int4Groups | None:
    """The weights of several layers of one input, rows below rows, or None.

    None where they cannot be one weight: other group sizes, another order of columns, or floating
    offsets in some only. Zero points in some only are no hindrance.
    """
    first = parts[0]
    if len(parts) == 1:
        return first
    for part in parts[1:]:
        if part.group_size != first.group_size or part.scales.shape[1] != first.scales.shape[1]:
            return None
        if (part.offsets is None) != (first.offsets is None):
            return None
        if not torch.equal(part.group_of_column(), first.group_of_column()):
            return None
    zeros = None
    if any(part.zeros is not None for part in parts):
        zeros = torch.cat(
            [
                part.scales.new_full(part.scales.shape, 8, dtype=torch.uint8)
                if part.zeros is None
                else part.zeros
                for part in parts
            ]
        )
    offsets = [part.offsets for part in parts if part.offsets is not None]
    return Int4Groups(
        torch.cat([part.codes for part in parts]),
        torch.cat([part.scales for part in parts]),
        zeros,
        torch.cat(offsets) if offsets else None,
        first.group_size,
        first.g_idx,
    )


def _plain_groups(k: int, group_size: int, device: torch.device) -> Tensor:
    columns = torch.arange(k, device=device)
    return torch.zeros_like(columns) if group_size == -1 else columns // group_size
