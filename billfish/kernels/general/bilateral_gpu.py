"""The bilateral filter on a GPU, in Triton; see `bilateral.py`."""

# ruff: noqa: RUF005 (Triton knows no starred tuples)
# mypy: disable-error-code="assignment"

import math
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from billfish.kernels._library import kept_table
from billfish.kernels.general._image_triton import as_image, inner, read, strip
from billfish.kernels.general.gpu import _on

ROWS, COLUMNS = 4, 256


@triton.jit
def _bilateral_kernel(
    x, near, out, height, width, like, space, tiles_y, tiles_x, RADIUS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, MODE: tl.constexpr, TABLE: tl.constexpr,
):  # fmt: skip
    """Program (tile, strip, image): ROWS rows of COLUMNS columns. near: the exponents of the
    window's places, to the base 2; like, space: what a squared difference, and a squared distance,
    are multiplied by for theirs."""
    SIZE: tl.constexpr = 2 * RADIUS + 1
    image, top, column, there = strip(width, tiles_y, tiles_x, ROWS, COLUMNS)
    x += image * height * width
    own, total, weight = (), (), ()
    for r in tl.static_range(ROWS):
        # Rows below the last are computed like the last, and not stored.
        row = tl.minimum(top + r, height - 1)
        own = own + (read(x, row, column, there, height, width, 0.0, MODE, tl.float32),)
        total = total + (tl.zeros([COLUMNS], tl.float32),)
        weight = weight + (tl.zeros([COLUMNS], tl.float32),)
    for across in range(SIZE):
        at = inner(column + across - RADIUS, width, MODE)
        for i in tl.static_range(ROWS + SIZE - 1):
            got = read(x, top + i - RADIUS, at, there, height, width, 0.0, MODE, tl.float32)
            more, counts = (), ()
            for r in tl.static_range(ROWS):
                if i - r >= 0 and i - r < SIZE:
                    away = got - own[r]
                    if TABLE:
                        place = tl.load(near + (i - r) * SIZE + across)
                        count = tl.exp2(away * away * like + place)
                    else:
                        far = (i - r - RADIUS) * (i - r - RADIUS)
                        far += (across - RADIUS) * (across - RADIUS)
                        count = tl.exp2(away * away * like) * tl.exp2(far.to(tl.float32) * space)
                    more, counts = more + (total[r] + count * got,), counts + (weight[r] + count,)
                else:
                    more, counts = more + (total[r],), counts + (weight[r],)
            total, weight = more, counts
    for r in tl.static_range(ROWS):
        place = out + (image * height + top + r) * width + column
        result = as_image(total[r] / weight[r], out.dtype.element_ty)
        tl.store(place, result, mask=there & (top + r < height))


@cache
def _near(radius: int, space: float, device: torch.device) -> Tensor:
    away = torch.arange(-radius, radius + 1, dtype=torch.float64, device="cpu") ** 2
    return kept_table(((away[:, None] + away) * space).float(), device)


def bilateral(
    x: Tensor, radius: int, sigma_space: float, sigma_range: float, mode: str, *,
    reuse: bool = True, table: bool = True,
) -> Tensor:  # fmt: skip
    """x: [images, H, W]."""
    images, height, width = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not x.numel():
        return out
    like, space = (-math.log2(math.e) / (2 * sigma**2) for sigma in (sigma_range, sigma_space))
    rows = ROWS if reuse else 1
    tiles_x, tiles_y = triton.cdiv(width, COLUMNS), triton.cdiv(height, rows)
    with _on(x):
        _bilateral_kernel[(tiles_x * tiles_y * images,)](
            x.contiguous(), _near(radius, space, x.device), out, height, width, like, space,
            tiles_y, tiles_x, RADIUS=radius, ROWS=rows, COLUMNS=COLUMNS, MODE=mode, TABLE=table,
            num_warps=4,
        )  # fmt: skip
    return out
