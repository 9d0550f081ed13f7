"""What the paged-attention operations mean. Plain loops; any floating-point dtype."""

import torch
from torch import Tensor

from billfish.kernels.paged_attention.metadata import AttentionMetadata


def write_kv(
    key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
) -> None:
    block_size = k_cache.shape[1]
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            k_cache[slot // block_size, slot % block_size] = key[token]
            v_cache[slot // block_size, slot % block_size] = value[token]


def attend(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    metadata: AttentionMetadata,
    *,
    scale: float | None = None,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Request by request, query by query; each reads just the keys that it sees."""
    _, heads, head_dim = query.shape
    block_size, kv_heads = k_cache.shape[1:3]
    scale = head_dim**-0.5 if scale is None else scale
    out = torch.zeros_like(query)
    starts = metadata.query_start.tolist()
    for request, seq_len in enumerate(metadata.seq_lens.tolist()):
        for token in range(starts[request], starts[request + 1]):
            last = seq_len - (starts[request + 1] - token)
            first = 0 if sliding_window is None else max(0, last - sliding_window + 1)
            if last < first:
                continue
            seen = torch.arange(first, last + 1)
            block = metadata.block_table[request, seen // block_size].long()
            k = k_cache[block, seen % block_size].to(query.dtype)
            v = v_cache[block, seen % block_size].to(query.dtype)
            q = query[token].view(kv_heads, heads // kv_heads, head_dim)
            scores = torch.einsum("hgd,shd->hgs", q, k) * scale
            if soft_cap is not None:
                scores = soft_cap * torch.tanh(scores / soft_cap)
            if sinks is not None:
                sink = sinks.to(query.dtype).view(kv_heads, -1, 1)
                scores = torch.cat((scores, sink), dim=-1)
            weights = scores.softmax(-1)[..., : last + 1 - first]
            out[token] = torch.einsum("hgs,shd->hgd", weights, v).reshape(heads, head_dim)
    return out


def copy_blocks(kv_cache: Tensor, src: Tensor, dst: Tensor) -> None:
    kv_cache[:, :, dst] = kv_cache[:, :, src].clone()


def swap_blocks(
    src_cache: Tensor, dst_cache: Tensor, src_blocks: Tensor, dst_blocks: Tensor
) -> None:
    blocks = src_cache[:, :, src_blocks.to(src_cache.device)].to(dst_cache.device)
    dst_cache[:, :, dst_blocks.to(dst_cache.device)] = blocks
