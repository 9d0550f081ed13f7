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


def rotate_and_write(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    positions: Tensor | None = None,
    cos_sin: Tensor | None = None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    def transform(x: Tensor, weight: Tensor | None) -> Tensor:
        if weight is not None:
            x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight
        if cos_sin is not None and positions is not None:
            cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)
            half = cos.shape[-1]
            low, high, rest = x.tensor_split((half, 2 * half), dim=-1)
            x = torch.cat((low * cos - high * sin, high * cos + low * sin, rest), dim=-1)
        return x

    write_kv(transform(key, k_norm), value, k_cache, v_cache, slot_mapping)
    return transform(query, q_norm)


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
) -> tuple[Tensor, Tensor]:
    """(output, log-sum-exp): request by request, query by query; each reads just the keys that it
    sees.
    """
    _, heads, head_dim = query.shape
    block_size, kv_heads = k_cache.shape[1:3]
    scale = head_dim**-0.5 if scale is None else scale
    out = torch.zeros_like(query)
    empty = torch.tensor(-torch.inf) if sinks is None else sinks
    lse = empty.to(query.dtype).expand(query.shape[:2]).clone()
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
            lse[token] = scores.logsumexp(-1).flatten()
            weights = scores.softmax(-1)[..., : last + 1 - first]
            out[token] = torch.einsum("hgs,shd->hgd", weights, v).reshape(heads, head_dim)
    return out, lse


def copy_blocks(kv_cache: Tensor, src: Tensor, dst: Tensor) -> None:
    kv_cache[:, :, dst] = kv_cache[:, :, src].clone()


def swap_blocks(
    src_cache: Tensor, dst_cache: Tensor, src_blocks: Tensor, dst_blocks: Tensor
) -> None:
    blocks = src_cache[:, :, src_blocks.to(src_cache.device)].to(dst_cache.device)
    dst_cache[:, :, dst_blocks.to(dst_cache.device)] = blocks
