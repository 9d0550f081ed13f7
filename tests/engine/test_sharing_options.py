"""Sampling options on shared, forked, swapped and recomputed sequences: as on one alone."""

from collections import Counter
from dataclasses import replace

import pytest

from billfish.config import SchedulerConfig
from billfish.engine import Engine
from billfish.engine.block_manager import BlockManager
from billfish.engine.block_pool import BlockPool
from billfish.engine.plan import NOT_FINITE, StepPlan, StepResult
from billfish.engine.prefix_cache import PrefixCache
from billfish.engine.request import sample_seed
from billfish.sampling_params import SamplingParams
from tests.engine.fake_worker import make_engine, run, sample_key
from tests.engine.test_sampling_options import LogprobsWorker, logprobs_of

PROMPT = list(range(1, 11))  # two blocks and a half of four
PARAMS = SamplingParams(
    n=4, max_tokens=12, seed=7, presence_penalty=1.0, logprobs=1, prompt_logprobs=2
)
CHOICES = 7


class OptionsWorker(LogprobsWorker):
    """Its penalty: of few tokens, the one generated least often so far, never mind the prompt."""

    def _choose(self, request_id: str) -> int:
        token_id = super()._choose(request_id)
        asked = self.asked[request_id]
        ids = [1 + (token_id + i) % CHOICES for i in range(CHOICES)]
        if not asked.sampling.presence_penalty:
            return ids[0]
        generated = Counter(self.sequences[request_id].token_ids[asked.num_prompt_tokens :])
        return min(ids, key=lambda token_id: generated[token_id])


def make(num_blocks: int = 64, swap_blocks: int = 0, **options) -> tuple[Engine, OptionsWorker]:
    worker = OptionsWorker(num_blocks, 4, swap_blocks)
    return make_engine(worker, num_blocks=num_blocks, swap_blocks=swap_blocks, **options)


def alone(prompt: list[int], params: SamplingParams):
    engine, _ = make(prefix_caching=False)
    engine.add_request("alone", prompt, params)
    output = run(engine)["alone"]
    return output.token_ids, output.logprobs, output.prompt_logprobs


def check(final, request_id: str, prompt: list[int], params: SamplingParams) -> None:
    """Each sample is what a request of its own with its seed is."""
    for index in range(params.n):
        seed = sample_seed(params.seed or 0, index)
        expected = alone(prompt, replace(params, n=1, seed=seed))
        output = final[f"{request_id}/{index}" if index else request_id]
        assert (output.token_ids, output.logprobs, output.prompt_logprobs) == expected


def test_the_penalty_shows() -> None:
    tokens, _, _ = alone(PROMPT, replace(PARAMS, n=1))
    assert set(Counter(tokens[:CHOICES]).values()) == {1}
    plain, _, _ = alone(PROMPT, replace(PARAMS, n=1, presence_penalty=0.0))
    assert max(Counter(plain[:CHOICES]).values()) > 1


@pytest.mark.parametrize("seats", [4, 64])
@pytest.mark.parametrize("budget", [3, 64])
@pytest.mark.parametrize(
    ("num_blocks", "options"),
    [
        (64, {}),
        (64, {"prefix_caching": False}),
        (9, {"preemption": "recompute"}),
        (9, {"preemption": "recompute", "prefix_caching": False}),
        (9, {"preemption": "swap", "swap_blocks": 40}),
    ],
)
def test_samples_are_those_of_separate_requests(num_blocks, options, budget, seats) -> None:
    engine, _ = make(num_blocks, max_num_batched_tokens=budget, max_num_seqs=seats, **options)
    requests = {
        "a": (PROMPT, PARAMS),
        "b": (PROMPT[:8], replace(PARAMS, seed=1, prompt_logprobs=0)),
        "c": (PROMPT[:9], replace(PARAMS, n=2, seed=2, prompt_logprobs=None)),
        "d": ([5], replace(PARAMS, seed=3, presence_penalty=0.0, logprobs=None)),
    }
    for request_id, (prompt, params) in requests.items():
        engine.add_request(request_id, prompt, params)
    final = run(engine)
    for request_id, (prompt, params) in requests.items():
        check(final, request_id, prompt, params)
    stats = engine.stats()
    assert stats.forks > 0
    assert (stats.preemptions > 0) == (num_blocks < 64)
    assert (stats.swaps > 0) == ("swap_blocks" in options)


def test_outputs_have_the_prompt_s_from_the_first_on() -> None:
    engine, _ = make(max_num_batched_tokens=3)
    engine.add_request("a", PROMPT, PARAMS)
    expected = (None, *(logprobs_of(token, i, 2) for i, token in enumerate(PROMPT) if i))
    seen: Counter[str] = Counter()
    while engine.has_unfinished:
        for output in engine.step():
            position = len(PROMPT) + seen[sample_key(output)]
            seen[sample_key(output)] += 1
            assert output.prompt_logprobs == expected
            assert output.new_logprobs == (logprobs_of(output.token_ids[-1], position, 1),)
    assert set(seen.values()) == {12}


