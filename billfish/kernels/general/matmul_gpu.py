"""The dense product of matrices on a GPU, in Triton; see `matmul.py`."""

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from billfish.kernels.general.gpu import _on, activated
from billfish.kernels.gluon_compat import gluon_supported

if gluon_supported():
    from billfish.kernels.general import matmul_hopper

GROUP = 8
"""Rows of tiles that programs take together."""

FULL = 128
"""Tiles from which a GPU counts as full; the same for all, as what is cut along k depends on it."""


@triton.jit
def _store(
    out, value, bias, more, row, column, m, n, BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
    RESIDUAL: tl.constexpr,
):  # fmt: skip
    """What follows the product, in float32, then out. row: [rows, 1], column: [1, columns]; more:
    what of the residual belongs to the value."""
    there = (row < m) & (column < n)
    if BIAS:
        value += tl.load(bias + column, mask=there, other=0.0).to(tl.float32)
    value = activated(value, ACTIVATION)
    if RESIDUAL:
        value += more.to(tl.float32)
    tl.store(out + row * n + column, value.to(out.dtype.element_ty), mask=there)


@triton.jit
def _halves(value):
    """The left and the right half of a tile's columns."""
    pairs = tl.reshape(value, [value.shape[0], 2, value.shape[1] // 2])
    return tl.split(pairs.trans(0, 2, 1))


@triton.jit
def _tile(matrix, row, column, rows, columns, row_stride, column_stride):
    """Elements of a matrix, 0 where it ends. row: [rows, 1], column: [1, columns]."""
    at = matrix + row * row_stride + column * column_stride
    return tl.load(at, mask=(row < rows) & (column < columns), other=0.0)


@triton.jit
def _matmul_kernel(
    a, b, bias, residual, out, m, n, k, a_m, a_k, b_k, b_n, residual_m, residual_n, k_part,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    TMA: tl.constexpr, TURN_A: tl.constexpr, TURN_B: tl.constexpr, PRECISION: tl.constexpr,
    BIAS: tl.constexpr, ACTIVATION: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Program (tile, part): `k_part` of k. out: [parts, m, n].

    TMA: a and b are descriptors, of their transposes where TURN_A or TURN_B says so.
    """
    across, down = tl.cdiv(n, BLOCK_N), tl.cdiv(m, BLOCK_M)
    # GROUP rows of tiles are walked column by column.
    block, within = tl.program_id(0) // (GROUP * across), tl.program_id(0) % (GROUP * across)
    height = tl.minimum(down - block * GROUP, GROUP)
    top = (block * GROUP + within % height) * BLOCK_M
    left = (within // height) * BLOCK_N
    part = tl.program_id(1)
    row = top.to(tl.int64) + tl.arange(0, BLOCK_M)[:, None]
    column = left.to(tl.int64) + tl.arange(0, BLOCK_N)[None, :]
    # A wide tile is finished in parts: of what follows, registers hold a part or two at a time. Of
    # half floats they have room for the first part all along, read while products are computed.
    SIZE: tl.constexpr = residual.dtype.element_ty.primitive_bitwidth // 8
    PARTS: tl.constexpr = 1 if BLOCK_N <= 128 else SIZE
    WIDTH: tl.constexpr = BLOCK_N // PARTS
    EARLY: tl.constexpr = RESIDUAL and SIZE == 2
    at = left.to(tl.int64) + tl.arange(0, WIDTH)[None, :]
    if EARLY:
        more = _tile(residual, row, at, m, n, residual_m, residual_n)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    begin = part * k_part
    end = tl.minimum(begin + k_part, k)
    # Without a way around the loop, sums are set to 0 where the assembler lets wgmma overlap.
    tl.assume(begin < end)
    for start in range(begin, end, BLOCK_K):
        if TMA:
            x = a.load([start, top]).T if TURN_A else a.load([top, start])
            y = b.load([left, start]).T if TURN_B else b.load([start, left])
        else:
            i = start + tl.arange(0, BLOCK_K).to(tl.int64)
            x = _tile(a, row, i[None, :], m, end, a_m, a_k)
            y = _tile(b, i[:, None], column, end, n, b_k, b_n)
        total = tl.dot(x, y, total, input_precision=PRECISION)
    out += part.to(tl.int64) * m * n
    parts = (total,)
    if PARTS == 2:
        parts = _halves(total)
    elif PARTS == 4:
        lower, upper = _halves(total)
        parts = _halves(lower) + _halves(upper)
    if not RESIDUAL:
        more = 0.0
    elif not EARLY:
        more = _tile(residual, row, at, m, n, residual_m, residual_n)
    for each in tl.static_range(PARTS):
        behind = more
        if RESIDUAL and each + 1 < PARTS:
            behind = _tile(residual, row, at + WIDTH, m, n, residual_m, residual_n)
        _store(out, parts[each], bias, more, row, at, m, n, BIAS, ACTIVATION, RESIDUAL)
        at += WIDTH
        more = behind


@triton.jit
def _epilogue_kernel(
    parts, bias, residual, out, m, n, count, residual_m, residual_n, BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr, RESIDUAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (row, block of columns): adds parts [count, m, n] in order, and finishes."""
    row = tl.program_id(0).to(tl.int64) + tl.zeros([1, 1], tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    there = (row < m) & (column < n)
    total = tl.zeros([1, BLOCK], tl.float32)
    for part in range(count):
        at = parts + (row + tl.full((), part, tl.int64) * m) * n + column
        total += tl.load(at, mask=there, other=0.0).to(tl.float32)
    more = 0.0
    if RESIDUAL:
        more = _tile(residual, row, column, m, n, residual_m, residual_n)
    _store(out, total, bias, more, row, column, m, n, BIAS, ACTIVATION, RESIDUAL)


@dataclass(frozen=True)
class Config:
    """A tile, the threads that compute it, the queue's depth, and how often k is cut."""

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    split: int


def config(
    m: int, n: int, k: int, dtype: torch.dtype, precision: str, shared: int, hopper: bool
) -> Config:
    """For a product. shared: bytes of shared memory that a program may take; hopper: sums of tensor
    cores are in registers, but what they multiply is not."""
    wide = dtype == torch.float32
    block_m = min(128, max(16, triton.next_power_of_2(m)))
    block_n = min(128, max(32, triton.next_power_of_2(n)))
    block_k, warps = (32 if wide else 64), 4
    if wide and precision == "ieee":  # no tensor cores: values of a and b in registers as well
        block_m, block_n, block_k = min(64, block_m), min(64, block_n), 16
    elif wide and precision == "tf32x3":  # what is left of a and b beyond TF32, too
        block_m, block_n = min(64, block_m), min(128 if hopper else 64, block_n)
    elif hopper and block_m == 128 and triton.cdiv(m, 128) * triton.cdiv(n, 256) >= FULL:
        block_n, warps = 256, 8
    if block_m == block_n == 128:
        warps = 8
    tiles = triton.cdiv(m, block_m) * triton.cdiv(n, block_n)
    # Small products have smaller tiles before they are cut along k.
    while tiles < FULL and block_m * block_n > 64 * 64 and max(block_m, block_n) > 64:
        if block_m > block_n:
            block_m //= 2
        else:
            block_n //= 2
        tiles = triton.cdiv(m, block_m) * triton.cdiv(n, block_n)
        warps = 4
    split = max(1, min(FULL // max(tiles, 1), k // (8 * block_k), 16))
    size = (4 if wide else 2) * block_k * (block_m + block_n)
    stages = max(1, min(4, (shared - 1024) // size))
    return Config(block_m, block_n, block_k, warps, stages, split)


@cache
def _machine(device: torch.device) -> tuple[int, bool]:
    """(bytes of shared memory that a program may take, whether it has a copy engine for tiles)."""
    if device.type != "cuda":
        return 232448, True
    found = torch.cuda.get_device_properties(device)
    return getattr(found, "shared_memory_per_block_optin", 49152), found.major >= 9


def _describable(x: Tensor) -> tuple[Tensor, bool] | None:
    """x, or its transpose (True), as the copy engine takes it: rows of 16 bytes, aligned."""
    for turned in (False, True):
        t = x.t() if turned else x
        rows = t.stride(0) * t.element_size()
        fits = t.stride(1) == 1 and rows % 16 == 0 and t.data_ptr() % 16 == 0
        if fits and rows > 0 and t.shape[1] * t.element_size() <= max(rows, 16):
            return t, turned
    return None


def _pair(a: Tensor, b: Tensor) -> list[tuple[Tensor, bool]] | None:
    """Both as the copy engine takes them, if it does."""
    found = [f for f in map(_describable, (a, b)) if f]
    return found if len(found) == 2 else None


def matmul(
    a: Tensor, b: Tensor, bias: Tensor | None, activation: str, residual: Tensor | None,
    precision: str, *, fused: bool = True, group: int = GROUP, stages: int | None = None,
    tma: bool = True, split: int | None = None, settings: Config | None = None,
) -> Tensor:  # fmt: skip
    """a: [m, k], b: [k, n], bias: [n], residual: [m, n]."""
    m, n, k = a.shape[0], b.shape[1], a.shape[1]
    out = torch.empty(m, n, dtype=a.dtype, device=a.device)
    if not out.numel():
        return out
    shared, engine = _machine(a.device)
    pair = _pair(a, b) if tma and engine and k else None
    exact = a.dtype == torch.float32 and precision == "ieee" and gluon_supported()
    as_usual = fused and settings is None and split is None
    if exact and as_usual and pair and matmul_hopper.covers(m, n):
        with _on(a):
            matmul_hopper.matmul_float32(pair, bias, activation, residual, out, k, group, stages)
        return out
    c = settings or config(m, n, k, a.dtype, precision, shared, engine)
    step = triton.cdiv(triton.cdiv(k, split or c.split), c.block_k) * c.block_k or c.block_k
    parts = max(1, triton.cdiv(k, step))
    more = {"BIAS": bias is not None, "ACTIVATION": activation, "RESIDUAL": residual is not None}
    nothing = {"BIAS": False, "ACTIVATION": "none", "RESIDUAL": False}
    bias = out if bias is None else bias.contiguous()
    residual = out if residual is None else residual
    alone = fused and parts == 1 and k > 0
    into = out
    if not alone:
        kind = torch.float32 if parts > 1 else a.dtype
        into = (torch.empty if k else torch.zeros)(parts, m, n, dtype=kind, device=a.device)
    sides, turns = [a, b], [False, False]
    blocks = ((c.block_m, c.block_k), (c.block_k, c.block_n))
    for i, (x, turned) in enumerate(pair or ()):
        block = list(blocks[i][::-1] if turned else blocks[i])
        sides[i] = TensorDescriptor(x, list(x.shape), list(x.stride()), block)
        turns[i] = turned
    tiles = triton.cdiv(m, c.block_m) * triton.cdiv(n, c.block_n)
    with _on(a):
        if k:
            _matmul_kernel[(tiles, parts)](
                *sides, bias, residual, into, m, n, k, *a.stride(), *b.stride(),
                *residual.stride(), step, BLOCK_M=c.block_m, BLOCK_N=c.block_n, BLOCK_K=c.block_k,
                GROUP=group, TMA=pair is not None, TURN_A=turns[0], TURN_B=turns[1],
                PRECISION=precision, **(more if alone else nothing), num_warps=c.warps,
                num_stages=stages or c.stages,
            )  # fmt: skip
        if not alone:
            columns = min(1024, triton.next_power_of_2(n))
            _epilogue_kernel[(m, triton.cdiv(n, columns))](
                into, bias, residual, out, m, n, parts, *residual.stride(), BLOCK=columns, **more,
            )  # fmt: skip
    return out
