"""Brings a model up on a device: memory planned, weights loaded, KV cache, executor."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from billfish.config import CacheConfig, ModelConfig, SchedulerConfig
from billfish.errors import ConfigError
from billfish.layers.linear import Linear, QuantLinear, quantized_head
from billfish.models.decoder import CausalLM
from billfish.worker import kv_cache, memory_plan
from billfish.worker.compiled_decode import CompiledDecode
from billfish.worker.device_runner import DeviceRunner
from billfish.worker.grammar import GrammarCompiler
from billfish.worker.memory_plan import MemoryPlan
from billfish.worker.model_runner import ModelRunner

logger = logging.getLogger(__name__)

Load = Callable[[int], CausalLM]
"""max_model_len -> the model, on its device."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How a model is to be served. int4: most of its weights are, which the plan counts on."""

    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    cache: CacheConfig
    scheduler: SchedulerConfig
    vocab_size: int
    int4: bool = True
    grammars: GrammarCompiler | None = None
    graphs: bool = True
    batch_invariant: bool = False
    head: str | None = None


@dataclass(frozen=True)
class Started:
    """plan: of the GPU's memory, measured; None on a CPU. seconds: what the start took, by phase;
    none on a CPU."""

    executor: ModelRunner | DeviceRunner
    num_blocks: int
    max_model_len: int
    plan: MemoryPlan | None = None
    seconds: dict[str, float] = field(default_factory=dict)


def start(setting: Setting, load: Load) -> Started:
    """Raises CapacityError, before anything is loaded where it can be told by then, for memory that
    does not suffice; ConfigError for a max_model_len that the model does not have."""

    def loaded(max_model_len: int) -> CausalLM:
        model = load(max_model_len)
        if setting.head is not None:
            model.lm_head = quantized_head(model.lm_head, setting.head)
        for module in model.modules():
            if isinstance(module, Linear | QuantLinear):
                module.batch_invariant = setting.batch_invariant
        return model

    if setting.device.type == "cpu":
        if setting.batch_invariant:
            raise ConfigError("batch_invariant needs a GPU: attention on a CPU has no such form")
        return _start_on_cpu(setting, loaded)
    return _start_on_gpu(setting, loaded)


def longest(setting: Setting, num_blocks: int) -> int:
    """Longest sequence in tokens: as asked, or as long as the model and the cache allow."""
    asked, most = setting.scheduler.max_model_len, setting.config.context_length
    if asked is not None and asked > most:
        raise ConfigError(
            f"max_model_len {asked} is more than the model's context of {most} tokens"
        )
    # The last token of a sequence needs no place in the cache: nothing comes after it.
    return min(asked or most, num_blocks * setting.cache.block_size + 1)


def _start_on_cpu(setting: Setting, load: Load) -> Started:
    config, cache, dtype = setting.config, setting.cache, setting.dtype
    num_blocks = kv_cache.plan_num_blocks(config, cache, dtype)
    max_model_len = longest(setting, num_blocks)
    memory = kv_cache.allocate(config, cache, num_blocks, dtype)
    host = None
    if cache.swap_blocks:
        host = kv_cache.allocate(config, cache, cache.swap_blocks, dtype, reserved=memory.nbytes)
    model = load(max_model_len)
    runner = ModelRunner(
        model,
        memory,
        vocab_size=setting.vocab_size,
        max_num_seqs=setting.scheduler.seats,
        max_model_len=max_model_len,
        host_cache=host,
        grammars=setting.grammars,
        compiled=CompiledDecode.of(model, memory, max_model_len),
    )
    return Started(runner, num_blocks, max_model_len)


def _start_on_gpu(setting: Setting, load: Load) -> Started:
    config, cache, device = setting.config, setting.cache, setting.device
    torch.cuda.set_device(device)
    max_model_len = longest(setting, 2**31 // cache.block_size)
    plan = memory_plan.estimate(
        config, cache, setting.scheduler, dtype=setting.dtype, device=device, int4=setting.int4,
        max_model_len=max_model_len,
    )  # fmt: skip
    plan = _fitted(plan, cache)
    logger.info("%s", plan)
    try:
        return _brought_up(setting, load, plan, max_model_len)
    except torch.OutOfMemoryError as error:
        raise plan.ran_out(error) from error


def _brought_up(setting: Setting, load: Load, plan: MemoryPlan, max_model_len: int) -> Started:
    config, cache, device = setting.config, setting.cache, setting.device
    seconds = _Seconds()
    before = torch.cuda.memory_allocated(device)
    model = load(max_model_len)
    torch.cuda.synchronize(device)
    weights = torch.cuda.memory_allocated(device) - before
    seconds.add("weights")
    runner = DeviceRunner(
        model,
        kv_cache.allocate_on_gpu(config, cache, 0, setting.dtype, device),
        vocab_size=setting.vocab_size,
        max_num_seqs=setting.scheduler.seats,
        max_model_len=max_model_len,
        grammars=setting.grammars,
        max_num_batched_tokens=setting.scheduler.budget,
        graphs=setting.graphs,
        batch_invariant=setting.batch_invariant,
    )
    tables = torch.cuda.memory_allocated(device) - before - weights
    runner.compile(setting.scheduler.budget)
    seconds.add("compilation")
    peak = runner.measure_peak(setting.scheduler.budget)
    graphs = plan.graphs if setting.graphs else 0
    plan = replace(plan, weights=weights, activations=tables + peak, graphs=graphs)
    plan = replace(_fitted(plan, cache), measured=True)
    torch.cuda.empty_cache()  # what the largest step took in pieces is needed in one
    runner.kv_cache = kv_cache.allocate_on_gpu(
        config, cache, plan.num_blocks, setting.dtype, device
    )
    if cache.swap_blocks:
        runner.host_cache = kv_cache.allocate_pinned(
            config, cache, cache.swap_blocks, setting.dtype
        )
    seconds.add("memory")
    free = torch.cuda.mem_get_info(device)[0]
    runner.capture()
    plan = replace(plan, graphs=max(0, free - torch.cuda.mem_get_info(device)[0]))
    runner.reserve()
    seconds.add("graphs")
    logger.info("%s", plan)
    logger.info("started in %s", seconds)
    # A sequence is no longer than the cache, as on a CPU.
    max_model_len = longest(setting, plan.num_blocks)
    return Started(runner, plan.num_blocks, max_model_len, plan, seconds.phases)


class _Seconds:
    """How long the phases of a start took, one after the other."""

    def __init__(self) -> None:
        self.phases: dict[str, float] = {}
        self._last = time.perf_counter()

    def add(self, phase: str) -> None:
        now = time.perf_counter()
        self.phases[phase] = round(now - self._last, 3)
        self._last = now

    def __str__(self) -> str:
        parts = ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in self.phases.items())
        return f"{sum(self.phases.values()):.1f} s: {parts}"


def _fitted(plan: MemoryPlan, cache: CacheConfig) -> MemoryPlan:
    """The plan with its number of blocks: as asked, by number or by bytes, or all that fit."""
    if cache.num_blocks is not None or cache.memory_bytes is None:
        return plan.with_blocks(cache.num_blocks)
    return plan.with_blocks(
        kv_cache.blocks_in(cache.memory_bytes, plan.block_bytes, plan.block_size)
    )
