"""The inputs of a step on an NVIDIA GPU: one launch; see `step_inputs`."""

import triton
import triton.language as tl
from torch import Tensor

from billfish.worker.step_inputs import Header, StepInputs

_TOKENS = 128
_BLOCKS = 256


@triton.jit
def _inputs_kernel(
    rows, seq_lens, found, new_blocks, query_start, token_table, block_table,
    token_ids, positions, slots, step_table, token_stride, block_stride, max_blocks,
    BLOCK_SIZE: tl.constexpr, TOKENS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Program (r, c): chunk c of the tokens of request r, and of its block table."""
    request, chunk = tl.program_id(0), tl.program_id(1)
    row = tl.load(rows + request).to(tl.int64)
    seq_len = tl.load(seq_lens + request)
    known = tl.load(found + request)
    new_block = tl.load(new_blocks + request)
    begin = tl.load(query_start + request)
    end = tl.load(query_start + request + 1)
    table = block_table + row * block_stride
    last_index = tl.maximum(seq_len - 1, 0) // BLOCK_SIZE
    enters = (new_block >= 0) & (seq_len > 0)

    # Only one program of a request has a new block to enter: it has one new token.
    token = chunk * TOKENS + tl.arange(0, TOKENS)
    inside = token < end - begin
    position = seq_len - (end - begin) + token
    real = inside & (position >= 0)
    place = tl.maximum(position, 0)
    value = tl.load(token_table + row * token_stride + place, mask=real, other=0)
    index = place // BLOCK_SIZE
    block = tl.load(table + index, mask=real, other=0)
    block = tl.where(enters & (index == last_index), new_block, block).to(tl.int64)
    slot = tl.where(real & (place >= known), block * BLOCK_SIZE + place % BLOCK_SIZE, -1)
    tl.store(token_ids + begin + token, value.to(tl.int64), mask=inside)
    tl.store(positions + begin + token, place.to(tl.int64), mask=inside)
    tl.store(slots + begin + token, slot, mask=inside)

    if chunk == 0:
        used = (seq_len + BLOCK_SIZE - 1) // BLOCK_SIZE
        for start in range(0, used, BLOCKS):
            entry = start + tl.arange(0, BLOCKS)
            there = entry < used
            blocks = tl.load(table + entry, mask=there, other=0)
            blocks = tl.where(enters & (entry == last_index), new_block, blocks)
            tl.store(step_table + request.to(tl.int64) * max_blocks + entry, blocks, mask=there)
        if enters:
            tl.store(table + last_index, new_block)


def make(
    header: Header,
    query_start: Tensor,
    token_table: Tensor,
    block_table: Tensor,
    block_size: int,
    out: StepInputs,
    longest: int,
) -> None:
    """See `step_inputs.make`."""
    count, max_blocks = out.block_table.shape
    _inputs_kernel[(count, triton.cdiv(longest, _TOKENS))](
        header.rows, header.seq_lens, header.found, header.new_blocks, query_start, token_table,
        block_table, out.token_ids, out.positions, out.slots, out.block_table,
        token_table.stride(0), block_table.stride(0), max_blocks,
        BLOCK_SIZE=block_size, TOKENS=_TOKENS, BLOCKS=_BLOCKS, num_warps=4,
    )  # fmt: skip
