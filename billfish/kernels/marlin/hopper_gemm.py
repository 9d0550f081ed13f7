"""W4A16 matrix product for Hopper (sm_90a) in Gluon: Y[M, N] = X[M, K] W[N, K]^T.

A block computes tiles of `ROWS * CONSUMERS` rows of W times `TILE_M` tokens, in the transposed
orientation of Machete: W is the A operand of wgmma, which may live in registers, so dequantized
weights never touch shared memory; X is the B operand. The techniques, each a constexpr:

- Asynchronous loads into a circular queue: one producer warp keeps `STAGES` stages of 128 columns
  in flight with TMA (codes, scales and zeros as packed, and X); `CONSUMERS` warpgroups empty them.
- Double buffering (`OVERLAP`): a warpgroup dequantizes the second half of a stage while the tensor
  cores multiply the first; with `CARRY` also the first half of the next while they multiply the
  second.
- Stream-K (Osama et al., 2023, arXiv 2301.03598), see hopper_schedule.
- Programmatic dependent launch (`PDL`): the weight queue fills while the kernel before this one
  drains. Everything but the weights is waited for, so the kernel before must not write them (an
  ordinary kernel may: this one starts when it has ended).
- Grouped raster (`GROUP_M`): tiles that run at the same time share rows of W and X in L2.
- L2 policies: weights leave the cache first (`STREAM_WEIGHTS`), X last (`KEEP_X`). The text of the
  kernel does not show them: hopper_plan.cache_hints asks the compiler for them.

A bias, a gated activation and a residual may follow, on the fp32 sums (configs.Product). The scale
is applied to fp32 sums of one group (`SUM_SCALE`, groups of 128) or to the fragments.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from billfish.kernels.gluon_compat import aggregate
from billfish.kernels.marlin.hopper_layouts import code_layout, meta_layout, queue_shape
from billfish.kernels.marlin.hopper_queue import Queue
from billfish.kernels.marlin.hopper_schedule import Output, Schedule, finish_tile

HALF_K = gl.constexpr(64)  # columns of one step of the inner loop: half a unit


@aggregate
class Method:
    """How a consumer computes: the layout of its sums, and the techniques."""

    ROWS: gl.constexpr
    ACC: gl.constexpr
    GROUPS: gl.constexpr
    ZEROS: gl.constexpr
    SUM_SCALE: gl.constexpr
    OVERLAP: gl.constexpr
    CARRY: gl.constexpr
    PDL: gl.constexpr
    ASM: gl.constexpr
    REGS: gl.constexpr


@gluon.jit
def _produce(queue, work, PDL: gl.constexpr):
    count = work.count()
    if PDL:
        gdc_launch_dependents()
        tile, step = work.first()
        for stage in range(gl.minimum(count, queue.STAGES)):
            _, block = work.place(tile)
            queue.load_weights(stage, block, step)
            tile, step = work.next(tile, step)
        gdc_wait()
    tile, step = work.first()
    stage = 0
    phase = 1  # a fresh barrier counts as having completed the phase before
    for i in range(count):
        tile_m, block = work.place(tile)
        mbarrier.wait(queue.empty.index(stage), phase)
        if not PDL or i >= queue.STAGES:
            queue.load_weights(stage, block, step)
        queue.load_x(stage, tile_m, step)
        tile, step = work.next(tile, step)
        stage, phase = queue.advance(stage, phase)


@gluon.jit
def _split(x, SHAPE: gl.constexpr, AXES: gl.constexpr):
    """Reshape, move the dimension of the two 64-column halves last, and part them."""
    return gl.split(x.reshape(SHAPE).permute(AXES))


@gluon.jit
def _rows(meta, DTYPE: gl.constexpr, LAYOUT: gl.constexpr):
    """The row pairs of one scale a row [units, 1, 1, 32] -> float32 [units * 64] in `LAYOUT`."""
    low = (meta & 0xFFFF).to(gl.int16).to(DTYPE, bitcast=True).to(gl.float32)
    high = (meta >> 16).to(gl.int16).to(DTYPE, bitcast=True).to(gl.float32)
    units: gl.constexpr = meta.shape[0]
    both = gl.join(low, high).reshape([units, 4, 8, 2]).permute([0, 1, 3, 2])
    return gl.convert_layout(both.reshape([units * 64]), LAYOUT, assert_trivial=True)


@gluon.jit
def _spread(meta, GROUPS: gl.constexpr, WORDS: gl.constexpr):
    """Scales of one half [units, GROUPS, 4, 8] -> one a word, to broadcast to [units,4,8,4,2,2].

    GROUPS is that of 64 columns: 1 (all four words of a thread), 2 (two words each) or 4.
    """
    units: gl.constexpr = meta.shape[0]
    if GROUPS == 4:
        m = meta.reshape([units, 2, 2, 4, 8]).permute([0, 3, 4, 1, 2])
        m = gl.convert_layout(m, gl.SliceLayout(3, WORDS), assert_trivial=True)
        return m.expand_dims(3)
    elif GROUPS == 2:
        m = meta.permute([0, 2, 3, 1])
        m = gl.convert_layout(m, gl.SliceLayout(3, gl.SliceLayout(5, WORDS)), assert_trivial=True)
        return m.expand_dims(3).expand_dims(5)
    else:
        layout: gl.constexpr = gl.SliceLayout(3, gl.SliceLayout(4, gl.SliceLayout(5, WORDS)))
        m = gl.convert_layout(meta.reshape([units, 4, 8]), layout, assert_trivial=True)
        return m.expand_dims(3).expand_dims(4).expand_dims(5)


@gluon.jit
def _halves(meta, WORDS: gl.constexpr):
    """Scales of a stage [units, 1, groups, 32] -> those of its two halves, as `_spread` gives."""
    units: gl.constexpr = meta.shape[0]
    groups: gl.constexpr = meta.shape[2]
    if groups == 1:
        m = _spread(meta.reshape([units, 1, 4, 8]), 1, WORDS)
        return m, m
    else:
        m0, m1 = _split(meta, [units, 2, groups // 2, 4, 8], [0, 2, 3, 4, 1])
        return _spread(m0, groups // 2, WORDS), _spread(m1, groups // 2, WORDS)


@gluon.jit
def _dequantize(words, scales, zeros, x, how):
    """Words, scales and zeros of a half -> fragments [ROWS, 64] of x's dtype."""
    if how.SUM_SCALE:
        args = [words, zeros] if how.ZEROS else [words]
    else:
        args = [words, scales, zeros] if how.ZEROS else [words, scales]
    o0, o1, o2, o3, o4, o5, o6, o7 = gl.inline_asm_elementwise(
        how.ASM,
        how.REGS,
        args,
        (x.dtype, x.dtype, x.dtype, x.dtype, x.dtype, x.dtype, x.dtype, x.dtype),
        is_pure=True,
        pack=2,
    )
    first = gl.join(gl.join(o0, o1), gl.join(o2, o3))
    both = gl.join(first, gl.join(gl.join(o4, o5), gl.join(o6, o7)))
    # unit w r c step/2 k0 r3 k3 step&1 -> rows (unit w r3 r), columns (step/2 step&1 k3 c k0)
    both = both.permute([0, 1, 6, 2, 4, 8, 7, 3, 5]).reshape([how.ROWS, HALF_K])
    A: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=how.ACC, k_width=2)
    return gl.convert_layout(both, A, assert_trivial=True)


