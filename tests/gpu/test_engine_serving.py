"""What the engine does on a GPU besides computing: requests that come and go, forms of text, draws,
sleep, checkpoints, and what is refused."""

import bisect
import gc
import itertools
import json
import math
import random
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from billfish import LLM, SamplingParams
from billfish.config import CacheConfig, SchedulerConfig
from billfish.errors import CapacityError, ConfigError
from billfish.layers.linear import QuantLinear
from billfish.models import random_weights
from billfish.structured_output import StructuredOutput
from billfish.worker.sampler import uniform
from billfish.worker.start import Setting, start
from tests.gpu import checkpoints
from tests.gpu.engines import CUDA, outputs, requests, served, shape

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.mark.parametrize("swap_blocks", [0, 80], ids=["recompute", "swap"])
def test_many_requests_leave_nothing(swap_blocks: int) -> None:
    """Mixed lengths, samples, aborts and preemption: every block comes back, and so does every row;
    whoever was not aborted gets what it is due."""
    rng = random.Random(4)
    seats, together = 48, 40
    engine = served(
        shape(), num_blocks=64, swap_blocks=swap_blocks, max_num_seqs=seats,
        preemption="swap" if swap_blocks else "recompute",
    )  # fmt: skip
    batch = iter(enumerate(requests(2000, seed=5)))
    reasons: dict[str, int] = {}
    most: dict[str, int | None] = {}
    memory: list[int] = []
    # They come together and grow together: to more blocks than there are.
    while arrived := list(itertools.islice(batch, together)):
        for number, (prompt, params) in arrived:
            stops = params.stop_token_ids if rng.random() < 0.3 else []
            params = replace(
                params, n=rng.choice((1, 1, 1, 3)), max_tokens=rng.randint(30, 40),
                stop_token_ids=stops, ignore_eos=not stops,
            )  # fmt: skip
            engine.add_request(str(number), prompt[: rng.choice((8, 12, 12, 148))], params)
            most[str(number)] = params.max_tokens
        while engine.has_unfinished:
            for output in engine.step():
                if output.finished:
                    reason = output.finish_reason
                    reasons[reason] = reasons.get(reason, 0) + 1
                    if reason == "length":
                        assert output.num_output_tokens == most[output.request_id]
                elif rng.random() < 0.003:
                    engine.abort(output.request_id)
        memory.append(torch.cuda.memory_allocated())
    stats = engine.stats()
    assert set(reasons) == {"length", "stop"}
    assert stats.finished["abort"] > 100
    assert stats.preemptions > 50
    assert (stats.swaps > 0) == (swap_blocks > 0)
    assert stats.blocks_in_use == stats.host_blocks_in_use == 0
    assert not engine._executor.batch.rows
    assert len(engine._executor.batch._free_rows) == seats
    assert memory[-1] - memory[0] < 1 << 20


def test_drawn_tokens_are_those_of_their_seeds() -> None:
    """Each token is where the seed's number falls among the likeliest ten, by the reported
    log-probabilities; the same again in other company."""
    count, top_k, temperature = 60, 10, 0.7
    options = {
        "temperature": temperature, "top_k": top_k, "top_p": 1.0, "min_p": 0.0, "logprobs": 20,
        "repetition_penalty": 1.0, "stop_token_ids": [], "ignore_eos": True,
    }  # fmt: skip
    batch = requests(count, seed=7, **options)
    engine = served(shape(), max_num_seqs=16, invariant=True)
    finished = {}
    for number, (prompt, params) in enumerate(batch):
        engine.add_request(str(number), prompt, params)
    while engine.has_unfinished:
        finished |= {int(o.request_id): o for o in engine.step() if o.finished}
    surprises = 0
    for number, (prompt, params) in enumerate(batch):
        for place, each in enumerate(finished[number].logprobs, start=len(prompt)):
            kept = sorted(each.top[:top_k])
            weights = [math.exp(logprob / temperature) for _, logprob in kept]
            running = list(itertools.accumulate(weights))
            target = uniform(params.seed, place) * running[-1]
            index = bisect.bisect_right(running, target)
            near = min(abs(target - border) for border in running) < 1e-5 * running[-1]
            assert near or kept[index][0] == each.token_id
            surprises += each.rank > 1
    assert surprises > 100
    alone = served(shape(), max_num_seqs=1, invariant=True)
    for number in range(4):
        ((tokens, _, _),) = outputs(alone, batch[number : number + 1]).values()
        assert tokens == finished[number].token_ids


