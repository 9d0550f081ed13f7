"""Decode for Hopper (sm_90a) in Gluon: the work of `decode`, fed by the copy engine.

One program a multiprocessor. A producer warp walks the block table and asks TMA for one box a
block, into a circular queue of tiles that takes most of shared memory: some 190 KB in flight
whatever the lengths, across the ends of requests. Four warps consume the tiles: each attends to its
own quarter of a tile's keys with mma.sync, so that a tile costs no exchange between warps; they are
merged once a request. Parts, partial results and their order are those of `decode`.
"""

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_wait

from billfish.kernels.gluon_compat import barrier
from billfish.kernels.paged_attention.hopper_decode_feed import Queue, Work, produce, stage_layouts
from billfish.kernels.paged_attention.hopper_rows import ROWS, WARPS, Rows, merge_warps
from billfish.kernels.paged_attention.planner import (
    BORDER,
    Scoring,
    Workspace,
    hopper_covers,
    kv_tile,
)
from billfish.kernels.paged_attention.tile import LOG2E, NO_SCORE

QUEUE_BYTES = 192 * 1024
PRODUCER_REGISTERS = 40


@gluon.jit
def _scores(q, k, zeros, rows):
    """Products of queries and keys, scaled and capped, in log2 units."""
    scores = mma_v2(q, k, zeros)
    if rows.HAS_CAP:
        e = gl.exp2(scores * (2.0 * LOG2E * rows.scale / rows.soft_cap))
        return (rows.soft_cap * LOG2E) * (1.0 - 2.0 / (1.0 + e))
    else:
        return scores * (rows.scale * LOG2E)


@gluon.jit
def _attend_tiles(
    q, work, queue, rows, stage, phase, first, last, kv_len, begin, end,
    ACC: gl.constexpr, K: gl.constexpr, V: gl.constexpr,
):  # fmt: skip
    """Attend the rows q [WARPS, ROWS, D] to tiles first .. last - 1 as they arrive."""
    PART: gl.constexpr = work.TILE // WARPS
    D: gl.constexpr = rows.D
    DTYPE: gl.constexpr = queue.k_desc.dtype
    P: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=ACC, k_width=2)
    KV: gl.constexpr = gl.DotOperandLayout(operand_index=1, parent=ACC, k_width=2)
    SUMS: gl.constexpr = gl.SliceLayout(2, ACC)
    key = _along(0, WARPS, ACC) * PART + _along(2, PART, ACC)
    v_key = _along(0, WARPS, KV) * PART + _along(1, PART, KV) + _along(2, D, KV) * 0
    position = kv_len - (end - begin) + _along(1, ROWS, ACC) // rows.GROUP
    first_key = work.first_key(kv_len, end - begin)
    top = gl.full([WARPS, ROWS], NO_SCORE, gl.float32, SUMS)
    total = gl.zeros([WARPS, ROWS], gl.float32, SUMS)
    acc = gl.zeros([WARPS, ROWS, D], gl.float32, ACC)
    zeros = gl.zeros([WARPS, ROWS, PART], gl.float32, ACC)
    whole = kv_len - (end - begin) + 1  # keys that every query sees, but for the window
    for j in range(first, last):
        mbarrier.wait(queue.full.index(stage), phase)
        k = queue.k.index(stage)._reinterpret(DTYPE, [WARPS, D, PART], K).load(KV)
        scores = _scores(q, k, zeros, rows)
        v = queue.v.index(stage)._reinterpret(DTYPE, [WARPS, PART, D], V).load(KV)
        start = j * work.TILE
        masked = start + work.TILE > whole
        if work.HAS_WINDOW:
            masked = masked | (start <= kv_len - 1 - work.window)
        if masked:
            seen = start + key <= position
            present = start + v_key < kv_len
            if work.HAS_WINDOW:
                seen = seen & (position - start - key < work.window)
                present = present & (start + v_key >= first_key)
            scores = gl.where(seen, scores, float("-inf"))
            v = gl.where(present, v, 0.0)
        new_top = gl.maximum(top, gl.max(scores, 2))
        decay = gl.exp2(top - new_top)
        weights = gl.exp2(scores - gl.expand_dims(new_top, 2))
        total = total * decay + gl.sum(weights, 2)
        acc = acc * gl.expand_dims(decay, 2)
        acc = mma_v2(gl.convert_layout(weights.to(DTYPE), P), v, acc)
        top = new_top
        mbarrier.arrive(queue.empty.index(stage))
        stage, phase = queue.advance(stage, phase)
    return top, total, acc, stage, phase


@gluon.jit
def _along(AXIS: gl.constexpr, SIZE: gl.constexpr, LAYOUT: gl.constexpr):
    """0 .. SIZE - 1 along one axis of three, broadcastable in LAYOUT."""
    A: gl.constexpr = 0 if AXIS != 0 else 1  # the two other axes, A < B
    B: gl.constexpr = 2 if AXIS != 2 else 1
    inner: gl.constexpr = gl.SliceLayout(A, gl.SliceLayout(B, LAYOUT))
    return gl.expand_dims(gl.expand_dims(gl.arange(0, SIZE, layout=inner), A), B)


