"""What runs on an NVIDIA GPU: checks what these kernels support, then picks one.

Kernels take no strides of indices: those that are not contiguous are copied here.
"""

import torch
from torch import Tensor

from billfish.errors import KernelArgumentError
from billfish.kernels._library import bad_argument
from billfish.kernels.paged_attention import block_copy, cache_write, decode, prefill, swap
from billfish.kernels.paged_attention.planner import (
    AttentionPlan,
    Scoring,
    Workspace,
    is_hopper,
    short_limit,
)

_Step = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Scoring]
"""Query, both caches, block table, lengths, starts, output, and what becomes of the scores."""

HEAD_DIMS = (64, 80, 96, 112, 128, 192, 256)
MAX_BLOCK_SIZE = 256
MAX_DECODE_LEN = 16
"""Steps whose requests all have at most this many new tokens need no prefill kernel."""

OVERLAP_TOKENS = 2**18
"""Steps with more KV than this gain nothing from starting while the kernel ahead drains."""


def write_kv(
    key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
) -> None:
    _check(k_cache)
    with torch.cuda.device(key.device):
        cache_write.write(key, value, k_cache, v_cache, slot_mapping.contiguous())


def rotate_and_write(
    query: Tensor, key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor,
    slot_mapping: Tensor, positions: Tensor | None, cos_sin: Tensor | None,
    q_norm: Tensor | None, k_norm: Tensor | None, eps: float,
) -> Tensor:  # fmt: skip
    _check(k_cache)
    with torch.cuda.device(key.device):
        return cache_write.rotate_and_write(
            query, key, value, k_cache, v_cache, slot_mapping.contiguous(),
            positions=None if positions is None else positions.contiguous(),
            cos_sin=cos_sin, q_norm=q_norm, k_norm=k_norm, eps=eps,
        )  # fmt: skip


def attend(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start: Tensor,
    max_query_len: int,
    max_seq_len: int,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    sinks: Tensor | None,
    plan: list[Tensor],
    planned_len: int,
    lse: Tensor | None = None,
) -> Tensor:
    """plan: the tensors of a workspace planned for requests of at most planned_len new tokens, or
    empty to plan here, at the cost of a launch or two more. lse: float32 [T, H], to be written.
    """
    _check(k_cache)
    num_tokens, num_heads, head_dim = query.shape
    out = torch.empty((num_tokens, num_heads, head_dim), dtype=query.dtype, device=query.device)
    if num_tokens == 0:
        return out
    num_requests = seq_lens.shape[0]
    seq_lens, query_start = seq_lens.contiguous(), query_start.contiguous()
    if block_table.stride(1) != 1:
        block_table = block_table.contiguous()
    scoring = Scoring(
        scale, sliding_window, soft_cap, None if sinks is None else sinks.contiguous()
    )
    step = (query, k_cache, v_cache, block_table, seq_lens, query_start, out, scoring)
    group = num_heads // k_cache.shape[2]
    given = Workspace(*plan) if plan else None
    decode_len = planned_len if given else _decode_len(max_query_len, group)
    decode_len = short_limit(decode_len, num_tokens, num_requests, max_query_len)
    decodes = num_requests > 0 and decode_len > 0
    with torch.cuda.device(query.device):
        if decodes:
            workspace = given or _workspace(
                query, k_cache, seq_lens, query_start, decode_len, sliding_window
            )
            overlap = given is not None and num_requests * max_seq_len <= OVERLAP_TOKENS
            _decode(step, workspace, decode_len, lse, overlap)
        if max_query_len > decode_len or not decodes:
            # A plan of no request has listed no items.
            longest = (max_query_len, max_seq_len)
            _prefill(step, given if num_requests else None, decode_len, longest, lse)
    return out


def _decode(
    step: _Step, workspace: Workspace, decode_len: int, lse: Tensor | None, overlap: bool
) -> None:
    query, k_cache, v_cache, *_ = step
    group = query.shape[1] // k_cache.shape[2]
    if _runs_hopper_decode(k_cache, v_cache, decode_len * group):
        from billfish.kernels.paged_attention import hopper_decode

        hopper_decode.decode(*step, workspace, max_query_len=decode_len, lse=lse, overlap=overlap)
    else:
        decode.decode(*step, workspace, max_query_len=decode_len, lse=lse)


