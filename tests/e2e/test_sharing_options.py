"""Sampling options on shared, forked, swapped and recomputed KV of a small model. float32."""

from dataclasses import replace
from pathlib import Path

import pytest

from billfish import LLM, RequestOutput, SamplingParams
from billfish.config import CacheConfig, SchedulerConfig
from billfish.engine.request import sample_seed
from tests.e2e import tiny_gguf
from tests.e2e.prompts import PROMPTS
from tests.e2e.test_sampling import assert_close, everything

STORY = PROMPTS[19]
PARAMS = SamplingParams(
    n=4, max_tokens=24, seed=11, temperature=0.9, ignore_eos=True, presence_penalty=0.8,
    frequency_penalty=0.7, repetition_penalty=1.2, bad_words=["e", "th"], logit_bias={40: 2.0},
    logprobs=3, prompt_logprobs=2,
)  # fmt: skip
ONE = replace(PARAMS, n=1)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gguf.write(tmp_path_factory.mktemp("options") / "tiny.gguf")


def load(path: Path, num_blocks: int = 256, swap_blocks: int = 0, **scheduler) -> LLM:
    cache = CacheConfig(num_blocks=num_blocks, block_size=8, swap_blocks=swap_blocks)
    return LLM(str(path), dtype="float32", cache=cache, scheduler=SchedulerConfig(**scheduler))


@pytest.fixture(scope="module")
def plain(tiny: Path) -> LLM:
    cache = CacheConfig(num_blocks=256, block_size=8, prefix_caching=False)
    return LLM(str(tiny), dtype="float32", cache=cache)


def alone(plain: LLM, prompts: list, params: list[SamplingParams]) -> list[RequestOutput]:
    """Every sample as a request of its own, served by itself."""
    return [
        plain.generate([prompt], replace(each, n=1, seed=sample_seed(each.seed or 0, index)))[0]
        for prompt, each in zip(prompts, params, strict=True)
        for index in range(each.n)
    ]


def check(outputs: list[RequestOutput], expected: list[RequestOutput]) -> None:
    assert everything(outputs) == everything(expected)
    assert_close(outputs, expected)


def test_options_count_for_each_sample_by_itself(plain: LLM, tiny: Path) -> None:
    llm = load(tiny)
    prompts = [STORY, PROMPTS[0]]
    outputs = llm.generate(prompts, PARAMS)
    expected = alone(plain, prompts, [PARAMS] * 2)
    check(outputs, expected)
    assert len({output.token_ids for output in outputs}) == 8
    stats = llm.stats()
    assert min(stats.forks, stats.block_copies) > 0
    # The penalties do something, so counts that mix would show.
    without = replace(PARAMS, presence_penalty=0.0, frequency_penalty=0.0, repetition_penalty=1.0)
    others = llm.generate(prompts, without)
    assert all(a.token_ids != b.token_ids for a, b in zip(outputs, others, strict=True))


@pytest.mark.parametrize("length", [16, 17, 24, 45])
def test_log_probabilities_of_a_hit_are_those_of_a_miss(
    plain: LLM, tiny: Path, length: int
) -> None:
    llm = load(tiny)
    prompt = plain.tokenizer.encode(STORY)[:length]
    params = replace(ONE, prompt_logprobs=None)
    expected = plain.generate([prompt], params)
    for cached in (0, length // 8 * 8):
        outputs = llm.generate([prompt], params)
        assert outputs[0].metrics.cached_tokens == cached
        check(outputs, expected)
        ours, theirs = (
            [each.logprob for each in output.logprobs or ()] for output in (outputs[0], expected[0])
        )
        assert ours == pytest.approx(theirs, abs=1e-5)


def test_log_probabilities_of_a_cached_prompt_are_all_there(plain: LLM, tiny: Path) -> None:
    llm = load(tiny, max_num_batched_tokens=20)
    quiet = replace(PARAMS, prompt_logprobs=None)
    llm.generate(STORY, quiet)
    outputs = llm.generate(STORY, PARAMS)
    check(outputs, alone(plain, [STORY], [PARAMS]))
    assert {output.metrics.cached_tokens for output in outputs} == {0}
    assert all(None not in (output.prompt_logprobs or [None])[1:] for output in outputs)
    again = llm.generate(STORY, quiet)[0].metrics
    assert again.cached_tokens == again.num_prompt_tokens // 8 * 8


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_preemption_in_the_middle(plain: LLM, tiny: Path, preemption: str) -> None:
    llm = load(
        tiny, num_blocks=14, swap_blocks=60 * (preemption == "swap"), preemption=preemption,
        max_num_batched_tokens=12, max_num_seqs=8, max_model_len=100,
    )  # fmt: skip
    story = plain.tokenizer.encode(STORY)
    prompts = [story[: 5 + 7 * i] for i in range(6)]
    params = [replace(PARAMS, n=1 + i % 3, seed=i, max_tokens=30) for i in range(6)]
    outputs = llm.generate(prompts, params)
    check(outputs, alone(plain, prompts, params))
    stats = llm.stats()
    assert stats.preemptions > 3
    assert (stats.swaps > 3) == (preemption == "swap")
    assert stats.forks > 0
    middle = [output for output in outputs if output.metrics.preemptions]
    assert any(output.metrics.num_output_tokens == 30 for output in middle)
    assert stats.blocks_in_use == stats.host_blocks_in_use == 0


def test_prompt_logprobs_of_a_broken_sample_are_not_the_next_ones(tiny: Path) -> None:
    """The first forward pass gives no numbers; the second sample computes the prompt anew."""
    llm = load(tiny, max_num_seqs=1)
    params = SamplingParams(n=2, max_tokens=2, prompt_logprobs=0, temperature=0, ignore_eos=True)
    prompt = list(range(3, 23))
    forward, passes = llm.executor.model.forward, []

    def broken_once(*arguments):
        passes.append(None)
        hidden = forward(*arguments)
        return hidden * float("nan") if len(passes) == 1 else hidden

    llm.executor.model.forward = broken_once
    first, second = llm.generate([prompt], params)
    assert first.finish_reason == "error"
    assert second.finish_reason == "length"
    (fresh,) = llm.generate([prompt], replace(params, n=1))
    assert second.prompt_logprobs == fresh.prompt_logprobs
