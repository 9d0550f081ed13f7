"""Every option is checked when SamplingParams is made."""

import copy
import math
from dataclasses import replace

import pytest

from billfish.errors import InvalidRequestError
from billfish.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("max_tokens", 0), ("max_tokens", -1), ("max_tokens", 2**31), ("max_tokens", 1.5),
        ("max_tokens", True), ("max_tokens", "8"),
        ("temperature", -0.1), ("temperature", math.nan), ("temperature", math.inf),
        ("temperature", "hot"), ("temperature", 101), ("temperature", None), ("temperature", True),
        ("top_p", 0.0), ("top_p", 1.01), ("top_p", -1), ("top_p", math.nan), ("top_p", "all"),
        ("top_k", -1), ("top_k", 1.0), ("top_k", None), ("top_k", 2**31),
        ("seed", 1.0), ("seed", 2**64), ("seed", -(2**63) - 1), ("seed", "x"), ("seed", False),
        ("stop", [""]), ("stop", [1]), ("stop", "x" * 1025), ("stop", ["a"] * 17), ("stop", 5),
        ("stop", None), ("stop", {"a": 1}),
        ("stop_token_ids", [-1]), ("stop_token_ids", [True]), ("stop_token_ids", ["1"]),
        ("stop_token_ids", 3), ("stop_token_ids", [2**31]), ("stop_token_ids", list(range(257))),
        ("ignore_eos", 1), ("ignore_eos", None),
        ("min_tokens", -1), ("min_tokens", 1.0), ("min_tokens", None), ("min_tokens", 257),
        ("min_p", -0.1), ("min_p", 1.1), ("min_p", math.nan), ("min_p", None),
        ("presence_penalty", 2.1), ("presence_penalty", -2.1), ("presence_penalty", math.nan),
        ("presence_penalty", "1"), ("frequency_penalty", 2.1), ("frequency_penalty", -2.1),
        ("frequency_penalty", math.inf), ("frequency_penalty", None),
        ("repetition_penalty", 0), ("repetition_penalty", -1.0), ("repetition_penalty", 101),
        ("repetition_penalty", math.nan), ("repetition_penalty", True),
        ("logit_bias", None), ("logit_bias", [1]), ("logit_bias", {"1": 1.0}),
        ("logit_bias", {-1: 1.0}), ("logit_bias", {1: 101.0}), ("logit_bias", {1: -101}),
        ("logit_bias", {1: math.nan}), ("logit_bias", {1: -math.inf}), ("logit_bias", {1: None}),
        ("logit_bias", {True: 1.0}), ("logit_bias", {1: "1"}), ("logit_bias", {2**31: 1.0}),
        ("logit_bias", dict.fromkeys(range(1025), 0.0)),
        ("allowed_token_ids", []), ("allowed_token_ids", [-1]), ("allowed_token_ids", ["1"]),
        ("allowed_token_ids", 5), ("allowed_token_ids", [2**31]), ("allowed_token_ids", [True]),
        ("allowed_token_ids", list(range(1025))),
        ("bad_words", [""]), ("bad_words", [1]), ("bad_words", None), ("bad_words", ["x" * 257]),
        ("bad_words", ["a"] * 257),
        ("logprobs", -1), ("logprobs", 21), ("logprobs", True), ("logprobs", 1.0),
        ("prompt_logprobs", -1), ("prompt_logprobs", 21), ("prompt_logprobs", "1"),
        ("include_stop_str_in_output", 1), ("include_stop_str_in_output", None),
        ("skip_special_tokens", 0), ("shown_special_token_ids", [-1]),
    ],
)  # fmt: skip
def test_refused_by_name(option: str, value: object) -> None:
    with pytest.raises(InvalidRequestError) as error:
        SamplingParams(**{option: value})
    assert error.value.parameter == option
    assert str(error.value).startswith(option)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("max_tokens", 1), ("max_tokens", None), ("temperature", 0), ("temperature", 1e-300),
        ("top_p", 1e-9), ("top_p", 1), ("top_k", 2**31 - 1), ("seed", -1), ("seed", 2**64 - 1),
        ("stop_token_ids", list(range(256))), ("min_tokens", 256), ("min_p", 1), ("min_p", 0.0),
        ("presence_penalty", -2), ("presence_penalty", 2), ("frequency_penalty", -2.0),
        ("repetition_penalty", 0.01), ("repetition_penalty", 100), ("logit_bias", {0: -100}),
        ("logit_bias", dict.fromkeys(range(1024), 100.0)), ("allowed_token_ids", None),
        ("allowed_token_ids", list(range(1024))), ("bad_words", ["x" * 256] * 256),
        ("logprobs", 0), ("logprobs", 20), ("prompt_logprobs", 0), ("prompt_logprobs", 20),
    ],
)  # fmt: skip
def test_limits_are_allowed(option: str, value: object) -> None:
    params = SamplingParams(**{option: value})
    assert getattr(params, option) == (tuple(value) if isinstance(value, list) else value)


def test_one_stop_string_is_a_tuple_of_one() -> None:
    assert SamplingParams(stop="END").stop == ("END",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")


def test_one_bad_word_is_a_tuple_of_one() -> None:
    assert SamplingParams(bad_words="word").bad_words == ("word",)


def test_a_bias_is_nobody_elses_to_change() -> None:
    bias = {5: 1.0}
    params = SamplingParams(logit_bias=bias)
    bias[5] = 1e9
    assert params.logit_bias == {5: 1.0}


def test_params_can_be_copied_compared_and_hashed() -> None:
    params = SamplingParams(logit_bias={5: 1.0}, allowed_token_ids=[5], bad_words=["x"], seed=1)
    assert replace(params) == params == copy.deepcopy(params)
    assert hash(replace(params)) == hash(params)
    assert replace(params, logit_bias={5: 2.0}) != params


def test_unknown_options_are_refused() -> None:
    with pytest.raises(TypeError, match="beam_width"):
        SamplingParams(beam_width=4)


@pytest.mark.parametrize("option", ["n", "max_tokens", "temperature", "top_k", "seed", "logprobs"])
def test_integers_too_long_to_print_are_refused_like_any_other(option: str) -> None:
    with pytest.raises(InvalidRequestError, match=option):
        SamplingParams(**{option: 10**5000})


def test_a_message_is_short_whatever_it_speaks_of() -> None:
    for options in ({"seed": "x" * 10**6}, {"stop": [["y"] * 10**5]}, {"logit_bias": "z" * 10**6}):
        with pytest.raises(InvalidRequestError) as error:
            SamplingParams(**options)
        assert len(str(error.value)) < 200


def test_a_stop_string_that_no_text_can_hold_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="surrogate"):
        SamplingParams(stop="a\ud800")
