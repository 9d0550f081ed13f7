"""Paged attention on a CPU: gather the tokens of a request, then torch's fused attention.

Only tokens that a query may see are ever gathered, so that what lies in the rest of a block, or in
blocks that nobody wrote, cannot reach a result.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad, rms_norm, scaled_dot_product_attention

from billfish.kernels._library import bad_argument
from billfish.kernels.general import rotary

_QUERY_TILE = 256
"""Most queries of a prefill at once: bounds the mask, and skips keys that the tile cannot see."""

LONG = 512
"""Sequences up to this are decoded in batches, longer ones one by one: there padding costs more."""

_SCORES = 1 << 22
"""Most scores of a tile, heads x queries x keys."""


def write_kv(
    key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
) -> None:
    if not slot_mapping.numel():
        return
    blocks, block_size = k_cache.shape[:2]
    # Checked before anything is written; as a list, for a step has few tokens and calls cost more.
    slots = slot_mapping.tolist()
    if max(slots) >= blocks * block_size:
        raise bad_argument("slot_mapping", max(slots), f"slots under {blocks * block_size}")
    if min(slots) < 0:
        real = (slot_mapping >= 0).nonzero().squeeze(1)
        key, value, slot_mapping = (t.index_select(0, real) for t in (key, value, slot_mapping))
    for new, cache in ((key, k_cache), (value, v_cache)):
        if cache.stride(0) == block_size * cache.stride(1):
            cache.flatten(0, 1).index_copy_(0, slot_mapping, new)
        else:
            cache[slot_mapping // block_size, slot_mapping % block_size] = new


def rotate_and_write(
    query: Tensor, key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor,
    slot_mapping: Tensor, positions: Tensor | None, cos_sin: Tensor | None,
    q_norm: Tensor | None, k_norm: Tensor | None, eps: float,
) -> Tensor:  # fmt: skip
    if cos_sin is not None and positions is not None and q_norm is None:
        query, new_key = rotary.rotate_both(query, key, positions, cos_sin)
    else:
        angles = None
        if cos_sin is not None and positions is not None:
            angles = rotary.angles_of(positions, cos_sin)
        new_key = _normed_and_rotated(key, k_norm, angles, eps)
        query = _normed_and_rotated(query, q_norm, angles, eps)
    write_kv(new_key, value, k_cache, v_cache, slot_mapping)
    return query


def _normed_and_rotated(
    x: Tensor, weight: Tensor | None, angles: tuple[Tensor, Tensor] | None, eps: float
) -> Tensor:
    """In float32, rounded once."""
    wide = x.float()
    if weight is not None:
        wide = rms_norm(wide, wide.shape[-1:], weight.float(), eps)
    if angles is not None:
        wide = rotary.rotate(wide, angles)
    return wide.to(x.dtype, memory_format=torch.contiguous_format, copy=True)


def attend(
    query: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, seq_lens: Tensor,
    query_start: Tensor, max_query_len: int, max_seq_len: int, scale: float,
    sliding_window: int | None, soft_cap: float | None, sinks: Tensor | None, *,
    lse: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """See `billfish.kernels.paged_attention.attend`. lse: float32 [T, H], to be written."""
    starts, lengths = query_start.tolist(), seq_lens.tolist()
    capacity = block_table.shape[1] * k_cache.shape[1]
    if max(lengths, default=0) > capacity:
        raise bad_argument("metadata.seq_lens", max(lengths), f"at most {capacity}")
    if starts[-1] > query.shape[0]:
        raise bad_argument("query", tuple(query.shape), f"at least {starts[-1]} tokens")
    settings = Settings(scale, sliding_window, soft_cap, sinks)
    out = torch.zeros(query.shape, dtype=query.dtype, device="cpu")
    # Alone and with no float32 sums to keep in order, a request needs neither padding nor mask.
    alone = len(lengths) == 1 and query.dtype != torch.float32
    in_batches: list[int] = []
    try:
        for request, seq_len in enumerate(lengths):
            start, stop = starts[request], starts[request + 1]
            if stop == start or seq_len == 0:
                continue
            if stop - start > 1:
                _prefill(
                    query[start:stop], k_cache, v_cache, block_table[request], seq_len, settings,
                    out[start:stop],
                )  # fmt: skip
            elif alone or seq_len > min(LONG, sliding_window or LONG):
                _decode_one(
                    query[start], k_cache, v_cache, block_table[request], seq_len, settings,
                    out[start],
                )  # fmt: skip
            else:
                in_batches.append(request)
        buckets = decode_buckets(block_table, lengths, in_batches, starts, k_cache.shape[1])
        for bucket in buckets:
            rows = query.index_select(0, bucket.tokens)
            y = decode_bucket(rows, k_cache, v_cache, bucket, settings)
            out.index_copy_(0, bucket.tokens, y)
        if lse is not None:
            _log_sum_exp(query, k_cache, block_table, starts, lengths, settings, lse)
    except IndexError as error:
        expected = f"ids 0 to {k_cache.shape[0] - 1} in the used part"
        raise bad_argument("metadata.block_table", "an id outside the cache", expected) from error
    return out


class Settings(NamedTuple):
    scale: float
    window: int | None
    soft_cap: float | None
    sinks: Tensor | None


def _padded(length: int) -> int:
    """Length of the bucket of a decode: 16s up to 128, then four buckets an octave.

    It depends on the request alone, so that neighbours do not change the shape, and with it the
    order of sums, of what is computed for it.
    """
    step = max(16, (1 << length.bit_length()) >> 3)
    return -(-length // step) * step


class Bucket(NamedTuple):
    """Requests of one new token and of like length, decoded together.

    tokens: int64 [B], the new token of each. slots: int64 [B * padded], where the keys of each are,
    past its end that of its first. mask: bool [B, 1, 1, padded], which of them are real.
    """

    tokens: Tensor
    slots: Tensor
    mask: Tensor


def decode_buckets(
    block_table: Tensor, lengths: list[int], requests: list[int], starts: list[int],
    block_size: int,
) -> list[Bucket]:  # fmt: skip
    """These requests, in buckets of equal padded length. starts: the new token of each request."""
    by_length: dict[int, list[int]] = {}
    for request in requests:
        by_length.setdefault(_padded(lengths[request]), []).append(request)
    buckets = []
    for padded, members in by_length.items():
        here = torch.tensor([lengths[request] for request in members], device="cpu").unsqueeze(1)
        slots, mask = _slots(block_table[members], here, block_size, padded)
        tokens = torch.tensor([starts[request] for request in members], device="cpu")
        buckets.append(Bucket(tokens, slots, mask.view(-1, 1, 1, padded)))
    return buckets


def decode_bucket(
    query: Tensor, k_cache: Tensor, v_cache: Tensor, bucket: Bucket, settings: Settings
) -> Tensor:
    """query: [B, H, D], those of the bucket's tokens; none of their keys is out of sight."""
    count, _, _, padded = bucket.mask.shape
    heads, head_dim = query.shape[1:]
    kv_heads = k_cache.shape[2]
    k, v = (
        _tokens(cache, bucket.slots).view(count, padded, kv_heads, head_dim).transpose(1, 2)
        for cache in (k_cache, v_cache)
    )
    q = query.view(count, kv_heads, -1, head_dim)
    sink = None if settings.sinks is None else settings.sinks.view(kv_heads, -1, 1)
    y = _attention(q, k, v, bucket.mask, settings, sink)
    return y.reshape(count, heads, head_dim).to(query.dtype)


