"""Every option is checked when SamplingParams is made."""

import math

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
        ("stop_token_ids", list(range(256))),
    ],
)  # fmt: skip
def test_limits_are_allowed(option: str, value: object) -> None:
    params = SamplingParams(**{option: value})
    assert getattr(params, option) == (tuple(value) if isinstance(value, list) else value)


def test_one_stop_string_is_a_tuple_of_one() -> None:
    assert SamplingParams(stop="END").stop == ("END",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")


def test_unknown_options_are_refused() -> None:
    with pytest.raises(TypeError, match="beam_width"):
        SamplingParams(beam_width=4)
