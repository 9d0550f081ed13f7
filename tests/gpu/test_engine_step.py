"""What a step of the engine launches, sends, waits for and holds on a GPU, and what requests at the
edges of blocks, memory and options get."""

import gc
import json
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from billfish import LLM, SamplingParams
from billfish.bench import engine as bench_engine
from billfish.bench import step as bench_step
from billfish.config import CacheConfig, SchedulerConfig
from billfish.engine.plan import Admission, StepPlan, Work
from billfish.layers.linear import Int8Linear, Linear, QuantLinear
from billfish.worker.device_batch import DeviceBatch
from billfish.worker.device_rules import DeviceRules
from billfish.worker.start import Setting, start
from tests.e2e.test_device_runner import BLOCK, LENGTH, SEATS, VOCAB, some_requests
from tests.gpu import checkpoints
from tests.gpu.engines import CUDA, made, outputs, requests, served, shape

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
LAYERS = shape().num_layers


def test_a_step_that_decodes_is_few_kernels_and_two_copies() -> None:
    """Eight kernels a layer; one copy to the GPU and one back, whatever requests it holds."""
    options = bench_engine.parser().parse_args(
        ["--model", "tiny", "--num-blocks", "200", "--max-num-seqs", "4",
         "--max-num-batched-tokens", "256"]
    )  # fmt: skip
    kernels, wall = bench_step.measure(bench_engine.serve(options), batch=4, context=40)
    parts = bench_step.parts_of(kernels, shape(), 4, 40, int4=True)
    calls = {part.name: part.calls for part in parts}
    once = ("qkv", "rotate and write", "attention", "o", "gate_up", "down")
    want = dict.fromkeys(once, LAYERS) | {"norm": 2 * LAYERS + 1, "sampling": 2}
    assert {name: calls[name] for name in want} == pytest.approx(want, abs=0.06)
    assert calls["head"] <= 2
    assert calls["inputs"] <= 6.06
    copies = Counter(kernel.name.split(" (")[0] for kernel in kernels if "Memcpy" in kernel.name)
    assert set(copies) == {"Memcpy HtoD", "Memcpy DtoH"}
    for count in copies.values():
        assert abs(count - bench_step.STEPS) <= 1
    assert wall > 0


def test_bench_step_tells_floors_and_gaps(tmp_path: Path, capsys) -> None:
    out = tmp_path / "step.json"
    bench_step.main(
        ["--model", "tiny", "--batch", "1,4", "--context", "40", "--num-blocks", "200",
         "--max-num-batched-tokens", "256", "--head", "int8", "--out", str(out)]
    )  # fmt: skip
    found = json.loads(out.read_text())
    for batch in (1, 4):
        rows = {row["part"]: row for row in found["rows"] if row["batch"] == batch}
        assert {"qkv", "attention", "o", "gate_up", "down", "head", "norm", "sampling"} <= set(rows)
        for name in ("qkv", "attention", "head"):
            row = rows[name]
            assert min(row["us"], row["bytes"], row["flops"], row["floor_us"]) > 0
        step = rows.pop("step")["us"]
        assert sum(row["us"] for row in rows.values()) == pytest.approx(step, abs=0.2)
    assert found["bandwidth"] > 1e11
    printed = capsys.readouterr().out
    assert "of floor" in printed
    assert "gaps" in printed


def test_no_step_waits_for_the_gpu() -> None:
    """Whatever requests ask for: their options, samples, log-probabilities, prompts in chunks."""
    engine = served(shape(), max_num_batched_tokens=64)
    submit = engine._submit
    assert submit is not None

    def watched(plan):
        torch.cuda.set_sync_debug_mode("error")
        try:
            return submit(plan)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    engine._submit = watched
    for number, (prompt, params, words) in enumerate(some_requests(40, seed=1)):
        engine.add_request(str(number), prompt, params, bad_word_ids=words)
    finished = 0
    while engine.has_unfinished:
        finished += sum(output.finished for output in engine.step())
    assert finished > 40
    assert engine.stats().finished.get("error", 0) == 0


def test_rules_are_those_of_a_cpu() -> None:
    """To the last bit: allowed and banned tokens, biases, penalties, ends that come too early."""
    for seed in range(10):
        admissions = tuple(
            Admission(
                str(i), tuple(prompt), max(1, len(prompt) - 4), params, 0,
                stop_ids=frozenset(params.stop_token_ids), bad_word_ids=tuple(map(tuple, words)),
            )
            for i, (prompt, params, words) in enumerate(some_requests(SEATS, seed))
        )  # fmt: skip
        work = tuple(Work(a.request_id, 0, len(a.token_ids), (), True) for a in admissions)
        logits = 4 * torch.randn(SEATS, VOCAB, generator=torch.Generator().manual_seed(seed))
        logits[seed % SEATS, 3] = torch.nan if seed % 3 == 0 else 1.0
        found = []
        for device in (torch.device("cpu"), CUDA):
            batch = DeviceBatch(SEATS, LENGTH, BLOCK, device)
            step = batch.apply(StepPlan(0, admitted=admissions, work=work))
            assert step is not None
            rows = [row for _, row in step.sampled]
            positions = batch.header.sample_positions[:SEATS]
            found.append(
                DeviceRules(batch.token_table).apply(logits.to(device), rows, positions).cpu()
            )
        torch.testing.assert_close(found[1], found[0], rtol=0, atol=0, equal_nan=True)