@gluon.jit
def _load_stage(queue, stage, c: gl.constexpr, how):
    """The packed words, scales and zeros of consumer c: those of each half, and all scales."""
    units: gl.constexpr = how.ROWS // 64
    codes = queue.codes.index(stage).slice(c * units, units, dim=0).load(code_layout(units))
    w0, w1 = _split(codes, [units, 2, 4, 8, 4, 2, 2], [0, 2, 3, 4, 5, 6, 1])
    WORDS: gl.constexpr = w0.type.layout
    meta = queue.meta.index(stage).slice(c * units, units, dim=0)
    if how.ZEROS:
        meta = meta.load(meta_layout(units, 2 * how.GROUPS))
        scales, zeros = _split(meta, [units, 1, 2, how.GROUPS, 32], [0, 1, 3, 4, 2])
        z0, z1 = _halves(zeros, WORDS)
    else:
        scales = meta.load(meta_layout(units, how.GROUPS))
        z0, z1 = scales, scales  # not used
    s0, s1 = _halves(scales, WORDS)
    return w0, s0, z0, w1, s1, z1, scales


@gluon.jit
def _halves_of_x(queue, stage):
    """X of a stage as two B operands [64, TILE_M]."""
    x = queue.x.index(stage)
    first = x.slice(0, HALF_K, dim=1).permute([1, 0])
    return x, first, x.slice(HALF_K, HALF_K, dim=1).permute([1, 0])


