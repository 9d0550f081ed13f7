"""Shared, copied, swapped and recomputed KV on real models: the tokens stay the same. float32."""

import random
from pathlib import Path

import pytest
import torch

from billfish import LLM, SamplingParams
from billfish.config import CacheConfig, SchedulerConfig
from billfish.engine.plan import Admission, StepPlan, Work
from billfish.engine.request import sample_seed
from tests.e2e import tiny_gguf
from tests.e2e.prompts import PROMPTS

STORY = PROMPTS[19]  # about fifty tokens
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


def seeded(seed: int, n: int = 1, max_tokens: int = 10) -> SamplingParams:
    return SamplingParams(n=n, max_tokens=max_tokens, temperature=0.9, seed=seed, ignore_eos=True)


@pytest.fixture(scope="module")
def plain(model_path: Path) -> LLM:
    cache = CacheConfig(num_blocks=512, prefix_caching=False)
    return LLM(str(model_path), dtype="float32", cache=cache)


@pytest.fixture(scope="module")
def shared(model_path: Path) -> LLM:
    return LLM(str(model_path), dtype="float32", cache=CacheConfig(num_blocks=512))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gguf.write(tmp_path_factory.mktemp("sharing") / "tiny.gguf")


def test_hit_equals_miss(plain: LLM, shared: LLM) -> None:
    """The second time all full blocks are found, also where that is the whole prompt."""
    story = plain.tokenizer.encode(STORY)
    prompts = [story[:n] for n in (16, 17, 32, len(story))]
    prompts += [[*story[:40], *plain.tokenizer.encode(tail)] for tail in (" the sea", " a king")]
    expected = [output.token_ids for output in plain.generate(prompts, GREEDY)]
    for _ in range(2):
        outputs = shared.generate(prompts, GREEDY)
        assert [output.token_ids for output in outputs] == expected
    assert [output.metrics.cached_tokens for output in outputs] == [
        len(prompt) // 16 * 16 for prompt in prompts
    ]


def test_a_second_turn_equals_a_fresh_one(plain: LLM, shared: LLM) -> None:
    first = shared.generate(STORY, seeded(3, max_tokens=20))[0]
    turn = [*first.prompt_token_ids, *first.token_ids, *plain.tokenizer.encode(" And then")]
    again = shared.generate([turn], GREEDY)[0]
    assert again.metrics.cached_tokens > len(first.prompt_token_ids)
    assert again.token_ids == plain.generate([turn], GREEDY)[0].token_ids


def last_logits(llm: LLM, token_ids: list[int], found: int) -> torch.Tensor:
    """Logits after a prompt of which `found` tokens are in blocks 1, 2, ... already."""
    size = llm.config.cache.block_size
    held = -(-found // size)
    start = min(found, len(token_ids) - 1)
    kept: list[torch.Tensor] = []
    head, llm.executor.model.logits = llm.executor.model.logits, lambda hidden: (
        kept.append(head(hidden)) or kept[-1]
    )  # fmt: skip
    try:
        admission = Admission(
            "x", tuple(token_ids), len(token_ids), GREEDY, seed=0,
            block_ids=tuple(range(1, 1 + held)), num_computed_tokens=found,
        )  # fmt: skip
        new = tuple(range(1 + held, 1 + -(-len(token_ids) // size)))
        work = Work("x", start, len(token_ids) - start, new, samples=True)
        llm.executor.execute(StepPlan(0, admitted=(admission,), work=(work,)))
        llm.executor.execute(StepPlan(1, released=("x",)))
    finally:
        llm.executor.model.logits = head
    return kept[0][0]


def test_logits_of_a_hit_are_those_of_a_miss_up_to_rounding(plain: LLM) -> None:
    """Fewer rows at once may be summed in another order; nothing else may differ."""
    tokens = plain.tokenizer.encode(STORY)[:48]
    miss = last_logits(plain, tokens, 0)
    assert torch.equal(last_logits(plain, tokens, 0), miss)
    for found in (16, 32, 48):
        cache = plain.executor.kv_cache[:, :, 1 : 1 + found // 16].clone()
        hit = last_logits(plain, tokens, found)
        torch.testing.assert_close(hit, miss, rtol=0, atol=1e-5 * float(miss.abs().max()))
        # What was found is read and never written, not even by the last token of a whole prompt.
        assert torch.equal(plain.executor.kv_cache[:, :, 1 : 1 + found // 16], cache)


def test_samples_are_those_of_separate_requests(plain: LLM, shared: LLM) -> None:
    prompts = [PROMPTS[0], STORY]
    outputs = shared.generate(prompts, seeded(11, n=4))
    assert [(o.prompt_token_ids, o.index) for o in outputs] == [
        (tuple(plain.tokenizer.encode(prompt)), i) for prompt in prompts for i in range(4)
    ]
    separate = plain.generate(
        [prompt for prompt in prompts for _ in range(4)],
        [seeded(sample_seed(11, i)) for _ in prompts for i in range(4)],
    )
    alone = [output.token_ids for output in separate]
    assert [output.token_ids for output in outputs] == alone
    assert len(set(alone)) == 8
    assert shared.stats().forks >= 6
    assert shared.stats().block_copies >= 3
    assert shared.stats().blocks_in_use == 0


def test_a_salt_separates(shared: LLM) -> None:
    prompt = "A prompt that is long enough to fill a block, and that nobody has sent before: " * 2
    cached = [
        shared.generate(prompt, GREEDY, cache_salt=salt)[0].metrics.cached_tokens
        for salt in ("mine", "yours", "mine", None)
    ]
    assert cached[0] == cached[1] == cached[3] == 0 < cached[2]


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_soak_on_a_small_model(tiny: Path, preemption: str) -> None:
    """Samples, common beginnings, a tiny pool and streams closed early, against the plain path."""
    rng = random.Random(5)
    plain = LLM(str(tiny), dtype="float32", cache=CacheConfig(num_blocks=256, prefix_caching=False))
    llm = LLM(
        str(tiny), dtype="float32",
        cache=CacheConfig(num_blocks=14, block_size=8, swap_blocks=40 * (preemption == "swap")),
        scheduler=SchedulerConfig(
            preemption=preemption, max_model_len=100, max_num_batched_tokens=24, max_num_seqs=8
        ),
    )  # fmt: skip
    story = plain.tokenizer.encode(STORY)
    for round_ in range(6):
        prompts = [[*story[: rng.randint(1, 40)], rng.randrange(3, 250)] for _ in range(5)]
        params = [
            seeded(100 * round_ + i, rng.choice((1, 2, 4)), rng.randint(8, 30)) for i in range(5)
        ]
        left = llm.stream(prompts[0], seeded(1, n=2, max_tokens=30))
        next(left)
        outputs = iter(llm.generate(prompts, params))
        left.close()
        for prompt, one in zip(prompts, params, strict=True):
            for index in range(one.n):
                alone = seeded(sample_seed(one.seed, index), 1, one.max_tokens)
                assert next(outputs).token_ids == plain.generate([prompt], alone)[0].token_ids
    stats = llm.stats()
    assert stats.preemptions > 5
    assert (stats.swaps > 5) == (preemption == "swap")
    assert min(stats.forks, stats.block_copies, stats.prefix_hits, stats.evictions) > 5
    assert stats.blocks_in_use == stats.host_blocks_in_use == 0
