"""Stream compaction on a GPU, in Triton; see `compact.py`.

Where Gluon is known, tiles are those of `compact_tiles.py`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from billfish.kernels.general._arguments import BITS
from billfish.kernels.general._ptx_look_back import gather
from billfish.kernels.general._triton import AGGREGATE, PREFIX, look_back, publish
from billfish.kernels.general.gpu import _on
from billfish.kernels.general.scan_gpu import scan
from billfish.kernels.gluon_compat import gluon_supported

if gluon_supported():
    from billfish.kernels.general import compact_tiles

BLOCK, ITEMS = 4096, 16
"""Values of a tile, and of a thread."""

REGISTERS = 40
"""Of a thread: six programs share a multiprocessor, and read and write while others wait for the
tiles before theirs. Values of 64 bits take more."""


@triton.jit
def _compact_kernel(x, keep, out, count, state, ticket, n, BLOCK: tl.constexpr):
    tile = tl.atomic_add(ticket, 1, sem="relaxed").to(tl.int32)
    begin = tile.to(tl.int64) * BLOCK
    # Neighbours go to neighbouring threads, one value each: what a warp keeps is then written side
    # by side, without an exchange of values between threads. The compiler, if it knew that they
    # are contiguous, would give a thread some neighbours.
    d = tl.max_contiguous(tl.arange(0, BLOCK), 1)
    there = d < (n - begin).to(tl.int32)
    kept = tl.load(keep + begin + d, mask=there, other=0) != 0
    value = tl.load(x + begin + d, mask=there, other=0)
    ones = kept.to(tl.int32)
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
    tl.store(out + to, tl.where(kept, value, tl.zeros_like(value)), mask=there)
    if begin + BLOCK >= n:
        tl.store(count, (before + total).to(tl.int64))


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
    """block: values of a tile; on a GPU 128 to 4096."""
    n = x.shape[0]
    out = torch.empty(n, dtype=x.dtype, device=x.device)
    count = torch.zeros(1, dtype=torch.int64, device=x.device)
    if not n:
        return out, count
    bits = BITS[x.dtype.itemsize]
    source, mask, target = x.contiguous().view(bits), keep.contiguous(), out.view(bits)
    mask = mask.view(torch.uint8)
    tiles = triton.cdiv(n, block)
    warps = max(1, block // (32 * ITEMS))
    with _on(x):
        if not fused:
            place = scan(mask.view(1, -1), False, "sum", False)
            _scatter_kernel[(tiles,)](
                source, mask, place, target, count, n, 1, BLOCK=block, num_warps=warps
            )
            return out, count
        state = torch.zeros(tiles + 1, dtype=torch.int64, device=x.device)
        arguments = (source, mask, target, count, state, state[-1:], n)
        if gluon_supported() and not triton.knobs.runtime.interpret:
            wide, items = x.dtype.itemsize == 8, block // (32 * warps)
            ptx, constraints = gather(1 + wide, warps, items)
            limit = {} if wide else {"maxnreg": REGISTERS}
            compact_tiles.compact_kernel[(tiles,)](
                *arguments, WIDE=wide, PTX=ptx, CONSTRAINTS=constraints, ITEMS=items, BLOCK=block,
                num_warps=warps, **limit,
            )  # fmt: skip
        else:
            _compact_kernel[(tiles,)](*arguments, BLOCK=block, num_warps=warps)
    return out, count
