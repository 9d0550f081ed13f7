"""The comparison as one HTML file that needs nothing else: no network, no other file.

Everything is made from the document, and every figure carries its place in it; the document itself
is in the page too. What was not measured is said to be so. Links to code lead to the files of this
installation, or to `source_url`.
"""

import json
import os
from collections.abc import Callable, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

import billfish
from billfish.compare import charts, diagrams
from billfish.compare.catalogue import DOMAINS, KINDS
from billfish.compare.figures import Figure, number, traced

Json = dict[str, Any]
WIDE, NARROW = 860, 350
NOT_YET = '<span class="missing">not measured yet</span>'


def page(document: Json, *, folder: Path | None = None, source_url: str | None = None) -> str:
    """The HTML. folder: where the file will lie, so that links to code lead there from it.

    source_url: links to code begin with it instead, as https://host/project/blob/main.
    """
    href = _links(folder, source_url)
    doc = traced(document)
    families = doc["families"]
    body = [
        _banner(doc), _overview(families, href),
        _all_kernels(doc["charts"]),
        *(_family(name, family, doc, href) for name, family in families.items()),
        _serving(doc), _records(doc["records"]),
    ]  # fmt: skip
    entries = [("overview", "Side by side"), ("kernels", "Every kernel")]
    entries += [(name, family["title"]) for name, family in families.items()]
    entries += [("serving", "Whole model")] if doc["charts"]["serving"] else []
    entries += [("records", "Records")]
    data = json.dumps(document, ensure_ascii=False).replace("</", "<\\/")
    assets = files("billfish.compare") / "page"
    html = (assets / "report.html").read_text(encoding="utf-8")
    for key, value in {
        "style": (assets / "style.css").read_text(encoding="utf-8"),
        "nav": "".join(f'<a href="#{to}">{words}</a>' for to, words in entries),
        "body": "".join(body),
        "data": data,
        "script": (assets / "script.js").read_text(encoding="utf-8"),
    }.items():
        html = html.replace(f"<!-- {key} -->", value, 1)
    return html


Href = Callable[[Json], str]


def _links(folder: Path | None, source_url: str | None) -> Href:
    root = Path(billfish.__file__).resolve().parents[1]

    def href(link: Json) -> str:
        lines = f"#L{int(link['first'])}-L{int(link['last'])}"
        if source_url:
            return f"{source_url.rstrip('/')}/{link['file']}{lines}"
        path = root / link["file"]
        if folder is None:
            return link["file"] + lines
        return Path(os.path.relpath(path, folder.resolve())).as_posix() + lines

    return href


def _both(chart: Callable[[float], str]) -> str:
    """A chart for a wide page and for a phone."""
    return f'<div class="wide">{chart(WIDE)}</div><div class="narrow">{chart(NARROW)}</div>'


def _figure(title: str, inside: str, note: str = "", origin: str = "") -> str:
    tag = _origin(origin) if origin else ""
    note = f"<figcaption>{note}</figcaption>" if note else ""
    return f'<figure><h4>{title}{tag}</h4><div class="chart">{inside}</div>{note}</figure>'


def _origin(origin: str) -> str:
    if origin == "not measured yet":
        return NOT_YET
    return f'<span class="tag {origin}">{origin}</span>'


def _banner(doc: Json) -> str:
    made = doc["made"]
    records = doc["records"].values()
    if made["origin"] == "measured":
        old = [r for r in records if r["origin"] == "recorded"]
        more = (
            "What is marked <em>recorded</em> was not measured here: the table at the end says "
            "where and when."
            if old
            else ""
        )
        took = f", in {number(made['seconds'], ' s')}" if made["seconds"] is not None else ""
        lost = "".join(f"<li>{escape(each)}</li>" for each in made["left_out"])
        lost = f"<details><summary>Left out</summary><ul>{lost}</ul></details>" if lost else ""
        return (
            f'<aside class="banner here" role="note"><strong>Measured here</strong><p>On '
            f"{escape(made['gpu'])}, {made['date']}{took}. {more}</p>{lost}</aside>"
        )
    devices = sorted({(r["device"], r["date"]) for r in records if r["origin"] == "recorded"})
    where = "; ".join(f"{escape(device)}, {date}" for device, date in devices)
    machine = (
        f"This machine has a GPU, {escape(made['gpu'])}, which was not asked."
        if made["gpu"]
        else "This machine has no GPU."
    )
    return (
        '<aside class="banner" role="note" id="no-gpu"><strong>Recorded results: nothing on this '
        f"page was measured here</strong><p>{machine} Times were recorded on: {where}. The table "
        '<a href="#records">at the end</a> gives the commit, versions and command of each '
        "record.</p></aside>"
    )


