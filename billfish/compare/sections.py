"""The sections of a report, one a family: its charts, its diagrams, a card for each technique."""

from html import escape
from typing import Any

from billfish.compare import charts, diagrams, general_section, strips
from billfish.compare.cards import card
from billfish.compare.figures import number
from billfish.compare.parts import (
    NOT_YET,
    Href,
    bar,
    bars,
    both_widths,
    code,
    figure,
    table,
)
from billfish.compare.svg import legend

Json = dict[str, Any]


def family_section(name: str, family: Json, doc: Json, href: Href) -> str:
    """What is measured of a family, drawn; then a card for each of its techniques."""
    techniques = family["techniques"]
    if name == "marlin":
        shown = _marlin(doc, href)
    elif name == "paged_attention":
        shown = _paged(doc, href)
    else:
        shown = general_section.charts(doc)
    measured = [t for t in techniques if t["cases"]]
    if name == "general" and measured:
        shown += figure(
            "By domain, and by kind of technique",
            general_section.matrix(techniques),
            "Time without it over the time with it: the most of all cases, and the kernel. The "
            "largest are of data made for the purpose: segments of very different lengths, values "
            "that fall into few bins.",
        )
    if measured:
        shown += figure(
            "What each technique is worth",
            both_widths(lambda width: strips.worth(name, measured, width)),
            "A dot is a case; right of the line, the technique makes it faster. A difference under "
            "3% is a tie.",
            measured[0]["origin"],
        )
    if name == "general":
        cards = general_section.cards(techniques, href)
    else:
        cards = "".join(card(name, i, t, href) for i, t in enumerate(techniques))
    return (
        f'<section id="{name}" class="family f-{name}"><h2>{escape(family["title"])}</h2>'
        f'<p class="lead">{escape(family["function"])} {escape(family["focus"])}</p>'
        f'<p class="reading">The kernels: <code>{escape(family["package"])}</code>; in detail: '
        f"<code>{escape(family['page'])}</code>.</p>"
        f"{shown}<h3>Techniques, with and without</h3>{cards}</section>"
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
        + legend([(f"event-{lane}", words) for lane, words in diagrams.LANES.items()]),
        f"A product of {number(product['n'])} x {number(product['k'])} with "
        f"{number(product['m'])} tokens on an {escape(picture['gpu'])}: its own configuration has "
        f"{number(picture['stages'])} stages of {number(picture['stage_bytes'], 'bytes')} in a "
        f"ring ({number(picture['in_flight_bytes'], 'bytes')} in flight), emptied by "
        f"{number(picture['consumers'])} warpgroups, of which one is shown. Numbers in the bars "
        "are steps of 128 columns. The order of events is what the barriers enforce. Their lengths "
        f"are assumed, not measured: a load takes {number(assumed['load'])} units and the next can "
        f"begin {number(assumed['between loads'])} later; half a stage is dequantized in "
        f"{number(assumed['dequantize'])} and multiplied in {number(assumed['multiply'])}."
        + code(picture["code"], href),
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
        "that is not in this picture." + code(picture["code"], href),
    )


def _paged(doc: Json, href: Href) -> str:
    chart, pictures = doc["charts"], doc["pictures"]
    decode, moved = chart["decode"], chart["movement"]
    parts = [_blocks(pictures["blocks"], href), _memory(pictures["memory"], chart["cache"], href)]
    if decode and decode["cases"]:
        parts.append(
            figure(
                "Decode beside a contiguous cache",
                both_widths(lambda width: strips.decode(decode, width)),
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
        "has ended; its full blocks stay cached (dashed) until their space is needed."
        + code(picture["code"], href),
    )


def _memory(picture: Json, cache: Json | None, href: Href) -> str:
    rows = (
        [words, number(d["used_percent"], "%"),
         bars(bar("with" if key == "paged" else "without", d["used_percent"] / 100)),
         number(d["running"]), number(d["steps"])]
        for key, words, d in (
            ("paged", "Blocks", picture["paged"]),
            ("contiguous", "In one piece: room for the longest", picture["contiguous"]),
        )
    )  # fmt: skip
    head = ["", "memory that holds tokens", "", "requests at once", "steps"]
    if cache is None:
        speed = f"Output tokens a second of a whole model on a GPU, both ways: {NOT_YET}."
    else:
        speed = "Output tokens a second of a whole model: " + "; ".join(
            f"{number(c['paged_tok_s'])} with blocks, {number(c['tok_s'])} with room for "
            f"{number(c['reserve_tokens'])} tokens a request, {number(c['ratio'], 'x')}"
            + (f" (in {number(c['blocks'])} blocks)" if c["blocks"] else "")
            for c in cache["contiguous"]
        )
        speed += "."
    return figure(
        "The same memory, with blocks and without",
        table(head, rows),
        f"Counted by running the engine without a model: {number(picture['requests'])} requests "
        f"({number(picture['prompt_tokens'])} prompt and {number(picture['output_tokens'])} output "
        f"tokens, lengths drawn at random with a fixed seed) through a memory of "
        f"{number(picture['slots'])} tokens, averages while requests wait. A contiguous cache sets "
        f"aside {number(picture['reserve_tokens'])} tokens for each. It takes "
        f"{number(picture['ratio'], 'x')} as many steps. {speed}" + code(picture["code"], href),
    )
