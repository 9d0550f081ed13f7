"""Prefill: causal attention of many new tokens a request over its KV blocks.

FlashAttention-2 (Dao, 2023) over block tables: one program a block of packed query rows and KV
head. Batches are ragged and prompts may come in chunks: queries are the last tokens of their
sequence. The grid depends on what the host knows only, so it never waits for the device.
"""

import triton
import triton.language as tl
from torch import Tensor

from billfish.kernels.paged_attention.planner import Scoring
from billfish.kernels.paged_attention.tile import (
    NO_SCORE,
    load_query,
    load_tokens,
    query_rows,
    softmax_step,
    store_output,
    to_log2,
    visible,
)

REQUESTS_AT_ONCE = 256


@triton.jit
def _find_request(query_start, index, num_requests, GROUP, ROWS, CHUNK: tl.constexpr):
    """(request, its row block) of a program's index along the batch.

    Request r is given the indices from query_start[r] * GROUP // ROWS + r on: enough for its rows,
    whatever the lengths before it, and increasing with r, so the number of requests that begin at
    or before an index names its owner. Request num_requests is what is left of the tokens.
    """
    owner = -1
    for start in range(0, num_requests + 1, CHUNK):
        r = start + tl.arange(0, CHUNK)
        begins = tl.load(query_start + r, mask=r <= num_requests, other=0) * GROUP // ROWS + r
        owner += tl.sum(((begins <= index) & (r <= num_requests)).to(tl.int32), 0)
    begin = tl.load(query_start + owner) * GROUP // ROWS + owner
    return owner, index - begin


