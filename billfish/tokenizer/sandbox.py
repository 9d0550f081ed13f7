"""A Jinja environment for templates that come out of model files, that is, from anyone.

Jinja's ImmutableSandboxedEnvironment keeps a template away from Python's internals and from
changing its arguments. It does not keep it from running or growing without end, so this one also
measures: loops, calls and the size of what is read and made count against a budget of steps, and
every value that a template makes is held to a size when it is made. Operations whose size cannot be
known beforehand (formatting, padding, powers) are not offered; chat templates have no use for them.
"""

import functools
import json
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Sequence, ValuesView
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import islice
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.runtime import Context, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_TEXT = 1 << 24  # characters of any string
MAX_ITEMS = 100_000  # elements of any list, nested ones counted each time they appear
MAX_STEPS = 200_000  # of one rendering: an iteration, an operation, 1,024 characters in or out

_FILTERS = (
    "abs", "capitalize", "count", "d", "default", "dictsort", "e", "escape", "first", "float",
    "int", "items", "last", "length", "list", "lower", "map", "max", "min", "reject", "rejectattr",
    "reverse", "safe", "select", "selectattr", "sort", "string", "title", "trim", "unique", "upper",
)  # fmt: skip
_STRING_METHODS = (
    "capitalize", "count", "endswith", "find", "index", "isalnum", "isalpha", "isascii",
    "isdecimal", "isdigit", "islower", "isnumeric", "isspace", "istitle", "isupper", "join",
    "lower", "lstrip", "partition", "removeprefix", "removesuffix", "replace", "rfind", "rindex",
    "rpartition", "rsplit", "rstrip", "split", "splitlines", "startswith", "strip", "title",
    "upper",
)  # fmt: skip
_METHODS: dict[type, frozenset[str]] = {
    str: frozenset(_STRING_METHODS),
    list: frozenset({"count", "index"}),
    tuple: frozenset({"count", "index"}),
    dict: frozenset({"get", "items", "keys", "values"}),
    int: frozenset(),
    float: frozenset(),
    range: frozenset(),
}


_steps_left: ContextVar[int] = ContextVar("steps_left")


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Compiles chat templates with the functions and tags that published ones rely on:
    raise_exception, strftime_now, tojson, break and continue, and generation blocks.

    Render within `rendering()`; exceeding a bound raises jinja2's SecurityError.
    """

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            # Folding constants would run parts of the template at load. Where Jinja folds all the
            # same, it meets a measure, which fails outside of `rendering`, and leaves it be.
            optimized=False,
            finalize=_shown,
            extensions=[LoopControlExtension, _GenerationExtension],
        )
        offered = {name: _measuring(self.filters[name]) for name in _FILTERS}
        measures = {"_steps": _steps, "_step": _step, "_measured": measured}
        bounded = {"join": _join, "replace": _replace, "tojson": _tojson}
        self.filters = {**offered, **bounded, **measures}
        tests: dict[str, Any] = self.tests
        self.tests = {name: _measuring(test) for name, test in tests.items()}
        self.globals = {"range": self.globals["range"], "dict": dict, "namespace": _Namespace}

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        """Joins what blocks and macros produce."""
        return _join(parts)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        loads = (nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends)
        if any(tree.find(kind) for kind in loads):
            raise jinja2.TemplateSyntaxError("a chat template cannot load others", 1)
        return _Instrument().visit(tree)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        for kind, methods in _METHODS.items():
            if isinstance(obj, kind):
                return attr in methods
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Jinja asks here for a safe form of a string's method. Formatting has none."""
        receiver = getattr(value, "__self__", None)
        methods: dict[str, Callable[..., str]] = {"join": _method_join, "replace": _replace}
        bounded = methods.get(getattr(value, "__name__", ""))
        if bounded is None or not isinstance(receiver, str):
            return None
        return functools.partial(bounded, receiver)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" or (operator == "%" and not isinstance(left, int | float)):
            raise SecurityError(f"the operator {operator} is not offered here")
        if operator == "*":
            _check_product(left, right)
        return measured(super().call_binop(context, operator, left, right))

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        _spend(1)
        for value in (getattr(function, "__self__", None), *args, *kwargs.values()):
            measured(value)
        result = super().call(context, function, *args, **kwargs)
        # A view shows its dictionary anew each time it is printed, so it cannot be measured.
        views = (KeysView, ValuesView, ItemsView)
        return measured(list(result) if isinstance(result, views) else result)


@contextmanager
def rendering() -> Iterator[None]:
    """Give one rendering, in this thread, its steps."""
    token = _steps_left.set(MAX_STEPS)
    try:
        yield
    finally:
        _steps_left.reset(token)


