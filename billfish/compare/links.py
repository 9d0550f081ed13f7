"""Where code is: from the name of a symbol to a file and its lines, read from the source itself.

A link is made anew with every report, so it cannot point at lines where the code no longer is: a
symbol that is gone is an error.
"""

import ast
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import billfish
from billfish.errors import RecordError

EXCERPT = 40
"""Lines of an excerpt, at most."""

Link = dict[str, Any]


def resolve(name: str) -> Link:
    """`package.module:Symbol.inner`, or `...:Symbol.inner|text` for the lines from the first that
    has this text inside the symbol, to a link:

    symbol; file, relative to the folder that holds the package, with forward slashes; first and
    last line, counted from 1; text, an excerpt of them.

    Raises RecordError where there is no such module, symbol or text.
    """
    where, _, text = name.partition("|")
    module, _, symbol = where.partition(":")
    path = _path(module)
    lines, tree = _parsed(path)
    first, last = _span(tree, symbol.split("."), name, path)
    if text:
        found = [n for n in range(first, last + 1) if text in lines[n - 1]]
        if not found:
            raise RecordError(str(path), f"no line of {symbol} has the text {text!r}")
        first, last = found[0], min(last, found[0] + _block(lines, found[0], last))
    shown = lines[first - 1 : min(last, first - 1 + EXCERPT)]
    root = Path(billfish.__file__).parents[1]
    return {
        "symbol": symbol,
        "file": path.relative_to(root).as_posix(),
        "first": first,
        "last": last,
        "text": "\n".join(shown),
    }


def resolve_all(names: Sequence[str]) -> list[Link]:
    return [resolve(name) for name in names]


def _path(module: str) -> Path:
    base = Path(billfish.__file__).parents[1].joinpath(*module.split("."))
    for path in (base.with_suffix(".py"), base / "__init__.py"):
        if path.is_file():
            return path
    raise RecordError(str(base), "there is no such module")


@cache
def _parsed(path: Path) -> tuple[list[str], ast.Module]:
    source = path.read_text(encoding="utf-8")
    return source.splitlines(), ast.parse(source)


def _span(tree: ast.Module, parts: list[str], name: str, path: Path) -> tuple[int, int]:
    body: Sequence[ast.stmt] = tree.body
    node: ast.stmt | None = None
    for part in parts:
        node = next((each for each in body if part in _names(each)), None)
        if node is None:
            raise RecordError(str(path), f"there is no {name.partition(':')[2]}")
        body = getattr(node, "body", [])
    assert node is not None
    decorators = getattr(node, "decorator_list", [])
    first = min([node.lineno, *(each.lineno for each in decorators)])
    return first, node.end_lineno or node.lineno


def _names(node: ast.stmt) -> list[str]:
    """The names that a statement defines."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else []
    if isinstance(node, ast.AnnAssign):
        targets = [node.target]
    return [each.id for each in targets if isinstance(each, ast.Name)]


def _block(lines: Sequence[str], first: int, last: int) -> int:
    """How many lines after line `first` belong to it: those indented deeper."""
    indent = len(lines[first - 1]) - len(lines[first - 1].lstrip())
    count = 0
    for line in lines[first:last]:
        if line.strip() and len(line) - len(line.lstrip()) <= indent:
            break
        count += 1
    while count and not lines[first - 1 + count].strip():
        count -= 1
    return count


def exists(name: str) -> bool:
    """Whether `resolve` finds it."""
    try:
        resolve(name)
    except RecordError:
        return False
    return True
