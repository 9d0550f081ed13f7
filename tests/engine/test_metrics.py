"""What the engine writes down: of each request, and in all."""

import pytest

from billfish.engine.plan import StepPlan, StepResult
from billfish.errors import ExecutorError
from billfish.sampling_params import SamplingParams
from tests.engine.fake_worker import (
    Clock,
    FakeStep,
    make_engine,
    run,
)

SHORT = SamplingParams(max_tokens=8)


class TestMetrics:
    def test_times(self) -> None:
        clock = Clock()
        engine, worker = make_engine(clock=clock, max_num_seqs=1)

        def tick(plan: StepPlan, result: StepResult) -> StepResult:
            clock.now += 2.0
            return result

        worker.hook = tick
        clock.now = 10.0
        engine.add_request("a", [1] * 5, SamplingParams(max_tokens=4, seed=0))
        clock.now = 11.0
        engine.add_request("b", [1], SamplingParams(max_tokens=1, seed=0))
        final = run(engine)
        a, b = final["a"].metrics, final["b"].metrics
        assert (a.arrival, a.first_scheduled, a.first_token, a.finished_at) == (10, 11, 13, 19)
        assert (a.queue_time, a.ttft, a.tpot) == (1.0, 3.0, 2.0)
        assert (a.num_prompt_tokens, a.num_output_tokens, a.peak_blocks) == (5, 4, 2)
        assert (b.arrival, b.first_scheduled, b.first_token, b.finished_at) == (11, 19, 21, 21)
        assert (b.queue_time, b.ttft, b.tpot) == (8.0, 10.0, None)

    def test_preemption_keeps_the_first_times(self) -> None:
        clock = Clock()
        engine, worker = make_engine(num_blocks=6, clock=clock, prefix_caching=False)

        def tick(plan: StepPlan, result: StepResult) -> StepResult:
            clock.now += 1.0
            return result

        worker.hook = tick
        for request_id in "ab":
            engine.add_request(request_id, [1, 2, 3, 4], SamplingParams(max_tokens=12, seed=0))
        metrics = run(engine)["b"].metrics
        assert (metrics.first_scheduled, metrics.first_token, metrics.finished_at) == (0, 1, 15)
        assert (metrics.preemptions, metrics.peak_blocks) == (1, 4)

    def test_of_a_request_that_never_ran(self) -> None:
        engine, _ = make_engine()
        engine.add_request("a", [1], SHORT)
        metrics = engine.abort("a")[0].metrics
        assert (metrics.queue_time, metrics.ttft, metrics.tpot) == (None, None, None)
        assert (metrics.finished_at, metrics.peak_blocks) == (0.0, 0)

    def test_stats_by_hand(self) -> None:
        engine, _ = make_engine(num_blocks=10, block_size=16, max_num_seqs=1)
        assert engine.stats().kv_waste == 0.0
        engine.add_request("a", [1] * 17, SamplingParams(max_tokens=2, seed=0))
        engine.add_request("b", [1], SamplingParams(max_tokens=1, seed=0))
        engine.step()
        stats = engine.stats()
        assert (stats.running, stats.waiting, stats.steps) == (1, 1, 1)
        assert (stats.blocks_total, stats.blocks_free, stats.blocks_in_use) == (10, 8, 2)
        assert (stats.kv_slots_allocated, stats.kv_slots_used) == (32, 17)
        assert stats.kv_waste == 1 - 17 / 32
        run(engine)
        stats = engine.stats()
        assert (stats.running, stats.waiting, stats.blocks_in_use, stats.blocks_peak) == (
            0,
            0,
            0,
            2,
        )
        assert (stats.kv_slots_allocated, stats.kv_slots_used) == (0, 0)
        # Step 1: 17 of 32, step 2: 18 of 32, step 3 ("b"): 1 of 16, step 4 (release): nothing.
        assert stats.kv_waste == 1 - (17 + 18 + 1) / (32 + 32 + 16)
        assert (stats.steps, stats.prefill_tokens, stats.output_tokens) == (4, 18, 3)
        assert stats.finished == {"length": 2}


@pytest.mark.parametrize("overlap", [False, True])
def test_seconds_of_steps_and_of_waiting_for_the_model(overlap, monkeypatch) -> None:
    """The model's answer takes 2 seconds a step, and telling a token's bytes a half."""
    clock = Clock()
    engine, worker = make_engine(clock=clock, overlap=overlap)

    def slow(method):
        def call(*arguments):
            clock.now += 2.0
            return method(*arguments)

        return call

    def to_bytes(token: int) -> bytes:
        clock.now += 0.5
        return b"x"

    if overlap:
        monkeypatch.setattr(FakeStep, "result", slow(FakeStep.result))
    else:
        worker.execute = slow(worker.execute)
    engine._token_bytes = to_bytes
    engine.add_request("a", [1, 2, 3], SamplingParams(max_tokens=4, seed=0))
    began = clock.now
    run(engine)
    stats = engine.stats()
    assert stats.wait_seconds == 2.0 * len(worker.plans) == 2.0 * stats.steps
    assert stats.step_seconds == clock.now - began
    assert stats.step_seconds == stats.wait_seconds + 0.5 * 4


def test_waiting_is_a_part_of_the_time_of_steps_that_fail_too() -> None:
    clock = Clock()
    engine, worker = make_engine(clock=clock)

    def slow_and_wrong(plan, result):
        clock.now += 2.0
        result.token_ids["a"] = -1
        return result

    worker.hook = slow_and_wrong
    engine.add_request("a", [1], SHORT)
    with pytest.raises(ExecutorError):
        engine.step()
    stats = engine.stats()
    assert stats.step_seconds == stats.wait_seconds == 2.0


@pytest.mark.parametrize(("preemption", "swap_blocks"), [("recompute", 0), ("swap", 100)])
def test_prefill_tokens_are_the_prompts_and_what_is_computed_again(preemption, swap_blocks) -> None:
    engine, worker = make_engine(
        num_blocks=12, max_model_len=64, preemption=preemption, swap_blocks=swap_blocks,
        prefix_caching=False, max_num_seqs=8,
    )  # fmt: skip
    for i in range(6):
        engine.add_request(str(i), [i + 1] * 4, SamplingParams(max_tokens=30))
    run(engine)
    stats = engine.stats()
    assert stats.preemptions > 0
    computed = sum(work.num_tokens for plan in worker.plans for work in plan.work)
    # Every output token but the last of each request is decoded, and that once.
    assert stats.prefill_tokens == computed - (stats.output_tokens - 6)
    if preemption == "swap":
        assert stats.prefill_tokens == 24
