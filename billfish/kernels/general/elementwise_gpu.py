"""A chain of element-wise operations on a GPU, in Triton; see `elementwise.py`.

The chain is a constant of the kernel: five entries a node, its operation, the type its operands
meet in, and three operands. `_value` calls itself for the operands of a node, at compile time, so
what is compiled is the chain and nothing else; what it loads twice the compiler loads once.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from billfish.kernels.general._triton import larger, smaller
from billfish.kernels.general.elementwise import Node, dtypes_of, parse
from billfish.kernels.general.gpu import _on

_TYPES: dict[torch.dtype | None, Any] = {
    torch.float64: tl.float64, torch.float32: tl.float32, torch.bfloat16: tl.float32,
    torch.float16: tl.float32, torch.int64: tl.int64, torch.int32: tl.int32, torch.int16: tl.int16,
    torch.int8: tl.int8, torch.uint8: tl.uint8, torch.bool: tl.int1,
}  # fmt: skip
"""What values of a dtype are computed in."""


@triton.jit
def _tanh(x):
    """By exp(-2 |x|), and near 0, where that would cancel, by its series."""
    power = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - power) / (1.0 + power)
    far = tl.where(x < 0, -far, far)
    BOUND: tl.constexpr = 0.003 if x.dtype == tl.float64 else 0.1
    s = x * x
    near = x * (1.0 - s * (1.0 / 3.0 - s * (2.0 / 15.0 - s * (17.0 / 315.0))))
    return tl.where(tl.abs(x) < BOUND, near, far)


@triton.jit
def _of_one(OP: tl.constexpr, a):
    if OP == "neg":
        return -a
    elif OP == "not":
        return ~a
    elif OP == "abs":
        return tl.abs(a)
    elif OP == "ceil":
        return tl.ceil(a)
    elif OP == "cos":
        return tl.cos(a)
    elif OP == "erf":
        return tl.erf(a)
    elif OP == "exp":
        return tl.exp(a)
    elif OP == "exp2":
        return tl.exp2(a)
    elif OP == "floor":
        return tl.floor(a)
    elif OP == "gelu":
        return 0.5 * a * (1.0 + tl.erf(a * 0.7071067811865476))
    elif OP == "log":
        return tl.log(a)
    elif OP == "log2":
        return tl.log2(a)
    elif OP == "relu":
        return larger(a, tl.zeros_like(a))
    elif OP == "rsqrt":
        return tl.rsqrt(a)
    elif OP == "sigmoid":
        return 1.0 / (1.0 + tl.exp(-a))
    elif OP == "silu":
        return a / (1.0 + tl.exp(-a))
    elif OP == "sin":
        return tl.sin(a)
    elif OP == "sqrt":
        return tl.sqrt_rn(a) if a.dtype == tl.float32 else tl.sqrt(a)
    elif OP == "tanh":
        return _tanh(a)
    else:
        tl.static_assert(OP == "copy")
        return a


@triton.jit
def _of_two(OP: tl.constexpr, a, b):
    if OP == "add":
        return a + b
    elif OP == "sub":
        return a - b
    elif OP == "mul":
        return a * b
    elif OP == "div":
        return tl.div_rn(a, b) if a.dtype == tl.float32 else a / b
    elif OP == "and":
        return a & b
    elif OP == "or":
        return a | b
    elif OP == "lt":
        return a < b
    elif OP == "le":
        return a <= b
    elif OP == "gt":
        return a > b
    elif OP == "ge":
        return a >= b
    elif OP == "eq":
        return a == b
    elif OP == "ne":
        return a != b
    elif OP == "minimum":
        return smaller(a, b)
    else:
        tl.static_assert(OP == "maximum")
        return larger(a, b)


@triton.jit
def _offset(i, sizes, strides, DIMS: tl.constexpr):
    """Where an input holds the i-th element of the result."""
    at = tl.zeros(i.shape, tl.int64)
    for k in tl.static_range(DIMS - 1, 0, -1):
        at += (i % sizes[k]).to(tl.int64) * strides[k]
        i = i // sizes[k]
    return at + i.to(tl.int64) * strides[0]


@triton.jit
def _value(CHAIN: tl.constexpr, NODE: tl.constexpr, i, inside, xs, sizes, strides,
           DIMS: tl.constexpr):  # fmt: skip
    OP: tl.constexpr = CHAIN[5 * NODE]
    TYPE: tl.constexpr = CHAIN[5 * NODE + 1]
    A: tl.constexpr = CHAIN[5 * NODE + 2]
    B: tl.constexpr = CHAIN[5 * NODE + 3]
    C: tl.constexpr = CHAIN[5 * NODE + 4]
    if OP == "input":
        value = tl.load(xs[A] + _offset(i, sizes, strides[A], DIMS), mask=inside, other=0)
        if tl.int1 == TYPE:
            return value != 0
        else:
            return value.to(TYPE)
    elif OP == "number":
        return tl.full(i.shape, A, TYPE)
    elif OP == "where":
        chosen = _value(CHAIN, A, i, inside, xs, sizes, strides, DIMS)
        yes = _value(CHAIN, B, i, inside, xs, sizes, strides, DIMS).to(TYPE)
        no = _value(CHAIN, C, i, inside, xs, sizes, strides, DIMS).to(TYPE)
        return tl.where(chosen, yes, no)
    elif B < 0:
        return _of_one(OP, _value(CHAIN, A, i, inside, xs, sizes, strides, DIMS).to(TYPE))
    else:
        a = _value(CHAIN, A, i, inside, xs, sizes, strides, DIMS).to(TYPE)
        b = _value(CHAIN, B, i, inside, xs, sizes, strides, DIMS).to(TYPE)
        return _of_two(OP, a, b)


@triton.jit
def _elementwise_kernel(
    out, xs, sizes, strides, n, CHAIN: tl.constexpr, RESULT: tl.constexpr, WIDE: tl.constexpr,
    DIMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """xs: the inputs; sizes: DIMS of the result; strides: those of each input. WIDE: n >= 2^31."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if WIDE:
        i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = _value(CHAIN, RESULT, i, i < n, xs, sizes, strides, DIMS)
    tl.store(out + i, value.to(out.dtype.element_ty), mask=i < n)


