"""What the engine itself does with sampling options: refusals, ends, log-probabilities."""

import random
from dataclasses import replace

import pytest

from billfish.engine import ExecutorError, RequestOutput
from billfish.engine.detokenizer import StopStrings
from billfish.engine.logprobs import PromptLogprobs, TokenLogprobs
from billfish.engine.plan import Admission, Fork, StepPlan, StepResult
from billfish.errors import InvalidRequestError
from billfish.sampling_params import SamplingParams
from tests.engine.fake_worker import (
    EOS,
    VOCAB,
    FakeWorker,
    ScriptedWorker,
    expected_tokens,
    make_engine,
    run,
)
from tests.engine.test_engine import generate


class TestRefusals:
    """Named, before the engine has taken anything, and nobody else notices."""

    @pytest.mark.parametrize(
        ("option", "options", "bad_word_ids"),
        [
            ("stop_token_ids", {"stop_token_ids": [5, VOCAB]}, ()),
            ("allowed_token_ids", {"allowed_token_ids": [5, VOCAB]}, ()),
            ("logit_bias", {"logit_bias": {5: 1.0, VOCAB: 1.0}}, ()),
            ("bad_words", {"bad_words": ["x"]}, ((5,), (VOCAB,))),
            ("bad_words", {"bad_words": ["x"]}, ((5,), (-1,))),
            ("bad_words", {"bad_words": ["x"]}, ((5,), ("x",))),
            ("bad_words", {"bad_words": ["x"]}, ((5,), ())),
            ("bad_words", {"bad_words": ["x"]}, ()),
            ("bad_words", {}, ((5,),)),
            ("allowed_token_ids", {"allowed_token_ids": [EOS], "min_tokens": 1}, ()),
            (
                "allowed_token_ids",
                {"allowed_token_ids": [5, 6], "bad_words": ["x"]},
                ((5,), (6,)),
            ),
            ("min_tokens", {"max_tokens": None, "min_tokens": 200}, ()),
        ],
    )
    def test_by_name_and_without_a_trace(self, option, options, bad_word_ids) -> None:
        engine, worker = make_engine()
        neighbour = SamplingParams(max_tokens=20)
        engine.add_request("neighbour", [1, 2, 3], neighbour)
        seed = engine._requests["neighbour"][0].seed
        engine.step()
        stats = engine.stats()
        with pytest.raises(InvalidRequestError) as error:
            engine.add_request("bad", [1], SamplingParams(**options), bad_word_ids=bad_word_ids)
        assert error.value.parameter == option
        assert engine.stats() == stats
        assert engine._seeds._taken.keys() == {"neighbour"}
        assert run(engine)["neighbour"].token_ids == expected_tokens([1, 2, 3], 20, seed)
        assert all(new.request_id != "bad" for plan in worker.plans for new in plan.admitted)

    def test_what_is_just_right_is_taken(self) -> None:
        engine, worker = make_engine()
        params = SamplingParams(
            stop_token_ids=[VOCAB - 1], allowed_token_ids=[EOS, 5], logit_bias={VOCAB - 1: 1.0},
            bad_words=["x"], min_tokens=3, max_tokens=3,
        )  # fmt: skip
        engine.add_request("a", [1], params, bad_word_ids=[[5, VOCAB - 1]])
        engine.step()
        (admission,) = worker.plans[0].admitted
        assert admission.stop_ids == {EOS, VOCAB - 1}
        assert admission.bad_word_ids == ((5, VOCAB - 1),)
        assert admission.sampling is params

    def test_min_tokens_is_what_max_tokens_none_leaves(self) -> None:
        engine, _ = make_engine(max_model_len=10)
        engine.add_request("a", [1] * 4, SamplingParams(max_tokens=None, min_tokens=6))
        with pytest.raises(InvalidRequestError, match="min_tokens: 7 do not fit: 6 is the most"):
            engine.add_request("b", [1] * 4, SamplingParams(max_tokens=None, min_tokens=7))


def deltas(script: str, params: SamplingParams) -> tuple[list[str], RequestOutput]:
    engine, _ = make_engine(ScriptedWorker(a=script))
    engine.add_request("a", [1], params)
    outputs: list[RequestOutput] = []
    while engine.has_unfinished:
        outputs += engine.step()
    return [output.delta for output in outputs], outputs[-1]


