"""Convolution of images on a GPU, in Triton; see `convolve2d.py`."""

# ruff: noqa: RUF005 (Triton knows no starred tuples)
# mypy: disable-error-code="assignment,misc,var-annotated"

import torch
import triton
import triton.language as tl
from torch import Tensor

from billfish.kernels.general._image_triton import (
    as_image,
    inner,
    put_quads,
    quad_strip,
    quads,
    read,
    strip,
)
from billfish.kernels.general._triton import TYPES
from billfish.kernels.general.gpu import _on


@triton.jit
def _convolve2d_kernel(
    x, weights, out, height, width, tiles_y, tiles_x,
    VALUE: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, MODE: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Program (tile, strip, image): ROWS rows of COLUMNS columns. weights: [KH, KW], correlated."""
    image, top, column, there = strip(width, tiles_y, tiles_x, ROWS, COLUMNS)
    x += image * height * width
    total = ()
    for _ in tl.static_range(ROWS):
        total = total + (tl.zeros([COLUMNS], DTYPE),)
    for across in range(KW):
        at = inner(column + across - KW // 2, width, MODE)
        taps = ()
        for down in tl.static_range(KH):
            taps = taps + (tl.load(weights + down * KW + across),)
        for i in tl.static_range(ROWS + KH - 1):
            got = read(x, top + i - KH // 2, at, there, height, width, VALUE, MODE, DTYPE)
            # Row r sees this one at i - r of its window.
            more = ()
            for r in tl.static_range(ROWS):
                if i - r >= 0 and i - r < KH:
                    more = more + (total[r] + got * taps[i - r],)
                else:
                    more = more + (total[r],)
            total = more
    for r in tl.static_range(ROWS):
        place = out + (image * height + top + r) * width + column
        result = as_image(total[r], out.dtype.element_ty)
        tl.store(place, result, mask=there & (top + r < height))


@triton.jit
def _separable_kernel(
    x, down_weights, across_weights, out, height, width, rows, shift, tiles_y, tiles_x,
    VALUE: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, MODE: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """As _convolve2d_kernel, with a window of KH x KW that is a product. rows: of the result, whose
    row r has its window begin at row r - shift."""
    image, top, column, there = strip(width, tiles_y, tiles_x, ROWS, COLUMNS)
    x += image * height * width
    line = ()
    for _ in tl.static_range(ROWS + KH - 1):
        line = line + (tl.zeros([COLUMNS], DTYPE),)
    for across in range(KW):
        at = inner(column + across - KW // 2, width, MODE)
        tap = tl.load(across_weights + across)
        more = ()
        for i in tl.static_range(ROWS + KH - 1):
            got = read(x, top + i - shift, at, there, height, width, VALUE, MODE, DTYPE)
            more = more + (line[i] + got * tap,)
        line = more
    taps = ()
    for down in tl.static_range(KH):
        taps = taps + (tl.load(down_weights + down),)
    for r in tl.static_range(ROWS):
        total = line[r] * taps[0]
        for down in tl.static_range(1, KH):
            total += line[r + down] * taps[down]
        place = out + (image * rows + top + r) * width + column
        result = as_image(total, out.dtype.element_ty)
        tl.store(place, result, mask=there & (top + r < rows))


@triton.jit
def _side_kernel(
    x, down_weights, across_weights, out, height, width, rows, shift, tiles_y, tiles_x,
    VALUE: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, ROWS: tl.constexpr,
    LANES: tl.constexpr, MODE: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """As _separable_kernel: a lane has four columns side by side, and reads what their windows
    cover of a row once, four values at a time."""
    AHEAD: tl.constexpr = (KW // 2 + 3) // 4
    SHIFT: tl.constexpr = 4 * AHEAD - KW // 2
    image, top, at, edge = quad_strip(width, tiles_y, tiles_x, ROWS, LANES, 4 * AHEAD)
    x += image * height * width
    down, across = (), ()
    for i in tl.static_range(KH):
        down = down + (tl.load(down_weights + i),)
    for i in tl.static_range(KW):
        across = across + (tl.load(across_weights + i),)
    total = ()
    for _ in tl.static_range(4 * ROWS):
        total = total + (tl.zeros([LANES], DTYPE),)
    for i in tl.static_range(ROWS + KH - 1):
        got = quads(x, top + i - shift, at, height, width, edge, -AHEAD, AHEAD + 1, VALUE, MODE,
                    DTYPE)  # fmt: skip
        line = ()
        for t in tl.static_range(4):
            value = got[SHIFT + t] * across[0]
            for k in tl.static_range(1, KW):
                value += got[SHIFT + t + k] * across[k]
            line = line + (value,)
        more = ()
        for r in tl.static_range(ROWS):
            for t in tl.static_range(4):
                if i - r >= 0 and i - r < KH:
                    more = more + (total[4 * r + t] + line[t] * down[i - r],)
                else:
                    more = more + (total[4 * r + t],)
        total = more
    for r in tl.static_range(ROWS):
        if top + r < rows:
            results = ()
            for t in tl.static_range(4):
                results = results + (as_image(total[4 * r + t], out.dtype.element_ty),)
            put_quads(out + (image * rows + top + r) * width, at, width, *results)


NARROW = 9
"""Weights of a side up to which a thread has registers for eight rows of two columns."""

SHORT = 5
"""Weights of a side up to which rows that a program filters for its neighbours, too, cost less than
what is between two launches, written and read."""


def _rows(window: int) -> int:
    """Rows of a program: the more, the less of its reads are for its neighbours' rows."""
    return 8 if window <= NARROW else 16


def _columns(window: int) -> int:
    """Columns of a program: two a thread, or one where a thread's rows fill its registers."""
    return 256 if window <= NARROW else 128


def convolve2d(
    x: Tensor, weights: Tensor, mode: str, value: float, *, reuse: bool = True
) -> Tensor:
    """x: [images, H, W]; weights: [rows, columns], as they are correlated."""
    images, height, width = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not x.numel():
        return out
    rows = _rows(weights.shape[0]) if reuse else 1
    columns = _columns(weights.shape[0])
    across, down = triton.cdiv(width, columns), triton.cdiv(height, rows)
    with _on(x):
        _convolve2d_kernel[(across * down * images,)](
            x.contiguous(), weights, out, height, width, down, across,
            VALUE=value, KH=weights.shape[0], KW=weights.shape[1], ROWS=rows, COLUMNS=columns,
            MODE=mode, DTYPE=TYPES[weights.dtype], num_warps=4,
        )  # fmt: skip
    return out


def separable_convolve2d(
    x: Tensor, column: Tensor, row: Tensor, mode: str, value: float, *, fused: bool | None = None
) -> Tensor:
    """x: [images, H, W]; column, row: as they are correlated. fused: in one launch; None: where
    that is faster, which is so of short sides."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not x.numel():
        return out
    x = x.contiguous()
    half = column.shape[0] // 2
    if fused is None:
        fused = row.dtype == torch.float64 or max(column.shape[0], row.shape[0]) <= SHORT
    with _on(x):
        if fused:
            _separable(x, column, row, out, half, mode, value)
        else:
            # Rows outside of the image too, so that the second pass sees what the fused one does.
            taller = (x.shape[0], x.shape[1] + 2 * half, x.shape[2])
            between = torch.empty(taller, dtype=row.dtype, device=x.device)
            one = torch.ones(1, dtype=row.dtype, device=x.device)
            _separable(x, one, row, between, half, mode, value)
            _separable(between, column, one, out, 0, "replicate", 0.0)
    return out


def _separable(
    x: Tensor, column: Tensor, row: Tensor, out: Tensor, shift: int, mode: str, value: float
) -> None:
    images, height, width = x.shape
    down, along = column.shape[0], row.shape[0]
    rows, columns = _rows(down), _columns(down)
    kernel, size, warps = _separable_kernel, {"COLUMNS": columns}, 4
    # Four columns of 64 bits are more than a thread reads at once.
    if row.dtype == torch.float32 and (min(down, along) == 1 or max(down, along) <= SHORT):
        # What a thread holds of a window of both grows with its rows.
        rows = 4 if down == 1 or (along > 1 and max(down, along) > 3) else rows
        lanes = min(128, max(32, triton.next_power_of_2(triton.cdiv(width, 4))))
        kernel, size, warps, columns = _side_kernel, {"LANES": lanes}, lanes // 32, 4 * lanes
    tiles_y, tiles_x = triton.cdiv(out.shape[1], rows), triton.cdiv(width, columns)
    kernel[(tiles_x * tiles_y * images,)](
        x, column, row, out, height, width, out.shape[1], shift, tiles_y, tiles_x,
        VALUE=value, KH=down, KW=along, ROWS=rows, **size, MODE=mode,
        DTYPE=TYPES[row.dtype], num_warps=warps,
    )  # fmt: skip
