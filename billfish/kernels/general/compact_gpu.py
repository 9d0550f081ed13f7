"""Stream compaction on a GPU, in Triton; see `compact.py`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from billfish.kernels.general._triton import AGGREGATE, PREFIX, look_back, publish
from billfish.kernels.general.gpu import _on
from billfish.kernels.general.scan_gpu import scan

BLOCK = 4096
"""Values of a tile, at most 16 a thread."""

REGISTERS = 64
"""Of a thread: four programs share a multiprocessor, and read and write while others wait for the
tiles before theirs."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


# Neighbours go to neighbouring threads, one value each: what a warp keeps is then written side by
# side, without an exchange of values between threads. The compiler would give a thread 16 values if
# it knew the step to be 1.
@triton.jit(do_not_specialize=["step"])
def _compact_kernel(x, keep, out, count, state, ticket, n, step, BLOCK: tl.constexpr):
    tile = tl.atomic_add(ticket, 1, sem="relaxed").to(tl.int32)
    begin = tile.to(tl.int64) * BLOCK
    d = tl.arange(0, BLOCK)
    there = d < tl.minimum(n - begin, BLOCK).to(tl.int32)
    kept = tl.load(keep + begin + d * step, mask=there, other=0) != 0
    value = tl.load(x + begin + d * step, mask=there, other=0)
    ones = kept.to(tl.int32)
    total = tl.sum(ones, 0)
    before = tl.full((), 0, tl.int32)
    if tile > 0:
        publish(state, tile, total, AGGREGATE)
        before = look_back(state, 0, tile, before, "sum", False)
    publish(state, tile, before + total, PREFIX)
    place = tl.cumsum(ones, 0) - ones
    tl.store(out + before + place, value, mask=kept)
    # What is dropped fills the end: as many zeros as values, the first dropped at the very end.
    last = out + (n - 1 - (begin - before))
    tl.store(last + (place - d), tl.zeros_like(value), mask=there & ~kept)
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
    n = x.shape[0]
    out = torch.empty(n, dtype=x.dtype, device=x.device)
    count = torch.zeros(1, dtype=torch.int64, device=x.device)
    if not n:
        return out, count
    bits = _BITS[x.dtype.itemsize]
    mask = keep.contiguous().view(torch.uint8)
    tiles = triton.cdiv(n, block)
    warps = max(1, min(8, block // 512))
    limit = {} if triton.knobs.runtime.interpret else {"maxnreg": REGISTERS}
    source = x.contiguous().view(bits)
    with _on(x):
        if fused:
            state = torch.zeros(tiles + 1, dtype=torch.int64, device=x.device)
            _compact_kernel[(tiles,)](
                source, mask, out.view(bits), count, state, state[-1:], n, 1, BLOCK=block,
                num_warps=warps, **limit,
            )  # fmt: skip
        else:
            place = scan(mask.view(1, -1), False, "sum", False)
            _scatter_kernel[(tiles,)](
                source, mask, place, out.view(bits), count, n, 1, BLOCK=block, num_warps=warps
            )  # fmt: skip
    return out, count
