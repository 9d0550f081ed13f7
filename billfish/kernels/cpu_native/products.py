"""Products of a few rows with INT4, 8-bit and bfloat16 weights, as LLVM's own instructions.

A row's result does not depend on how many rows there are.
"""

import math
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types

from billfish.kernels.cpu_native.vector import (
    BYTES,
    F32,
    FLOATS,
    I8,
    I16,
    I32,
    INTS,
    LANES,
    call,
    floats,
    fma,
    from_builder,
    greater,
    halves,
    i64,
    ints,
    load,
    loop,
    pointer,
    prefetch,
    reduced,
    splat,
    store,
    total,
)  # fmt: skip
from billfish.kernels.marlin.cpu import int4_block_rows

BLOCK_ROWS = int4_block_rows()
"""Rows of an INT4 weight whose codes torch packs together, half of them in the low nibbles."""
ROW_COUNTS = (1, 2, 4, 8)
"""Rows of x that there are loops for."""
Q8_0_BYTES = 34
"""Of a block of GGUF's Q8_0: a float16 scale and 32 signed bytes."""

_AHEAD = 4096
"""Bytes by which weights are asked for before they are read: a processor's own guesses of what is
read next end with each page of 4096 bytes."""
_GROUPS_AHEAD = 4
"""The same of scales."""


def _f32(value: float) -> ir.Constant:
    return ir.Constant(F32, value)


def _i32(value: int) -> ir.Constant:
    return ir.Constant(I32, value)


def _rows(b: ir.IRBuilder, rows: int, address: Any, stride: Any) -> list[Any]:
    return [b.add(address, b.mul(i64(m), stride)) for m in range(rows)]


def _quantize_build(b: Any, x: Any, groups: Any, size: Any, codes: Any, found: Any) -> None:
    """x, float32, in 16-bit integers: wrong by 2^-16 of the largest of its group at most.

    codes: int16. found: of each group the scale, float32, and the sum of its codes, int32. The
    scale is no number where one of the group is none or infinite. Under 2^-100 all is 0.
    """
    vectors = b.lshr(size, i64(4))

    def group(g: Any, state: list[Any]) -> list[Any]:
        first = b.mul(g, size)

        def larger(i: Any, state: list[Any]) -> list[Any]:
            at = b.add(x, b.mul(b.add(first, b.mul(i, i64(LANES))), i64(4)))
            # Without their signs floats are in order as integers are, and what is no number last.
            return [greater(b, b.and_(load(b, at, INTS), ints(0x7FFFFFFF)), state[0])]

        top = total(b, loop(b, vectors, [ints(0)], larger)[0], greater)
        infinite = b.icmp_signed(">=", top, _i32(0x7F800000))
        none = b.or_(infinite, b.icmp_signed("<", top, _i32((127 - 100) << 23)))
        top = b.bitcast(top, F32)
        scale = b.select(infinite, _f32(math.nan), b.fmul(top, _f32(1 / 32767)))
        factor = splat(b, b.fdiv(_f32(32767.0), top))
        kept = splat(b, b.select(none, _i32(0), _i32(-1)))

        def convert(i: Any, state: list[Any]) -> list[Any]:
            place = b.add(first, b.mul(i, i64(LANES)))
            value = b.fmul(load(b, b.add(x, b.mul(place, i64(4))), FLOATS), factor)
            # Cleared before it is converted, which what is no number must not be.
            value = b.bitcast(b.and_(b.bitcast(value, INTS), kept), FLOATS)
            code = b.fptosi(call(b, "llvm.nearbyint", value), INTS)
            narrow = b.trunc(code, ir.VectorType(I16, LANES))
            b.store(narrow, pointer(b, b.add(codes, b.mul(place, i64(2))), narrow.type), align=2)
            return [b.add(state[0], code)]

        both = total(b, loop(b, vectors, [ints(0)], convert)[0])
        at = b.add(found, b.mul(g, i64(8)))
        store(b, scale, at)
        store(b, both, b.add(at, i64(4)))
        return []

    loop(b, groups, [], group)