def program(
    nodes: Sequence[Node], kinds: Sequence[tuple[torch.dtype | None, torch.dtype | None]]
) -> tuple[Any, ...]:
    """The chain as the kernel takes it. A number has the type of what uses it, so each use is a
    node of its own, behind the others."""
    entries: list[tuple[Any, ...]] = []
    numbers: list[tuple[Any, ...]] = []
    for node, (_, meet) in zip(nodes, kinds, strict=True):
        kind = tl.float32 if meet is None else _TYPES[meet]
        operands: list[Any] = [-1, -1, -1]
        if node.op in ("input", "number"):
            operands[0] = node.value
        for k, i in enumerate(node.operands):
            operands[k] = i
            if nodes[i].op == "number":
                operands[k] = len(nodes) + len(numbers)
                whole = isinstance(nodes[i].value, int) and not (meet and meet.is_floating_point)
                value = nodes[i].value if whole else float(nodes[i].value)
                numbers.append(("number", kind, value, -1, -1))
        entries.append((node.op, kind, *operands))
    return tuple(part for entry in entries + numbers for part in entry)


def collapsed(shape: Sequence[int], inputs: Sequence[Tensor]) -> tuple[tuple[int, ...], list[Any]]:
    """(sizes, strides of each input) of the fewest dimensions that say the same.

    Neighbouring dimensions are one where in every input the outer steps over all of the inner.
    """
    strides = [x.expand(shape).stride() for x in inputs]
    kept: list[tuple[int, list[int]]] = []
    for d, size in enumerate(shape):
        if size == 1:
            continue
        steps = [each[d] for each in strides]
        if kept and all(
            outer == inner * size for outer, inner in zip(kept[-1][1], steps, strict=True)
        ):
            kept[-1] = (kept[-1][0] * size, steps)
        else:
            kept.append((size, steps))
    if not kept:
        kept = [(1, [0] * len(inputs))]
    return tuple(size for size, _ in kept), [
        tuple(steps[k] for _, steps in kept) for k in range(len(inputs))
    ]


def elementwise(
    inputs: list[Tensor], expression: str, names: list[str], *, fused: bool = True,
    block: int = 1024,
) -> Tensor:  # fmt: skip
    nodes = parse(expression, tuple(names))
    kinds = dtypes_of(expression, tuple(names), tuple((x.dtype, x.dim() == 0) for x in inputs))
    if fused:
        return _run(inputs, nodes, kinds, block)
    values: list[Any] = []
    for node, kind in zip(nodes, kinds, strict=True):
        if node.op in ("input", "number"):
            values.append(inputs[int(node.value)] if node.op == "input" else node)
            continue
        values.append(_alone(node, kind, values, nodes, kinds, block))
    result: Tensor = values[-1]
    return result


def _alone(node: Node, kind: Any, values: Sequence[Any], nodes: Sequence[Node],
           kinds: Sequence[Any], block: int) -> Tensor:  # fmt: skip
    """One operation of a chain, of tensors in memory and numbers."""
    tensors = [values[i] for i in node.operands if nodes[i].op != "number"]
    leaves = [
        nodes[i] if nodes[i].op == "number" else Node("input", value=-1) for i in node.operands
    ]
    count = iter(range(len(tensors)))
    leaves = [leaf if leaf.op == "number" else Node("input", value=next(count)) for leaf in leaves]
    of_leaves = [kinds[i] for i in node.operands]
    own = Node(node.op, tuple(range(len(leaves))))
    return _run(tensors, [*leaves, own], [*of_leaves, kind], block)


def _run(
    inputs: Sequence[Tensor], nodes: Sequence[Node], kinds: Sequence[Any], block: int
) -> Tensor:
    shape = torch.broadcast_shapes(*(x.shape for x in inputs))
    out = torch.empty(shape, dtype=kinds[-1][0], device=inputs[0].device)
    n = out.numel()
    if not n:
        return out
    sizes, strides = collapsed(shape, inputs)
    with _on(out):
        _elementwise_kernel[(triton.cdiv(n, block),)](
            _bytes(out), tuple(_bytes(x) for x in inputs), sizes, tuple(strides), n,
            CHAIN=program(nodes, kinds), RESULT=len(nodes) - 1, WIDE=n >= 2**31 - block,
            DIMS=len(sizes), BLOCK=block, num_warps=4,
        )  # fmt: skip
    return out


def _bytes(x: Tensor) -> Tensor:
    """Triton reads bools as bytes."""
    return x.view(torch.uint8) if x.dtype == torch.bool else x