class TestPromptLogprobsAndThePrefixCache:
    def test_the_prompt_is_computed_though_it_is_cached(self) -> None:
        engine, worker = make()
        asks, quiet = replace(PARAMS, n=1), replace(PARAMS, n=1, prompt_logprobs=None)
        found = []
        for i, params in enumerate((quiet, quiet, asks, quiet)):
            engine.add_request(str(i), PROMPT, params)
            final = run(engine)
            check(final, str(i), PROMPT, params)
            found.append(final[str(i)].metrics.cached_tokens)
        assert found == [0, 8, 0, 8]
        starts = [new.num_computed_tokens for plan in worker.plans for new in plan.admitted]
        assert starts == found

    def test_what_it_computes_is_found_by_others(self) -> None:
        engine, _ = make()
        engine.add_request("a", PROMPT, PARAMS)
        run(engine)
        engine.add_request("b", PROMPT, replace(PARAMS, prompt_logprobs=None))
        assert run(engine)["b"].metrics.cached_tokens == 8

    def test_a_sample_that_waited_finds_the_prompt(self) -> None:
        """All that is to be known of the prompt is known by then."""
        engine, worker = make(max_num_seqs=1)
        engine.add_request("a", PROMPT, replace(PARAMS, n=2))
        check(run(engine), "a", PROMPT, replace(PARAMS, n=2))
        admitted = [new for plan in worker.plans for new in plan.admitted]
        assert [(new.request_id, new.num_computed_tokens) for new in admitted] == [
            ("a", 0), ("a\0001", 8),
        ]  # fmt: skip

    @pytest.mark.parametrize("preemption", ["recompute", "swap"])
    @pytest.mark.parametrize("asks", [True, False])
    def test_preempted_in_the_middle_of_the_prompt(self, preemption: str, asks: bool) -> None:
        swap_blocks = 8 if preemption == "swap" else 0
        engine, worker = make(9, swap_blocks, preemption=preemption, max_num_batched_tokens=2)
        old = SamplingParams(max_tokens=20, seed=1, presence_penalty=1.0, logprobs=1)
        young = replace(PARAMS, n=2, prompt_logprobs=2 if asks else None)
        prompt = list(range(101, 121))
        engine.add_request("old", [1, 2, 3, 4], old)
        engine.add_request("young", prompt, young)
        final = run(engine)
        check(final, "old", [1, 2, 3, 4], old)
        check(final, "young", prompt, young)
        (_, first), (back, again) = [
            (plan.step, new)
            for plan in worker.plans
            for new in plan.admitted
            if new.request_id == "young"
        ]
        assert first.token_ids == again.token_ids == tuple(prompt)
        computed = sum(
            work.num_tokens
            for plan in worker.plans[:back]
            for work in plan.work
            if work.request_id == "young"
        )
        assert 8 < computed < 20
        if preemption == "swap":
            assert again.num_computed_tokens == computed
        elif asks:
            assert again.num_computed_tokens == 0  # its blocks are cached, its logits are not
        else:
            assert again.num_computed_tokens > 0
        assert (engine.stats().swaps > 0) == (preemption == "swap")


@pytest.mark.parametrize(
    ("asks", "cached", "swaps"), [(True, True, True), (False, True, False), (False, False, True)]
)
def test_what_will_not_be_found_is_worth_swapping(asks: bool, cached: bool, swaps: bool) -> None:
    """Of 12 tokens 8 are in shared blocks. Swapping 12 costs 6; computing 4 costs 4, all 12."""
    engine, _ = make()
    params = replace(PARAMS, n=1, prompt_logprobs=0 if asks else None)
    engine.add_request("a", [1] * 13, params)
    (request,) = engine._requests["a"]
    pool = BlockPool(8, 4)
    cache = PrefixCache(pool) if cached else None
    manager = BlockManager(SchedulerConfig(swap_cost=0.5), pool, cache, BlockPool(8, 4))
    request.block_table = pool.allocate(3)
    pool.share(request.block_table[:2])
    request.num_computed_tokens = 12
    assert manager.should_swap(request) == swaps


@pytest.mark.parametrize(("reason", "cached"), [(NOT_FINITE, 0), ("nothing is left", 8)])
def test_only_broken_logits_cast_doubt_on_the_kv(reason: str, cached: int) -> None:
    engine, worker = make()

    def fail(plan: StepPlan, result: StepResult) -> StepResult:
        failed = dict.fromkeys(result.token_ids, reason)
        return replace(result, token_ids={}, failed=failed)

    worker.hook = fail
    engine.add_request("a", PROMPT, PARAMS)
    final = run(engine)
    assert {(output.finish_reason, output.stop_reason) for output in final.values()} == {
        ("error", reason)
    }
    worker.hook = lambda plan, result: result
    engine.add_request("b", PROMPT, replace(PARAMS, prompt_logprobs=None))
    assert run(engine)["b"].metrics.cached_tokens == cached
