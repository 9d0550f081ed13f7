"""Steps that fail: what the executor raises, and answers that do not fit the plan."""

import pytest

from billfish.config import SchedulerConfig
from billfish.engine import Engine, ExecutorError
from billfish.engine.plan import StepPlan, StepResult
from billfish.errors import InvalidRequestError
from billfish.sampling_params import SamplingParams
from tests.engine.fake_worker import (
    VOCAB,
    ScriptedWorker,
    expected_tokens,
    make_engine,
    run,
)


def engine_with_a_hole() -> Engine:
    """Token 200, which "b" gets second, has no bytes in the vocabulary."""

    def holed(token_id: int) -> bytes:
        if token_id == 200:
            raise KeyError(token_id)
        return bytes((token_id,))

    return Engine(
        ScriptedWorker(a="xyz", b=[*b"x", 200]), num_blocks=64, block_size=4, vocab_size=VOCAB,
        max_model_len=64, eos_token_ids=(), token_bytes=holed, scheduler=SchedulerConfig(),
    )  # fmt: skip


class Broken(Exception):
    pass


def fail_at(step: int, error: BaseException):
    def hook(plan: StepPlan, result: StepResult) -> StepResult:
        if plan.step == step:
            raise error
        return result

    return hook


def answer(change):
    """A hook that lets `change` spoil the tokens of step 2."""

    def hook(plan: StepPlan, result: StepResult) -> StepResult:
        return change(plan, dict(result.token_ids)) if plan.step == 2 else result

    return hook


class TestFailure:
    def start(self):
        """Two running, two waiting; "d" would be next."""
        engine, worker = make_engine(max_num_seqs=2)
        for seed, request_id in enumerate("abcd"):
            engine.add_request(request_id, [1, 2], SamplingParams(max_tokens=6, seed=seed))
        return engine, worker

    @pytest.mark.parametrize(
        "error", [Broken("gone"), KeyboardInterrupt()], ids=["error", "ctrl-c"]
    )
    def test_running_requests_fail_and_the_rest_goes_on(self, error) -> None:
        engine, worker = self.start()
        worker.hook = fail_at(2, error)
        outputs = [engine.step(), engine.step()]
        with pytest.raises(type(error)) as caught:
            engine.step()
        assert caught.value is error
        stats = engine.stats()
        assert (stats.running, stats.waiting, stats.blocks_in_use, stats.steps) == (0, 2, 0, 2)

        failed = engine.step()
        assert [output.request_id for output in failed] == ["a", "b"]
        for seed, output in enumerate(failed):
            assert output.finish_reason == "error"
            assert output.new_token_ids == ()
            assert output.token_ids == expected_tokens([1, 2], 2, seed)
            assert output.text == "".join(o[seed].delta for o in outputs) + output.delta
        assert len(worker.plans) == 3  # nothing was computed to deliver them

        final = run(engine)
        assert worker.plans[3].released == ("a", "b")
        assert {i: o.token_ids for i, o in final.items()} == {
            "c": expected_tokens([1, 2], 6, 2),
            "d": expected_tokens([1, 2], 6, 3),
        }
        assert not worker.sequences
        assert engine.stats().finished == {"error": 2, "length": 2}

    @pytest.mark.parametrize(
        ("change", "match"),
        [
            (lambda plan, tokens: None, "step 2 was answered with None"),
            (lambda plan, tokens: StepResult(1, tokens), "step 2 was answered with .*step=1"),
            (lambda plan, tokens: StepResult(2, {"a": 1}), r"no token for \['b'\]"),
            (lambda plan, tokens: StepResult(2, {**tokens, "c": 1}), r"not asked for \['c'\]"),
            (lambda plan, tokens: StepResult(2, {**tokens, 7: 1, "c": 1}), r"asked for \[7, 'c'\]"),
            (lambda plan, tokens: StepResult(2, tokens, {"c": "NaN"}), r"not asked for \['c'\]"),
            (lambda plan, tokens: StepResult(2, tokens, {"b": "NaN"}), "step 2"),
            (lambda plan, tokens: StepResult(2, {**tokens, "b": VOCAB}), f"{VOCAB} for 'b'"),
            (lambda plan, tokens: StepResult(2, {**tokens, "b": -1}), "-1 for 'b'"),
            (lambda plan, tokens: StepResult(2, {**tokens, "b": True}), "True for 'b'"),
            (lambda plan, tokens: StepResult(2, {**tokens, "b": 1.0}), r"1\.0 for 'b'"),
        ],
    )
    def test_a_wrong_answer_is_a_failure(self, change, match: str) -> None:
        engine, worker = self.start()
        worker.hook = answer(change)
        engine.step(), engine.step()
        with pytest.raises(ExecutorError, match=match):
            engine.step()
        final = run(engine)
        assert {i: o.finish_reason for i, o in final.items()} == {
            "a": "error", "b": "error", "c": "length", "d": "length",
        }  # fmt: skip
        assert len(final["a"].token_ids) == 2  # no token of a step that failed

    def test_a_request_without_a_token_fails_alone(self) -> None:
        engine, worker = self.start()
        worker.hook = answer(lambda plan, tokens: StepResult(2, {"a": tokens["a"]}, {"b": "NaN"}))
        final = run(engine)
        assert {i: (o.finish_reason, o.stop_reason) for i, o in final.items()} == {
            "a": ("length", None), "b": ("error", "NaN"), "c": ("length", None),
            "d": ("length", None),
        }  # fmt: skip
        assert final["a"].token_ids == expected_tokens([1, 2], 6, 0)
        assert final["b"].token_ids == expected_tokens([1, 2], 2, 1)
        assert not worker.sequences
        assert engine.stats().blocks_in_use == 0

    def test_failure_before_the_executor_learns_anything(self) -> None:
        """What was to be released in the failed plan is released in the next."""
        engine, worker = make_engine(max_num_seqs=1)
        for request_id in "abc":
            engine.add_request(request_id, [1], SamplingParams(max_tokens=1, seed=0))
        engine.step()
        execute, worker.execute = worker.execute, lambda plan: 1 / 0
        with pytest.raises(ZeroDivisionError):
            engine.step()  # was to release "a" and admit "b"
        worker.execute = execute
        assert worker.sequences.keys() == {"a"}
        assert {i: o.finish_reason for i, o in run(engine).items()} == {"b": "error", "c": "length"}
        assert worker.plans[1].released == ("a", "b")
        assert not worker.sequences

    def test_a_release_that_fails_is_tried_again(self) -> None:
        engine, worker = make_engine()
        engine.add_request("a", [1], SamplingParams(max_tokens=1, seed=0))
        engine.step()
        execute, worker.execute = worker.execute, lambda plan: 1 / 0
        with pytest.raises(ZeroDivisionError):
            engine.step()
        worker.execute = execute
        assert engine.has_unfinished
        assert run(engine) == {}
        assert not worker.sequences

    def test_a_preempted_request_survives(self) -> None:
        engine, worker = make_engine(num_blocks=6, prefix_caching=False)
        for request_id in "ab":
            engine.add_request(request_id, [1, 2, 3, 4], SamplingParams(max_tokens=12, seed=0))
        worker.hook = fail_at(9, Broken())  # the step in which "b" is preempted
        for _ in range(9):
            engine.step()
        with pytest.raises(Broken):
            engine.step()
        final = run(engine)
        assert final["a"].finish_reason == "error"
        assert final["b"].token_ids == expected_tokens([1, 2, 3, 4], 12, 0)
        assert final["b"].metrics.preemptions == 1

    def test_an_id_is_in_use_until_its_last_output(self) -> None:
        engine, worker = self.start()
        worker.hook = fail_at(0, Broken())
        with pytest.raises(Broken):
            engine.step()
        with pytest.raises(InvalidRequestError, match="in use"):
            engine.add_request("a", [1], SamplingParams())
        engine.step()
        engine.add_request("a", [1], SamplingParams(max_tokens=1, seed=0))
        assert run(engine)["a"].token_ids == expected_tokens([1], 1, 0)

    def test_abort_takes_the_output_that_was_to_come(self) -> None:
        engine, worker = self.start()
        worker.hook = fail_at(1, Broken())
        engine.step()
        with pytest.raises(Broken):
            engine.step()
        (output,) = engine.abort("b")
        assert (output.finish_reason, len(output.token_ids)) == ("error", 1)
        assert engine.abort("b") == []
        assert [output.request_id for output in engine.step()] == ["a"]

    def test_failure_while_postprocessing_loses_no_output(self) -> None:
        """A vocabulary with a hole: the tokens that were fine are delivered before the error."""

        engine = engine_with_a_hole()
        engine.add_request("a", [1], SamplingParams(max_tokens=2))
        engine.add_request("b", [1], SamplingParams(max_tokens=9))
        engine.step()
        with pytest.raises(KeyError):
            engine.step()
        final = run(engine)
        assert (final["a"].finish_reason, final["a"].text) == ("length", "xy")
        assert (final["b"].finish_reason, final["b"].text) == ("error", "x")


