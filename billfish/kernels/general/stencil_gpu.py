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
"""Steps a launch takes: each further one makes the rims wider, and holds two planes more. Of a grid
with few planes it is one, for a march takes time, and memory, to begin."""

PAD: tl.constexpr = tl.constexpr(4)
"""Columns of a tile's rim on either side, for 2 to 4 steps: reads of 128 bits stay aligned."""

PROGRAMS = 512
"""How many programs share a grid, about, where steps are fused: some for each multiprocessor."""

DEPTH = 32
"""Planes that a program marches through where a launch is a step."""


@triton.jit
def _plane(tile, z, n_z, stride, inside, fill, DTYPE: tl.constexpr, BOUNDARY: tl.constexpr):
    """Plane z of a tile of pointers, `fill` where there is none. At a border that no heat passes
    the plane outside is like the last."""
    if BOUNDARY == "periodic":
        z = (z + 4 * n_z) % n_z
    elif BOUNDARY == "neumann":
        z = tl.minimum(tl.maximum(z, 0), n_z - 1)
    there = inside & (z >= 0) & (z < n_z)
    return tl.where(there, tl.load(tile + z * stride, mask=there, other=0).to(DTYPE), fill)


@triton.jit
def _neighbour(at, within, around, here, inside, fill, DTYPE: tl.constexpr, BOUNDARY: tl.constexpr):
    """Values beside those `here`, read at `at` where they are `within` the grid. around: how far
    from there the other end of the grid is."""
    got = tl.load(at, mask=inside & within, other=0).to(DTYPE)
    if BOUNDARY == "periodic":
        # Apart, so that neighbours in memory stay neighbours for all others.
        other = tl.load(at + around, mask=inside & (within == 0), other=0).to(DTYPE)
    elif BOUNDARY == "neumann":
        other = here
    else:
        other = fill
    return tl.where(within, got, other)


