"""What requests ask of their logits before a token is drawn from them.

The order, which is that of vLLM's V1 sampler (its documentation of `vllm.v1.sample.sampler`):

1. Log-probabilities are taken from the model's own logits (`worker/logprobs.py`).
2. allowed_token_ids: all others are banned, their logits minus infinity.
3. bad_words: the last token of one is banned where the others were just generated.
4. min_tokens: the tokens that end the request are banned until so many are generated.
   structured: what cannot follow in the required form is banned (`worker/grammar.py`).
5. logit_bias is added. What is banned stays banned, here and in what follows.
6. repetition_penalty (Keskar et al., "CTRL", arXiv:1909.05858), over prompt and generated tokens:
   positive logits are divided by it, others multiplied. Then frequency_penalty times the count and
   presence_penalty once are taken off, over generated tokens alone (OpenAI's API reference).
7. temperature, min_p, top_k, top_p, then the draw (`worker/sampler.py`).

Each request's logits are changed by operations that look at nothing else, so they come out the same
to the last bit whatever shares the batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from billfish.engine.plan import Admission
from billfish.errors import CapacityError, ConfigError
from billfish.worker.grammar import GrammarCompiler, GrammarState, require
from billfish.worker.memory import available_memory, zeros_on_demand

if TYPE_CHECKING:
    from billfish.worker.input_batch import Row


@dataclass(slots=True)
class LogitsRules:
    """Steps 2 to 6 for one request, prepared when it is admitted.

    allowed: int64 [A]. bias: token ids int64 [B] and float32 [B]. bans: the tokens banned after
    each sequence of generated tokens, the empty one included; ban_lengths: lengths of those
    sequences. penalties: repetition, frequency, presence. grammar: where the sequence is in the
    required form. num_counted: tokens, from the beginning, that LogitsProcessor has counted.
    """

    num_prompt_tokens: int
    allowed: Tensor | None
    bias: tuple[Tensor, Tensor] | None
    bans: dict[tuple[int, ...], tuple[int, ...]]
    ban_lengths: tuple[int, ...]
    min_tokens: int
    stop_ids: tuple[int, ...]
    penalties: tuple[float, float, float] | None
    grammar: GrammarState | None = None
    num_counted: int = 0

    @staticmethod
    def of(admission: Admission, grammars: GrammarCompiler | None = None) -> "LogitsRules | None":
        """The rules of a request; None where it asks for nothing.

        ConfigError where it asks for a form and there are no grammars.
        """
        params = admission.sampling
        penalties = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        wanted = (
            params.allowed_token_ids, params.logit_bias, admission.bad_word_ids, params.min_tokens,
            params.structured, penalties != (1.0, 0.0, 0.0),
        )  # fmt: skip
        if not any(wanted):
            return None
        allowed, bias = params.allowed_token_ids, params.logit_bias
        bans: dict[tuple[int, ...], tuple[int, ...]] = {}
        for *before, last in admission.bad_word_ids:
            bans[tuple(before)] = (*bans.get(tuple(before), ()), last)
        return LogitsRules(
            num_prompt_tokens=admission.num_prompt_tokens,
            allowed=torch.tensor(allowed) if allowed else None,
            bias=(torch.tensor(list(bias)), torch.tensor(list(bias.values()), dtype=torch.float32))
            if bias
            else None,
            bans=bans,
            ban_lengths=tuple(sorted({len(before) for before in bans})),
            min_tokens=params.min_tokens,
            stop_ids=tuple(admission.stop_ids),
            penalties=penalties if wanted[-1] else None,
            grammar=_grammar(admission, grammars),
        )

    def fork(self) -> "LogitsRules":
        """For another row with the same request's options, of which nothing is counted yet."""
        grammar = self.grammar.fork() if self.grammar else None
        return replace(self, num_counted=0, grammar=grammar)

    def banned(self, generated: Sequence[int]) -> list[int]:
        """Token ids banned after these: at least as many of the last ones as any ban looks at."""
        ids: list[int] = []
        for length in self.ban_lengths:
            if length <= len(generated):
                before = tuple(generated[len(generated) - length :])
                ids += self.bans.get(before, ())
        return ids


