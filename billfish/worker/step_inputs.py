"""The inputs of a step, made on the device from tables that stay there.

The host sends a few numbers a request (`Header`); everything a token or more of it takes, token
ids, positions, slots and block tables, is looked up where it is. So a decode step costs one small
copy to the device, and the tokens of the step before need not be known to the host.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from billfish.kernels.paged_attention.metadata import PADDING_SLOT
from billfish.worker.host_copies import pinned

NO_BLOCK = -1
_FIELDS = (
    "rows", "seq_lens", "found", "new_blocks", "query_start", "sample_index", "sample_rows",
    "sample_positions",
)  # fmt: skip


class Header:
    """What the host says of a step, and what requests ask of their sampling: one copy a step.

    rows: of each request in the tables. seq_lens: its KV tokens, new ones included. found: tokens
    whose KV was there when it was admitted; it is not written again. new_blocks: a block to append
    to its table, else NO_BLOCK; only where it computes one token. query_start: where its new tokens
    begin among those of the step. sample_index: which of the step's tokens are sampled from, for
    the sequences in sample_rows, whose new tokens get the places sample_positions.
    All int32 [max_num_seqs] (query_start: one more), what lies behind the step's requests being
    that of padding.

    numbers: float64 [max_num_seqs, 4], integers: int64 [max_num_seqs, 2], by row; see
    `billfish.kernels.general.sample_gpu`.
    """

    COPIES = 3
    """Host copies: the device may still read those of the two steps before."""

    def __init__(self, max_num_seqs: int, device: torch.device) -> None:
        self.size = max_num_seqs
        # The widest first, so that all are aligned.
        self._words = {"numbers": 8 * max_num_seqs, "integers": 4 * max_num_seqs}
        counts = {name: max_num_seqs + (name == "query_start") for name in _FIELDS}
        # Each begins on 16 bytes: kernels are compiled for that.
        self._words |= {name: -(-count // 4) * 4 for name, count in counts.items()}
        total = sum(self._words.values())
        self._device = torch.zeros(total, dtype=torch.int32, device=device)
        self._host = [pinned((total,), torch.int32, device) for _ in range(self.COPIES)]
        self._views = [_views(copy.numpy(), self._words) for copy in self._host]
        self._next = 0
        self.numbers_by_row = np.zeros((max_num_seqs, 4))
        self.integers_by_row = np.zeros((max_num_seqs, 2), dtype=np.int64)
        parts = dict(zip(self._words, self._device.split(list(self._words.values())), strict=True))
        self.numbers = parts.pop("numbers").view(torch.float64).view(-1, 4)
        self.integers = parts.pop("integers").view(torch.int64).view(-1, 2)
        parts = {name: part[: counts[name]] for name, part in parts.items()}
        self.rows, self.seq_lens, self.found = (parts[name] for name in _FIELDS[:3])
        self.new_blocks, self.query_start, self.sample_index = (parts[n] for n in _FIELDS[3:6])
        self.sample_rows, self.sample_positions = (parts[name] for name in _FIELDS[6:])

    def send(self, fields: dict[str, list[int]]) -> None:
        """Queue the copy of a step's fields to the device."""
        index = self._next
        self._next = (index + 1) % self.COPIES
        views = self._views[index]
        for name, values in fields.items():
            view = views[name]
            view[: len(values)] = values
            view[len(values) :] = self._padding(name, values)
        views["numbers"][:] = self.numbers_by_row
        views["integers"][:] = self.integers_by_row
        self._device.copy_(self._host[index], non_blocking=True)

    def clear(self) -> None:
        """Queue a step of no requests."""
        self.send({name: [0] if name == "query_start" else [] for name in _FIELDS})

    def _padding(self, name: str, values: list[int]) -> int:
        """What stands behind a step's requests: they have no tokens."""
        if name == "query_start":
            return values[-1]
        return NO_BLOCK if name == "new_blocks" else 0


def _views(words: np.ndarray, sizes: dict[str, int]) -> dict[str, np.ndarray]:
    views, start = {}, 0
    for name, size in sizes.items():
        views[name] = words[start : start + size]
        start += size
    views["numbers"] = views["numbers"].view(np.float64).reshape(-1, 4)
    views["integers"] = views["integers"].view(np.int64).reshape(-1, 2)
    return views


@dataclass(frozen=True)
class StepInputs:
    """Tensors on the device. T tokens, R requests; token_ids, positions, slots: int64 [T];
    block_table: int32 [R, max_blocks]."""

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    block_table: Tensor


def allocate(
    num_tokens: int, num_requests: int, max_blocks: int, device: torch.device
) -> StepInputs:
    """Memory for the inputs of such a step."""
    # Each begins on 16 bytes, whatever the number of tokens: kernels are compiled for that.
    per_token = torch.zeros(3, num_tokens + num_tokens % 2, dtype=torch.int64, device=device)
    per_token = per_token[:, :num_tokens]
    block_table = torch.zeros(num_requests, max_blocks, dtype=torch.int32, device=device)
    return StepInputs(per_token[0], per_token[1], per_token[2], block_table)


def make(
    header: Header,
    query_start: Tensor,
    token_table: Tensor,
    block_table: Tensor,
    block_size: int,
    out: StepInputs,
    longest: int,
) -> None:
    """Fill the inputs of the header's first R requests, R rows of out.block_table.

    query_start: int32 [R + 1]; token_table, block_table: int32, of all rows; longest: most new
    tokens of a request. A new block of the header is entered into block_table first. A request with
    seq_lens 0 is padding: its token is 0 at position 0 and has no slot.
    """
    if token_table.is_cuda:
        from billfish.worker import step_inputs_gpu

        step_inputs_gpu.make(
            header, query_start, token_table, block_table, block_size, out, longest
        )
        return
    count = out.block_table.shape[0]
    rows, seq_lens, found, new = (
        tensor[:count].long()
        for tensor in (header.rows, header.seq_lens, header.found, header.new_blocks)
    )
    index = (seq_lens - 1).clamp_(min=0) // block_size
    entered = torch.where((new >= 0) & (seq_lens > 0), new, block_table[rows, index].long())
    real = seq_lens > 0
    block_table[rows[real], index[real]] = entered[real].int()
    out.block_table.copy_(block_table[rows])
    request = torch.repeat_interleave(query_start.long().diff())
    offset = torch.arange(len(request)) - query_start.long()[1:][request] + seq_lens[request]
    inside = offset >= 0
    offset = offset.clamp_(min=0)
    row = rows[request]
    block = block_table[row, offset // block_size].long()
    count = len(request)
    out.token_ids[:count] = torch.where(inside, token_table[row, offset].long(), 0)
    out.positions[:count] = offset
    slots = block * block_size + offset % block_size
    written = inside & (offset >= found[request])
    out.slots[:count] = torch.where(written, slots, PADDING_SLOT)
