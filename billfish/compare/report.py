"""The comparison as one HTML file that needs nothing else: no network, no other file.

Everything is made from the document, and every figure carries its place in it; the document itself
is in the page too. What was not measured is said to be so. Links to code lead to the files of this
installation, or to `source_url`.
"""

import base64
import hashlib
import json
import os
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

import billfish
from billfish.compare import charts, strips
from billfish.compare.catalogue import ROWS
from billfish.compare.figures import number, traced
from billfish.compare.markdown import commits_of, devices_of
from billfish.compare.parts import (
    NOT_YET,
    Href,
    both_widths,
    claim_values,
    code_links,
    figure,
    origin_tag,
)
from billfish.compare.sections import family_section
from billfish.compare.svg import legend

Json = dict[str, Any]


def page(document: Json, *, folder: Path | None = None, source_url: str | None = None) -> str:
    """The HTML. folder: where the file will lie, so that links to code lead there from it.

    source_url: links to code begin with it instead, as https://host/project/blob/main.
    """
    href = _links(folder, source_url)
    doc = traced(document)
    families = doc["families"]
    body = [
        _banner(doc),
        _answers(families),
        _step(doc["charts"]["step"]),
        _overview(families, href),
        _all_kernels(doc["charts"]),
        *(family_section(name, family, doc, href) for name, family in families.items()),
        _serving(doc),
        _records(doc["records"]),
    ]
    entries = [("answer", "In short"), ("overview", "Side by side"), ("kernels", "Every kernel")]
    entries += [(name, family["title"].split()[0]) for name, family in families.items()]
    entries += [("serving", "Whole model")] if doc["charts"]["serving"] else []
    entries += [("records", "Records")]
    data = json.dumps(document, ensure_ascii=False).replace("<", "\\u003c")
    assets = files("billfish.compare") / "page"
    html = (assets / "report.html").read_text(encoding="utf-8")
    script = (assets / "script.js").read_text(encoding="utf-8")
    # Nothing but our script runs, whatever a document made elsewhere says.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    for key, value in {
        "csp": f"'sha256-{digest}'",
        "style": (assets / "style.css").read_text(encoding="utf-8"),
        "nav": "".join(f'<a href="#{escape(to)}">{escape(words)}</a>' for to, words in entries),
        "body": "".join(body),
        "data": data,
        "script": script,
    }.items():
        html = html.replace(f"<!-- {key} -->", value, 1)
    return html


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
        kind, title = "here", "Measured here"
        if made["file"]:
            kind, title = "", f"Measured elsewhere, shown from {escape(made['file'])}"
        return (
            f'<aside class="banner {kind}" role="note"><strong>{title}</strong><p>On '
            f"{escape(made['gpu'])}, {escape(made['date'])}{took}. {more}</p>{lost}</aside>"
        )
    where = escape(devices_of(r for r in records if r["origin"] == "recorded"))
    machine = "This machine has no GPU that can be used."
    if made["file"]:
        machine = f"Shown from {escape(made['file'])}."
    elif made["gpu"]:
        machine = f"This machine has a GPU, {escape(made['gpu'])}, which was not asked."
    return (
        '<aside class="banner" role="note" id="no-gpu"><strong>Recorded results: nothing on this '
        f"page was measured here</strong><p>{machine} Times were recorded on: {where}. The table "
        '<a href="#records">at the end</a> gives the commit, versions and command of each '
        "record. What is counted (blocks, memory, shares of work) needs no GPU.</p></aside>"
    )


def _answers(families: Json) -> str:
    """What sets each family apart, in a sentence and two figures."""
    cards = "".join(
        f'<a class="answer f-{name}" href="#{name}"><h3><i class="f-{name} key"></i>'
        f"{escape(family['title'])}</h3><p>{escape(family['answer'])}</p>"
        + "".join(
            f"<p class='big'><b>{claim_values(claim)}</b> {escape(claim['label'])}</p>"
            for claim in family["claims"]["answer"]
        )
        + "</a>"
        for name, family in families.items()
    )
    return f'<section id="answer"><h2>In short</h2><div class="answers">{cards}</div></section>'


def _step(chart: Json | None) -> str:
    if chart is None:
        return ""
    keys = [(f"f-{name}", words) for name, words in charts.FAMILY_NAMES.items()]
    return (
        '<section id="step"><h2>A model needs all three</h2>'
        + figure(
            "Whose kernels take the time of a decode step",
            both_widths(lambda width: charts.step(chart, width)) + legend(keys),
            f"{escape(chart['model'])} with {escape(chart['weights'])} weights, "
            f"{number(chart['context'])} tokens of context each. Alone, a request waits for "
            "weights: Marlin's part. With many, for keys and values: PagedAttention's. General "
            "kernels are the rest of a layer; other is the head, a product by cuBLAS, the "
            "inputs, and time between kernels.",
            chart["origin"],
        )
        + "</section>"
    )


