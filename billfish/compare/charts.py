"""The charts of a report, from the traced document: each a function of it and of a width."""

import math
import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from billfish.compare import svg
from billfish.compare.figures import Figure, say
from billfish.compare.svg import dot, frame, mark, path, powers, steps, text

Json = dict[str, Any]
SHAPES = {"marlin": "circle", "paged_attention": "square", "general": "diamond"}
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


def legend(entries: Sequence[tuple[str, str]]) -> str:
    """(class of the line or dot, words), as HTML."""
    items = "".join(f'<li><i class="{kind}"></i>{escape(words)}</li>' for kind, words in entries)
    return f'<ul class="legend">{items}</ul>'


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
        "tokens (M)",
        "times FP16",
    )
    _level(f, 4, "ideal", "ideal: 4x fewer bits")
    _level(f, chart["ideal"], "ideal-scales", "")
    words = say("with scales: {x}", chart["ideal"])
    f.add(mark(text(f.x.end, f.y(chart["ideal"]) + 14, words.text, "end", "note ideal"), words))
    _level(f, 1, "even", "")
    f.add(text(f.x.start + 4, f.y(1) + 15, "FP16 (cuBLAS)", "start", "note"))
    for number, shape in enumerate(shapes):
        points = shape["lines"]["billfish"]
        f.add(path([(f.x(p["m"]), f.y(p["speedup"])) for p in points], f"line c{number}"))
        for p in points:
            said = say(
                f"{shape['shape']}, M = {{}}: {{x}}; {{}} µs, FP16 {{}} µs",
                p["m"],
                p["speedup"],
                p["us"],
                p["fp16_us"],
            )
            f.add(mark(dot(f.x(p["m"]), f.y(p["speedup"])), said, f"c{number}"))
    names = [(f"c{number}", shape["shape"]) for number, shape in enumerate(shapes)]
    return f.svg("Speed-up over FP16 by number of tokens, one line a shape") + legend(names)


def _level(f: svg.Frame, value: float, kind: str, words: str, below: bool = False) -> None:
    y = f.y(value)
    f.add(f'<line x1="{f.x.start}" x2="{f.x.end}" y1="{y}" y2="{y}" class="level {kind}"/>')
    f.add(text(f.x.end, y + (14 if below else -6), words, "end", f"note {kind}"))


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
        points = lines[name]
        kind = f"i-{_class(name)}"
        f.add(path([(f.x(p["m"]), f.y(p["speedup"])) for p in points], f"line {kind}"))
        for p in points:
            said = say(
                f"{named(name)}, M = {{}}: {{x}}; {{}} µs, FP16 {{}} µs",
                p["m"],
                p["speedup"],
                p["us"],
                p["fp16_us"],
            )
            size = 3.6 if name == "billfish" else 2.6
            f.add(mark(dot(f.x(p["m"]), f.y(p["speedup"]), size=size), said, kind))
    f.add(text(f.left, 16, shape["shape"], "start", "small-title"))
    return f.svg(f"Speed-up over FP16, {shape['shape']}, by implementation")


def peer_legend(chart: Json) -> str:
    found = [n for n in PEERS if any(n in s["lines"] for s in chart["shapes"])]
    return legend([(f"i-{_class(name)}", named(name)) for name in found])


