"""Charts with a line for each kernel or technique, and a dot on it for each case."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from billfish.compare.catalogue import DOMAINS
from billfish.compare.figures import Figure, Said, say
from billfish.compare.svg import dot, frame, impl_class, legend, mark, named, text

Json = dict[str, Any]
SHAPES = {"marlin": "circle", "paged_attention": "square", "general": "diamond"}
WIDE = 500
"""Pixels from which names stand beside their lines, and not above."""


class Dot(NamedTuple):
    """kind: its class. size: its radius."""

    value: Figure
    said: Said
    kind: str
    shape: str = "circle"
    size: float = 5


class Line(NamedTuple):
    """heading: the group that begins with this line."""

    name: str
    dots: Sequence[Dot]
    heading: str = ""


class Axis(NamedTuple):
    """Dots beyond its ends are drawn at them. level: where "no difference" is, or the goal."""

    low: float
    high: float
    ticks: Sequence[float]
    unit: str
    label: str
    level: float
    log: bool = True


def strip(title: str, lines: Sequence[Line], width: float, axis: Axis) -> str:
    """A line a kernel or technique, its name beside it or, where it is narrow, above."""
    wide = width > WIDE
    row, first = (23, 4) if wide else (38, 8)
    left = 18 + 7.05 * max(len(line.name) for line in lines) if wide else 14
    headings = sum(bool(line.heading) for line in lines)
    height = 62 + row * len(lines) + 32 * headings
    f = frame(width, height, (axis.low, axis.high), (0, 1), log_x=axis.log, left=left, right=22,
              top=14, bottom=46)  # fmt: skip
    base = f.y.start
    for value in axis.ticks:
        x = f.x(value)
        kind = "level even" if value == axis.level else "grid"
        f.add(f'<line x1="{x}" x2="{x}" y1="10" y2="{base}" class="{kind}"/>')
        f.add(text(x, base + 17, f"{value:g}{axis.unit}", "middle", "tick"))
    f.add(text((f.x.start + f.x.end) / 2, base + 35, axis.label, "middle", "label"))
    y = float(first)
    for line in lines:
        if line.heading:
            f.add(text(0, y + 22, line.heading, "start", "small-title over"))
            y += 32
        middle = y + row / 2 + (2 if wide else 9)
        if wide:
            f.add(text(left - 14, middle + 4, line.name, "end", "row-name"))
        else:
            f.add(text(0, middle - 12, line.name, "start", "row-name over"))
        f.add(f'<line x1="{left}" x2="{f.x.end}" y1="{middle}" y2="{middle}" class="grid"/>')
        for each in line.dots:
            x = f.x(min(max(each.value, axis.low), axis.high))
            f.add(mark(dot(x, middle, each.shape, each.size), each.said, each.kind))
        y += row
    return f.svg(title)


def _times(ratios: Sequence[float], label: str, wide: bool) -> Axis:
    """A logarithmic axis of ratios, 1 in it."""
    low, high = min(0.8, *ratios) * 0.97, max(2.0, *ratios) * 1.06
    few = (0.5, 0.8, 0.9, 1, 1.1, 1.25, 1.5, 1.75, 2, 2.5, 3)
    ticks = few if high < 4 else tuple(2.0**power for power in range(-6, 12))
    kept = [v for v in ticks if low <= v <= high and (wide or v not in (0.9, 1.1, 1.75))]
    if len(kept) > (9 if wide else 6):
        kept = [v for v in kept if math.log2(v) % 2 == 0]
    return Axis(low, high, kept, "x", label, 1)


def worth(family: str, techniques: Sequence[Json], width: float) -> str:
    """What each technique is worth: times slower without it; by domain, the best first."""

    def most(technique: Json) -> float:
        return max(case["ratio"] for case in technique["cases"])

    def dots(technique: Json) -> Iterator[Dot]:
        for case in technique["cases"]:
            said = say(
                f"{technique['name']}, {case['group']} {case['case']}: {{x}}; "
                "{} µs with, {} µs without",
                case["ratio"],
                case["with_us"],
                case["without_us"],
            )
            yield Dot(case["ratio"], said, f"f-{family} faint", SHAPES[family])

    shown = [technique for technique in techniques if technique["cases"]]
    shown.sort(key=lambda t: (list(DOMAINS).index(t["domain"]) if "domain" in t else 0, -most(t)))
    lines = [Line(t["name"], list(dots(t)), _heading(shown, i, "domain"))
             for i, t in enumerate(shown)]  # fmt: skip
    ratios = [case["ratio"] for t in shown for case in t["cases"]]
    axis = _times(ratios, "time without it / time with it", width > WIDE)
    return strip("What each technique is worth, a dot a case", lines, width, axis)


def _heading(found: Sequence[Json], index: int, key: str) -> str:
    """The title of a domain, where one begins."""
    here = found[index].get(key)
    if here is None or (index and found[index - 1].get(key) == here):
        return ""
    return DOMAINS[here]


def decode(chart: Json, width: float) -> str:
    """Decode by case: how fast each is beside attention over a contiguous cache."""
    cases = chart["cases"]
    names = ("billfish", "fa3", "portable", "paged_attention_v2")
    impls = [name for name in names if any(name in case["impls"] for case in cases)]

    def dots(case: Json) -> Iterator[Dot]:
        for name in reversed([name for name in impls if name in case["impls"]]):
            impl = case["impls"][name]
            said = say(
                f"{named(name)}, {case['case']}: {{x}} of a contiguous cache; {{}} µs",
                impl["ratio"],
                impl["us"],
            )
            size = 5.5 if name == "billfish" else 4
            yield Dot(impl["ratio"], said, f"i-{impl_class(name)}", size=size)

    ratios = [c["impls"][name]["ratio"] for c in cases for name in impls if name in c["impls"]]
    axis = Axis(
        min(ratios) * 0.93, max(1.15, *ratios) * 1.03,
        [v for v in (0.125, 0.25, 0.5, 0.75, 1) if v >= min(ratios) * 0.93],
        "x", "speed beside a contiguous cache (cuDNN); right is faster", 1,
    )  # fmt: skip
    lines = [Line(case["case"], list(dots(case))) for case in cases]
    title = "Decode beside attention over a contiguous cache, context x batch"
    return strip(title, lines, width, axis) + legend(
        [(f"i-{impl_class(name)}", named(name)) for name in impls]
    )


def beside_peers(lines: Sequence[Json], width: float) -> str:
    """General kernels: the best peer's time over ours, a dot a case."""

    def told(line: Json) -> Dot:
        said = say(
            f"{line['kernel']} {line['size']} {line['dtype']}: {{x}}; {{}} µs, {line['peer']} "
            "{} µs",
            line["ratio"],
            line["us"],
            line["peer_us"],
        )
        return Dot(line["ratio"], said, "f-general faint", "diamond")

    found = [line for line in lines if line["peer"]]
    axis = _times([line["ratio"] for line in found], "the best peer's time / ours", width > WIDE)
    rows = _by_kernel(found, told)
    return strip("General kernels beside the best of their peers", rows, width, axis)