@triton.jit
def _attend_tiles(
    q, top, total, acc, k_cache, v_cache, table, begin, end, first_key, end_key, position,
    scale, soft_cap, window, k_block_stride, k_token_stride, v_block_stride, v_token_stride,
    D: tl.constexpr, DP: tl.constexpr, BLOCK_SIZE: tl.constexpr, KV_TILE: tl.constexpr,
    STAGES: tl.constexpr, MASKED: tl.constexpr, HAS_CAP: tl.constexpr, HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    """Attend the rows q [ROWS, DP] to tiles [begin, end). Keys outside [first_key, end_key) are
    not read; without MASKED there are none, and every row sees every key.
    """
    column = tl.arange(0, KV_TILE)
    token = begin * KV_TILE + column
    present = (token >= first_key) & (token < end_key)
    # Block ids are read one tile ahead, so that no load waits for another inside the loop.
    block = tl.load(table + token // BLOCK_SIZE, mask=present, other=0)
    for tile in tl.range(begin, end, num_stages=STAGES):
        token = tile * KV_TILE + column
        present = (token >= first_key) & (token < end_key)
        k = load_tokens(
            k_cache, block, token, present, k_block_stride, k_token_stride, D, DP, BLOCK_SIZE,
            MASKED,
        )  # fmt: skip
        v = load_tokens(
            v_cache, block, token, present, v_block_stride, v_token_stride, D, DP, BLOCK_SIZE,
            MASKED,
        )  # fmt: skip
        ahead = token + KV_TILE
        block = tl.load(table + ahead // BLOCK_SIZE, mask=ahead < end_key, other=0)
        product = tl.dot(q, tl.trans(k), input_precision="ieee")
        scores = to_log2(product, scale, soft_cap, HAS_CAP)
        if MASKED:
            scores = tl.where(visible(token, position, window, HAS_WINDOW), scores, float("-inf"))
        weights, top, total, acc = softmax_step(scores, top, total, acc)
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
    return top, total, acc


@triton.jit(do_not_specialize=["num_requests", "num_tokens", "table_stride", "decoded_len"])
def _prefill_kernel(
    query, k_cache, v_cache, block_table, seq_lens, query_start, sinks, out, lse,
    num_requests, num_tokens, decoded_len, scale, soft_cap, window,
    q_token_stride, q_head_stride, table_stride,
    k_block_stride, k_token_stride, k_head_stride, v_block_stride, v_token_stride, v_head_stride,
    HKV: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr, KV_TILE: tl.constexpr, STAGES: tl.constexpr,
    CHUNK: tl.constexpr, HAS_CAP: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SINKS: tl.constexpr,
    HAS_LSE: tl.constexpr,
):  # fmt: skip
    """One program a (row block, KV head). The last rows of a batch see most keys: they go first."""
    index = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    head0 = head * GROUP
    r, row_block = _find_request(query_start, index, num_requests, GROUP, ROWS, CHUNK)
    start = tl.load(query_start + r)
    end = tl.load(query_start + r + 1, mask=r < num_requests, other=num_tokens)
    query_len = end - start
    if (row_block * ROWS >= query_len * GROUP) | ((r < num_requests) & (query_len <= decoded_len)):
        return
    kv_len = tl.load(seq_lens + r, mask=r < num_requests, other=0)
    token, member, exists = query_rows(row_block * ROWS, query_len * GROUP, ROWS, GROUP)
    q = load_query(
        query + start.to(tl.int64) * q_token_stride + head0 * q_head_stride,
        token, member, exists, q_token_stride, q_head_stride, D, DP,
    )  # fmt: skip
    position = kv_len - query_len + token
    first_position = kv_len - query_len + row_block * ROWS // GROUP
    last_position = tl.minimum(
        kv_len - query_len + (row_block * ROWS + ROWS - 1) // GROUP, kv_len - 1
    )
    end_key = tl.where(kv_len > 0, last_position + 1, 0)
    tiles = tl.maximum(end_key + KV_TILE - 1, 0) // KV_TILE
    first_key = tl.maximum(first_position + 1 - window, 0) if HAS_WINDOW else 0
    begin = first_key // KV_TILE
    # Tiles that every row sees whole need no mask; with a window, all are masked.
    whole = begin if HAS_WINDOW else tl.maximum(first_position + 1, 0) // KV_TILE

    top = tl.full([ROWS], NO_SCORE, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DP], tl.float32)
    k_head = k_cache + head.to(tl.int64) * k_head_stride
    v_head = v_cache + head.to(tl.int64) * v_head_stride
    table = block_table + tl.minimum(r, num_requests - 1).to(tl.int64) * table_stride
    if not HAS_WINDOW:
        top, total, acc = _attend_tiles(
            q, top, total, acc, k_head, v_head, table, 0, whole, 0, end_key, position,
            scale, soft_cap, window, k_block_stride, k_token_stride, v_block_stride,
            v_token_stride, D, DP, BLOCK_SIZE, KV_TILE, STAGES, False, HAS_CAP, HAS_WINDOW,
        )  # fmt: skip
    top, total, acc = _attend_tiles(
        q, top, total, acc, k_head, v_head, table, whole, tiles, first_key, end_key, position,
        scale, soft_cap, window, k_block_stride, k_token_stride, v_block_stride,
        v_token_stride, D, DP, BLOCK_SIZE, KV_TILE, STAGES, True, HAS_CAP, HAS_WINDOW,
    )  # fmt: skip
    store_output(
        out, lse, start + token, head0 + member, exists, top, total, acc, sinks, HKV * GROUP, D, DP,
        HAS_SINKS, HAS_LSE,
    )  # fmt: skip


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
    lse: Tensor | None = None,
) -> None:
    """Write out [T, H, D], and lse [T, H] if given, for requests with more than decoded_len new
    tokens.

    Arguments as `attend`, already validated. Rows of tokens that belong to no request become 0
    (-inf).
    """
    num_tokens, num_heads, head_dim = query.shape
    num_requests, num_kv_heads = seq_lens.shape[0], k_cache.shape[2]
    group = num_heads // num_kv_heads
    padded_dim = triton.next_power_of_2(head_dim)
    rows, kv_tile, num_warps, num_stages = _tiling(padded_dim)
    grid = (num_tokens * group // rows + num_requests + 1, num_kv_heads)
    _prefill_kernel[grid](
        query, k_cache, v_cache, block_table, seq_lens, query_start,
        query if scoring.sinks is None else scoring.sinks, out, out if lse is None else lse,
        num_requests, num_tokens,
        decoded_len, scoring.scale, scoring.soft_cap or 0.0, scoring.sliding_window or 0,
        query.stride(0), query.stride(1), block_table.stride(0),
        *k_cache.stride()[:3], *v_cache.stride()[:3],
        HKV=num_kv_heads, GROUP=group, D=head_dim, DP=padded_dim, BLOCK_SIZE=k_cache.shape[1],
        ROWS=rows, KV_TILE=kv_tile, STAGES=num_stages, CHUNK=REQUESTS_AT_ONCE,
        HAS_CAP=scoring.soft_cap is not None, HAS_WINDOW=scoring.sliding_window is not None,
        HAS_SINKS=scoring.sinks is not None, HAS_LSE=lse is not None, num_warps=num_warps,
    )  # fmt: skip


def _tiling(padded_dim: int) -> tuple[int, int, int, int]:
    """(query rows, keys a tile, warps, stages) by padded head dim; fits 99 KB of shared memory."""
    if padded_dim <= 64:
        return 128, 64, 4, 3
    if padded_dim <= 128:
        return 128, 64, 8, 3
    return 64, 32, 8, 2
