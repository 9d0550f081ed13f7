"""Requests that give way through host memory, and those that are computed again: same tokens."""

import random

import pytest

from billfish.engine.plan import StepPlan, StepResult
from billfish.engine.request import sample_seed
from billfish.errors import ConfigError
from billfish.sampling_params import SamplingParams
from tests.engine.fake_worker import expected_tokens, make_engine, random_requests, run


class Broken(Exception):
    pass


REQUESTS = random_requests(40, seed=5, max_prompt=14, max_tokens=24)


def serve(requests=REQUESTS, **settings):
    engine, worker = make_engine(**{"num_blocks": 14, "prefix_caching": False} | settings)
    for request in requests:
        engine.add_request(*request)
    final = run(engine, max_steps=3000)
    for request_id, prompt, params in requests:
        want = expected_tokens(prompt, params.max_tokens, params.seed)
        assert final[request_id].token_ids == want, request_id
    stats = engine.stats()
    assert stats.host_blocks_in_use == stats.blocks_in_use == 0
    return engine, worker, final


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("swap_blocks", [3, 10, 100])
@pytest.mark.parametrize("budget", [3, 512])
def test_same_tokens_as_undisturbed(prefix_caching, swap_blocks, budget) -> None:
    engine, worker, final = serve(
        preemption="swap", swap_blocks=swap_blocks, prefix_caching=prefix_caching,
        max_num_batched_tokens=budget,
    )  # fmt: skip
    stats = engine.stats()
    assert 0 < stats.swaps <= stats.preemptions
    assert sum(output.metrics.swaps for output in final.values()) == stats.swaps
    assert stats.blocks_swapped_out == sum(len(plan.swap_out) for plan in worker.plans) > 0
    assert stats.blocks_swapped_in == sum(len(plan.swap_in) for plan in worker.plans)
    if not prefix_caching:  # else some of them are found, and need not be brought back
        assert stats.blocks_swapped_in == stats.blocks_swapped_out
    if swap_blocks == 100 and not prefix_caching:
        assert stats.swaps == stats.preemptions
        # Nothing is ever computed twice.
        computed = sum(work.num_tokens for plan in worker.plans for work in plan.work)
        assert computed == sum(len(p) + params.max_tokens - 1 for _, p, params in REQUESTS)


def test_a_swap_by_hand() -> None:
    engine, worker = make_engine(
        num_blocks=6, prefix_caching=False, preemption="swap", swap_blocks=4
    )
    for seed, request_id in enumerate("ab"):
        params = SamplingParams(max_tokens=12, seed=seed)
        engine.add_request(request_id, [1, 2, 3, 4], params)
    for _ in range(10):
        engine.step()
    out = worker.plans[9]
    # "b" has three blocks with twelve tokens; "a" goes on in the first that is freed.
    assert (out.released, [host for _, host in out.swap_out]) == (("b",), [1, 2, 3])
    held = [block for plan in worker.plans[:9] for block in plan.work[1].new_block_ids]
    assert [block for block, _ in out.swap_out] == held
    assert out.work[0].new_block_ids[0] in held
    assert engine.stats().host_blocks_in_use == 3
    final = run(engine)
    back = next(plan for plan in worker.plans if plan.swap_in)
    (again,) = back.admitted
    (work,) = back.work
    assert [source for source, _ in back.swap_in] == [target for _, target in out.swap_out]
    assert again.block_ids == tuple(target for _, target in back.swap_in)
    assert again.num_computed_tokens == work.start == 12
    assert work.num_tokens == 1
    assert final["b"].token_ids == expected_tokens([1, 2, 3, 4], 12, 1)
    assert (final["b"].metrics.preemptions, final["b"].metrics.swaps) == (1, 1)


