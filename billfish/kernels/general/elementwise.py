"""A chain of element-wise operations, written as one expression and run as one kernel.

Every operation of a chain reads its operands from memory and writes its result there, unless they
are one kernel: then inputs are read once, the result is written once, and what is between stays in
registers. Memory is all the time that such a chain takes, so n operations take about one's.

The expression is parsed as Python and may hold nothing but what is listed at `elementwise`: names
of inputs, numbers, operators and functions. It becomes a list of nodes, and that list a constant of
one kernel (`elementwise_gpu.py`), which Triton compiles for each expression and keeps. No source
code is made and none is run.

The technique's switch: `elementwise_gpu.elementwise(..., fused=False)`: a launch an operation.
"""

import ast
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import functional

from billfish.errors import KernelArgumentError
from billfish.kernels._library import bad_argument, check_no_grad, register
from billfish.kernels.general._arguments import FLOATS, INTEGERS, check_device

_BINARY: dict[type, str] = {
    ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div", ast.BitAnd: "and",
    ast.BitOr: "or", ast.Lt: "lt", ast.LtE: "le", ast.Gt: "gt", ast.GtE: "ge", ast.Eq: "eq",
    ast.NotEq: "ne",
}  # fmt: skip
COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")

MEANING: dict[str, Callable[..., Any]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": operator.truediv,
    "and": operator.and_, "or": operator.or_, "lt": operator.lt, "le": operator.le,
    "gt": operator.gt, "ge": operator.ge, "eq": operator.eq, "ne": operator.ne,
    "neg": operator.neg, "not": operator.invert, "where": torch.where,
    "minimum": lambda a, b: _extreme(torch.minimum, "max", a, b),
    "maximum": lambda a, b: _extreme(torch.maximum, "min", a, b),
    "abs": torch.abs, "ceil": torch.ceil, "cos": torch.cos, "erf": torch.erf, "exp": torch.exp,
    "exp2": torch.exp2, "floor": torch.floor, "gelu": functional.gelu, "log": torch.log,
    "log2": torch.log2, "relu": torch.relu, "rsqrt": torch.rsqrt, "sigmoid": torch.sigmoid,
    "silu": functional.silu, "sin": torch.sin, "sqrt": torch.sqrt, "tanh": torch.tanh,
}  # fmt: skip
"""What every operation is in torch."""

FUNCTIONS = {"where": 3, "minimum": 2, "maximum": 2} | dict.fromkeys(
    ("abs", "ceil", "cos", "erf", "exp", "exp2", "floor", "gelu", "log", "log2", "relu", "rsqrt",
     "sigmoid", "silu", "sin", "sqrt", "tanh"), 1)  # fmt: skip
"""Those called by name, and how many arguments they take."""

LONGEST = 4096
MOST_NODES = 256


def _extreme(function: Callable[..., Tensor], bound: str, a: Any, b: Any) -> Tensor:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return function(a, b)
    tensor, number = (a, b) if isinstance(a, Tensor) else (b, a)
    return torch.clamp(tensor, **{bound: number})


@dataclass(frozen=True)
class Node:
    """op: "input" of the number `value`, the number `value` itself, or of MEANING, of `operands`.

    text: of a number, to tell 1 from 1.0 and 0.0 from -0.0.
    """

    op: str
    operands: tuple[int, ...] = ()
    value: float | int = 0
    text: str = ""


@lru_cache(4096)
def parse(expression: str, names: tuple[str, ...]) -> tuple[Node, ...]:
    """The nodes of an expression, operands before what uses them, the result last."""
    if len(expression) > LONGEST:
        raise bad_argument("expression", f"{len(expression)} characters", f"{LONGEST} or fewer")
    try:
        tree = ast.parse(expression.strip(), mode="eval").body
        nodes = _Parser(names).nodes_of(tree)
    except KernelArgumentError:
        raise
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise bad_argument("expression", repr(expression), "an expression of Python") from error
    if len(nodes) > MOST_NODES:
        raise bad_argument("expression", f"{len(nodes)} operations", f"{MOST_NODES} or fewer")
    used = {node.value for node in nodes if node.op == "input"}
    unused = [name for i, name in enumerate(names) if i not in used]
    if unused:
        raise bad_argument("inputs", ", ".join(unused), f"names that {expression!r} uses")
    return nodes


