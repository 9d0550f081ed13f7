"""What requests ask of their logits, for many at once on a device, without waiting for it.

The order and the meaning are those of `logits_processor`, which serves a CPU; tokens are looked up
in the table on the device, because the host may not know the last one yet. What depends on the
requests alone is prepared when they first meet, and kept while the same ones are sampled.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from billfish.worker.grammar import require
from billfish.worker.host_copies import to_device
from billfish.worker.input_batch import Row
from billfish.worker.logits_processor import LogitsRules

Asking = tuple[int, Row, LogitsRules]
"""Which of the batch's logits, whose they are, and what it asks."""


@dataclass(frozen=True)
class _Prepared:
    """Tensors on the device; pairs are int64 [2, N], (which of the logits, token id).

    allowed: pairs, and which of the logits they are all that is left of. until: pairs banned below
    a position, int64 [N]. words: for each sequence, which of the logits, its last token, its tokens
    before right-aligned in [N, L] with -1 for none, and the position where its first may be.
    penalties: which of the logits, row in the token table, first generated position, and float32
    [3, N, 1] of repetition, frequency and presence.
    """

    rows: Sequence[Row]
    allowed: tuple[Tensor, Tensor] | None
    until: tuple[Tensor, Tensor] | None
    words: tuple[Tensor, Tensor, Tensor, Tensor] | None
    bias: tuple[Tensor, Tensor] | None
    penalties: tuple[Tensor, Tensor, Tensor, Tensor] | None
    penalized: tuple[Row, ...]


class DeviceRules:
    """Applies the rules of many requests at once. token_table: int32 [max_num_seqs, length]."""

    def __init__(self, token_table: Tensor) -> None:
        self._table = token_table
        self._prepared: _Prepared | None = None

    def apply(self, logits: Tensor, rows: Sequence[Row], positions: Tensor) -> Tensor:
        """Float32 logits [S, vocab_size] of these rows, processed; `logits` itself if none asks.

        positions: int32 [S], where each new token goes. Where the model's logits are no numbers,
        all become so: bans must not hide it.
        """
        if all(row.rules is None for row in rows):
            return logits
        known = self._prepared
        if known is None or len(known.rows) != len(rows) or any(
            a is not b for a, b in zip(known.rows, rows, strict=True)
        ):  # fmt: skip
            known = self._prepared = _prepare(rows, logits.device)
        positions = positions.long()
        logits = logits.float()
        finite = logits.amax(dim=-1, keepdim=True).isfinite()
        logits = logits.masked_fill(~finite, torch.nan)
        if known.allowed is not None:
            pairs, those = known.allowed
            kept = logits[pairs[0], pairs[1]]
            logits.index_fill_(0, those, -torch.inf)  # a number would be sent, and waited for
            logits[pairs[0], pairs[1]] = kept
        if known.words is not None:
            self._ban_words(logits, known.words, positions, rows)
        if known.until is not None:
            pairs, until = known.until
            _ban(logits, pairs[0], pairs[1], positions[pairs[0]] < until)
        grammars = [(i, row.rules.grammar) for i, row in enumerate(rows) if row.rules]
        require(logits, [(i, grammar) for i, grammar in grammars if grammar is not None])
        if known.bias is not None:
            pairs, values = known.bias
            logits[pairs[0], pairs[1]] += values
        if known.penalties is not None:
            longest = max(row.num_tokens for row in known.penalized)
            self._penalize(logits, known.penalties, positions, longest)
        return logits

    def _ban_words(
        self, logits: Tensor, words: tuple[Tensor, ...], positions: Tensor, rows: Sequence[Row]
    ) -> None:
        where, last, before, first = words
        table_rows = to_device(torch.tensor([row.index for row in rows]), logits.device)[where]
        length = before.shape[1]
        steps = torch.arange(-length, 0, device=logits.device)
        places = positions[where][:, None] + steps
        tokens = self._table[table_rows[:, None], places.clamp(min=0)]
        same = ((tokens == before) & (places >= first[:, None])) | (before < 0)
        # Several sequences may ban one token: whichever does is enough.
        banned = torch.zeros(logits.shape, dtype=torch.int32, device=logits.device)
        banned.index_put_((where, last), same.all(dim=1).int(), accumulate=True)
        logits.masked_fill_(banned > 0, -torch.inf)

    def _penalize(
        self, logits: Tensor, penalties: tuple[Tensor, ...], positions: Tensor, longest: int
    ) -> None:
        where, table_rows, first, values = penalties
        repetition, frequency, presence = values
        places = torch.arange(longest, device=logits.device)
        there = places < positions[where][:, None]
        tokens = self._table[table_rows, :longest].long()
        # What lies behind the end stands for the first token, and is written as it is.
        tokens = torch.where(there, tokens, tokens[:, :1])
        counts = torch.zeros(len(where), logits.shape[1], dtype=torch.int32, device=logits.device)
        generated = (there & (places >= first[:, None])).int()
        counts = counts.scatter_add_(1, tokens, generated).gather(1, tokens)
        mine = logits[where]
        old = mine.gather(1, tokens)
        new = torch.where(old > 0, old / repetition, old * repetition)
        new = new - frequency * counts - presence * (counts > 0)
        logits[where] = mine.scatter_(1, tokens, new)