class LogitsProcessor:
    """Applies the rules of many requests at once.

    Keeps how often each row's request has generated each token: int32 [max_num_seqs, vocab_size].
    A row takes memory once a request with a penalty uses it, and is brought up to date by the
    tokens that are new since the row's last step. Raises CapacityError where the machine has less
    memory to give than all rows can take.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int) -> None:
        asked, there = 4 * max_num_seqs * vocab_size, available_memory()
        if asked > there:
            raise CapacityError(
                f"penalties of {max_num_seqs} requests over {vocab_size} tokens can take {asked} "
                f"bytes and {there} are available: lower max_num_seqs"
            )
        self._counts = zeros_on_demand((max_num_seqs, vocab_size), torch.int32)

    def apply(self, logits: Tensor, rows: "Sequence[Row]", token_ids: Tensor) -> Tensor:
        """Float32 logits [S, vocab_size] of these rows, processed; `logits` itself if none asks.

        token_ids: int64 [max_num_seqs, length], all tokens of each row, of which the first
        row.num_tokens count. Where the model's logits are no numbers, all become so: bans must not
        hide it.
        """
        asking = [(i, row, row.rules) for i, row in enumerate(rows) if row.rules is not None]
        if not asking:
            return logits
        finite = logits.amax(dim=-1, keepdim=True).isfinite()
        logits = logits.masked_fill(~finite, torch.nan)
        _allow(logits, [(i, rules.allowed) for i, _, rules in asking if rules.allowed is not None])
        _ban(logits, asking, token_ids)
        require(logits, [(i, rules.grammar) for i, _, rules in asking if rules.grammar])
        _add_bias(logits, [(i, *rules.bias) for i, _, rules in asking if rules.bias is not None])
        penalized = [entry for entry in asking if entry[2].penalties is not None]
        if penalized:
            self._penalize(logits, penalized, token_ids)
        return logits

    def _penalize(self, logits: Tensor, asking: "list[Asking]", token_ids: Tensor) -> None:
        device = logits.device
        self._count(self._counts, asking, token_ids)
        # Only tokens that occur change. One that occurs twice is written twice, with equal values.
        where, tokens = _pairs(
            [(i, token_ids[r.index, : r.num_tokens]) for i, r, _ in asking], device
        )
        lengths = torch.tensor([row.num_tokens for _, row, _ in asking], device=device)
        index = torch.tensor([row.index for _, row, _ in asking], device=device)
        values = torch.tensor([rules.penalties for _, _, rules in asking], device=device)
        repetition, frequency, presence = values.T.repeat_interleave(lengths, dim=1)

        counts = self._counts[index.repeat_interleave(lengths), tokens]
        old = logits[where, tokens]
        new = torch.where(old > 0, old / repetition, old * repetition)
        logits[where, tokens] = new - frequency * counts - presence * (counts > 0)

    def _count(self, counts: Tensor, asking: "list[Asking]", token_ids: Tensor) -> None:
        """Count the tokens generated since each row's last step."""
        generated: list[tuple[int, Tensor]] = []
        for _, row, rules in asking:
            if rules.num_counted == 0:  # the row may have been another request's
                counts[row.index] = 0
            start = max(rules.num_counted, rules.num_prompt_tokens)
            generated.append((row.index, token_ids[row.index, start : row.num_tokens]))
            rules.num_counted = row.num_tokens
        pairs = _pairs(generated, counts.device)
        counts.index_put_(pairs, torch.ones_like(pairs[0], dtype=counts.dtype), accumulate=True)


Asking = tuple[int, "Row", LogitsRules]
"""Which of the batch's logits, whose they are, and what it asks."""


def _pairs(tokens: list[tuple[int, Tensor]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Indices (i, token) of a 2-D tensor for every token of every (i, tokens)."""
    lengths = torch.tensor([len(ids) for _, ids in tokens])
    rows = torch.tensor([i for i, _ in tokens]).repeat_interleave(lengths)
    return rows.to(device), torch.cat([ids for _, ids in tokens]).to(device)


def _allow(logits: Tensor, allowed: list[tuple[int, Tensor]]) -> None:
    if not allowed:
        return
    pairs = _pairs(allowed, logits.device)
    kept = logits[pairs]
    logits[torch.tensor([i for i, _ in allowed], device=logits.device)] = -torch.inf
    logits[pairs] = kept


def _ban(logits: Tensor, asking: list[Asking], token_ids: Tensor) -> None:
    rows: list[int] = []
    banned: list[int] = []
    for i, row, rules in asking:
        num_generated = row.num_tokens - rules.num_prompt_tokens
        ids: list[int] = []
        if rules.bans:
            length = min(rules.ban_lengths[-1], num_generated)
            last = token_ids[row.index, row.num_tokens - length : row.num_tokens]
            ids += rules.banned(last.tolist())
        if num_generated < rules.min_tokens:
            ids += rules.stop_ids
        rows += [i] * len(ids)
        banned += ids
    if banned:
        where = torch.tensor([rows, banned], device=logits.device)
        logits[where[0], where[1]] = -torch.inf


def _grammar(admission: Admission, grammars: GrammarCompiler | None) -> GrammarState | None:
    structured = admission.sampling.structured
    if structured is None:
        return None
    if grammars is None:
        raise ConfigError("a request asks for a form of its text, and there are no grammars")
    generated = admission.token_ids[admission.num_prompt_tokens :]
    return grammars.start(structured, tuple(admission.stop_ids), generated)


def _add_bias(logits: Tensor, biases: list[tuple[int, Tensor, Tensor]]) -> None:
    if not biases:
        return
    pairs = _pairs([(i, ids) for i, ids, _ in biases], logits.device)
    logits[pairs] += torch.cat([values for _, _, values in biases]).to(logits.device)
