"""Vectors of 16 numbers as LLVM's own instructions, and inner loops made of them.

LLVM splits the vectors to what the processor has: one register with AVX-512, two with AVX2. Each
loop is a numba intrinsic over addresses.

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

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
F32 = ir.FloatType()
BYTES = ir.VectorType(I8, LANES)
INTS = ir.VectorType(I32, LANES)
FLOATS = ir.VectorType(F32, LANES)


def pointer(b: ir.IRBuilder, address: Any, kind: Any) -> Any:
    return b.inttoptr(address, kind.as_pointer())


def load(b: ir.IRBuilder, address: Any, kind: Any, align: int = 4) -> Any:
    return b.load(pointer(b, address, kind), align=align)


def store(b: ir.IRBuilder, value: Any, address: Any) -> None:
    b.store(value, pointer(b, address, value.type), align=4)


def prefetch(b: ir.IRBuilder, address: Any) -> None:
    """Ask for a cache line that will be read; an address that is nobody's does no harm."""
    byte, flag = I8.as_pointer(), ir.Constant(I32, 0)
    name = "llvm.prefetch.p0i8"
    function = b.module.globals.get(name) or ir.Function(
        b.module, ir.FunctionType(ir.VoidType(), [byte, I32, I32, I32]), name
    )
    b.call(function, [b.inttoptr(address, byte), flag, ir.Constant(I32, 3), ir.Constant(I32, 1)])


def i64(value: int) -> ir.Constant:
    return ir.Constant(I64, value)


def ints(value: int) -> ir.Constant:
    return ir.Constant(INTS, [value] * LANES)


def floats(value: float) -> ir.Constant:
    return ir.Constant(FLOATS, [value] * LANES)


def splat(b: ir.IRBuilder, value: Any) -> Any:
    kind = ir.VectorType(value.type, LANES)
    first = b.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(I32, 0))
    return b.shuffle_vector(first, first, ir.Constant(INTS, [0] * LANES))


def call(b: ir.IRBuilder, name: str, *arguments: Any) -> Any:
    kind = arguments[0].type
    suffix = f"v{LANES}f32" if kind == FLOATS else "f32"
    function = b.module.globals.get(f"{name}.{suffix}") or ir.Function(
        b.module, ir.FunctionType(kind, [kind] * len(arguments)), f"{name}.{suffix}"
    )
    return b.call(function, arguments)


def fma(b: ir.IRBuilder, x: Any, y: Any, z: Any) -> Any:
    return call(b, "llvm.fma", x, y, z)


def halves(b: ir.IRBuilder, words: Any) -> tuple[Any, Any]:
    """The low and the high bfloat16 of each word, as floats."""
    low = b.shl(words, ints(16))
    high = b.and_(words, ints(0xFFFF0000))
    return b.bitcast(low, FLOATS), b.bitcast(high, FLOATS)


def plus(b: ir.IRBuilder, x: Any, y: Any) -> Any:
    return b.fadd(x, y) if x.type.element == F32 else b.add(x, y)


def greater(b: ir.IRBuilder, x: Any, y: Any) -> Any:
    return b.select(b.icmp_signed(">", x, y), x, y)


