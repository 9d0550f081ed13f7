"""Stream compaction on a GPU, in Triton; see `compact.py`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from billfish.kernels.general._arguments import BITS
from billfish.kernels.general._ptx import places
from billfish.kernels.general._triton import AGGREGATE, PREFIX, look_back, publish
from billfish.kernels.general.gpu import _on
from billfish.kernels.general.scan_gpu import scan

BLOCK, WARPS = 8192, 16
"""Values and warps of a tile: 16 values a thread."""

REGISTERS = 64
"""Of a thread: two programs share a multiprocessor, and read and write while others wait for the
tiles before theirs, which is worth more than what is spilled for it."""


@triton.jit
def _compact_tile(
    x, keep, out, count, state, tile, n, FULL: tl.constexpr, BLOCK: tl.constexpr,
    PTX: tl.constexpr, CONSTRAINTS: tl.constexpr, ITEMS: tl.constexpr,
):  # fmt: skip
    """FULL: all BLOCK values are there."""
    begin = tile.to(tl.int64) * BLOCK
    # Neighbours go to neighbouring threads, one value each: what a warp keeps is then written side
    # by side, without an exchange of values between threads. The compiler, if it knew that they
    # are contiguous, would give a thread some neighbours.
    d = tl.max_contiguous(tl.arange(0, BLOCK), 1)
    if FULL:
        flag = tl.load(keep + begin + d)
        value = tl.load(x + begin + d)
    else:
        there = d < (n - begin).to(tl.int32)
        flag = tl.load(keep + begin + d, mask=there, other=0)
        value = tl.load(x + begin + d, mask=there, other=0)
    kept = flag != 0
    ones = kept.to(tl.int32)
    if PTX is not None:
        place = tl.inline_asm_elementwise(
            PTX, CONSTRAINTS, [flag.to(tl.int32), tile, state + tile], dtype=tl.int32,
            is_pure=False, pack=ITEMS,
        )  # fmt: skip
    else:
        total = tl.sum(ones, 0)
        before = tl.full((), 0, tl.int32)
        if tile > 0:
            publish(state, tile, total, AGGREGATE)
            before = look_back(state, 0, tile, before, "sum", False)
        publish(state, tile, before + total, PREFIX)
        place = before + tl.cumsum(ones, 0) - ones
    # What is dropped fills the end: as many zeros as values, the first dropped at the very end.
    last = (n - 1 - begin).to(tl.int32)
    to = tl.where(kept, place, last + (place - d))
    value = tl.where(kept, value, tl.zeros_like(value))
    if FULL:
        tl.store(out + to, value)
    else:
        tl.store(out + to, value, mask=d <= last)
    if begin + BLOCK >= n:
        tl.store(count, tl.max(place + ones, 0).to(tl.int64))


@triton.jit
def _compact_kernel(
    x, keep, out, count, state, ticket, n, BLOCK: tl.constexpr, PTX: tl.constexpr,
    CONSTRAINTS: tl.constexpr, ITEMS: tl.constexpr,
):  # fmt: skip
    tile = tl.atomic_add(ticket, 1, sem="relaxed").to(tl.int32)
    if tile.to(tl.int64) * BLOCK + BLOCK <= n:
        _compact_tile(x, keep, out, count, state, tile, n, True, BLOCK, PTX, CONSTRAINTS, ITEMS)
    else:
        _compact_tile(x, keep, out, count, state, tile, n, False, BLOCK, PTX, CONSTRAINTS, ITEMS)


@triton.jit(do_not_specialize=["step"])
def _scatter_kernel(x, keep, place, out, count, n, step, BLOCK: tl.constexpr):
    """place: int64 [n], the inclusive scan of keep."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    kept = tl.load(keep + i * step, mask=i < n, other=0) != 0
    value = tl.load(x + i * step, mask=i < n, other=0)
    to = tl.load(place + i, mask=i < n, other=0)
    tl.store(out + to - 1, value, mask=kept)
    tl.store(out + n - 1 - (i - to), tl.zeros_like(value), mask=(i < n) & ~kept)
    tl.store(count + i * 0, to, mask=i == n - 1)


def compact(
    x: Tensor, keep: Tensor, *, fused: bool = True, block: int = BLOCK
) -> tuple[Tensor, Tensor]:
    """block: values of a tile; on a GPU 1024 or more."""
    n = x.shape[0]
    out = torch.empty(n, dtype=x.dtype, device=x.device)
    count = torch.zeros(1, dtype=torch.int64, device=x.device)
    if not n:
        return out, count
    bits = BITS[x.dtype.itemsize]
    mask = keep.contiguous().view(torch.uint8)
    tiles = triton.cdiv(n, block)
    warps = max(1, min(WARPS, block // 512))
    ptx, constraints, items, limit = None, None, block // (32 * warps), {}
    if not triton.knobs.runtime.interpret:
        ptx, constraints = places(warps, items)
        limit = {"maxnreg": REGISTERS}
    source = x.contiguous().view(bits)
    with _on(x):
        if fused:
            state = torch.zeros(tiles + 1, dtype=torch.int64, device=x.device)
            _compact_kernel[(tiles,)](
                source, mask, out.view(bits), count, state, state[-1:], n, BLOCK=block,
                PTX=ptx, CONSTRAINTS=constraints, ITEMS=items, num_warps=warps, **limit,
            )  # fmt: skip
        else:
            place = scan(mask.view(1, -1), False, "sum", False)
            _scatter_kernel[(tiles,)](
                source, mask, place, out.view(bits), count, n, 1, BLOCK=block, num_warps=warps
            )  # fmt: skip
    return out, count
