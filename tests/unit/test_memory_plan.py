"""The plan of a GPU's memory: what it says before anything is loaded, and what it proposes."""

from dataclasses import replace

import pytest
import torch

from billfish.config import SchedulerConfig
from billfish.errors import CapacityError
from billfish.models.random_weights import SHAPES, load_model
from billfish.worker import memory_plan
from billfish.worker.kv_cache import block_bytes
from billfish.worker.memory import GIB
from billfish.worker.memory_plan import MemoryPlan
from billfish.worker.step_graphs import ladder

LLAMA = SHAPES["llama-3-8b"]


def plan(**changes) -> MemoryPlan:
    scheduler = SchedulerConfig(max_num_batched_tokens=8192, max_num_seqs=256)
    values = {
        "device": "a GPU", "total": 80 * GIB, "available": 79 * GIB, "share": 0.9,
        "weights": memory_plan.estimate_weights(LLAMA, torch.bfloat16, int4=True),
        "activations": memory_plan.estimate_activations(LLAMA, scheduler, torch.bfloat16),
        "graphs": memory_plan.estimate_graphs(LLAMA, 256),
        "block_bytes": block_bytes(LLAMA, 16, torch.bfloat16), "block_size": 16, "num_blocks": 0,
        "max_model_len": 131072, "max_num_seqs": 256, "max_num_batched_tokens": 8192,
    } | changes  # fmt: skip
    return MemoryPlan(**values)


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


def test_all_that_fits_is_taken() -> None:
    fitted = plan().with_blocks(None)
    used = fitted.weights + fitted.activations + fitted.graphs
    blocks = (1 + fitted.num_blocks) * fitted.block_bytes
    assert used + blocks <= fitted.budget < used + blocks + fitted.block_bytes
    assert fitted.num_tokens == 16 * fitted.num_blocks
    assert plan(available=10 * GIB).budget == 10 * GIB  # others use the rest
    text = str(fitted)
    for part in ("weights", "activations", "graphs", f"{fitted.num_blocks} blocks", "x 131072"):
        assert part in text
    assert "estimated" in text
    assert "measured" in str(replace(fitted, measured=True))


def test_as_many_blocks_as_asked_for() -> None:
    assert plan().with_blocks(100).num_blocks == 100
    most = plan().room
    with pytest.raises(CapacityError, match=f"num_blocks of at most {most} would fit"):
        plan().with_blocks(most + 1)


def test_a_setting_that_fits_is_proposed_and_does() -> None:
    small = {"total": 8 * GIB, "available": int(7.8 * GIB), "share": 0.95}
    with pytest.raises(CapacityError) as error:
        plan(**small).with_blocks(None)
    message = str(error.value)
    for number in ("7.80 GiB available of 8.00 GiB", "weights", "activations", "graphs"):
        assert number in message
    tokens, seqs = (
        int(message.split(f"{name}=")[1].split()[0])
        for name in ("max_num_batched_tokens", "max_num_seqs")
    )
    scheduler = SchedulerConfig(max_num_batched_tokens=tokens, max_num_seqs=seqs)
    fitted = plan(
        **small,
        activations=memory_plan.estimate_activations(LLAMA, scheduler, torch.bfloat16),
        graphs=memory_plan.estimate_graphs(LLAMA, seqs),
    ).with_blocks(None)
    assert fitted.num_blocks >= 1


def test_nothing_helps_a_model_too_large() -> None:
    with pytest.raises(CapacityError, match="a smaller model"):
        plan(total=4 * GIB, available=4 * GIB).with_blocks(None)


def test_ladder() -> None:
    assert ladder(1) == [1]
    assert ladder(20) == [1, 2, 4, 8, 16, 20]
    for most in (1, 7, 64, 256, 300, 512):
        sizes = ladder(most)
        assert sizes == sorted(set(sizes))
        assert sizes[-1] == most
