"""Log-probabilities against float64, and what must never be in them."""

import json
import math

import numpy as np
import pytest
import torch

from billfish.engine.logprobs import MIN_LOGPROB
from billfish.worker.logprobs import token_logprobs


def random_logits(count: int, vocab: int = 300) -> torch.Tensor:
    return torch.randn(count, vocab, generator=torch.Generator().manual_seed(1)) * 5


def test_values_ranks_and_best_against_float64() -> None:
    logits = random_logits(5)
    logits[4] = (logits[4] / 3).round()  # many equals
    exact = logits.double().numpy()
    exact = exact - np.log(np.exp(exact).sum(-1, keepdims=True))
    tops = [0, 1, 5, 20, 20]
    chosen = [int(exact[0].argmax()), 17, 299, 0, 150]
    for i, found in enumerate(token_logprobs(logits, chosen, tops)):
        assert found.token_id == chosen[i]
        assert math.isclose(found.logprob, exact[i, chosen[i]], rel_tol=1e-5, abs_tol=1e-5)
        assert found.rank == 1 + int((exact[i] > exact[i, chosen[i]] + 1e-9).sum())
        values = [value for _, value in found.top]
        assert len(values) == tops[i]
        np.testing.assert_allclose(values, np.sort(exact[i])[::-1][: tops[i]], rtol=1e-5)
        np.testing.assert_allclose(values, exact[i][[t for t, _ in found.top]], rtol=1e-5)
        keys = [(-value, token) for token, value in found.top]
        assert keys == sorted(keys)
    assert token_logprobs(logits, chosen, tops)[0].rank == 1


def test_more_than_the_vocabulary_gives_the_vocabulary() -> None:
    (found,) = token_logprobs(torch.tensor([[1.0, 3.0, 2.0]]), [0], [20])
    assert [token for token, _ in found.top] == [1, 2, 0]


def test_batch_mates_change_not_one_bit() -> None:
    logits = (random_logits(8, 5000) * 2).round() / 2
    chosen, tops = [7] * 8, [0, 3, 20, 5, 1, 2, 0, 19]
    together = token_logprobs(logits, chosen, tops)
    alone = [token_logprobs(logits[i : i + 1], [7], [tops[i]])[0] for i in range(8)]
    assert together == alone


@pytest.mark.parametrize("low", [-math.inf, -1e30, math.nan])
def test_no_infinity_ever_leaves(low: float) -> None:
    logits = torch.tensor([[0.0, low, 1.0, -math.inf], [low, 0.0, 0.0, 0.0]])
    for found in token_logprobs(logits, [1, 0], [4, 4]):
        text = json.dumps([found.logprob, found.top], allow_nan=False)
        assert "Infinity" not in text
        assert found.logprob == MIN_LOGPROB
        assert min(value for _, value in found.top) == MIN_LOGPROB