@gluon.jit
def _consume(c: gl.constexpr, queue, work, out, how):
    """Compute consumer c's rows of every tile of this block, a run of stages for each tile."""
    if how.PDL:
        gdc_wait()
    tile, step = work.first()
    stage = 0
    phase = 0
    left = work.count()
    while left > 0:
        run = work.run(tile, step, left)
        if how.CARRY:
            acc, stage, phase = _sum_carried(c, queue, run, stage, phase, how)
        else:
            acc, stage, phase = _sum(c, queue, run, stage, phase, how)
        finish_tile(acc, tile, c, work, out)
        left -= run
        tile, step = work.after(tile, step, run)


@gluon.jit
def _sum(c: gl.constexpr, queue, run, stage, phase, how):
    """The product over `run` stages of the queue."""
    DTYPE: gl.constexpr = queue.x.dtype
    TILE_M: gl.constexpr = queue.x.shape[1]
    nothing = gl.zeros([how.ROWS, TILE_M], gl.float32, how.ACC)
    acc = nothing
    for _ in range(run):
        mbarrier.wait(queue.full.index(stage), phase)
        w0, s0, z0, w1, s1, z1, scales = _load_stage(queue, stage, c, how)
        x, x0, x1 = _halves_of_x(queue, stage)
        a0 = _dequantize(w0, s0, z0, x, how)
        if how.SUM_SCALE:
            part = warpgroup_mma(a0, x0, nothing, use_acc=False, is_async=True)
        else:
            part = warpgroup_mma(a0, x0, acc, is_async=True)
        if not how.OVERLAP:
            part, a0 = warpgroup_mma_wait(0, deps=[part, a0])
        a1 = _dequantize(w1, s1, z1, x, how)
        part = warpgroup_mma(a1, x1, part, is_async=True)
        # The fragments are listed because the tensor cores read their registers until here.
        part, a0, a1 = warpgroup_mma_wait(0, deps=[part, a0, a1])
        mbarrier.arrive(queue.empty.index(stage))
        if how.SUM_SCALE:
            acc += part * _rows(scales, DTYPE, gl.SliceLayout(1, how.ACC))[:, None]
        else:
            acc = part
        stage, phase = queue.advance(stage, phase)
    return acc, stage, phase


@gluon.jit
def _sum_carried(c: gl.constexpr, queue, run, stage, phase, how):
    """`_sum` with the last product of a stage still running while the next is dequantized."""
    TILE_M: gl.constexpr = queue.x.shape[1]
    A: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=how.ACC, k_width=2)
    acc = gl.zeros([how.ROWS, TILE_M], gl.float32, how.ACC)
    a1 = gl.zeros([how.ROWS, HALF_K], queue.x.dtype, A)
    for i in range(run):
        mbarrier.wait(queue.full.index(stage), phase)
        w0, s0, z0, w1, s1, z1, _scales = _load_stage(queue, stage, c, how)
        x, x0, x1 = _halves_of_x(queue, stage)
        a0 = _dequantize(w0, s0, z0, x, how)
        acc, a1 = warpgroup_mma_wait(0, deps=[acc, a1])
        mbarrier.arrive(queue.empty.index(queue.before(stage)), pred=i > 0)
        acc = warpgroup_mma(a0, x0, acc, is_async=True)
        a1 = _dequantize(w1, s1, z1, x, how)
        acc = warpgroup_mma(a1, x1, acc, is_async=True)
        acc, a0 = warpgroup_mma_wait(1, deps=[acc, a0])
        stage, phase = queue.advance(stage, phase)
    acc, a1 = warpgroup_mma_wait(0, deps=[acc, a1])
    mbarrier.arrive(queue.empty.index(queue.before(stage)))
    return acc, stage, phase


