"""What the kernels of images share: a program's strip, where a place outside of an image is read,
and bytes."""

# ruff: noqa: RUF005 (Triton knows no starred tuples)
# mypy: disable-error-code="assignment"

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
def quad_strip(
    width, tiles_y, tiles_x, ROWS: tl.constexpr, LANES: tl.constexpr, REACH: tl.constexpr
):
    """As strip, of lanes with four columns each: (image, first row, first column of each lane,
    whether columns that it sees, REACH on either side, may lie outside)."""
    image, top, _, _ = strip(width, tiles_y, tiles_x, ROWS, LANES)
    first = tl.program_id(0) % tiles_x * (4 * LANES)
    edge = (first < REACH) | (first + 4 * LANES + REACH > width)
    return image, top, first + 4 * tl.arange(0, LANES), edge


@triton.jit
def quads(
    x, y, at, height, width, edge, FIRST: tl.constexpr, LAST: tl.constexpr, VALUE: tl.constexpr,
    MODE: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Of an image's row y, the values at columns at + 4 FIRST to at + 4 LAST - 1, as DTYPE: as many
    tensors, of a read for four. at: multiples of 4. edge: whether columns may lie outside."""
    there = True
    if MODE == "constant":
        there = (y >= 0) & (y < height)
    else:
        y = tl.minimum(tl.maximum(inner(y, height, MODE), 0), height - 1)
    line = x + y.to(tl.int64) * width
    values = ()
    for chunk in tl.static_range(FIRST, LAST):
        column = at[:, None] + 4 * chunk + tl.arange(0, 4)[None, :]
        if LAST - FIRST == 1:  # no column but a lane's own
            inside = (column < width) & there
            got = tl.load(line + column, mask=inside, other=0).to(DTYPE)
            if MODE == "constant":
                got = tl.where(inside, got, VALUE)
        elif edge:
            inside = (column >= 0) & (column < width) & there
            if MODE == "constant":
                got = tl.load(line + column, mask=inside, other=0).to(DTYPE)
                got = tl.where(inside, got, VALUE)
            else:
                column = inner(column, width, MODE)
                # Farther outside than a window reaches is of no use.
                inside = (column >= 0) & (column < width)
                got = tl.load(line + column, mask=inside, other=0).to(DTYPE)
        elif MODE == "constant":
            got = tl.load(line + column, mask=there, other=0).to(DTYPE)
            got = tl.where(there, got, VALUE)
        else:
            got = tl.load(line + column).to(DTYPE)
        even, odd = tl.split(got.reshape(at.shape[0], 2, 2))
        a, c = tl.split(even)
        b, d = tl.split(odd)
        values = values + (a, b, c, d)
    return values


@triton.jit
def put_quads(out, at, width, a, b, c, d):
    """The values at columns at to at + 3 of a row, in one write where it can be."""
    values = tl.join(tl.join(a, c), tl.join(b, d)).reshape(at.shape[0], 4)
    column = at[:, None] + tl.arange(0, 4)[None, :]
    tl.store(out + column, values, mask=column < width)


@triton.jit
def as_image(value, DTYPE: tl.constexpr):
    if tl.uint8 == DTYPE:
        whole = tl.floor(value + 0.5)
        return tl.minimum(tl.maximum(whole, 0.0), 255.0).to(tl.int32).to(tl.uint8)
    else:
        return value.to(DTYPE)
