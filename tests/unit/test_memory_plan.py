"""The plan of a GPU's memory: what it says before anything is loaded, and what it proposes."""

import random
import re
from collections import Counter
from dataclasses import replace

import pytest
import torch

from billfish.config import CacheConfig, ModelConfig, SchedulerConfig
from billfish.errors import CapacityError
from billfish.models.random_weights import SHAPES, load_model
from billfish.worker import memory_plan, start
from billfish.worker.memory import GIB
from billfish.worker.memory_plan import MemoryPlan
from billfish.worker.step_graphs import ladder

LLAMA = SHAPES["llama-3-8b"]


@pytest.fixture(autouse=True)
def gpu(monkeypatch) -> dict[str, int]:
    """A GPU that all of these are planned for."""
    memory = {"total": 80 * GIB, "available": 79 * GIB}
    there = lambda device: (memory["available"], memory["total"])  # noqa: E731
    monkeypatch.setattr(torch.cuda, "mem_get_info", there)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    return memory


def plan(
    config: ModelConfig = LLAMA, *, tokens: int = 8192, seqs: int = 256, share: float = 0.9,
    int4: bool = True,
) -> MemoryPlan:  # fmt: skip
    scheduler = SchedulerConfig(max_num_batched_tokens=tokens, max_num_seqs=seqs)
    return memory_plan.estimate(
        config, CacheConfig(gpu_memory=share), scheduler, dtype=torch.bfloat16,
        device=torch.device("cuda", 0), int4=int4, max_model_len=config.context_length,
    )  # fmt: skip


def test_weights_of_known_models() -> None:
    """Llama-3-8B has 8.03 billion weights: 16.06 GB in bfloat16, 5.8 GB with INT4 layers."""
    dense = memory_plan.estimate_weights(LLAMA, torch.bfloat16, int4=False)
    assert dense == pytest.approx(2 * 8.03e9, rel=0.001)
    packed = memory_plan.estimate_weights(LLAMA, torch.bfloat16, int4=True)
    assert packed == pytest.approx(6.98e9 * 4.25 / 8 + 2 * 1.05e9, rel=0.01)


@pytest.mark.parametrize("int4", [True, False])
def test_estimated_weights_are_those_of_a_model(int4: bool) -> None:
    config = SHAPES["tiny"]
    model = load_model(config, dtype=torch.bfloat16, device="cpu", max_len=8, int4=int4)
    size = sum(tensor.nbytes for tensor in model.buffers())
    size += sum(m.weight.nbytes for m in model.modules() if hasattr(m, "in_features"))
    size -= 2 * 8 * config.head_dim * 4  # the tables of angles, one a layer
    estimate = memory_plan.estimate_weights(config, torch.bfloat16, int4=int4)
    assert size == pytest.approx(estimate, rel=0.02)


def test_all_that_fits_is_taken(gpu) -> None:
    fitted = plan().with_blocks(None)
    used = fitted.weights + fitted.activations + fitted.graphs
    blocks = (1 + fitted.num_blocks) * fitted.block_bytes
    assert used + blocks <= fitted.budget < used + blocks + fitted.block_bytes
    assert fitted.num_tokens == 16 * fitted.num_blocks
    gpu["available"] = 10 * GIB
    assert plan().budget == 10 * GIB  # others use the rest
    text = str(fitted)
    for part in ("weights", "activations", "graphs", f"{fitted.num_blocks} blocks", "x 131072"):
        assert part in text
    assert "estimated" in text
    assert "measured" in str(replace(fitted, measured=True))


def test_as_many_blocks_as_asked_for() -> None:
    assert plan().with_blocks(100).num_blocks == 100
    most = plan().room
    with pytest.raises(CapacityError, match=f"num_blocks of at most {most}, or "):
        plan().with_blocks(most + 1)


def proposed(message: str) -> dict[str, float]:
    """The settings that an error says would fit."""
    said = message.rpartition(" GiB. ")[2]
    if blocks := re.fullmatch(
        r"num_blocks of at most (\d+), or (\d+\.\d\d) GiB of KV cache, would fit", said
    ):
        return {"blocks": int(blocks[1]), "gib": float(blocks[2])}
    if sizes := re.fullmatch(
        r"max_num_batched_tokens=(\d+) and max_num_seqs=(\d+) would fit", said
    ):
        return {"tokens": int(sizes[1]), "seqs": int(sizes[2])}
    if share := re.fullmatch(r"gpu_memory=(0\.\d\d) would fit", said):
        return {"share": float(share[1])}
    assert said == "a smaller model, or one with INT4 weights, is needed on this GPU"
    return {}


