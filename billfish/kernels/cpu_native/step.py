"""A decoding step of all layers of a model in one compiled function that several threads run.

Results are rounded to bfloat16 where the layers' own operations round; sums are in float32. A row's
result does not depend on the other rows. Threads share the rows of every product and wait for each
other between products, spinning: a step is a hundred such phases of tens of microseconds. What is
cheap for all (norms, the activation) each does for itself.
"""

import math
import zlib
from pathlib import Path
from typing import Any

import numba
from numba import njit

from billfish.kernels.cpu_native import products as p
from billfish.kernels.cpu_native import vector as v

# A layer's row in a model's table, int64: addresses of the two norms' weights and of the layer's
# cache; then, of each INT4 layer, those of codes, pairs and bias (0: none), and its group size.
INPUT_NORM, POST_NORM, CACHE, QKV, O_PROJ, GATE_UP, DOWN = 0, 1, 2, 3, 7, 11, 15

# Sizes, int64: hidden, inner, heads, KV heads, head_dim, rotary_dim; of the cache the bytes from a
# key to its value, from block to block, token to token and head to head, and the tokens of a block.

PHASES = 5
"""Of a layer."""
MAX_ROWS = 8
_FAST = {"reassoc", "contract", "nsz", "arcp"}


@njit(error_model="numpy", nogil=True)
def _wait(sync, phase, threads):
    """Until all threads have come to the end of a phase."""
    at = sync.ctypes.data
    v.atomic_add(at, 1)
    goal = (phase + 1) * threads
    spins = 0
    while v.atomic_read(at) < goal:
        spins += 1
        if spins > 20000:
            _yield()


_libc_yield = numba.types.ExternalFunction("sched_yield", numba.int32())


@njit(error_model="numpy", nogil=True)
def _yield():
    _libc_yield()


@njit(error_model="numpy", nogil=True)
def _address(array):
    return array.ctypes.data


@njit(error_model="numpy", nogil=True, fastmath=_FAST)
def _normalize(residual, added, add, weight, eps, rows, size, out):
    """out := rms_norm(residual += added), both rounded to bfloat16."""
    for m in range(rows):
        if add:
            for i in range(size):
                residual[m, i] = v.rounded(residual[m, i] + v.rounded(added[m, i]))
        squares = numba.float32(0)
        for i in range(size):
            squares += residual[m, i] * residual[m, i]
        factor = numba.float32(1) / math.sqrt(squares / numba.float32(size) + numba.float32(eps))
        for i in range(size):
            out[m, i] = v.rounded(residual[m, i] * factor * v.bfloat16_at(weight + 2 * i))


@njit(error_model="numpy", nogil=True)
def _product(x, rows, columns, table, layer, which, n, threads, codes, found, out, sync, phase):
    """out := x times an INT4 weight: those of its blocks of rows that no other thread has taken.

    Blocks that do not go round are taken by halves.
    """
    weights, pairs = table[layer, which], table[layer, which + 1]
    bias, size = table[layer, which + 2], table[layer, which + 3]
    groups = columns // size
    for m in range(rows):
        p.quantize(_address(x[m]), groups, size, _address(codes[m]), _address(found[m]))
    half = p.BLOCK_ROWS // 2
    blocks = (n + p.BLOCK_ROWS - 1) // p.BLOCK_ROWS
    most = 2 if half == 32 and rows < 8 else 1
    whole = blocks - blocks % threads if most == 2 else 0
    each = half // 16
    counter = _address(sync) + 64 + 8 * phase
    while True:
        unit = v.atomic_add(counter, 1)
        parts = most
        block, part = unit, 0
        if unit >= whole:
            block, part = whole + (unit - whole) // each, (unit - whole) % each
            parts = 1
        if block >= blocks:
            break
        row = block * p.BLOCK_ROWS + 16 * part
        p.int4(
            rows, parts, weights + block * columns * half + 16 * part, pairs + 4 * row,
            4 * blocks * p.BLOCK_ROWS, _address(codes), codes.strides[0], _address(found),
            found.strides[0], groups, size, _address(out) + 4 * row, out.strides[0],
        )  # fmt: skip
        if bias != 0:
            for high in (0, half):
                for m in range(rows):
                    for i in range(row + high, min(n, row + high + 16 * parts)):
                        out[m, i] = v.rounded(out[m, i]) + v.bfloat16_at(bias + 2 * i)


