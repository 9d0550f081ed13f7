"""W4A16 matrix product in plain Triton, for sm_80 and newer: Y[M, N] = X[M, K] W[N, K]^T.

It reads the same packed copy as the Hopper kernel. A program computes ROWS rows of W times TILE_M
tokens over its share of K. W is the left operand of `tl.dot`: the packed order is that of its
fragments, so the words go from memory to the tensor cores' registers without a shuffle. Triton's
pipeliner makes the loads asynchronous (`num_stages`).

SPLIT programs share a tile's columns; each leaves fp32 partial sums, and the last to arrive adds
them in order, so the result does not depend on who was last.

A bias, a gated activation and a residual may follow (configs.Product).

In Triton's interpreter (INTERPRET) arithmetic takes the place of the inline assembly.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from billfish.kernels.marlin import dequant
from billfish.kernels.marlin.configs import Product, TritonConfig
from billfish.kernels.marlin.packing import CODE_WORDS, UNIT_K, UNIT_N, stored_groups
from billfish.kernels.marlin.workspace import workspace

_CODES = tl.constexpr(CODE_WORDS)
_UNIT_N = tl.constexpr(UNIT_N)
_UNIT_K = tl.constexpr(UNIT_K)


@triton.jit
def _pair(words, first: tl.constexpr, CENTRE: tl.constexpr, DTYPE: tl.constexpr):
    """Nibbles `first` (even column) and `first + 4` (odd column) of each word, less CENTRE."""
    even = ((words >> (4 * first)) & 15) - CENTRE
    odd = ((words >> (4 * first + 16)) & 15) - CENTRE
    return tl.join(even, odd).to(DTYPE)


@triton.jit
def _word(words, CENTRE: tl.constexpr, DTYPE: tl.constexpr):
    """The four registers of each word, by arithmetic, as the inline assembly orders them."""
    low = tl.join(_pair(words, 0, CENTRE, DTYPE), _pair(words, 1, CENTRE, DTYPE))
    high = tl.join(_pair(words, 2, CENTRE, DTYPE), _pair(words, 3, CENTRE, DTYPE))
    return tl.join(low, high)


@triton.jit
def _codes(
    words, x, UNITS: tl.constexpr, CENTRE: tl.constexpr, ASM: tl.constexpr, REGS: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    """Packed words [UNITS, 1024] -> codes less CENTRE as x's dtype [UNITS * 64, 128]."""
    words = tl.reshape(words, [UNITS, 2, 4, 8, 4, 2, 2])  # unit k64 warp r c step/2 step&1
    if INTERPRET:
        even, odd = tl.split(words)
        both = tl.join(_word(even, CENTRE, x.dtype), _word(odd, CENTRE, x.dtype))
    else:
        o0, o1, o2, o3, o4, o5, o6, o7 = tl.inline_asm_elementwise(
            ASM, REGS, [words],
            (x.dtype, x.dtype, x.dtype, x.dtype, x.dtype, x.dtype, x.dtype, x.dtype), True, 2,
        )  # fmt: skip
        both = tl.join(tl.join(o0, o1), tl.join(o2, o3))
        both = tl.join(both, tl.join(tl.join(o4, o5), tl.join(o6, o7)))
    # unit k64 warp r c step/2 k0 r3 k3 step&1 -> rows (unit warp r3 r), columns (the rest)
    both = tl.permute(both, [0, 2, 7, 3, 1, 5, 9, 8, 4, 6])
    return tl.reshape(both, [UNITS * 64, 128])


