"""The scan on a GPU, in Triton: single pass, decoupled look-back; see `_triton.py`.

Long rows of sums of 64 bits are scanned by `scan_tiles.py`, in Gluon.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from billfish.kernels.general import _ptx_look_back
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
from billfish.kernels.gluon_compat import gluon_supported

if gluon_supported():
    from billfish.kernels.general import scan_tiles


@triton.jit
def _scan_kernel(
    x, out, state, ticket, n, tiles, x_row, x_step, EMPTY: tl.constexpr, DTYPE: tl.constexpr,
    OP: tl.constexpr, EXCLUSIVE: tl.constexpr, ALONE: tl.constexpr, CHAIN: tl.constexpr,
    BLOCK: tl.constexpr, BACK: tl.constexpr, CONSTRAINTS: tl.constexpr,
):  # fmt: skip
    """Tile t is the (t % tiles)-th of row t // tiles. ALONE: each row is one tile. BACK: the
    look-back, in PTX."""
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
            if BACK is not None:
                WORDS: tl.constexpr = DTYPE.primitive_bitwidth // 32
                bits = tl.inline_asm_elementwise(
                    BACK, CONSTRAINTS, [state + (tile - 1) * WORDS, tile - first],
                    dtype=tl.int64 if WORDS == 2 else tl.int32, is_pure=False, pack=1,
                )  # fmt: skip
                prefix = bits.to(DTYPE, bitcast=True)
            else:
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
    compiled = not deterministic and not triton.knobs.runtime.interpret
    in_gluon = few and compiled and wide.itemsize == 8 and x.stride(1) == 1 and gluon_supported()
    block = block or (4096 if in_gluon else 16384 // wide.itemsize if few else whole)
    tiles = triton.cdiv(n, block)
    warps = max(1, min(4 if few else 8, block // 512))
    words = rows * tiles * (2 if wide.itemsize == 8 else 1)
    # The last word is the counter of tickets: one fill clears all.
    state = torch.zeros(1 if tiles == 1 else words + 1, dtype=torch.int64, device=x.device)
    back, constraints = None, None
    if compiled and tiles > 1:
        back, constraints = _ptx_look_back.look_back(op, _ptx_look_back.KINDS[wide])
    with _on(x):
        if in_gluon and tiles > 1:
            scan_tiles.scan_kernel[(rows * tiles,)](
                x, out, state, state[-1:], n, tiles, x.stride(0), EMPTY=identity(out.dtype, op),
                DTYPE=TYPES[wide], OP=op, EXCLUSIVE=exclusive, BACK=back, CONSTRAINTS=constraints,
                BLOCK=block, WIDTH=max(1, min(block // (32 * warps), 16 // x.dtype.itemsize)),
                num_warps=warps,
            )  # fmt: skip
            return out
        _scan_kernel[(rows * tiles,)](
            x, out, state, state[-1:], n, tiles, x.stride(0), x.stride(1),
            EMPTY=identity(out.dtype, op), DTYPE=TYPES[wide], OP=op,
            EXCLUSIVE=exclusive, ALONE=tiles == 1, CHAIN=deterministic,
            BLOCK=block, BACK=back, CONSTRAINTS=constraints, num_warps=warps,
        )  # fmt: skip
    return out
