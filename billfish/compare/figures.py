"""Figures of a comparison, each of which knows where in the document it is.

A report shows nothing but these: what arithmetic makes of them is a plain number again, which
`number` and `say` refuse. So what a reader sees can be followed back to the document, and from
there to its record: in the page every figure carries its place (`data-path`).
"""

import re
from html import escape
from typing import Any, NamedTuple


class Figure(float):
    """A number of the document. path: where it is, as a JSON pointer (RFC 6901)."""

    path: str

    def __new__(cls, value: float, path: str) -> "Figure":
        figure = super().__new__(cls, value)
        figure.path = path
        return figure


def traced(tree: Any, path: str = "") -> Any:
    """The document with its numbers as Figures."""
    if isinstance(tree, dict):
        return {key: traced(value, f"{path}/{_pointer(key)}") for key, value in tree.items()}
    if isinstance(tree, list):
        return [traced(value, f"{path}/{index}") for index, value in enumerate(tree)]
    if isinstance(tree, int | float) and not isinstance(tree, bool):
        return Figure(tree, path)
    return tree


def _pointer(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")


def shown(value: float, unit: str = "") -> str:
    """Counts in full; ratios (x) with two decimals, from 100 on none; percents with one; others to
    four digits. Commas from 10,000 on, in ratios from 1,000.
    """
    if unit == "x":
        return f"{value:.2f}" if abs(value) < 99.995 else f"{value:,.0f}"
    if unit == "%":
        return f"{value:.1f}"
    if value == int(value):
        return f"{int(value):,}" if abs(value) >= 10_000 else str(int(value))
    return f"{value:,.0f}" if abs(value) >= 9999.5 else f"{float(f'{value:.4g}'):.10g}"


def sized(nbytes: float) -> str:
    """Bytes with three significant digits, in decimal units."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if nbytes >= size:
            return f"{float(f'{nbytes / size:.3g}'):g} {unit}"
    return f"{nbytes:g} bytes"


class Said(NamedTuple):
    """A text and the places of the figures in it."""

    text: str
    paths: tuple[str, ...]


def say(text: str, *figures: Figure) -> Said:
    """`text` with a figure for each {}; {x} is a ratio, {%} a percent, {b} a number of bytes."""
    parts, paths = [], []
    pieces = re.split(r"(\{[bx%]?\})", text)
    wanted = iter(figures)
    for piece in pieces:
        if not re.fullmatch(r"\{[bx%]?\}", piece):
            parts.append(piece)
            continue
        figure = next(wanted)
        if not isinstance(figure, Figure):
            raise TypeError(f"{figure!r} is no figure of the document")
        unit = piece[1:-1]
        parts.append(sized(figure) if unit == "b" else shown(figure, unit) + unit)
        paths.append(figure.path)
    return Said("".join(parts), tuple(paths))


def number(figure: Figure | None, unit: str = "", *, bare: bool = False) -> str:
    """A figure as HTML; a dash for None. unit: "bytes" or what to write behind it, unless bare."""
    if figure is None:
        return '<span class="none">–</span>'
    if not isinstance(figure, Figure):
        raise TypeError(f"{figure!r} is no figure of the document")
    text = sized(figure) if unit == "bytes" else shown(figure, unit)
    tail = "" if bare or unit in ("", "bytes") else f'<span class="unit">{escape(unit)}</span>'
    return (
        f'<data value="{figure:.12g}" data-path="{escape(figure.path)}">{escape(text)}</data>{tail}'
    )
