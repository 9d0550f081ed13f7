"""The reduction on a GPU, in Triton; see `reduce.py`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from billfish.kernels.general._arguments import accumulator, identity, result
from billfish.kernels.general._triton import TYPES, combine, fold
from billfish.kernels.general.gpu import _on

PARTS = 2112
"""Programs one result is shared by, at most: some for each multiprocessor, the same on all GPUs.
Half as many of results side by side: as many as an H200 runs at once."""

TILE = 4096
"""Values a program reads at a time."""

FEW = 16
"""Results up to which a fourth of the programs, which read twice as much at a time, are enough."""


@triton.jit
def _reduce_kernel(
    x, out, partial, count, n, inner, x_outer, x_n, x_inner, part_size, parts, blocks,
    EMPTY: tl.constexpr, DTYPE: tl.constexpr, OP: tl.constexpr, ALONE: tl.constexpr,
    FUSED: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, SPACE: tl.constexpr,
    STRIDED: tl.constexpr,
):  # fmt: skip
    """Program (group, part): of [outer, n, inner], WIDTH neighbours of inner, a part of n.

    partial: [groups, parts, WIDTH]. ALONE: there is one part. STRIDED: parts take blocks of n in
    turn, so that programs that run at once read neighbours; else a part is part_size in a row.
    """
    group, part = tl.program_id(0), tl.program_id(1)
    outer = (group // blocks).to(tl.int64)
    column = (group % blocks) * WIDTH + tl.arange(0, WIDTH)
    step = BLOCK
    begin = part.to(tl.int64) * part_size
    end = tl.minimum(begin + part_size, n)
    if STRIDED:
        # In 32 bits, the assembler reads into fewer registers, one read after another.
        step = tl.cast(parts, tl.int64) * BLOCK
        begin = part.to(tl.int64) * BLOCK
        end = tl.cast(n, tl.int64)
    nothing = tl.full((), EMPTY, DTYPE)
    total = tl.full([BLOCK, WIDTH], EMPTY, DTYPE)
    base = x + outer * x_outer + column[None, :].to(tl.int64) * x_inner
    for start in range(begin, end, step):
        i = start + tl.arange(0, BLOCK)
        inside = (i < end)[:, None] & (column < inner)[None, :]
        value = tl.load(
            base + i[:, None] * x_n, mask=inside, other=0, eviction_policy="evict_first"
        ).to(DTYPE)
        total = combine(total, tl.where(inside, value, nothing), OP)
    answer = fold(total, 0, OP)
    place = out + outer * inner + column
    if ALONE:
        tl.store(place, answer.to(out.dtype.element_ty), mask=column < inner)
    else:
        w = tl.arange(0, WIDTH)
        mine = partial + group.to(tl.int64) * parts * WIDTH
        tl.store(mine + part * WIDTH + w, answer)
        if FUSED:
            # All threads have stored before one counts for all; the release of its atomic covers
            # what it saw stored (PTX: a barrier, then release, are causality order).
            tl.debug_barrier()
            before = tl.atomic_add(count + group, 1, sem="acq_rel")
            if before == parts - 1:
                _finish(mine, place, parts, column < inner, EMPTY, DTYPE, OP, WIDTH, SPACE)


@triton.jit
def _finish(
    mine, place, parts, there, EMPTY: tl.constexpr, DTYPE: tl.constexpr, OP: tl.constexpr,
    WIDTH: tl.constexpr, SPACE: tl.constexpr,
):  # fmt: skip
    p, w = tl.arange(0, SPACE), tl.arange(0, WIDTH)
    nothing = tl.full((), EMPTY, DTYPE)
    # .cg: what other multiprocessors wrote is in L2, and an L1 line of it might be old.
    value = tl.load(
        mine + p[:, None] * WIDTH + w[None, :], mask=(p < parts)[:, None], other=0,
        cache_modifier=".cg",
    )  # fmt: skip
    answer = fold(tl.where((p < parts)[:, None], value, nothing), 0, OP)
    tl.store(place, answer.to(place.dtype.element_ty), mask=there)


@triton.jit
def _finish_kernel(
    out, partial, inner, parts, blocks, EMPTY: tl.constexpr, DTYPE: tl.constexpr,
    OP: tl.constexpr, WIDTH: tl.constexpr, SPACE: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0)
    column = (group % blocks) * WIDTH + tl.arange(0, WIDTH)
    place = out + (group // blocks).to(tl.int64) * inner + column
    mine = partial + group.to(tl.int64) * parts * WIDTH
    _finish(mine, place, parts, column < inner, EMPTY, DTYPE, OP, WIDTH, SPACE)


def reduce(x: Tensor, op: str, *, fused: bool = True, block: int | None = None) -> Tensor:
    """x: [outer, n, inner]. block: values of n read at a time."""
    outer, n, inner = x.shape
    dtype = result(x.dtype, op)
    empty, kind = identity(dtype, op), accumulator(x.dtype, op)
    out = torch.empty(outer, inner, dtype=dtype, device=x.device)
    if not out.numel() or not n:
        return out.fill_(empty)
    width = min(128, triton.next_power_of_2(inner))
    blocks = triton.cdiv(inner, width)
    groups = outer * blocks
    strided = width == 1
    most, tile = PARTS if strided else PARTS // 2, TILE // width
    if strided and groups <= FEW and n > TILE:
        most, tile = PARTS // 4, 2 * TILE
    block = block or max(32, min(tile, triton.next_power_of_2(n)))
    wanted = min(max(1, most // groups), max(1, SPACE_LIMIT // width))
    part_size = triton.cdiv(triton.cdiv(n, block), wanted) * block
    parts = min(wanted, triton.cdiv(n, block)) if strided else triton.cdiv(n, part_size)
    partial = torch.empty((groups, parts, width) if parts > 1 else 0, dtype=kind, device=x.device)
    count = torch.zeros(groups if parts > 1 else 0, dtype=torch.int32, device=x.device)
    space = triton.next_power_of_2(parts)
    warps = 8 if block >= TILE else 4
    with _on(x):
        _reduce_kernel[(groups, parts)](
            x, out, partial, count, n, inner, *x.stride(), part_size, parts, blocks,
            EMPTY=empty, DTYPE=TYPES[kind], OP=op, ALONE=parts == 1, FUSED=fused,
            BLOCK=block, WIDTH=width, SPACE=space, STRIDED=strided, num_warps=warps,
        )  # fmt: skip
        if parts > 1 and not fused:
            # As many warps: they decide in which order the parts are added.
            _finish_kernel[(groups,)](
                out, partial, inner, parts, blocks, EMPTY=empty, DTYPE=TYPES[kind], OP=op,
                WIDTH=width, SPACE=space, num_warps=warps,
            )  # fmt: skip
    return out


SPACE_LIMIT = 4096
"""Partial results the last program holds at once: of its threads' registers, a small part."""
