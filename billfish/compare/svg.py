"""Small charts as SVG that an HTML page colours: axes, lines, marks that say what they show.

matplotlib writes SVG too, but with colours and fonts fixed, so that a page could not be light and
dark, and with paths where a reader wants a mark that can be pointed at.
"""

import math
import re
from collections.abc import Callable, Sequence
from html import escape
from typing import NamedTuple

from billfish.compare.figures import Said, shown


class Scale(NamedTuple):
    """From a range of values to a range of pixels, straight or by logarithm."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        by: Callable[[float], float] = math.log if self.log else float
        low, high = by(self.low), by(self.high)
        part = (
            (by(max(value, 1e-12)) - low) / (high - low)
            if self.log
            else ((value - low) / (high - low))
        )
        return round(self.start + part * (self.end - self.start), 2)


def powers(low: float, high: float, base: int = 10) -> list[float]:
    """The powers of a base in a range."""
    first = math.ceil(math.log(low, base) - 1e-9)
    last = math.floor(math.log(high, base) + 1e-9)
    return [float(base) ** e for e in range(first, last + 1)]


def steps(low: float, high: float, about: int = 5) -> list[float]:
    """Round values in a range."""
    raw = (high - low) / about
    size = 10 ** math.floor(math.log10(raw))
    step = next(size * f for f in (1, 2, 2.5, 5, 10) if size * f >= raw)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 10) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def text(
    x: float, y: float, words: str, anchor: str = "start", kind: str = "", more: str = ""
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{kind}"{more}>'
        f"{escape(words)}</text>"
    )


def tick(x: float, y: float, value: float, anchor: str) -> str:
    """A value of an axis, which is none of the data."""
    label = f"{value / 1000:g}k" if 10_000 <= value < 1e6 else sized_tick(value)
    return text(x, y, label, anchor, "tick")


def sized_tick(value: float) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M")):
        if value >= size:
            return f"{value / size:g}{letter}"
    return shown(value)


def path(points: Sequence[tuple[float, float]], kind: str) -> str:
    d = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    return f'<path d="{d}" class="{kind}"/>'


def mark(shape: str, said: Said, kind: str = "") -> str:
    """A shape that says what it shows, to those who point at it."""
    return (
        f'<g class="mark {kind}" data-paths="{escape(chr(10).join(said.paths))}">'
        f"<title>{escape(said.text)}</title>{shape}</g>"
    )


def dot(x: float, y: float, shape: str = "circle", size: float = 4.5) -> str:
    if shape == "square":
        half, side = size - 0.5, 2 * size - 1
        corner = f'x="{x - half:.1f}" y="{y - half:.1f}"'
        return f'<rect {corner} width="{side:.1f}" height="{side:.1f}" rx="1"/>'
    if shape == "diamond":
        s = size + 1.2
        return (
            f'<path d="M{x:.1f} {y - s:.1f}l{s:.1f} {s:.1f}l{-s:.1f} {s:.1f}l{-s:.1f} {-s:.1f}z"/>'
        )
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{size}"/>'


class Frame:
    """The plot area of a chart: two scales, their axes, and what is drawn in it."""

    def __init__(
        self, width: float, height: float, x: Scale, y: Scale, left: float = 46, bottom: float = 40
    ) -> None:
        self.width, self.height = width, height
        self.x, self.y = x, y
        self.left, self.bottom = left, bottom
        self.parts: list[str] = []

    def axes(
        self, x_ticks: Sequence[float], y_ticks: Sequence[float], x_label: str, y_label: str
    ) -> None:
        right, base = self.x.end, self.y.start
        for value in y_ticks:
            y = self.y(value)
            self.parts.append(
                f'<line x1="{self.x.start}" x2="{right}" y1="{y}" y2="{y}" class="grid"/>'
            )
            self.parts.append(tick(self.x.start - 7, y + 4, value, "end"))
        for value in x_ticks:
            x = self.x(value)
            self.parts.append(f'<line x1="{x}" x2="{x}" y1="{base}" y2="{base + 4}" class="axis"/>')
            self.parts.append(tick(x, base + 17, value, "middle"))
        self.parts.append(
            f'<line x1="{self.x.start}" x2="{right}" y1="{base}" y2="{base}" class="axis"/>'
        )
        middle = (self.x.start + right) / 2
        self.parts.append(text(middle, base + 35, x_label, "middle", "label"))
        self.parts.append(
            text(self.x.start - self.left + 4, self.y.end - 10, y_label, "start", "label")
        )

    def add(self, *parts: str) -> None:
        self.parts += parts

    def svg(self, name: str) -> str:
        return svg(self.width, self.height, "".join(self.parts), name)


def frame(
    width: float,
    height: float,
    x: tuple[float, float],
    y: tuple[float, float],
    *,
    log_x: bool = False,
    log_y: bool = False,
    left: float = 46,
    right: float = 12,
    top: float = 26,
    bottom: float = 44,
) -> Frame:
    """A frame over a range of x and of y."""
    return Frame(
        width,
        height,
        Scale(*x, left, width - right, log_x),
        Scale(*y, height - bottom, top, log_y),
        left,
        bottom,
    )


def svg(width: float, height: float, inside: str, name: str) -> str:
    return (
        f'<svg viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}" '
        f'role="img" aria-label="{escape(name)}" tabindex="0">{inside}</svg>'
    )


IMPLS = {
    "billfish": "Billfish",
    "portable": "Billfish, portable",
    "marlin": "Marlin (vLLM)",
    "machete": "Machete",
    "humming": "humming",
    "fa3": "FlashAttention-3",
    "paged_attention_v1": "paged_attention v1",
    "paged_attention_v2": "paged_attention v2",
    "contiguous": "cuDNN, contiguous",
    "plain": "plain copy",
    "separate": "separate operations",
    "one by one": "one by one",
    "4 bytes a thread": "4 bytes a thread",
    "vllm-machete": "vLLM, Machete",
    "vllm-marlin": "vLLM, Marlin",
    "vllm-bf16": "vLLM, bf16",
}


def named(impl: str) -> str:
    return IMPLS.get(impl, impl)


def impl_class(impl: str) -> str:
    """The class that colours an implementation."""
    return re.sub(r"[^\w-]", "-", impl)


def legend(entries: Sequence[tuple[str, str]]) -> str:
    """(class of the line or dot, words), as HTML."""
    items = "".join(f'<li><i class="{kind}"></i>{escape(words)}</li>' for kind, words in entries)
    return f'<ul class="legend">{items}</ul>'
