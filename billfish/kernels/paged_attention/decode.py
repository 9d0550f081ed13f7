"""Decode: attention of a few new tokens a request over its KV blocks, split over the whole GPU.

Flash-decoding (Dao et al., 2023) over an equal-work plan: see `planner`. A program runs the parts
of its plan for one KV head; the query heads of the group, and the new tokens of a request, are
packed as the rows of one tensor-core tile. With 16 rows, each warp attends to its own quarter of
a tile's keys (a batched product), so that the loop needs no exchange between warps; they are
merged once a request.
"""

import triton
import triton.language as tl
from torch import Tensor

from billfish.kernels.paged_attention.planner import (
    BORDER,
    Scoring,
    Workspace,
    first_tile,
    kv_tile,
    request_tiles,
)
from billfish.kernels.paged_attention.tile import (
    NO_SCORE,
    load_query,
    load_tokens,
    query_rows,
    softmax_step,
    store_output,
    to_log2,
    visible,
    zero_rows,
)

NUM_WARPS = 4


@triton.jit
def _attend_tiles(
    q, k_cache, v_cache, table, begin, end, kv_len, first_key, position, scale, soft_cap, window,
    k_block_stride, k_token_stride, v_block_stride, v_token_stride,
    D: tl.constexpr, DP: tl.constexpr, BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr,
    KV_TILE: tl.constexpr, WARPS: tl.constexpr, STAGES: tl.constexpr,
    HAS_CAP: tl.constexpr, HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    """Attend the rows q [ROWS, DP] to tiles [begin, end): (top [ROWS], total [ROWS], acc)."""
    BATCHED: tl.constexpr = ROWS == 16 and DP <= 128
    if BATCHED:
        PART: tl.constexpr = KV_TILE // WARPS
        column = tl.arange(0, WARPS)[:, None] * PART + tl.arange(0, PART)[None, :]
        q = tl.broadcast_to(q[None, :, :], [WARPS, ROWS, DP])
        top = tl.full([WARPS, ROWS], NO_SCORE, tl.float32)
        acc = tl.zeros([WARPS, ROWS, DP], tl.float32)
    else:
        column = tl.arange(0, KV_TILE)
        top = tl.full([ROWS], NO_SCORE, tl.float32)
        acc = tl.zeros([ROWS, DP], tl.float32)
    total = top * 0.0
    # Block ids are read one tile ahead, so that no load waits for another inside the loop.
    token = begin * KV_TILE + column
    block = tl.load(
        table + token // BLOCK_SIZE, mask=(token >= first_key) & (token < kv_len), other=0
    )
    for tile in tl.range(begin, end, num_stages=STAGES):
        token = tile * KV_TILE + column
        present = (token >= first_key) & (token < kv_len)
        k = load_tokens(
            k_cache, block, token, present, k_block_stride, k_token_stride, D, DP, BLOCK_SIZE,
            True,
        )  # fmt: skip
        v = load_tokens(
            v_cache, block, token, present, v_block_stride, v_token_stride, D, DP, BLOCK_SIZE,
            True,
        )  # fmt: skip
        ahead = token + KV_TILE
        block = tl.load(table + ahead // BLOCK_SIZE, mask=ahead < kv_len, other=0)
        k = tl.permute(k, (0, 2, 1)) if BATCHED else tl.trans(k)
        scores = to_log2(tl.dot(q, k, input_precision="ieee"), scale, soft_cap, HAS_CAP)
        scores = tl.where(visible(token, position, window, HAS_WINDOW), scores, float("-inf"))
        weights, top, total, acc = softmax_step(scores, top, total, acc)
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
    if BATCHED:
        part_top = top
        top = tl.max(part_top, 0)
        decay = tl.exp2(part_top - top[None, :])
        total = tl.sum(total * decay, 0)
        acc = tl.sum(acc * decay[:, :, None], 0)
    return top, total, acc


@triton.jit
def _combine(
    partial_acc, partial_sums, first, last, head, row_block,
    HKV: tl.constexpr, ROW_BLOCKS: tl.constexpr, ROWS: tl.constexpr, USED: tl.constexpr,
    DP: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Combine the partial results of parts first..last, in this order, for the USED first rows."""
    row = tl.arange(0, USED)
    d = tl.arange(0, DP)
    top = tl.full([USED], NO_SCORE, tl.float32)
    total = tl.zeros([USED], tl.float32)
    acc = tl.zeros([USED, DP], tl.float32)
    for start in range(first, last + 1, CHUNK):
        part = start + tl.arange(0, CHUNK)
        # Only the first part of a request begins at its first tile: see _leave_partial.
        slot = ((part * HKV + head) * ROW_BLOCKS + row_block) * 2 + (part == first).to(tl.int32)
        slot = slot.to(tl.int64)
        here = part <= last
        sums = partial_sums + slot[:, None] * (2 * ROWS) + row[None, :]
        # .cg: written by other multiprocessors, so not to be found in this one's L1.
        part_top = tl.load(sums, mask=here[:, None], other=NO_SCORE, cache_modifier=".cg")
        part_total = tl.load(sums + ROWS, mask=here[:, None], other=0.0, cache_modifier=".cg")
        part_acc = tl.load(
            partial_acc
            + slot[:, None, None] * (ROWS * DP)
            + row[None, :, None] * DP
            + d[None, None, :],
            mask=here[:, None, None],
            other=0.0,
            cache_modifier=".cg",
        )
        new_top = tl.maximum(top, tl.max(part_top, 0))
        decay = tl.exp2(top - new_top)
        weight = tl.exp2(part_top - new_top[None, :])
        total = total * decay + tl.sum(part_total * weight, 0)
        acc = acc * decay[:, None] + tl.sum(part_acc * weight[:, :, None], 0)
        top = new_top
    return top, total, acc


@triton.jit
def _leave_partial(
    partial_acc, partial_sums, parts, arrivals, begins_here, r, head, row_block, top, total, acc,
    HKV: tl.constexpr, ROW_BLOCKS: tl.constexpr, ROWS: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """Store a partial result; (whether it was the request's last, its first and last part).

    A part leaves at most two: slot 0 for a request that began in an earlier part, slot 1 for one
    that begins here.
    """
    row = tl.arange(0, ROWS)
    d = tl.arange(0, DP)
    slot = tl.program_id(0).to(tl.int64) * 2 + begins_here.to(tl.int32)
    tl.store(partial_acc + slot * (ROWS * DP) + row[:, None] * DP + d[None, :], acc)
    tl.store(partial_sums + slot * (2 * ROWS) + row, top)
    tl.store(partial_sums + slot * (2 * ROWS) + ROWS + row, total)
    first = tl.load(parts + 2 * r)
    last = tl.load(parts + 2 * r + 1)
    arrival = arrivals + (r * HKV + head) * ROW_BLOCKS + row_block
    tl.debug_barrier()  # the whole block has stored before one thread announces it
    is_last = tl.atomic_add(arrival, 1, sem="acq_rel", scope="gpu") == last - first
    if is_last:
        tl.store(arrival, 0)
    return is_last, first, last


@triton.jit(do_not_specialize=["num_requests", "num_tokens", "table_stride"])
def _decode_kernel(
    query, k_cache, v_cache, block_table, seq_lens, query_start, sinks, out, lse,
    borders, parts, partial_acc, partial_sums, arrivals,
    num_requests, num_tokens, max_query_len, scale, soft_cap, window,
    q_token_stride, q_head_stride, table_stride,
    k_block_stride, k_token_stride, k_head_stride, v_block_stride, v_token_stride, v_head_stride,
    HKV: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr, USED: tl.constexpr, ROW_BLOCKS: tl.constexpr,
    KV_TILE: tl.constexpr, WARPS: tl.constexpr, STAGES: tl.constexpr, CHUNK: tl.constexpr,
    HAS_CAP: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SINKS: tl.constexpr,
    HAS_LSE: tl.constexpr,
):  # fmt: skip
    """One program a (part of the plan, KV head, block of packed rows)."""
    row_block = tl.program_id(0) % ROW_BLOCKS
    head = tl.program_id(0) // ROW_BLOCKS % HKV
    split = tl.program_id(0) // (ROW_BLOCKS * HKV)
    num_splits = tl.num_programs(0) // (ROW_BLOCKS * HKV)
    head0 = head * GROUP
    border = borders + split * BORDER
    r = tl.load(border)
    tile = tl.load(border + 1)
    last_r = tl.load(border + BORDER)
    last_tile = tl.load(border + BORDER + 1)
    GP: tl.constexpr = triton.next_power_of_2(GROUP)
    if row_block == 0:
        zero_rows(
            out, lse, split, num_splits, query_start, num_requests, num_tokens, head0, sinks,
            HKV * GROUP, GROUP, GP, D, DP, HAS_SINKS, HAS_LSE,
        )  # fmt: skip
    while (r < last_r) | ((r == last_r) & (tile < last_tile)):
        tiles = request_tiles(
            seq_lens, query_start, r, num_requests, max_query_len, window, KV_TILE, HAS_WINDOW
        )
        stop = tl.where(r < last_r, tiles, last_tile)
        start = tl.load(query_start + r)
        query_len = tl.load(query_start + r + 1) - start
        if (stop > tile) & (row_block * ROWS < query_len * GROUP):
            kv_len = tl.load(seq_lens + r)
            token, member, exists = query_rows(row_block * ROWS, query_len * GROUP, ROWS, GROUP)
            q = load_query(
                query + start.to(tl.int64) * q_token_stride + head0 * q_head_stride,
                token, member, exists, q_token_stride, q_head_stride, D, DP,
            )  # fmt: skip
            first = first_tile(kv_len, query_len, window, KV_TILE, HAS_WINDOW)
            first_key = tl.maximum(kv_len - query_len + 1 - window, 0) if HAS_WINDOW else 0
            top, total, acc = _attend_tiles(
                q, k_cache + head.to(tl.int64) * k_head_stride,
                v_cache + head.to(tl.int64) * v_head_stride,
                block_table + r.to(tl.int64) * table_stride,
                first + tile, first + stop, kv_len, first_key, kv_len - query_len + token,
                scale, soft_cap, window,
                k_block_stride, k_token_stride, v_block_stride, v_token_stride,
                D, DP, BLOCK_SIZE, ROWS, KV_TILE, WARPS, STAGES, HAS_CAP, HAS_WINDOW,
            )  # fmt: skip
            if (tile == 0) & (stop == tiles):
                store_output(
                    out, lse, start + token, head0 + member, exists, top, total, acc, sinks,
                    HKV * GROUP, D, DP, HAS_SINKS, HAS_LSE,
                )  # fmt: skip
            else:
                is_last, first_part, last_part = _leave_partial(
                    partial_acc, partial_sums, parts, arrivals, tile == 0, r, head, row_block,
                    top, total, acc, HKV, ROW_BLOCKS, ROWS, DP,
                )  # fmt: skip
                if is_last:
                    all_top, all_total, all_acc = _combine(
                        partial_acc, partial_sums, first_part, last_part, head, row_block,
                        HKV, ROW_BLOCKS, ROWS, USED, DP, CHUNK,
                    )  # fmt: skip
                    used_token, used_member, used_exists = query_rows(
                        row_block * ROWS, query_len * GROUP, USED, GROUP
                    )
                    store_output(
                        out, lse, start + used_token, head0 + used_member, used_exists,
                        all_top, all_total, all_acc, sinks, HKV * GROUP, D, DP, HAS_SINKS,
                        HAS_LSE,
                    )  # fmt: skip
        r += 1
        tile = tile * 0


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
    num_stages: int = 3,
) -> None:
    """Write out [T, H, D], and lse [T, H] if given, for requests of at most max_query_len new
    tokens, and zeros (-inf) for tokens of no request. Arguments as `attend`, already validated; the
    workspace was planned for them.
    """
    num_heads, head_dim = query.shape[1:]
    splits, num_kv_heads, row_blocks, _, rows, padded_dim = workspace.acc.shape
    group = num_heads // num_kv_heads
    used = min(triton.next_power_of_2(max_query_len * group), rows)
    _decode_kernel[(splits * num_kv_heads * row_blocks,)](
        query, k_cache, v_cache, block_table, seq_lens, query_start,
        query if scoring.sinks is None else scoring.sinks, out, out if lse is None else lse,
        workspace.borders, workspace.parts, workspace.acc, workspace.sums, workspace.arrivals,
        seq_lens.shape[0], query.shape[0], max_query_len, scoring.scale, scoring.soft_cap or 0.0,
        scoring.sliding_window or 0, query.stride(0), query.stride(1), block_table.stride(0),
        *k_cache.stride()[:3], *v_cache.stride()[:3],
        HKV=num_kv_heads, GROUP=group, D=head_dim, DP=padded_dim, BLOCK_SIZE=k_cache.shape[1],
        ROWS=rows, USED=used, ROW_BLOCKS=row_blocks, KV_TILE=kv_tile(workspace), WARPS=NUM_WARPS,
        STAGES=num_stages, CHUNK=max(1, 8192 // (used * padded_dim)),
        HAS_CAP=scoring.soft_cap is not None, HAS_WINDOW=scoring.sliding_window is not None,
        HAS_SINKS=scoring.sinks is not None, HAS_LSE=lse is not None, num_warps=NUM_WARPS,
    )  # fmt: skip