def _multiplied(b: Any, words: Any, pairs: Any, sums: Any) -> Any:
    """sums[i] + words[2i] * pairs[2i] + words[2i + 1] * pairs[2i + 1], of 16-bit integers.

    Written so that LLVM finds the processor's own instruction for it: pmaddwd or vpdpwssd.
    """
    narrow, wide = (ir.VectorType(kind, 2 * LANES) for kind in (I16, I32))
    products = b.mul(*(b.sext(b.bitcast(each, narrow), wide) for each in (words, pairs)))
    even, odd = (
        b.shuffle_vector(products, products, ir.Constant(INTS, list(range(first, 2 * LANES, 2))))
        for first in (0, 1)
    )
    return b.add(sums, b.add(even, odd))


def _int4(b: Any, rows: int, parts: int, *values: Any) -> None:
    """out[m][r], out[m][r + half a block]: x times an INT4 weight's rows r < 16 * parts and those.

    codes: the first byte of the first column of the block. pairs: scale and shift, bfloat16, groups
    pair_stride bytes apart. x, found: what `quantize` made, of each row. out: float32.
    """
    codes, pairs, pair_stride, x, x_stride, found, found_stride, groups, size, out, out_stride = (
        values
    )
    xs, founds = _rows(b, rows, x, x_stride), _rows(b, rows, found, found_stride)
    half = BLOCK_ROWS // 2
    columns = ir.VectorType(I8, 2 * half)
    steps = 2 if rows == 1 else 1  # of two columns; sums of one alone would wait for each other
    # Two columns' bytes of one row in the two halves of a word. Every second byte is of no use.
    masks = [
        [column * half + 16 * part + lane for lane in range(LANES) for column in (0, 0, 1, 1)]
        for part in range(parts)
    ]
    orders = [ir.Constant(ir.VectorType(I32, 4 * LANES), mask) for mask in masks]

    def group(g: Any, totals: list[Any]) -> list[Any]:
        first = b.mul(g, size)
        here = [b.add(at, b.mul(g, i64(8))) for at in founds]
        for part in range(parts):
            for behind in (0, 4 * half):
                far = b.add(pairs, b.mul(b.add(g, i64(_GROUPS_AHEAD)), pair_stride))
                prefetch(b, b.add(far, i64(64 * part + behind)))
        scales = [load(b, at, F32) for at in here]
        sums = [load(b, b.add(at, i64(4)), I32) for at in here]

        def two_columns(k: Any, state: list[Any]) -> list[Any]:
            at = b.add(codes, b.mul(k, i64(half)))
            prefetch(b, b.add(at, i64(_AHEAD)))
            loaded = load(b, at, columns, 1)
            weights = []
            for order in orders:
                words = b.bitcast(b.shuffle_vector(loaded, loaded, order), INTS)
                weights += [b.and_(words, ints(0x000F000F)), b.and_(words, ints(0x00F000F0))]
            new: list[Any] = []
            for at in xs:
                pair = splat(b, load(b, b.add(at, b.mul(k, i64(2))), I32, 2))
                new += [_multiplied(b, w, pair, state[len(new) + i]) for i, w in enumerate(weights)]
            return new

        def several(i: Any, state: list[Any]) -> list[Any]:
            new = []
            for step in range(steps):
                k = b.add(first, b.add(b.mul(i, i64(2 * steps)), i64(2 * step)))
                new += two_columns(k, state[step * each : (step + 1) * each])
            return new

        # The codes' middle is 8, in high nibbles 16 times that.
        start = [splat(b, b.mul(s, _i32(of))) for s in sums for of in (-8, -128) * parts]
        each = len(start)
        products = loop(
            b, b.sdiv(size, i64(2 * steps)), start + [ints(0)] * (each * (steps - 1)), several
        )
        if steps == 2:
            products = [b.add(products[i], products[i + each]) for i in range(each)]
        here = [b.add(b.add(pairs, b.mul(g, pair_stride)), i64(64 * part)) for part in range(parts)]
        places = [at for low in here for at in (low, b.add(low, i64(4 * half)))]
        scales_and_shifts = [halves(b, load(b, at, INTS)) for at in places]
        new: list[Any] = []
        for scale_x, sum_x in zip(scales, sums, strict=True):
            sum_of_x = splat(b, b.fmul(scale_x, b.sitofp(sum_x, F32)))
            units = [splat(b, b.fmul(scale_x, _f32(unit))) for unit in (1.0, 1 / 16)]
            for i, (scale, shift) in enumerate(scales_and_shifts):
                product = b.fmul(b.sitofp(products[len(new)], FLOATS), units[i % 2])
                value = fma(b, scale, product, totals[len(new)])
                new.append(fma(b, shift, sum_of_x, value))
        return new

    totals = iter(loop(b, groups, [floats(0.0)] * (2 * rows * parts), group))
    for at in _rows(b, rows, out, out_stride):
        for part in range(parts):
            for behind in (0, 4 * half):
                store(b, next(totals), b.add(at, i64(64 * part + behind)))


