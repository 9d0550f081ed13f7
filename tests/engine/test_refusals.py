"""Requests and settings that the engine refuses, and that it is as if they had never come."""

import pytest

from billfish.config import SchedulerConfig
from billfish.engine import Engine
from billfish.errors import CapacityError, ConfigError, InvalidRequestError
from billfish.sampling_params import SamplingParams
from tests.engine.fake_worker import (
    VOCAB,
    FakeWorker,
    ScriptedWorker,
    expected_tokens,
    make_engine,
    run,
    token_bytes,
)

SHORT = SamplingParams(max_tokens=8)


class TestRefusals:
    """A refused request leaves no trace: nothing queued, nothing counted, no seed drawn."""

    def refuse(self, error, request_id, prompt, params, match, **settings) -> None:
        engine, _ = make_engine(**settings)
        stats = engine.stats()
        with pytest.raises(error, match=match):
            engine.add_request(request_id, prompt, params)
        assert engine.stats() == stats
        assert not engine.has_unfinished
        assert engine.step() == []
        seeds = []
        for served in (engine, make_engine(**settings)[0]):
            served.add_request("next", [1], SamplingParams(max_tokens=1))
            seeds.append(served._requests["next"][0].seed)
        assert seeds[0] == seeds[1]

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
        engine._token_bytes = {}.__getitem__
        with pytest.raises(KeyError):
            engine.add_request("a", [1], SHORT)
        assert not engine.has_unfinished
        assert not engine._seeds._taken

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


@pytest.mark.parametrize("ids", [5, [5], "ab", [["a"]], [[True]], [[10**5000]]])
def test_token_ids_of_bad_words_are_lists_of_integers(ids) -> None:
    engine, _ = make_engine()
    with pytest.raises(InvalidRequestError, match="bad_words"):
        engine.add_request("a", [1], SamplingParams(bad_words=("x",)), bad_word_ids=ids)
    assert not engine.has_unfinished


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

    def admitted(self, engine, worker) -> list[int]:
        run(engine)
        return [new.seed for plan in worker.plans for new in plan.admitted]

    def test_requests_taken_back_before_they_start_leave_their_seeds(self) -> None:
        engine, worker = make_engine(seed=5)
        for name in "abc":
            engine.add_request(name, [1], SamplingParams(max_tokens=1))
        for name in "ca":
            engine.abort(name)
        for name in "def":
            engine.add_request(name, [1], SamplingParams(max_tokens=1))
        first, second, third, fourth = self.seeds(5, (None,) * 4)
        assert self.admitted(engine, worker) == [second, first, third, fourth]

    def test_one_that_has_started_keeps_its_seed(self) -> None:
        engine, worker = make_engine(seed=5)
        engine.add_request("a", [1], SamplingParams(max_tokens=9))
        engine.step()
        engine.abort("a")
        engine.add_request("b", [1], SamplingParams(max_tokens=1))
        assert self.admitted(engine, worker) == self.seeds(5, (None, None))
