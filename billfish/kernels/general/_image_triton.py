"""What the kernels of images share: a program's strip, where a place outside of an image is read,
and bytes."""

import triton
import triton.language as tl


@triton.jit
def strip(width, tiles_y, tiles_x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """What a program computes: (image, first row, columns, which of these are inside)."""
    program = tl.program_id(0)
    image = (program // tiles_x // tiles_y).to(tl.int64)
    top = program // tiles_x % tiles_y * ROWS
    column = program % tiles_x * COLUMNS + tl.arange(0, COLUMNS)
    return image, top, column, column < width


@triton.jit
def inner(i, n, MODE: tl.constexpr):
    """The place in 0..n - 1 of which i has the value, for i less than n outside; "constant": i."""
    if MODE == "reflect":
        i = tl.abs(i)
        i = n - 1 - tl.abs(n - 1 - i)
    elif MODE == "replicate":
        i = tl.minimum(tl.maximum(i, 0), n - 1)
    elif MODE == "circular":
        i = tl.where(i < 0, i + n, i)
        i = tl.where(i >= n, i - n, i)
    return i


@triton.jit
def read(
    x, y, column, there, height, width, VALUE: tl.constexpr, MODE: tl.constexpr, DTYPE: tl.constexpr
):
    """Of an image's row y, which may lie outside, the values at columns, as DTYPE. there: which
    columns are needed, which are inside of the image but for "constant". A row that no mode
    reaches, of which only rows below the image make use, is another's."""
    inside = there
    if MODE != "constant":
        y = tl.minimum(tl.maximum(inner(y, height, MODE), 0), height - 1)
    if MODE == "constant":
        inside = there & (column >= 0) & (column < width) & (y >= 0) & (y < height)
    got = tl.load(x + y.to(tl.int64) * width + column, mask=inside, other=0).to(DTYPE)
    if MODE == "constant":
        got = tl.where(inside, got, VALUE)
    return got


@triton.jit
def as_image(value, DTYPE: tl.constexpr):
    if tl.uint8 == DTYPE:
        whole = tl.floor(value + 0.5)
        return tl.minimum(tl.maximum(whole, 0.0), 255.0).to(tl.int32).to(tl.uint8)
    else:
        return value.to(DTYPE)
