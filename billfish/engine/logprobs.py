"""Log-probabilities of tokens, as the executor reports them and requests get them. Plain data."""

from dataclasses import dataclass

MIN_LOGPROB = -9999.0
"""The least log-probability ever reported, so that minus infinity, which JSON cannot hold, never
is. OpenAI's API uses the same number for tokens that are very unlikely."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """One token under the distribution of the model itself: before temperature, penalties, bias,
    bans and the cutting of the tail.

    logprob: natural logarithm, at least MIN_LOGPROB. rank: 1 + how many tokens are more likely.
    top: the most likely tokens as (token id, logprob), best first, as many as were asked for; of
    equals the lower id is first. It holds the token itself only if that is one of them.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """A run of prompt tokens, the first of them at position start (1 or more)."""

    start: int
    tokens: tuple[TokenLogprobs, ...]
