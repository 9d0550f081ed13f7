"""Gravity between all pairs on a GPU, in Triton; see `nbody.py`.

A tile of others holds a body for each thread of a warp, so one read brings them all. What a thread
computes needs every one of them: Triton passes such values through shared memory. In float64 each
thread reads them itself, one after another.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from billfish.kernels.general._triton import TYPES
from billfish.kernels.general.gpu import _on
from billfish.kernels.general.reduce_gpu import reduce

PROGRAMS = 4096
"""Programs of one warp that share the work, about; the same on all GPUs, as sums' order is."""


@triton.jit
def _nbody_kernel(
    position, mass, out, n, part_size, square: tl.float64, G: tl.float64, DTYPE: tl.constexpr,
    SOFT: tl.constexpr, BODIES: tl.constexpr, OTHERS: tl.constexpr,
):  # fmt: skip
    """Program (tile, part): what `part_size` others do to BODIES bodies. out: [parts, n, 3]."""
    part = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0).to(tl.int64) * BODIES + tl.arange(0, BODIES)
    there = i < n
    x = tl.load(position + 3 * i, mask=there, other=0)
    y = tl.load(position + 3 * i + 1, mask=there, other=0)
    z = tl.load(position + 3 * i + 2, mask=there, other=0)
    least, factor = tl.full((), square, DTYPE), tl.full((), G, DTYPE)
    total_x = tl.zeros([BODIES], DTYPE)
    total_y, total_z = total_x, total_x
    begin = part * part_size
    for start in range(begin, tl.minimum(begin + part_size, n), OTHERS):
        j = start + tl.arange(0, OTHERS)
        # Past the end: the last body, of no mass.
        other = position + 3 * tl.minimum(j, n - 1)
        away_x = tl.load(other)[:, None] - x[None, :]
        away_y = tl.load(other + 1)[:, None] - y[None, :]
        away_z = tl.load(other + 2)[:, None] - z[None, :]
        heavy = tl.load(mass + j, mask=j < n, other=0)
        distance = away_x * away_x + (away_y * away_y + (away_z * away_z + least))
        inverse = tl.rsqrt(distance)
        if not SOFT:
            inverse = tl.where(distance > 0, inverse, 0.0)
        pull = heavy[:, None] * (inverse * inverse * inverse)
        total_x += tl.sum(pull * away_x, 0)
        total_y += tl.sum(pull * away_y, 0)
        total_z += tl.sum(pull * away_z, 0)
    to = out + (part * n + i) * 3
    tl.store(to, total_x * factor, mask=there)
    tl.store(to + 1, total_y * factor, mask=there)
    tl.store(to + 2, total_z * factor, mask=there)


def nbody_acceleration(
    position: Tensor, mass: Tensor, softening: float, G: float, *, tiled: bool | None = None,
    bodies: int | None = None, parts: int | None = None,
) -> Tensor:  # fmt: skip
    """tiled: None: but in float64, whose arithmetic takes so long that reading bodies one by one
    does not show. bodies: of a program. parts: that the others are cut into."""
    n = position.shape[0]
    double = position.dtype == torch.float64
    tiled = not double if tiled is None else tiled
    bodies, others = bodies or (32 if double else 64), (16 if double else 32) if tiled else 1
    tiles = triton.cdiv(n, bodies)
    if not tiles:
        return torch.empty_like(position, memory_format=torch.contiguous_format)
    wanted = parts or min(max(1, PROGRAMS // tiles), triton.cdiv(n, 256))
    part_size = triton.cdiv(triton.cdiv(n, wanted), 32) * 32
    parts = triton.cdiv(n, part_size)
    out = torch.empty(parts, n, 3, dtype=position.dtype, device=position.device)
    with _on(position):
        _nbody_kernel[(tiles, parts)](
            position.contiguous(), mass.contiguous(), out, n, part_size, softening * softening, G,
            DTYPE=TYPES[position.dtype], SOFT=softening > 0, BODIES=bodies, OTHERS=others,
            num_warps=1,
        )  # fmt: skip
    return out[0] if parts == 1 else reduce(out.view(1, parts, 3 * n), "sum").view(n, 3)