def test_sleep_gives_memory_back_and_wake_brings_the_same_answers() -> None:
    gc.collect()  # what earlier engines leave
    batch = requests(12, seed=8)
    engine = served(shape(), num_blocks=4000)
    want = outputs(engine, batch)
    runner = engine._executor
    cache, weights = runner.kv_cache.nbytes, sum(t.nbytes for t in runner.model.buffers())
    before, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    engine.sleep()
    assert before - torch.cuda.memory_allocated() >= cache + weights
    assert reserved - torch.cuda.memory_reserved() >= cache
    engine.wake()
    assert outputs(engine, batch, [f"{number} again" for number in range(len(batch))]) == {
        name.replace("/", " again/"): value for name, value in want.items()
    }
    assert torch.cuda.memory_allocated() <= before + (16 << 20)
    # However often it sleeps, graphs that are captured anew take no more than those before.
    taken, once = runner._counters.taken, torch.cuda.memory_allocated()
    for _ in range(3):
        engine.sleep()
        engine.wake()
        assert runner._counters.taken == taken
    assert torch.cuda.memory_allocated() <= once + (1 << 20)
    assert outputs(engine, batch) == want


def test_a_wake_without_memory_can_be_asked_again() -> None:
    """The process may take half of what it gave back, as if somebody else had taken the rest."""
    gc.collect()
    batch = requests(6, seed=8)
    engine = served(shape(), num_blocks=20_000)
    want = outputs(engine, batch)
    engine.sleep()
    total = torch.cuda.get_device_properties(CUDA).total_memory
    allowed = torch.cuda.memory_reserved() + engine._executor._cache_bytes // 2
    torch.cuda.set_per_process_memory_fraction(allowed / total, CUDA)
    try:
        for _ in range(2):
            with pytest.raises(CapacityError, match="wake again"):
                engine.wake()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, CUDA)
    engine.wake()
    assert outputs(engine, batch) == want


FORMS = {
    "schema": StructuredOutput.json_schema(
        {
            "type": "object", "additionalProperties": False, "required": ["count", "kind"],
            "properties": {
                "count": {"type": "integer", "minimum": 0, "maximum": 999},
                "kind": {"enum": ["fish", "bird"]},
            },
        }
    ),
    "regex": StructuredOutput.regex(r"[A-F]{3}-[0-9]{4}"),
    "choice": StructuredOutput.choice(["yes", "no", "maybe"]),
}  # fmt: skip


def test_texts_have_the_form_that_was_asked_for(tmp_path: Path) -> None:
    """Masks follow the tokens of steps that the host has not seen when the next is planned."""
    llm = LLM(
        str(checkpoints.write(tmp_path, "dense")), device="cuda", cache=CacheConfig(num_blocks=500),
        scheduler=SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=256), seed=0,
    )  # fmt: skip
    params, forms = [], [*FORMS, None] * 12
    for number, form in enumerate(forms):
        temperature = (0.0, 1.0, 1.0)[number % 3]
        params.append(
            SamplingParams(
                max_tokens=300 if form else 30, temperature=temperature, seed=number,
                structured=FORMS[form] if form else None, ignore_eos=form is None,
            )
        )  # fmt: skip
    texts = llm.generate(["The answer is "] * len(forms), params)
    for form, output in zip(forms, texts, strict=True):
        if form is None:
            assert output.num_output_tokens == 30
            continue
        assert output.finish_reason == "stop", (form, output.text)
        if form == "schema":
            value = json.loads(output.text)
            assert value.keys() == {"count", "kind"}
            assert value["count"] in range(1000)
            assert value["kind"] in ("fish", "bird")
        elif form == "regex":
            assert re.fullmatch(r"[A-F]{3}-[0-9]{4}", output.text)
        else:
            assert output.text in ("yes", "no", "maybe")
    assert len({output.text for output in texts}) > 12
    assert llm.stats().blocks_in_use == 0


