"""Paged attention on a CPU: gather the tokens of a request, then torch's fused attention.

Only tokens that a query may see are ever gathered, so that what lies in the rest of a block, or in
blocks that nobody wrote, cannot reach a result.
"""

import torch
from torch import Tensor

from billfish.kernels._library import bad_argument

_QUERY_TILE = 256
"""Queries of a prefill at once: bounds the mask, and skips keys that the tile cannot see."""


def write_kv(
    key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
) -> None:
    if not slot_mapping.numel():
        return
    blocks, block_size = k_cache.shape[:2]
    low, high = (int(bound) for bound in slot_mapping.aminmax())
    if high >= blocks * block_size:
        raise bad_argument("slot_mapping", high, f"slots under {blocks * block_size}")
    if low < 0:
        real = (slot_mapping >= 0).nonzero().squeeze(1)
        key, value, slot_mapping = (t.index_select(0, real) for t in (key, value, slot_mapping))
    for new, cache in ((key, k_cache), (value, v_cache)):
        if cache.stride(0) == block_size * cache.stride(1):
            cache.flatten(0, 1).index_copy_(0, slot_mapping, new)
        else:
            cache[slot_mapping // block_size, slot_mapping % block_size] = new


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
) -> Tensor:
    out = torch.zeros(query.shape, dtype=query.dtype)
    starts, lengths = query_start.tolist(), seq_lens.tolist()
    for request, seq_len in enumerate(lengths):
        start, stop = starts[request], starts[request + 1]
        if start == stop or seq_len == 0:
            continue
        _prefill(
            query[start:stop], k_cache, v_cache, block_table[request], seq_len, scale,
            sliding_window, soft_cap, sinks, out[start:stop],
        )  # fmt: skip
    return out


def _prefill(
    query: Tensor, k_cache: Tensor, v_cache: Tensor, blocks: Tensor, seq_len: int, scale: float,
    window: int | None, soft_cap: float | None, sinks: Tensor | None, out: Tensor,
) -> None:  # fmt: skip
    """One request, its queries a tile at a time. query and out: [L, H, D], the last L tokens."""
    length, _, head_dim = query.shape
    kv_heads = k_cache.shape[2]
    first_key = 0 if window is None else max(0, seq_len - length - window + 1)
    k, v = (_gather(cache, blocks, first_key, seq_len) for cache in (k_cache, v_cache))
    for start in range(max(0, length - seq_len), length, _QUERY_TILE):
        stop = min(start + _QUERY_TILE, length)
        position = seq_len - length + start
        low = 0 if window is None else max(0, position - window + 1)
        high = seq_len - length + stop
        tile = query[start:stop].view(stop - start, kv_heads, -1, head_dim).permute(1, 2, 0, 3)
        keys, values = (
            t[low - first_key : high - first_key].transpose(0, 1).unsqueeze(1) for t in (k, v)
        )
        q_pos = torch.arange(position, high).unsqueeze(1)
        k_pos = torch.arange(low, high)
        mask = k_pos <= q_pos
        if window is not None:
            mask &= q_pos - k_pos < window
        sink = None if sinks is None else sinks.float().view(kv_heads, -1, 1, 1)
        y = _explicit(tile, keys, values, mask, scale, soft_cap, sink)
        out[start:stop].view(stop - start, kv_heads, -1, head_dim).copy_(y.permute(2, 0, 1, 3))


def _gather(cache: Tensor, blocks: Tensor, first: int, last: int) -> Tensor:
    """Tokens first..last-1 of a request: [S, HKV, D]."""
    block_size = cache.shape[1]
    used = blocks[first // block_size : -(-last // block_size)]
    gathered = cache.index_select(0, used).flatten(0, 1)
    return gathered[first % block_size :][: last - first]


def _explicit(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float,
    soft_cap: float | None, sink: Tensor | None,
) -> Tensor:  # fmt: skip
    """In float32. query [HKV, G, L, D]; key, value [HKV, 1, S, D]; sink [HKV, G, 1, 1]."""
    scores = torch.matmul(query.float() * scale, key.float().transpose(-1, -2))
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    scores.masked_fill_(~mask, float("-inf"))
    if sink is not None:
        scores = torch.cat((scores, sink.expand(*scores.shape[:-1], 1)), dim=-1)
    weights = scores.softmax(-1)[..., : key.shape[-2]]
    return torch.matmul(weights, value.float())


def copy_blocks(kv_cache: Tensor, src: Tensor, dst: Tensor) -> None:
    """index_select reads every source before index_copy_ writes: the snapshot."""
    _check_block_ids("src", src, kv_cache.shape[2])
    _check_block_ids("dst", dst, kv_cache.shape[2])
    kv_cache.index_copy_(2, dst, kv_cache.index_select(2, src))


def swap_blocks(
    src_cache: Tensor, dst_cache: Tensor, src_blocks: Tensor, dst_blocks: Tensor
) -> None:
    _check_block_ids("src_blocks", src_blocks, src_cache.shape[2])
    _check_block_ids("dst_blocks", dst_blocks, dst_cache.shape[2])
    dst_cache.index_copy_(2, dst_blocks, src_cache.index_select(2, src_blocks))


def _check_block_ids(name: str, ids: Tensor, blocks: int) -> None:
    if not ids.numel():
        return
    low, high = (int(bound) for bound in ids.aminmax())
    if low < 0 or high >= blocks:
        raise bad_argument(name, f"ids {low} to {high}", f"block ids 0 to {blocks - 1}")
