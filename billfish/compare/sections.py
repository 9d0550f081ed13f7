"""The sections of a report, one a family: its charts, its diagrams, a card for each technique."""

from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from billfish.compare import charts, diagrams
from billfish.compare.catalogue import DOMAINS, KINDS
from billfish.compare.figures import number

Json = dict[str, Any]
Href = Callable[[Json], str]
WIDE, NARROW = 860, 350
NOT_YET = '<span class="missing">not measured yet</span>'


def both_widths(chart: Callable[[float], str]) -> str:
    """A chart for a wide page and for a phone."""
    return f'<div class="wide">{chart(WIDE)}</div><div class="narrow">{chart(NARROW)}</div>'


def figure(title: str, inside: str, note: str = "", origin: str = "") -> str:
    tag = origin_tag(origin) if origin else ""
    note = f"<figcaption>{note}</figcaption>" if note else ""
    return f'<figure><h4>{title}{tag}</h4><div class="chart">{inside}</div>{note}</figure>'


def origin_tag(origin: str) -> str:
    if origin == "not measured yet":
        return NOT_YET
    return f'<span class="tag {origin}">{origin}</span>'


def family_section(name: str, family: Json, doc: Json, href: Href) -> str:
    extra = {"marlin": _marlin, "paged_attention": _paged, "general": _general_charts}[name]
    measured = [t for t in family["techniques"] if t["cases"]]
    worth = ""
    if measured:
        worth = figure(
            "What each technique is worth",
            both_widths(lambda width: charts.worth(name, measured, width)),
            "A dot is a case; right of the line, the technique makes it faster. A difference under "
            "3% is a tie.",
            measured[0]["origin"],
        )
    if name == "general":
        worth = (
            figure(
                "By domain, and by kind of technique",
                _matrix(family["techniques"]),
                "Time without it over the time with it: the most of all cases, and the kernel.",
            )
            + worth
        )
        cards = _by_domain(family, href)
    else:
        cards = "".join(_card(name, i, t, href) for i, t in enumerate(family["techniques"]))
    return (
        f'<section id="{name}" class="family f-{name}"><h2>{escape(family["title"])}</h2>'
        f'<p class="lead">{escape(family["function"])} {escape(family["focus"])}</p>'
        f"{extra(doc, href)}{worth}<h3>Techniques, with and without</h3>{cards}</section>"
    )


