"""Where the time of a step goes on a CPU: the parts of decoding, by wrapping what a step calls.

billfish bench throughput --out FILE --parts        rows with the measure step_ms
"""

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

PARTS = (
    ("int4 products", "billfish.kernels.marlin", "w4a16_matmul"),
    ("attention", "billfish.kernels.paged_attention", "write_and_attend"),
    ("norms", "billfish.kernels.general", "rms_norm"),
    ("activation", "billfish.kernels.general", "silu_mul"),
    ("logits", "billfish.models.decoder.CausalLM", "logits"),
    ("sampling", "billfish.worker.model_runner.ModelRunner", "_sample"),
    ("inputs", "billfish.worker.input_batch.InputBatch", "build"),
    ("model", "billfish.models.decoder.CausalLM", "forward"),
    ("logits", "billfish.worker.compiled_decode.CompiledDecode", "logits"),
    ("model", "billfish.worker.compiled_decode.CompiledDecode", "forward"),
    ("executor", "billfish.worker.model_runner.ModelRunner", "execute"),
)
"""Name, owner and attribute. "model" and "executor" hold others; what is left of them is said on
its own. Compiled layers are all in "model"."""


def step_parts(path: str, batch: int, prompt: int, output: int) -> dict[str, float]:
    """Milliseconds of a decoding step by part, averaged over the steps of a batch of requests."""
    spent: dict[str, float] = defaultdict(float)
    for name, owner, attribute in PARTS:
        _wrap(_find(owner), attribute, name, spent)
    from billfish import LLM, SamplingParams
    from billfish.bench.throughput import prompts
    from billfish.config import CacheConfig, SchedulerConfig

    scheduler = SchedulerConfig(max_num_batched_tokens=max(512, batch * prompt))
    llm = LLM(path, cache=CacheConfig(memory_bytes=2 << 30), scheduler=scheduler)
    params = SamplingParams(max_tokens=output, temperature=0, ignore_eos=True)
    list(llm.stream(prompts(batch, 16, seed=1), SamplingParams(max_tokens=4, temperature=0)))
    stream = llm.stream(prompts(batch, prompt), params)
    for _ in range(batch):  # the first tokens: what came before them was prefill
        next(stream)
    spent.clear()
    start = time.perf_counter()
    list(stream)
    spent["all"] = time.perf_counter() - start
    inner = [name for name, owner, _ in PARTS[:4]]
    spent["model, the rest"] = spent["model"] - sum(spent[name] for name in inner)
    known = ("model", "logits", "sampling", "inputs")
    spent["executor, the rest"] = spent["executor"] - sum(spent[name] for name in known)
    spent["engine"] = spent["all"] - spent["executor"]
    del spent["model"], spent["executor"]
    return {name: 1e3 * seconds / (output - 1) for name, seconds in spent.items()}


def _find(owner: str) -> Any:
    """A module, or a class in one."""
    import importlib

    try:
        return importlib.import_module(owner)
    except ModuleNotFoundError:
        module, _, name = owner.rpartition(".")
        return getattr(importlib.import_module(module), name)


def _wrap(owner: Any, attribute: str, name: str, spent: dict[str, float]) -> None:
    function: Callable[..., Any] = getattr(owner, attribute)

    def timed(*arguments: Any, **options: Any) -> Any:
        start = time.perf_counter()
        try:
            return function(*arguments, **options)
        finally:
            spent[name] += time.perf_counter() - start

    setattr(owner, attribute, timed)
