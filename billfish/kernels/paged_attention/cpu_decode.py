"""One layer's attention on a CPU, in a step in which every request has one new token.

A small model's step is made of hundreds of operations whose fixed cost is most of their time. So
what all layers of a step have in common is worked out once (`DecodeStep`): slots to gather, angles
looked up. Results are those of `cpu.rotate_and_write` and `cpu.attend`, to the last bit.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from billfish.kernels._library import DTYPES
from billfish.kernels.general import rotary
from billfish.kernels.paged_attention import cpu

Angles = tuple[Tensor, Tensor]

_KINDS = [(2, torch.int32), (1, torch.int32), (1, torch.int32), (1, torch.int64)]
"""Dimensions and dtypes of the block table, the lengths, the query starts and the slots."""


@dataclass(slots=True, eq=False)
class DecodeStep:
    """R requests, each with its newest token.

    slots: int64 [R], where the new tokens are written, in caches of cache_shape [num_blocks,
    block_size]. run: first slot and length of the sequence
    where there is but one and its blocks follow each other in the cache: it is read in place.
    buckets: see `cpu.decode_buckets`.
    """

    cache_shape: tuple[int, int]
    slots: Tensor
    run: tuple[int, int] | None
    buckets: tuple[cpu.Bucket, ...]
    _angles: list[tuple[Tensor, Tensor, Angles]] = field(default_factory=list)

    @staticmethod
    def of(
        block_table: Tensor, seq_lens: Tensor, query_start: Tensor, slots: Tensor, cache: Tensor
    ) -> "DecodeStep | None":
        """None where the step has other work, or arguments that are refused when they are used."""
        indices = (block_table, seq_lens, query_start, slots)
        kinds = [(t.dim(), t.dtype) for t in indices if t.is_cpu]
        if cache.dim() != 4 or kinds != _KINDS:
            return None
        lengths, count = seq_lens.tolist(), len(seq_lens)
        num_blocks, block_size = cache.shape[:2]
        if not count or query_start.tolist() != list(range(count + 1)) or len(slots) != count:
            return None
        if min(lengths) < 1 or max(lengths) > block_table.shape[1] * block_size:
            return None
        places = slots.tolist()
        if min(places) < 0 or max(places) >= num_blocks * block_size:
            return None
        if count == 1 and cache.dtype != torch.float32:  # see `cpu.attend`
            blocks = block_table[0, : -(-lengths[0] // block_size)].tolist()
            first = blocks[0]
            if first < 0 or blocks != list(range(first, first + len(blocks))):
                return None
            if first + len(blocks) > num_blocks:
                return None
            return DecodeStep((num_blocks, block_size), slots, (first * block_size, lengths[0]), ())
        if max(lengths) > cpu.LONG:
            return None
        rows = list(range(count))
        buckets = cpu.decode_buckets(block_table, lengths, rows, rows, block_size)
        bounds = [int(bound) for bucket in buckets for bound in bucket.slots.aminmax()]
        if min(bounds) < 0 or max(bounds) >= num_blocks * block_size:
            return None
        return DecodeStep((num_blocks, block_size), slots, None, tuple(buckets))

    def known_angles(self, positions: Tensor, cos_sin: Tensor) -> Angles | None:
        """What `look_up` found for these very tensors."""
        for known, table, angles in self._angles:
            if known is positions and table is cos_sin:
                return angles
        return None

    def look_up(self, positions: Tensor, cos_sin: Tensor) -> Angles:
        angles = rotary.angles_of(positions, cos_sin)
        self._angles.append((positions, cos_sin, angles))
        return angles


def fits(
    query: Tensor, key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, step: DecodeStep
) -> bool:
    """Whether `write_and_attend` may be called; if not, the operations say what is wrong."""
    dtype, shape = query.dtype, key.shape
    num_blocks, block_size = step.cache_shape
    return (
        key.dtype == value.dtype == k_cache.dtype == v_cache.dtype == dtype
        and dtype in DTYPES
        and len(shape) == 3
        and query.dim() == 3
        and k_cache.is_cpu
        and v_cache.is_cpu
        and value.shape == shape
        and k_cache.shape == v_cache.shape
        and k_cache.shape == (num_blocks, block_size, *shape[1:])
        and query.shape[::2] == shape[::2]
        and shape[0] == len(step.slots)
        and query.shape[1] % shape[1] == 0
        and query.stride(2) == key.stride(2) == value.stride(2) == 1
        and k_cache.stride(3) == v_cache.stride(3) == 1
        and k_cache.stride(0) == block_size * k_cache.stride(1)
        and v_cache.stride(0) == block_size * v_cache.stride(1)
    )


def write_and_attend(
    query: Tensor, key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor,
    step: DecodeStep, angles: Angles | None, scale: float,
) -> Tensor:  # fmt: skip
    """For arguments that `fits` approves of."""
    tokens, heads, head_dim = query.shape
    kv_heads = key.shape[1]
    if angles is not None:
        query, key = rotary.turned(query, key, angles)
    k_cache.flatten(0, 1).index_copy_(0, step.slots, key)
    v_cache.flatten(0, 1).index_copy_(0, step.slots, value)
    if step.run is not None:
        first, length = step.run
        shape = (1, kv_heads, length, head_dim)
        k, v = (
            cache.as_strided(
                shape,
                (cache.stride(0), cache.stride(2), cache.stride(1), 1),
                cache.storage_offset() + first * cache.stride(1),
            )
            for cache in (k_cache, v_cache)
        )
        out = scaled_dot_product_attention(query.view(1, kv_heads, -1, head_dim), k, v, scale=scale)
        return out.reshape(1, heads, head_dim)
    settings = cpu.Settings(scale, None, None, None)
    if len(step.buckets) == 1:
        return cpu.decode_bucket(query, k_cache, v_cache, step.buckets[0], settings)
    out = torch.empty((tokens, heads, head_dim), dtype=query.dtype, device="cpu")
    for bucket in step.buckets:
        rows = query.index_select(0, bucket.tokens)
        y = cpu.decode_bucket(rows, k_cache, v_cache, bucket, settings)
        out.index_copy_(0, bucket.tokens, y)
    return out