class _Parser:
    def __init__(self, names: Sequence[str]) -> None:
        self.names = {name: i for i, name in enumerate(names)}
        self.places: dict[Node, int] = {}

    def nodes_of(self, tree: ast.expr) -> tuple[Node, ...]:
        result = self._visit(tree)
        nodes = tuple(self.places)
        if nodes[result].op == "number":
            self._refuse(tree)
        # A node that is used twice is one node; the result may not be the last that was met.
        return (*nodes, Node("copy", (result,))) if result != len(nodes) - 1 else nodes

    def _add(self, op: str, operands: tuple[int, ...] = (), value: float | int = 0) -> int:
        text = repr(value) if op == "number" else ""
        return self.places.setdefault(Node(op, operands, value, text), len(self.places))

    def _visit(self, tree: ast.expr) -> int:
        match tree:
            case ast.Name(id=name) if name in self.names:
                return self._add("input", value=self.names[name])
            case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
                return self._add("number", value=value)
            case ast.BinOp(left=left, op=ast.Pow(), right=right):
                return self._power(left, right)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
                return self._operation(_BINARY[type(op)], left, right)
            case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _BINARY:
                return self._operation(_BINARY[type(op)], left, right)
            case ast.UnaryOp(op=ast.UAdd(), operand=operand):
                return self._visit(operand)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return self._operation("neg", operand)
            case ast.UnaryOp(op=ast.Invert(), operand=operand):
                return self._operation("not", operand)
            case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if FUNCTIONS.get(
                name
            ) == len(arguments):
                return self._operation(name, *arguments)
        self._refuse(tree)

    def _operation(self, op: str, *trees: ast.expr) -> int:
        operands = tuple(self._visit(tree) for tree in trees)
        values = [node.value for node in map(list(self.places).__getitem__, operands)
                  if node.op == "number"]  # fmt: skip
        if len(values) < len(operands) or op == "where":
            return self._add(op, operands)
        if op not in ("add", "sub", "mul", "div", "neg"):
            self._refuse(trees[0])
        try:
            return self._add("number", value=MEANING[op](*values))
        except ArithmeticError:
            self._refuse(trees[-1], "numbers of which that can be computed")

    def _power(self, base: ast.expr, exponent: ast.expr) -> int:
        place = self._visit(exponent)
        value = list(self.places)[place]
        if value.op == "number":
            if value.value == 0.5:
                return self._operation("sqrt", base)
            if value.value == -0.5:
                return self._operation("rsqrt", base)
            if value.value in range(1, 9):
                place = product = self._visit(base)
                number = list(self.places)[place]
                if number.op == "number":
                    try:
                        return self._add("number", value=number.value ** int(value.value))
                    except ArithmeticError:
                        self._refuse(base)
                for _ in range(int(value.value) - 1):
                    product = self._add("mul", (product, place))
                return product
        self._refuse(exponent, "an exponent of 1 to 8, 0.5 or -0.5")

    def _refuse(self, tree: ast.expr, expected: str = "") -> NoReturn:
        if not expected:
            known = ", ".join(self.names) or "none"
            expected = (
                f"inputs ({known}), numbers, + - * / ** & | ~ < <= > >= == != and the functions "
                f"{', '.join(sorted(FUNCTIONS))}"
            )
        raise bad_argument("expression", repr(ast.unparse(tree)), expected)


MEANING["copy"] = lambda a: a


def evaluate(nodes: Sequence[Node], inputs: Sequence[Tensor]) -> list[Any]:
    """The value of every node, by torch; of numbers themselves."""
    values: list[Any] = []
    for node in nodes:
        if node.op == "input":
            values.append(inputs[int(node.value)])
        elif node.op == "number":
            values.append(node.value)
        else:
            values.append(MEANING[node.op](*(values[i] for i in node.operands)))
    return values


def elementwise_reference(expression: str, **inputs: Tensor) -> Tensor:
    """Operation by operation, each as torch has it."""
    result: Tensor = evaluate(parse(expression, tuple(inputs)), tuple(inputs.values()))[-1]
    return result


@lru_cache(4096)
def dtypes_of(
    expression: str, names: tuple[str, ...], kinds: tuple[tuple[torch.dtype, bool], ...]
) -> tuple[tuple[torch.dtype | None, torch.dtype | None], ...]:
    """Of every node, (torch's dtype of its value, that in which its operands meet).

    kinds: of every input, (dtype, whether it is a scalar tensor, which counts less in promotion).
    """
    nodes = parse(expression, names)
    # Not on the meta device, which lets pass what no device can do.
    ones = [torch.ones(() if flat else (1,), dtype=kind) for kind, flat in kinds]
    try:
        values = evaluate(nodes, ones)
    except (RuntimeError, TypeError, OverflowError) as error:  # of over 64 bits
        got = ", ".join(f"{n} {k[0]}" for n, k in zip(names, kinds, strict=True))
        raise bad_argument("inputs", got, f"dtypes for {expression!r}: {error}") from error
    found = []
    for node, value in zip(nodes, values, strict=True):
        kind = value.dtype if isinstance(value, Tensor) else None
        meet = kind
        if node.op in COMPARISONS:
            meet = torch.result_type(*(values[i] for i in node.operands))
        found.append((kind, meet))
    return tuple(found)