def test_options_bind_the_tokens() -> None:
    """What is allowed, banned, biased and not to end yet, seen from the tokens that come out."""
    bias = {7: 90.0, 9: 80.0, 0: 70.0}
    words = {"free": [], "banned": [[7]], "pair": [[7, 7], [9, 9]]}
    cases = {
        "free": {"logit_bias": bias, "ignore_eos": True},
        "banned": {"logit_bias": bias, "ignore_eos": True, "bad_words": ["x"]},
        "pair": {"logit_bias": bias, "ignore_eos": True, "bad_words": ["x"]},
        "allowed": {"allowed_token_ids": [3, 5, 8], "temperature": 1.0, "seed": 1},
        "early": {"logit_bias": {0: 90.0}},
        "later": {"logit_bias": {0: 90.0}, "min_tokens": 5},
        "greedy": {"temperature": 1.0, "top_k": 1, "seed": 2, "ignore_eos": True},
        "best": {"ignore_eos": True},
        "tired": {"logit_bias": bias, "ignore_eos": True, "frequency_penalty": 2.0},
    }
    engine = served(shape(), invariant=True)
    for name, options in cases.items():
        params = SamplingParams(**({"max_tokens": 12, "temperature": 0.0} | options))
        engine.add_request(name, [5, 6, 7], params, bad_word_ids=words.get(name, []))
    final = {}
    while engine.has_unfinished:
        final |= {o.request_id: o for o in engine.step() if o.finished}
    tokens = {name: list(output.token_ids) for name, output in final.items()}
    assert tokens["free"] == [7] * 12
    assert tokens["banned"] == [9] * 12
    assert tokens["pair"] == [7, 9] * 6
    assert set(tokens["allowed"]) <= {3, 5, 8}
    assert len(set(tokens["allowed"])) > 1
    assert len(tokens["early"]) == 1
    assert len(tokens["later"]) == 6
    assert 0 not in tokens["later"][:5]
    assert tokens["greedy"] == tokens["best"]
    assert tokens["tired"][:3] == [7] * 3
    assert 9 in tokens["tired"]


def of_prompts(prompts: list[list[int]], device: torch.device, **options) -> torch.Tensor:
    """Log-probabilities of their tokens."""
    engine = served(shape(), device, **options)
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), prompt, params)
    values = {}
    while engine.has_unfinished:
        for output in engine.step():
            if output.finished:
                values[int(output.request_id)] = [p.logprob for p in output.prompt_logprobs[1:]]
    layer = {"int8": Int8Linear, "int4": QuantLinear, None: Linear}[options.get("head")]
    assert type(engine._executor.model.lm_head) is layer
    return torch.tensor([value for number in range(len(prompts)) for value in values[number]])


CPU = torch.device("cpu")


@pytest.mark.parametrize(("head", "mean_bound", "bound"), [("int8", 0.04, 0.3), ("int4", 0.2, 1.0)])
def test_a_rounded_head(head: str, mean_bound: float, bound: float) -> None:
    """Log-probabilities of prompts against a head that is not rounded, on the CPU in float32."""
    prompts = [prompt for prompt, _ in requests(6, seed=1)]
    rounded = of_prompts(prompts, CUDA, int4=False, head=head)
    error = (rounded - of_prompts(prompts, CPU, int4=False, dtype=torch.float32)).abs()
    print(f"\n{head}: {error.mean():.4f} on average, {error.max():.4f} at most")
    assert error.mean() < mean_bound
    assert error.max() < bound


def test_steps_larger_than_any_graph() -> None:
    """3,000 tokens of ten prompts in one step, whose kernels are launched one by one."""
    rng = random.Random(3)
    prompts = [[rng.randrange(1, 512) for _ in range(300)] for _ in range(10)]
    sizes = {"max_num_batched_tokens": 4096, "max_num_seqs": 16}
    error = (
        of_prompts(prompts, CUDA, **sizes) - of_prompts(prompts, CPU, dtype=torch.float32)
    ).abs()
    print(f"\n{error.mean():.4f} on average, {error.max():.4f} at most")
    assert error.mean() < 0.03
    assert error.max() < 0.2