def _prefill(
    step: _Step, plan: Workspace | None, decoded_len: int, longest: tuple[int, int],
    lse: Tensor | None,
) -> None:  # fmt: skip
    """longest: most new tokens and most KV of a request."""
    query, k_cache, v_cache, *_, scoring = step
    if _runs_hopper_prefill(query, k_cache, v_cache, scoring):
        from billfish.kernels.paged_attention import hopper_prefill

        hopper_prefill.prefill(
            *step, decoded_len=decoded_len, max_query_len=longest[0], max_seq_len=longest[1],
            lse=lse, plan=plan, overlap=plan is not None,
        )  # fmt: skip
    else:
        prefill.prefill(*step, decoded_len=decoded_len, lse=lse)


def copy_blocks(kv_cache: Tensor, src: Tensor, dst: Tensor) -> None:
    with torch.cuda.device(kv_cache.device):
        block_copy.copy(kv_cache, src.contiguous(), dst.contiguous())


def swap_blocks(
    src_cache: Tensor, dst_cache: Tensor, src_blocks: Tensor, dst_blocks: Tensor
) -> None:
    for name, blocks, cache in (
        ("src_blocks", src_blocks, src_cache), ("dst_blocks", dst_blocks, dst_cache)
    ):  # fmt: skip
        if blocks.numel() and not 0 <= int(blocks.min()) <= int(blocks.max()) < cache.shape[2]:
            got = f"ids from {int(blocks.min())} to {int(blocks.max())}"
            raise bad_argument(name, got, f"0 to {cache.shape[2] - 1}")
    swap.swap(src_cache, dst_cache, src_blocks, dst_blocks)


def _workspace(
    query: Tensor, k_cache: Tensor, seq_lens: Tensor, query_start: Tensor, decode_len: int,
    sliding_window: int | None,
) -> Workspace:  # fmt: skip
    """A workspace of its own for one call, planned."""
    plan = AttentionPlan.allocate(
        max_requests=seq_lens.shape[0], num_heads=query.shape[1], num_kv_heads=k_cache.shape[2],
        head_dim=query.shape[2], max_query_len=decode_len, sliding_window=sliding_window,
        block_size=k_cache.shape[1], device=query.device,
    )  # fmt: skip
    plan.split(seq_lens, query_start)
    return plan.workspace


def _runs_hopper_decode(k_cache: Tensor, v_cache: Tensor, packed_rows: int) -> bool:
    if not is_hopper(k_cache.device):
        return False
    from billfish.kernels.paged_attention import hopper_decode

    return hopper_decode.supports(k_cache, v_cache, packed_rows)


def _runs_hopper_prefill(query: Tensor, k_cache: Tensor, v_cache: Tensor, scoring: Scoring) -> bool:
    if not is_hopper(k_cache.device):
        return False
    from billfish.kernels.paged_attention import hopper_prefill

    return hopper_prefill.supports(query, k_cache, v_cache, scoring)


def _decode_len(max_query_len: int, group: int) -> int:
    """Longest request for the decode kernel: all of them where all are short, else what fits in
    its smallest tile.
    """
    return max_query_len if max_query_len <= MAX_DECODE_LEN else max(1, 16 // group)


def _check(k_cache: Tensor) -> None:
    _, block_size, _, head_dim = k_cache.shape
    if k_cache.dtype not in (torch.float16, torch.bfloat16):
        raise bad_argument("k_cache", k_cache.dtype, "float16 or bfloat16 on a GPU")
    if head_dim not in HEAD_DIMS:
        raise bad_argument("head_dim", head_dim, f"one of {HEAD_DIMS} on a GPU")
    if block_size > MAX_BLOCK_SIZE:
        raise bad_argument("block_size", block_size, f"at most {MAX_BLOCK_SIZE} on a GPU")
    if torch.cuda.get_device_capability(k_cache.device) < (8, 0):
        name = torch.cuda.get_device_name(k_cache.device)
        raise KernelArgumentError(f"{name}: attention needs compute capability 8.0 or newer")