def worth(family: str, techniques: Sequence[Json], width: float) -> str:
    """What each technique is worth: a dot a case, times slower without it."""
    shown = [t for t in techniques if t["cases"]]
    ratios = [c["ratio"] for t in shown for c in t["cases"]]
    low, high = min(0.8, *ratios), max(2.0, *ratios) * 1.06
    wide = width > 500
    left = 24 + 7.1 * max(len(t["name"]) for t in shown) if wide else 12
    row = 30 if wide else 46
    f = frame(
        width, 60 + row * len(shown), (low, high), (0, 1), log_x=True, left=left, top=14, bottom=46
    )
    few = (0.5, 0.8, 0.9, 1, 1.1, 1.25, 1.5, 1.75, 2, 2.5, 3)
    ticks = [v for v in (few if high < 4 else (0.5, 1, 2, 4, 8, 16, 32)) if low <= v <= high]
    ticks = ticks if wide else [v for v in ticks if v not in (0.9, 1.1, 1.75)]
    base = f.y.start
    for value in ticks:
        x = f.x(value)
        kind = "level even" if value == 1 else "grid"
        f.add(f'<line x1="{x}" x2="{x}" y1="10" y2="{base}" class="{kind}"/>')
        f.add(text(x, base + 17, f"{value:g}x", "middle", "tick"))
    f.add(
        text(
            (f.x.start + f.x.end) / 2,
            base + 35,
            "time without it / time with it",
            "middle",
            "label",
        )
    )
    for number, technique in enumerate(shown):
        y = 14 + row * (number + 0.5) + (0 if wide else 8)
        if wide:
            f.add(text(left - 14, y + 4, technique["name"], "end", "row-name"))
        else:
            f.add(text(left, y - 14, technique["name"], "start", "row-name"))
        f.add(f'<line x1="{f.x.start}" x2="{f.x.end}" y1="{y}" y2="{y}" class="grid"/>')
        for case in technique["cases"]:
            said = say(
                f"{technique['name']}, {case['group']} {case['case']}: {{x}}; "
                "{} µs with, {} µs without",
                case["ratio"],
                case["with_us"],
                case["without_us"],
            )
            f.add(mark(dot(f.x(case["ratio"]), y, SHAPES[family], 5), said, f"f-{family} faint"))
    return f.svg("What each technique is worth: time without it over time with it, a dot a case")


def decode(chart: Json, width: float) -> str:
    """Decode by case: how fast each is beside attention over a contiguous cache."""
    cases = chart["cases"]
    impls = [
        n
        for n in ("billfish", "fa3", "portable", "paged_attention_v2")
        if any(n in c["impls"] for c in cases)
    ]
    ratios = [c["impls"][n]["ratio"] for c in cases for n in impls if n in c["impls"]]
    left = 96 if width > 500 else 84
    f = frame(
        width,
        54 + 25 * len(cases),
        (min(ratios) * 0.93, max(1.15, *ratios) * 1.03),
        (0, 1),
        log_x=True,
        left=left,
        top=12,
        bottom=46,
    )
    base = f.y.start
    for value in (0.125, 0.25, 0.5, 1):
        if value >= f.x.low:
            x = f.x(value)
            kind = "level even" if value == 1 else "grid"
            f.add(f'<line x1="{x}" x2="{x}" y1="8" y2="{base}" class="{kind}"/>')
            f.add(text(x, base + 17, f"{value:g}x", "middle", "tick"))
    f.add(
        text(
            (f.x.start + f.x.end) / 2,
            base + 35,
            "speed beside a contiguous cache (cuDNN)",
            "middle",
            "label",
        )
    )
    for number, case in enumerate(cases):
        y = 12 + 25 * (number + 0.5)
        f.add(text(left - 10, y + 4, case["case"], "end", "row-name"))
        found = [n for n in impls if n in case["impls"]]
        xs = [f.x(case["impls"][n]["ratio"]) for n in found]
        f.add(f'<line x1="{min(xs)}" x2="{max(xs)}" y1="{y}" y2="{y}" class="grid"/>')
        for name in reversed(found):
            impl = case["impls"][name]
            said = say(
                f"{named(name)}, {case['case']}: {{x}} of a contiguous cache; {{}} µs",
                impl["ratio"],
                impl["us"],
            )
            size = 5.5 if name == "billfish" else 4
            f.add(mark(dot(f.x(impl["ratio"]), y, size=size), said, f"i-{_class(name)}"))
    names = [(f"i-{_class(name)}", named(name)) for name in impls]
    return f.svg("Decode beside attention over a contiguous cache, context x batch") + legend(names)


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
    for name in reversed([n for n in order if n in lines]):
        points = lines[name]
        f.add(path([(f.x(p["size"]), f.y(p["us"])) for p in points], f"line i-{_class(name)}"))
        for p in points:
            said = say(
                f"{chart['mode']}, {named(name)}, {{}} {chart['unit']}: {{}} µs, {{b}}",
                p["size"],
                p["us"],
                p["bytes"],
            )
            f.add(mark(dot(f.x(p["size"]), f.y(p["us"]), size=3.6), said, f"i-{_class(name)}"))
    names = [(f"i-{_class(name)}", named(name)) for name in order if name in lines]
    title = f"<h4>{chart['mode'].capitalize()}</h4>"
    return title + f.svg(f"Time of {chart['mode']} by size") + legend(names)