def measured(value: Any) -> Any:
    """`value`, paid for; SecurityError where it is larger than a template may make."""
    if isinstance(value, str):
        _spend(len(value) >> 10)
        if len(value) > MAX_TEXT:
            raise SecurityError(f"the template made a string of more than {MAX_TEXT} characters")
    elif isinstance(value, int):
        if value.bit_length() > 256:
            raise SecurityError("the template made a number of more than 256 bits")
    elif isinstance(value, list | tuple | dict):
        items, characters = 0, 0
        pending: list[Any] = [value]
        while pending:
            item = pending.pop()
            if isinstance(item, dict):
                pending += (x for pair in item.items() for x in pair)
            elif isinstance(item, list | tuple):
                pending += item
            elif isinstance(item, str):
                characters += len(item)
            items += 1
            # What is pending counts already: a list that holds itself many times grows here.
            if items + len(pending) > MAX_ITEMS or characters > MAX_TEXT:
                raise SecurityError(f"the template made a list of more than {MAX_ITEMS} elements")
        _spend((items >> 4) + (characters >> 10))
    return value


def _spend(steps: int) -> None:
    left = _steps_left.get() - steps
    _steps_left.set(left)
    if left < 0:
        raise SecurityError(f"the template takes more than {MAX_STEPS} steps")


def _step(value: Any) -> Any:
    _spend(1)
    return value


def _measuring(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)  # keeps the mark that says whether Jinja passes its context
    def measuring(*args: Any, **kwargs: Any) -> Any:
        _spend(1)
        for value in (*args, *kwargs.values()):
            measured(value)
        return measured(function(*args, **kwargs))

    return measuring


def _steps(values: Any) -> Any:
    """What a loop runs over, its length paid for beforehand."""
    if isinstance(values, Undefined):
        return values
    if not hasattr(values, "__len__"):
        values = list(islice(values, MAX_STEPS + 1))
    _spend(len(values))
    return values


def _check_product(left: Any, right: Any) -> None:
    for value, count in ((left, right), (right, left)):
        if isinstance(value, str | list | tuple) and isinstance(count, int):
            limit = MAX_TEXT if isinstance(value, str) else MAX_ITEMS
            if len(value) * count > limit:
                raise SecurityError("the template repeats a value too often")


def _shown(value: Any) -> str:
    """What an expression prints, which blocks and macros gather before it is joined."""
    return measured(_text(value))


def _text(value: Any) -> str:
    return value if isinstance(value, str) else str(measured(value))


def _join(values: Iterable[Any], d: Any = "", attribute: Any = None) -> str:
    if attribute is not None:
        raise SecurityError("join takes no attribute here; map it first")
    separator, parts, length = _text(d), [], 0
    for value in values:
        parts.append(_text(value))
        length += len(parts[-1]) + len(separator)
        if length > MAX_TEXT + len(separator):
            raise SecurityError(f"the template made a string of more than {MAX_TEXT} characters")
    return measured(separator.join(parts))


def _method_join(separator: str, values: Iterable[Any]) -> str:
    return _join(values, separator)


def _replace(text: Any, old: str, new: str, count: int | None = None) -> str:
    text, new = _text(text), _text(new)
    times = text.count(old) if count is None or count < 0 else min(count, text.count(old))
    if len(text) + times * len(new) > MAX_TEXT:
        raise SecurityError(f"the template made a string of more than {MAX_TEXT} characters")
    return measured(text.replace(old, new, times))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Sequence[str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as chat templates expect it: nothing escaped for HTML."""
    if not (indent is None or (isinstance(indent, int) and 0 <= indent <= 16)):
        raise SecurityError("tojson: indent must be an integer from 0 to 16")
    if separators is not None and any(len(s) > 16 for s in separators):
        raise SecurityError("tojson: separators are too long")
    pair = (separators[0], separators[1]) if separators is not None else None
    text = json.dumps(
        measured(value),
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=pair,
        sort_keys=sort_keys,
    )
    return measured(text)


class _Namespace(Namespace):
    """A namespace without a printed form of its contents, which may hold one another."""

    def __repr__(self) -> str:
        return "<namespace>"


class _Instrument(NodeTransformer):
    """Puts the measures into the template: around loops, and around whatever makes values."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        if node.recursive:
            raise jinja2.TemplateSyntaxError("recursive loops are not offered here", node.lineno)
        self.generic_visit(node)
        node.iter = _filter(node.iter, "_steps")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Expr:
        self.generic_visit(node)
        return _filter(nodes.List(node.nodes, lineno=node.lineno), "join")

    def visit_Compare(self, node: nodes.Compare) -> nodes.Expr:
        self.generic_visit(node)
        node.expr = _filter(node.expr, "_measured")
        for operand in node.ops:
            operand.expr = _filter(operand.expr, "_measured")
        return _filter(node, "_step")

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:
        self.generic_visit(node)
        return _filter(node, "_measured") if isinstance(node.arg, nodes.Slice) else node

    def visit_List(self, node: nodes.List) -> nodes.Expr:
        self.generic_visit(node)
        return _filter(node, "_measured")

    def visit_Dict(self, node: nodes.Dict) -> nodes.Expr:
        self.generic_visit(node)
        return _filter(node, "_measured")

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Expr:
        self.generic_visit(node)
        return _filter(node, "_measured") if node.ctx == "load" else node


def _filter(node: nodes.Node, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


class _GenerationExtension(Extension):
    """{% generation %} marks what an assistant says, for training; here it only shows its body."""

    tags = frozenset({"generation"})  # type: ignore[assignment]

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
