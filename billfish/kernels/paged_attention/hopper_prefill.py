"""Prefill for Hopper (sm_90a) in Gluon: the work of `prefill`, warp-specialized.

Programs stay on their multiprocessor. A scheduler warp draws items (128 packed query rows of a
request and set of heads) from a counter, those with most keys first, and hands them to the
others through shared memory. Two producer warps fetch K and V, a TMA box a block, into a
circular queue each; two warpgroups attend 64 rows each with wgmma. Following FlashAttention-3
(Shah et al., 2024), a warpgroup starts the product Q K^T of the next tile before it finishes P V of
this one, so that its softmax runs under the tensor cores. Tiles go from the diagonal backwards.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from billfish.kernels.gluon_compat import aggregate, barrier
from billfish.kernels.paged_attention.hopper_feed import (
    FIELDS,
    HALF,
    READERS,
    ROWS,
    TILE,
    Batch,
    Ring,
    field,
    make_ring,
    produce,
    read_record,
    schedule,
)
from billfish.kernels.paged_attention.planner import (
    Scoring,
    Workspace,
    order_rows,
    packed_heads,
)
from billfish.kernels.paged_attention.tile import LOG2E, NO_SCORE

K_STAGES, V_STAGES = 3, 2
CONSUMER_REGISTERS, OTHER_REGISTERS = 232, 40


@aggregate
class Scores:
    """What becomes of the products of a warpgroup's rows, and who sees what."""

    position: gl.tensor  # [HALF]
    scale: gl.tensor  # to log2 units
    soft_cap: gl.tensor
    window: gl.tensor
    S: gl.constexpr
    HAS_CAP: gl.constexpr
    HAS_WINDOW: gl.constexpr

    @gluon.jit
    def cap(self, s):
        """Products, or capped logits over `scale`, so that s * scale is in log2 units."""
        if self.HAS_CAP:
            e = gl.exp2(s * (2.0 * self.scale / self.soft_cap))
            return (1.0 - 2.0 / (1.0 + e)) * (self.soft_cap * LOG2E / self.scale)
        else:
            return s

    @gluon.jit
    def mask(self, s, tile):
        key = tile * TILE + gl.arange(0, TILE, layout=gl.SliceLayout(0, self.S))
        key = gl.expand_dims(key, 0)
        position = gl.expand_dims(self.position, 1)
        seen = key <= position
        if self.HAS_WINDOW:
            seen = seen & (position - key < self.window)
        return gl.where(seen, s, float("-inf"))