def _cpu(inputs: list[Tensor], expression: str, names: list[str]) -> Tensor:
    kinds = tuple((x.dtype, x.dim() == 0) for x in inputs)
    kind = dtypes_of(expression, tuple(names), kinds)[-1][0]
    half = (torch.bfloat16, torch.float16)
    # In float32 throughout and rounded once, which is also faster on a CPU.
    wide = [x.float() if x.dtype in half else x for x in inputs]
    out: Tensor = evaluate(parse(expression, tuple(names)), wide)[-1]
    assert kind is not None
    shape = torch.broadcast_shapes(*(x.shape for x in inputs))
    return torch.empty(shape, dtype=kind).copy_(out)


def _fake(inputs: list[Tensor], expression: str, names: list[str]) -> Tensor:
    kinds = tuple((x.dtype, x.dim() == 0) for x in inputs)
    kind = dtypes_of(expression, tuple(names), kinds)[-1][0]
    shape = torch.broadcast_shapes(*(x.shape for x in inputs))
    return inputs[0].new_empty(shape, dtype=kind)


_elementwise: Callable[..., Tensor] = register(
    "elementwise(Tensor[] inputs, str expression, str[] names) -> Tensor",
    fake=_fake,
    cpu=_cpu,
    gpu="billfish.kernels.general.elementwise_gpu",
)


def elementwise(expression: str, **inputs: Tensor) -> Tensor:
    """The value of an expression of tensors, element by element, in one kernel.

    general.elementwise("silu(x) * y + 0.5 * z", x=x, y=y, z=z)

    expression: names of inputs; numbers; + - * / ** (to 1..8, 0.5 or -0.5), & | ~; comparisons;
    abs ceil cos erf exp exp2 floor gelu (by erf) log log2 maximum minimum relu rsqrt sigmoid silu
    sin sqrt tanh where. inputs: floats (64, 32, bf16, fp16), integers (8 to 64 bits) or bool, any
    strides, shapes that broadcast, all on one device. A number that changes from call to call
    should be a tensor of no dimensions: each other expression is compiled anew.

    Returns a new, contiguous tensor of the dtype that torch's operators would give. Half floats are
    computed in float32 and rounded once, at the end; float64 and integers in their own.
    Exponentials of float32 are off by a few units in the last place.

    Deterministic.

    Raises KernelArgumentError: the expression holds anything else, a name is missing or not used,
    shapes do not broadcast, a dtype or device is wrong, or an input requires a gradient.
    """
    if not torch.compiler.is_compiling():  # which cannot look into a parser; the operation checks
        _check(expression, inputs)
    return _elementwise(list(inputs.values()), expression, list(inputs))


def _check(expression: str, inputs: dict[str, Tensor]) -> None:
    if not isinstance(expression, str):
        raise bad_argument("expression", type(expression).__name__, "a string")
    names, tensors = tuple(inputs), list(inputs.values())
    for name, tensor in inputs.items():
        if not isinstance(tensor, Tensor):
            raise bad_argument(name, type(tensor).__name__, "a tensor; numbers are written out")
        if tensor.dtype not in (*FLOATS, *INTEGERS, torch.bool):
            raise bad_argument(name, tensor.dtype, "a float, an integer of 8 to 64 bits or bool")
        check_device(name, tensor)
        check_no_grad(name, tensor)
        if tensor.device != tensors[0].device:
            raise bad_argument(f"{name}.device", tensor.device, f"{tensors[0].device}")
    parse(expression, names)
    if not tensors:
        raise bad_argument("inputs", "none", "a tensor at least")
    dtypes_of(expression, names, tuple((x.dtype, x.dim() == 0) for x in tensors))
    try:
        torch.broadcast_shapes(*(x.shape for x in tensors))
    except RuntimeError as error:
        got = ", ".join(f"{name} {tuple(x.shape)}" for name, x in inputs.items())
        raise bad_argument("inputs", got, "shapes that broadcast") from error
