"""The runner for a GPU, run on the CPU with plain calls in place of graphs, beside the CPU's own.

Everything but the kernels is what runs on a GPU: tables on the device, the inputs made from them,
padded decode steps, rules and samples in batches, results that come later.
"""

import random
from dataclasses import replace
from functools import cache

import pytest
import torch

from billfish.config import CacheConfig, SchedulerConfig
from billfish.engine import Engine, RequestOutput
from billfish.engine.plan import Admission, Fork, StepPlan, Work
from billfish.errors import CapacityError, ConfigError, InvalidRequestError
from billfish.kernels.paged_attention.metadata import PADDING_SLOT
from billfish.models import random_weights
from billfish.sampling_params import SamplingParams
from billfish.worker import ModelRunner, device_runner, kv_cache, parking
from billfish.worker.device_batch import DeviceBatch
from billfish.worker.device_rules import DeviceRules
from billfish.worker.device_runner import DeviceRunner
from billfish.worker.input_batch import InputBatch
from billfish.worker.logits_processor import LogitsProcessor
from billfish.worker.parking import park, unpark
from billfish.worker.step_graphs import ladder

CONFIG = random_weights.SHAPES["tiny"]
VOCAB = CONFIG.vocab_size
BLOCK, SEATS, LENGTH = 4, 6, 64


@cache
def network():
    return random_weights.load_model(
        CONFIG, dtype=torch.float32, device="cpu", max_len=LENGTH, int4=False
    )


def engine(kind: str, *, num_blocks: int = 200, swap_blocks: int = 0, **scheduler) -> Engine:
    cache = CacheConfig(block_size=BLOCK)
    memory = kv_cache.allocate(CONFIG, cache, num_blocks, torch.float32)
    host = kv_cache.allocate(CONFIG, cache, swap_blocks, torch.float32) if swap_blocks else None
    runner = (ModelRunner if kind == "cpu" else DeviceRunner)(
        network(), memory, vocab_size=VOCAB, max_num_seqs=SEATS, max_model_len=LENGTH,
        host_cache=host,
    )  # fmt: skip
    return Engine(
        runner, num_blocks=num_blocks, block_size=BLOCK, vocab_size=VOCAB, max_model_len=LENGTH,
        eos_token_ids=(0,), token_bytes=lambda token: bytes((32 + token % 90,)),
        scheduler=SchedulerConfig(max_num_seqs=SEATS, **scheduler), swap_blocks=swap_blocks,
        prefix_cache_key=b"key", overlap=kind == "overlap", seed=0,
    )  # fmt: skip


def some_requests(count: int, seed: int) -> list[tuple[list[int], SamplingParams, list]]:
    rng = random.Random(seed)
    beginnings = [[rng.randrange(1, VOCAB) for _ in range(16)] for _ in range(3)]
    requests = []
    for number in range(count):
        prompt = rng.choice(beginnings)[: rng.randint(1, 16)]
        prompt = prompt + [rng.randrange(1, VOCAB) for _ in range(rng.randint(0, 12))]
        options: dict = {}
        for name, values in {
            "temperature": (0.0, 0.7, 1.0), "top_p": (1.0, 0.8), "top_k": (0, 7), "n": (1, 1, 3),
            "min_p": (0.0, 0.1), "presence_penalty": (0.0, 1.5), "frequency_penalty": (0.0, 0.5),
            "repetition_penalty": (1.0, 1.2), "logprobs": (None, 0, 3), "min_tokens": (0, 3),
            "prompt_logprobs": (None, None, None, 2), "logit_bias": ({}, {5: 3.0, 9: -4.0}),
            "allowed_token_ids": (None, None, None, list(range(3, 60))),
        }.items():  # fmt: skip
            options[name] = rng.choice(values)
        words = rng.choice(([], [], [[7], [9, 11], list(range(40, 44))]))
        options["bad_words"] = ["x"] if words else []
        stops = [rng.randrange(1, VOCAB) for _ in range(20)]
        params = SamplingParams(
            max_tokens=rng.randint(3, 20), seed=number, stop_token_ids=stops, **options
        )
        requests.append((prompt, params, words))
    return requests


