"""Several samples of a prompt: they share its blocks, and each is what it would be alone."""

import pytest

from billfish.engine.plan import Fork, StepPlan, StepResult
from billfish.engine.request import sample_seed
from billfish.errors import CapacityError, InvalidRequestError
from billfish.sampling_params import SamplingParams
from tests.engine.fake_worker import expected_tokens, make_engine, run

PROMPT = [1, 2, 3, 4, 5, 6]  # a block and a half of four


def samples(n: int, max_tokens: int = 6, seed: int = 7) -> SamplingParams:
    return SamplingParams(n=n, max_tokens=max_tokens, seed=seed)


def check(final, request_id: str, prompt, params: SamplingParams) -> None:
    for index in range(params.n):
        output = final[f"{request_id}/{index}" if index else request_id]
        want = expected_tokens(prompt, params.max_tokens, sample_seed(params.seed, index))
        assert (output.request_id, output.index) == (request_id, index)
        assert (output.token_ids, output.finish_reason) == (want, "length")


class TestSeeds:
    def test_the_first_is_the_request_s_own(self) -> None:
        assert [sample_seed(seed, 0) for seed in (0, -5, 2**64 - 1)] == [0, -5, 2**64 - 1]

    def test_all_differ_and_do_not_depend_on_n(self) -> None:
        seeds = [sample_seed(3, index) for index in range(128)]
        assert len(set(seeds)) == 128
        assert all(0 <= seed < 2**64 for seed in seeds)

    def test_a_drawn_seed_is_drawn_once(self) -> None:
        def seeds(n: int) -> list[int]:
            engine, worker = make_engine(seed=4)
            engine.add_request("a", PROMPT, SamplingParams(n=n, max_tokens=1))
            engine.add_request("b", PROMPT, SamplingParams(max_tokens=1))
            engine.step()
            return [new.seed for new in worker.plans[0].admitted]

        assert seeds(3) == seeds(1)


class TestPlansByHand:
    def test_fork_share_copy_and_write(self) -> None:
        engine, worker = make_engine(prefix_caching=False)
        params = samples(3, max_tokens=4)
        engine.add_request("a", PROMPT, params)
        outputs = engine.step()
        assert [(output.request_id, output.index) for output in outputs] == [
            ("a", 0), ("a", 1), ("a", 2),
        ]  # fmt: skip
        first = worker.plans[0]
        names = ["a", "a\0001", "a\0002"]
        assert [work.num_tokens for work in first.work] == [6]  # the prompt is computed once
        assert first.forks == tuple(
            Fork(name, "a", sample_seed(7, i)) for i, name in enumerate(names) if i
        )
        assert worker.holders() == {1: 3, 2: 3}
        stats = engine.stats()
        assert (stats.blocks_in_use, stats.kv_slots_used, stats.forks) == (2, 6, 2)

        engine.step()
        second = worker.plans[1]
        # The half block is copied for the first two that write to it; the third owns it then.
        assert second.copies == ((2, 3), (2, 4))
        assert [(w.request_id, w.new_block_ids, w.replaces_last) for w in second.work] == [
            (names[0], (3,), True), (names[1], (4,), True), (names[2], (), False),
        ]  # fmt: skip
        assert worker.holders() == {1: 3, 2: 1, 3: 1, 4: 1}
        final = run(engine)
        check(final, "a", PROMPT, params)
        assert engine.stats().block_copies == 2
        assert not any(plan.copies for plan in worker.plans[2:])

    def test_full_blocks_are_never_copied(self) -> None:
        engine, worker = make_engine()
        params = samples(4)
        engine.add_request("a", PROMPT[:4], params)
        check(run(engine), "a", PROMPT[:4], params)
        assert engine.stats().block_copies == 0
        assert worker.plans[1].work[0].new_block_ids == (2,)

    def test_one_token_each_takes_no_block_of_their_own(self) -> None:
        engine, _ = make_engine(num_blocks=2)
        params = samples(8, max_tokens=1)
        engine.add_request("a", PROMPT, params)
        outputs = engine.step()
        assert len(outputs) == 8
        assert engine.stats().blocks_peak == 2
        run(engine)
        assert engine.stats().block_copies == 0


@pytest.mark.parametrize("budget", [1, 3, 64])
@pytest.mark.parametrize("seats", [1, 2, 5, 64])
@pytest.mark.parametrize("num_blocks", [4, 7, 64])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_all_samples_come_whatever_is_short(budget, seats, num_blocks, prefix_caching) -> None:
    engine, _ = make_engine(
        num_blocks=num_blocks, max_num_batched_tokens=budget, max_num_seqs=seats,
        prefix_caching=prefix_caching,
    )  # fmt: skip
    requests = {
        "a": (PROMPT, samples(5, max_tokens=9)),
        "b": ([9] * 8, samples(3, max_tokens=7, seed=1)),
        "c": ([5], samples(1, max_tokens=5, seed=2)),
        "d": ([5, 6], samples(16, max_tokens=2, seed=3)),
    }
    for request_id, (prompt, params) in requests.items():
        engine.add_request(request_id, prompt, params)
    final = run(engine, max_steps=3000)
    assert len(final) == 5 + 3 + 1 + 16
    for request_id, (prompt, params) in requests.items():
        check(final, request_id, prompt, params)
    stats = engine.stats()
    assert stats.blocks_in_use == 0
    assert stats.finished == {"length": 25}
    assert (stats.forks > 0) == (seats > 1)


