"""A decoding step of all layers of a model in one compiled function that several threads run.

Results are rounded to bfloat16 where the layers' own operations round; sums are in float32. A row's
result does not depend on the other rows. Threads share the rows of every product and wait for each
other between products, spinning: a step is a hundred such phases of tens of microseconds. What is
cheap for all (norms, the activation) each does for itself.
"""

import math

import numba
from numba import njit

from billfish.kernels.cpu_native import vector as v

# A layer's row in a model's table, int64: addresses of the two norms' weights and of the layer's
# cache; then, of each INT4 layer, those of codes, pairs and bias (0: none), and its group size.
INPUT_NORM, POST_NORM, CACHE, QKV, O_PROJ, GATE_UP, DOWN = 0, 1, 2, 3, 7, 11, 15

# Sizes, int64: hidden, inner, heads, KV heads, head_dim, rotary_dim, weight rows in a block of
# codes; of the cache the bytes from a key to its value, from block to block, token to token and
# head to head, and the tokens of a block.

PHASES = 5
"""Of a layer."""
MAX_ROWS = 8
BLOCK_ROWS = 64
"""Weight rows in a block of codes, what the loops are written for: torch's with AVX-512."""
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


@njit(error_model="numpy", nogil=True, fastmath=_FAST)
def _sum_groups(x, rows, columns, size, sums):
    for m in range(rows):
        for g in range(columns // size):
            total = numba.float32(0)
            for i in range(g * size, (g + 1) * size):
                total += x[m, i]
            sums[m, g] = total


@njit(error_model="numpy", nogil=True)
def _product(x, rows, columns, table, layer, which, n, block, sums, out, sync, phase):
    """out := x times an INT4 weight: the blocks of 32 rows that no other thread has taken."""
    codes, pairs = table[layer, which], table[layer, which + 1]
    bias, size = table[layer, which + 2], table[layer, which + 3]
    _sum_groups(x, rows, columns, size, sums)
    half = block // 2
    padded = (n + block - 1) // block * block
    total = padded // block
    counter = _address(sync) + 64 + 8 * phase
    at, x_step = _address(x), x.strides[0]
    sum_at, sum_step = _address(sums), sums.strides[0]
    out_at, out_step = _address(out), out.strides[0]
    groups = columns // size
    while True:
        unit = v.atomic_add(counter, 1)
        if unit >= total:
            break
        row = unit * block
        c = codes + unit * columns * half
        p = pairs + 4 * row
        o = out_at + 4 * row
        if rows == 1:
            v.int4_1(
                c,
                half,
                p,
                4 * padded,
                half,
                at,
                x_step,
                sum_at,
                sum_step,
                groups,
                size,
                o,
                out_step,
            )
        elif rows == 2:
            v.int4_2(
                c,
                half,
                p,
                4 * padded,
                half,
                at,
                x_step,
                sum_at,
                sum_step,
                groups,
                size,
                o,
                out_step,
            )
        elif rows == 4:
            v.int4_4(
                c,
                half,
                p,
                4 * padded,
                half,
                at,
                x_step,
                sum_at,
                sum_step,
                groups,
                size,
                o,
                out_step,
            )
        else:
            v.int4_8(
                c,
                half,
                p,
                4 * padded,
                half,
                at,
                x_step,
                sum_at,
                sum_step,
                groups,
                size,
                o,
                out_step,
            )
            v.int4_8(
                c + 16,
                half,
                p + 64,
                4 * padded,
                half,
                at,
                x_step,
                sum_at,
                sum_step,
                groups,
                size,
                o + 64,
                out_step,
            )
        if bias != 0:
            for m in range(rows):
                for i in range(row, min(n, row + block)):
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
    value, block_step, token_step, head_step = sizes[7], sizes[8], sizes[9], sizes[10]
    size = sizes[11]
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
                v.dots_4(
                    keys + t * token_step,
                    token_step,
                    query + h * query_step,
                    query_step,
                    dim // 32,
                    at + h * step + 4 * (start + t),
                    step,
                )
                t += 4
            while t < count:
                for each in range(h, min(many, h + 4)):
                    v.dot(
                        keys + t * token_step,
                        token_step,
                        query + each * query_step,
                        query_step,
                        dim // 32,
                        at + each * step + 4 * (start + t),
                        step,
                    )
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


@njit(error_model="numpy", nogil=True, cache=True)
def layers(
    thread,
    threads,
    sync,
    table,
    sizes,
    eps,
    scale,
    real,
    rows,
    x,
    positions,
    cos_sin,
    slots,
    block_table,
    seq_lens,
    qkv,
    attended,
    gate_up,
    projected,
    residuals,
    inputs,
    sums,
    turned,
    scores,
    mixed,
    final_norm,
    out,
):
    """x: float32 [rows, hidden]; out: address of bfloat16 [real, hidden]."""
    hidden, inner, heads, kv_heads = sizes[0], sizes[1], sizes[2], sizes[3]
    dim, rotary, block = sizes[4], sizes[5], sizes[6]
    residual, mine, my_sums = residuals[thread], inputs[thread], sums[thread]
    residual[:rows, :hidden] = x[:rows]
    phase = 0
    for layer in range(table.shape[0]):
        _normalize(
            residual, projected, layer > 0, table[layer, INPUT_NORM], eps, rows, hidden, mine
        )
        _product(
            mine,
            rows,
            hidden,
            table,
            layer,
            QKV,
            (heads + 2 * kv_heads) * dim,
            block,
            my_sums,
            qkv,
            sync,
            phase,
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
                qkv,
                m,
                unit % kv_heads,
                sizes,
                table[layer, CACHE],
                cos_sin + 4 * rotary * positions[m],
                slots[m],
                block_table[m],
                seq_lens[m],
                scale,
                turned[thread],
                scores[thread],
                mixed[thread],
                attended,
            )
        _wait(sync, phase, threads)
        phase += 1
        _product(
            attended,
            rows,
            heads * dim,
            table,
            layer,
            O_PROJ,
            hidden,
            block,
            my_sums,
            projected,
            sync,
            phase,
        )
        _wait(sync, phase, threads)
        phase += 1
        _normalize(residual, projected, True, table[layer, POST_NORM], eps, rows, hidden, mine)
        _product(
            mine,
            rows,
            hidden,
            table,
            layer,
            GATE_UP,
            2 * inner,
            block,
            my_sums,
            gate_up,
            sync,
            phase,
        )
        _wait(sync, phase, threads)
        phase += 1
        for m in range(rows):
            gate = _address(gate_up) + m * gate_up.strides[0]
            v.silu_mul(gate, gate + 4 * inner, _address(mine) + m * mine.strides[0], inner // 16)
        _product(
            mine, rows, inner, table, layer, DOWN, hidden, block, my_sums, projected, sync, phase
        )
        _wait(sync, phase, threads)
        phase += 1
    if thread == 0:
        _normalize(residual, projected, True, final_norm, eps, real, hidden, mine)
        for m in range(real):
            for i in range(hidden):
                v.put_bfloat16(out + 2 * (m * hidden + i), mine[m, i])


HEAD_ROWS = 256
"""Tokens of the vocabulary that a thread takes at a time."""


@njit(error_model="numpy", nogil=True, cache=True)
def head(thread, sync, weight, n, columns, real, rows, x, found, out):
    """out bfloat16 [real, n] := x times a bfloat16 weight [n, columns]; x is split."""
    at, x_step = _address(x), x.strides[0]
    mine = found[thread]
    o, o_step = _address(mine), mine.strides[0]
    step, steps = 2 * columns, columns // 32
    while True:
        start = v.atomic_add(_address(sync) + 64, 1) * HEAD_ROWS
        if start >= n:
            break
        count = min(HEAD_ROWS, n - start)
        first = weight + start * step
        i = 0
        width = 2 if rows == 8 else 4
        while i + width <= count:
            if rows == 1:
                v.dots_1(first + i * step, step, at, x_step, steps, o + 4 * i, o_step)
            elif rows == 2:
                v.dots_2(first + i * step, step, at, x_step, steps, o + 4 * i, o_step)
            elif rows == 4:
                v.dots_4(first + i * step, step, at, x_step, steps, o + 4 * i, o_step)
            else:
                v.dots_8(first + i * step, step, at, x_step, steps, o + 4 * i, o_step)
            i += width
        while i < count:
            for m in range(rows):
                v.dot(
                    first + i * step,
                    step,
                    at + m * x_step,
                    x_step,
                    steps,
                    o + m * o_step + 4 * i,
                    o_step,
                )
            i += 1
        for m in range(real):
            for i in range(count):
                v.put_bfloat16(out + 2 * (m * n + start + i), mine[m, i])
