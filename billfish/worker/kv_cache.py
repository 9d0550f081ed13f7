"""The memory of the paged KV cache: one tensor for all layers."""

import torch
from torch import Tensor

from billfish.config import CacheConfig, ModelConfig
from billfish.errors import CapacityError


def block_bytes(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Bytes that one block takes over all layers, keys and values."""
    per_token = config.num_layers * 2 * config.num_kv_heads * config.head_dim * dtype.itemsize
    return per_token * block_size


def plan_num_blocks(config: ModelConfig, cache: CacheConfig, dtype: torch.dtype) -> int:
    """Usable blocks: what was asked for, or what fits in the memory given.

    Raises CapacityError where not even one fits.
    """
    if cache.num_blocks is not None:
        return cache.num_blocks
    each = block_bytes(config, cache.block_size, dtype)
    count = cache.memory_bytes // each - 1  # the null block takes one
    if count < 1:
        raise CapacityError(
            f"a KV cache of {cache.memory_bytes} bytes holds no block of {cache.block_size} "
            f"tokens ({each} bytes each, and one is the null block): give at least {2 * each} bytes"
        )
    return count


def allocate(
    config: ModelConfig, cache: CacheConfig, num_blocks: int, dtype: torch.dtype, device: str
) -> Tensor:
    """[num_layers, 2, 1 + num_blocks, block_size, num_kv_heads, head_dim], the null block first.

    Also the host memory for swapped blocks, which are numbered the same way. Zeroed memory that the
    system has not touched yet costs nothing until a block is first written.
    """
    shape = (
        config.num_layers, 2, 1 + num_blocks, cache.block_size, config.num_kv_heads,
        config.head_dim,
    )  # fmt: skip
    return torch.zeros(shape, dtype=dtype, device=device)