@njit(error_model="numpy", nogil=True)
def _turn(qkv, m, start, sizes_head, rotary, angles, out, row, split):
    """One head, rotated and rounded, to out[row]: in order, or split."""
    half = rotary // 2
    for i in range(sizes_head):
        x = v.rounded(qkv[m, start + i])
        if i < half:
            other = -v.rounded(qkv[m, start + i + half])
            c, s = v.float32_at(angles + 4 * i), v.float32_at(angles + 4 * (i + half))
            x = v.rounded(x * c + other * s)
        elif i < rotary:
            other = v.rounded(qkv[m, start + i - half])
            c, s = v.float32_at(angles + 4 * (i - half)), v.float32_at(angles + 4 * i)
            x = v.rounded(x * c + other * s)
        place = i // 32 * 32 + i % 2 * 16 + i % 32 // 2 if split else i
        out[row, place] = x


@njit(error_model="numpy", nogil=True)
def _attend(
    qkv, m, kv_head, sizes, cache, angles, slot, blocks, length, scale, turned, scores, mixed, out
):
    """Writes a request's new key and value of one KV head, then attends with its query heads."""
    heads, kv_heads, dim, rotary = sizes[2], sizes[3], sizes[4], sizes[5]
    value, block_step, token_step, head_step = sizes[6], sizes[7], sizes[8], sizes[9]
    size = sizes[10]
    key = cache + slot // size * block_step + slot % size * token_step + kv_head * head_step
    _turn(qkv, m, (heads + kv_head) * dim, dim, rotary, angles, turned, 0, False)
    first = (heads + kv_heads + kv_head) * dim
    for i in range(dim):
        v.put_bfloat16(key + 2 * i, turned[0, i])
        v.put_bfloat16(key + value + 2 * i, qkv[m, first + i])
    many = heads // kv_heads
    for h in range(many):
        _turn(qkv, m, (kv_head * many + h) * dim, dim, rotary, angles, turned, h, True)
    query, query_step = _address(turned), turned.strides[0]
    at, step = _address(scores), scores.strides[0]
    for start in range(0, length, size):
        keys = cache + blocks[start // size] * block_step + kv_head * head_step
        count = min(size, length - start)
        for h in range(0, many, 4):
            t = 0
            while t + 4 <= count:
                p.bfloat16_dots(
                    4, 4, keys + t * token_step, token_step, query + h * query_step, query_step,
                    dim // 32, at + h * step + 4 * (start + t), step,
                )  # fmt: skip
                t += 4
            while t < count:
                for each in range(h, min(many, h + 4)):
                    p.bfloat16_dots(
                        1, 1, keys + t * token_step, token_step, query + each * query_step,
                        query_step, dim // 32, at + each * step + 4 * (start + t), step,
                    )  # fmt: skip
                t += 1
    vectors = (length + 15) // 16
    for h in range(many):
        top = numba.float32(-math.inf)
        for t in range(length):
            scores[h, t] *= scale
            top = max(top, scores[h, t])
        for t in range(length, vectors * 16):
            scores[h, t] = numba.float32(-math.inf)
        total = v.exp_and_sum(at + h * step, vectors, v.bits(top))
        mixed[h, dim] = numba.float32(1) / total
        for i in range(dim):
            mixed[h, i] = 0
    mix, mix_step = _address(mixed), mixed.strides[0]
    for start in range(0, length, size):
        values = cache + value + blocks[start // size] * block_step + kv_head * head_step
        count = min(size, length - start)
        for d in range(0, dim, 32):
            for h in range(0, many, 4):  # rows behind the last hold nothing of use
                v.weighted_4(
                    values + 2 * d,
                    token_step,
                    count,
                    at + h * step + 4 * start,
                    step,
                    mix + h * mix_step + 4 * d,
                    mix_step,
                )
    for h in range(many):
        for i in range(dim):
            place = i // 32 * 32 + i % 2 * 16 + i % 32 // 2
            out[m, (kv_head * many + h) * dim + i] = v.rounded(mixed[h, place] * mixed[h, dim])


@njit(error_model="numpy", nogil=True)
def _layers(
    thread, threads, sync, table, sizes, eps, scale, real, rows, x, positions, cos_sin, slots,
    block_table, seq_lens, qkv, attended, gate_up, projected, residuals, inputs, codes, found,
    turned, scores, mixed, final_norm, out,
):  # fmt: skip
    """x: float32 [rows, hidden]; out: address of bfloat16 [real, hidden]."""
    hidden, inner, heads, kv_heads = sizes[0], sizes[1], sizes[2], sizes[3]
    dim, rotary = sizes[4], sizes[5]
    residual, mine, codes, found = residuals[thread], inputs[thread], codes[thread], found[thread]
    residual[:rows, :hidden] = x[:rows]
    phase = 0
    for layer in range(table.shape[0]):
        norm = table[layer, INPUT_NORM]
        _normalize(residual, projected, layer > 0, norm, eps, rows, hidden, mine)
        merged = (heads + 2 * kv_heads) * dim
        _product(
            mine, rows, hidden, table, layer, QKV, merged, threads, codes, found, qkv, sync, phase
        )
        _wait(sync, phase, threads)
        phase += 1
        counter = _address(sync) + 64 + 8 * phase
        while True:
            unit = v.atomic_add(counter, 1)
            if unit >= real * kv_heads:
                break
            m = unit // kv_heads
            _attend(
                qkv, m, unit % kv_heads, sizes, table[layer, CACHE],
                cos_sin + 4 * rotary * positions[m], slots[m], block_table[m], seq_lens[m], scale,
                turned[thread], scores[thread], mixed[thread], attended,
            )  # fmt: skip
        _wait(sync, phase, threads)
        phase += 1
        _product(
            attended, rows, heads * dim, table, layer, O_PROJ, hidden, threads, codes, found,
            projected, sync, phase,
        )  # fmt: skip
        _wait(sync, phase, threads)
        phase += 1
        _normalize(residual, projected, True, table[layer, POST_NORM], eps, rows, hidden, mine)
        _product(
            mine, rows, hidden, table, layer, GATE_UP, 2 * inner, threads, codes, found, gate_up,
            sync, phase,
        )  # fmt: skip
        _wait(sync, phase, threads)
        phase += 1
        for m in range(rows):
            gate = _address(gate_up[m])
            v.silu_mul(gate, gate + 4 * inner, _address(mine[m]), inner // 16)
        _product(
            mine, rows, inner, table, layer, DOWN, hidden, threads, codes, found, projected, sync,
            phase,
        )  # fmt: skip
        _wait(sync, phase, threads)
        phase += 1
    if thread == 0:
        _normalize(residual, projected, True, final_norm, eps, real, hidden, mine)
        for m in range(real):
            for i in range(hidden):
                v.put_bfloat16(out + 2 * (m * hidden + i), mine[m, i])


HEAD_ROWS = 256
"""Tokens of the vocabulary that a thread takes at a time."""


@njit(error_model="numpy", nogil=True)
def _head(thread, sync, weight, q8_0, n, columns, real, rows, x, found, out):
    """out bfloat16 [real, n] := x times a weight [n, columns] in Q8_0, or bfloat16 and x split."""
    at, x_step = _address(x), x.strides[0]
    mine = found[thread]
    o, o_step = _address(mine), mine.strides[0]
    steps = columns // 32
    step = steps * (p.Q8_0_BYTES if q8_0 else 64)
    width = 2 if rows == 8 else 4
    while True:
        start = v.atomic_add(_address(sync) + 64, 1) * HEAD_ROWS
        if start >= n:
            break
        count = min(HEAD_ROWS, n - start)
        i = 0
        while i < count:
            many = width if i + width <= count else 1
            w = weight + (start + i) * step
            if q8_0:
                p.q8_0_dots(rows, many, w, step, at, x_step, steps, o + 4 * i, o_step)
            else:
                p.bfloat16_dots(rows, many, w, step, at, x_step, steps, o + 4 * i, o_step)
            i += many
        for m in range(real):
            for i in range(count):
                v.put_bfloat16(out + 2 * (m * n + start + i), mine[m, i])


def _entry_points(version: int) -> tuple[Any, Any]:
    """The functions that numba keeps on disk. It compiles them anew when this file has changed, and
    when what they close over has: so the version is that of the other files."""

    @njit(error_model="numpy", nogil=True, cache=True)
    def layers(*arguments):
        if version >= 0:
            _layers(*arguments)

    @njit(error_model="numpy", nogil=True, cache=True)
    def head(*arguments):
        if version >= 0:
            _head(*arguments)

    return layers, head


def _version() -> int:
    checksum = p.BLOCK_ROWS
    for name in ("products.py", "vector.py"):
        checksum = zlib.crc32(Path(__file__).with_name(name).read_bytes(), checksum)
    return checksum


layers, head = _entry_points(_version())