@pytest.mark.parametrize("kind", checkpoints.KINDS)
def test_checkpoints_are_loaded_to_the_gpu(kind: str, tmp_path: Path) -> None:
    """Files of Hugging Face's kind: their weights arrive on the GPU as they do on the CPU."""
    path = checkpoints.write(tmp_path, kind)
    cache = CacheConfig(num_blocks=100)
    scheduler = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=256)
    rng = random.Random(0)
    prompts = [[rng.randrange(3, checkpoints.VOCAB) for _ in range(n)] for n in (5, 40, 120)]
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    found = []
    for device, dtype in (("cuda", "bfloat16"), ("cpu", "float32")):
        llm = LLM(str(path), device=device, dtype=dtype, cache=cache, scheduler=scheduler)
        layers = [m for m in llm.executor.model.modules() if isinstance(m, QuantLinear)]
        assert len(layers) == (0 if kind == "dense" else 4 * checkpoints.LAYERS)
        assert {layer.weight.device.type for layer in layers} <= {device}
        assert {tensor.device.type for tensor in llm.executor.model.buffers()} == {device}
        results = llm.generate(prompts, params)
        found.append(torch.tensor([p.logprob for o in results for p in o.prompt_logprobs[1:]]))
    error = (found[0] - found[1]).abs()
    print(f"\n{kind}: {error.mean():.4f} on average, {error.max():.4f} at most")
    assert error.mean() < 0.06
    assert error.max() < 0.5


def setting(**changes) -> Setting:
    config = random_weights.SHAPES["llama-3-70b"]
    values = {
        "config": config, "dtype": torch.bfloat16, "device": CUDA, "cache": CacheConfig(),
        "scheduler": SchedulerConfig().on_gpu(), "vocab_size": config.vocab_size,
    }  # fmt: skip
    return Setting(**{**values, **changes})


def never(most: int):
    pytest.fail("loaded")


def test_a_plan_that_cannot_be_says_so_before_anything_is_loaded() -> None:
    """With the numbers, and with what would fit."""
    sizes = r"weights \d+\.\d+ GiB, activations \d+\.\d+ GiB, graphs \d+\.\d+ GiB"
    before = torch.cuda.memory_allocated()
    with pytest.raises(CapacityError, match="GiB available") as error:
        start(setting(cache=CacheConfig(gpu_memory=0.05)), never)
    assert re.search(sizes, str(error.value))
    share = re.search(r"gpu_memory=(0\.\d\d) would fit", str(error.value))
    assert share
    with pytest.raises(Arrived):  # and so it does
        start(setting(cache=CacheConfig(gpu_memory=float(share[1]))), arrived)
    with pytest.raises(CapacityError, match=sizes) as error:
        start(setting(cache=CacheConfig(num_blocks=10**8, gpu_memory=0.5)), never)
    blocks = re.search(r"num_blocks of at most (\d+), or .* would fit", str(error.value))
    assert blocks
    fits = CacheConfig(num_blocks=int(blocks[1]), gpu_memory=0.5)
    with pytest.raises(Arrived):
        start(setting(cache=fits), arrived)
    with pytest.raises(ConfigError, match="131072 tokens"):
        start(setting(scheduler=SchedulerConfig(max_model_len=10**6).on_gpu()), never)
    assert torch.cuda.memory_allocated() == before


class Arrived(Exception):
    """Loading has begun."""


def arrived(most: int):
    raise Arrived


def test_a_request_that_can_never_fit_is_refused() -> None:
    engine = served(shape(), num_blocks=10)
    with pytest.raises(CapacityError, match=r"prompt tokens \+ max_tokens .* at most 61 fits"):
        engine.add_request("long", [1] * 100, SamplingParams(max_tokens=100))
    assert outputs(engine, [([1] * 100, SamplingParams(max_tokens=61, ignore_eos=True))])