def _overview(families: Json, href: Href) -> str:
    head = "".join(
        f'<th scope="col"><i class="f-{name} key"></i>{escape(family["title"])}</th>'
        for name, family in families.items()
    )
    rows = "".join(
        f'<tr><th scope="row">{title}</th>'
        + "".join(
            f'<td data-family="{escape(family["title"])}">{_cell(name, family, key, href)}</td>'
            for name, family in families.items()
        )
        + "</tr>"
        for key, title in ROWS.items()
        if key != "answer"
    )
    return (
        '<section id="overview"><h2>Side by side</h2><div class="table-wrap"><table class="sides">'
        f"<thead><tr><td></td>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
        '<p class="reading">Behind a technique: time without it over time with it, the most of all '
        "cases measured. Two figures are the least and the most of all cases. The floor of a case "
        "is the time that this GPU needs to move its bytes or for its arithmetic, whichever is "
        "longer.</p></section>"
    )


def _cell(name: str, family: Json, key: str, href: Href) -> str:
    """What the table says of a family: words, then figures; techniques lead to their cards."""
    claims = family["claims"][key]
    if key == "techniques":
        items = "".join(
            f'<li><a href="#{name}-{int(claim["index"])}">{escape(claim["label"])}</a> '
            f"<b>{claim_values(claim)}</b></li>"
            for claim in claims
        )
        return f'<ul class="techniques">{items}</ul>'
    said = f"<p>{escape(family[key])}</p>" if key in family else ""
    items = "".join(
        f"<div><dt>{escape(claim['label'])}</dt><dd>{claim_values(claim)}</dd></div>"
        for claim in claims
    )
    links = code_links(family["code"], href) if key == "performance" else ""
    return f'{said}<dl class="claims">{items}</dl>{links}'


def _all_kernels(chart: Json) -> str:
    points, top = chart["kernels"], chart["ceilings"]
    if not points or top is None:
        inside = f"<p>Kernels under the roof of their GPU: {NOT_YET}.</p>"
        return f'<section id="kernels"><h2>Every kernel, against its GPU</h2>{inside}</section>'
    there = {point["family"] for point in points}
    keys = legend(
        [(f"f-{name}", words) for name, words in charts.FAMILY_NAMES.items() if name in there]
    )
    general = "" if "general" in there else f" General kernels: {NOT_YET}."
    single = "" if top["float32"] is None else f", {number(top['float32'])} in float32"
    inside = figure(
        "Roofline",
        both_widths(lambda width: charts.roofline(points, top, width)) + keys,
        "A dot is a case of a kernel, as high as it computes and as far right as it computes for "
        "each byte that it must move. It can be no higher than the roof: left of the knee memory "
        "decides, right of it arithmetic. Ceilings, from "
        f"<code>{top['record']}</code>: {number(top['gbps'], ' GB/s')}, copied, and "
        f"{number(top['tflops'], ' TFLOP/s')} in 16 bits{single}. Reading alone is faster than "
        "copying, so a kernel that reads may lie above the line. What has very many operations a "
        "byte is drawn at the right end; what only moves data has none, and is in the next chart."
        + general,
    ) + figure(
        "How near the floor",
        both_widths(lambda width: strips.floors(points, width)) + keys,
        "The floor is the time that a kernel's bytes or operations take at those ceilings, "
        "whichever is longer. A larger dot is a case with more bytes. Small ones are far from the "
        "floor: starting a kernel and filling the machine take a few microseconds whatever the "
        "size. What is still in the L2 cache comes out above 100%." + general,
    )
    return f'<section id="kernels"><h2>Every kernel, against its GPU</h2>{inside}</section>'


def _serving(doc: Json) -> str:
    chart = doc["charts"]["serving"]
    if chart is None:
        return ""
    others = ", recorded on another machine of the kind" if len(chart["records"]) > 1 else ""
    return (
        '<section id="serving"><h2>Together: a whole model</h2>'
        + figure(
            "Output tokens a second by batch",
            both_widths(lambda width: charts.serving(chart, width)),
            "A model of Llama-3-8B's shape with random weights, INT4 unless it says bf16; prompts "
            f"of 512 tokens; beside vLLM{others}.",
            chart["origin"],
        )
        + "</section>"
    )


def _records(records: Json) -> str:
    rows = "".join(
        f'<tr><th scope="row"><code>{name}</code></th><td>{origin_tag(r["origin"])}</td>'
        f"<td>{escape(r['device'])}</td><td>{escape(r['date'])}</td>"
        f"<td><code>{escape(commits_of(r))}</code></td>"
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
