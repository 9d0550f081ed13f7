"""The heat equation on a GPU, in Triton; see `stencil.py`.

The march of a tile with two steps fused. A column is a turn of the loop: one plane is read, and
each level makes a plane from three of the level before it.

    level 0, read     z0-2  z0-1  z0    z0+1  z0+2  ...
    level 1                       z0-1  z0    z0+1  ...     from planes z-1, z and z+1 of level 0
    level 2, written                          z0    ...     from planes z-1, z and z+1 of level 1
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from billfish.kernels.general._arguments import accumulator
from billfish.kernels.general._triton import TYPES
from billfish.kernels.general.gpu import _on

FUSED = 2
"""Steps a launch takes: each further one makes the rims wider, and holds two planes more."""

PAD: tl.constexpr = tl.constexpr(4)
"""Columns of a tile's rim on either side, for 1 to 4 steps: reads of 128 bits stay aligned."""

PROGRAMS = 1024
"""How many programs share a grid, about: some for each multiprocessor."""


@triton.jit
def _shift(values, BY: tl.constexpr, AXIS: tl.constexpr):
    """values[i + BY] at i. What would come from outside of the tile is of no use."""
    LENGTH: tl.constexpr = values.shape[AXIS]
    at = tl.minimum(tl.maximum(tl.arange(0, LENGTH) + BY, 0), LENGTH - 1)
    at = at[:, None] if AXIS == 0 else at[None, :]
    return tl.gather(values, tl.broadcast_to(at, values.shape), AXIS)


@triton.jit
def _beside(values):
    """The sum of both neighbours along a row.

    Four columns in a row belong to one thread. Seen as four tensors, most neighbours are registers
    of its own, and one shuffle each way is left.
    """
    ROWS: tl.constexpr = values.shape[0]
    QUARTER: tl.constexpr = values.shape[1] // 4
    even, odd = tl.split(tl.reshape(values, [ROWS, QUARTER, 2, 2]))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    of_a, of_d = _shift(d, -1, 1) + b, c + _shift(a, 1, 1)
    sums = tl.join(tl.join(of_a, b + d), tl.join(a + c, of_d))
    return tl.reshape(sums, values.shape)


@triton.jit
def _plane(tile, z, n_z, stride, inside, fill, DTYPE: tl.constexpr, PERIODIC: tl.constexpr):
    """Plane z of a tile of pointers, `fill` where there is none."""
    if PERIODIC:
        z = (z + 4 * n_z) % n_z
    there = inside & (z >= 0) & (z < n_z)
    return tl.where(there, tl.load(tile + z * stride, mask=there, other=0).to(DTYPE), fill)


@triton.jit
def _neighbours(at, n, DTYPE: tl.constexpr, NEUMANN: tl.constexpr):
    """How many neighbours count, of those before and after: at a border that no heat passes, only
    those inside."""
    if NEUMANN:
        return (at > 0).to(DTYPE) + (at < n - 1).to(DTYPE)
    else:
        return tl.full((), 2, DTYPE)