def _matrix(techniques: Sequence[Json]) -> str:
    """Domains by kinds of technique: the most that one of them is worth, and of which kernel."""
    kinds = [kind for kind in KINDS if any(t["kind"] == kind for t in techniques)]
    rows = []
    for domain, title in DOMAINS.items():
        cells = []
        for kind in kinds:
            here = [t for t in techniques if (t["domain"], t["kind"]) == (domain, kind)]
            cases = [(case["ratio"], t) for t in here for case in t["cases"]]
            if cases:
                ratio, technique = max(cases, key=lambda pair: pair[0])
                kernel = escape(technique["name"].partition(":")[0])
                cell = f'<b>{number(ratio, "x")}</b><span class="of">{kernel}</span>'
            else:
                cell = NOT_YET if here else '<span class="none">–</span>'
            cells.append(f"<td>{cell}</td>")
        rows.append(f'<tr><th scope="row">{title}</th>{"".join(cells)}</tr>')
    head = "".join(f'<th scope="col">{KINDS[kind]}</th>' for kind in kinds)
    return (
        '<div class="table-wrap"><table class="cases matrix"><thead><tr><th scope="col">domain</th>'
        f"{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
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
    switch = (
        f'<p class="switch">Switch: <code>{escape(technique["switch"])}</code></p>'
        if technique["switch"]
        else ""
    )
    body = _cases(technique["cases"]) if technique["cases"] else ""
    return (
        f'<article class="card" id="{family}-{index}"><header><h4>{escape(technique["name"])}</h4>'
        f"{tag}{origin_tag(technique['origin'])}</header>"
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
        bars = _bar("with", case["with_us"] / slowest) + _bar(
            "without", case["without_us"] / slowest
        )
        if case["floor_us"] is not None and case["floor_us"] <= slowest:
            bars += f'<i class="floor" style="left:{100 * case["floor_us"] / slowest:.1f}%"></i>'
        name = " ".join(part for part in (case["group"].replace("_", " "), case["case"]) if part)
        lines.append(
            f'<tr><th scope="row">{escape(name)}</th>'
            f'<td class="ratio">{number(case["ratio"], "x")}</td><td class="bars">{bars}</td>'
            f"<td>{number(case['with_us'])}</td><td>{number(case['without_us'])}</td>"
            f"<td>{number(case['bytes'], 'bytes')}</td><td>{number(case['floor_us'])}</td>"
            f"<td>{number(case['with_percent'], '%')}</td>"
            f"<td>{number(case['without_percent'], '%')}</td></tr>"
        )
    return (
        '<div class="table-wrap"><table class="cases"><thead><tr><th scope="col">case</th>'
        '<th scope="col">without / with</th><td class="key-bars"><span class="k-with">with</span> '
        f'<span class="k-without">without</span> <span class="k-floor">{what}</span></td>'
        '<th scope="col">with, µs</th><th scope="col">without, µs</th><th scope="col">bytes</th>'
        '<th scope="col">floor, µs</th>'
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


def code_links(links: Sequence[Json], href: Href) -> str:
    """Symbols, with the files and lines where they are."""
    items = "".join(
        f'<li><a class="code" href="{escape(href(link))}">{escape(link["symbol"])}</a> '
        f'<span class="file">{escape(link["file"])}, lines {number(link["first"])} to '
        f"{number(link['last'])}</span></li>"
        for link in links
    )
    return f'<ul class="links">{items}</ul>'


def _code(links: Sequence[Json], href: Href) -> str:
    excerpts = "".join(
        f'<p class="file">{escape(link["file"])}</p>'
        f'<pre tabindex="0"><code>{escape(link["text"])}</code></pre>'
        for link in links
    )
    return (
        f'<div class="sources">{code_links(links, href)}<details>'
        f"<summary>Show the code</summary>{excerpts}</details></div>"
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
        speed = figure(
            "Speed-up over FP16 by batch",
            both_widths(lambda width: charts.speedup(chart, width)),
            f"INT4 weights with a 16-bit scale for every {number(chart['group_size'])} are "
            f"{number(chart['ideal'], 'x')} smaller than FP16 weights, which is all that is to be "
            "gained where reading weights is the work. With many tokens arithmetic is, and the "
            "lines meet at 1.",
            chart["origin"],
        )
        if any(len(shape["lines"]) > 1 for shape in chart["shapes"]):
            speed += figure(
                "The same beside others, a shape each",
                f'<div class="grid">{small}</div>{charts.peer_legend(chart)}',
                "All replayed in turns in one process.",
                chart["origin"],
            )
    return speed + _queue(pictures["queue"], href) + _stream_k(pictures["stream_k"], href)


def _queue(picture: Json, href: Href) -> str:
    product, assumed = picture["product"], picture["assumed"]
    return figure(
        "The queue in time: a diagram",
        both_widths(lambda width: diagrams.timeline(picture, width))
        + charts.legend([(f"event-{lane}", words) for lane, words in diagrams.LANES.items()]),
        f"A product of {number(product['n'])} x {number(product['k'])} with "
        f"{number(product['m'])} tokens on an {escape(picture['gpu'])}: its own configuration has "
        f"{number(picture['stages'])} stages of {number(picture['stage_bytes'], 'bytes')} in a ring"
        f" "
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
        ) + diagrams.shares(
            picture["with"], tall, width, "Stream-K: the same steps for every block"
        )

    parts = [
        f"{words}: {number(d['tiles'])} tiles of {number(d['steps'])} steps on "
        f"{number(d['slots'])} places, the longest share {number(d['longest'])} steps, "
        f"{number(d['busy_percent'], '%')} of the places' time busy."
        for words, d in (("Whole tiles", picture["without"]), ("Stream-K", picture["with"]))
    ]
    return figure(
        "Equal work for every multiprocessor: a diagram",
        both_widths(both),
        f"A product of {number(product['n'])} x {number(product['k'])} with "
        f"{number(product['m'])} tokens, divided for an {escape(picture['gpu'])}; a column "
        f"is a thread block, a colour a tile. {' '.join(parts)} Adding up shared tiles costs time "
        "that is not in this picture." + _code(picture["code"], href),
    )


def _paged(doc: Json, href: Href) -> str:
    chart, pictures = doc["charts"], doc["pictures"]
    decode, moved = chart["decode"], chart["movement"]
    parts = [_blocks(pictures["blocks"], href), _memory(pictures["memory"], chart["cache"], href)]
    if decode and decode["cases"]:
        parts.append(
            figure(
                "Decode beside a contiguous cache",
                both_widths(lambda width: charts.decode(decode, width)),
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
            figure(
                "Writing and copying blocks",
                f'<div class="grid">{small}</div>',
                "Beside a plain copy of as many bytes.",
                moved[0]["origin"],
            )
        )
    return "".join(parts)


def _blocks(picture: Json, href: Href) -> str:
    source, copy = picture["copied"]
    return figure(
        "Block tables: a diagram of a real run",
        both_widths(lambda width: diagrams.blocks(picture, width)),
        f"The engine's block pool, with blocks of {number(picture['block_size'])} tokens. A' is a "
        "second sample of A: they share what they have in common, two references each. The first "
        f"token that A' wrote went to a copy of block {number(source)}, block {number(copy)}. C "
        "has "
        "ended; its full blocks stay cached (dashed) until their space is needed."
        + _code(picture["code"], href),
    )


def _memory(picture: Json, cache: Json | None, href: Href) -> str:
    rows = "".join(
        f'<tr><th scope="row">{words}</th><td>{number(d["used_percent"], "%")}</td>'
        f'<td class="bars">{_bar("with" if key == "paged" else "without", d["used_percent"] / 100)}'
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
    return figure(
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
            f"<p>Times of the general kernels and of their peers: {NOT_YET}. On a machine with a "
            "GPU "
            "<code>billfish bench general --out FILE</code> takes them.</p>"
        )
    for domain, title in DOMAINS.items():
        found = [line for line in lines if line["domain"] == domain]
        if found:
            parts.append(
                figure(title, _general_table(found), "", doc["records"]["general"]["origin"])
            )
    if tutorial:
        parts.append(
            figure(
                "Write your own kernel, step by step",
                _tutorial(tutorial),
                "The steps of docs/write-a-kernel.md.",
                doc["records"]["tutorial"]["origin"],
            )
        )
    return "".join(parts)


def _general_table(lines: Sequence[Json]) -> str:
    rows = "".join(
        f'<tr><th scope="row">{escape(line["kernel"])} {escape(line["size"])} '
        f"{escape(line['dtype'])}</th><td>{number(line['us'])}</td>"
        f'<td class="bars">{_bar("with", min(1.0, line["percent"] / 100))}</td>'
        f"<td>{number(line['percent'], '%')}</td><td>{number(line['floor_us'])}</td>"
        f"<td>{number(line['bytes'], 'bytes')}</td><td>{escape(line['peer'] or '')}</td>"
        f"<td>{number(line['peer_us'])}</td>"
        f'<td class="ratio">{number(line["ratio"], "x")}</td></tr>'
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