def _ban(logits: Tensor, where: Tensor, tokens: Tensor, banned: Tensor) -> None:
    old = logits[where, tokens]
    logits[where, tokens] = old.masked_fill(banned, -torch.inf)


def _prepare(rows: Sequence[Row], device: torch.device) -> _Prepared:
    asking = [(i, row, row.rules) for i, row in enumerate(rows) if row.rules is not None]
    return _Prepared(
        rows=tuple(rows),
        allowed=_allowed(asking, device),
        until=_until(asking, device),
        words=_words(asking, device),
        bias=_bias(asking, device),
        penalties=_penalties(asking, device),
        penalized=tuple(row for _, row, rules in asking if rules.penalties is not None),
    )


def _allowed(asking: list[Asking], device: torch.device) -> tuple[Tensor, Tensor] | None:
    mine = [(i, rules.allowed) for i, _, rules in asking if rules.allowed is not None]
    if not mine:
        return None
    those = torch.tensor([i for i, _ in mine])
    return _pairs([(i, ids.tolist()) for i, ids in mine], device), to_device(those, device)


def _until(asking: list[Asking], device: torch.device) -> tuple[Tensor, Tensor] | None:
    mine = [entry for entry in asking if entry[2].min_tokens and entry[2].stop_ids]
    if not mine:
        return None
    ends = [
        rules.num_prompt_tokens + rules.min_tokens for _, _, rules in mine for _ in rules.stop_ids
    ]
    pairs = _pairs([(i, rules.stop_ids) for i, _, rules in mine], device)
    return pairs, to_device(torch.tensor(ends), device)


def _words(
    asking: list[Asking], device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    entries = [
        (i, before, last, rules.num_prompt_tokens)
        for i, _, rules in asking
        for before, banned in rules.bans.items()
        for last in banned
    ]
    if not entries:
        return None
    length = max(len(before) for _, before, _, _ in entries)
    where, last, first = (torch.tensor([entry[k] for entry in entries]) for k in (0, 2, 3))
    aligned = [[-1] * (length - len(before)) + list(before) for _, before, _, _ in entries]
    before = torch.tensor(aligned, dtype=torch.int64).view(len(entries), length)
    where, last, before, first = (to_device(t, device) for t in (where, last, before, first))
    return where, last, before, first


def _bias(asking: list[Asking], device: torch.device) -> tuple[Tensor, Tensor] | None:
    mine = [(i, rules.bias) for i, _, rules in asking if rules.bias is not None]
    if not mine:
        return None
    pairs = _pairs([(i, ids.tolist()) for i, (ids, _) in mine], device)
    return pairs, to_device(torch.cat([values for _, (_, values) in mine]), device)


def _penalties(
    asking: list[Asking], device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    mine = [(i, row, rules) for i, row, rules in asking if rules.penalties is not None]
    if not mine:
        return None
    where = torch.tensor([i for i, _, _ in mine])
    table_rows = torch.tensor([row.index for _, row, _ in mine])
    first = torch.tensor([rules.num_prompt_tokens for _, _, rules in mine])
    values = torch.tensor([rules.penalties for _, _, rules in mine]).T.unsqueeze(-1).contiguous()
    where, table_rows, first, values = (
        to_device(tensor, device) for tensor in (where, table_rows, first, values)
    )
    return where, table_rows, first, values


def _pairs(tokens: Sequence[tuple[int, Sequence[int]]], device: torch.device) -> Tensor:
    pairs = [(i, token) for i, ids in tokens for token in ids]
    return to_device(torch.tensor(pairs).T.contiguous(), device)
