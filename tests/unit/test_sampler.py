"""The sampler against distributions worked out by hand."""

import math
from collections import Counter

import numpy as np
import pytest
import torch

from billfish.sampling_params import SamplingParams
from billfish.worker.sampler import NO_TOKEN, probabilities, sample, uniform

PROBS = torch.tensor([0.1, 0.4, 0.05, 0.25, 0.2])


def draw(params: SamplingParams, count: int, probs: torch.Tensor = PROBS) -> Counter[int]:
    """How often each token comes at `count` positions of one request."""
    logits = probs.log().expand(count, -1).float()
    return Counter(sample(logits, [params] * count, [7] * count, list(range(count))))


def assert_distribution(counts: Counter[int], expected: list[float]) -> None:
    total = sum(counts.values())
    for token, p in enumerate(expected):
        error = math.sqrt(p * (1 - p) / total)  # of the estimate, one standard deviation
        assert abs(counts[token] / total - p) <= 4.5 * error, (token, p, counts)


def test_greedy_takes_the_largest_and_the_first_of_equals() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [5.0, -1.0, 0.0, 2.0]])
    assert sample(logits, [SamplingParams(temperature=0)] * 2, [0, 0], [0, 0]) == [1, 0]


def test_plain_sampling_follows_the_distribution() -> None:
    assert_distribution(draw(SamplingParams(), 20_000), PROBS.tolist())


def test_temperature_sharpens() -> None:
    sharp = PROBS**2 / (PROBS**2).sum()
    assert_distribution(draw(SamplingParams(temperature=0.5), 20_000), sharp.tolist())


def test_top_k_keeps_k() -> None:
    expected = [0, 0.4 / 0.65, 0, 0.25 / 0.65, 0]
    assert_distribution(draw(SamplingParams(top_k=2), 20_000), expected)


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [(0.3, [1]), (0.39, [1]), (0.41, [1, 3]), (0.7, [1, 3, 4]), (0.9, [0, 1, 3, 4])],
)
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p: float, kept: list[int]) -> None:
    expected = [float(PROBS[t]) if t in kept else 0.0 for t in range(5)]
    expected = [p / sum(expected) for p in expected]
    assert_distribution(draw(SamplingParams(top_p=top_p), 8_000), expected)


def test_top_p_counts_within_top_k() -> None:
    # Of the two kept by top_k, the first has 0.615: 0.6 is reached by it alone, 0.7 is not.
    assert set(draw(SamplingParams(top_k=2, top_p=0.6), 2_000)) == {1}
    assert set(draw(SamplingParams(top_k=2, top_p=0.7), 2_000)) == {1, 3}


def test_min_p_keeps_what_is_likely_enough() -> None:
    expected = [0, 0.4 / 0.85, 0, 0.25 / 0.85, 0.2 / 0.85]
    assert_distribution(draw(SamplingParams(min_p=0.45), 20_000), expected)
    assert set(draw(SamplingParams(min_p=1.0), 500)) == {1}
    # It looks at the distribution that the temperature made: 0.25 / 0.4 squared is 0.39.
    assert set(draw(SamplingParams(min_p=0.45, temperature=0.5), 500)) == {1}


