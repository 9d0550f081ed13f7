"""Inner loops on vectors of 16 floats, written as LLVM's own instructions.

LLVM splits the vectors to what the processor has: one register with AVX-512, two with AVX2, four
with SSE or NEON. Each loop is a numba intrinsic over addresses. A row's sum is made in the same
order however many rows there are, so results do not depend on the batch.

bfloat16 values are read two at a time, as the halves of a 32-bit word, so what they are multiplied
with is kept `split`: of every 32 values the 16 even ones, then the 16 odd ones.
"""

import inspect
from collections.abc import Callable
from typing import Any

import numba
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

LANES = 16

_I8, _I32, _I64, _F32 = ir.IntType(8), ir.IntType(32), ir.IntType(64), ir.FloatType()
_BYTES = ir.VectorType(_I8, LANES)
_INTS = ir.VectorType(_I32, LANES)
_FLOATS = ir.VectorType(_F32, LANES)


def _at(b: ir.IRBuilder, address: Any, kind: Any) -> Any:
    return b.inttoptr(address, kind.as_pointer())


def _load(b: ir.IRBuilder, address: Any, kind: Any, align: int = 4) -> Any:
    return b.load(_at(b, address, kind), align=align)


def _store(b: ir.IRBuilder, value: Any, address: Any) -> None:
    b.store(value, _at(b, address, value.type), align=4)


def _i64(value: int) -> ir.Constant:
    return ir.Constant(_I64, value)


def _ints(value: int) -> ir.Constant:
    return ir.Constant(_INTS, [value] * LANES)


def _floats(value: float) -> ir.Constant:
    return ir.Constant(_FLOATS, [value] * LANES)


def _splat(b: ir.IRBuilder, value: Any) -> Any:
    kind = ir.VectorType(value.type, LANES)
    first = b.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(_I32, 0))
    return b.shuffle_vector(first, first, ir.Constant(_INTS, [0] * LANES))


def _call(b: ir.IRBuilder, name: str, *arguments: Any) -> Any:
    kind = arguments[0].type
    suffix = f"v{LANES}f32" if kind == _FLOATS else "f32"
    function = b.module.globals.get(f"{name}.{suffix}") or ir.Function(
        b.module, ir.FunctionType(kind, [kind] * len(arguments)), f"{name}.{suffix}"
    )
    return b.call(function, arguments)


def _fma(b: ir.IRBuilder, x: Any, y: Any, z: Any) -> Any:
    return _call(b, "llvm.fma", x, y, z)


def _halves(b: ir.IRBuilder, words: Any) -> tuple[Any, Any]:
    """The low and the high bfloat16 of each word, as floats."""
    low = b.shl(words, _ints(16))
    high = b.and_(words, _ints(0xFFFF0000))
    return b.bitcast(low, _FLOATS), b.bitcast(high, _FLOATS)


def _sum(b: ir.IRBuilder, vector: Any) -> Any:
    """Of all lanes, halves to halves."""
    width = LANES
    while width > 1:
        width //= 2
        kind = ir.VectorType(_I32, width)
        low = b.shuffle_vector(vector, vector, ir.Constant(kind, list(range(width))))
        high = b.shuffle_vector(vector, vector, ir.Constant(kind, list(range(width, 2 * width))))
        vector = b.fadd(low, high)
    return b.extract_element(vector, ir.Constant(_I32, 0))


def _loop(
    b: ir.IRBuilder, count: Any, state: list[Any], body: Callable[[Any, list[Any]], list[Any]]
) -> list[Any]:
    """body(i, state) -> state, for i from 0 below count."""
    before = b.basic_block
    head, inside, after = (b.append_basic_block(name) for name in ("head", "body", "after"))
    b.branch(head)
    b.position_at_end(head)
    index = b.phi(_I64)
    index.add_incoming(_i64(0), before)
    phis = [b.phi(value.type) for value in state]
    for phi, value in zip(phis, state, strict=True):
        phi.add_incoming(value, before)
    b.cbranch(b.icmp_signed("<", index, count), inside, after)
    b.position_at_end(inside)
    new = body(index, list(phis))
    index.add_incoming(b.add(index, _i64(1)), b.basic_block)
    for phi, value in zip(phis, new, strict=True):
        phi.add_incoming(value, b.basic_block)
    b.branch(head)
    b.position_at_end(after)
    return list(phis)