def test_a_setting_that_fits_is_proposed(gpu) -> None:
    gpu |= {"total": 8 * GIB, "available": int(7.8 * GIB)}
    with pytest.raises(CapacityError) as error:
        plan(share=0.95).with_blocks(None)
    message = str(error.value)
    for number in ("7.80 GiB available of 8.00 GiB", "weights", "activations", "graphs"):
        assert number in message
    assert proposed(message).keys() == {"tokens", "seqs"}


def test_whatever_is_proposed_does_fit(gpu) -> None:
    """Models, GPUs and settings at random."""
    rng = random.Random(0)
    kinds: Counter[tuple[str, ...]] = Counter()
    for _ in range(1500):
        config, int4 = SHAPES[rng.choice(list(SHAPES))], rng.random() < 0.5
        settings = {
            "tokens": rng.choice((32, 512, 8192, 65536)), "seqs": rng.choice((1, 16, 256, 1024)),
            "share": rng.choice((0.02, 0.1, 0.5, 0.92, 1.0)),
        }  # fmt: skip
        weights = memory_plan.estimate_weights(config, torch.bfloat16, int4=int4)
        gpu["total"] = int(weights * rng.uniform(0.8, 8) + rng.random() * 4 * GIB)
        gpu["available"] = int(gpu["total"] * rng.uniform(0.3, 1))
        asked = rng.choice((None, None, 1, 100, 10**6))
        try:
            plan(config, int4=int4, **settings).with_blocks(asked)
        except CapacityError as error:
            change = proposed(str(error))
            kinds[tuple(change)] += 1
            if change:
                asked, size = change.pop("blocks", asked), change.pop("gib", 0.0)
                fitted = plan(config, int4=int4, **(settings | change)).with_blocks(asked)
                assert size * GIB <= (1 + fitted.num_blocks) * fitted.block_bytes
    assert kinds.keys() == {("blocks", "gib"), ("tokens", "seqs"), ("share",), ()}
    assert min(kinds.values()) > 20


def test_what_is_proposed_counts_on_what_was_measured(gpu) -> None:
    """Where a step takes twice what was estimated, a smaller one is taken to as well."""
    gpu |= {"total": 8 * GIB, "available": 8 * GIB}
    once = plan(share=0.95)
    twice = replace(once, activations=2 * once.activations, graphs=2 * once.graphs, measured=True)
    with pytest.raises(CapacityError) as error:
        twice.with_blocks(None)
    sizes = proposed(str(error.value))
    assert 2 * once.step_bytes(sizes["tokens"], sizes["seqs"]) < once.budget - once.weights


def test_nothing_helps_a_model_too_large(gpu) -> None:
    gpu |= {"total": 4 * GIB, "available": 4 * GIB}
    with pytest.raises(CapacityError, match="a smaller model"):
        plan().with_blocks(None)


def test_ladder() -> None:
    assert ladder(1) == [1]
    assert ladder(20) == [1, 2, 4, 8, 16, 20]
    for most in (1, 7, 64, 256, 300, 512):
        sizes = ladder(most)
        assert sizes == sorted(set(sizes))
        assert sizes[-1] == most


def test_a_kv_cache_given_in_bytes() -> None:
    """No more than was given, and an error where that holds no block: as on a CPU."""
    there = plan()
    for blocks in (1, 5, 1000):
        for spare in (0, there.block_bytes - 1):
            given = CacheConfig(memory_bytes=(blocks + 1) * there.block_bytes + spare)
            assert start._fitted(there, given).num_blocks == blocks
    given = CacheConfig(memory_bytes=2 * there.block_bytes - 1)
    with pytest.raises(CapacityError, match=f"give at least {2 * there.block_bytes} bytes"):
        start._fitted(there, given)
    given = CacheConfig(memory_bytes=80 * GIB)
    with pytest.raises(CapacityError, match="num_blocks of at most"):
        start._fitted(there, given)
