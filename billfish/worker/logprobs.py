"""Log-probabilities from the model's own logits, for those requests that ask for them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from billfish.engine.logprobs import MIN_LOGPROB, PromptLogprobs, TokenLogprobs
from billfish.engine.plan import Work
from billfish.models.decoder import CausalLM
from billfish.sampling_params import MAX_LOGPROBS
from billfish.worker.host_copies import to_host
from billfish.worker.input_batch import Row

SLICE = 64
"""Positions of a prompt whose logits are held at once: [64, vocab_size] in float32, twice."""


def token_logprobs(
    logits: Tensor, token_ids: Sequence[int], tops: Sequence[int]
) -> list[TokenLogprobs]:
    """One for each row of logits [S, vocab_size]; tops: how many of the most likely.

    Computed in float32, each row by itself. Whatever is less likely than MIN_LOGPROB, or is no
    number, is reported as MIN_LOGPROB.
    """
    return PendingLogprobs.measure(logits, torch.tensor(token_ids), tops).collect()


@dataclass(frozen=True)
class PendingLogprobs:
    """Log-probabilities on their way from a device to the host. S tokens.

    token_ids int64, chosen float32 and ranks int64, each [S]; ids int64 and values float32 [S, N].
    """

    token_ids: Tensor
    chosen: Tensor
    ranks: Tensor
    ids: Tensor
    values: Tensor
    tops: Sequence[int]

    @classmethod
    def measure(cls, logits: Tensor, token_ids: Tensor, tops: Sequence[int]) -> "PendingLogprobs":
        """Queue all that `collect` needs. token_ids: integers [S] on the device of the logits."""
        token_ids = token_ids.long()
        logprobs = logits.log_softmax(dim=-1, dtype=torch.float32)
        logprobs = logprobs.nan_to_num_(nan=MIN_LOGPROB).clamp_min_(MIN_LOGPROB)
        chosen = logprobs.gather(1, token_ids[:, None])
        ranks = (logprobs > chosen).sum(dim=-1) + 1
        # As many for all: the choice among equals must not depend on what batch-mates ask for.
        most = min(MAX_LOGPROBS, logits.shape[-1]) if any(tops) else 0
        values, ids = logprobs.topk(most, dim=-1)
        return cls(
            to_host(token_ids), to_host(chosen.flatten()), to_host(ranks), to_host(ids),
            to_host(values), tops,
        )  # fmt: skip

    def collect(self) -> list[TokenLogprobs]:
        """What was measured, once the device has come so far."""
        columns = (self.token_ids, self.chosen, self.ranks, self.ids, self.values)
        rows = zip(*(column.tolist() for column in columns), self.tops, strict=True)
        return [
            TokenLogprobs(token_id, logprob, rank, _best(row_ids, row_values, top))
            for token_id, logprob, rank, row_ids, row_values, top in rows
        ]


def _best(ids: list[int], values: list[float], count: int) -> tuple[tuple[int, float], ...]:
    if not count:
        return ()
    ordered = sorted(zip(ids, values, strict=True), key=lambda pair: (-pair[1], pair[0]))
    return tuple(ordered[:count])


def prompt_logprobs(
    model: CausalLM,
    vocab_size: int,
    hidden: Tensor,
    work: Sequence[tuple[Work, Row]],
    token_ids: Tensor,
) -> dict[str, PromptLogprobs]:
    """Of the prompt tokens after those of this step, for the requests that ask for them.

    hidden: [T, hidden_size] of all tokens of the step, in the order of `work`. token_ids: int64
    [max_num_seqs, length], all tokens of each row. Logits are made for SLICE positions at a time.
    """
    found: dict[str, PromptLogprobs] = {}
    offset = 0
    for item, row in work:
        top = row.sampling.prompt_logprobs
        # A request that comes with tokens of its own was preempted after its prompt was complete.
        if top is not None and not row.resumed:
            count = min(item.num_tokens, row.num_prompt_tokens - 1 - item.start)
            start = item.start + 1
            targets = token_ids[row.index, start : start + max(count, 0)].tolist()
            tokens: list[TokenLogprobs] = []
            for i in range(0, len(targets), SLICE):
                some = targets[i : i + SLICE]
                part = hidden[offset + i : offset + i + len(some)]
                logits = model.logits(part)[:, :vocab_size]
                tokens += token_logprobs(logits, some, [top] * len(some))
            if tokens:
                found[item.request_id] = PromptLogprobs(start, tuple(tokens))
        offset += item.num_tokens
    return found