TITLES = {"marlin": "Marlin", "paged_attention": "PagedAttention"}


def floors(points: Sequence[Json], width: float) -> str:
    """Every kernel: percent of its floor, a dot a case, larger where it moves more bytes."""

    def told(point: Json) -> Dot:
        said = say(
            f"{point['kernel']} {point['case']}: {{%}} of the floor; {{}} µs, {{b}}, {{}} GB/s",
            point["percent"],
            point["us"],
            point["bytes"],
            point["gbps"],
        )
        size = min(7.0, max(2.6, 0.95 * (math.log10(point["bytes"]) - 3.2)))
        family = point["family"]
        return Dot(point["percent"], said, f"f-{family} faint", SHAPES[family], size)

    found = [point for point in points if point["percent"] is not None]
    axis = Axis(0, 120, [0, 25, 50, 75, 100], "%", "of the floor; right is better", 100, log=False)
    return strip("How near every kernel comes to its floor", _by_kernel(found, told), width, axis)


def _by_kernel(cases: Sequence[Json], told: Callable[[Json], Dot]) -> list[Line]:
    """A line a kernel, under the title of its family or domain."""
    kernels: dict[tuple[str, str], list[Dot]] = {}
    for case in cases:
        group = TITLES.get(case.get("family", "")) or DOMAINS[case["domain"]]
        kernels.setdefault((group, case["kernel"]), []).append(told(case))
    lines: list[Line] = []
    before = ""
    for (group, kernel), dots in kernels.items():
        lines.append(Line(kernel, dots, group if group != before else ""))
        before = group
    return lines
