"""What the step loop promises to its callers: how requests end, and what idle means."""

import subprocess
import sys

import pytest

from billfish.engine import InvariantError
from billfish.engine.plan import StepPlan
from billfish.sampling_params import SamplingParams
from tests.engine.fake_worker import (
    EOS,
    ScriptedWorker,
    make_engine,
    run,
)

SHORT = SamplingParams(max_tokens=8)


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


def test_outputs_can_be_kept_in_sets() -> None:
    engine, _ = make_engine(ScriptedWorker(a="xyz"))
    engine.add_request("a", [1, 2, 3], SamplingParams(max_tokens=3))
    outputs = [output for _ in range(3) for output in engine.step()]
    assert len({*outputs, *outputs}) == 3
    assert {output: output.text for output in outputs}[outputs[1]] == "xy"


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

    def test_a_large_pool_is_checked_block_by_block_only_now_and_then(self, monkeypatch) -> None:
        engine, _ = make_engine(num_blocks=20_000)
        checks = []
        original = engine._pool.check

        def check(tables) -> None:
            checks.append(engine.num_steps)
            original(tables)

        monkeypatch.setattr(engine._pool, "check", check)
        for number in range(30):
            engine.add_request(str(number), [1], SamplingParams(max_tokens=1, seed=0))
            run(engine)
        assert checks == [20, 40, 60]  # a step for the token, a step to release
        engine._pool._free.pop()
        with pytest.raises(InvariantError, match="free"):
            engine._check_if_idle()

    def test_a_lost_block_is_noticed_after_an_abort_too(self) -> None:
        engine, _ = make_engine()
        engine.add_request("a", [1], SHORT)
        engine._pool._free.pop()
        with pytest.raises(InvariantError):
            engine.abort("a")


def test_the_engine_imports_no_torch() -> None:
    code = (
        "import sys, billfish.engine, billfish.engine.plan; "
        "sys.exit(', '.join({'torch', 'triton', 'numpy'} & set(sys.modules)) or 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