def _int4_build(b: Any, rows: Any, parts: Any, *values: Any) -> None:
    """`_int4`, for the number of rows and parts given; parts: 1 or 2."""
    for m in ROW_COUNTS:
        for p in (1, 2) if BLOCK_ROWS == 64 and m < 8 else (1,):
            is_this = b.and_(b.icmp_signed("==", rows, i64(m)), b.icmp_signed("==", parts, i64(p)))
            with b.if_then(is_this):
                _int4(b, m, p, *values)


def _bfloat16(b: Any, at: Any) -> tuple[Any, Any]:
    """The even and the odd ones of 32 values."""
    return halves(b, load(b, at, INTS, 2))


def _q8_0(b: Any, at: Any) -> tuple[Any, Any]:
    """The first and the second half of 32 values: exactly scale times code."""
    scale = splat(b, b.fpext(load(b, at, ir.HalfType(), 2), F32))
    low, high = (load(b, b.add(at, i64(2 + LANES * part)), BYTES, 1) for part in (0, 1))
    return tuple(b.fmul(b.sitofp(part, FLOATS), scale) for part in (low, high))


def _dots_build(read: Callable[..., tuple[Any, Any]], nbytes: int) -> Callable[..., None]:
    """out[m][c] = x[m] . w[c] for w of `steps` blocks of 32 values, each of nbytes.

    x: float32, each 32 in the order in which `read` gives those of w.
    """

    def several(b: Any, rows: int, columns: int, *values: Any) -> None:
        w, w_stride, x, x_stride, steps, out, out_stride = values
        ws, xs = _rows(b, columns, w, w_stride), _rows(b, rows, x, x_stride)

        def step(i: Any, sums: list[Any]) -> list[Any]:
            places = [b.add(at, b.mul(i, i64(nbytes))) for at in ws]
            for at in places:
                prefetch(b, b.add(at, i64(_AHEAD)))
            weights = [read(b, at) for at in places]
            new: list[Any] = []
            for at in (b.add(at, b.mul(i, i64(128))) for at in xs):
                first, second = load(b, at, FLOATS), load(b, b.add(at, i64(64)), FLOATS)
                for one, other in weights:
                    new.append(fma(b, other, second, fma(b, one, first, sums[len(new)])))
            return new

        sums = reduced(b, loop(b, steps, [floats(0.0)] * (rows * columns), step))
        for m, at in enumerate(_rows(b, rows, out, out_stride)):
            mine = ir.Constant(
                ir.VectorType(I32, columns), [m * columns + c for c in range(columns)]
            )
            store(b, b.shuffle_vector(sums, sums, mine), at)

    def build(b: Any, rows: Any, columns: Any, *values: Any) -> None:
        """columns: `columns_at_once` of the rows, or 1."""
        for m in ROW_COUNTS:
            for c in {columns_at_once(m), 1}:
                is_this = b.and_(
                    b.icmp_signed("==", rows, i64(m)), b.icmp_signed("==", columns, i64(c))
                )
                with b.if_then(is_this):
                    several(b, m, c, *values)

    return build


def columns_at_once(rows: int) -> int:
    return 2 if rows == 8 else 4


quantize = from_builder(5, types.void, _quantize_build)
int4 = from_builder(13, types.void, _int4_build)
bfloat16_dots = from_builder(9, types.void, _dots_build(_bfloat16, 64))
q8_0_dots = from_builder(9, types.void, _dots_build(_q8_0, Q8_0_BYTES))