ROWS = (
    ("Primary function", "function"),
    ("Optimization focus", "focus"),
    ("Memory management", "memory"),
    ("Use cases", "uses"),
)


def _overview(families: Json, href: Href) -> str:
    head = "".join(
        f'<th scope="col"><i class="f-{name} key"></i>{family["title"]}</th>'
        for name, family in families.items()
    )

    def line(title: str, cell: Callable[[str, Json], str]) -> str:
        cells = "".join(
            f'<td data-family="{family["title"]}">{cell(name, family)}</td>'
            for name, family in families.items()
        )
        return f'<tr><th scope="row">{title}</th>{cells}</tr>'

    rows = [line(title, lambda _, family, key=key: escape(family[key])) for title, key in ROWS]  # type: ignore[misc]
    rows.insert(3, line("Key techniques", _technique_list))
    rows.insert(4, line("Performance", lambda _, family: _performance(family)))
    return (
        '<section id="overview"><h2>Side by side</h2><div class="table-wrap"><table class="sides">'
        f'<thead><tr><td></td>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'
        '<p class="reading">Behind a technique: the time without it over the time with it, the most '
        "of all cases measured.</p></section>"
    )


def _technique_list(name: str, family: Json) -> str:
    """Each technique, or kind of technique where there are many, with the most that it is worth."""
    found: dict[str, tuple[int, list[Figure]]] = {}
    for index, technique in enumerate(family["techniques"]):
        title = KINDS[technique["kind"]] if "kind" in technique else technique["name"]
        _, ratios = found.setdefault(title, (index, []))
        ratios += [case["ratio"] for case in technique["cases"]]
    items = []
    for title in sorted(found, key=list(KINDS.values()).index) if name == "general" else found:
        index, ratios = found[title]
        value = f"<b>{number(max(ratios), 'x')}</b>" if ratios else NOT_YET
        items.append(f'<li><a href="#{name}-{index}">{escape(title)}</a> {value}</li>')
    return f'<ul class="techniques">{"".join(items)}</ul>'


def _performance(family: Json) -> str:
    items = "".join(
        f"<div><dt>{escape(claim['label'])}</dt><dd>"
        f"{NOT_YET if claim['value'] is None else number(claim['value'], claim['unit'])}</dd></div>"
        for claim in family["performance"]
    )
    return f'<dl class="claims">{items}</dl>'


def _all_kernels(chart: Json) -> str:
    points, top = chart["kernels"], chart["ceilings"]
    keys = charts.legend(
        [(f"f-{name}", title) for name, title in (("marlin", "Marlin"), ("paged_attention",
         "PagedAttention"), ("general", "General")) if any(p["family"] == name for p in points)]
    )  # fmt: skip
    if not points or top is None:
        inside = f"<p>Kernels under the roof of their GPU: {NOT_YET}.</p>"
    else:
        general = "" if any(p["family"] == "general" for p in points) else (
            f" General kernels: {NOT_YET}."
        )  # fmt: skip
        inside = _figure(
            "Roofline",
            _both(lambda width: charts.roofline(points, top, width)) + keys,
            "A kernel can be no higher than the roof: left of the knee device memory decides, right "
            f"of it the tensor cores. Ceilings, from <code>{top['record']}</code>: "
            f"{number(top['gbps'], ' GB/s')}, copied, and {number(top['tflops'], ' TFLOP/s')}. "
            "Reading alone is faster than copying, so a kernel that reads may lie above the line."
            + general,
        ) + _figure(
            "How near the floor",
            _both(lambda width: charts.floors(points, width)) + keys,
            "The floor is the time that a kernel's bytes or operations take at those ceilings, "
            "whichever is longer. Small problems are far from it: starting a kernel and filling "
            "the machine take a few microseconds whatever the size. What is still in the L2 cache "
            "comes out above 100%.",
        )
    return f'<section id="kernels"><h2>Every kernel, against its GPU</h2>{inside}</section>'