def reduced(b: ir.IRBuilder, vectors: list[Any], together: Callable[..., Any] = plus) -> Any:
    """Of each of 1, 2, 4, 8 or 16 vectors all lanes together, as the lanes of one vector.

    Halves with halves, in this order however many vectors share the work.
    """
    width = LANES
    while width > 1:
        many = len(vectors) > 1
        lanes = range(vectors[0].type.count * (2 if many else 1))
        low, high = (
            ir.Constant(
                ir.VectorType(I32, len(lanes) // 2),
                [lane for lane in lanes if lane % width // (width // 2) == which],
            )
            for which in (0, 1)
        )
        pairs = zip(vectors[::2], vectors[1::2] or vectors, strict=True)
        vectors = [
            together(b, b.shuffle_vector(x, y, low), b.shuffle_vector(x, y, high)) for x, y in pairs
        ]
        width //= 2
    return vectors[0]


def total(b: ir.IRBuilder, vector: Any, together: Callable[..., Any] = plus) -> Any:
    """All lanes together."""
    return b.extract_element(reduced(b, [vector], together), ir.Constant(I32, 0))


def loop(
    b: ir.IRBuilder, count: Any, state: list[Any], body: Callable[[Any, list[Any]], list[Any]]
) -> list[Any]:
    """body(i, state) -> state, for i from 0 below count."""
    before = b.basic_block
    head, inside, after = (b.append_basic_block(name) for name in ("head", "body", "after"))
    b.branch(head)
    b.position_at_end(head)
    index = b.phi(I64)
    index.add_incoming(i64(0), before)
    phis = [b.phi(value.type) for value in state]
    for phi, value in zip(phis, state, strict=True):
        phi.add_incoming(value, before)
    b.cbranch(b.icmp_signed("<", index, count), inside, after)
    b.position_at_end(inside)
    new = body(index, list(phis))
    index.add_incoming(b.add(index, i64(1)), b.basic_block)
    for phi, value in zip(phis, new, strict=True):
        phi.add_incoming(value, b.basic_block)
    b.branch(head)
    b.position_at_end(after)
    return list(phis)


def from_builder(count: int, result: Any, build: Callable[..., Any]) -> Any:
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


def _weighted(rows: int) -> Any:
    """acc[m] += sum over t of p[m][t] * v[t], for 32 of the values of v; acc is split."""

    def build(
        b: Any, v: Any, v_stride: Any, tokens: Any, p: Any, p_stride: Any, acc: Any,
        acc_stride: Any,
    ) -> None:  # fmt: skip
        ps = [b.add(p, b.mul(i64(m), p_stride)) for m in range(rows)]
        places = []
        for m in range(rows):
            at = b.add(acc, b.mul(i64(m), acc_stride))
            places += [at, b.add(at, i64(64))]

        def token(t: Any, accumulators: list[Any]) -> list[Any]:
            low, high = halves(b, load(b, b.add(v, b.mul(t, v_stride)), INTS, 2))
            new = []
            for m in range(rows):
                share = splat(b, load(b, b.add(ps[m], b.mul(t, i64(4))), F32))
                new.append(fma(b, low, share, accumulators[2 * m]))
                new.append(fma(b, high, share, accumulators[2 * m + 1]))
            return new

        start = [load(b, at, FLOATS) for at in places]
        for at, value in zip(places, loop(b, tokens, start, token), strict=True):
            store(b, value, at)

    return from_builder(7, types.void, build)


weighted_4 = _weighted(4)

_COEFFICIENTS = (1 / 720, 1 / 120, 1 / 24, 1 / 6, 0.5, 1.0, 1.0)


def _exp(b: ir.IRBuilder, x: Any) -> Any:
    """exp(x), within 3e-7 of it relatively; what is under -87 counts as -87."""
    x = b.select(b.fcmp_ordered("<", x, floats(-87.0)), floats(-87.0), x)
    x = b.select(b.fcmp_ordered(">", x, floats(88.0)), floats(88.0), x)
    whole = call(b, "llvm.nearbyint", b.fmul(x, floats(1.4426950216293335)))
    rest = fma(b, whole, floats(-0.693145751953125), x)
    rest = fma(b, whole, floats(-1.428606765330187e-06), rest)
    value = floats(float(numba.float32(_COEFFICIENTS[0])))
    for c in _COEFFICIENTS[1:]:
        value = fma(b, value, rest, floats(float(numba.float32(c))))
    power = b.shl(b.add(b.fptosi(whole, INTS), ints(127)), ints(23))
    return b.fmul(value, b.bitcast(power, FLOATS))


def _rounded(b: ir.IRBuilder, x: Any) -> Any:
    """To bfloat16, to nearest even, as a float; scalars and vectors."""
    kind = INTS if x.type == FLOATS else I32

    def constant(value: int) -> Any:
        return ints(value) if kind == INTS else ir.Constant(I32, value)

    bits = b.bitcast(x, kind)
    odd = b.and_(b.lshr(bits, constant(16)), constant(1))
    up = b.and_(b.add(bits, b.add(odd, constant(0x7FFF))), constant(0xFFFF0000))
    return b.select(b.fcmp_unordered("uno", x, x), x, b.bitcast(up, x.type))


def _softmax_build(b: Any, scores: Any, vectors: Any, largest: Any) -> Any:
    """scores := exp(scores - largest), its bits given; returns the sum. Whole vectors."""
    top = splat(b, b.bitcast(b.trunc(largest, I32), F32))

    def part(i: Any, state: list[Any]) -> list[Any]:
        at = b.add(scores, b.mul(i, i64(64)))
        value = _exp(b, b.fsub(load(b, at, FLOATS), top))
        store(b, value, at)
        return [b.fadd(state[0], value)]

    return total(b, loop(b, vectors, [floats(0.0)], part)[0])


def _silu_build(b: Any, gate: Any, up: Any, out: Any, vectors: Any) -> None:
    """out := silu(gate) * up rounded to bfloat16."""

    def part(i: Any, state: list[Any]) -> list[Any]:
        place = b.mul(i, i64(64))
        g = _rounded(b, load(b, b.add(gate, place), FLOATS))
        u = _rounded(b, load(b, b.add(up, place), FLOATS))
        below = b.fadd(floats(1.0), _exp(b, b.fneg(g)))
        store(b, _rounded(b, b.fmul(b.fdiv(g, below), u)), b.add(out, place))
        return []

    loop(b, vectors, [], part)


exp_and_sum = from_builder(3, types.float32, _softmax_build)
silu_mul = from_builder(4, types.void, _silu_build)


@intrinsic
def rounded(context, x):
    """A float32 rounded to bfloat16."""
    return types.float32(types.float32), lambda context, b, signature, args: _rounded(b, args[0])


@intrinsic
def bits(context, x):
    """Of a float32, as an int64."""

    def codegen(context, b, signature, args):
        return b.zext(b.bitcast(args[0], I32), I64)

    return types.int64(types.float32), codegen


def _widened(b: Any, address: Any) -> Any:
    word = b.zext(load(b, address, I16, 2), I32)
    return b.bitcast(b.shl(word, ir.Constant(I32, 16)), F32)


bfloat16_at = from_builder(1, types.float32, _widened)
float32_at = from_builder(1, types.float32, lambda b, address: load(b, address, F32))


@intrinsic
def put_bfloat16(context, address, value):
    """Rounds and stores."""

    def codegen(context, b, signature, args):
        word = b.lshr(b.bitcast(_rounded(b, args[1]), I32), ir.Constant(I32, 16))
        b.store(b.trunc(word, I16), pointer(b, args[0], I16), align=2)
        return context.get_dummy_value()

    return types.void(types.int64, types.float32), codegen


def _add_build(b: Any, address: Any, value: Any) -> Any:
    return b.atomic_rmw("add", pointer(b, address, I64), value, "seq_cst")


def _read_build(b: Any, address: Any) -> Any:
    return b.load_atomic(pointer(b, address, I64), "seq_cst", 8)


atomic_add = from_builder(2, types.int64, _add_build)
atomic_read = from_builder(1, types.int64, _read_build)