@gluon.jit
def _partial_sums(e):
    """Row sums that stay in each thread: [HALF, 4], added up at the end of an item."""
    return gl.sum(gl.sum(e.reshape([HALF, TILE // 8, 4, 2]), axis=3), axis=1)


@gluon.jit
def _step(
    q, o, p, top, total, decay, k_stage, k_phase, v_stage, v_phase, more, tile, k, v, scores,
    MASK: gl.constexpr, ACC: gl.constexpr, A: gl.constexpr,
):  # fmt: skip
    """Q K^T and softmax of this tile, under P V of the tile before."""
    zeros = gl.zeros([HALF, TILE], gl.float32, scores.S)
    s = warpgroup_mma(
        q, k.buffer.index(k_stage).permute([1, 0]), zeros, use_acc=False, is_async=True
    )
    v.wait_full(v_stage, v_phase)
    o = o * gl.expand_dims(gl.convert_layout(decay, gl.SliceLayout(1, ACC)), 1)
    o = warpgroup_mma(p, v.buffer.index(v_stage), o, is_async=True)
    s = warpgroup_mma_wait(1, deps=[s])
    k.release(k_stage)
    k_stage, k_phase = k.advance(k_stage, k_phase)
    s = scores.cap(s)
    if MASK:
        s = scores.mask(s, tile)
    new_top = gl.maximum(top, gl.max(s, axis=1) * scores.scale)
    decay = gl.exp2(top - new_top)
    e = gl.exp2(s * scores.scale - gl.expand_dims(new_top, 1))
    SUMS: gl.constexpr = total.type.layout
    total = total * gl.expand_dims(gl.convert_layout(decay, gl.SliceLayout(1, SUMS)), 1)
    total += _partial_sums(e)
    new_p = gl.convert_layout(e.to(p.dtype), A)
    # This wait, for the next step, ends the basic block: without it the assembler moves the wait
    # for P V above the softmax, and nothing overlaps.
    mbarrier.wait(k.full.index(k_stage), k_phase, pred=more)
    o, p, new_p = warpgroup_mma_wait(0, deps=[o, p, new_p])
    v.release(v_stage)
    v_stage, v_phase = v.advance(v_stage, v_phase)
    return o, new_p, new_top, total, decay, k_stage, k_phase, v_stage, v_phase


@gluon.jit
def _first_step(q, k_stage, k_phase, tile, k, scores, DTYPE: gl.constexpr, A: gl.constexpr):
    """Q K^T and softmax of the first tile, the one on the diagonal."""
    k.wait_full(k_stage, k_phase)
    zeros = gl.zeros([HALF, TILE], gl.float32, scores.S)
    s = warpgroup_mma(
        q, k.buffer.index(k_stage).permute([1, 0]), zeros, use_acc=False, is_async=True
    )
    s = warpgroup_mma_wait(0, deps=[s])
    k.release(k_stage)
    k_stage, k_phase = k.advance(k_stage, k_phase)
    s = scores.mask(scores.cap(s), tile)
    # Where a row sees none of these keys, nothing may be subtracted from -inf but a number.
    top = gl.maximum(gl.max(s, axis=1) * scores.scale, NO_SCORE)
    e = gl.exp2(s * scores.scale - gl.expand_dims(top, 1))
    return gl.convert_layout(e.to(DTYPE), A), top, _partial_sums(e), k_stage, k_phase


@gluon.jit
def _last_product(o, p, decay, v_stage, v_phase, v, ACC: gl.constexpr):
    o = o * gl.expand_dims(gl.convert_layout(decay, gl.SliceLayout(1, ACC)), 1)
    v.wait_full(v_stage, v_phase)
    o = warpgroup_mma(p, v.buffer.index(v_stage), o, is_async=True)
    o, p = warpgroup_mma_wait(0, deps=[o, p])
    v.release(v_stage)
    v_stage, v_phase = v.advance(v_stage, v_phase)
    return o, v_stage, v_phase


@gluon.jit
def _clear_tail(v, stage, phase, kept, D: gl.constexpr):
    """Zero the rows of a tile of V from `kept` on: slots past the sequence, whatever they hold.

    Both warpgroups do it, each for itself, before they use the tile.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    v.wait_full(stage, phase)
    tile = v.buffer.index(stage).load(LAYOUT)
    row = gl.arange(0, TILE, layout=gl.SliceLayout(1, LAYOUT))
    tile = gl.where(gl.expand_dims(row < kept, 1), tile, 0.0)
    v.buffer.index(stage).store(tile)
    fence_async_shared()
    barrier()


@aggregate
class Output:
    out: gl.tensor
    desc: tma.tensor_descriptor
    buffer: gl.shared_memory_descriptor
    sinks: gl.tensor
    HEADS: gl.constexpr
    HAS_SINKS: gl.constexpr

    @gluon.jit
    def normalize(self, o, top, total, head0, PACK: gl.constexpr):
        """Divide by the row sums; a sink joins the denominator here."""
        ROW: gl.constexpr = gl.SliceLayout(1, o.type.layout)
        total = gl.convert_layout(gl.sum(total, axis=1), ROW)
        if self.HAS_SINKS:
            head = head0 + gl.arange(0, HALF, layout=ROW) % PACK
            sink = gl.load(self.sinks + head).to(gl.float32) * LOG2E
            top = gl.convert_layout(top, ROW)
            new_top = gl.maximum(top, sink)
            decay = gl.exp2(top - new_top)
            total = total * decay + gl.exp2(sink - new_top)
            o = o * gl.expand_dims(decay, 1)
        return o * gl.expand_dims(1.0 / gl.where(total > 0.0, total, 1.0), 1)

    @gluon.jit
    def store(self, o, c: gl.constexpr, token, tokens, head0, PACK: gl.constexpr):
        """Rows of warpgroup c; `tokens` are those of the item that exist."""
        D: gl.constexpr = o.shape[1]
        SHARE: gl.constexpr = HALF // PACK
        tma.store_wait(0)
        buffer = self.buffer.index(c)
        buffer.store(o.to(self.desc.dtype))
        if tokens >= (c + 1) * SHARE:
            fence_async_shared()
            packed = buffer._reinterpret(self.desc.dtype, [SHARE, PACK, D], self.desc.layout)
            at = [token + c * SHARE, head0, 0]
            tma.async_copy_shared_to_global(self.desc, at, packed)
        else:
            LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
            row = c * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, LAYOUT))
            d = gl.arange(0, D, layout=gl.SliceLayout(0, LAYOUT))
            offset = ((token + row // PACK).to(gl.int64) * self.HEADS + head0 + row % PACK) * D
            where = self.out + gl.expand_dims(offset, 1) + gl.expand_dims(d, 0)
            live = gl.expand_dims(row < tokens * PACK, 1) & (gl.expand_dims(d, 0) >= 0)
            gl.store(where, buffer.load(LAYOUT), mask=live)


@gluon.jit
def _consume(
    c: gl.constexpr, batch, records, k, v, q_ring, output, scale, soft_cap,
    S: gl.constexpr, ACC: gl.constexpr, HAS_CAP: gl.constexpr,
):  # fmt: skip
    """Warpgroup c attends rows c * HALF .. of every item."""
    ROW: gl.constexpr = gl.SliceLayout(1, S)
    A: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=ACC, k_width=2)
    DTYPE: gl.constexpr = k.buffer.dtype
    D: gl.constexpr = v.buffer.shape[2]
    q = q_ring.buffer.index(c)
    k_stage = 0
    k_phase = 0
    v_stage = 0
    v_phase = 0
    q_phase = 0
    slot = 0
    slot_phase = 0
    record = read_record(records, slot, slot_phase, 4)
    slot, slot_phase = records.advance(slot, slot_phase)
    while field(record, 1) > 0:
        first = field(record, 3)
        end = field(record, 4)
        position = field(record, 5)
        kv_len = field(record, 7)
        row = c * HALF + gl.arange(0, HALF, layout=ROW)
        scores = Scores(
            position + row // batch.PACK, scale, soft_cap, batch.window, S, HAS_CAP,
            batch.HAS_WINDOW,
        )  # fmt: skip
        mbarrier.wait(q_ring.full.index(0), q_phase)
        q_phase = q_phase ^ 1
        p, top, total, k_stage, k_phase = _first_step(
            q, k_stage, k_phase, end - 1, k, scores, DTYPE, A
        )
        o = gl.zeros([HALF, D], gl.float32, ACC)
        decay = gl.full([HALF], 1.0, gl.float32, ROW)
        if (kv_len < end * TILE) & (kv_len % batch.BLOCK_SIZE != 0):
            _clear_tail(v, v_stage, v_phase, kv_len - (end - 1) * TILE, D)
        mbarrier.wait(k.full.index(k_stage), k_phase, pred=end - first > 1)
        # Besides the first, one more tile may reach beyond the first row; a window masks all.
        masked = ((end - first > 1) & ((end - 1) * TILE - 1 > position)).to(gl.int32)
        if batch.HAS_WINDOW:
            masked = end - first - 1
        for i in range(masked):
            o, p, top, total, decay, k_stage, k_phase, v_stage, v_phase = _step(
                q, o, p, top, total, decay, k_stage, k_phase, v_stage, v_phase,
                i + 2 < end - first, end - 2 - i, k, v, scores, True, ACC, A,
            )  # fmt: skip
        if not batch.HAS_WINDOW:
            for i in range(masked + 1, end - first):
                o, p, top, total, decay, k_stage, k_phase, v_stage, v_phase = _step(
                    q, o, p, top, total, decay, k_stage, k_phase, v_stage, v_phase,
                    i + 1 < end - first, 0, k, v, scores, False, ACC, A,
                )  # fmt: skip
        q_ring.release(0)
        o, v_stage, v_phase = _last_product(o, p, decay, v_stage, v_phase, v, ACC)
        head0 = field(record, 2) * batch.PACK
        o = output.normalize(o, top, total, head0, batch.PACK)
        output.store(o, c, field(record, 0), field(record, 1), head0, batch.PACK)
        record = read_record(records, slot, slot_phase, 4)
        slot, slot_phase = records.advance(slot, slot_phase)
    tma.store_wait(0)


_COUNTS = ["num_requests", "num_tokens", "decoded_len", "window", "table_stride"]


@gluon.jit(do_not_specialize=_COUNTS)
def _prefill_kernel(
    q_desc, k_desc, v_desc, out_desc, out, block_table, seq_lens, query_start, sinks, order,
    draws, num_requests, num_tokens, decoded_len, window, table_stride, scale, soft_cap,
    HEADS: gl.constexpr, GROUP: gl.constexpr, PACK: gl.constexpr, D: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, K_STAGES: gl.constexpr, V_STAGES: gl.constexpr,
    HAS_CAP: gl.constexpr, HAS_WINDOW: gl.constexpr, HAS_SINKS: gl.constexpr,
    CONSUMER_REGS: gl.constexpr, OTHER_REGS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    S: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 16]
    )
    ACC: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16]
    )
    DTYPE: gl.constexpr = k_desc.dtype
    SWIZZLED: gl.constexpr = k_desc.layout
    batch = Batch(
        block_table, seq_lens, query_start, order, draws, num_requests, num_tokens, decoded_len,
        window, table_stride, HEADS // PACK, PACK, GROUP, BLOCK_SIZE, HAS_WINDOW,
    )  # fmt: skip
    k = make_ring(DTYPE, [K_STAGES, TILE, D], SWIZZLED, 2)
    v = make_ring(DTYPE, [V_STAGES, TILE, D], SWIZZLED, 2)
    halves = gl.allocate_shared_memory(DTYPE, [2, HALF, D], SWIZZLED)
    q_full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full.index(0), count=1)
    mbarrier.init(q_empty.index(0), count=2)
    q_ring = Ring(halves, q_full, q_empty, 1)
    records = make_ring(gl.int32, [2, FIELDS], gl.SwizzledSharedLayout(1, 1, 1, [0]), READERS)
    buffer = gl.allocate_shared_memory(DTYPE, [2, HALF, D], SWIZZLED)
    output = Output(out, out_desc, buffer, sinks, HEADS, HAS_SINKS)
    gl.warp_specialize(
        [
            (_consume, (0, batch, records, k, v, q_ring, output, scale, soft_cap, S, ACC, HAS_CAP)),
            (_consume, (1, batch, records, k, v, q_ring, output, scale, soft_cap, S, ACC, HAS_CAP)),
            (produce, (batch, records, k, k_desc, q_ring, q_desc, D, True, PDL)),
            (produce, (batch, records, v, v_desc, q_ring, q_desc, D, False, PDL)),
            (schedule, (batch, records, PDL)),
        ],
        [4, 1, 1, 1],
        [CONSUMER_REGS, OTHER_REGS, OTHER_REGS, OTHER_REGS],
    )


def supports(query: Tensor, k_cache: Tensor, v_cache: Tensor, scoring: Scoring) -> bool:
    """Whether this kernel covers the arguments: head dim 64 or 128; blocks of 8, 16, 32, 64 or a
    multiple of 128 tokens, one after the other in memory; heads next to each other in the query.
    """
    _, block_size, num_kv_heads, head_dim = k_cache.shape
    row = num_kv_heads * head_dim
    return (
        head_dim in (64, 128)
        and (block_size in (8, 16, 32, 64) or block_size % 128 == 0)
        and scoring.scale > 0
        and query.stride(1) == head_dim
        and query.stride(0) % 8 == 0
        and query.data_ptr() % 16 == 0
        and all(
            cache.stride() == (block_size * row, row, head_dim, 1) and cache.data_ptr() % 16 == 0
            for cache in (k_cache, v_cache)
        )
    )


def prefill(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start: Tensor,
    out: Tensor,
    scoring: Scoring,
    *,
    decoded_len: int,
    plan: Workspace | None = None,
    overlap: bool = False,
    num_programs: int | None = None,
) -> None:
    """As `prefill.prefill`, for what `supports` covers.

    plan: of the step, with `order` for this decoded_len; without, it is made here. overlap: start
    while the kernel ahead in the stream drains; see `hopper_decode.decode`.
    """
    num_blocks, block_size, num_kv_heads, head_dim = k_cache.shape
    num_tokens, num_heads, _ = query.shape
    group = num_heads // num_kv_heads
    pack = packed_heads(group)
    num_requests, device = seq_lens.shape[0], query.device
    if plan is None:
        order = torch.empty(num_requests + 2, dtype=torch.int32, device=device)
        draws = torch.zeros(1, dtype=torch.int32, device=device)
        order_rows(seq_lens, query_start, num_tokens, decoded_len, pack, ROWS.value, order)
    else:
        order, draws = plan.order, plan.draws
    most_items = (num_tokens * pack // ROWS.value + num_requests + 1) * (num_heads // pack)
    if num_programs is None:
        num_programs = torch.cuda.get_device_properties(device).multi_processor_count
    box = min(block_size, TILE.value)
    row = num_kv_heads * head_dim
    k_desc, v_desc = (
        TensorDescriptor(
            cache, [num_blocks * block_size, row], [row, 1], [box, 64],
            gl.NVMMASharedLayout(128, 16, 2),
        )
        for cache in (k_cache, v_cache)
    )  # fmt: skip
    q_desc, out_desc = (
        TensorDescriptor(
            rows, [num_tokens, num_heads, head_dim], [rows.stride(0), head_dim, 1],
            [HALF.value // pack, pack, head_dim], gl.NVMMASharedLayout(128, 16, 3),
        )
        for rows in (query, out)
    )  # fmt: skip
    _prefill_kernel[(min(num_programs, most_items),)](
        q_desc, k_desc, v_desc, out_desc, out, block_table, seq_lens, query_start,
        query if scoring.sinks is None else scoring.sinks, order, draws,
        num_requests, num_tokens, decoded_len, scoring.sliding_window or 0,
        block_table.stride(0), scoring.scale * LOG2E.value, scoring.soft_cap or 0.0,
        HEADS=num_heads, GROUP=group, PACK=pack, D=head_dim, BLOCK_SIZE=block_size,
        K_STAGES=K_STAGES, V_STAGES=V_STAGES, HAS_CAP=scoring.soft_cap is not None,
        HAS_WINDOW=scoring.sliding_window is not None, HAS_SINKS=scoring.sinks is not None,
        CONSUMER_REGS=CONSUMER_REGISTERS, OTHER_REGS=OTHER_REGISTERS, PDL=overlap,
        launch_pdl=overlap, num_warps=4, maxnreg=168,
    )  # fmt: skip
