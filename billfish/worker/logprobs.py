"""Log-probabilities from the model's own logits, for those requests that ask for them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from billfish.engine.logprobs import MIN_LOGPROB, PromptLogprobs, TokenLogprobs
from billfish.engine.plan import Work
from billfish.models.decoder import CausalLM
from billfish.sampling_params import MAX_LOGPROBS
from billfish.worker.input_batch import Row

SLICE = 64
"""Positions of a prompt whose logits are held at once: [64, vocab_size] in float32, twice."""


def token_logprobs(
    logits: Tensor, token_ids: Sequence[int], tops: Sequence[int]
) -> list[TokenLogprobs]:
    """One for each row of float32 logits [S, vocab_size]; tops: how many of the most likely.

    Computed in float32, each row by itself. Whatever is less likely than MIN_LOGPROB, or is no
    number, is reported as MIN_LOGPROB.
    """
    logprobs = logits.log_softmax(dim=-1).nan_to_num_(nan=MIN_LOGPROB).clamp_min_(MIN_LOGPROB)
    chosen = logprobs.gather(1, torch.tensor(token_ids, device=logits.device)[:, None])
    ranks = (logprobs > chosen).sum(dim=-1) + 1
    # As many for all: the choice among equals must not depend on what batch-mates ask for.
    most = min(MAX_LOGPROBS, logits.shape[-1]) if any(tops) else 0
    values, ids = logprobs.topk(most, dim=-1)
    columns = (token_ids, chosen.flatten().tolist(), ranks.tolist(), ids.tolist(), values.tolist())
    return [
        TokenLogprobs(token_id, logprob, rank, _best(row_ids, row_values, top))
        for token_id, logprob, rank, row_ids, row_values, top in zip(*columns, tops, strict=True)
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