def _intrinsic(count: int, result: Any, build: Callable[..., Any]) -> Any:
    """An intrinsic of `count` addresses or integers; build(builder, *values) -> value or None."""

    def typing(context: Any, *arguments: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            made = build(builder, *values)
            return context.get_dummy_value() if made is None else made

        return result(*[types.int64] * count), codegen

    # numba reads the number of arguments off the signature.
    names = ["context", *(f"a{i}" for i in range(count))]
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    typing.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(name, kind) for name in names]
    )
    return intrinsic(typing)


def _int4(rows: int, parts: int = 2) -> Any:
    """out[m][r], out[m][r + high]: x times 32 * parts rows of an INT4 weight.

    codes: 16 * parts bytes of the first column, others `stride` bytes apart. pairs: scale and
    shift, groups `pair_stride` apart, those of the high nibbles `high` rows behind. x: float32
    rows, x_stride bytes apart. sums: of x by group, float32, sum_stride bytes apart.
    """

    def build(
        b: Any, codes: Any, stride: Any, pairs: Any, pair_stride: Any, high: Any, x: Any,
        x_stride: Any, sums: Any, sum_stride: Any, groups: Any, size: Any, out: Any,
        out_stride: Any,
    ) -> None:  # fmt: skip
        ms = [_i64(m) for m in range(rows)]
        xs = [b.add(x, b.mul(m, x_stride)) for m in ms]
        zeros = [_floats(0.0)] * (2 * rows * parts)
        behind = b.mul(high, _i64(4))

        def group(g: Any, totals: list[Any]) -> list[Any]:
            first = b.mul(g, size)

            def column(i: Any, accumulators: list[Any]) -> list[Any]:
                k = b.add(first, i)
                at = b.add(codes, b.mul(k, stride))
                weights = []
                for part in range(parts):
                    wide = b.zext(_load(b, b.add(at, _i64(16 * part)), _BYTES, 1), _INTS)
                    weights.append(b.sitofp(b.and_(wide, _ints(15)), _FLOATS))
                    weights.append(b.sitofp(b.lshr(wide, _ints(4)), _FLOATS))
                place = b.mul(k, _i64(4))
                new: list[Any] = []
                for m in range(rows):
                    value = _splat(b, _load(b, b.add(xs[m], place), _F32))
                    for weight in weights:
                        new.append(_fma(b, weight, value, accumulators[len(new)]))
                return new

            products = _loop(b, size, zeros, column)
            here = b.add(pairs, b.mul(g, pair_stride))
            both = []
            for part in range(parts):
                low = b.add(here, _i64(64 * part))
                both += [_halves(b, _load(b, at, _INTS)) for at in (low, b.add(low, behind))]
            new: list[Any] = []
            for m in range(rows):
                at = b.add(sums, b.add(b.mul(ms[m], sum_stride), b.mul(g, _i64(4))))
                total = _splat(b, _load(b, at, _F32))
                for scale, shift in both:
                    which = len(new)
                    product = _fma(b, _floats(-8.0), total, products[which])
                    value = _fma(b, scale, product, totals[which])
                    new.append(_fma(b, shift, total, value))
            return new

        totals = iter(_loop(b, groups, zeros, group))
        for m in range(rows):
            for part in range(parts):
                at = b.add(out, b.add(b.mul(ms[m], out_stride), _i64(64 * part)))
                _store(b, next(totals), at)
                _store(b, next(totals), b.add(at, behind))

    return _intrinsic(13, types.void, build)


