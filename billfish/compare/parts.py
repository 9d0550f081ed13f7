"""The pieces that sections of a report are made of: figures, tables, bars, links to code."""

from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import Any

from billfish.compare.figures import number

Json = dict[str, Any]
Href = Callable[[Json], str]
WIDE, NARROW = 860, 350
NOT_YET = '<span class="missing">not measured yet</span>'
NONE = '<span class="none">–</span>'


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


def table(head: Sequence[str], rows: Iterable[Sequence[str]], kind: str = "") -> str:
    """A row's first cell is its head. A cell that begins with a tag of its own (<td...) is kept as
    it is; empty heads stand over bars."""
    heads = "".join(
        cell if cell.startswith("<t") else f'<th scope="col">{cell}</th>' if cell else "<td></td>"
        for cell in head
    )
    lines = "".join(
        f'<tr><th scope="row">{first}</th>'
        + "".join(cell if cell.startswith("<td") else f"<td>{cell}</td>" for cell in cells)
        + "</tr>"
        for first, *cells in rows
    )
    return (
        f'<div class="table-wrap"><table class="cases {kind}"><thead><tr>{heads}</tr></thead>'
        f"<tbody>{lines}</tbody></table></div>"
    )


def bar(kind: str, part: float) -> str:
    return f'<i class="bar {kind}" style="width:{100 * part:.1f}%"></i>'


def bars(inside: str) -> str:
    """The cell of a table that holds bars."""
    return f'<td class="bars">{inside}</td>'


def folded(summary: str, inside: str) -> str:
    return f"<details><summary>{summary}</summary>{inside}</details>"


def claim_values(claim: Json) -> str:
    """The figure of a claim, or its least and most."""
    *first, last = claim["values"] or [None]
    if last is None:
        return NOT_YET
    return "".join(f"{number(value, claim['unit'], bare=True)} to " for value in first) + number(
        last, claim["unit"]
    )


def code_links(links: Sequence[Json], href: Href) -> str:
    """Symbols, with the files and lines where they are."""

    def where(link: Json) -> str:
        first, last = number(link["first"]), number(link["last"])
        return f"line {first}" if link["first"] == link["last"] else f"lines {first} to {last}"

    items = "".join(
        f'<li><a class="code" href="{escape(href(link))}">{escape(link["symbol"])}</a> '
        f'<span class="file">{escape(link["file"])}, {where(link)}</span></li>'
        for link in links
    )
    return f'<ul class="links">{items}</ul>'


def excerpts(links: Sequence[Json]) -> str:
    return "".join(
        f'<p class="file">{escape(link["file"])}</p>'
        f'<pre tabindex="0"><code>{escape(link["text"])}</code></pre>'
        for link in links
    )


def code(links: Sequence[Json], href: Href) -> str:
    """Links to code, and the code itself, folded."""
    shown = folded("Show the code", excerpts(links))
    return f'<div class="sources">{code_links(links, href)}{shown}</div>'
