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

PAD: tl.constexpr = tl.constexpr(4)
"""Columns of a tile's rim on either side, for 2 to 4 steps: reads of 128 bits stay aligned."""

PROGRAMS = 512
"""How many programs share a grid, about: some for each multiprocessor."""

ROWS, WARPS = 8, 16
"""Of a program where a launch is a step, at most."""

DEPTH = 16, 64
"""Planes that a program marches through where a launch is a step, at least and at most."""


@triton.jit
def _plane(
    tile, z, n_z, stride, inside, fill, EXACT: tl.constexpr, DTYPE: tl.constexpr,
    BOUNDARY: tl.constexpr,
):  # fmt: skip
    """Plane z of a tile of pointers, `fill` where there is none. At a border that no heat passes
    the plane outside is like the last. EXACT: `fill` is a value of what is read."""
    if BOUNDARY == "periodic":
        z = (z + 4 * n_z) % n_z
    elif BOUNDARY == "neumann":
        z = tl.minimum(tl.maximum(z, 0), n_z - 1)
    there = inside & (z >= 0) & (z < n_z)
    if EXACT:
        outside = fill.to(tile.dtype.element_ty)
        return tl.load(tile + z * stride, mask=there, other=outside).to(DTYPE)
    else:
        return tl.where(there, tl.load(tile + z * stride, mask=there, other=0).to(DTYPE), fill)


@triton.jit
def _neighbour(
    at, within, around, here, inside, fill, EXACT: tl.constexpr, DTYPE: tl.constexpr,
    BOUNDARY: tl.constexpr,
):  # fmt: skip
    """Values beside those `here`, read at `at` where they are `within` the grid. around: how far
    from there the other end of the grid is."""
    if BOUNDARY == "dirichlet" and EXACT:
        outside = fill.to(at.dtype.element_ty)
        return tl.load(at, mask=inside & within, other=outside).to(DTYPE)
    else:
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
def _ends(values, GROUP: tl.constexpr):
    """The first and the last of every GROUP values along a row, 2 or 4. They are one thread's."""
    ROWS: tl.constexpr = values.shape[0]
    GROUPS: tl.constexpr = values.shape[1] // GROUP
    if GROUP == 2:
        first, last = tl.split(tl.reshape(values, [ROWS, GROUPS, 2]))
    else:
        even, odd = tl.split(tl.reshape(values, [ROWS, GROUPS, 2, 2]))
        first, _ = tl.split(even)
        _, last = tl.split(odd)
    return first, last


@triton.jit
def _beside(values, before, after, GROUP: tl.constexpr):
    """The sum of both neighbours along a row. before, after: what is beside a group's ends; all
    others are registers of the same thread."""
    ROWS: tl.constexpr = values.shape[0]
    GROUPS: tl.constexpr = values.shape[1] // GROUP
    if GROUP == 2:
        a, b = tl.split(tl.reshape(values, [ROWS, GROUPS, 2]))
        sums = tl.join(before + b, a + after)
    else:
        even, odd = tl.split(tl.reshape(values, [ROWS, GROUPS, 2, 2]))
        a, c = tl.split(even)
        b, d = tl.split(odd)
        sums = tl.join(tl.join(before + b, b + d), tl.join(a + c, c + after))
    return tl.reshape(sums, values.shape)


