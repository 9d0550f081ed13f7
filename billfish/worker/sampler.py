"""Chooses the next token of each request from its logits."""

import torch
from torch import Tensor

from billfish.sampling_params import SamplingParams

NO_TOKEN = -1

CANDIDATES = 1024
"""Tokens that are sorted where only the most likely are kept, before all are."""

_MASK = 2**64 - 1


def sample(
    logits: Tensor, params: list[SamplingParams], seeds: list[int], positions: list[int]
) -> list[int]:
    """Token ids [S] for float32 logits [S, vocab_size]; NO_TOKEN where the logits are not numbers.

    Greedy requests take the largest logit (the lowest id of equals). The others draw one number
    from their seed and the position of the new token alone, so that neither batch-mates nor
    preemption change what they get, and invert the distribution function at that number.
    """
    largest, chosen = logits.max(dim=-1)  # not a number if any of them is none
    drawn = [i for i, p in enumerate(params) if not p.greedy]
    if drawn:
        numbers = [uniform(seeds[i], positions[i]) for i in drawn]
        chosen[drawn] = _draw(probabilities(logits[drawn], [params[i] for i in drawn]), numbers)
    return chosen.masked_fill(~largest.isfinite(), NO_TOKEN).tolist()


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1), the same for the same seed and position on every machine.

    The finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014) over a counter, applied twice
    so that neighbouring seeds and positions have nothing in common.
    """
    state = _mix((seed & _MASK) + 0x9E3779B97F4A7C15)
    return (_mix(state + position * 0x9E3779B97F4A7C15) >> 11) * 2.0**-53


def _mix(z: int) -> int:
    z &= _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def probabilities(logits: Tensor, params: list[SamplingParams]) -> Tensor:
    """Float64 [S, V], proportional to the probability of each token. No temperature may be 0."""
    # Shifted before the division: a tiny temperature must not make inf - inf of it.
    shifted = logits.double() - logits.amax(dim=-1, keepdim=True).double()
    temperature = torch.tensor([[p.temperature] for p in params], dtype=torch.float64)
    probs = (shifted / temperature).softmax(dim=-1)
    if any(p.min_p > 0.0 for p in params):  # Nguyen et al., arXiv:2407.01082; 0 cuts nothing
        min_p = torch.tensor([[p.min_p] for p in params], dtype=torch.float64)
        probs.masked_fill_(probs < min_p * probs.amax(dim=-1, keepdim=True), 0.0)
    # Only requests that cut the tail pay for the sort.
    cut = [i for i, p in enumerate(params) if p.top_p < 1.0 or p.top_k > 0]
    if cut:
        probs[cut] = _cut_tail(probs[cut], [params[i] for i in cut])
    return probs


def _draw(probs: Tensor, numbers: list[float]) -> Tensor:
    """Token ids [S]: where the running sum of probs [S, V] reaches that share of its total."""
    cumulative = probs.cumsum(dim=-1)
    targets = torch.tensor(numbers, dtype=torch.float64)[:, None] * cumulative[:, -1:]
    # `right`: a number equal to a step belongs to the next token, so none of probability 0 is hit.
    return torch.searchsorted(cumulative, targets, right=True).squeeze(-1)


def _cut_tail(probs: Tensor, params: list[SamplingParams]) -> Tensor:
    """probs [S, V] with all but the top-k, and of those all but the top-p, set to 0.

    Top-p counts within what top-k leaves. The token that carries the sum past top_p is kept. Equal
    probabilities are ordered by token id.
    """
    top_k = torch.tensor([[p.top_k or probs.shape[-1]] for p in params])
    top_p = torch.tensor([[p.top_p] for p in params], dtype=torch.float64)
    # Sorting a vocabulary costs far more than all else here, and few tokens are kept as a rule.
    values, ids = _most_likely(probs)
    kept = _kept(values, probs, top_k, top_p)
    # The last one kept must be above the last candidate: its equals may not all be candidates.
    last = kept.masked_fill(kept == 0.0, torch.inf).amin(dim=-1)
    sure = (last > values[:, -1]).tolist()
    cut = torch.zeros_like(probs).scatter_(-1, ids, kept)
    rest = [i for i, is_sure in enumerate(sure) if not is_sure]
    if rest:
        values, ids = probs[rest].sort(dim=-1, descending=True, stable=True)
        kept = _kept(values, probs[rest], top_k[rest], top_p[rest])
        cut[rest] = torch.zeros_like(values).scatter_(-1, ids, kept)
    return cut


def _most_likely(probs: Tensor) -> tuple[Tensor, Tensor]:
    """The CANDIDATES largest of each row, in order, equals by token id; and their token ids."""
    values, ids = probs.topk(min(CANDIDATES, probs.shape[-1]), dim=-1, sorted=False)
    ids, order = ids.sort(dim=-1)
    values, order = values.gather(-1, order).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(-1, order)


def _kept(values: Tensor, probs: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """values [S, C], the largest of probs in order, with what top-k and top-p leave out set to 0.

    Sums are running ones, whose rounding does not depend on the number of rows.
    """
    values = values.masked_fill(torch.arange(values.shape[-1]) >= top_k, 0.0)
    sums = values.cumsum(dim=-1)
    whole = top_k > values.shape[-1]
    total = torch.where(whole, probs.cumsum(dim=-1)[:, -1:], sums[:, -1:])
    return values.masked_fill(sums - values >= top_p * total, 0.0)
