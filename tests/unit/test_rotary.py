"""Tables of angles: the plain one against its formula, the scaled ones at their bounds."""

import math

import pytest
import torch

from billfish.config import RopeConfig
from billfish.errors import ConfigError
from billfish.layers.rotary import rotary_table


def frequencies(rope: RopeConfig, dim: int = 16, max_len: int = 4) -> torch.Tensor:
    """Radians a token, from the sines and cosines of position 1."""
    cos, sin = rotary_table(rope, dim, max_len)[1].double().chunk(2)
    return torch.atan2(sin, cos)


PLAIN = 100.0 ** (-torch.arange(8, dtype=torch.float64) / 8)


def test_plain_and_linear() -> None:
    assert torch.allclose(frequencies(RopeConfig(theta=100.0)), PLAIN)
    assert torch.allclose(frequencies(RopeConfig(theta=100.0, factor=4.0)), PLAIN / 4)
    table = rotary_table(RopeConfig(theta=100.0), 16, 9000)
    assert table.dtype == torch.float32
    exact = torch.cat(((8999 * PLAIN).cos(), (8999 * PLAIN).sin()))
    assert torch.allclose(table[8999].double(), exact, atol=1e-7)


def test_divisors_depend_on_the_longest_sequence_served() -> None:
    short, long = tuple(1.0 + i for i in range(8)), tuple(2.0 + i for i in range(8))
    rope = RopeConfig(
        theta=100.0, original_context=8, short_divisors=short, long_divisors=long,
        attention_factor=1.5,
    )  # fmt: skip
    for max_len, divisors in ((8, short), (9, long)):
        assert torch.allclose(frequencies(rope, max_len=max_len), PLAIN / torch.tensor(divisors))
    norm = rotary_table(rope, 16, 8).view(8, 2, 8).norm(dim=1)
    assert torch.allclose(norm, torch.tensor(1.5))


def test_llama3_keeps_fast_pairs_and_slows_slow_ones() -> None:
    rope = RopeConfig(
        theta=100.0, scaling="llama3", factor=8.0, original_context=64, low_freq_factor=1.0,
        high_freq_factor=4.0,
    )  # fmt: skip
    found, turns = frequencies(rope), 64 * PLAIN / (2 * math.pi)
    for got, plain, number in zip(found, PLAIN, turns, strict=True):
        kept = min(1.0, max(0.0, (float(number) - 1) / 3))
        assert float(got) == pytest.approx(float(plain) * (kept + (1 - kept) / 8), rel=1e-5)
    assert {bool(number > 4) for number in turns} == {bool(number < 1) for number in turns}


def test_yarn_keeps_fast_pairs_and_slows_slow_ones() -> None:
    rope = RopeConfig(
        theta=100.0, scaling="yarn", factor=4.0, original_context=64, beta_fast=8.0, beta_slow=1.0
    )
    found = frequencies(rope)
    # 64 tokens make 10 turns of pair 0 and 1.02 of pair 4; bounds are rounded outwards.
    assert found[0] == pytest.approx(float(PLAIN[0]), rel=1e-5)
    assert torch.allclose(found[5:], PLAIN[5:] / 4)
    assert bool(((found[1:5] < PLAIN[1:5]) & (found[1:5] > PLAIN[1:5] / 4)).all())


@pytest.mark.parametrize(
    "wrong",
    [
        {"theta": 0.0}, {"theta": math.nan}, {"factor": 0.0}, {"factor": math.inf},
        {"attention_factor": -1.0}, {"original_context": 0}, {"short_divisors": (1.0, 0.0)},
        {"low_freq_factor": 4.0}, {"beta_fast": 1.0}, {"scaling": "yarn", "theta": 1.0},
    ],
)  # fmt: skip
def test_impossible_embeddings_are_refused(wrong: dict) -> None:
    with pytest.raises(ConfigError):
        RopeConfig(**{"theta": 1e4, **wrong})