def outputs_of(engine: Engine, requests) -> dict[tuple[str, int], RequestOutput]:
    for number, (prompt, params, words) in enumerate(requests):
        engine.add_request(str(number), prompt, params, bad_word_ids=words)
    final = {}
    while engine.has_unfinished:
        for output in engine.step():
            if output.finished:
                final[output.request_id, output.index] = output
    assert engine.stats().blocks_in_use == 0
    return final


def assert_same(one: RequestOutput, other: RequestOutput) -> None:
    assert (one.token_ids, one.finish_reason) == (other.token_ids, other.finish_reason)
    for mine, theirs in (
        (one.logprobs, other.logprobs),
        (one.prompt_logprobs, other.prompt_logprobs),
    ):
        assert (mine is None) == (theirs is None)
        for a, b in zip(mine or (), theirs or (), strict=True):
            if a is None or b is None:
                assert a is b
                continue
            assert (a.token_id, a.rank) == (b.token_id, b.rank)
            assert a.logprob == pytest.approx(b.logprob, abs=1e-4)
            assert [t for t, _ in a.top] == [t for t, _ in b.top]


@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_batched_tokens": 64},
        {"max_num_batched_tokens": 5},
        {"num_blocks": 20, "max_num_batched_tokens": 16},
        {"num_blocks": 20, "swap_blocks": 20, "preemption": "swap"},
    ],
    ids=["whole prompts", "chunks", "recompute", "swap"],
)
def test_same_outputs_as_on_the_cpu(settings):
    requests = some_requests(24, seed=len(settings))
    want = outputs_of(engine("cpu", **settings), requests)
    for kind in ("plain", "overlap"):
        served = engine(kind, **settings)
        got = outputs_of(served, requests)
        assert got.keys() == want.keys()
        for key, output in want.items():
            assert_same(output, got[key])
        assert not served._executor.batch.rows


