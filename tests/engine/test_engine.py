"""What the step loop promises to its callers."""

import subprocess
import sys

import pytest

from billfish.config import SchedulerConfig
from billfish.engine import Engine, ExecutorError, InvariantError
from billfish.engine.plan import StepPlan, StepResult
from billfish.errors import CapacityError, ConfigError, InvalidRequestError
from billfish.sampling_params import SamplingParams
from tests.engine.fake_worker import (
    EOS,
    VOCAB,
    Clock,
    FakeWorker,
    expected_tokens,
    make_engine,
    run,
    token_bytes,
)

SHORT = SamplingParams(max_tokens=8)


class ScriptedWorker:
    """Answers every request with the next token of its script."""

    def __init__(self, **scripts: str | bytes | list[int]) -> None:
        self.scripts = {
            name: list(script.encode() if isinstance(script, str) else script)
            for name, script in scripts.items()
        }
        self.plans: list[StepPlan] = []

    def execute(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        return StepResult(
            plan.step, {w.request_id: self.scripts[w.request_id].pop(0) for w in plan.work}
        )


def generate(script: str | bytes | list[int], params: SamplingParams, **settings):
    engine, _ = make_engine(ScriptedWorker(a=script), **settings)
    engine.add_request("a", [1, 2, 3], params)
    return run(engine)["a"]


class TestFinish:
    def test_max_tokens(self) -> None:
        output = generate("abcdef", SamplingParams(max_tokens=3))
        assert (output.finish_reason, output.stop_reason, output.text) == ("length", None, "abc")

    def test_max_model_len(self) -> None:
        output = generate("abcdef", SamplingParams(max_tokens=None), max_model_len=7)
        assert (output.finish_reason, output.text) == ("length", "abcd")

    def test_max_tokens_none_stops_where_the_cache_ends(self) -> None:
        output = generate("a" * 99, SamplingParams(max_tokens=None), num_blocks=2, block_size=4)
        # Eight slots: three of the prompt and five generated; the sixth needs none.
        assert (output.finish_reason, output.text) == ("length", "a" * 6)

    def test_end_of_sequence_is_a_token_but_no_text(self) -> None:
        output = generate([97, EOS, 98], SHORT)
        assert (output.finish_reason, output.stop_reason, output.text) == ("stop", EOS, "a")
        assert output.token_ids == (97, EOS)

    def test_ignore_eos_goes_on(self) -> None:
        params = SamplingParams(max_tokens=3, ignore_eos=True)
        output = generate([97, EOS, 98], params)
        assert (output.finish_reason, output.text) == ("length", "ab")
        assert output.token_ids == (97, EOS, 98)

    def test_stop_token_ids(self) -> None:
        params = SamplingParams(stop_token_ids=(99,), ignore_eos=True, max_tokens=9)
        output = generate("abc", params)
        assert (output.finish_reason, output.stop_reason, output.text) == ("stop", 99, "ab")
        assert output.token_ids == (97, 98, 99)

    def test_stop_string(self) -> None:
        output = generate("one STOP two", SamplingParams(stop="STOP", max_tokens=99))
        assert (output.finish_reason, output.stop_reason, output.text) == ("stop", "STOP", "one ")
        assert output.new_token_ids == (ord("P"),)

    def test_stop_string_on_the_last_token_allowed(self) -> None:
        output = generate("abc", SamplingParams(stop="bc", max_tokens=3))
        assert (output.finish_reason, output.stop_reason, output.text) == ("stop", "bc", "a")

    def test_held_text_is_released_at_the_end(self) -> None:
        for script, reason in (("abST", "length"), ([*b"abST", EOS], "stop")):
            output = generate(script, SamplingParams(stop="STOP", max_tokens=len(script)))
            assert (output.finish_reason, output.text) == (reason, "abST")

    def test_half_a_character_at_the_end_can_complete_a_stop_string(self) -> None:
        output = generate("🐟".encode()[:2], SamplingParams(stop="\ufffd", max_tokens=2))
        assert (output.finish_reason, output.stop_reason, output.text) == ("stop", "\ufffd", "")

    def test_streamed_emoji(self) -> None:
        engine, _ = make_engine(ScriptedWorker(a="é🐟!"))
        engine.add_request("a", [1], SamplingParams(max_tokens=7))
        deltas = []
        while engine.has_unfinished:
            deltas += [output.delta for output in engine.step()]
        assert deltas == ["", "é", "", "", "", "🐟", "!"]


def test_an_output_keeps_its_moment() -> None:
    """Tokens and text are read late, yet are those of the step that made the output."""
    engine, _ = make_engine(ScriptedWorker(a="abc"))
    engine.add_request("a", [1, 2], SamplingParams(max_tokens=3))
    outputs = []
    while engine.has_unfinished:
        outputs += engine.step()
    assert [output.text for output in outputs] == ["a", "ab", "abc"]
    assert [output.token_ids for output in outputs] == [(97,), (97, 98), (97, 98, 99)]
    assert [output.finished for output in outputs] == [False, False, True]
    assert {output.prompt_token_ids for output in outputs} == {(1, 2)}


class TestRefusals:
    """A refused request leaves no trace: nothing queued, nothing counted, no seed drawn."""

    def refuse(self, error, request_id, prompt, params, match, **settings) -> None:
        engine, _ = make_engine(**settings)
        state, stats = engine._random.getstate(), engine.stats()
        with pytest.raises(error, match=match):
            engine.add_request(request_id, prompt, params)
        assert engine.stats() == stats
        assert engine._random.getstate() == state
        assert not engine.has_unfinished
        assert engine.step() == []

    @pytest.mark.parametrize("request_id", ["", None, 7, b"a", "a\0"])
    def test_request_id(self, request_id) -> None:
        self.refuse(InvalidRequestError, request_id, [1], SHORT, "request_id")

    @pytest.mark.parametrize(
        ("prompt", "match"),
        [
            ([], "must not be empty"),
            ((), "must not be empty"),
            (None, "got NoneType"),
            ("hello", "got str"),
            (b"hello", "got bytes"),
            (7, "got int"),
            ({1, 2}, "got set"),
            ([1, True], "got True at index 1"),
            ([1, 2.0], r"got 2\.0 at index 1"),
            ([1, "2"], "got '2' at index 1"),
            ([1, None], "got None at index 1"),
            ([1, -1], "-1 at index 1"),
            ([1, 2, VOCAB], rf"{VOCAB} at index 2 .* 0\.\.{VOCAB - 1}"),
            ([2**70], str(2**70)),
        ],
    )
    def test_prompt(self, prompt, match: str) -> None:
        self.refuse(InvalidRequestError, "a", prompt, SHORT, f"prompt_.*{match}")

    def test_params(self) -> None:
        self.refuse(InvalidRequestError, "a", [1], {"max_tokens": 3}, "params")
        self.refuse(InvalidRequestError, "a", [1], None, "params")

    def test_stop_token_ids_outside_the_vocabulary(self) -> None:
        params = SamplingParams(stop_token_ids=(3, VOCAB), max_tokens=9)
        self.refuse(InvalidRequestError, "a", [1], params, f"stop_token_ids: .*{VOCAB} at index 1")

    def test_prompt_as_long_as_the_model_allows(self) -> None:
        for max_tokens in (1, None):
            params = SamplingParams(max_tokens=max_tokens)
            match = "prompt has 128 .* max_model_len is 128 .* at most 127 tokens"
            self.refuse(CapacityError, "a", [1] * 128, params, match)
            engine, _ = make_engine()
            engine.add_request("a", [1] * 127, params)
            assert len(run(engine)["a"].token_ids) == 1

    def test_max_tokens_beyond_the_model(self) -> None:
        match = r"100 prompt tokens \+ max_tokens 29 = 129 .* max_model_len is 128 .* at most 28"
        self.refuse(CapacityError, "a", [1] * 100, SamplingParams(max_tokens=29), match)
        engine, _ = make_engine()
        engine.add_request("a", [1] * 100, SamplingParams(max_tokens=28, seed=0))
        assert len(run(engine)["a"].token_ids) == 28

    def test_prompt_beyond_the_cache(self) -> None:
        match = r"prompt has 13 .* KV cache holds 12 tokens \(3 blocks of 4\): .* at most 12"
        for max_tokens in (1, None):
            params = SamplingParams(max_tokens=max_tokens)
            self.refuse(CapacityError, "a", [1] * 13, params, match, num_blocks=3)
            engine, _ = make_engine(num_blocks=3)
            engine.add_request("a", [1] * 12, params)
            assert len(run(engine)["a"].token_ids) == 1

    def test_max_tokens_beyond_the_cache(self) -> None:
        match = r"10 prompt tokens \+ max_tokens 4 = 14 .* holds 12 .* max_tokens of at most 3"
        params = SamplingParams(max_tokens=4)
        self.refuse(CapacityError, "a", [1] * 10, params, match, num_blocks=3)
        engine, _ = make_engine(num_blocks=3)
        engine.add_request("a", [1] * 10, SamplingParams(max_tokens=3, seed=0))
        assert len(run(engine)["a"].token_ids) == 3

    def test_scheduler_setting_lowers_max_model_len(self) -> None:
        params = SamplingParams(max_tokens=8)
        self.refuse(CapacityError, "a", [1] * 3, params, "max_model_len is 10", max_model_len=10)
        config = SchedulerConfig(max_model_len=10)
        engine = Engine(
            FakeWorker(64, 4), num_blocks=64, block_size=4, vocab_size=VOCAB, max_model_len=128,
            eos_token_ids=(), token_bytes=token_bytes, scheduler=config,
        )  # fmt: skip
        with pytest.raises(CapacityError, match="max_model_len is 10"):
            engine.add_request("a", [1] * 3, params)

    def test_a_huge_prompt_is_refused_unread(self) -> None:
        class Unread(list):
            def __iter__(self):
                raise AssertionError("read")

        self.refuse(CapacityError, "a", Unread([1] * 1000), SHORT, "1000 tokens")

    def test_a_vocabulary_with_a_hole_under_the_prompt(self) -> None:
        engine, _ = make_engine()
        state = engine._random.getstate()
        engine._token_bytes = {}.__getitem__
        with pytest.raises(KeyError):
            engine.add_request("a", [1], SHORT)
        assert not engine.has_unfinished
        assert engine._random.getstate() == state

    def test_too_many_waiting(self) -> None:
        engine, _ = make_engine(max_waiting=2, max_num_seqs=1)
        params = SamplingParams(max_tokens=2, seed=0)
        engine.add_request("a", [1], params)
        engine.add_request("b", [1], params)
        stats = engine.stats()
        with pytest.raises(CapacityError, match="2 requests are waiting and max_waiting is 2"):
            engine.add_request("c", [1], params)
        assert engine.stats() == stats
        engine.step()
        engine.add_request("c", [1], params)
        assert run(engine).keys() >= {"b", "c"}

    def test_id_in_use(self) -> None:
        engine, _ = make_engine(max_num_seqs=1)
        params = SamplingParams(max_tokens=2, seed=0)
        for request_id in "ab":
            engine.add_request(request_id, [1], params)
        engine.step()
        for request_id in "ab":  # one running, one waiting
            with pytest.raises(InvalidRequestError, match="in use"):
                engine.add_request(request_id, [1], params)
        assert run(engine).keys() == {"a", "b"}
        engine.add_request("a", [1], params)  # free again
        assert run(engine)["a"].token_ids == expected_tokens([1], 2, 0)

    def test_a_refusal_does_not_touch_neighbours(self) -> None:
        engine, _ = make_engine()
        engine.add_request("a", [1, 2], SamplingParams(max_tokens=9, seed=4))
        for prompt in ([], [VOCAB], [1] * 500):
            engine.step()
            with pytest.raises((InvalidRequestError, CapacityError)):
                engine.add_request("bad", prompt, SHORT)
        assert run(engine)["a"].token_ids == expected_tokens([1, 2], 9, 4)


@pytest.mark.parametrize(
    "settings",
    [
        {"num_blocks": 0},
        {"block_size": 0},
        {"vocab_size": 0},
        {"max_model_len": 0},
        {"eos_token_ids": (VOCAB,)},
        {"eos_token_ids": (-1,)},
    ],
)
def test_engine_settings_are_checked(settings) -> None:
    with pytest.raises(ConfigError):
        make_engine(ScriptedWorker(), **settings)


class TestSeeds:
    def seeds(self, seed: int | None, given: tuple[int | None, ...]) -> list[int]:
        engine, worker = make_engine(seed=seed)
        for i, one in enumerate(given):
            engine.add_request(f"r{i}", [1], SamplingParams(max_tokens=1, seed=one))
        engine.step()
        return [new.seed for new in worker.plans[0].admitted]

    def test_given_seeds_are_passed_on(self) -> None:
        assert self.seeds(0, (7, -(2**63), 2**64 - 1)) == [7, -(2**63), 2**64 - 1]

    def test_drawn_seeds_follow_the_engine(self) -> None:
        drawn = self.seeds(5, (None, None))
        assert drawn == self.seeds(5, (None, None)) != self.seeds(6, (None, None))
        assert len(set(drawn)) == 2
        assert all(0 <= seed < 2**64 for seed in drawn)
        assert self.seeds(None, (None,)) != self.seeds(None, (None,))

    def test_a_given_seed_does_not_shift_those_of_others(self) -> None:
        assert self.seeds(5, (1, None))[1] == self.seeds(5, (None, None))[0]


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
            engine.add_request("a", [1], SHORT)
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

        def holed(token_id: int) -> bytes:
            if token_id == 200:
                raise KeyError(token_id)
            return bytes((token_id,))

        engine = Engine(
            ScriptedWorker(a="xyz", b=[*b"x", 200]), num_blocks=64, block_size=4, vocab_size=VOCAB,
            max_model_len=64, eos_token_ids=(), token_bytes=holed, scheduler=SchedulerConfig(),
        )  # fmt: skip
        engine.add_request("a", [1], SamplingParams(max_tokens=2))
        engine.add_request("b", [1], SamplingParams(max_tokens=9))
        engine.step()
        with pytest.raises(KeyError):
            engine.step()
        final = run(engine)
        assert (final["a"].finish_reason, final["a"].text) == ("length", "xy")
        assert (final["b"].finish_reason, final["b"].text) == ("error", "x")


class TestIdle:
    def test_the_executor_forgets_everything(self) -> None:
        engine, worker = make_engine()
        engine.add_request("a", [1], SamplingParams(max_tokens=2, seed=0))
        run(engine)
        assert not worker.sequences
        assert worker.plans[-1] == StepPlan(2, released=("a",))
        assert engine.step() == []
        assert len(worker.plans) == 3

    def test_a_lost_block_is_noticed(self) -> None:
        engine, _ = make_engine()
        engine.add_request("a", [1], SamplingParams(max_tokens=2, seed=0))
        engine.step()
        engine._pool._free.pop()
        with pytest.raises(InvariantError, match="free"):
            run(engine)

    def test_a_lost_block_is_noticed_after_an_abort_too(self) -> None:
        engine, _ = make_engine()
        engine.add_request("a", [1], SHORT)
        engine._pool._free.pop()
        with pytest.raises(InvariantError):
            engine.abort("a")


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
        assert (a.arrival, a.first_scheduled, a.first_token, a.finished) == (10, 11, 13, 19)
        assert (a.queue_time, a.ttft, a.tpot) == (1.0, 3.0, 2.0)
        assert (a.num_prompt_tokens, a.num_output_tokens, a.peak_blocks) == (5, 4, 2)
        assert (b.arrival, b.first_scheduled, b.first_token, b.finished) == (11, 19, 21, 21)
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
        assert (metrics.first_scheduled, metrics.first_token, metrics.finished) == (0, 1, 15)
        assert (metrics.preemptions, metrics.peak_blocks) == (1, 4)

    def test_of_a_request_that_never_ran(self) -> None:
        engine, _ = make_engine()
        engine.add_request("a", [1], SHORT)
        metrics = engine.abort("a")[0].metrics
        assert (metrics.queue_time, metrics.ttft, metrics.tpot) == (None, None, None)
        assert (metrics.finished, metrics.peak_blocks) == (0.0, 0)

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


def test_the_engine_imports_no_torch() -> None:
    code = (
        "import sys, billfish.engine, billfish.engine.plan; "
        "sys.exit(', '.join({'torch', 'triton', 'numpy'} & set(sys.modules)) or 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


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


@pytest.mark.parametrize("ids", [5, [5], "ab", [["a"]], [[True]], [[10**5000]]])
def test_token_ids_of_bad_words_are_lists_of_integers(ids) -> None:
    engine, _ = make_engine()
    with pytest.raises(InvalidRequestError, match="bad_words"):
        engine.add_request("a", [1], SamplingParams(bad_words=("x",)), bad_word_ids=ids)
    assert not engine.has_unfinished