def _family(name: str, family: Json, doc: Json, href: Href) -> str:
    extra = {"marlin": _marlin, "paged_attention": _paged, "general": _general_charts}[name]
    measured = [t for t in family["techniques"] if t["cases"]]
    worth = ""
    if measured:
        worth = _figure(
            "What each technique is worth",
            _both(lambda width: charts.worth(name, measured, width)),
            "A dot is a case; right of the line, the technique makes it faster. A difference under "
            "3% is a tie.",
            measured[0]["origin"],
        )
    if name == "general":
        cards = _by_domain(family, href)
    else:
        cards = "".join(_card(name, i, t, href) for i, t in enumerate(family["techniques"]))
    return (
        f'<section id="{name}" class="family f-{name}"><h2>{family["title"]}</h2>'
        f'<p class="lead">{escape(family["function"])} {escape(family["focus"])}</p>'
        f"{extra(doc, href)}{worth}<h3>Techniques, with and without</h3>{cards}</section>"
    )


def _by_domain(family: Json, href: Href) -> str:
    indexed = list(enumerate(family["techniques"]))
    parts = []
    for domain, title in DOMAINS.items():
        cards = [_card("general", i, t, href) for i, t in indexed if t["domain"] == domain]
        inside = "".join(cards) or f"<p>{NOT_YET}</p>"
        parts.append(f"<h3>{title}</h3>{inside}")
    return "".join(parts)


def _card(family: str, index: int, technique: Json, href: Href) -> str:
    kind = technique.get("kind")
    tag = f'<span class="tag kind">{KINDS[kind]}</span>' if kind else ""
    switch = f'<p class="switch">Switch: <code>{escape(technique["switch"])}</code></p>' if technique["switch"] else ""  # fmt: skip
    body = _cases(technique["cases"]) if technique["cases"] else f"<p>{NOT_YET}</p>"
    return (
        f'<article class="card" id="{family}-{index}"><header><h4>{escape(technique["name"])}</h4>'
        f"{tag}{_origin(technique['origin'])}</header>"
        f"<p>{escape(technique['what'])}</p>{switch}{body}{_settings(technique['settings'])}"
        f"{_code(technique['code'], href)}</article>"
    )