@triton.jit
def _step_kernel(
    x, out, n_z, n_y, n_x, x_z, x_y, x_x, out_z, out_y, out_x, across, depth,
    rate_z: tl.float64, rate_y: tl.float64, rate_x: tl.float64, value: tl.float64,
    BOUNDARY: tl.constexpr, EXACT: tl.constexpr, DTYPE: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Program (tile, chunk): one step of `depth` planes of a tile. Planes before and after are in
    registers, and neighbours along x of one GROUP; others within a plane were read as it came, and
    are in L1."""
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
    place = tl.arange(0, COLUMNS)[None, :] % GROUP
    before = _plane(source, begin - 1, n_z, x_z, inside, fill, EXACT, DTYPE, BOUNDARY)
    here = _plane(source, begin, n_z, x_z, inside, fill, EXACT, DTYPE, BOUNDARY)
    ahead = _plane(source, begin + 1, n_z, x_z, inside, fill, EXACT, DTYPE, BOUNDARY)
    for z in range(begin, end):
        after = ahead
        ahead = _plane(source, z + 2, n_z, x_z, inside, fill, EXACT, DTYPE, BOUNDARY)
        at = source + z * x_z
        up = _neighbour(at - x_y, row > 0, around_y, here, inside, fill, EXACT, DTYPE, BOUNDARY)
        down = _neighbour(
            at + x_y, row < n_y - 1, -around_y, here, inside, fill, EXACT, DTYPE, BOUNDARY
        )
        # Of a group only the ends ask; that the others do not is known when this is compiled.
        left = _neighbour(
            at - x_x, column > 0, around_x, here, inside & (place == 0), fill, EXACT, DTYPE,
            BOUNDARY,
        )  # fmt: skip
        right = _neighbour(
            at + x_x, column < n_x - 1, -around_x, here, inside & (place == GROUP - 1), fill, EXACT,
            DTYPE, BOUNDARY,
        )  # fmt: skip
        if GROUP == 1:
            beside = left + right
        else:
            first, _ = _ends(left, GROUP)
            _, last = _ends(right, GROUP)
            beside = _beside(here, first, last, GROUP)
        total = kept * here + along_y * (up + down)
        total += along_x * beside
        total += along_z * (before + after)
        tl.store(target + z * out_z, total.to(out.dtype.element_ty), mask=inside)
        before, here = here, after


@triton.jit
def _shift(values, BY: tl.constexpr):
    """values[:, i + BY] at i, by a shuffle where a row is a warp's. What would come from outside of
    the tile is of no use."""
    LENGTH: tl.constexpr = values.shape[1]
    at = tl.minimum(tl.maximum(tl.arange(0, LENGTH) + BY, 0), LENGTH - 1)
    return tl.gather(values, tl.broadcast_to(at[None, :], values.shape), 1)


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
    BOUNDARY: tl.constexpr, EXACT: tl.constexpr, DTYPE: tl.constexpr, STEPS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Program (tile, chunk): STEPS steps of `depth` planes of a tile whose rims are STEPS rows and
    PAD columns. scratch: two planes for each level but the last, between two rows of which nothing
    is used; neighbours along y are read there, from L1."""
    PERIODIC: tl.constexpr = BOUNDARY == "periodic"
    NEUMANN: tl.constexpr = BOUNDARY == "neumann"
    OUTSIDE: tl.constexpr = "periodic" if PERIODIC else "dirichlet"
    SIZE: tl.constexpr = ROWS * COLUMNS
    GROUP: tl.constexpr = 2 if tl.float64 == DTYPE else 4
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
    ahead = _plane(source, begin - STEPS, n_z, x_z, inside, fill, EXACT, DTYPE, OUTSIDE)
    for z in range(begin - STEPS, end + STEPS):
        above = ahead
        ahead = _plane(source, z + 1, n_z, x_z, inside, fill, EXACT, DTYPE, OUTSIDE)
        for level in tl.static_range(STEPS):
            plane = tl.full((), z - level - 1, tl.int64)
            centre, before = here[0], below[0]
            below, here = below[1:] + (centre,), here[1:] + (above,)  # noqa: RUF005
            tl.store(own + (2 * level + (z & 1)) * SIZE, above)
            # Of planes of this level, the one before was stored in the turn before.
            at = own + (2 * level + ((z - 1) & 1)) * SIZE
            first, last = _ends(centre, GROUP)
            beside = _beside(centre, _shift(last, -1), _shift(first, 1), GROUP)
            total = along_x * beside + along_z * (before + above)
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
    value: float, *, fused: int = 1, coalesced: bool = True, rows: int = 32, columns: int = 256,
) -> Tensor:  # fmt: skip
    """fused: steps a launch takes, 1 to 4: on an H200 one was the fastest for grids of any size
    that was tried. rows, columns: of a tile, rims and all, at most."""
    if not steps or not x.numel():
        return x.clone(memory_format=torch.contiguous_format)
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
    double = wide == torch.float64
    group = 2 if double else 4
    lines = [*x.stride()[:2], *out.stride()[:2]]
    if x.stride(2) != 1 or n_x % group or x.data_ptr() % 16 or any(line % 16 for line in lines):
        group = 1  # what a thread reads is not in one piece
    a_thread = (1 if double else 4) if group == 1 else 16 // x.element_size()
    columns = min(columns, 128 if double else 256, triton.next_power_of_2(n_x))
    rows = min(rows, min(ROWS, WARPS * 32 * a_thread // columns), triton.next_power_of_2(n_y))
    across = triton.cdiv(n_x, columns)
    tiles = across * triton.cdiv(n_y, rows)
    depth = max(min(n_z * tiles // PROGRAMS, DEPTH[1]), DEPTH[0], triton.cdiv(n_z, 65535))
    # Three programs of 16 warps fit a multiprocessor's registers then, not two.
    few = boundary == "dirichlet" and group > 1 and a_thread <= 4
    _step_kernel[(tiles, triton.cdiv(n_z, depth))](
        x, out, n_z, n_y, n_x, *x.stride(), *out.stride(), across, depth, *rates, value,
        BOUNDARY=boundary, EXACT=_exact(value, x.dtype, wide), DTYPE=TYPES[wide], ROWS=rows,
        COLUMNS=columns, GROUP=group, num_warps=max(1, rows * columns // (32 * a_thread)),
        maxnreg=40 if few else None,
    )  # fmt: skip


def _exact(value: float, dtype: torch.dtype, wide: torch.dtype) -> bool:
    """Whether computing in `wide` what is read as `dtype` sees the same value outside."""
    return dtype == wide or torch.tensor(value, dtype=dtype, device="cpu").item() == value


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
        BOUNDARY=boundary, EXACT=_exact(value, x.dtype, wide), DTYPE=TYPES[wide], STEPS=steps,
        ROWS=rows, COLUMNS=columns, num_warps=max(1, rows * columns // 128),
    )  # fmt: skip