def _slots(
    block_table: Tensor, seq_lens: Tensor, block_size: int, padded: int
) -> tuple[Tensor, Tensor]:
    """Slot of each token, int64 [B * padded], past the end that of the first; and what is real."""
    blocks = block_table[:, : -(-padded // block_size)].long() * block_size
    slots = (blocks.unsqueeze(2) + torch.arange(block_size, device="cpu")).view(len(blocks), -1)
    slots = (
        slots[:, :padded] if slots.shape[1] >= padded else pad(slots, (0, padded - slots.shape[1]))
    )
    mask = torch.arange(padded, device="cpu") < seq_lens
    return torch.where(mask, slots, slots[:, :1]).flatten(), mask


def _tokens(cache: Tensor, slots: Tensor) -> Tensor:
    """Tokens of a cache at slots [S]: [S, HKV, D]."""
    block_size = cache.shape[1]
    if cache.stride(0) == block_size * cache.stride(1):
        return cache.flatten(0, 1).index_select(0, slots)
    if int(slots.min()) < 0:
        raise IndexError("negative block id")
    return cache[slots // block_size, slots % block_size]


def _decode_one(
    query: Tensor, k_cache: Tensor, v_cache: Tensor, blocks: Tensor, seq_len: int,
    settings: Settings, out: Tensor,
) -> None:  # fmt: skip
    """One request of one new token. query and out: [H, D]."""
    kv_heads = k_cache.shape[2]
    first = 0 if settings.window is None else max(0, seq_len - settings.window)
    k, v = (_range(c, blocks, first, seq_len).transpose(0, 1)[None] for c in (k_cache, v_cache))
    sink = None if settings.sinks is None else settings.sinks.view(kv_heads, -1, 1)
    q = query.view(1, kv_heads, -1, query.shape[1])
    out.copy_(_attention(q, k, v, None, settings, sink)[0].flatten(0, 1))


def _prefill(
    query: Tensor, k_cache: Tensor, v_cache: Tensor, blocks: Tensor, seq_len: int,
    settings: Settings, out: Tensor,
) -> None:  # fmt: skip
    """One request, its queries a tile at a time. query and out: [L, H, D], the last L tokens."""
    length, heads, head_dim = query.shape
    before = seq_len - length
    window = settings.window or seq_len
    kv_heads = k_cache.shape[2]
    first = max(0, before - window + 1)
    k, v = (_range(c, blocks, first, seq_len).transpose(0, 1) for c in (k_cache, v_cache))
    grouped = query.view(length, kv_heads, -1, head_dim).permute(1, 2, 0, 3)
    sink = None if settings.sinks is None else settings.sinks.view(kv_heads, -1, 1, 1)
    tile = min(_QUERY_TILE, max(1, _SCORES // (heads * seq_len)))
    for start in range(max(0, -before), length, tile):
        stop = min(start + tile, length)
        low, high = max(0, before + start - window + 1), before + stop
        position = torch.arange(before + start, high, device="cpu").unsqueeze(1)
        seen = torch.arange(low, high, device="cpu")
        mask = seen <= position
        if settings.window is not None:
            mask &= seen > position - window
        keys, values = (t[:, None, low - first : high - first] for t in (k, v))
        y = _attention(grouped[:, :, start:stop], keys, values, mask, settings, sink)
        out[start:stop].view(stop - start, kv_heads, -1, head_dim).copy_(y.permute(2, 0, 1, 3))


def _log_sum_exp(
    query: Tensor, k_cache: Tensor, block_table: Tensor, starts: list[int], lengths: list[int],
    settings: Settings, lse: Tensor,
) -> None:  # fmt: skip
    """Write lse [T, H]. By itself, for torch's fused attention does not return it."""
    heads, kv_heads = query.shape[1], k_cache.shape[2]
    lse.fill_(-torch.inf)
    if settings.sinks is not None:
        lse.copy_(settings.sinks)
    for request, seq_len in enumerate(lengths):
        end = starts[request + 1]
        tile = min(_QUERY_TILE, max(1, _SCORES // (heads * max(seq_len, 1))))
        for start in range(starts[request], end, tile):
            stop = min(start + tile, end)
            position = (seq_len - end + torch.arange(start, stop, device="cpu")).unsqueeze(1)
            window = settings.window or seq_len
            low, high = max(0, seq_len - end + start - window + 1), max(0, seq_len - end + stop)
            key = _range(k_cache, block_table[request], low, high).permute(1, 2, 0)
            seen = torch.arange(low, high, device="cpu")
            mask = (seen <= position) & (seen > position - window)
            rows = query[start:stop].unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)
            scores = _scores(rows, key.unsqueeze(1), mask, settings)
            if settings.sinks is not None:
                sink = settings.sinks.float().view(kv_heads, -1, 1, 1)
                scores = torch.cat((scores, sink.expand(*scores.shape[:-1], 1)), dim=-1)
            lse[start:stop] = scores.logsumexp(-1).permute(2, 0, 1).flatten(1)


def _range(cache: Tensor, blocks: Tensor, first: int, last: int) -> Tensor:
    """Tokens first to last - 1 of a request: [S, HKV, D]."""
    block_size = cache.shape[1]
    used = blocks[first // block_size : -(-last // block_size)]
    tokens = cache.index_select(0, used).flatten(0, 1)
    skipped = first % block_size
    return tokens[skipped : skipped + last - first]


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    settings: Settings,
    sink: Tensor | None,
) -> Tensor:
    """query [.., HKV, G, (L,) D]; key and value broadcast against it; every row sees some key.

    torch's fused operation knows neither soft cap nor sinks: those go step by step, in float32.
    """
    scale, _, soft_cap, _ = settings
    if soft_cap is None and sink is None:
        batch = query.shape[:2]
        key, value = key.expand(*batch, -1, -1), value.expand(*batch, -1, -1)
        return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
    scores = _scores(query, key.transpose(-1, -2), mask, settings)
    if sink is not None:
        scores = torch.cat((scores, sink.float().expand(*scores.shape[:-1], 1)), dim=-1)
    weights = scores.softmax(-1)[..., : key.shape[-2]]
    return torch.matmul(weights, value.float())


def _scores(query: Tensor, keys: Tensor, mask: Tensor | None, settings: Settings) -> Tensor:
    """Logits in float32, -inf where not seen; keys [.., D, S]."""
    scores = torch.matmul(query.float() * settings.scale, keys.float())
    if settings.soft_cap is not None:
        scores = settings.soft_cap * torch.tanh(scores / settings.soft_cap)
    return scores if mask is None else scores.masked_fill(~mask, float("-inf"))


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
