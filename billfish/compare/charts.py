"""The charts of a report, from the traced document: each a function of it and of a width.

What has a line for each kernel or technique is in strips.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from billfish.compare import svg
from billfish.compare.figures import Said, say
from billfish.compare.strips import SHAPES
from billfish.compare.svg import (
    dot,
    frame,
    impl_class,
    legend,
    mark,
    named,
    path,
    powers,
    steps,
    text,
)

Json = dict[str, Any]


def speedup(chart: Json, width: float) -> str:
    """Times FP16 by tokens, a line a shape, and the ideal."""
    shapes = [s for s in chart["shapes"] if "billfish" in s["lines"]]
    counts = [p["m"] for s in shapes for p in s["lines"]["billfish"]]
    top = max([4.0, *(p["speedup"] for s in shapes for p in s["lines"]["billfish"])])
    f = frame(
        width,
        380 if width > 500 else 320,
        (min(counts), max(counts)),
        (0, top + 0.35),
        log_x=True,
        right=22,
    )
    f.axes(
        sorted(set(counts)) if width > 500 else [1, 8, 64, 512, 4096],
        [0, 1, 2, 3, 4],
        "tokens in a step (M)",
        "times FP16",
    )
    _level(f, 4, "ideal", "ideal: 4x fewer bits")
    _level(f, chart["ideal"], "ideal-scales", "")
    words = say("with scales: {x}", chart["ideal"])
    f.add(mark(text(f.x.end, f.y(chart["ideal"]) + 14, words.text, "end", "note ideal"), words))
    _level(f, 1, "even", "")
    f.add(text(f.x.start + 4, f.y(1) + 15, "FP16 (cuBLAS)", "start", "note"))
    for number, shape in enumerate(shapes):
        said = _speedup_said(shape["shape"])
        _line(f, shape["lines"]["billfish"], "m", "speedup", said, f"c{number}")
    names = [(f"c{number}", shape["shape"]) for number, shape in enumerate(shapes)]
    return f.svg("Speed-up over FP16 by number of tokens, one line a shape") + legend(names)


def _line(
    f: svg.Frame,
    points: Sequence[Json],
    x: str,
    y: str,
    said: Callable[[Json], Said],
    kind: str,
    size: float = 4.5,
) -> None:
    """A line through points, and a dot on each that says what it shows."""
    places = [(f.x(point[x]), f.y(point[y])) for point in points]
    f.add(path(places, f"line {kind}"))
    for place, point in zip(places, points, strict=True):
        f.add(mark(dot(*place, size=size), said(point), kind))


def _speedup_said(of: str) -> Callable[[Json], Said]:
    return lambda p: say(
        f"{of}, M = {{}}: {{x}}; {{}} µs, FP16 {{}} µs",
        p["m"],
        p["speedup"],
        p["us"],
        p["fp16_us"],
    )


def _level(f: svg.Frame, value: float, kind: str, words: str) -> None:
    y = f.y(value)
    f.add(f'<line x1="{f.x.start}" x2="{f.x.end}" y1="{y}" y2="{y}" class="level {kind}"/>')
    f.add(text(f.x.end, y - 6, words, "end", f"note {kind}"))


PEERS = ("billfish", "humming", "machete", "marlin", "portable")


def speedup_beside_peers(chart: Json, shape: Json) -> str:
    """One shape, all implementations."""
    lines = {name: shape["lines"][name] for name in PEERS if name in shape["lines"]}
    counts = [p["m"] for points in lines.values() for p in points]
    f = frame(330, 236, (min(counts), max(counts)), (0, 4.3), log_x=True, left=28, bottom=38)
    f.axes([1, 16, 256, 4096], [0, 1, 2, 3, 4], "", "")
    _level(f, chart["ideal"], "ideal-scales", "")
    _level(f, 1, "even", "")
    for name in reversed(lines):
        size = 3.6 if name == "billfish" else 2.6
        said = _speedup_said(named(name))
        _line(f, lines[name], "m", "speedup", said, f"i-{impl_class(name)}", size)
    f.add(text(f.left, 16, shape["shape"], "start", "small-title"))
    return f.svg(f"Speed-up over FP16, {shape['shape']}, by implementation")


def peer_legend(chart: Json) -> str:
    found = [n for n in PEERS if any(n in s["lines"] for s in chart["shapes"])]
    return legend([(f"i-{impl_class(name)}", named(name)) for name in found])


def movement(chart: Json) -> str:
    """Time by size, log-log, of one mode of block movement."""
    lines: Mapping[str, Sequence[Json]] = chart["lines"]
    sizes = [p["size"] for points in lines.values() for p in points]
    times = [p["us"] for points in lines.values() for p in points]
    f = frame(
        330,
        250,
        (min(sizes), max(sizes)),
        (min(times) * 0.7, max(times) * 1.5),
        log_x=True,
        log_y=True,
        left=44,
        right=16,
    )
    f.axes(powers(min(sizes), max(sizes), 4)[::2], powers(f.y.low, f.y.high), chart["unit"], "µs")
    order = ["billfish", "plain", *(n for n in lines if n not in ("billfish", "plain"))]
    shown = [name for name in order if name in lines]
    for name in reversed(shown):
        words = f"{chart['mode']}, {named(name)}, {{}} {chart['unit']}: {{}} µs, {{b}}"

        def said(p: Json, words: str = words) -> Said:
            return say(words, p["size"], p["us"], p["bytes"])

        _line(f, lines[name], "size", "us", said, f"i-{impl_class(name)}", 3.6)
    title = f"<h4>{chart['mode'].capitalize()}</h4>"
    names = [(f"i-{impl_class(name)}", named(name)) for name in shown]
    return title + f.svg(f"Time of {chart['mode']} by size") + legend(names)


def serving(chart: Json, width: float) -> str:
    """Output tokens a second by batch."""
    lines = chart["lines"]
    batches = sorted({p["batch"] for points in lines.values() for p in points})
    most = max(p["tok_s"] for points in lines.values() for p in points)
    f = frame(
        width, 320, (min(batches), max(batches)), (0, most * 1.08), log_x=True, left=58, right=20
    )
    f.axes(batches, steps(0, most * 1.08), "requests that decode together", "output tokens/s")
    for name in reversed(lines):
        words = f"{named(name)}, batch {{}}: {{}} tokens/s; {{}} ms a token"

        def said(p: Json, words: str = words) -> Said:
            return say(words, p["batch"], p["tok_s"], p["tpot_ms"])

        _line(f, lines[name], "batch", "tok_s", said, f"i-{impl_class(name)}")
    names = [(f"i-{impl_class(name)}", named(name)) for name in lines]
    return f.svg("Output tokens a second by batch") + legend(names)


FAMILY_NAMES = {
    "marlin": "Marlin",
    "paged_attention": "PagedAttention",
    "general": "general",
    "other": "other",
}
PART_NAMES = {"qkv": "QKV", "o": "O", "gate_up": "gate and up", "norm": "norms"}


def step(chart: Json, width: float) -> str:
    """A decode step by batch: a bar, divided among the families by their share of its time."""
    bar, line = 34, 17
    at_once = 4 if width > 500 else 2  # shares in a line of text
    row = 50 + bar + line * math.ceil(len(FAMILY_NAMES) / at_once)
    parts: list[str] = []
    for number, batch in enumerate(chart["batches"]):
        top = row * number
        one = "request" if batch["batch"] == 1 else "requests"
        said = say(f"{{}} {one} at once: {{}} µs a step", batch["batch"], batch["us"])
        parts.append(mark(text(0, top + 15, said.text, "start", "small-title tick"), said))
        whole = sum(part["percent"] for part in batch["parts"])
        x = 0.0
        for part in batch["parts"]:
            share = width * part["percent"] / whole
            parts.append(_part(part, batch, x, top + 24, share, bar))
            x += share
        shares = list(batch["shares"].items())
        for first in range(0, len(shares), at_once):
            names, percents = zip(*shares[first : first + at_once], strict=True)
            said = say(" · ".join(f"{FAMILY_NAMES[name]} {{%}}" for name in names), *percents)
            y = top + 24 + bar + 16 + line * (first // at_once)
            parts.append(mark(text(0, y, said.text, "start", "label tick"), said))
    height = row * len(chart["batches"]) - 20
    return svg.svg(width, height, "".join(parts), "Whose kernels take the time of a decode step")


def _part(part: Json, batch: Json, x: float, y: float, width: float, height: float) -> str:
    name = PART_NAMES.get(part["part"]) or str(part["part"])
    inside = (
        f'<rect x="{x:.1f}" y="{y}" width="{max(width - 1.5, 0.5):.1f}" height="{height}" rx="3" '
        f'class="step f-{part["family"]}"/>'
    )
    if width > 7.6 * len(name) + 8:
        inside += text(x + width / 2, y + height / 2 + 4, name, "middle", "event-id tick")
    said = say(
        f"{name}, {{}} at once: {{}} µs, {{%}} of the step",
        batch["batch"],
        part["us"],
        part["percent"],
    )
    return mark(inside, said)


RIGHTMOST = 20_000.0
"""Operations a byte at the right end of a roofline; what has more is drawn there."""


def roofline(points: Sequence[Json], top: Json, width: float) -> str:
    """Every kernel: operations a second over operations a byte, under the roof of this GPU."""
    shown = [p for p in points if p["flops"] > 0]
    low = min([0.5, *(p["intensity"] for p in shown if p["intensity"] > 0)])
    least = min([1.0, *(p["tflops"] for p in shown if p["tflops"] > 0)])
    f = frame(
        width,
        520 if width > 500 else 400,
        (low, RIGHTMOST * 1.3),
        (least * 0.6, top["tflops"] * 1.9),
        log_x=True,
        log_y=True,
        left=50,
        right=18,
    )
    f.axes(powers(f.x.low, f.x.high), powers(f.y.low, f.y.high), "operations / byte", "TFLOP/s")
    places = Places(f)
    _roof(f, top, places)
    for p in shown:
        said = say(
            f"{p['kernel']} {p['case']}: {{}} TFLOP/s at {{}} operations a byte; {{}} µs",
            p["tflops"],
            p["intensity"],
            p["us"],
        )
        at = (f.x(min(max(p["intensity"], low), RIGHTMOST)), f.y(max(p["tflops"], f.y.low)))
        places.take(*at, 5, 5)
        f.add(mark(dot(*at, SHAPES[p["family"]], 4.2), said, f"f-{p['family']} faint"))
    if width > 500:
        _names(f, shown, places)
    return f.svg("Roofline: every kernel that computes, under this GPU's roof")


def _roof(f: svg.Frame, top: Json, places: "Places") -> None:
    """The slope of memory, then a level for each kind of product that was measured."""
    gbps, tflops, single = top["gbps"], top["tflops"], top["float32"]
    start = max(f.x.low, f.y.low * 1e3 / gbps)
    slope = [(f.x(start), f.y(start * gbps / 1e3)), (f.x(tflops / gbps * 1e3), f.y(tflops))]
    said = say("The roof: {} GB/s of memory, then {} TFLOP/s of 16-bit products", gbps, tflops)
    f.add(mark(path([*slope, (f.x.end, f.y(tflops))], "roof"), said))
    f.add(text(f.x.end - 4, f.y(tflops) - 9, "16-bit tensor cores", "end", "note"))
    places.line(slope[0], slope[1])
    places.line(slope[1], (f.x.end, f.y(tflops)))
    places.take(f.x.end - 60, f.y(tflops) - 13, 66, 7)
    if single is not None:
        knee = (f.x(single / gbps * 1e3), f.y(single))
        said = say("{} TFLOP/s of products of float32, without tensor cores", single)
        f.add(mark(path([knee, (f.x.end, knee[1])], "roof second"), said))
        f.add(text(f.x.end - 4, knee[1] - 7, "float32", "end", "note"))
        places.line(knee, (f.x.end, knee[1]))
        places.take(f.x.end - 22, knee[1] - 11, 26, 7)
    (x0, y0), (x1, y1) = slope
    angle = math.degrees(math.atan2(y1 - y0, x1 - x0))
    x, y = x0 + (x1 - x0) * 0.42 - 6, y0 + (y1 - y0) * 0.42 - 9
    turned = f' transform="rotate({angle:.1f} {x:.1f} {y:.1f})"'
    f.add(text(x, y, "device memory", "middle", "note", turned))
    part = 48 / math.dist((x0, y0), (x1, y1))
    dx, dy = (x1 - x0) * part, (y1 - y0) * part
    places.line((x - dx, y - dy), (x + dx, y + dy), 8)


class Places:
    """What is taken in a chart, so that no name is written over anything."""

    def __init__(self, f: svg.Frame) -> None:
        self.frame = f
        self.taken: list[tuple[float, float, float, float]] = []

    def take(self, x: float, y: float, half_width: float, half_height: float) -> None:
        self.taken.append((x, y, half_width, half_height))

    def line(self, start: tuple[float, float], end: tuple[float, float], half: float = 3) -> None:
        count = max(2, round(math.dist(start, end) / 5))
        for i in range(count + 1):
            x, y = (a + (b - a) * i / count for a, b in zip(start, end, strict=True))
            self.take(x, y, half, half)

    def free(self, x: float, y: float, half_width: float, half_height: float) -> bool:
        f = self.frame
        inside = f.x.start < x - half_width and x + half_width < f.x.end and f.y.end < y < f.y.start
        return inside and not any(
            abs(x - left) < half_width + w and abs(y - top) < half_height + h
            for left, top, w, h in self.taken
        )


def _names(f: svg.Frame, points: Sequence[Json], places: Places) -> None:
    """The name of each kernel at its fastest case, where there is room for it."""
    best: dict[str, Json] = {}
    for p in points:
        if p["tflops"] > best.get(p["kernel"], p)["tflops"] or p["kernel"] not in best:
            best[p["kernel"]] = p
    for kernel, p in best.items():
        x, y = f.x(min(p["intensity"], RIGHTMOST)), f.y(max(p["tflops"], f.y.low))
        half = 3.3 * len(kernel)
        for dx, dy in _around(half):
            if places.free(x + dx, y + dy, half, 6):
                places.take(x + dx, y + dy, half, 6)
                f.add(text(x + dx, y + dy + 4, kernel, "middle", f"name f-{p['family']}"))
                break


def _around(half: float) -> Iterator[tuple[float, float]]:
    """Where a name may stand from its dot, the nearest first."""
    for away in (0, 10, 22):
        beside = half + 9 + away
        yield from ((beside, 0), (-beside, 0), (0, 15 + away), (0, -13 - away))
        yield from ((half, 14 + away), (-half, 14 + away), (half, -13 - away), (-half, -13 - away))
