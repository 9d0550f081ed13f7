"""Settings are checked when they are made, and the KV cache before it is allocated."""

import math
from pathlib import Path

import pytest
import torch

from billfish.config import (
    CacheConfig,
    EngineConfig,
    LayerConfig,
    ModelConfig,
    RopeConfig,
    SchedulerConfig,
)
from billfish.errors import CapacityError, ConfigError
from billfish.worker import kv_cache

SHAPE = {
    "architecture": "llama", "vocab_size": 100, "hidden_size": 64, "intermediate_size": 128,
    "layers": (LayerConfig(rope=RopeConfig(theta=1e4)),) * 3,
    "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "context_length": 256,
    "rms_norm_eps": 1e-5, "rotary_dim": 16, "tie_embeddings": True,
}  # fmt: skip
MODEL = ModelConfig(**SHAPE)
# Keys and values of 3 layers, 2 heads of 16 values, 2 bytes each, 16 tokens.
BLOCK_BYTES = 2 * 3 * 2 * 16 * 2 * 16


@pytest.mark.parametrize(
    ("kind", "setting", "value"),
    [
        (CacheConfig, "block_size", 0), (CacheConfig, "block_size", 257),
        (CacheConfig, "block_size", 16.0), (CacheConfig, "num_blocks", 0),
        (CacheConfig, "num_blocks", "3"), (CacheConfig, "num_blocks", True),
        (CacheConfig, "num_blocks", 2**31), (CacheConfig, "memory_bytes", 0),
        (CacheConfig, "memory_bytes", math.inf), (CacheConfig, "gpu_memory", 1.1),
        (CacheConfig, "prefix_caching", 1), (CacheConfig, "swap_blocks", -1),
        (CacheConfig, "swap_blocks", 2.0), (CacheConfig, "swap_blocks", 2**31),
        (SchedulerConfig, "max_num_seqs", 0), (SchedulerConfig, "max_num_seqs", 10**9),
        (SchedulerConfig, "max_num_batched_tokens", -1), (SchedulerConfig, "max_waiting", 1.5),
        (SchedulerConfig, "max_model_len", 0), (SchedulerConfig, "max_model_len", "long"),
        (SchedulerConfig, "preemption", "never"), (SchedulerConfig, "swap_cost", "cheap"),
        (SchedulerConfig, "swap_cost", -0.1), (SchedulerConfig, "swap_cost", math.nan),
        (SchedulerConfig, "swap_cost", math.inf), (SchedulerConfig, "swap_cost", True),
    ],
)  # fmt: skip
def test_settings_out_of_range_are_refused_by_name(kind: type, setting: str, value: object) -> None:
    with pytest.raises(ConfigError, match=setting):
        kind(**{setting: value})


@pytest.mark.parametrize(
    "wrong",
    [{"layers": ()}, {"num_heads": 5}, {"rotary_dim": 15}, {"rotary_dim": 18}, {"head_dim": -1}],
)
def test_impossible_models_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        ModelConfig(**{**SHAPE, **wrong})


def test_dtype_is_one_of_three() -> None:
    with pytest.raises(ConfigError, match="int8"):
        EngineConfig(model="m", dtype="int8")


def test_as_many_blocks_as_the_memory_holds() -> None:
    def blocks(memory_bytes: int) -> int:
        cache = CacheConfig(memory_bytes=memory_bytes)
        return kv_cache.plan_num_blocks(MODEL, cache, torch.bfloat16)

    assert kv_cache.block_bytes(MODEL, 16, torch.bfloat16) == BLOCK_BYTES
    assert blocks(10 * BLOCK_BYTES) == 9  # and the null block
    assert blocks(10 * BLOCK_BYTES - 1) == 8
    assert blocks(2 * BLOCK_BYTES) == 1
    with pytest.raises(CapacityError, match=f"give at least {2 * BLOCK_BYTES} bytes"):
        blocks(2 * BLOCK_BYTES - 1)


def test_a_number_of_blocks_is_taken_as_it_is() -> None:
    cache = CacheConfig(num_blocks=7, memory_bytes=1)
    assert kv_cache.plan_num_blocks(MODEL, cache, torch.bfloat16) == 7
    memory = kv_cache.allocate(MODEL, cache, 7, torch.bfloat16)
    assert memory.shape == (3, 2, 8, 16, 2, 16)
    assert memory.nbytes == 8 * BLOCK_BYTES


def test_more_than_the_machine_has_is_refused_with_numbers() -> None:
    with pytest.raises(
        CapacityError, match=r"takes [\d.]+ GiB and [\d.]+ GiB are available: at most"
    ):
        kv_cache.allocate(MODEL, CacheConfig(), 10**9, torch.bfloat16)


def test_what_is_promised_to_others_is_not_given_again() -> None:
    with pytest.raises(CapacityError, match=r"and 0\.00 GiB are available: at most 0 blocks"):
        kv_cache.allocate(MODEL, CacheConfig(), 7, torch.bfloat16, reserved=2**62)


def test_blocks_that_are_not_written_cost_no_memory() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    before = resident()
    memory = kv_cache.allocate(MODEL, CacheConfig(), 2**16, torch.bfloat16)
    assert memory.nbytes > 380 * 2**20
    memory[:, :, 5] = 1
    assert memory[:, :, :8].sum() == BLOCK_BYTES // 2
    assert resident() - before < 50 * 2**20


def test_requests_that_are_to_be_swapped_need_blocks_to_go_to() -> None:
    """Told before a model is loaded."""
    swap = SchedulerConfig(preemption="swap")
    with pytest.raises(ConfigError, match="swap_blocks is 0"):
        EngineConfig(model="m", scheduler=swap)
    assert EngineConfig(model="m", scheduler=swap, cache=CacheConfig(swap_blocks=1)).model == "m"
