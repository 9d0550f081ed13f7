"""INT4 weights for a checkpoint: rounded to the nearest, or calibrated by GPTQ.

GPTQ rounds a matrix column by column, and after each one moves the columns that are left so that
they make up for its error in the layer's output, as far as the inputs seen in a text allow. With
inputs X [T, K] the error is ||X (W - Q)^T||^2, of which H = X^T X is all that matters.

Source: Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained
Transformers" (arXiv:2210.17323), algorithm 1; act-order with the groups of the original order is
what later versions of its code call static groups.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from billfish.errors import KernelArgumentError
from billfish.quantization.int4 import Int4Groups

GROUP_SIZES = (16, 32, 64, 128, -1)
_BLOCK = 128  # columns whose updates of all later ones are done in one product
_SHRINKS = tuple(1 - 0.025 * step for step in range(13))  # of the scale that covers everything


@dataclass(frozen=True, slots=True)
class Grid:
    """The values a group may take: scales * (0..15 - zeros). Both float32 [..., 1]."""

    scales: Tensor
    zeros: Tensor

    def codes(self, weight: Tensor) -> Tensor:
        """The nearest codes, as floats. A scale of 0 stands for a group of zeros."""
        steps = torch.where(self.scales == 0, 0.0, weight / self.scales)
        return (steps.round_() + self.zeros).clamp_(0, 15)

    def values(self, codes: Tensor) -> Tensor:
        return self.scales * (codes - self.zeros)


def find_grid(
    weight: Tensor, *, symmetric: bool, scale_dtype: torch.dtype, importance: Tensor | None = None
) -> Grid:
    """A grid for each group: weight float32 [..., S] -> Grid of [..., 1].

    Symmetric grids have the zero 8, and the value of largest magnitude at the end of eight steps;
    others reach from the smallest value, or 0, to the largest. Scales are rounded to scale_dtype.

    importance: what an error of each weight costs, broadcast to weight. With it the scale is the
    best of thirteen, down to 0.7 times the one that covers all values, and of both signs where it
    is symmetric: to cut off the rarest values often costs less than coarse steps for all others.
    """
    low, high = (getattr(weight, f)(-1, keepdim=True) for f in ("amin", "amax"))
    if symmetric:
        base = torch.where(-low >= high, low, high) / -8
        zeros = torch.full_like(base, 8)
    else:
        low, high = low.clamp(max=0), high.clamp(min=0)
        base = (high - low) / 15
        zeros = torch.where(base == 0, 0.0, -low / base).round_().clamp_(0, 15)

    def rounded(scales: Tensor) -> Tensor:
        return scales.to(scale_dtype).float()

    best = Grid(rounded(base), zeros)
    if importance is None:
        return best

    def loss(grid: Grid) -> Tensor:
        error = grid.values(grid.codes(weight)).sub_(weight).square_()
        return error.mul_(importance).sum(-1, keepdim=True)

    least = loss(best)
    for shrink in _SHRINKS:
        for sign in (1, -1) if symmetric else (1,):
            scales = base * (shrink * sign)
            if not symmetric:
                zeros = torch.where(scales == 0, 0.0, -low * shrink / scales).round_().clamp_(0, 15)
            grid = Grid(rounded(scales), zeros)
            here = loss(grid)
            better = here < least
            least = torch.where(better, here, least)
            best = Grid(
                torch.where(better, grid.scales, best.scales),
                torch.where(better, grid.zeros, best.zeros),
            )
    return best


def round_to_grid(
    weight: Tensor, *, group_size: int, symmetric: bool = True, scale_dtype: torch.dtype
) -> Int4Groups:
    """Every weight to the nearest value of its group's grid: [N, K], K a multiple of group_size.

    Other than `int4.round_to_nearest` it rounds the scales first, as a checkpoint holds them, and
    has integer zero points where it is not symmetric.

    Raises KernelArgumentError as `quantize_matrix` does.
    """
    weight, groups = _grouped(weight, group_size)
    grid = find_grid(groups, symmetric=symmetric, scale_dtype=scale_dtype)
    return _result(grid.codes(groups).flatten(1), grid, symmetric, group_size)


class Hessian:
    """H = X^T X of the inputs X of a layer, float32 [K, K], added up piece by piece."""

    def __init__(self, k: int, device: torch.device | str = "cpu") -> None:
        self.matrix = torch.zeros(k, k, device=device)
        self.count = 0

    def add(self, inputs: Tensor) -> None:
        """inputs: [..., K], of any floating-point dtype."""
        rows = inputs.reshape(-1, inputs.shape[-1]).to(self.matrix.device, torch.float32)
        self.matrix.addmm_(rows.t(), rows)
        self.count += len(rows)


def quantize_matrix(
    weight: Tensor,
    hessian: Tensor,
    *,
    group_size: int = 128,
    symmetric: bool = True,
    act_order: bool = True,
    damping: float = 0.01,
    scale_dtype: torch.dtype = torch.bfloat16,
) -> Int4Groups:
    """GPTQ of a matrix [N, K] for inputs with X^T X = hessian, float [K, K].

    group_size: 16, 32, 64, 128, or -1 for whole rows; K must be a multiple of it. act_order:
    columns with the largest inputs first, while each keeps the group of its place. damping: what is
    added to the diagonal, relative to its mean; more if the matrix is still not positive definite.
    Columns that the text never used are rounded to the nearest. Works on the weight's device.

    Raises KernelArgumentError for a shape, a group size or a damping that is not possible, and for
    weights or a Hessian that are not finite, or too large for scale_dtype.
    """
    weight, groups = _grouped(weight, group_size)
    n, k = weight.shape
    if not 0 < damping < 1:
        raise KernelArgumentError(f"damping: got {damping}, expected between 0 and 1")
    if hessian.shape != (k, k) or not bool(hessian.isfinite().all()):
        got = f"{tuple(hessian.shape)}"
        raise KernelArgumentError(f"hessian: got {got}, expected finite numbers [{k}, {k}]")
    hessian = hessian.to(weight.device, torch.float32)
    order = torch.arange(k, device=weight.device)
    if act_order:
        order = hessian.diagonal().argsort(descending=True, stable=True)
    upper = _inverse_factor(hessian[order][:, order], damping)
    size = groups.shape[-1]
    work = weight[:, order].clone()
    if act_order:
        importance = torch.empty(k, device=weight.device)
        importance[order] = upper.diagonal() ** -2
        grid = find_grid(
            groups, symmetric=symmetric, scale_dtype=scale_dtype,
            importance=importance.view(-1, size),
        )  # fmt: skip
    else:
        grid = Grid(weight.new_empty(n, k // size, 1), weight.new_empty(n, k // size, 1))

    def grid_at(column: int) -> Grid:
        """Of the group that begins there, as the errors of all columns before have moved it."""
        return find_grid(
            work[:, column : column + size], symmetric=symmetric, scale_dtype=scale_dtype,
            importance=upper.diagonal()[column : column + size] ** -2,
        )  # fmt: skip

    codes = _round_columns(work, upper, order // size, grid, None if act_order else grid_at)
    in_place = torch.empty_like(codes)
    in_place[:, order] = codes
    return _result(in_place, grid, symmetric, group_size)


def _round_columns(
    work: Tensor,
    upper: Tensor,
    groups: Tensor,
    grid: Grid,
    grid_at: Callable[[int], Grid] | None,
) -> Tensor:
    """Codes of the columns of work [N, K], rounded in this order; work is used up.

    The error of each is made up for by those after it: at once within its block, and by a whole
    block in one product in those behind. groups: int64 [K]. grid: of all groups, or to be filled by
    grid_at, called with the first column of each.
    """
    n, k = work.shape
    size = k // grid.scales.shape[1]
    codes = torch.empty_like(work)
    for start in range(0, k, _BLOCK):
        stop = min(start + _BLOCK, k)
        errors = work.new_empty(n, stop - start)
        for column in range(start, stop):
            group = int(groups[column])
            if grid_at is not None and column % size == 0:
                found = grid_at(column)
                grid.scales[:, group], grid.zeros[:, group] = found.scales, found.zeros
            values = work[:, column, None]
            here = Grid(grid.scales[:, group], grid.zeros[:, group])
            code = here.codes(values)
            codes[:, column, None] = code
            error = (values - here.values(code)) / upper[column, column]
            errors[:, column - start, None] = error
            work[:, column + 1 : stop].addmm_(
                error, upper[column, None, column + 1 : stop], alpha=-1
            )
        work[:, stop:].addmm_(errors, upper[start:stop, stop:], alpha=-1)
    return codes


def _grouped(weight: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """float32 [N, K], and the same as [N, G, S]."""
    if weight.dim() != 2 or not weight.is_floating_point() or 0 in weight.shape:
        got = f"{weight.dtype} {tuple(weight.shape)}"
        raise KernelArgumentError(f"weight: got {got}, expected floating point [N, K], not empty")
    if group_size not in GROUP_SIZES:
        raise KernelArgumentError(f"group_size: got {group_size}, expected one of {GROUP_SIZES}")
    n, k = weight.shape
    size = k if group_size == -1 else group_size
    if k % size:
        raise KernelArgumentError(f"group_size: got {size}, of which {k} columns are no multiple")
    if not bool(weight.isfinite().all()):
        raise KernelArgumentError("weight: got values that are not finite")
    weight = weight.float()
    return weight, weight.reshape(n, k // size, size)


def _inverse_factor(hessian: Tensor, damping: float) -> Tensor:
    """U with U^T U = H^-1, upper triangular. Row c of U tells how an error in column c moves those
    after it, once the columns before are fixed.

    H is damped until it has one. Columns without any input get a diagonal of the mean, and so no
    influence on others.
    """
    hessian = hessian.clone()
    diagonal = hessian.diagonal()
    mean = diagonal.mean().item() or 1.0
    diagonal[diagonal == 0] = mean
    while True:
        diagonal += damping * mean
        factor, info = torch.linalg.cholesky_ex(hessian)
        if not int(info):
            inverse = torch.cholesky_inverse(factor)
            upper, info = torch.linalg.cholesky_ex(inverse, upper=True)
            if not int(info):
                return upper
        damping *= 2


def _result(codes: Tensor, grid: Grid, symmetric: bool, group_size: int) -> Int4Groups:
    if not bool(grid.scales.isfinite().all()):
        raise KernelArgumentError("weight: got values too large for the dtype of scales")
    zeros = None if symmetric else grid.zeros[..., 0].to(torch.uint8)
    return Int4Groups(codes.to(torch.uint8), grid.scales[..., 0].clone(), zeros, None, group_size)