@triton.jit
def _heat_kernel(
    x, out, n_z, n_y, n_x, x_z, x_y, x_x, out_z, out_y, out_x, across, depth,
    rate_z: tl.float64, rate_y: tl.float64, rate_x: tl.float64, value: tl.float64,
    BOUNDARY: tl.constexpr, DTYPE: tl.constexpr, STEPS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Program (tile, chunk): `depth` planes of a tile whose rims are STEPS rows and PAD columns."""
    PERIODIC: tl.constexpr = BOUNDARY == "periodic"
    NEUMANN: tl.constexpr = BOUNDARY == "neumann"
    tile, begin = tl.program_id(0), tl.program_id(1).to(tl.int64) * depth
    end = tl.minimum(begin + depth, n_z)
    r, c = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    row = (tile // across).to(tl.int64) * (ROWS - 2 * STEPS) - STEPS + r
    column = (tile % across).to(tl.int64) * (COLUMNS - 2 * PAD) - PAD + c
    inside = (row >= 0) & (row < n_y) & (column >= 0) & (column < n_x)
    mine = inside & (r >= STEPS) & (r < ROWS - STEPS) & (c >= PAD) & (c < COLUMNS - PAD)
    target = out + row * out_y + column * out_x
    along_z, along_y = tl.full((), rate_z, DTYPE), tl.full((), rate_y, DTYPE)
    along_x, fill = tl.full((), rate_x, DTYPE), tl.full((), value, DTYPE)
    in_plane = 1.0 - along_y * _neighbours(row, n_y, DTYPE, NEUMANN)
    in_plane -= along_x * _neighbours(column, n_x, DTYPE, NEUMANN)
    if PERIODIC:  # what is outside is read, and computed, like what it repeats
        row, column = (row + 4 * n_y) % n_y, (column + 4 * n_x) % n_x
        inside = (row >= 0) & (column >= 0)
    source = x + row * x_y + column * x_x

    # Planes z - 1 and z, a level each. Two calls: of variables that begin as one value, and pass it
    # on to each other, Triton would not see that the loop changes them.
    below = (tl.zeros([ROWS, COLUMNS], DTYPE),) * STEPS
    here = (tl.zeros([ROWS, COLUMNS], DTYPE),) * STEPS
    ahead = _plane(source, begin - STEPS, n_z, x_z, inside, fill, DTYPE, PERIODIC)
    for z in range(begin - STEPS, end + STEPS):
        above = ahead
        ahead = _plane(source, z + 1, n_z, x_z, inside, fill, DTYPE, PERIODIC)
        for level in tl.static_range(STEPS):
            plane = tl.full((), z - level - 1, tl.int64)
            centre, before = here[0], below[0]
            below, here = below[1:] + (centre,), here[1:] + (above,)  # noqa: RUF005
            # What shared memory and shuffles bring comes first: they like other layouts of a tile
            # than memory does, and each term more computed in theirs is a conversion more.
            total = along_y * (_shift(centre, -1, 0) + _shift(centre, 1, 0))
            total += along_x * _beside(centre) + along_z * (before + above)
            kept = in_plane - along_z * _neighbours(plane, n_z, DTYPE, NEUMANN)
            above = total + kept * centre
            if level < STEPS - 1 and not PERIODIC:
                there = inside & (plane >= 0) & (plane < n_z)
                above = tl.where(there, above, fill)
        to = z - STEPS
        tl.store(target + to * out_z, above.to(out.dtype.element_ty), mask=mine & (to >= begin))


def heat_equation(
    x: Tensor, rate_z: float, rate_y: float, rate_x: float, steps: int, boundary: str,
    value: float, *, fused: int = FUSED, coalesced: bool = True, rows: int = 32,
    columns: int = 128,
) -> Tensor:  # fmt: skip
    """fused: steps a launch takes, 1 to 4. rows, columns: of a tile, rims and all, at most."""
    if not steps or not x.numel():
        return x.clone(memory_format=torch.contiguous_format)
    wide = accumulator(x.dtype, "sum")
    launches = [fused] * (steps // fused) + [steps % fused] * (steps % fused > 0)
    for i, count in enumerate(launches):
        dtype = x.dtype if i == len(launches) - 1 else wide
        out = torch.empty(x.shape, dtype=dtype, device=x.device)
        _march(x, out, (rate_z, rate_y, rate_x), count, boundary, value, coalesced, rows, columns)
        x = out
    return out


def _march(
    x: Tensor, out: Tensor, rates: tuple[float, ...], steps: int, boundary: str, value: float,
    coalesced: bool, rows: int, columns: int,
) -> None:  # fmt: skip
    """One launch, from x into out."""
    if not coalesced:
        x, out, rates = x.permute(2, 1, 0), out.permute(2, 1, 0), rates[::-1]
    n_z, n_y, n_x = x.shape
    rows = min(rows, max(8, triton.next_power_of_2(n_y + 2 * steps)))
    columns = min(columns, max(16, triton.next_power_of_2(n_x + 2 * PAD.value)))
    if x.dtype == torch.float64:
        columns = min(columns, 64)
    across = triton.cdiv(n_x, columns - 2 * PAD.value)
    tiles = across * triton.cdiv(n_y, rows - 2 * steps)
    # Chunks along z begin with planes of their neighbours' too: they should not be short.
    depth = max(16 * steps, triton.cdiv(n_z, triton.cdiv(PROGRAMS, tiles)))
    with _on(x):
        _heat_kernel[(tiles, triton.cdiv(n_z, depth))](
            x, out, n_z, n_y, n_x, *x.stride(), *out.stride(), across, depth, *rates, value,
            BOUNDARY=boundary, DTYPE=TYPES[accumulator(x.dtype, "sum")], STEPS=steps, ROWS=rows,
            COLUMNS=columns, num_warps=max(1, rows * columns // 256),
        )  # fmt: skip