@triton.jit
def _step_kernel(
    x, out, n_z, n_y, n_x, x_z, x_y, x_x, out_z, out_y, out_x, across, depth,
    rate_z: tl.float64, rate_y: tl.float64, rate_x: tl.float64, value: tl.float64,
    BOUNDARY: tl.constexpr, DTYPE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Program (tile, chunk): one step of `depth` planes of a tile. Planes before and after are in
    registers; neighbours within a plane were read as it came, and are in L1."""
    tile, begin = tl.program_id(0), tl.program_id(1).to(tl.int64) * depth
    end = tl.minimum(begin + depth, n_z)
    row = (tile // across).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = (tile % across).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (row < n_y) & (column < n_x)
    along_z, along_y = tl.full((), rate_z, DTYPE), tl.full((), rate_y, DTYPE)
    along_x, fill = tl.full((), rate_x, DTYPE), tl.full((), value, DTYPE)
    kept = 1.0 - 2.0 * (along_z + along_y + along_x)
    source, target = x + row * x_y + column * x_x, out + row * out_y + column * out_x
    around_y = tl.full((), n_y, tl.int64) * x_y
    around_x = tl.full((), n_x, tl.int64) * x_x
    before = _plane(source, begin - 1, n_z, x_z, inside, fill, DTYPE, BOUNDARY)
    here = _plane(source, begin, n_z, x_z, inside, fill, DTYPE, BOUNDARY)
    ahead = _plane(source, begin + 1, n_z, x_z, inside, fill, DTYPE, BOUNDARY)
    for z in range(begin, end):
        after = ahead
        ahead = _plane(source, z + 2, n_z, x_z, inside, fill, DTYPE, BOUNDARY)
        at = source + z * x_z
        up = _neighbour(at - x_y, row > 0, around_y, here, inside, fill, DTYPE, BOUNDARY)
        down = _neighbour(at + x_y, row < n_y - 1, -around_y, here, inside, fill, DTYPE, BOUNDARY)
        left = _neighbour(at - x_x, column > 0, around_x, here, inside, fill, DTYPE, BOUNDARY)
        right = _neighbour(
            at + x_x, column < n_x - 1, -around_x, here, inside, fill, DTYPE, BOUNDARY
        )
        total = along_y * (up + down) + along_x * (left + right)
        total += along_z * (before + after) + kept * here
        tl.store(target + z * out_z, total.to(out.dtype.element_ty), mask=inside)
        before, here = here, after


@triton.jit
def _shift(values, BY: tl.constexpr):
    """values[:, i + BY] at i. What would come from outside of the tile is of no use."""
    LENGTH: tl.constexpr = values.shape[1]
    at = tl.minimum(tl.maximum(tl.arange(0, LENGTH) + BY, 0), LENGTH - 1)
    return tl.gather(values, tl.broadcast_to(at[None, :], values.shape), 1)


@triton.jit
def _beside(values):
    """The sum of both neighbours along a row.

    128 bits in a row belong to one thread. Seen as four tensors, or two of 64 bits, most neighbours
    are registers of its own, and one shuffle each way is left.
    """
    ROWS: tl.constexpr = values.shape[0]
    QUARTER: tl.constexpr = values.shape[1] // 4
    if values.dtype.primitive_bitwidth == 64:
        a, b = tl.split(tl.reshape(values, [ROWS, 2 * QUARTER, 2]))
        sums = tl.join(_shift(b, -1) + b, a + _shift(a, 1))
    else:
        even, odd = tl.split(tl.reshape(values, [ROWS, QUARTER, 2, 2]))
        a, c = tl.split(even)
        b, d = tl.split(odd)
        of_a, of_d = _shift(d, -1) + b, c + _shift(a, 1)
        sums = tl.join(tl.join(of_a, b + d), tl.join(a + c, of_d))
    return tl.reshape(sums, values.shape)


@triton.jit
def _inner(at, n, DTYPE: tl.constexpr, NEUMANN: tl.constexpr):
    """How many neighbours count, of those before and after: at a border that no heat passes, only
    those inside."""
    if NEUMANN:
        return (at > 0).to(DTYPE) + (at < n - 1).to(DTYPE)
    else:
        return tl.full((), 2, DTYPE)


@triton.jit
def _march_kernel(
    x, out, scratch, n_z, n_y, n_x, x_z, x_y, x_x, out_z, out_y, out_x, across, depth,
    rate_z: tl.float64, rate_y: tl.float64, rate_x: tl.float64, value: tl.float64,
    BOUNDARY: tl.constexpr, DTYPE: tl.constexpr, STEPS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Program (tile, chunk): STEPS steps of `depth` planes of a tile whose rims are STEPS rows and
    PAD columns. scratch: two planes for each level but the last, between two rows of which nothing
    is used; neighbours along y are read there, from L1."""
    PERIODIC: tl.constexpr = BOUNDARY == "periodic"
    NEUMANN: tl.constexpr = BOUNDARY == "neumann"
    OUTSIDE: tl.constexpr = "periodic" if PERIODIC else "dirichlet"
    SIZE: tl.constexpr = ROWS * COLUMNS
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
    in_plane = 1.0 - along_y * _inner(row, n_y, DTYPE, NEUMANN)
    in_plane -= along_x * _inner(column, n_x, DTYPE, NEUMANN)
    if PERIODIC:  # what is outside is read, and computed, like what it repeats
        row, column = (row + 4 * n_y) % n_y, (column + 4 * n_x) % n_x
        inside = (row >= 0) & (column >= 0)
    source = x + row * x_y + column * x_x
    program = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tile
    own = scratch + program * (2 * STEPS * SIZE + 2 * COLUMNS) + COLUMNS + r * COLUMNS + c

    # Planes z - 1 and z, a level each. Two calls: of variables that begin as one value, and pass it
    # on to each other, Triton would not see that the loop changes them.
    below = (tl.zeros([ROWS, COLUMNS], DTYPE),) * STEPS
    here = (tl.zeros([ROWS, COLUMNS], DTYPE),) * STEPS
    ahead = _plane(source, begin - STEPS, n_z, x_z, inside, fill, DTYPE, OUTSIDE)
    for z in range(begin - STEPS, end + STEPS):
        above = ahead
        ahead = _plane(source, z + 1, n_z, x_z, inside, fill, DTYPE, OUTSIDE)
        for level in tl.static_range(STEPS):
            plane = tl.full((), z - level - 1, tl.int64)
            centre, before = here[0], below[0]
            below, here = below[1:] + (centre,), here[1:] + (above,)  # noqa: RUF005
            tl.store(own + (2 * level + (z & 1)) * SIZE, above)
            # Of planes of this level, the one before was stored in the turn before.
            at = own + (2 * level + ((z - 1) & 1)) * SIZE
            total = along_x * _beside(centre) + along_z * (before + above)
            total += along_y * (tl.load(at - COLUMNS) + tl.load(at + COLUMNS))
            kept = in_plane - along_z * _inner(plane, n_z, DTYPE, NEUMANN)
            above = total + kept * centre
            if level < STEPS - 1 and not PERIODIC:
                there = inside & (plane >= 0) & (plane < n_z)
                above = tl.where(there, above, fill)
        to = z - STEPS
        tl.store(target + to * out_z, above.to(out.dtype.element_ty), mask=mine & (to >= begin))
        tl.debug_barrier()  # in the next turn others read what a thread has stored


def heat_equation(
    x: Tensor, rate_z: float, rate_y: float, rate_x: float, steps: int, boundary: str,
    value: float, *, fused: int | None = None, coalesced: bool = True, rows: int = 32,
    columns: int = 256,
) -> Tensor:  # fmt: skip
    """fused: steps a launch takes, 1 to 4. rows, columns: of a tile, rims and all, at most."""
    if not steps or not x.numel():
        return x.clone(memory_format=torch.contiguous_format)
    fused = fused or (FUSED if x.shape[0] >= 16 * FUSED else 1)
    wide = accumulator(x.dtype, "sum")
    launches = [fused] * (steps // fused) + [steps % fused] * (steps % fused > 0)
    for i, count in enumerate(launches):
        dtype = x.dtype if i == len(launches) - 1 else wide
        out = torch.empty(x.shape, dtype=dtype, device=x.device)
        sides = (x, out) if coalesced else (x.permute(2, 1, 0), out.permute(2, 1, 0))
        rates = (rate_z, rate_y, rate_x) if coalesced else (rate_x, rate_y, rate_z)
        with _on(x):
            if count == 1:
                _step(*sides, rates, boundary, value, wide, rows, columns)
            else:
                _march(*sides, rates, count, boundary, value, wide, rows, columns)
        x = out
    return out


def _step(
    x: Tensor, out: Tensor, rates: tuple[float, ...], boundary: str, value: float,
    wide: torch.dtype, rows: int, columns: int,
) -> None:  # fmt: skip
    """One launch of one step, from x into out."""
    n_z, n_y, n_x = x.shape
    # Four values a thread, or one of 64 bits.
    warps, size = 16, 512 if wide == torch.float64 else 2048
    columns = min(columns, 128 if wide == torch.float64 else 256, triton.next_power_of_2(n_x))
    rows = min(rows, size // columns, triton.next_power_of_2(n_y))
    across = triton.cdiv(n_x, columns)
    depth = max(DEPTH, triton.cdiv(n_z, 65535))
    _step_kernel[(across * triton.cdiv(n_y, rows), triton.cdiv(n_z, depth))](
        x, out, n_z, n_y, n_x, *x.stride(), *out.stride(), across, depth, *rates, value,
        BOUNDARY=boundary, DTYPE=TYPES[wide], ROWS=rows, COLUMNS=columns,
        num_warps=max(1, warps * rows * columns // size),
    )  # fmt: skip


def _march(
    x: Tensor, out: Tensor, rates: tuple[float, ...], steps: int, boundary: str, value: float,
    wide: torch.dtype, rows: int, columns: int,
) -> None:  # fmt: skip
    """One launch of several steps, from x into out."""
    n_z, n_y, n_x = x.shape
    rows = min(rows, max(16, triton.next_power_of_2(n_y + 2 * steps)))
    columns = min(columns, 64 if wide == torch.float64 else 128)
    columns = min(columns, max(16, triton.next_power_of_2(n_x + 2 * PAD.value)))
    across = triton.cdiv(n_x, columns - 2 * PAD.value)
    tiles = across * triton.cdiv(n_y, rows - 2 * steps)
    # Chunks along z begin with planes of their neighbours' too: they should not be short.
    depth = max(16 * steps, triton.cdiv(n_z, triton.cdiv(PROGRAMS, tiles)))
    chunks = triton.cdiv(n_z, depth)
    of_a_program = 2 * (steps * rows + 1) * columns
    scratch = torch.empty(tiles * chunks * of_a_program, dtype=wide, device=x.device)
    _march_kernel[(tiles, chunks)](
        x, out, scratch, n_z, n_y, n_x, *x.stride(), *out.stride(), across, depth, *rates, value,
        BOUNDARY=boundary, DTYPE=TYPES[wide], STEPS=steps, ROWS=rows, COLUMNS=columns,
        num_warps=max(1, rows * columns // 128),
    )  # fmt: skip
