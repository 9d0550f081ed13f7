"""The memory of the paged KV cache: one tensor for all layers."""

import torch
from torch import Tensor

from billfish.config import CacheConfig, ModelConfig
from billfish.engine.plan import NULL_BLOCK, BlockPairs, StepPlan
from billfish.errors import CapacityError, ConfigError
from billfish.kernels import paged_attention
from billfish.worker.host_copies import to_device
from billfish.worker.memory import available_memory, gib, zeros_on_demand

DEFAULT_BYTES = 1 << 30
"""Of the KV cache on a CPU, where nothing else is said."""


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
    memory = DEFAULT_BYTES if cache.memory_bytes is None else cache.memory_bytes
    return blocks_in(memory, block_bytes(config, cache.block_size, dtype), cache.block_size)


def blocks_in(memory: int, each: int, block_size: int) -> int:
    """Usable blocks of `each` bytes in so much memory. Raises CapacityError for none."""
    count = min(memory // each - 1, 2**31 - 2)  # the null block takes one
    if count < 1:
        raise CapacityError(
            f"a KV cache of {memory} bytes holds no block of {block_size} "
            f"tokens ({each} bytes each, and one is the null block): give at least {2 * each} bytes"
        )
    return count


def allocate(
    config: ModelConfig,
    cache: CacheConfig,
    num_blocks: int,
    dtype: torch.dtype,
    *,
    reserved: int = 0,
) -> Tensor:
    """[num_layers, 2, 1 + num_blocks, block_size, num_kv_heads, head_dim], the null block first.

    Also the host memory for swapped blocks, which are numbered the same way. Pages that the system
    maps to memory only when they are first written: a block that is never used costs nothing.
    reserved: bytes that others were given and have not written yet. Raises CapacityError where the
    machine has less memory to give than all.
    """
    each = block_bytes(config, cache.block_size, dtype)
    asked, there = (1 + num_blocks) * each, max(0, available_memory() - reserved)
    if asked > there:
        most = max(0, there // each - 1)
        raise CapacityError(
            f"a KV cache of {num_blocks} blocks takes {gib(asked)} and {gib(there)} are available: "
            f"at most {most} blocks ({gib(most * each)}) would fit, less what the model takes"
        )
    return zeros_on_demand(_shape(config, cache, num_blocks), dtype)


def allocate_on_gpu(
    config: ModelConfig, cache: CacheConfig, num_blocks: int, dtype: torch.dtype,
    device: torch.device,
) -> Tensor:  # fmt: skip
    """As `allocate`, on a GPU whose memory is planned. Only the null block is cleared."""
    memory = torch.empty(_shape(config, cache, num_blocks), dtype=dtype, device=device)
    memory[:, :, NULL_BLOCK] = 0
    return memory


def allocate_pinned(
    config: ModelConfig, cache: CacheConfig, num_blocks: int, dtype: torch.dtype
) -> Tensor:
    """Host memory for swapped blocks that a GPU reads and writes by itself.

    Raises CapacityError where the machine has less to give: it is taken at once.
    """
    asked = (1 + num_blocks) * block_bytes(config, cache.block_size, dtype)
    if asked > (there := available_memory()):
        raise CapacityError(
            f"{num_blocks} swap_blocks take {asked} bytes of host memory and {there} are available"
        )
    return torch.empty(_shape(config, cache, num_blocks), dtype=dtype, pin_memory=True)


def _shape(config: ModelConfig, cache: CacheConfig, num_blocks: int) -> tuple[int, ...]:
    return (
        config.num_layers, 2, 1 + num_blocks, cache.block_size, config.num_kv_heads,
        config.head_dim,
    )  # fmt: skip


def move_blocks(plan: StepPlan, cache: Tensor, host_cache: Tensor | None) -> None:
    """All swaps and copies of the plan, one call a kind, in the plan's order.

    ConfigError if it swaps and there is no host_cache.
    """
    if host_cache is None and (plan.swap_out or plan.swap_in):
        raise ConfigError("a plan swaps blocks, but there is no host memory for them")
    if plan.swap_out and host_cache is not None:
        paged_attention.swap_blocks(cache, host_cache, *_block_ids(plan.swap_out))
    if plan.copies:
        source, target = (to_device(ids, cache.device) for ids in _block_ids(plan.copies))
        paged_attention.copy_blocks(cache, source, target)
    if plan.swap_in and host_cache is not None:
        paged_attention.swap_blocks(host_cache, cache, *_block_ids(plan.swap_in))


def _block_ids(pairs: BlockPairs) -> tuple[Tensor, Tensor]:
    """Sources and destinations, int64 [P] each."""
    source, target = torch.tensor(pairs).unbind(1)
    return source.contiguous(), target.contiguous()
