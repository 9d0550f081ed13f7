"""Rotary embedding on a GPU, in Triton; see `rotary.py`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from billfish.kernels.general.gpu import _on

TILE = 2048
"""Values of a half that a program turns, at most."""


@triton.jit
def _turn(
    x, out, token, heads, first, cos, sin, x_token, x_head,
    D: tl.constexpr, HALF: tl.constexpr, SPACE: tl.constexpr, HEADS: tl.constexpr,
    REST: tl.constexpr,
):  # fmt: skip
    """HEADS heads of a token from `first` on. REST: a power of two that holds what stays."""
    head = first + tl.arange(0, HEADS)[:, None]
    d = tl.arange(0, SPACE)[None, :]
    inside = (head < heads) & (d < HALF)
    source = x + token * x_token + head * x_head
    target = out + (token * heads + head) * D
    low = tl.load(source + d, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(source + HALF + d, mask=inside, other=0.0).to(tl.float32)
    kind = out.dtype.element_ty
    tl.store(target + d, (low * cos - high * sin).to(kind), mask=inside)
    tl.store(target + HALF + d, (high * cos + low * sin).to(kind), mask=inside)
    if REST > 0:
        r = 2 * HALF + tl.arange(0, REST)[None, :]
        there = (head < heads) & (r < D)
        tl.store(target + r, tl.load(source + r, mask=there), mask=there)


@triton.jit
def _rotary_kernel(
    query, key, query_out, key_out, positions, cos_sin, length, heads, key_heads, query_blocks,
    query_token, query_head, key_token, key_head, table_row, positions_step,
    INVERSE: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, SPACE: tl.constexpr,
    HEADS: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """Program (token, block of heads); the first query_blocks blocks are of the query."""
    token, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position = tl.load(positions + token * positions_step)
    d = tl.arange(0, SPACE)[None, :]
    # A position outside of the table gives NaN, and nothing outside of it is read.
    there = (d < HALF) & (position >= 0) & (position < length)
    row = cos_sin + position * table_row
    cos = tl.load(row + d, mask=there, other=float("nan"))
    sin = tl.load(row + HALF + d, mask=there, other=float("nan"))
    if INVERSE:
        sin = -sin
    if block < query_blocks:
        _turn(query, query_out, token, heads, block * HEADS, cos, sin, query_token, query_head,
              D, HALF, SPACE, HEADS, REST)  # fmt: skip
    else:
        _turn(key, key_out, token, key_heads, (block - query_blocks) * HEADS, cos, sin, key_token,
              key_head, D, HALF, SPACE, HEADS, REST)  # fmt: skip


def rotary_embedding(
    query: Tensor, key: Tensor, positions: Tensor, cos_sin: Tensor, *, fused: bool = True
) -> tuple[Tensor, Tensor]:
    return _rotated(query, key, positions, cos_sin, fused, inverse=False)


def rotary_embedding_backward(
    dquery: Tensor, dkey: Tensor, positions: Tensor, cos_sin: Tensor, *, fused: bool = True
) -> tuple[Tensor, Tensor]:
    return _rotated(dquery, dkey, positions, cos_sin, fused, inverse=True)


def _rotated(
    query: Tensor, key: Tensor, positions: Tensor, cos_sin: Tensor, fused: bool, *, inverse: bool
) -> tuple[Tensor, Tensor]:
    """fused: query and key in one launch."""
    tokens, _, size = query.shape
    both = [x if x.stride(2) == 1 else x.contiguous() for x in (query, key)]
    outs = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in both]
    if not tokens:
        return outs[0], outs[1]
    if cos_sin.stride(1) != 1:
        cos_sin = cos_sin.contiguous()
    half = cos_sin.shape[1] // 2
    space = triton.next_power_of_2(half)
    most = max(query.shape[1], key.shape[1], 1)
    heads = min(max(1, TILE // space), triton.next_power_of_2(most))
    blocks = [triton.cdiv(x.shape[1], heads) for x in both]
    rest = triton.next_power_of_2(size - 2 * half) if size > 2 * half else 0
    with _on(query):
        for first, count in ((0, sum(blocks)),) if fused else ((0, blocks[0]), (1, blocks[1])):
            one, two = (both[first], both[1]), (outs[first], outs[1])
            if count:
                _rotary_kernel[(tokens, count)](
                    *one, *two, positions, cos_sin, cos_sin.shape[0], one[0].shape[1],
                    one[1].shape[1], blocks[first], one[0].stride(0), one[0].stride(1),
                    one[1].stride(0), one[1].stride(1), cos_sin.stride(0), positions.stride(0),
                    INVERSE=inverse, D=size, HALF=half, SPACE=space, HEADS=heads, REST=rest,
                    num_warps=max(1, heads * space // 1024),
                )  # fmt: skip
    return outs[0], outs[1]
