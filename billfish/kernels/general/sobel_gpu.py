"""Sobel's gradient on a GPU, in Triton; see `sobel.py`."""

# ruff: noqa: RUF005 (Triton knows no starred tuples)
# mypy: disable-error-code="assignment,var-annotated"

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from billfish.kernels.general._image_triton import inner, read, strip
from billfish.kernels.general.gpu import _on

ROWS, COLUMNS = 8, 256
_EIGHTH = tl.constexpr(math.tan(math.pi / 8))
_QUARTER_TURN = tl.constexpr(math.pi / 2)
_ARC = tl.constexpr((0.9999999994, -0.3333330749, 0.199982108, -0.1423998292, 0.1057281447,
                     -0.06033241691))  # fmt: skip
"""arctan(t) / t as a polynomial in t^2, for t up to tan(pi / 8): off by 6e-10 (fitted at
Chebyshev's points)."""


@triton.jit
def _angle(y, x):
    """atan2 in arithmetic, 0 where both are 0."""
    across, down = tl.abs(x), tl.abs(y)
    low, high = tl.minimum(across, down), tl.maximum(across, down)
    t = low / tl.where(high > 0.0, high, 1.0)
    # arctan(t) = pi / 4 - arctan((1 - t) / (1 + t)), which is small where t is not.
    steep = t > _EIGHTH
    t = tl.where(steep, (1.0 - t) / (1.0 + t), t)
    square = t * t
    series = square * _ARC[5] + _ARC[4]
    for i in tl.static_range(4):
        series = series * square + _ARC[3 - i]
    angle = t * series
    angle = tl.where(steep, 0.5 * _QUARTER_TURN - angle, angle)
    angle = tl.where(down > across, _QUARTER_TURN - angle, angle)
    angle = tl.where(x < 0.0, 2.0 * _QUARTER_TURN - angle, angle)
    angle = tl.where((x != x) | (y != y), x + y, angle)
    return tl.where(y < 0.0, -angle, angle)


@triton.jit
def _gradient_kernel(
    x, one, two, height, width, tiles_y, tiles_x, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    MODE: tl.constexpr, FUSED: tl.constexpr, DOWN: tl.constexpr,
):  # fmt: skip
    """Program (tile, strip, image): ROWS rows of COLUMNS columns. FUSED: magnitude to one and
    direction to two; else the gradient along columns, or with DOWN along rows, to one."""
    image, top, column, there = strip(width, tiles_y, tiles_x, ROWS, COLUMNS)
    x += image * height * width
    left, right = inner(column - 1, width, MODE), inner(column + 1, width, MODE)
    difference, smooth = (), ()
    for i in tl.static_range(ROWS + 2):
        a = read(x, top + i - 1, left, there, height, width, 0.0, MODE, tl.float32)
        b = read(x, top + i - 1, column, there, height, width, 0.0, MODE, tl.float32)
        c = read(x, top + i - 1, right, there, height, width, 0.0, MODE, tl.float32)
        difference, smooth = difference + (c - a,), smooth + (a + 2.0 * b + c,)
    for r in tl.static_range(ROWS):
        across = difference[r] + 2.0 * difference[r + 1] + difference[r + 2]
        down = smooth[r + 2] - smooth[r]
        place = (image * height + top + r) * width + column
        inside = there & (top + r < height)
        if FUSED:
            tl.store(one + place, tl.sqrt(across * across + down * down), mask=inside)
            tl.store(two + place, _angle(down, across), mask=inside)
        else:
            tl.store(one + place, down if DOWN else across, mask=inside)


@triton.jit
def _polar_kernel(across, down, magnitude, direction, n, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(across + i, mask=i < n, other=0.0)
    b = tl.load(down + i, mask=i < n, other=0.0)
    tl.store(magnitude + i, tl.sqrt(a * a + b * b), mask=i < n)
    tl.store(direction + i, _angle(b, a), mask=i < n)


def sobel(x: Tensor, mode: str, *, fused: bool = True) -> tuple[Tensor, Tensor]:
    """x: [images, H, W]."""
    one = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    two = torch.empty_like(one)
    if not x.numel():
        return one, two
    with _on(x):
        if fused:
            _gradient(x, one, two, mode, True, False)
            return one, two
        across, down = torch.empty_like(one), torch.empty_like(one)
        _gradient(x, across, across, mode, False, False)
        _gradient(x, down, down, mode, False, True)
        n = x.numel()
        _polar_kernel[(triton.cdiv(n, 1024),)](across, down, one, two, n, BLOCK=1024)
    return one, two


def _gradient(x: Tensor, one: Tensor, two: Tensor, mode: str, fused: bool, down: bool) -> None:
    images, height, width = x.shape
    tiles_x, tiles_y = triton.cdiv(width, COLUMNS), triton.cdiv(height, ROWS)
    _gradient_kernel[(tiles_x * tiles_y * images,)](
        x.contiguous(), one, two, height, width, tiles_y, tiles_x, ROWS=ROWS, COLUMNS=COLUMNS,
        MODE=mode, FUSED=fused, DOWN=down, num_warps=4,
    )  # fmt: skip