def _class(name: str) -> str:
    return re.sub(r"[^\w-]", "-", name)


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
        points = lines[name]
        f.add(path([(f.x(p["batch"]), f.y(p["tok_s"])) for p in points], f"line i-{_class(name)}"))
        for p in points:
            said = say(
                f"{named(name)}, batch {{}}: {{}} tokens/s; {{}} ms a token",
                p["batch"],
                p["tok_s"],
                p["tpot_ms"],
            )
            f.add(mark(dot(f.x(p["batch"]), f.y(p["tok_s"])), said, f"i-{_class(name)}"))
    names = [(f"i-{_class(name)}", named(name)) for name in lines]
    return f.svg("Output tokens a second by batch") + legend(names)


def roofline(points: Sequence[Json], top: Json, width: float) -> str:
    """Every kernel: operations a second over operations a byte, under the roof of this GPU."""
    shown = [p for p in points if p["flops"] > 0]
    xs = [p["intensity"] for p in shown]
    low, high = min([0.5, *xs]), max([4000.0, *xs]) * 1.3
    rates = [1.0, *(p["tflops"] for p in shown if p["tflops"] > 0)]
    f = frame(
        width,
        440 if width > 500 else 360,
        (low, high),
        (min(rates) * 0.6, top["tflops"] * 1.9),
        log_x=True,
        log_y=True,
        left=50,
        right=18,
    )
    f.axes(powers(low, high), powers(f.y.low, f.y.high), "operations / byte", "TFLOP/s")
    knee = top["tflops"] / top["gbps"] * 1e3
    start = max(low, f.y.low * 1e3 / top["gbps"])
    slope = [(f.x(start), f.y(start * top["gbps"] / 1e3)), (f.x(knee), f.y(top["tflops"]))]
    f.add(
        mark(
            path([*slope, (f.x(high), f.y(top["tflops"]))], "roof"),
            say(
                "The roof: {} GB/s of memory, then {} TFLOP/s of 16-bit products",
                top["gbps"],
                top["tflops"],
            ),
        )
    )
    f.add(text(f.x(high) - 4, f.y(top["tflops"]) - 9, "16-bit tensor cores", "end", "note"))
    (x0, y0), (x1, y1) = slope
    angle = math.degrees(math.atan2(y1 - y0, x1 - x0))
    at = (x0 + (x1 - x0) * 0.42, y0 + (y1 - y0) * 0.42 - 9)
    f.add(
        text(
            *at,
            "device memory",
            "middle",
            "note",
            f' transform="rotate({angle:.1f} {at[0]:.1f} {at[1]:.1f})"',
        )
    )
    for p in shown:
        said = say(
            f"{p['name']}: {{}} TFLOP/s at {{}} operations a byte; {{}} µs",
            p["tflops"],
            p["intensity"],
            p["us"],
        )
        at = (f.x(p["intensity"]), f.y(max(p["tflops"], f.y.low)))
        f.add(mark(dot(*at, SHAPES[p["family"]], 4.2), said, f"f-{p['family']} faint"))
    return f.svg("Roofline: every kernel that computes, under this GPU's roof")


def floors(points: Sequence[Json], width: float) -> str:
    """Every kernel: percent of its floor, by bytes moved."""
    shown = [p for p in points if isinstance(p["percent"], Figure)]
    sizes = [p["bytes"] for p in shown]
    most = max([105.0, *(p["percent"] for p in shown)])
    f = frame(
        width,
        360 if width > 500 else 320,
        (min(sizes) * 0.7, max(sizes) * 1.4),
        (0, most * 1.04),
        log_x=True,
        left=50,
        right=18,
    )
    f.axes(
        powers(f.x.low, f.x.high)[:: 1 if width > 500 else 2],
        steps(0, most),
        "bytes",
        "percent of the floor",
    )
    _level(f, 100, "even", "")
    for p in shown:
        said = say(
            f"{p['name']}: {{%}} of the floor; {{}} µs, {{b}}, {{}} GB/s",
            p["percent"],
            p["us"],
            p["bytes"],
            p["gbps"],
        )
        at = (f.x(p["bytes"]), f.y(p["percent"]))
        f.add(mark(dot(*at, SHAPES[p["family"]], 4.2), said, f"f-{p['family']} faint"))
    return f.svg("How near every kernel comes to its floor, by the bytes it moves")