class TestChoice:
    def swaps(self, **settings) -> tuple[int, int]:
        engine, _, _ = serve(swap_blocks=100, **settings)
        stats = engine.stats()
        assert stats.preemptions > 0
        return stats.swaps, stats.preemptions

    def test_auto_recomputes_where_there_is_no_separate_memory(self) -> None:
        assert self.swaps()[0] == 0

    def test_auto_swaps_where_it_is_cheaper(self) -> None:
        swaps, preemptions = self.swaps(swap_cost=0.2)
        assert swaps == preemptions
        assert self.swaps(swap_cost=1.0)[0] == 0

    def test_recompute_never_swaps(self) -> None:
        assert self.swaps(preemption="recompute", swap_cost=0.0)[0] == 0

    def test_what_others_hold_is_not_worth_swapping(self) -> None:
        """Two samples of one long prompt: nearly all blocks of the victim are shared."""

        def swaps(cost: float, **options) -> int:
            engine, _ = make_engine(num_blocks=9, swap_blocks=20, swap_cost=cost, **options)
            params = SamplingParams(n=2, max_tokens=16, seed=0)
            engine.add_request("a", list(range(1, 21)), params)
            run(engine)
            assert engine.stats().preemptions > 0
            return engine.stats().swaps

        assert swaps(0.5) == 0
        assert swaps(0.01) > 0
        # But without a prefix cache they are not found again.
        assert swaps(0.5, prefix_caching=False) > 0

    def test_swap_needs_host_memory(self) -> None:
        with pytest.raises(ConfigError, match="swap_blocks is 0"):
            make_engine(preemption="swap")

    @pytest.mark.parametrize(
        "settings",
        [
            {"preemption": "drop"},
            {"swap_cost": -1.0},
            {"swap_cost": float("nan")},
            {"swap_cost": float("inf")},
        ],
    )
    def test_settings_are_checked(self, settings) -> None:
        with pytest.raises(ConfigError, match=next(iter(settings))):
            make_engine(**settings)


def swapped_out(num_blocks: int = 6):
    """ "b" is in host memory, "a" goes on."""
    engine, worker = make_engine(
        num_blocks=num_blocks, prefix_caching=False, preemption="swap", swap_blocks=4
    )
    for seed, request_id in enumerate("ab"):
        params = SamplingParams(max_tokens=12, seed=seed)
        engine.add_request(request_id, [1, 2, 3, 4], params)
    return engine, worker


def test_abort_while_swapped_out() -> None:
    engine, worker = swapped_out()
    while not engine.stats().host_blocks_in_use:
        engine.step()
    (output,) = engine.abort("b")
    assert output.token_ids == expected_tokens([1, 2, 3, 4], 9, 1)
    assert engine.stats().host_blocks_in_use == 0
    assert run(engine)["a"].token_ids == expected_tokens([1, 2, 3, 4], 12, 0)
    assert not worker.sequences


@pytest.mark.parametrize("before", [True, False])
def test_a_failed_swap_out_is_computed_again(before: bool) -> None:
    engine, worker = swapped_out()
    execute = worker.execute

    def broken(plan: StepPlan) -> StepResult:
        if plan.swap_out:
            if not before:
                execute(plan)
            raise Broken
        return execute(plan)

    worker.execute = broken
    with pytest.raises(Broken):
        run(engine)
    worker.execute = execute
    assert engine.stats().host_blocks_in_use == 0
    final = run(engine)
    assert final["a"].finish_reason == "error"
    assert final["b"].token_ids == expected_tokens([1, 2, 3, 4], 12, 1)
    assert (final["b"].metrics.preemptions, final["b"].metrics.swaps) == (1, 0)


def test_a_failed_swap_in_ends_the_request_and_frees_the_host() -> None:
    engine, worker = swapped_out()
    execute = worker.execute
    worker.execute = lambda plan: 1 / 0 if plan.swap_in else execute(plan)
    with pytest.raises(ZeroDivisionError):
        run(engine)
    worker.execute = execute
    assert run(engine)["b"].finish_reason == "error"
    assert engine.stats().host_blocks_in_use == 0


@pytest.mark.parametrize("num_blocks", [8, 9, 12])
def test_no_thrash_and_no_starvation(num_blocks: int) -> None:
    requests = random_requests(60, seed=3, max_prompt=10, max_tokens=22)
    _, _, final = serve(requests, num_blocks=num_blocks, preemption="swap", swap_blocks=200)
    for output in final.values():  # an admission is good for one token and a block's worth
        assert output.metrics.preemptions * 5 <= len(output.token_ids)


def test_samples_swap_too() -> None:
    rng = random.Random(1)
    engine, _ = make_engine(num_blocks=12, preemption="swap", swap_blocks=50)
    requests = {}
    for i in range(12):
        prompt = [rng.randint(1, 9) for _ in range(rng.randint(1, 12))]
        requests[f"r{i}"] = prompt
        engine.add_request(f"r{i}", prompt, SamplingParams(n=3, max_tokens=14, seed=i))
    final = run(engine)
    for i, (request_id, prompt) in enumerate(requests.items()):
        for index in range(3):
            output = final[f"{request_id}/{index}" if index else request_id]
            assert output.token_ids == expected_tokens(prompt, 14, sample_seed(i, index))
    assert engine.stats().swaps > 0