def plainly_cut(probs: np.ndarray, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """What is left, by sorting everything: most likely first, equals by token id."""
    left = np.where(probs >= min_p * probs.max(), probs, 0.0)
    order = np.lexsort((np.arange(len(probs)), -left))
    left[order[top_k or len(probs) :]] = 0.0
    before, total = 0.0, left.sum()
    for token in order:
        p = left[token]
        if before >= top_p * total:
            left[token] = 0.0
        before += p
    return left


@pytest.mark.parametrize("vocab", [100, 1024, 1025, 4000])
@pytest.mark.parametrize("rounded", [False, True])
def test_large_vocabularies_are_cut_as_if_all_was_sorted(vocab: int, rounded: bool) -> None:
    """Also where the candidates do not suffice, and where equals straddle their edge."""
    logits = torch.randn(6, vocab, generator=torch.Generator().manual_seed(vocab))
    if rounded:  # many equals
        logits = (logits * 2).round() / 2
    for scale in (0.1, 1.0, 6.0):
        params = [
            SamplingParams(top_p=0.5), SamplingParams(top_p=0.999), SamplingParams(top_k=1000),
            SamplingParams(top_k=min(1024, vocab), top_p=0.9), SamplingParams(top_k=7, min_p=0.2),
            SamplingParams(top_p=0.8, min_p=0.01),
        ]  # fmt: skip
        plain = [SamplingParams()] * 6
        whole = probabilities(logits * scale, plain).numpy()
        cut = probabilities(logits * scale, params).numpy()
        for i, p in enumerate(params):
            expected = plainly_cut(whole[i], p.top_k, p.top_p, p.min_p)
            assert np.array_equal(cut[i], expected), (scale, p)


def test_equal_probabilities_are_cut_by_token_id() -> None:
    counts = draw(SamplingParams(top_k=2), 2_000, probs=torch.full((5,), 0.2))
    assert set(counts) == {0, 1}


def test_impossible_tokens_are_never_drawn() -> None:
    probs = torch.tensor([0.0, 0.5, 0.0, 0.5, 0.0])
    assert set(draw(SamplingParams(), 5_000, probs)) == {1, 3}


@pytest.mark.parametrize("temperature", [1e-300, 1e-8, 100.0])
def test_extreme_temperatures(temperature: float) -> None:
    logits = torch.tensor([[1e4, -1e4, 9e3]])
    (token,) = sample(logits, [SamplingParams(temperature=temperature)], [1], [1])
    assert token == 0  # at 100 the runner-up still has only e^-10


def test_batch_mates_change_nothing() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 1000, generator=generator)
    params = [
        SamplingParams(), SamplingParams(temperature=0), SamplingParams(top_k=5),
        SamplingParams(top_p=0.5), SamplingParams(temperature=2.0, top_k=3, top_p=0.8),
        SamplingParams(temperature=0.3),
    ]  # fmt: skip
    seeds, positions = [1, 2, 3, 4, 5, 6], [9, 8, 7, 6, 5, 4]
    together = sample(logits, params, seeds, positions)
    alone = [
        sample(logits[i : i + 1], [params[i]], [seeds[i]], [positions[i]])[0] for i in range(6)
    ]
    assert together == alone


def test_inputs_are_left_alone() -> None:
    logits = torch.randn(3, 50)
    before = logits.clone()
    sample(logits, [SamplingParams(top_k=3)] * 3, [1, 2, 3], [1, 2, 3])
    assert torch.equal(logits, before)


def test_uniform_numbers_are_uniform_and_unrelated() -> None:
    numbers = torch.tensor([uniform(seed, pos) for seed in range(100) for pos in range(100)])
    assert float(numbers.min()) >= 0.0
    assert float(numbers.max()) < 1.0
    counts = torch.histc(numbers, bins=10, min=0, max=1)
    assert float((counts - 1000).abs().max()) < 4.5 * math.sqrt(1000 * 0.9)
    grid = numbers.view(100, 100) - 0.5
    for shifted in (grid[:, 1:] * grid[:, :-1], grid[1:] * grid[:-1]):  # neighbours
        assert abs(float(shifted.mean())) < 4.5 / 12 / math.sqrt(shifted.numel())
    assert uniform(-1, 5) == uniform(2**64 - 1, 5)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_that_is_not_numbers_gets_no_token_and_harms_no_other(bad: float) -> None:
    logits = torch.tensor([[1.0, 2.0, 0.5], [1.0, bad, 0.5], [-math.inf] * 3, [3.0, -math.inf, 0]])
    for params in (SamplingParams(temperature=0), SamplingParams(seed=1, top_k=1)):
        assert sample(logits, [params] * 4, [1] * 4, [1] * 4) == [1, NO_TOKEN, NO_TOKEN, 0]