def test_all_that_is_used_is_in_the_plan() -> None:
    """Weights, tables, graphs, blocks and the largest step stay within the share that was given."""
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    config = shape()
    scheduler = SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=4096, max_model_len=512)
    setting = Setting(
        config=config, dtype=torch.bfloat16, device=CUDA, vocab_size=config.vocab_size,
        cache=CacheConfig(gpu_memory=0.02), scheduler=scheduler,
    )  # fmt: skip
    started = start(setting, lambda most: made(config, CUDA, torch.bfloat16, int4=True))
    plan = started.plan
    assert plan is not None
    assert plan.measured
    assert plan.num_blocks == started.num_blocks == started.executor.kv_cache.shape[2] - 1
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_stats()["reserved_bytes.large_pool.current"]
    # As many sequences as have seats, all prompts in one step.
    tokens = tuple(range(1, 65))
    params = SamplingParams(temperature=0.5, top_p=0.9)
    admitted = tuple(Admission(str(i), tokens, 64, params, i) for i in range(64))
    work = tuple(Work(str(i), 0, 64, tuple(range(1 + 4 * i, 5 + 4 * i)), True) for i in range(64))
    result = started.executor.execute(StepPlan(0, admitted=admitted, work=work))
    assert len(result.token_ids) == 64
    # What it takes was there; the driver may have been asked for a piece that did not fit in.
    more = torch.cuda.memory_stats()["reserved_bytes.large_pool.current"] - held
    assert more < started.executor._peak / 2
    used = torch.cuda.max_memory_allocated() - before
    assert used <= plan.budget
    assert used > 0.5 * plan.budget  # and it is worth saying: blocks take what is left
    # A GPU is not asked for its memory where somebody else takes and gives back some of it.
    assert 0 <= plan.graphs < plan.total


EDGES = [(1, 1), (1, 17), (15, 1), (15, 2), (16, 1), (16, 16), (17, 1), (31, 2), (32, 1), (33, 16),
         (255, 17), (256, 1), (256, 16)]  # fmt: skip


def at_edges(**options) -> list[tuple[list[int], SamplingParams]]:
    """Prompts and outputs that just fill blocks of 16, or just do not."""
    rng = random.Random(11)
    return [
        (
            [rng.randrange(1, 512) for _ in range(length)],
            SamplingParams(
                max_tokens=count, temperature=0, logprobs=2, ignore_eos=True, **options
            ),
        )
        for length, count in EDGES
    ]  # fmt: skip


def test_memory_of_one_request_is_enough_for_all() -> None:
    """Room for the longest alone: the others are swapped out and in, to the same bits."""
    batch = at_edges()
    roomy = served(shape(), invariant=True, max_num_batched_tokens=300)
    want = outputs(roomy, batch)
    for number, (_, params) in enumerate(batch):
        tokens, reason, _ = want[f"{number}/0"]
        assert (len(tokens), reason) == (params.max_tokens, "length")
    tight = served(
        shape(), invariant=True, max_num_batched_tokens=300, num_blocks=17, swap_blocks=200,
        preemption="swap",
    )  # fmt: skip
    assert outputs(tight, batch) == want


def test_aborts_in_the_middle_do_not_touch_the_others() -> None:
    """In batch-invariant mode to the last bit, whatever step they come in."""
    batch = [(p, replace(s, max_tokens=20)) for p, s in at_edges()]
    engine = served(shape(), invariant=True, max_num_batched_tokens=60)
    want = outputs(engine, batch)
    rng = random.Random(5)
    for round_ in range(4):
        names = [f"{round_}.{number}" for number in range(len(batch))]
        for name, (prompt, params) in zip(names, batch, strict=True):
            engine.add_request(name, prompt, params)
        doomed = {name: rng.randrange(12) for name in rng.sample(names, 6)}
        done, step = {}, 0
        while engine.has_unfinished:
            for name, when in doomed.items():
                if when == step:
                    engine.abort(name)
            for output in engine.step():
                if output.finished:
                    done[output.request_id] = (
                        output.token_ids, output.finish_reason, output.logprobs
                    )  # fmt: skip
            step += 1
        for number, name in enumerate(names):
            if name not in doomed:
                assert done[name] == want[f"{number}/0"]
        assert engine.stats().blocks_in_use == 0
        assert not engine._executor.batch.rows


def test_batch_invariant_from_text_to_text(tmp_path: Path) -> None:
    """The option of `LLM` reaches all that it takes: a text alone and among others."""
    llm = LLM(
        str(checkpoints.write(tmp_path, "dense")), device="cuda", batch_invariant=True, seed=0,
        cache=CacheConfig(num_blocks=500),
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=128),
    )  # fmt: skip
    texts = ["The old fish", "a", "Numbers: " + "1 2 3 " * 40, "Why?", "x" * 97, "one more"]
    params = [
        SamplingParams(max_tokens=24, temperature=t, seed=3, logprobs=2, ignore_eos=True)
        for t in (0.0, 1.0, 0.0, 0.7, 0.0, 1.0)
    ]
    together = llm.generate(texts, params)
    for text, options, output in zip(texts, params, together, strict=True):
        (alone,) = llm.generate([text], options)
        assert (alone.text, alone.logprobs) == (output.text, output.logprobs)