def _dots(rows: int, columns: int) -> Any:
    """out[m][c] = x[m] . w[c] for a number of bfloat16 vectors w, of 32 * `steps` values each."""

    def build(
        b: Any, w: Any, w_stride: Any, x: Any, x_stride: Any, steps: Any, out: Any, out_stride: Any
    ) -> None:
        ws = [b.add(w, b.mul(_i64(c), w_stride)) for c in range(columns)]
        xs = [b.add(x, b.mul(_i64(m), x_stride)) for m in range(rows)]

        def step(i: Any, accumulators: list[Any]) -> list[Any]:
            new = list(accumulators)
            pairs = [_halves(b, _load(b, b.add(c, b.mul(i, _i64(64))), _INTS, 2)) for c in ws]
            place = b.mul(i, _i64(128))
            for m in range(rows):
                at = b.add(xs[m], place)
                even = _load(b, at, _FLOATS)
                odd = _load(b, b.add(at, _i64(64)), _FLOATS)
                for c, (low, high) in enumerate(pairs):
                    where = m * columns + c
                    new[where] = _fma(b, high, odd, _fma(b, low, even, new[where]))
            return new

        found = _loop(b, steps, [_floats(0.0)] * (rows * columns), step)
        for m in range(rows):
            for c in range(columns):
                at = b.add(b.add(out, b.mul(_i64(m), out_stride)), _i64(4 * c))
                _store(b, _sum(b, found[m * columns + c]), at)

    return _intrinsic(7, types.void, build)


def _weighted(rows: int) -> Any:
    """acc[m] += sum over t of p[m][t] * v[t], for 32 of the values of v; acc is split."""

    def build(
        b: Any, v: Any, v_stride: Any, tokens: Any, p: Any, p_stride: Any, acc: Any,
        acc_stride: Any,
    ) -> None:  # fmt: skip
        ps = [b.add(p, b.mul(_i64(m), p_stride)) for m in range(rows)]
        places = []
        for m in range(rows):
            at = b.add(acc, b.mul(_i64(m), acc_stride))
            places += [at, b.add(at, _i64(64))]

        def token(t: Any, accumulators: list[Any]) -> list[Any]:
            low, high = _halves(b, _load(b, b.add(v, b.mul(t, v_stride)), _INTS, 2))
            new = []
            for m in range(rows):
                share = _splat(b, _load(b, b.add(ps[m], b.mul(t, _i64(4))), _F32))
                new.append(_fma(b, low, share, accumulators[2 * m]))
                new.append(_fma(b, high, share, accumulators[2 * m + 1]))
            return new

        start = [_load(b, at, _FLOATS) for at in places]
        for at, value in zip(places, _loop(b, tokens, start, token), strict=True):
            _store(b, value, at)

    return _intrinsic(7, types.void, build)


int4_1, int4_2, int4_4 = (_int4(rows) for rows in (1, 2, 4))
int4_8 = _int4(8, 1)
dots_1, dots_2, dots_4, dots_8 = (_dots(m, c) for m, c in ((1, 4), (2, 4), (4, 4), (8, 2)))
dot = _dots(1, 1)
weighted_4 = _weighted(4)

_COEFFICIENTS = (1 / 720, 1 / 120, 1 / 24, 1 / 6, 0.5, 1.0, 1.0)


def _exp(b: ir.IRBuilder, x: Any) -> Any:
    """exp(x), within 3e-7 of it relatively; what is under -87 counts as -87."""
    x = b.select(b.fcmp_ordered("<", x, _floats(-87.0)), _floats(-87.0), x)
    x = b.select(b.fcmp_ordered(">", x, _floats(88.0)), _floats(88.0), x)
    whole = _call(b, "llvm.nearbyint", b.fmul(x, _floats(1.4426950216293335)))
    rest = _fma(b, whole, _floats(-0.693145751953125), x)
    rest = _fma(b, whole, _floats(-1.428606765330187e-06), rest)
    value = _floats(float(numba.float32(_COEFFICIENTS[0])))
    for c in _COEFFICIENTS[1:]:
        value = _fma(b, value, rest, _floats(float(numba.float32(c))))
    power = b.shl(b.add(b.fptosi(whole, _INTS), _ints(127)), _ints(23))
    return b.fmul(value, b.bitcast(power, _FLOATS))