@gluon.jit
def _load_queries(work, rows, begin, used_end):
    """Packed query rows [ROWS, D] from new token `begin` on, before `used_end`: also those of the
    requests behind, which saves waiting for where this one ends, and whose results are dropped.
    """
    D: gl.constexpr = rows.D
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [WARPS, 1], [1, 0])
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    d = gl.arange(0, D, layout=gl.SliceLayout(0, LAYOUT))
    offset = (row // rows.GROUP) * rows.token_stride
    offset += (work.head * rows.GROUP + row % rows.GROUP) * rows.head_stride
    offset = gl.expand_dims(offset, 1) + gl.expand_dims(d, 0)
    there = (row < rows.USED) & (begin + row // rows.GROUP < used_end)
    live = gl.expand_dims(there, 1) & (offset >= 0)
    base = rows.query + begin.to(gl.int64) * rows.token_stride
    return gl.load(base + offset, mask=live, other=0.0)


@gluon.jit
def _for_each_warp(q, Q: gl.constexpr):
    """Query rows [ROWS, D] as [WARPS, ROWS, D] in the layout of an operand."""
    q = gl.expand_dims(gl.convert_layout(q, gl.SliceLayout(0, Q)), 0)
    return q.broadcast_to([WARPS, q.shape[1], q.shape[2]])


@gluon.jit
def _share_result(
    top, total, acc, rows, r, head, split, begins_here, begin, end,
    COMBINE: gl.constexpr, CHUNK: gl.constexpr,
):  # fmt: skip
    """Leave a part's result for a request; the last program to do so combines and stores."""
    rows.leave(top, total, acc, (split * rows.HKV + head) * 2 + begins_here.to(gl.int32))
    first_part = gl.load(rows.parts + 2 * r)
    last_part = gl.load(rows.parts + 2 * r + 1)
    arrival = rows.arrivals + r * rows.HKV + head
    barrier()  # all four warps have stored before one thread announces it
    arrived = gl.atomic_add(arrival, 1, sem="acq_rel", scope="gpu")
    if arrived == last_part - first_part:
        all_top, all_total, all_acc = rows.combine(first_part, last_part, head, COMBINE, CHUNK)
        rows.store(all_top, all_total, all_acc, head, begin, end)
        gl.store(arrival, 0)


@gluon.jit
def _consume(
    work, queue, rows, split, num_splits,
    ACC: gl.constexpr, K: gl.constexpr, V: gl.constexpr, OUT: gl.constexpr,
    COMBINE: gl.constexpr, CHUNK: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    Q: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=ACC, k_width=2)
    used_end = gl.load(work.query_start + work.num_requests)
    if PDL:
        gdc_wait()
    stage = 0
    phase = 0
    r = work.r
    tile = work.tile
    kv_len = work.kv_len
    begin = work.begin
    end = work.end
    ahead = _load_queries(work, rows, begin, used_end)
    while work.unfinished(r, tile):
        next_len, next_end = work.after(r)
        tiles = work.tiles(kv_len, end - begin)
        stop = work.stop(r, tiles)
        q = _for_each_warp(ahead, Q)
        # The next queries are on their way while these attend.
        ahead = _load_queries(work, rows, end, used_end)
        if stop > tile:
            first = work.first_key(kv_len, end - begin) // work.TILE
            top, total, acc, stage, phase = _attend_tiles(
                q, work, queue, rows, stage, phase, first + tile, first + stop,
                kv_len, begin, end, ACC, K, V,
            )  # fmt: skip
            top, total, acc = merge_warps(top, total, acc, rows.USED, OUT)
            if (tile == 0) & (stop == tiles):
                rows.store(top, total, acc, work.head, begin, end)
            else:
                _share_result(
                    top, total, acc, rows, r, work.head, split, tile == 0, begin, end,
                    COMBINE, CHUNK,
                )  # fmt: skip
        r += 1
        tile = tile * 0
        kv_len = next_len
        begin = end
        end = next_end
    rows.zero_rest(work.head, split, num_splits, used_end, OUT)


_COUNTS = ["num_requests", "num_tokens", "num_splits", "max_query_len", "window", "table_stride"]


@gluon.jit(do_not_specialize=_COUNTS)
def _decode_kernel(
    k_desc, v_desc, query, block_table, seq_lens, query_start, sinks, out, lse,
    borders, parts, partial_acc, partial_sums, arrivals,
    num_requests, num_tokens, num_splits, max_query_len, scale, soft_cap, window,
    token_stride, head_stride, table_stride,
    HKV: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    TILE: gl.constexpr, USED: gl.constexpr, STAGES: gl.constexpr, CHUNK: gl.constexpr,
    K: gl.constexpr, V: gl.constexpr, HAS_CAP: gl.constexpr, HAS_WINDOW: gl.constexpr,
    HAS_SINKS: gl.constexpr, HAS_LSE: gl.constexpr, PRODUCER_REGS: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """One program a (part of the plan, KV head); USED of the 16 rows are stored."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[WARPS, 1, 1], instr_shape=[1, 16, 8]
    )
    OUT: gl.constexpr = gl.BlockedLayout([1, D // 32], [1, 32], [WARPS, 1], [1, 0])
    COMBINE: gl.constexpr = gl.BlockedLayout(
        [CHUNK, 1, D // 32], [1, 1, 32], [1, WARPS, 1], [2, 1, 0]
    )
    split = gl.program_id(0) // HKV
    border = borders + split * BORDER
    work = Work(
        block_table, seq_lens, query_start, num_requests, table_stride, max_query_len, window,
        gl.program_id(0) % HKV, gl.load(border), gl.load(border + 1), gl.load(border + BORDER),
        gl.load(border + BORDER + 1), gl.load(border + 2), gl.load(border + 3),
        gl.load(border + 4), TILE, HAS_WINDOW,
    )  # fmt: skip
    rows = Rows(
        query, out, lse, sinks, parts, partial_acc, partial_sums, arrivals, num_tokens,
        token_stride, head_stride, scale, soft_cap, HKV, GROUP, D, USED, HAS_CAP, HAS_SINKS,
        HAS_LSE,
    )  # fmt: skip
    queue = Queue(
        k_desc, v_desc,
        gl.allocate_shared_memory(k_desc.dtype, [STAGES, TILE, D], k_desc.layout),
        gl.allocate_shared_memory(v_desc.dtype, [STAGES, TILE, D], v_desc.layout),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout()),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout()),
        STAGES,
    )  # fmt: skip
    for i in gl.static_range(STAGES):
        mbarrier.init(queue.full.index(i), count=1)
        mbarrier.init(queue.empty.index(i), count=1)
    gl.warp_specialize(
        [
            (_consume, (work, queue, rows, split, num_splits, ACC, K, V, OUT, COMBINE, CHUNK, PDL)),
            (produce, (work, queue, BLOCK_SIZE, D, PDL)),
        ],
        [1],
        [PRODUCER_REGS],
    )


def supports(k_cache: Tensor, v_cache: Tensor, packed_rows: int) -> bool:
    """Whether this kernel covers the caches: `hopper_covers`, and blocks one after the other."""
    _, block_size, num_kv_heads, head_dim = k_cache.shape
    row = num_kv_heads * head_dim
    return hopper_covers(head_dim, block_size, packed_rows) and all(
        cache.stride() == (block_size * row, row, head_dim, 1) and cache.data_ptr() % 16 == 0
        for cache in (k_cache, v_cache)
    )


def decode(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start: Tensor,
    out: Tensor,
    scoring: Scoring,
    workspace: Workspace,
    *,
    max_query_len: int,
    lse: Tensor | None = None,
    overlap: bool = False,
) -> None:
    """As `decode.decode`, for what `supports` covers.

    overlap: start while the kernel ahead in the stream drains (programmatic dependent launch). The
    plan, the block table and the lengths must have been complete before that kernel began.
    """
    num_blocks, block_size, num_kv_heads, head_dim = k_cache.shape
    splits, tile = workspace.acc.shape[0], kv_tile(workspace)
    box = min(block_size, tile)
    group = query.shape[1] // num_kv_heads
    swizzled = gl.NVMMASharedLayout(128, 16, 2)
    descs = [
        TensorDescriptor(
            cache, [num_blocks * block_size, num_kv_heads * head_dim],
            [num_kv_heads * head_dim, 1], [box, head_dim], swizzled,
        )
        for cache in (k_cache, v_cache)
    ]  # fmt: skip
    k_layout, v_layout = stage_layouts(tile, box, head_dim)
    used = triton.next_power_of_2(max_query_len * group)
    _decode_kernel[(splits * num_kv_heads,)](
        *descs, query, block_table, seq_lens, query_start,
        query if scoring.sinks is None else scoring.sinks, out, out if lse is None else lse,
        workspace.borders, workspace.parts, workspace.acc, workspace.sums, workspace.arrivals,
        seq_lens.shape[0], query.shape[0], splits, max_query_len,
        scoring.scale, scoring.soft_cap or 0.0, scoring.sliding_window or 0,
        query.stride(0), query.stride(1), block_table.stride(0),
        HKV=num_kv_heads, GROUP=group, D=head_dim, BLOCK_SIZE=block_size, TILE=tile, USED=used,
        STAGES=QUEUE_BYTES // (2 * tile * head_dim * k_cache.element_size()),
        CHUNK=8192 // (max(used, 4) * head_dim), K=k_layout, V=v_layout,
        HAS_CAP=scoring.soft_cap is not None, HAS_WINDOW=scoring.sliding_window is not None,
        HAS_SINKS=scoring.sinks is not None, HAS_LSE=lse is not None,
        PRODUCER_REGS=PRODUCER_REGISTERS,
        PDL=overlap, launch_pdl=overlap, num_warps=WARPS.value, maxnreg=168,
    )  # fmt: skip