class TestIncludeStop:
    def test_it_ends_the_text_and_is_streamed_at_once(self) -> None:
        params = SamplingParams(stop="STOP", include_stop_str_in_output=True, max_tokens=99)
        pieces, last = deltas("one STOP two", params)
        assert pieces == list("one STOP")
        assert (last.text, last.stop_reason, last.finish_reason) == ("one STOP", "STOP", "stop")

    def test_a_beginning_that_goes_no_further_is_plain_text(self) -> None:
        params = SamplingParams(stop="STOP", include_stop_str_in_output=True, max_tokens=7)
        assert deltas("a STxyz", params)[1].text == "a STxyz"

    def test_what_follows_in_the_same_token_is_left_out(self) -> None:
        stops = StopStrings(["STOP"], include=True)
        assert stops.push("one ST") == ("one ST", None)
        assert stops.push("OP two") == ("OP", "STOP")

    def test_the_text_of_stop_tokens_is_left_out_all_the_same(self) -> None:
        params = SamplingParams(
            stop_token_ids=[ord("c")], include_stop_str_in_output=True, max_tokens=9
        )
        assert deltas("abc", params)[1].text == "ab"


class TestMinTokens:
    @pytest.mark.parametrize(
        ("min_tokens", "text"),
        [(0, ""), (2, ""), (3, ""), (4, "ENDx"), (7, "ENDx"), (8, "ENDxENDy")],
    )
    def test_stop_strings_before_it_are_text(self, min_tokens: int, text: str) -> None:
        params = SamplingParams(stop="END", min_tokens=min_tokens, max_tokens=11)
        pieces, last = deltas("ENDxENDyEND", params)
        assert last.text == "".join(pieces) == text
        assert last.stop_reason == "END"
        assert len(last.token_ids) == len(text) + 3 >= min_tokens

    def test_one_that_begins_before_it_and_ends_after_counts_and_never_leaks(self) -> None:
        pieces, last = deltas("aEND", SamplingParams(stop="END", min_tokens=3, max_tokens=9))
        assert pieces == ["a", "", "", ""]
        assert last.stop_reason == "END"

    def test_the_end_of_one_passed_over_may_begin_the_next(self) -> None:
        # "abab" at the fourth token does not count; its last "ab" is the first of the sixth's.
        pieces, last = deltas("ababab!", SamplingParams(stop="abab", min_tokens=5, max_tokens=7))
        assert last.text == "".join(pieces) == "ab"
        assert len(last.token_ids) == 6

    def test_held_text_comes_out_when_aborted_before_it(self) -> None:
        engine, _ = make_engine(ScriptedWorker(a="é"))
        engine.add_request("a", [1], SamplingParams(stop="\ufffd", min_tokens=5, max_tokens=9))
        engine.step()
        (output,) = engine.abort("a")
        assert (output.text, output.finish_reason) == ("\ufffd", "abort")

    def test_it_reaches_the_end_at_max_tokens(self) -> None:
        output = generate("abEND", SamplingParams(stop="END", min_tokens=5, max_tokens=5))
        assert (output.text, output.finish_reason) == ("ab", "stop")


def logprobs_of(token_id: int, position: int, top: int) -> TokenLogprobs:
    """Invented, and different for every token and place."""
    best = tuple((i, -0.5 * (i + 1)) for i in range(top))
    return TokenLogprobs(token_id, -token_id - position / 1000, position, best)