def test_inputs_are_those_of_the_host():
    """Random plans: the same token ids, positions, slots and tables as `InputBatch` makes."""
    rng = random.Random(3)
    host = InputBatch(SEATS, LENGTH, BLOCK)
    device = DeviceBatch(SEATS, LENGTH, BLOCK, torch.device("cpu"))
    live: dict[str, list[int]] = {}  # tokens known, tokens computed
    free, forked = iter(range(1, 10**6)), 0
    for step in range(120):
        released = tuple(name for name in live if rng.random() < 0.1)
        for name in released:
            del live[name]
        admitted = []
        while len(live) < SEATS - 1 and rng.random() < 0.6:
            tokens = tuple(rng.randrange(VOCAB) for _ in range(rng.randint(1, 20)))
            found = rng.randint(0, len(tokens)) // BLOCK * BLOCK
            blocks = tuple(next(free) for _ in range(found // BLOCK))
            name = f"{step}/{len(live)}"
            admitted.append(Admission(
                name, tokens, len(tokens), SamplingParams(), 0, block_ids=blocks,
                num_computed_tokens=found,
            ))  # fmt: skip
            live[name] = [len(tokens), min(found, len(tokens) - 1)]
        work, one_each = [], rng.random() < 0.5
        for name, (known, computed) in live.items():
            count = 1 if one_each else rng.randint(1, known - computed)
            lacking = -(-(computed + count) // BLOCK) - -(-computed // BLOCK)
            had_found = computed % BLOCK == BLOCK - 1 and any(
                a.request_id == name and a.num_computed_tokens > computed for a in admitted
            )
            blocks = () if had_found else tuple(next(free) for _ in range(lacking))
            work.append(Work(name, computed, count, blocks, computed + count == known))
        forks = ()
        sources = [w.request_id for w in work if w.samples]
        if sources and len(live) < SEATS:
            forks = (Fork(f"fork{step}", rng.choice(sources), 1),)
        plan = StepPlan(step, released, admitted=tuple(admitted), work=tuple(work), forks=forks)
        host.apply(plan)
        sent = device.apply(plan)
        if not work:
            assert sent is None
            continue
        want = host.build(plan)
        got, metadata = device.mixed_inputs(sent)
        device.copy_forks(plan)
        assert torch.equal(got.token_ids, want.token_ids)
        assert torch.equal(got.positions, want.positions)
        assert torch.equal(metadata.slot_mapping, want.metadata.slot_mapping)
        assert torch.equal(metadata.seq_lens, want.metadata.seq_lens)
        assert torch.equal(metadata.query_start, want.metadata.query_start)
        for row, length in enumerate(metadata.seq_lens.tolist()):
            used = -(-length // BLOCK)
            assert torch.equal(
                metadata.block_table[row, :used], want.metadata.block_table[row, :used]
            )
        assert [name for name, _ in sent.sampled] == list(want.sampled)
        index = device.header.sample_index[: len(sent.sampled)]
        assert torch.equal(index.long(), want.sample_index)
        for item in work:
            live[item.request_id][1] = item.start + item.num_tokens
        for fork in forks:
            live[fork.request_id] = live[fork.source][:]
            forked += 1
        for name, row in sent.sampled:
            token = rng.randrange(VOCAB)
            host.append(name, token)
            place = live[name][0]
            device.token_table[row.index, place] = token
            live[name][0] += 1
            if live[name][0] >= LENGTH - 1:
                live[name][1] = 10**9
        for name in [n for n, (_, computed) in live.items() if computed >= 10**9]:
            del live[name]
            host.apply(StepPlan(step, (name,)))
            device.apply(StepPlan(step, (name,)))
    assert forked > 5


def test_padding_of_a_decode_step():
    batch = DeviceBatch(SEATS, LENGTH, BLOCK, torch.device("cpu"))
    plan = StepPlan(
        0,
        admitted=(Admission("a", (7, 8, 9), 3, SamplingParams(), 0, block_ids=(5,)),),
        work=(Work("a", 2, 1, (), True),),
    )
    step = batch.apply(plan)
    assert step is not None
    assert step.decodes
    from billfish.worker import step_inputs

    inputs = step_inputs.allocate(4, 4, batch.max_blocks, batch.device)
    batch.fill(torch.arange(5, dtype=torch.int32), inputs, longest=1)
    assert inputs.token_ids.tolist() == [9, 0, 0, 0]
    assert inputs.positions.tolist() == [2, 0, 0, 0]
    assert inputs.slots.tolist() == [5 * BLOCK + 2, *[PADDING_SLOT] * 3]


def test_rules_are_those_of_the_host():
    """Random rules over random texts: the same logits from tables on the device."""
    for seed in range(20):
        requests = some_requests(SEATS, seed)
        admissions = [
            Admission(
                str(i), tuple(prompt), max(1, len(prompt) - 4), params, 0,
                stop_ids=frozenset(params.stop_token_ids), bad_word_ids=tuple(map(tuple, words)),
            )
            for i, (prompt, params, words) in enumerate(requests)
        ]  # fmt: skip
        host = InputBatch(SEATS, LENGTH, BLOCK)
        device = DeviceBatch(SEATS, LENGTH, BLOCK, torch.device("cpu"))
        work = tuple(Work(a.request_id, 0, len(a.token_ids), (), True) for a in admissions)
        plan = StepPlan(0, admitted=tuple(admissions), work=work)
        host.apply(plan)
        step = device.apply(plan)
        assert step is not None
        logits = 4 * torch.randn(SEATS, VOCAB, generator=torch.Generator().manual_seed(seed))
        logits[seed % SEATS, 3] = torch.nan if seed % 3 == 0 else 1.0
        rows = [host.rows[a.request_id] for a in admissions]
        want = LogitsProcessor(SEATS, VOCAB).apply(logits, rows, host.token_ids)
        rules = DeviceRules(device.token_table)
        for _ in range(2):  # the second time with what the first prepared
            got = rules.apply(
                logits, [row for _, row in step.sampled], device.header.sample_positions[:SEATS]
            )
            torch.testing.assert_close(got, want, equal_nan=True, rtol=0, atol=0)


def test_logits_are_computed_in_few_sizes(monkeypatch):
    """Those of decode steps, which are prepared at the start, but for the logits of prompts."""
    served = engine("overlap", max_num_batched_tokens=16)
    runner = served._executor
    sizes = set()
    logits = runner.model.logits

    def counted(hidden):
        sizes.add(len(hidden))
        return logits(hidden)

    monkeypatch.setattr(runner.model, "logits", counted)
    requests = [
        (prompt, params, words)
        for prompt, params, words in some_requests(40, seed=3)
        if params.prompt_logprobs is None
    ]
    outputs_of(served, requests)
    assert {1, SEATS} <= sizes <= set(ladder(SEATS))


def test_sleep_and_wake():
    """The same outputs before and after; nothing is served, and nothing kept, in between."""
    network.cache_clear()  # no other test's model is put away
    served = engine("overlap")
    runner = served._executor
    requests = some_requests(6, seed=9)
    want = outputs_of(served, requests)
    weights = [tensor.data_ptr() for tensor in runner.model.buffers()]
    served.sleep()
    served.sleep()
    assert runner.kv_cache.numel() == 0
    assert sum(tensor.numel() for tensor in runner.model.buffers()) == 0
    with pytest.raises(InvalidRequestError, match="sleeps"):
        served.add_request("x", [1], SamplingParams())
    assert served.stats().blocks_cached == 0
    served.wake()
    served.wake()
    assert [tensor.data_ptr() for tensor in runner.model.buffers()] != weights
    assert runner.model.embed_tokens.shape == (VOCAB, CONFIG.hidden_size)
    got = outputs_of(served, requests)
    for key, output in want.items():
        assert_same(output, got[key])
    served.add_request("y", [1, 2], SamplingParams(max_tokens=9))
    with pytest.raises(InvalidRequestError, match="unfinished"):
        served.sleep()
    served.abort("y")
    while served.has_unfinished:
        served.step()
    with pytest.raises(ConfigError, match="CPU"):
        engine("cpu").sleep()


def test_a_host_without_memory_for_the_weights_lets_nobody_sleep(monkeypatch):
    network.cache_clear()
    served = engine("overlap")
    requests = some_requests(3, seed=5)
    want = outputs_of(served, requests)
    monkeypatch.setattr(parking, "available_memory", lambda: 1000)
    with pytest.raises(CapacityError, match="of host memory while the engine sleeps"):
        served.sleep()
    got = outputs_of(served, requests)
    for key, output in want.items():
        assert_same(output, got[key])


@pytest.mark.parametrize(
    ("error", "raised", "says"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), CapacityError, "wake again"),
        (RuntimeError("a capture was ended"), RuntimeError, "a capture was ended"),
    ],
)
def test_a_wake_that_fails_can_be_asked_again(error, raised, says, monkeypatch):
    """Nothing is served meanwhile, and nothing of what was brought back half way is kept."""
    network.cache_clear()
    served = engine("overlap")
    runner = served._executor
    requests = some_requests(3, seed=5)
    want = outputs_of(served, requests)
    served.sleep()

    def brings_half(parked):
        parked.restore([tensor.clone() for tensor in parked.tensors])
        raise error

    monkeypatch.setattr(device_runner, "unpark", brings_half)
    for _ in range(2):
        with pytest.raises(raised, match=says):
            served.wake()
        assert runner.kv_cache.numel() == 0
        assert sum(tensor.numel() for tensor in runner.model.buffers()) == 0
        with pytest.raises(InvalidRequestError, match="sleeps"):
            served.add_request("x", [1], SamplingParams())
    monkeypatch.undo()
    served.wake()
    got = outputs_of(served, requests)
    for key, output in want.items():
        assert_same(output, got[key])


def test_int4_layers_and_tied_weights_are_parked_once():
    config = replace(CONFIG, tie_embeddings=True)
    model = random_weights.load_model(
        config, dtype=torch.bfloat16, device="cpu", max_len=LENGTH, int4=True
    )
    x = torch.randn(3, config.hidden_size, dtype=torch.bfloat16)
    before = model.layers[0].mlp(x)
    parked = park(model, torch.device("cpu"))
    assert model.lm_head.weight.numel() == model.layers[0].mlp.down_proj.weight.nbytes == 0
    unpark(parked)
    assert torch.equal(model.layers[0].mlp(x), before)
    assert model.lm_head.weight.data_ptr() == model.embed_tokens.data_ptr()
    angles = {layer.attention.attention.cos_sin.data_ptr() for layer in model.layers}
    assert len(angles) == 1
