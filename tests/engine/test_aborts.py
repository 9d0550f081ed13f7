"""Requests that their owner takes back."""

from billfish.engine.plan import StepPlan, StepResult
from billfish.sampling_params import SamplingParams
from tests.engine.fake_worker import (
    ScriptedWorker,
    expected_tokens,
    make_engine,
    run,
)

SHORT = SamplingParams(max_tokens=8)


class TestAbort:
    PARAMS = SamplingParams(max_tokens=20, seed=0)

    def check_empty(self, engine, worker) -> None:
        while engine.has_unfinished:
            assert engine.step() == []
        assert not worker.sequences
        assert engine.stats().blocks_in_use == 0

    def test_waiting_is_never_told(self) -> None:
        engine, worker = make_engine()
        engine.add_request("a", [1], self.PARAMS)
        (output,) = engine.abort("a")
        assert (output.finish_reason, output.token_ids, output.text) == ("abort", (), "")
        assert not engine.has_unfinished
        assert engine.step() == []
        assert worker.plans == []

    def test_running(self) -> None:
        engine, worker = make_engine()
        engine.add_request("a", [1], self.PARAMS)
        for _ in range(3):
            engine.step()
        (output,) = engine.abort("a")
        assert (output.finish_reason, output.new_token_ids) == ("abort", ())
        assert output.token_ids == expected_tokens([1], 3, 0)
        assert engine.stats().blocks_in_use == 0
        assert engine.has_unfinished  # the executor does not know yet
        self.check_empty(engine, worker)
        assert (worker.plans[-1].released, worker.plans[-1].work) == (("a",), ())

    def test_in_the_middle_of_its_prompt(self) -> None:
        engine, worker = make_engine(max_num_batched_tokens=4)
        engine.add_request("a", [1] * 10, self.PARAMS)
        assert engine.step() == []
        assert engine.stats().blocks_in_use == 1
        assert engine.abort("a")[0].token_ids == ()
        self.check_empty(engine, worker)

    def test_preempted(self) -> None:
        engine, worker = make_engine(num_blocks=6)
        for request_id in "ab":
            engine.add_request(request_id, [1, 2, 3, 4], self.PARAMS)
        while not engine.stats().preemptions:
            engine.step()
        (output,) = engine.abort("b")
        assert output.metrics.preemptions == 1
        assert output.token_ids == expected_tokens([1, 2, 3, 4], 9, 0)
        assert run(engine)["a"].token_ids == expected_tokens([1, 2, 3, 4], 20, 0)
        assert sum(plan.released.count("b") for plan in worker.plans) == 1

    def test_while_a_step_is_computed(self) -> None:
        engine, worker = make_engine()
        for request_id in "ab":
            engine.add_request(request_id, [1], self.PARAMS)
        got = []

        def abort(plan: StepPlan, result: StepResult) -> StepResult:
            got.extend(engine.abort("a"))
            return result

        worker.hook = abort
        (output,) = engine.step()
        assert (output.request_id, got[0].token_ids) == ("b", ())
        assert run(engine).keys() == {"b"}
        self.check_empty(engine, worker)

    def test_unknown_and_finished_are_harmless(self) -> None:
        engine, _ = make_engine()
        assert engine.abort("nobody") == []
        engine.add_request("a", [1], SamplingParams(max_tokens=1, seed=0))
        run(engine)
        stats = engine.stats()
        assert engine.abort("a") == []
        assert engine.stats() == stats

    def test_releases_held_text(self) -> None:
        engine, _ = make_engine(ScriptedWorker(a="abSTx"))
        engine.add_request("a", [1], SamplingParams(stop="STOP", max_tokens=99))
        text = "".join(output.delta for _ in range(4) for output in engine.step())
        (output,) = engine.abort("a")
        assert (text, output.delta, output.text) == ("ab", "ST", "abST")

    def test_id_can_be_used_again_at_once(self) -> None:
        engine, worker = make_engine()
        engine.add_request("a", [1], self.PARAMS)
        engine.step()
        engine.abort("a")
        engine.add_request("a", [2], SamplingParams(max_tokens=3, seed=0))
        assert run(engine)["a"].token_ids == expected_tokens([2], 3, 0)
        assert (worker.plans[1].released, len(worker.plans[1].admitted)) == (("a",), 1)
