"""Log-probabilities against float64, and what must never be in them."""

import json
import math

import numpy as np
import pytest
import torch

from billfish.engine.logprobs import MIN_LOGPROB
from billfish.engine.plan import Admission, StepPlan, Work
from billfish.sampling_params import SamplingParams
from billfish.worker.input_batch import InputBatch
from billfish.worker.logprobs import SLICE, prompt_logprobs, token_logprobs


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


class Head:
    """A model that is its last layer alone, and remembers how many rows it was asked for."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self.rows.append(len(hidden))
        return hidden


def test_a_long_prompt_takes_slices_and_a_cut_one_the_same_values() -> None:
    vocab, length = 50, 3 * SLICE + 10
    tokens = tuple(i * 7 % vocab for i in range(length + 1))
    params = SamplingParams(prompt_logprobs=2)
    batch = InputBatch(4, 512, 16)
    asks = Admission("asks", tokens[:length], length, params, 0)
    quiet = Admission("quiet", (1, 2, 3), 3, SamplingParams(), 0)
    resumed = Admission("resumed", tokens, length, params, 0)  # its prompt is reported already
    batch.apply(StepPlan(0, admitted=(quiet, asks, resumed)))
    hidden = torch.randn(length, vocab + 3, generator=torch.Generator().manual_seed(0))

    def step(start: int, end: int, head: Head):
        work = [("quiet", 0, 3), ("asks", start, end - start), ("resumed", 0, 2)]
        states = torch.cat([hidden[:3], hidden[start:end], hidden[:2]])
        pairs = [(Work(name, at, n, (), False), batch.rows[name]) for name, at, n in work]
        return prompt_logprobs(head, vocab, states, pairs, batch.token_ids)

    head = Head()
    (whole,) = step(0, length, head).values()
    assert sum(head.rows) == length - 1  # the last one predicts what is generated
    assert max(head.rows) == SLICE
    expected = token_logprobs(hidden[:-1, :vocab], tokens[1:length], [2] * (length - 1))
    assert (whole.start, whole.tokens) == (1, tuple(expected))

    parts, start = [], 0
    for end in (5, 6, 200, length):
        found = step(start, end, Head())["asks"]
        assert found.start == start + 1
        parts += found.tokens
        start = end
    assert tuple(parts) == whole.tokens


def test_a_prompt_of_one_token_has_none() -> None:
    batch = InputBatch(1, 16, 16)
    params = SamplingParams(prompt_logprobs=2)
    batch.apply(StepPlan(0, admitted=(Admission("a", (3,), 1, params, 0),)))
    work = [(Work("a", 0, 1, (), True), batch.rows["a"])]
    assert prompt_logprobs(Head(), 5, torch.zeros(1, 5), work, batch.token_ids) == {}
