"""The product of float32 matrices at their full precision on Hopper, in Gluon; see `matmul.py`.

Tensor cores do not multiply float32, so each thread adds up its own 8 by 8 results, and for each
step along k reads 8 values of a and 8 of b from shared memory: the fewer reads a multiplication
needs, the nearer it comes to the rate of the arithmetic units. Here four steps of a row are one
read of 16 bytes, a thread's rows and columns lie apart, so that those of its neighbours are next to
each other and no two fall on one bank, and the copy engine fills the queue.
"""

from dataclasses import dataclass

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from billfish.kernels.general.gpu import activated
from billfish.kernels.gluon_compat import barrier, multiply_add

BLOCK_K = 8
"""Steps along k of one box of the copy engine: a row of 32 bytes, which is a sector of memory."""


@dataclass(frozen=True)
class Tile:
    """A tile, the boxes along k that a stage of the queue has, the warps, the queue's depth, and
    the registers that a thread may have."""

    block_m: int = 128
    block_n: int = 64
    boxes: int = 4
    warps: int = 4
    stages: int = 3
    registers: int | None = None


TILE = Tile()


@gluon.jit
def _read(
    a, b, x, y, full, stage, top, left, start, BOXES: gl.constexpr, TURN_A: gl.constexpr,
    TURN_B: gl.constexpr, BLOCK_K: gl.constexpr,
):  # fmt: skip
    """Ask the copy engine for the tiles at `start` of k."""
    bar = full.index(stage)
    mbarrier.expect(bar, BOXES * (a.block_type.nbytes + b.block_type.nbytes))
    for box in gl.static_range(BOXES):
        at = start + box * BLOCK_K
        slot = stage * BOXES + box
        if TURN_A:
            tma.async_copy_global_to_shared(a, [at, top], bar, x.index(slot))
        else:
            tma.async_copy_global_to_shared(a, [top, at], bar, x.index(slot))
        if TURN_B:
            tma.async_copy_global_to_shared(b, [left, at], bar, y.index(slot))
        else:
            tma.async_copy_global_to_shared(b, [at, left], bar, y.index(slot))


@gluon.jit
def _float32_kernel(
    a, b, bias, residual, out, m, n, k, residual_m, residual_n, STAGES: gl.constexpr,
    BOXES: gl.constexpr, GROUP: gl.constexpr, TURN_A: gl.constexpr, TURN_B: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, BIAS: gl.constexpr,
    ACTIVATION: gl.constexpr, RESIDUAL: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Program: a tile of out. a and b are descriptors, of their transposes where TURN_A or TURN_B
    says so."""
    # Where rows lie along k, a thread reads along k; else 4 neighbours across it.
    TALL: gl.constexpr = 4 if TURN_A else 1
    BROAD: gl.constexpr = 1 if TURN_B else 4
    SUMS: gl.constexpr = gl.BlockedLayout([TALL, BROAD], [4, 8], [num_warps // 2, 2], [1, 0])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SUMS, 0)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, SUMS, 0)
    LANES: gl.constexpr = BLOCK_N // 4 if BLOCK_N < 128 else 32
    OUT: gl.constexpr = gl.BlockedLayout([1, 4], [32 // LANES, LANES], [num_warps, 1], [1, 0])

    across, down = gl.cdiv(n, BLOCK_N), gl.cdiv(m, BLOCK_M)
    block, within = gl.program_id(0) // (GROUP * across), gl.program_id(0) % (GROUP * across)
    height = gl.minimum(down - block * GROUP, GROUP)
    top = (block * GROUP + within % height) * BLOCK_M
    left = (within // height) * BLOCK_N

    # The kernel language has no starred elements.
    QUEUE_A: gl.constexpr = [STAGES * BOXES] + a.block_type.shape  # noqa: RUF005
    QUEUE_B: gl.constexpr = [STAGES * BOXES] + b.block_type.shape  # noqa: RUF005
    x = gl.allocate_shared_memory(gl.float32, QUEUE_A, a.layout)
    y = gl.allocate_shared_memory(gl.float32, QUEUE_B, b.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
    barrier()
    STEP: gl.constexpr = BOXES * BLOCK_K
    for stage in gl.static_range(STAGES):
        if stage * STEP < k:
            _read(a, b, x, y, full, stage, top, left, stage * STEP, BOXES, TURN_A, TURN_B, BLOCK_K)

    total = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, SUMS)
    slot = 0
    phase = 0
    for start in range(0, k, STEP):
        mbarrier.wait(full.index(slot), phase)
        for box in gl.static_range(BOXES):
            p, q = x.index(slot * BOXES + box), y.index(slot * BOXES + box)
            p = p.permute([1, 0]) if TURN_A else p
            q = q.permute([1, 0]) if TURN_B else q
            total = multiply_add(p.load(LEFT), q.load(RIGHT), total)
        barrier()
        ahead = start + STAGES * STEP
        if ahead < k:
            _read(a, b, x, y, full, slot, top, left, ahead, BOXES, TURN_A, TURN_B, BLOCK_K)
        slot += 1
        if slot == STAGES:
            slot = 0
            phase ^= 1

    value = gl.convert_layout(total, OUT)
    row = top.to(gl.int64) + gl.arange(0, BLOCK_M, gl.SliceLayout(1, OUT))[:, None]
    column = left.to(gl.int64) + gl.arange(0, BLOCK_N, gl.SliceLayout(0, OUT))[None, :]
    there = (row < m) & (column < n)
    if BIAS:
        value += gl.load(bias + column, mask=column < n, other=0.0)
    value = activated(value, ACTIVATION)
    if RESIDUAL:
        value += gl.load(residual + row * residual_m + column * residual_n, mask=there, other=0.0)
    gl.store(out + row * n + column, value, mask=there)


def covers(m: int, n: int) -> bool:
    """Whether there are tiles for a whole GPU; of fewer, smaller ones are better."""
    tiles = triton.cdiv(m, TILE.block_m) * triton.cdiv(n, TILE.block_n)
    return tiles >= 128


def matmul_float32(
    sides: list[tuple[Tensor, bool]], bias: Tensor | None, activation: str,
    residual: Tensor | None, out: Tensor, k: int, group: int, stages: int | None = None,
    tile: Tile = TILE,
) -> None:  # fmt: skip
    """sides: a and b, or their transposes (True), with rows as the copy engine takes them."""
    m, n = out.shape
    described = []
    blocks = [[tile.block_m, BLOCK_K], [BLOCK_K, tile.block_n]]
    for (x, turned), block in zip(sides, blocks, strict=True):
        block = block[::-1] if turned else block
        layout = gl.NVMMASharedLayout.get_default_for(block, gl.float32)
        described.append(TensorDescriptor(x, list(x.shape), list(x.stride()), block, layout))
    rest = out if residual is None else residual
    tiles = triton.cdiv(m, tile.block_m) * triton.cdiv(n, tile.block_n)
    _float32_kernel[(tiles,)](
        *described, out if bias is None else bias.contiguous(), rest, out, m, n, k, *rest.stride(),
        STAGES=stages or tile.stages, BOXES=tile.boxes, GROUP=group, TURN_A=sides[0][1],
        TURN_B=sides[1][1], BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=BLOCK_K,
        BIAS=bias is not None, ACTIVATION=activation, RESIDUAL=residual is not None,
        num_warps=tile.warps, maxnreg=tile.registers,
    )  # fmt: skip
