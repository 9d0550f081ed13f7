"""How a model comes up on a GPU, on a CPU that says it were one: the order of things, and sizes."""

import pytest
import torch

from billfish.config import CacheConfig, SchedulerConfig
from billfish.engine.plan import Admission, StepPlan, Work
from billfish.errors import CapacityError, ConfigError
from billfish.layers.linear import Int8Linear, Linear, QuantLinear
from billfish.models import random_weights
from billfish.sampling_params import SamplingParams
from billfish.worker import start as starting
from billfish.worker.device_runner import DeviceRunner
from billfish.worker.start import Setting

CONFIG = random_weights.SHAPES["tiny"]
MIB = 1 << 20


@pytest.fixture
def gpu(monkeypatch):
    """A GPU of 320 MiB on which models weigh 2 and their largest steps take 3."""
    allocated = iter([0, 2 * MIB, 2 * MIB, 2 * MIB])
    peak = {"memory_allocated": lambda device: next(allocated, 2 * MIB)}
    peak["max_memory_allocated"] = lambda device: 5 * MIB
    for name, function in {
        **peak,
        "mem_get_info": lambda device: (300 * MIB, 320 * MIB),
        "get_device_name": lambda device: "a pretended GPU",
        "set_device": lambda device: None,
        "synchronize": lambda device=None: None,
        "reset_peak_memory_stats": lambda device: None,
        "empty_cache": lambda: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, function)


def setting(**changes) -> Setting:
    values = {
        "config": CONFIG, "dtype": torch.bfloat16, "device": torch.device("cpu"),
        "cache": CacheConfig(gpu_memory=0.5),
        "scheduler": SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=32, max_model_len=96),
        "vocab_size": CONFIG.vocab_size, "int4": False,
    } | changes  # fmt: skip
    return Setting(**values)


def load(max_len: int):
    return random_weights.load_model(
        CONFIG, dtype=torch.bfloat16, device="cpu", max_len=max_len, int4=False
    )


def test_all_that_is_left_becomes_blocks(gpu) -> None:
    started = starting._start_on_gpu(setting(), load)
    plan = started.plan
    assert plan is not None
    assert plan.measured
    assert (plan.weights, plan.activations) == (2 * MIB, 3 * MIB)
    # The graphs' bytes were counted before they were captured, and measured afterwards.
    assert plan.graphs == 0
    assert 0 < started.num_blocks < (160 - 5) * MIB // plan.block_bytes
    assert started.executor.kv_cache.shape[2] == 1 + started.num_blocks
    assert started.max_model_len == 96
    assert list(started.seconds) == ["weights", "compilation", "memory", "graphs"]
    prompt = Admission("a", (5, 6, 7), 3, SamplingParams(temperature=0), 0)
    step = StepPlan(0, admitted=(prompt,), work=(Work("a", 0, 3, (1,), True),))
    assert started.executor.execute(step).token_ids.keys() == {"a"}


def test_graphs_are_captured_of_no_requests(gpu) -> None:
    """The largest step was measured before: its tokens have no room in the smallest graph."""
    scheduler = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=256, max_model_len=96)
    runner = starting._start_on_gpu(setting(scheduler=scheduler), load).executor
    header = runner.batch.header
    for _ in range(2):
        assert not any(tensor.any() for tensor in (header.query_start, header.seq_lens))
        with torch.inference_mode():
            assert runner._mixed(32).shape == (32, CONFIG.hidden_size)
            assert runner._decode(4).shape == (4, CONFIG.vocab_size)
        header.send({"query_start": [0, 200], "seq_lens": [200], "rows": [0], "found": [200]})
        runner.capture()  # as after sleep


def test_what_the_largest_step_takes_is_there_before_any_step(gpu, monkeypatch) -> None:
    """After the graphs, whose capture gives back what is not in use; and again after a sleep."""
    called: list[object] = []

    def noted(name: str):
        method = getattr(DeviceRunner, name)
        return lambda self: (called.append(name), method(self))

    for name in ("capture", "reserve"):
        monkeypatch.setattr(DeviceRunner, name, noted(name))
    empty = torch.empty
    runner = starting._start_on_gpu(setting(), load).executor
    assert called == ["capture", "reserve"]

    def watched(*size, **options):
        if options.get("dtype") == torch.uint8:
            called.append(size)
        return empty(*size, **options)

    monkeypatch.setattr(torch, "empty", watched)
    runner.sleep()
    runner.wake()
    assert called[2:] == ["capture", "reserve", (3 * MIB,)]


def test_nothing_is_loaded_where_it_cannot_fit(gpu) -> None:
    too_many = setting(cache=CacheConfig(num_blocks=10**6))
    with pytest.raises(CapacityError, match="a pretended GPU"):
        starting._start_on_gpu(too_many, lambda max_len: pytest.fail("loaded"))


def test_memory_that_runs_out_against_the_plan_is_told_with_it(gpu) -> None:
    def too_large(max_len: int):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB. And\nmore. Yes.")

    with pytest.raises(CapacityError) as error:
        starting._start_on_gpu(setting(), too_large)
    said = str(error.value)
    for part in ("a pretended GPU", "weights 0.00 GiB", "KV blocks", "Tried to allocate 9 GiB",
                 "max_num_batched_tokens of 16"):  # fmt: skip
        assert part in said
    assert "\n" not in said


def test_options_reach_the_layers(gpu) -> None:
    started = starting.start(setting(head="int8"), load)  # on a CPU too
    assert isinstance(started.executor.model.lm_head, Int8Linear)
    with pytest.raises(ConfigError, match="needs a GPU"):
        starting.start(setting(batch_invariant=True), load)
    with pytest.raises(ConfigError, match="context of 1024 tokens"):
        starting.start(setting(scheduler=SchedulerConfig(max_model_len=2000)), load)


def test_every_product_is_batch_invariant_where_asked(gpu, monkeypatch) -> None:
    seen = []
    monkeypatch.setattr(starting, "_start_on_gpu", lambda s, loaded: seen.append(loaded(16)))
    starting.start(setting(batch_invariant=True, device=torch.device("meta")), load)
    layers = [m for m in seen[0].modules() if isinstance(m, Linear | QuantLinear)]
    assert len(layers) == 4 * CONFIG.num_layers + 1
    assert all(layer.batch_invariant for layer in layers)