def test_samples_without_a_seat_find_the_prompt_in_the_cache() -> None:
    engine, worker = make_engine(max_num_seqs=2)
    params = samples(4)
    engine.add_request("a", PROMPT, params)
    check(run(engine), "a", PROMPT, params)
    assert [len(plan.forks) for plan in worker.plans if plan.forks] == [1, 1]
    late = [new for plan in worker.plans for new in plan.admitted][1]
    assert (late.request_id, late.num_computed_tokens) == ("a\0002", 4)


@pytest.mark.parametrize("num_blocks", [5, 6, 8, 11])
def test_a_fork_is_good_for_a_block_s_worth_of_tokens(num_blocks: int) -> None:
    """No thrash: samples are forked only where they can go on for a while."""
    engine, _ = make_engine(num_blocks=num_blocks)
    requests = {f"r{i}": ([i + 1] * (i % 7 + 1), samples(4, 11, seed=i)) for i in range(12)}
    for request_id, (prompt, params) in requests.items():
        engine.add_request(request_id, prompt, params)
    final = run(engine)
    for request_id, (prompt, params) in requests.items():
        check(final, request_id, prompt, params)
    assert engine.stats().preemptions > 0
    for output in final.values():
        assert output.metrics.preemptions * 5 <= len(output.token_ids)


class TestAbort:
    def test_takes_all_samples(self) -> None:
        engine, worker = make_engine(max_num_seqs=2)
        engine.add_request("a", PROMPT, samples(4))
        engine.step(), engine.step()
        outputs = engine.abort("a")
        assert [(output.index, len(output.token_ids)) for output in outputs] == [
            (0, 2), (1, 2), (2, 0), (3, 0),
        ]  # fmt: skip
        assert all(output.finish_reason == "abort" for output in outputs)
        assert run(engine) == {}
        assert not worker.sequences
        assert engine.stats().blocks_in_use == 0
        assert engine.abort("a") == []

    def test_but_not_those_that_have_ended(self) -> None:
        engine, _ = make_engine()
        ends = expected_tokens(PROMPT, 6, sample_seed(7, 1))[0]
        assert ends != expected_tokens(PROMPT, 6, 7)[0]
        params = SamplingParams(n=2, max_tokens=6, seed=7, stop_token_ids=(ends,))
        engine.add_request("a", PROMPT, params)
        outputs = engine.step()
        assert [output.finish_reason for output in outputs] == [None, "stop"]
        assert [output.index for output in engine.abort("a")] == [0]

    def test_after_a_failed_step(self) -> None:
        engine, worker = make_engine(max_num_seqs=2)
        engine.add_request("a", PROMPT, samples(3))
        worker.hook = lambda plan, result: 1 / 0
        with pytest.raises(ZeroDivisionError):
            engine.step()
        outputs = engine.abort("a")
        assert [(o.index, o.finish_reason) for o in outputs] == [
            (0, "error"), (1, "error"), (2, "abort"),
        ]  # fmt: skip
        worker.hook = lambda plan, result: result
        assert run(engine) == {}
        assert not worker.sequences


def test_a_sample_without_a_token_fails_alone() -> None:
    engine, worker = make_engine()

    def fail_one(plan: StepPlan, result: StepResult) -> StepResult:
        tokens = dict(result.token_ids)
        failed = {"a\0001": "NaN"} if tokens.pop("a\0001", None) is not None else {}
        return StepResult(plan.step, tokens, failed)

    worker.hook = fail_one
    engine.add_request("a", PROMPT, samples(3))
    final = run(engine)
    assert [final[key].finish_reason for key in ("a", "a/1", "a/2")] == [
        "length", "error", "length",
    ]  # fmt: skip
    assert final["a/2"].token_ids == expected_tokens(PROMPT, 6, sample_seed(7, 2))


def test_metrics_of_samples() -> None:
    engine, _ = make_engine()
    engine.add_request("before", PROMPT, samples(1))
    run(engine)
    engine.add_request("a", PROMPT, samples(2))
    final = run(engine)
    first, second = final["a"].metrics, final["a/1"].metrics
    assert (first.cached_tokens, second.cached_tokens) == (4, 4)
    assert (first.shared_blocks, second.shared_blocks) == (1, 2)  # found; taken over at the fork
    assert first.peak_blocks == second.peak_blocks == 3
    assert first.first_scheduled == second.first_scheduled
    assert 0 < engine.stats().kv_saved < 0.5


def test_ids_and_queue_are_checked() -> None:
    engine, _ = make_engine(max_waiting=4)
    with pytest.raises(InvalidRequestError, match="request_id"):
        engine.add_request("a\0001", PROMPT, samples(1))
    with pytest.raises(CapacityError, match=r"0 requests are waiting and n is 5 .* is 4"):
        engine.add_request("a", PROMPT, samples(5))
    engine.add_request("a", PROMPT, samples(4))
    with pytest.raises(InvalidRequestError, match="in use"):
        engine.add_request("a", PROMPT, samples(1))
    assert engine.stats().waiting == 4


@pytest.mark.parametrize("n", [0, -1, 129, 1.0, True, "2", None])
def test_n_is_checked(n) -> None:
    with pytest.raises(InvalidRequestError, match=r"^n: "):
        SamplingParams(n=n)
    assert SamplingParams(n=128).n == 128