def _cases(cases: Sequence[Json]) -> str:
    """A line a case: two bars on one scale, the times, bytes and percent of the floor."""
    floor = cases[0]["floor"]
    what = "plain copy of as many bytes" if floor == "plain copy" else "floor"
    lines = []
    for case in cases:
        slowest = max(case["with_us"], case["without_us"])
        bars = _bar("with", case["with_us"] / slowest) + _bar("without", case["without_us"] / slowest)
        if case["floor_us"] is not None and case["floor_us"] <= slowest:
            bars += f'<i class="floor" style="left:{100 * case["floor_us"] / slowest:.1f}%"></i>'
        name = " ".join(part for part in (case["group"].replace("_", " "), case["case"]) if part)
        lines.append(
            f'<tr><th scope="row">{escape(name)}</th><td class="bars">{bars}</td>'
            f"<td>{number(case['with_us'])}</td><td>{number(case['without_us'])}</td>"
            f'<td class="ratio">{number(case["ratio"], "x")}</td>'
            f"<td>{number(case['bytes'], 'bytes')}</td><td>{number(case['floor_us'])}</td>"
            f"<td>{number(case['with_percent'], '%')}</td>"
            f"<td>{number(case['without_percent'], '%')}</td></tr>"
        )
    return (
        '<div class="table-wrap"><table class="cases"><thead><tr><th scope="col">case</th>'
        '<td class="key-bars"><span class="k-with">with</span> <span class="k-without">without'
        f'</span> <span class="k-floor">{what}</span></td><th scope="col">with, µs</th>'
        '<th scope="col">without, µs</th><th scope="col">without / with</th>'
        '<th scope="col">bytes</th><th scope="col">floor, µs</th>'
        '<th scope="col">of the floor, with</th><th scope="col">without</th></tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def _bar(kind: str, part: float) -> str:
    return f'<i class="bar {kind}" style="width:{100 * part:.1f}%"></i>'


def _settings(settings: Sequence[Json]) -> str:
    if not settings:
        return ""
    lines = "".join(
        f'<tr><th scope="row">{escape(s["group"])} {escape(s["case"])}</th>'
        f"<td>{number(s['setting'])}</td><td>{number(s['us'])}</td>"
        f"<td>{number(s['percent'], '%')}</td></tr>"
        for s in settings
    )
    return (
        '<div class="table-wrap"><table class="cases"><thead><tr><th scope="col">case</th>'
        '<th scope="col">depth</th><th scope="col">µs</th><th scope="col">of the floor</th></tr>'
        f"</thead><tbody>{lines}</tbody></table></div>"
    )


def _code(links: Sequence[Json], href: Href) -> str:
    items = "".join(
        f'<li><a class="code" href="{escape(href(link))}">{escape(link["symbol"])}</a> '
        f'<span class="file">{escape(link["file"])}, lines {number(link["first"])} to '
        f"{number(link['last'])}</span></li>"
        for link in links
    )
    excerpts = "".join(
        f'<p class="file">{escape(link["file"])}</p>'
        f'<pre tabindex="0"><code>{escape(link["text"])}</code></pre>'
        for link in links
    )
    return (
        f'<div class="sources"><ul>{items}</ul><details><summary>Show the code</summary>{excerpts}'
        "</details></div>"
    )


def _marlin(doc: Json, href: Href) -> str:
    chart, pictures = doc["charts"]["speedup"], doc["pictures"]
    if chart is None:
        speed = f"<p>Speed-up over FP16: {NOT_YET}.</p>"
    else:
        small = "".join(
            f'<div class="small">{charts.speedup_beside_peers(chart, shape)}</div>'
            for shape in chart["shapes"]
            if "billfish" in shape["lines"]
        )
        speed = _figure(
            "Speed-up over FP16 by batch",
            _both(lambda width: charts.speedup(chart, width)),
            f"INT4 weights with a 16-bit scale for every {number(chart['group_size'])} are "
            f"{number(chart['ideal'], 'x')} smaller than FP16 weights, which is all that is to be "
            "gained where reading weights is the work. With many tokens arithmetic is, and the "
            "lines meet at 1.",
            chart["origin"],
        )
        if any(len(shape["lines"]) > 1 for shape in chart["shapes"]):
            speed += _figure(
                "The same beside others, a shape each",
                f'<div class="grid">{small}</div>{charts.peer_legend(chart)}',
                "All replayed in turns in one process.",
                chart["origin"],
            )
    return speed + _queue(pictures["queue"], href) + _stream_k(pictures["stream_k"], href)


def _queue(picture: Json, href: Href) -> str:
    product, assumed = picture["product"], picture["assumed"]
    return _figure(
        "The queue in time: a diagram",
        _both(lambda width: diagrams.timeline(picture, width)),
        f"A product of {number(product['n'])} x {number(product['k'])} with "
        f"{number(product['m'])} tokens on an {picture['gpu']}: the kernel's own configuration has "
        f"{number(picture['stages'])} stages of {number(picture['stage_bytes'], 'bytes')} in a ring "
        f"({number(picture['in_flight_bytes'], 'bytes')} in flight), emptied by "
        f"{number(picture['consumers'])} warpgroups, of which one is shown. Numbers in the bars "
        "are steps of 128 columns. The order of events is what the barriers enforce. Their lengths "
        f"are assumed, not measured: a load takes {number(assumed['load'])} units and the next can "
        f"begin {number(assumed['between loads'])} later; half a stage is dequantized in "
        f"{number(assumed['dequantize'])} and multiplied in {number(assumed['multiply'])}."
        + _code(picture["code"], href),
    )


def _stream_k(picture: Json, href: Href) -> str:
    tall = int(max(picture["with"]["longest"], picture["without"]["longest"]))
    product = picture["product"]

    def both(width: float) -> str:
        return diagrams.shares(
            picture["without"], tall, width, "Whole tiles: a block has one, or nothing"
        ) + diagrams.shares(picture["with"], tall, width, "Stream-K: the same steps for every block")

    parts = [
        f"{words}: {number(d['tiles'])} tiles of {number(d['steps'])} steps on "
        f"{number(d['slots'])} places, the longest share {number(d['longest'])} steps, "
        f"{number(d['busy_percent'], '%')} of the places' time busy."
        for words, d in (("Whole tiles", picture["without"]), ("Stream-K", picture["with"]))
    ]
    return _figure(
        "Equal work for every multiprocessor: a diagram",
        _both(both),
        f"A product of {number(product['n'])} x {number(product['k'])} with "
        f"{number(product['m'])} tokens as the kernel divides it on an {picture['gpu']}; a column "
        f"is a thread block, a colour a tile. {' '.join(parts)} Adding up shared tiles costs time "
        "that is not in this picture." + _code(picture["code"], href),
    )


def _paged(doc: Json, href: Href) -> str:
    chart, pictures = doc["charts"], doc["pictures"]
    decode, moved = chart["decode"], chart["movement"]
    parts = [_blocks(pictures["blocks"], href), _memory(pictures["memory"], chart["cache"], href)]
    if decode and decode["cases"]:
        parts.append(
            _figure(
                "Decode beside a contiguous cache",
                _both(lambda width: charts.decode(decode, width)),
                "Context x batch; 32 query heads, 8 KV heads. Attention by cuDNN over keys and "
                "values that lie in one piece is a bound: what blocks cost is how far a dot lies "
                "left of the line.",
                decode["origin"],
            )
        )
    else:
        parts.append(f"<p>Decode beside a contiguous cache: {NOT_YET}.</p>")
    if moved:
        small = "".join(f'<div class="small">{charts.movement(each)}</div>' for each in moved)
        parts.append(
            _figure("Writing and copying blocks", f'<div class="grid">{small}</div>',
                    "Beside a plain copy of as many bytes.", moved[0]["origin"])
        )  # fmt: skip
    return "".join(parts)


def _blocks(picture: Json, href: Href) -> str:
    source, copy = picture["copied"]
    return _figure(
        "Block tables: a diagram of a real run",
        _both(lambda width: diagrams.blocks(picture, width)),
        f"The engine's block pool, with blocks of {number(picture['block_size'])} tokens. A' is a "
        "second sample of A: they share what they have in common, two references each. The first "
        f"token that A' wrote went to a copy of block {number(source)}, block {number(copy)}. C has "
        "ended; its full blocks stay cached (hatched) until their space is needed."
        + _code(picture["code"], href),
    )


def _memory(picture: Json, cache: Json | None, href: Href) -> str:
    rows = "".join(
        f'<tr><th scope="row">{words}</th><td>{number(d["used_percent"], "%")}</td>'
        f"<td class=\"bars\">{_bar('with' if key == 'paged' else 'without', d['used_percent'] / 100)}"
        f"</td><td>{number(d['running'])}</td><td>{number(d['steps'])}</td></tr>"
        for key, words, d in (
            ("paged", "Blocks", picture["paged"]),
            ("contiguous", "Contiguous: room for the longest", picture["contiguous"]),
        )
    )
    table = (
        '<div class="table-wrap"><table class="cases"><thead><tr><th scope="col"></th>'
        '<th scope="col">memory that holds tokens</th><td></td>'
        '<th scope="col">requests at once</th><th scope="col">steps</th></tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )
    if cache is None:
        speed = f"Output tokens a second of a whole model on a GPU, both ways: {NOT_YET}."
    else:
        speed = "Output tokens a second of a whole model: " + "; ".join(
            f"{number(cache['paged_tok_s'])} with blocks, {number(c['tok_s'])} with room for "
            f"{number(c['reserve_tokens'])} tokens a request, {number(c['ratio'], 'x')}"
            for c in cache["contiguous"]
        )
    return _figure(
        "The same memory, with blocks and without",
        table,
        f"Counted by running the engine without a model: {number(picture['requests'])} requests "
        f"({number(picture['prompt_tokens'])} prompt and {number(picture['output_tokens'])} output "
        f"tokens, lengths drawn at random with a fixed seed) through a memory of "
        f"{number(picture['slots'])} tokens, averages while requests wait. A contiguous cache sets "
        f"aside {number(picture['reserve_tokens'])} tokens for each. It takes "
        f"{number(picture['ratio'], 'x')} as many steps. {speed}" + _code(picture["code"], href),
    )


def _general_charts(doc: Json, href: Href) -> str:
    lines, tutorial = doc["charts"]["general"], doc["charts"]["tutorial"]
    parts = []
    if not lines:
        parts.append(
            f"<p>Times of the general kernels and of their peers: {NOT_YET}. On a machine with a GPU "
            "<code>billfish bench general --out FILE</code> takes them.</p>"
        )
    for domain, title in DOMAINS.items():
        found = [line for line in lines if line["domain"] == domain]
        if found:
            parts.append(_figure(title, _general_table(found), "", doc["records"]["general"]["origin"]))  # fmt: skip
    if tutorial:
        parts.append(_figure("Write your own kernel, step by step", _tutorial(tutorial),
                             "The steps of docs/write-a-kernel.md.",
                             doc["records"]["tutorial"]["origin"]))  # fmt: skip
    return "".join(parts)


def _general_table(lines: Sequence[Json]) -> str:
    rows = "".join(
        f'<tr><th scope="row">{escape(line["kernel"])} {escape(line["size"])} '
        f"{escape(line['dtype'])}</th><td>{number(line['us'])}</td>"
        f'<td class="bars">{_bar("with", min(1.0, line["percent"] / 100))}</td>'
        f"<td>{number(line['percent'], '%')}</td><td>{number(line['floor_us'])}</td>"
        f"<td>{number(line['bytes'], 'bytes')}</td><td>{escape(line['peer'] or '')}</td>"
        f"<td>{number(line['peer_us'])}</td><td class=\"ratio\">{number(line['ratio'], 'x')}</td></tr>"
        for line in lines
    )
    return (
        '<div class="table-wrap"><table class="cases"><thead><tr><th scope="col">kernel</th>'
        '<th scope="col">µs</th><td></td><th scope="col">of the floor</th>'
        '<th scope="col">floor, µs</th><th scope="col">bytes</th><th scope="col">best peer</th>'
        '<th scope="col">its µs</th><th scope="col">its time / ours</th></tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def _tutorial(steps: Sequence[Json]) -> str:
    slowest = max(step["us"] for step in steps)
    rows = "".join(
        f'<tr><th scope="row">{escape(step["step"])}, {escape(step["size"])}</th>'
        f"<td>{number(step['us'])}</td>"
        f'<td class="bars">{_bar("with", step["us"] / slowest)}</td>'
        f"<td>{number(step['bytes'], 'bytes')}</td><td>{number(step['percent'], '%')}</td></tr>"
        for step in steps
    )
    return (
        '<div class="table-wrap"><table class="cases"><thead><tr><th scope="col">step</th>'
        '<th scope="col">µs</th><td></td><th scope="col">bytes</th>'
        f'<th scope="col">of the floor</th></tr></thead><tbody>{rows}</tbody></table></div>'
    )


def _serving(doc: Json) -> str:
    chart = doc["charts"]["serving"]
    if chart is None:
        return ""
    others = ", recorded on another machine of the kind" if len(chart["records"]) > 1 else ""
    return (
        '<section id="serving"><h2>Together: a whole model</h2>'
        + _figure(
            "Output tokens a second by batch",
            _both(lambda width: charts.serving(chart, width)),
            "A model of Llama-3-8B's shape with random weights, INT4 unless it says bf16, 512 tokens "
            f"in; beside vLLM{others}.",
            chart["origin"],
        )
        + "</section>"
    )


def _records(records: Json) -> str:
    rows = "".join(
        f'<tr><th scope="row"><code>{name}</code></th><td>{_origin(r["origin"])}</td>'
        f"<td>{escape(r['device'])}</td><td>{escape(r['date'])}</td>"
        f"<td><code>{escape((r['commit'] or 'unknown')[:12])}</code></td>"
        f"<td>{escape(', '.join(f'{k} {v}' for k, v in r['versions'].items()))}</td>"
        f"<td><code>{escape(r['command'])}</code></td></tr>"
        for name, r in records.items()
    )
    return (
        '<section id="records"><h2>Where the figures come from</h2><div class="table-wrap">'
        '<table class="sources-table"><thead><tr><th scope="col">record</th><td></td>'
        '<th scope="col">device</th><th scope="col">date</th><th scope="col">commit</th>'
        f'<th scope="col">versions</th><th scope="col">command</th></tr></thead><tbody>{rows}'
        '</tbody></table></div><p class="reading">Times are medians in microseconds of replays in '
        "CUDA graphs, all cases of a table in turns in one process. The floor is the time that the "
        "bytes of a case take at the rate at which this GPU reads memory, or as the record says. "
        "Percent of the floor: the floor's time over the measured one."
        '</p><p><button type="button" id="save">Save the figures as JSON</button></p></section>'
    )


