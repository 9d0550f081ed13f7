"""Prefill for Hopper (sm_90a) in Gluon: the work of `prefill`, warp-specialized.

Programs stay on their multiprocessor. A scheduler warp draws items (128 packed query rows of a
request and set of heads, see `prefill_items`) from a counter, those with most keys first, and hands
them to the others through shared memory. Two producer warps fetch K and V, a TMA box a block, into
a circular queue each (`hopper_feed`); two warpgroups attend 64 rows each with wgmma
(`hopper_consume`) and store them (`hopper_output`).
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from billfish.kernels.paged_attention.hopper_consume import consume
from billfish.kernels.paged_attention.hopper_feed import (
    FIELDS,
    HALF,
    READERS,
    TILE,
    Batch,
    Slots,
    make_ring,
    produce,
    schedule,
)
from billfish.kernels.paged_attention.hopper_output import Output, Partials
from billfish.kernels.paged_attention.planner import (
    HOPPER_HEAD_DIMS,
    Scoring,
    Workspace,
    multiprocessors,
)
from billfish.kernels.paged_attention.prefill_combine import combine
from billfish.kernels.paged_attention.prefill_items import ENTRY, ROWS, list_items, packed_heads
from billfish.kernels.paged_attention.tile import LOG2E

K_STAGES, V_STAGES = 3, 2
L2_BYTES, SECTION_BYTES = 40_000_000, 18_000_000
"""Where the keys and values of all heads do not fit in the first, heads are gone through in
sections of the second, one at least: what the L2 of a Hopper GPU keeps."""

CONSUMER_REGISTERS, OTHER_REGISTERS = 232, 40


_COUNTS = ["num_requests", "num_tokens", "decoded_len", "window", "table_stride", "section"]


@gluon.jit(do_not_specialize=_COUNTS)
def _prefill_kernel(
    q_desc, k_desc, v_desc, out_desc, out, lse, block_table, seq_lens, query_start, sinks, items,
    draws, split_acc, split_sums, split_info, num_requests, num_tokens, decoded_len, window,
    table_stride, section, scale, soft_cap,
    HEADS: gl.constexpr, GROUP: gl.constexpr, PACK: gl.constexpr, D: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, K_STAGES: gl.constexpr, V_STAGES: gl.constexpr,
    HAS_CAP: gl.constexpr, HAS_WINDOW: gl.constexpr, HAS_SINKS: gl.constexpr,
    HAS_LSE: gl.constexpr, CONSUMER_REGS: gl.constexpr, OTHER_REGS: gl.constexpr, PDL: gl.constexpr,
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
        block_table, seq_lens, query_start, items, draws, num_requests, num_tokens, decoded_len,
        window, table_stride, section, HEADS // PACK, PACK, GROUP, BLOCK_SIZE, HAS_WINDOW,
    )  # fmt: skip
    k = make_ring(DTYPE, [K_STAGES, TILE, D], SWIZZLED, K_STAGES, 2)
    v = make_ring(DTYPE, [V_STAGES, TILE, D], SWIZZLED, V_STAGES, 2)
    slots = Slots(make_ring(DTYPE, [4, HALF, D], SWIZZLED, 2, 2))
    records = make_ring(gl.int32, [1, FIELDS], gl.SwizzledSharedLayout(1, 1, 1, [0]), 1, READERS)
    partials = Partials(split_acc, split_sums, split_info)
    output = Output(out, out_desc, lse, sinks, partials, HEADS, PACK, HAS_SINKS, HAS_LSE)
    gl.warp_specialize(
        [
            (consume, (0, batch, records, k, v, slots, output, scale, soft_cap, S, ACC, HAS_CAP)),
            (consume, (1, batch, records, k, v, slots, output, scale, soft_cap, S, ACC, HAS_CAP)),
            (produce, (batch, records, k, k_desc, slots, q_desc, D, True, PDL)),
            (produce, (batch, records, v, v_desc, slots, q_desc, D, False, PDL)),
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
        head_dim in HOPPER_HEAD_DIMS
        and (block_size in (8, 16, 32, 64) or block_size % 128 == 0)
        and scoring.scale > 0
        and query.stride(1) == head_dim
        and query.stride(0) % 8 == 0
        and query.stride(0) >= query.shape[1] * head_dim
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
    max_query_len: int,
    max_seq_len: int,
    lse: Tensor | None = None,
    plan: Workspace | None = None,
    overlap: bool = False,
    num_programs: int | None = None,
) -> None:
    """As `prefill.prefill`, for what `supports` covers.

    max_query_len, max_seq_len: about the most new tokens of a request and the longest KV; they set
    the order of the work, not the result. plan: of the step, with `items` for this decoded_len;
    without, it is made here. overlap: start while the kernel ahead in the stream drains; see
    `hopper_decode.decode`.
    """
    _, block_size, num_kv_heads, head_dim = k_cache.shape
    num_tokens, num_heads, _ = query.shape
    group = num_heads // num_kv_heads
    pack = packed_heads(group)
    num_requests, device = seq_lens.shape[0], query.device
    sets = num_heads // pack
    if num_programs is None:
        num_programs = multiprocessors(device)
    if plan is None:
        items = torch.empty(num_requests + 2, ENTRY, dtype=torch.int32, device=device)
        draws = torch.zeros(1, dtype=torch.int32, device=device)
        list_items(seq_lens, query_start, num_tokens, decoded_len, num_heads, pack, items, 0)
        splits = (items, items, items)  # none: nothing is shared out
        blocks = num_tokens * pack // ROWS + num_requests + 1  # at most
        num_programs = min(num_programs, blocks * sets)
    else:
        items, draws = plan.items, plan.draws
        splits = (plan.split_acc, plan.split_sums, plan.split_info)
    reused = max_query_len * pack > ROWS  # keys, by the row blocks of a request
    heads = _section(num_kv_heads, max_seq_len, head_dim) if reused else num_kv_heads
    _prefill_kernel[(num_programs,)](
        _of_rows(query, pack), _of_blocks(k_cache), _of_blocks(v_cache), _of_rows(out, pack), out,
        out if lse is None else lse, block_table, seq_lens, query_start,
        query if scoring.sinks is None else scoring.sinks, items, draws, *splits,
        num_requests, num_tokens, decoded_len, scoring.sliding_window or 0,
        block_table.stride(0), heads * (sets // num_kv_heads), scoring.scale * LOG2E.value,
        scoring.soft_cap or 0.0,
        HEADS=num_heads, GROUP=group, PACK=pack, D=head_dim, BLOCK_SIZE=block_size,
        K_STAGES=K_STAGES, V_STAGES=V_STAGES, HAS_CAP=scoring.soft_cap is not None,
        HAS_WINDOW=scoring.sliding_window is not None, HAS_SINKS=scoring.sinks is not None,
        HAS_LSE=lse is not None, CONSUMER_REGS=CONSUMER_REGISTERS, OTHER_REGS=OTHER_REGISTERS,
        PDL=overlap, launch_pdl=overlap, num_warps=4, maxnreg=168,
    )  # fmt: skip
    window, sinks = scoring.sliding_window, scoring.sinks
    step = (num_tokens, num_requests, max_seq_len, decoded_len, num_heads, pack, window)
    if plan is not None and plan.sharers(*step):
        combine(items, *splits, sinks, out, lse, num_requests, pack)


def _of_blocks(cache: Tensor) -> TensorDescriptor:
    """Boxes of a block, or a tile if that is less, by half a swizzled row."""
    num_blocks, block_size, num_kv_heads, head_dim = cache.shape
    row = num_kv_heads * head_dim
    return TensorDescriptor(
        cache, [num_blocks * block_size, row], [row, 1], [min(block_size, TILE.value), 64],
        gl.NVMMASharedLayout(128, 16, 2),
    )  # fmt: skip


def _of_rows(rows: Tensor, pack: int) -> TensorDescriptor:
    """Boxes of the packed rows of a warpgroup in [T, H, D] queries or output."""
    return TensorDescriptor(
        rows, list(rows.shape), [rows.stride(0), rows.shape[2], 1],
        [HALF.value // pack, pack, rows.shape[2]], gl.NVMMASharedLayout(128, 16, 3),
    )  # fmt: skip


def _section(num_kv_heads: int, max_seq_len: int, head_dim: int) -> int:
    """How many KV heads are gone through together."""
    head_bytes = 2 * max(max_seq_len, 1) * head_dim * 2  # K and V, 16 bits
    if num_kv_heads * head_bytes <= L2_BYTES:
        return num_kv_heads
    return min(max(1, SECTION_BYTES // head_bytes), num_kv_heads)
