"""Where the tokens of one step are in the paged KV cache; built once, shared by all layers."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from billfish.kernels._library import bad_argument
from billfish.kernels.paged_attention.cpu_decode import DecodeStep

if TYPE_CHECKING:
    from billfish.kernels.paged_attention.planner import AttentionPlan

PADDING_SLOT = -1

FARTHEST = 1 << 30
"""A sliding window that no sequence is longer than: kernels count tokens in 32 bits."""


@dataclass(frozen=True, eq=False)
class AttentionMetadata:
    """R requests with T new tokens in all.

    block_table: int32 [R, max_blocks], block ids of each request in order; entries past its length
    are never read. seq_lens: int32 [R], KV length in tokens, new ones included. query_start: int32
    [R + 1], where the new tokens of each request begin among T. slot_mapping: int64 [T], the slot
    (block * block_size + offset) of each new token, -1 where it has none. max_query_len,
    max_seq_len: largest of the step, on the host. plans: how a GPU splits the work of this step,
    see `AttentionPlan.update`; a layer that none of them is for plans for itself.
    """

    block_table: Tensor
    seq_lens: Tensor
    query_start: Tensor
    slot_mapping: Tensor
    max_query_len: int
    max_seq_len: int
    plans: tuple["AttentionPlan", ...] = ()
    _decode_steps: dict[object, "DecodeStep | None"] = field(
        default_factory=dict, init=False, repr=False
    )

    @classmethod
    def build(
        cls,
        block_table: Tensor | Sequence[Sequence[int]],
        seq_lens: Tensor | Sequence[int],
        query_lens: Tensor | Sequence[int],
        block_size: int,
        device: torch.device | str = "cpu",
    ) -> "AttentionMetadata":
        """From host lists (block tables may differ in length) or CPU integer tensors.

        New tokens are the last query_len of each sequence. Where query_len exceeds seq_len, as for
        the padding of a batch (seq_len 0), the tokens before the sequence's start get slot -1.

        Raises KernelArgumentError: lengths differ in number or are negative, a block table is
        shorter than its sequence, or a new token's block id is negative.
        """
        if block_size < 1:
            raise bad_argument("block_size", block_size, "at least 1")
        lengths = _host_integers("seq_lens", seq_lens, 1).long()
        queries = _host_integers("query_lens", query_lens, 1).long()
        table = _block_table(block_table)
        requests = lengths.shape[0]
        if queries.shape[0] != requests or table.shape[0] != requests:
            got = f"{table.shape[0]}, {requests} and {queries.shape[0]}"
            raise bad_argument("block_table, seq_lens and query_lens", got, "one row a request")
        if requests and int(torch.minimum(lengths, queries).min()) < 0:
            raise bad_argument("seq_lens and query_lens", "a negative length", "lengths from 0 up")
        max_seq_len = int(lengths.max()) if requests else 0
        if max_seq_len > table.shape[1] * block_size:
            expected = f"at most {table.shape[1]} blocks of {block_size} tokens"
            raise bad_argument("seq_lens", max_seq_len, expected)
        query_start = torch.zeros(requests + 1, dtype=torch.int64, device="cpu")
        torch.cumsum(queries, 0, out=query_start[1:])
        return cls(
            block_table=table.to(device),
            seq_lens=lengths.int().to(device),
            query_start=query_start.int().to(device),
            slot_mapping=_slots(table, lengths, queries, query_start, block_size).to(device),
            max_query_len=int(queries.max()) if requests else 0,
            max_seq_len=max_seq_len,
        )

    def decode_step(self, cache: Tensor) -> "DecodeStep | None":
        """What a CPU prepares for all layers whose caches are like this one."""
        kind = (cache.shape[:2], cache.dtype)
        if kind not in self._decode_steps:
            self._decode_steps[kind] = DecodeStep.of(
                self.block_table, self.seq_lens, self.query_start, self.slot_mapping, cache
            )
        return self._decode_steps[kind]


def _slots(
    table: Tensor, lengths: Tensor, queries: Tensor, query_start: Tensor, block_size: int
) -> Tensor:
    """Slot of each new token, int64 [T]."""
    tokens = int(query_start[-1])
    request = torch.repeat_interleave(queries, output_size=tokens)
    position = torch.arange(tokens, device="cpu") + (lengths - query_start[1:])[request]
    inside = position.clamp(min=0)
    if tokens == 0 or table.shape[1] == 0:
        return torch.full((tokens,), PADDING_SLOT, device="cpu")
    block = table[request, inside // block_size].long()
    real = position >= 0
    if bool(((block < 0) & real).any()):
        row = int(request[(block < 0) & real][0])
        raise bad_argument(f"block_table[{row}]", "a negative id", "a block for each new token")
    return torch.where(real, block * block_size + inside % block_size, PADDING_SLOT)


def _host_integers(name: str, values: Tensor | Sequence[int], dims: int) -> Tensor:
    tensor = (
        values
        if isinstance(values, Tensor)
        else torch.tensor(values, dtype=torch.int64, device="cpu")
    )
    if tensor.dim() != dims or not tensor.is_cpu or tensor.dtype not in (torch.int32, torch.int64):
        got = f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"
        raise bad_argument(name, got, f"{dims}-dimensional int32 or int64 on the CPU")
    return tensor


def _block_table(rows: Tensor | Sequence[Sequence[int]]) -> Tensor:
    if isinstance(rows, Tensor):
        table = _host_integers("block_table", rows, 2)
    else:
        width = max(map(len, rows), default=0)
        padded = [[*row, *[-1] * (width - len(row))] for row in rows]
        table = torch.tensor(padded, dtype=torch.int64, device="cpu").view(len(rows), width)
    if table.dtype == torch.int64 and table.numel():
        largest = int(table.max())
        if largest > torch.iinfo(torch.int32).max:
            raise bad_argument("block_table", largest, "block ids that int32 holds")
    return table.int().contiguous()