def _rounded(b: ir.IRBuilder, x: Any) -> Any:
    """To bfloat16, to nearest even, as a float; scalars and vectors."""
    kind = _INTS if x.type == _FLOATS else _I32

    def constant(value: int) -> Any:
        return _ints(value) if kind == _INTS else ir.Constant(_I32, value)

    bits = b.bitcast(x, kind)
    odd = b.and_(b.lshr(bits, constant(16)), constant(1))
    up = b.and_(b.add(bits, b.add(odd, constant(0x7FFF))), constant(0xFFFF0000))
    return b.select(b.fcmp_unordered("uno", x, x), x, b.bitcast(up, x.type))


def _softmax_build(b: Any, scores: Any, vectors: Any, largest: Any) -> Any:
    """scores := exp(scores - largest), its bits given; returns the sum. Whole vectors."""
    top = _splat(b, b.bitcast(b.trunc(largest, _I32), _F32))

    def part(i: Any, state: list[Any]) -> list[Any]:
        at = b.add(scores, b.mul(i, _i64(64)))
        value = _exp(b, b.fsub(_load(b, at, _FLOATS), top))
        _store(b, value, at)
        return [b.fadd(state[0], value)]

    return _sum(b, _loop(b, vectors, [_floats(0.0)], part)[0])


def _silu_build(b: Any, gate: Any, up: Any, out: Any, vectors: Any) -> None:
    """out := silu(gate) * up rounded to bfloat16."""

    def part(i: Any, state: list[Any]) -> list[Any]:
        place = b.mul(i, _i64(64))
        g = _rounded(b, _load(b, b.add(gate, place), _FLOATS))
        u = _rounded(b, _load(b, b.add(up, place), _FLOATS))
        below = b.fadd(_floats(1.0), _exp(b, b.fneg(g)))
        _store(b, _rounded(b, b.fmul(b.fdiv(g, below), u)), b.add(out, place))
        return []

    _loop(b, vectors, [], part)


exp_and_sum = _intrinsic(3, types.float32, _softmax_build)
silu_mul = _intrinsic(4, types.void, _silu_build)


@intrinsic
def rounded(context, x):
    """A float32 rounded to bfloat16."""
    return types.float32(types.float32), lambda context, b, signature, args: _rounded(b, args[0])


@intrinsic
def bits(context, x):
    """Of a float32, as an int64."""

    def codegen(context, b, signature, args):
        return b.zext(b.bitcast(args[0], _I32), _I64)

    return types.int64(types.float32), codegen


def _widened(b: Any, address: Any) -> Any:
    word = b.zext(_load(b, address, ir.IntType(16), 2), _I32)
    return b.bitcast(b.shl(word, ir.Constant(_I32, 16)), _F32)


bfloat16_at = _intrinsic(1, types.float32, _widened)
float32_at = _intrinsic(1, types.float32, lambda b, address: _load(b, address, _F32))


@intrinsic
def put_bfloat16(context, address, value):
    """Rounds and stores."""

    def codegen(context, b, signature, args):
        word = b.lshr(b.bitcast(_rounded(b, args[1]), _I32), ir.Constant(_I32, 16))
        b.store(b.trunc(word, ir.IntType(16)), _at(b, args[0], ir.IntType(16)), align=2)
        return context.get_dummy_value()

    return types.void(types.int64, types.float32), codegen


def _add_build(b: Any, address: Any, value: Any) -> Any:
    return b.atomic_rmw("add", _at(b, address, _I64), value, "seq_cst")


def _read_build(b: Any, address: Any) -> Any:
    return b.load_atomic(_at(b, address, _I64), "seq_cst", 8)


atomic_add = _intrinsic(2, types.int64, _add_build)
atomic_read = _intrinsic(1, types.int64, _read_build)