class LogprobsWorker(FakeWorker):
    """Reports log-probabilities as the contract of StepResult says."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.asked: dict[str, Admission] = {}

    def _admit(self, new: Admission) -> None:
        super()._admit(new)
        self.asked[new.request_id] = new

    def _fork(self, fork: Fork, plan: StepPlan) -> None:
        super()._fork(fork, plan)
        self.asked[fork.request_id] = self.asked[fork.source]

    def execute(self, plan: StepPlan) -> StepResult:
        result = super().execute(plan)
        for request_id in result.token_ids:
            top = self.asked[request_id].sampling.logprobs
            tokens = self.sequences[request_id].token_ids
            if top is not None:
                result.logprobs[request_id] = logprobs_of(tokens[-1], len(tokens) - 1, top)
        for work in plan.work:
            asked = self.asked[work.request_id]
            tokens = self.sequences[work.request_id].token_ids
            top = asked.sampling.prompt_logprobs
            if top is None or len(asked.token_ids) > asked.num_prompt_tokens:
                continue
            end = min(work.start + work.num_tokens + 1, asked.num_prompt_tokens)
            found = tuple(logprobs_of(tokens[i], i, top) for i in range(work.start + 1, end))
            if found:
                result.prompt_logprobs[work.request_id] = PromptLogprobs(work.start + 1, found)
        return result


class TestLogprobs:
    def test_each_output_has_those_of_its_tokens(self) -> None:
        engine, _ = make_engine(LogprobsWorker(64, 4))
        engine.add_request("a", [1, 2], SamplingParams(max_tokens=4, logprobs=2, seed=0))
        engine.add_request("b", [1, 2], SamplingParams(max_tokens=4, seed=0))
        outputs: list[RequestOutput] = []
        while engine.has_unfinished:
            outputs += engine.step()
        mine = [output for output in outputs if output.request_id == "a"]
        expected = [logprobs_of(token, 2 + i, 2) for i, token in enumerate(mine[-1].token_ids)]
        for i, output in enumerate(mine):  # read late, yet of their moment
            assert output.new_logprobs == (expected[i],)
            assert output.logprobs == tuple(expected[: i + 1])
            assert output.prompt_logprobs is None
        others = [output for output in outputs if output.request_id == "b"]
        assert {output.logprobs for output in others} == {None}
        assert {output.new_logprobs for output in others} == {None}

    def test_an_abort_has_no_new_ones(self) -> None:
        engine, _ = make_engine(LogprobsWorker(64, 4))
        engine.add_request("a", [1, 2], SamplingParams(max_tokens=4, logprobs=0))
        engine.step()
        (output,) = engine.abort("a")
        assert output.new_logprobs == ()
        assert output.logprobs is not None
        assert len(output.logprobs) == 1

    @pytest.mark.parametrize("budget", [1, 3, 100])
    def test_of_the_prompt_however_it_is_cut(self, budget: int) -> None:
        engine, _ = make_engine(LogprobsWorker(64, 4), max_num_batched_tokens=budget)
        prompt = [9, 8, 7, 6, 5, 4, 3]
        params = SamplingParams(max_tokens=2, prompt_logprobs=1)
        engine.add_request("a", prompt, params)
        engine.add_request("one", [7], params)
        final = run(engine)
        expected = [logprobs_of(token, i, 1) for i, token in enumerate(prompt)][1:]
        assert final["a"].prompt_logprobs == (None, *expected)
        assert final["a"].logprobs is None
        assert final["one"].prompt_logprobs == (None,)

    def test_preempted_at_any_moment_they_are_the_same(self) -> None:
        engine, worker = make_engine(
            LogprobsWorker(14, 2), num_blocks=14, block_size=2, max_num_batched_tokens=5
        )
        rng = random.Random(1)
        prompts = {f"r{i}": [rng.randrange(1, VOCAB) for _ in range(9)] for i in range(6)}
        params = SamplingParams(max_tokens=12, logprobs=1, prompt_logprobs=2)
        for i, (name, prompt) in enumerate(prompts.items()):
            engine.add_request(name, prompt, replace(params, seed=i))
        final = run(engine)
        assert engine.stats().preemptions > 0
        assert any(new.token_ids[9:] for plan in worker.plans for new in plan.admitted)
        for i, (name, prompt) in enumerate(prompts.items()):
            tokens = expected_tokens(prompt, 12, i)
            assert final[name].token_ids == tokens
            assert final[name].logprobs == tuple(
                logprobs_of(token, 9 + k, 1) for k, token in enumerate(tokens)
            )
            expected = [logprobs_of(token, k, 2) for k, token in enumerate(prompt)][1:]
            assert final[name].prompt_logprobs == (None, *expected)

    def test_prompt_logits_are_needed_until_all_are_there(self) -> None:
        engine, _ = make_engine(LogprobsWorker(64, 4), max_num_batched_tokens=3)
        engine.add_request("a", [1, 2, 3, 4, 5], SamplingParams(max_tokens=9, prompt_logprobs=0))
        engine.add_request("b", [1, 2, 3, 4, 5], SamplingParams(max_tokens=9, logprobs=0))
        (a,), (b,) = engine._requests["a"], engine._requests["b"]
        assert a.needs_prompt_logits
        engine.step()
        assert a.needs_prompt_logits
        engine.step()
        assert not a.needs_prompt_logits
        assert not b.needs_prompt_logits

    def test_what_was_computed_twice_is_taken_once(self) -> None:
        engine, _ = make_engine()
        engine.add_request("a", [1, 2, 3, 4, 5], SamplingParams(max_tokens=9, prompt_logprobs=0))
        (request,) = engine._requests["a"]
        each = [logprobs_of(token, token - 1, 0) for token in (1, 2, 3, 4, 5)]
        request.add_prompt_logprobs(PromptLogprobs(1, tuple(each[1:4])))
        request.add_prompt_logprobs(PromptLogprobs(1, tuple(each[1:3])))
        request.add_prompt_logprobs(PromptLogprobs(3, tuple(each[3:5])))
        assert request.record.prompt_logprobs == [None, *each[1:]]

    @pytest.mark.parametrize("asked", ["logprobs", "prompt_logprobs"])
    def test_a_worker_that_leaves_them_out_breaks_the_contract(self, asked: str) -> None:
        engine, _ = make_engine()
        engine.add_request("a", [1, 2], SamplingParams(max_tokens=9, **{asked: 1}))
        with pytest.raises(ExecutorError, match="no log-probabilities for 'a'"):
            engine.step()
        assert run(engine)["a"].finish_reason == "error"
        assert engine.stats().blocks_in_use == 0
