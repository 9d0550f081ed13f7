"""The scan on a GPU, in Triton: single pass, decoupled look-back; see `_triton.py`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from billfish.kernels.general._arguments import accumulator, identity, result
from billfish.kernels.general._triton import (
    AGGREGATE,
    PREFIX,
    TYPES,
    combine,
    fold,
    look_back,
    publish,
    running,
)
from billfish.kernels.general.gpu import _on


@triton.jit
def _scan_kernel(
    x, out, state, ticket, n, tiles, x_row, x_step, EMPTY: tl.constexpr, DTYPE: tl.constexpr,
    OP: tl.constexpr, EXCLUSIVE: tl.constexpr, ALONE: tl.constexpr, CHAIN: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Tile t is the (t % tiles)-th of row t // tiles. ALONE: each row is one tile."""
    tile = tl.program_id(0)
    if not ALONE:
        tile = tl.atomic_add(ticket, 1, sem="relaxed")
    row = (tile // tiles).to(tl.int64)
    d = (tile % tiles).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    nothing = tl.full((), EMPTY, DTYPE)
    value = tl.load(x + row * x_row + d * x_step, mask=d < n, other=0).to(DTYPE)
    value = tl.where(d < n, value, nothing)
    first = tile - tile % tiles
    if not ALONE and not CHAIN:
        # Before the tile is scanned: others wait for this.
        total = fold(value, 0, OP)
        if tile > first:
            publish(state, tile, total, AGGREGATE)
    scanned = running(value, OP)
    if not ALONE:
        if CHAIN:
            total = fold(value, 0, OP)
        if tile > first:
            prefix = look_back(state, first, tile, nothing, OP, CHAIN)
            publish(state, tile, combine(prefix, total, OP), PREFIX)
            scanned = combine(prefix, scanned, OP)
        else:
            publish(state, tile, total, PREFIX)
    scanned = scanned.to(out.dtype.element_ty)
    if EXCLUSIVE:
        # Each writes its neighbour's result: what comes before the next element is what ends here.
        tl.store(out + row * n + d + 1, scanned, mask=d + 1 < n)
        if tile % tiles == 0:
            tl.store(out + row * n, nothing.to(out.dtype.element_ty))
    else:
        tl.store(out + row * n + d, scanned, mask=d < n)


def scan(
    x: Tensor, exclusive: bool, op: str, deterministic: bool, *, block: int | None = None
) -> Tensor:
    """x: [rows, n]. deterministic: tiles finish one after another; always so what has one order."""
    rows, n = x.shape
    wide = accumulator(x.dtype, op)
    out = torch.empty(rows, n, dtype=result(x.dtype, op), device=x.device)
    if not x.numel():
        return out
    # A row that registers hold is one tile. Others are tiles of 16 KiB, few threads each: many are
    # under way at once, and a program's warps wait for each other at every look back.
    whole = max(128, triton.next_power_of_2(n))
    few = whole > 65536 // wide.itemsize
    block = block or (16384 // wide.itemsize if few else whole)
    tiles = triton.cdiv(n, block)
    words = rows * tiles * (2 if wide.itemsize == 8 else 1)
    # The last word is the counter of tickets: one fill clears all.
    state = torch.zeros(1 if tiles == 1 else words + 1, dtype=torch.int64, device=x.device)
    with _on(x):
        _scan_kernel[(rows * tiles,)](
            x, out, state, state[-1:], n, tiles, x.stride(0), x.stride(1),
            EMPTY=identity(out.dtype, op), DTYPE=TYPES[wide], OP=op,
            EXCLUSIVE=exclusive, ALONE=tiles == 1, CHAIN=deterministic,
            BLOCK=block, num_warps=max(1, min(4 if few else 8, block // 512)),
        )  # fmt: skip
    return out