def test_an_id_used_again_is_released_once_after_its_step_failed() -> None:
    engine, worker = make_engine()
    engine.add_request("a", [1], SamplingParams(max_tokens=1, seed=0))
    engine.step()
    engine.add_request("a", [1], SamplingParams(max_tokens=3, seed=0))
    worker.hook = fail_at(1, Broken("gone"))
    with pytest.raises(Broken):
        engine.step()
    assert run(engine)["a"].finish_reason == "error"
    assert worker.plans[-1].released == ("a",)
    assert not worker.sequences


def test_what_is_not_delivered_yet_is_returned_by_abort_in_order() -> None:
    """A token came before the step failed: its output, and then the one that says so."""

    engine = engine_with_a_hole()
    for name in "ab":
        engine.add_request(name, [1], SamplingParams(max_tokens=9))
    (first, _) = engine.step()
    with pytest.raises(KeyError):
        engine.step()
    outputs = engine.abort("a")
    assert [output.finish_reason for output in outputs] == [None, "error"]
    assert first.delta + "".join(output.delta for output in outputs) == outputs[-1].text == "xy"
    assert [output.request_id for output in engine.step()] == ["b"]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_failed_step_counts_for_nothing(overlap) -> None:
    engine, worker = make_engine(overlap=overlap)
    prompt = list(range(1, 11))
    engine.add_request("a", prompt, SamplingParams(max_tokens=3, seed=0))
    run(engine)
    counted = (
        "prefill_tokens", "output_tokens", "prefix_queries", "prefix_hits", "forks",
        "block_copies", "steps",
    )  # fmt: skip
    before = {name: getattr(engine.stats(), name) for name in counted}
    assert before["prefill_tokens"] == before["prefix_queries"] == 10
    engine.add_request("b", prompt, SamplingParams(max_tokens=3, n=3, seed=0))
    worker.hook = fail_at(len(worker.plans), Broken("gone"))
    with pytest.raises(Broken):
        run(engine)
    assert {name: getattr(engine.stats(), name) for name in counted} == before
    worker.hook = fail_at(-1, Broken())
    run(engine)
    engine.add_request("c", prompt, SamplingParams(max_tokens=3, n=3, seed=0))
    run(engine)
    after = engine.stats()
    assert after.forks == 2
    assert after.prefix_queries == 20
    assert after.prefix_hits == 8
    assert after.block_copies == 2