@triton.jit
def _per_column(values, GROUPS: tl.constexpr):
    """One value a row and group [rows, GROUPS] -> one a row and column, to broadcast or as is."""
    if GROUPS == 1:
        return values
    else:
        rows: tl.constexpr = values.shape[0]
        wide = tl.broadcast_to(values[:, :, None], [rows, GROUPS, 128 // GROUPS])
        return tl.reshape(wide, [rows, 128])


@triton.jit(do_not_specialize=["M"])
def w4a16_triton(
    units_ptr, meta_ptr, x_ptr, y_ptr, bias_ptr, residual_ptr, partial_ptr, count_ptr,
    M, N, K, steps, blocks, stride_x,
    UNITS: tl.constexpr, TILE_M: tl.constexpr, SPLIT: tl.constexpr, GROUPS: tl.constexpr,
    ZERO_POINT: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    SILU_MUL: tl.constexpr, ASM: tl.constexpr, REGS: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """units_ptr: int32 units; meta_ptr: the same memory as 16-bit values of x's dtype.

    x [M, K] with row stride stride_x; y and residual [M, N] contiguous; steps: units along K;
    blocks: along N.
    """
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    ROWS: tl.constexpr = UNITS * _UNIT_N
    KINDS: tl.constexpr = 1 if ZERO_POINT == "symmetric" else 2
    UNIT_WORDS: tl.constexpr = _CODES + KINDS * GROUPS * 32
    SUM_SCALE: tl.constexpr = GROUPS == 1 and ZERO_POINT != "offset"
    CENTRE: tl.constexpr = 8 if ZERO_POINT == "symmetric" else 0
    tile_n = tl.program_id(0)
    tile_m = tl.program_id(1)
    split = tl.program_id(2)

    unit = tile_n * UNITS + tl.arange(0, UNITS)
    row = tl.arange(0, ROWS)
    row_unit = tile_n * UNITS + row // 64
    in_unit = row % 64
    # Where a row stands among the row pairs: 16 w + 2 r + r3 for row 16 w + 8 r3 + r.
    place = in_unit // 16 * 16 + in_unit % 8 * 2 + in_unit // 8 % 2
    group = tl.arange(0, GROUPS)
    word = tl.arange(0, _CODES)
    m = tile_m * TILE_M + tl.arange(0, TILE_M)
    column = tl.arange(0, _UNIT_K)

    code_at = units_ptr + (unit.to(tl.int64) * steps * UNIT_WORDS)[:, None] + word[None, :]
    meta_at = meta_ptr + (row_unit.to(tl.int64) * steps * (2 * UNIT_WORDS) + place)[:, None]
    meta_at += group[None, :] * 64 + 2 * _CODES
    x_at = x_ptr + (m.to(tl.int64) * stride_x)[None, :] + column[:, None]

    acc = tl.zeros([ROWS, TILE_M], tl.float32)
    for step in range(split * steps // SPLIT, (split + 1) * steps // SPLIT):
        words = tl.load(code_at + step * UNIT_WORDS, mask=(unit < blocks)[:, None], other=0)
        x_live = (m < M)[None, :] & (column + step * _UNIT_K < K)[:, None]
        x = tl.load(x_at + step * _UNIT_K, mask=x_live, other=0.0)
        meta_live = (row_unit < blocks)[:, None] & (group >= 0)[None, :]
        at = meta_at + step * (2 * UNIT_WORDS)
        scales = tl.load(at, mask=meta_live, other=0.0)
        w = _codes(words, x, UNITS, CENTRE, ASM, REGS, INTERPRET)
        if ZERO_POINT == "integer":
            zeros = tl.load(at + GROUPS * 64, mask=meta_live, other=0.0)
            w = (w - _per_column(zeros, GROUPS)).to(DTYPE)
        if SUM_SCALE:
            acc += tl.dot(w, x) * scales.to(tl.float32)
        else:
            w = w.to(tl.float32) * _per_column(scales, GROUPS).to(tl.float32)
            if ZERO_POINT == "offset":
                offsets = tl.load(at + GROUPS * 64, mask=meta_live, other=0.0)
                w += _per_column(offsets, GROUPS).to(tl.float32)
            acc = tl.dot(w.to(DTYPE), x, acc)

    if SPLIT == 1:
        _store(acc, y_ptr, bias_ptr, residual_ptr, m, tile_n * ROWS, M, N, HAS_BIAS, HAS_RESIDUAL,
               SILU_MUL)  # fmt: skip
    else:
        SIZE: tl.constexpr = ROWS * TILE_M
        tile = tile_m * tl.num_programs(0) + tile_n
        mine = row[:, None] * TILE_M + tl.arange(0, TILE_M)[None, :]
        at = partial_ptr + tile.to(tl.int64) * (SPLIT * SIZE) + mine
        tl.store(at + split * SIZE, acc)
        tl.debug_barrier()
        arrived = tl.atomic_add(count_ptr + tile, 1, sem="acq_rel", scope="gpu")
        if arrived == SPLIT - 1:
            total = tl.zeros([ROWS, TILE_M], tl.float32)
            for other in range(SPLIT):
                total += tl.load(at + other * SIZE, cache_modifier=".cg")
            _store(total, y_ptr, bias_ptr, residual_ptr, m, tile_n * ROWS, M, N, HAS_BIAS,
                   HAS_RESIDUAL, SILU_MUL)  # fmt: skip
            tl.store(count_ptr + tile, 0)


@triton.jit
def _store(
    acc, y_ptr, bias_ptr, residual_ptr, m, row0, M, N, HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, SILU_MUL: tl.constexpr,
):  # fmt: skip
    """Store the sums of rows row0 onwards [rows, tokens]; hopper_schedule.Output explains."""
    rows: tl.constexpr = acc.shape[0]
    row = row0 + tl.arange(0, rows)
    if HAS_BIAS:
        if SILU_MUL:
            n = row // 16 * 8 + row % 8
            at = tl.where(row % 16 < 8, n, N + n)
        else:
            n = row
            at = row
        acc += tl.load(bias_ptr + at, mask=n < N, other=0.0).to(tl.float32)[:, None]
    if SILU_MUL:
        pairs = tl.reshape(acc, [rows // 16, 2, 8, acc.shape[1]])
        gate, up = tl.split(tl.permute(pairs, [0, 2, 3, 1]))
        acc = tl.reshape(gate / (1 + tl.exp(-gate)) * up, [rows // 2, acc.shape[1]])
        n = row0 // 2 + tl.arange(0, rows // 2)
    else:
        n = row
    at = (m.to(tl.int64) * N)[None, :] + n[:, None]
    live = (m < M)[None, :] & (n < N)[:, None]
    if HAS_RESIDUAL:
        acc += tl.load(residual_ptr + at, mask=live, other=0.0).to(tl.float32)
    tl.store(y_ptr + at, acc.to(y_ptr.dtype.element_ty), mask=live)


def grid(config: TritonConfig, m: int, blocks: int) -> tuple[int, int, int]:
    """Programs along N, M and K for an output of m rows and `blocks` units of columns."""
    return -(-blocks * UNIT_N // config.rows), -(-m // config.tile_m), config.split


def arguments(
    x: Tensor,
    units: Tensor,
    y: Tensor,
    partial: Tensor,
    counters: Tensor,
    product: Product,
    config: TritonConfig,
    interpret: bool = False,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The kernel's positional and keyword arguments. x: [M, K], unit stride along K."""
    m, k = x.shape
    blocks, steps, _ = units.shape
    outputs, zero_point, bias, residual, silu_mul = product
    mode = "code" if zero_point == "symmetric" else "raw"
    positional = (
        units, units.view(x.dtype), x, y, y if bias is None else bias,
        y if residual is None else residual, partial, counters,
        m, outputs, k, steps, blocks, x.stride(0),
    )  # fmt: skip
    keywords = {
        "UNITS": config.rows // UNIT_N,
        "TILE_M": config.tile_m,
        "SPLIT": config.split,
        "GROUPS": stored_groups(units, zero_point != "symmetric"),
        "ZERO_POINT": zero_point,
        "HAS_BIAS": bias is not None,
        "HAS_RESIDUAL": residual is not None,
        "SILU_MUL": silu_mul,
        "ASM": dequant.assembly("bf16" if x.dtype == torch.bfloat16 else "f16", mode),
        "REGS": dequant.constraints(mode),
        "INTERPRET": interpret,
        "num_warps": 4,
        "num_stages": config.stages,
    }
    return positional, keywords


def launch(
    x: Tensor, units: Tensor, product: Product, config: TritonConfig, interpret: bool = False
) -> Tensor:
    """Y [M, outputs] of X [M, K]. x: unit stride along K."""
    programs = grid(config, x.shape[0], units.shape[0])
    y = torch.empty((x.shape[0], product.outputs), dtype=x.dtype, device=x.device)
    partial, counters = y, units  # never touched where columns are not split
    if config.split > 1:
        tiles = programs[0] * programs[1]
        size = tiles * config.split * config.rows * config.tile_m
        memory = workspace(x.device, size, tiles)
        partial, counters = memory.sums, memory.counters
    positional, keywords = arguments(x, units, y, partial, counters, product, config, interpret)
    w4a16_triton[programs](*positional, **keywords)
    return y