@gluon.jit(
    do_not_specialize=["M", "steps", "tiles_n", "tiles_m", "whole", "share", "extra", "own"],
)
def w4a16_hopper(
    code_desc, meta_desc, x_desc, y_ptr, bias_ptr, residual_ptr, partial_ptr, count_ptr,
    M, N, steps, tiles_n, tiles_m, whole, share, extra, own,
    ROWS: gl.constexpr, CONSUMERS: gl.constexpr, TILE_M: gl.constexpr, STAGES: gl.constexpr,
    GROUPS: gl.constexpr, ZEROS: gl.constexpr, SUM_SCALE: gl.constexpr, OVERLAP: gl.constexpr,
    CARRY: gl.constexpr, PDL: gl.constexpr, GROUP_M: gl.constexpr, OWNED: gl.constexpr,
    HAS_BIAS: gl.constexpr, HAS_RESIDUAL: gl.constexpr, SILU_MUL: gl.constexpr,
    STREAM_WEIGHTS: gl.constexpr, KEEP_X: gl.constexpr, TOGETHER: gl.constexpr,
    ASM: gl.constexpr, REGS: gl.constexpr, PRODUCER_REGS: gl.constexpr,
    CONSUMER_REGS: gl.constexpr,
):  # fmt: skip
    """The kernel, launched by hopper_launch.Launch on a grid of one dimension.

    Descriptors: see hopper_launch.descriptors. y [M, N]; bias, residual: any address where there is
    none. partial: float32, slots for a tile's sums (hopper_plan.Plan.partial_size); count: int32
    zeros, one for each consumer of each divided tile, zero again afterwards. Numbers after N: those
    of hopper_plan.Division; the constants come from hopper_plan.Plan.constants.
    """
    ACC: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, TILE_M, 16]
    )
    codes = gl.allocate_shared_memory(
        gl.int32, queue_shape(STAGES, code_desc.block_shape), code_desc.layout
    )
    meta = gl.allocate_shared_memory(
        gl.int32, queue_shape(STAGES, meta_desc.block_shape), meta_desc.layout
    )
    x = gl.allocate_shared_memory(
        x_desc.dtype, queue_shape(STAGES, x_desc.block_shape), x_desc.layout
    )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=CONSUMERS)
    queue = Queue(code_desc, meta_desc, x_desc, codes, meta, x, full, empty, STAGES)
    work = Schedule(
        gl.program_id(0), gl.num_programs(0), steps, tiles_n, tiles_m, whole, share, extra, own,
        GROUP_M, OWNED,
    )  # fmt: skip
    out = Output(
        y_ptr, bias_ptr, residual_ptr, partial_ptr, count_ptr, M, N, ROWS, CONSUMERS, HAS_BIAS,
        HAS_RESIDUAL, SILU_MUL, TOGETHER,
    )  # fmt: skip
    how = Method(ROWS, ACC, GROUPS, ZEROS, SUM_SCALE, OVERLAP, CARRY, PDL, ASM, REGS)
    if CONSUMERS == 1:
        gl.warp_specialize([
            (_consume, (0, queue, work, out, how)),
            (_produce, (queue, work, PDL)),
        ], [1], [PRODUCER_REGS])  # fmt: skip
    elif CONSUMERS == 2:
        gl.warp_specialize([
            (_consume, (0, queue, work, out, how)),
            (_consume, (1, queue, work, out, how)),
            (_produce, (queue, work, PDL)),
        ], [4, 1], [CONSUMER_REGS, PRODUCER_REGS])  # fmt: skip
    else:
        gl.static_assert(CONSUMERS == 4)
        gl.warp_specialize([
            (_consume, (0, queue, work, out, how)),
            (_consume, (1, queue, work, out, how)),
            (_consume, (2, queue, work, out, how)),
            (_consume, (3, queue, work, out, how)),
            (_produce, (queue, work, PDL)),
        ], [4, 4, 4, 1], [CONSUMER_REGS, CONSUMER_REGS, CONSUMER_REGS, PRODUCER_REGS])  # fmt: skip
