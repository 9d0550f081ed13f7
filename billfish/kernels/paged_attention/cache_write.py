"""Fused reshape and block write: the step's keys and values go to their slots in one launch.

The same launch may normalize (QK-norm) and rotate (rotary embedding, NeoX half-split) query and
key on the way, so that they are read and written once.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from billfish.kernels._library import launches_early


@triton.jit
def _load_part(base, offset, begin, SIZE: tl.constexpr, PADDED: tl.constexpr, exists):
    """Elements begin .. begin + SIZE of each row."""
    d = tl.arange(0, PADDED)
    mask = exists[:, None] & (d < SIZE)[None, :]
    return tl.load(base + offset[:, None] + begin + d[None, :], mask=mask, other=0.0)


@triton.jit
def _store_part(base, offset, begin, value, SIZE: tl.constexpr, PADDED: tl.constexpr, written):
    d = tl.arange(0, PADDED)
    mask = written[:, None] & (d < SIZE)[None, :]
    tl.store(
        base + offset[:, None] + begin + d[None, :], value.to(base.dtype.element_ty), mask=mask
    )


@triton.jit
def _transform(
    low, high, tail, weight, position, cos_sin, table_stride, eps,
    HALF: tl.constexpr, HALF_P: tl.constexpr, TAIL: tl.constexpr, TAIL_P: tl.constexpr,
    NORM: tl.constexpr, ROTARY: tl.constexpr,
):  # fmt: skip
    """RMS norm and rotation of rows split as [HALF | HALF | TAIL], in float32, rounded once."""
    d = tl.arange(0, HALF_P)
    inside = d < HALF
    if ROTARY:
        row = cos_sin + position[:, None] * table_stride + d[None, :]
        cos = tl.load(row, mask=inside[None, :], other=0.0).to(tl.float32)
        sin = tl.load(row + HALF, mask=inside[None, :], other=0.0).to(tl.float32)
        if NORM:
            # The assembler would ask for the angles after the norm, which waits for the rows.
            tl.debug_barrier()
    low = low.to(tl.float32)
    high = high.to(tl.float32)
    tail = tail.to(tl.float32)
    if NORM:
        square = tl.sum(low * low, 1) + tl.sum(high * high, 1) + tl.sum(tail * tail, 1)
        inverse = (1.0 / tl.sqrt(square / (2 * HALF + TAIL) + eps))[:, None]
        low *= inverse * tl.load(weight + d, mask=inside, other=0.0).to(tl.float32)[None, :]
        high *= inverse * tl.load(weight + HALF + d, mask=inside, other=0.0).to(tl.float32)[None, :]
        e = tl.arange(0, TAIL_P)
        scale = tl.load(weight + 2 * HALF + e, mask=e < TAIL, other=0.0).to(tl.float32)
        tail *= inverse * scale[None, :]
    if ROTARY:
        low, high = low * cos - high * sin, high * cos + low * sin
    return low, high, tail


@triton.jit
def _move(
    source, offset, target, goal, exists, written, weight, position, cos_sin, table_stride, eps,
    HALF: tl.constexpr, HALF_P: tl.constexpr, TAIL: tl.constexpr, TAIL_P: tl.constexpr,
    NORM: tl.constexpr, ROTARY: tl.constexpr,
):  # fmt: skip
    """Rows at source + offset to target + goal, transformed on the way. As they are, bit by bit,
    if not transformed. All that exist are read, so that no read waits for the slots.
    """
    low = _load_part(source, offset, 0, HALF, HALF_P, exists)
    high = _load_part(source, offset, HALF, HALF, HALF_P, exists)
    tail = _load_part(source, offset, 2 * HALF, TAIL, TAIL_P, exists)
    if NORM or ROTARY:
        low, high, tail = _transform(
            low, high, tail, weight, position, cos_sin, table_stride, eps,
            HALF, HALF_P, TAIL, TAIL_P, NORM, ROTARY,
        )  # fmt: skip
    _store_part(target, goal, 0, low, HALF, HALF_P, written)
    _store_part(target, goal, HALF, high, HALF, HALF_P, written)
    if TAIL > 0:
        _store_part(target, goal, 2 * HALF, tail, TAIL, TAIL_P, written)


@triton.jit(do_not_specialize=["num_tokens"])
def _write_kernel(
    query, key, value, query_out, k_cache, v_cache, slots, positions, cos_sin, q_weight, k_weight,
    num_tokens, eps,
    q_token_stride, q_head_stride, k_token_stride, k_head_stride, v_token_stride, v_head_stride,
    kc_block_stride, kc_slot_stride, kc_head_stride, vc_block_stride, vc_slot_stride,
    vc_head_stride, table_stride,
    NUM_HEADS: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HALF: tl.constexpr, HALF_P: tl.constexpr, TAIL: tl.constexpr, TAIL_P: tl.constexpr,
    NORM: tl.constexpr, ROTARY: tl.constexpr, TOKENS: tl.constexpr, SPAN: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program a (block of tokens, SPAN heads): first heads of the query, then keys, then
    values. The heads of a program share the angles that it reads.

    NUM_HEADS is 0 where there is no query to transform.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.arange(0, TOKENS * SPAN)
    token = tl.program_id(0).to(tl.int64) * TOKENS + row // SPAN
    member = row % SPAN
    inside = token < num_tokens
    head = tl.program_id(1) * SPAN
    kv_head = ((head - NUM_HEADS) % HKV).to(tl.int64)
    slot = tl.load(slots + token, mask=inside, other=-1)
    written = slot >= 0
    slot = tl.where(written, slot, 0)
    position = token
    if ROTARY:
        position = tl.load(positions + token, mask=inside, other=0)
    if head < NUM_HEADS:
        _move(
            query + head * q_head_stride, token * q_token_stride + member * q_head_stride,
            query_out + head * D, token * (NUM_HEADS * D) + member * D, inside, inside,
            q_weight, position, cos_sin, table_stride, eps,
            HALF, HALF_P, TAIL, TAIL_P, NORM, ROTARY,
        )  # fmt: skip
    elif head < NUM_HEADS + HKV:
        goal = slot // BLOCK_SIZE * kc_block_stride + slot % BLOCK_SIZE * kc_slot_stride
        _move(
            key + kv_head * k_head_stride, token * k_token_stride + member * k_head_stride,
            k_cache + kv_head * kc_head_stride, goal + member * kc_head_stride,
            inside, written, k_weight, position, cos_sin, table_stride, eps,
            HALF, HALF_P, TAIL, TAIL_P, NORM, ROTARY,
        )  # fmt: skip
    else:
        goal = slot // BLOCK_SIZE * vc_block_stride + slot % BLOCK_SIZE * vc_slot_stride
        _move(
            value + kv_head * v_head_stride, token * v_token_stride + member * v_head_stride,
            v_cache + kv_head * vc_head_stride, goal + member * vc_head_stride,
            inside, written, k_weight, position, cos_sin, table_stride, eps,
            HALF, HALF_P, TAIL, TAIL_P, False, False,
        )  # fmt: skip


def write(
    key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
) -> None:
    """`write_kv` on the GPU: key, value [T, HKV, D] to slots int64 [T]; slot -1 is skipped.

    Arguments already validated; any strides, but the last dimension contiguous.
    """
    _launch(None, key, value, k_cache, v_cache, slot_mapping, None, None, None, None, 0.0)


def rotate_and_write(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    positions: Tensor | None = None,
    cos_sin: Tensor | None = None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """Normalize and rotate query and key, write key and value to the cache, in one launch.

    query [T, H, D], key and value [T, HKV, D], any strides with a contiguous last dimension: views
    of one QKV projection will do. positions int64 [T] and cos_sin float32 [max_pos, rotary_dim]
    (cos half | sin half) rotate the first rotary_dim dims (NeoX half-split); without them there is
    no rotation. q_norm, k_norm [D], both or none, are the weights of an RMS norm over D (as in
    Qwen3) that comes before the rotation. Computes in float32 and rounds once, where separate
    steps round after each. Returns the query, contiguous. Tokens with slot -1 are skipped in the
    cache, not in the query. Arguments already validated.
    """
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    _launch(
        (query, out), key, value, k_cache, v_cache, slot_mapping, positions, cos_sin, q_norm,
        k_norm, eps,
    )  # fmt: skip
    return out


def _launch(
    queries: tuple[Tensor, Tensor] | None,
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    positions: Tensor | None,
    cos_sin: Tensor | None,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
) -> None:
    num_tokens, num_kv_heads, head_dim = key.shape
    if num_tokens == 0:
        return
    query, query_out = queries or (key, key)
    num_heads = query.shape[1] if queries else 0
    half = (head_dim if cos_sin is None else cos_sin.shape[1]) // 2
    tail = head_dim - 2 * half
    all_heads = num_heads + 2 * num_kv_heads
    span = math.gcd(num_heads, num_kv_heads, 4)
    if span * max(k_cache.stride(2), v_cache.stride(2)) >= 2**31:
        span = 1  # heads far apart: the kernel counts the heads of a program in 32 bits
    # Many small programs where tokens are few, as all wait for the same trips to memory.
    tokens = max(1, (16 if num_tokens >= 128 else 4) // span)
    early = launches_early(key.device)
    grid = (triton.cdiv(num_tokens, tokens), all_heads // span)
    _write_kernel[grid](
        query, key, value, query_out, k_cache, v_cache, slot_mapping,
        slot_mapping if positions is None else positions, key if cos_sin is None else cos_sin,
        key if q_norm is None else q_norm, key if k_norm is None else k_norm, num_tokens, eps,
        *query.stride()[:2], *key.stride()[:2], *value.stride()[:2],
        *k_cache.stride()[:3], *v_cache.stride()[:3], 0 if cos_sin is None else cos_sin.stride(0),
        NUM_HEADS=num_heads, HKV=num_kv_heads, D=head_dim, BLOCK_SIZE=k_cache.shape[1],
        HALF=half, HALF_P=triton.next_power_of_2(half), TAIL=tail,
        TAIL_P=triton.next_power_of_2(max(tail, 1)), NORM=q_norm is not None,
        ROTARY=cos_sin is not None, TOKENS=tokens, SPAN=span, PDL=early, launch_pdl=early,
        num_warps=4 if tokens * span > 4 else 1,
    )  # fmt: skip
