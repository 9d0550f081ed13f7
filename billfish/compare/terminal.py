"""The comparison in a terminal: what each family is, then each technique with and without.

Made for any width from 80 columns: families stand side by side where there is room, and columns
that say least are left out where there is not.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from billfish.compare.catalogue import DOMAINS, ROWS
from billfish.compare.figures import shown, sized

Json = dict[str, Any]
NOT_YET = "[dim]not measured yet[/dim]"
SIDE_BY_SIDE = 120
"""Columns of a terminal from which the families stand beside each other."""
FLOOR = "Floor: the time a GPU needs for a case's bytes or arithmetic; 50%: twice that."


def show(document: Json, console: Console) -> None:
    """All of it, to a console of any width from 80 columns."""
    _say_where(document, console)
    families = document["families"]
    if console.width >= SIDE_BY_SIDE and len(families) > 1:
        _side_by_side(families, console)
    else:
        for family in families.values():
            _alone(family, console)
    console.print(
        "[bold]What each technique is worth[/bold]: the time without it over the time with it, "
        "least and most of all cases; then the case in which it is worth most, in microseconds."
    )
    console.print(FLOOR, markup=False, highlight=False)
    for family in families.values():
        _techniques(family, console)


def _say_where(document: Json, console: Console) -> None:
    made = document["made"]
    if made["origin"] == "measured":
        where = f"elsewhere, shown from {made['file']}" if made["file"] else "here"
        words = f"Measured {where}: on {made['gpu']}, {made['date']}."
        console.print(words, style="green", markup=False, highlight=False)
        for each in made["left_out"]:
            console.print(f"  left out: {each}", style="yellow", markup=False, highlight=False)
    else:
        console.print("Recorded results: nothing was measured here.", style="bold yellow")
        if made["gpu"] is None and not made["file"]:
            console.print("This machine has no GPU that can be used.")
    places: dict[str, list[str]] = {}
    for name, record in document["records"].items():
        if record["origin"] == "recorded":
            where = f"Recorded on {record['device']}, {record['date']}, by commit"
            commit = (record["commit"] or "unknown")[:7]
            places.setdefault(where, []).append(f"{name} {commit}")
    for where, names in places.items():
        line = f"{where}: {', '.join(names)}."
        console.print(line, style="dim", highlight=False, markup=False)
    console.print()


def _rows(family: Json) -> Iterator[tuple[str, str]]:
    """What the table of the families says of one: titles, and text with figures."""
    for key, title in ROWS.items():
        said = [escape(family[key])] if key in family and key != "techniques" else []
        yield title, "\n".join([*said, _claims(family["claims"][key])])


def _side_by_side(families: Json, console: Console) -> None:
    table = Table("", box=box.ROUNDED, show_lines=True)
    for family in families.values():
        table.add_column(family["title"], ratio=1)
    for row in zip(*(_rows(family) for family in families.values()), strict=True):
        table.add_row(row[0][0], *(text for _, text in row))
    console.print(table)
    console.print()


def _alone(family: Json, console: Console) -> None:
    table = Table(
        title=escape(family["title"]), title_justify="left", title_style="bold",
        box=box.ROUNDED, show_header=False, show_lines=True, expand=True,
    )  # fmt: skip
    table.add_column(no_wrap=True)
    table.add_column(ratio=1)
    for title, text in _rows(family):
        table.add_row(title, text)
    console.print(table)
    console.print()


def _claims(claims: Sequence[Json]) -> str:
    return "\n".join(f"[dim]{escape(claim['label'])}:[/dim] {_value(claim)}" for claim in claims)


def _value(claim: Json) -> str:
    unit = claim["unit"]
    values = [sized(v) if unit == "bytes" else shown(v, unit) for v in claim["values"]]
    tail = "" if unit == "bytes" else unit
    return " to ".join(values) + tail if values else NOT_YET


class _Column(NamedTuple):
    """width: of the terminal, from which it is shown. cell: of a technique and its best case."""

    title: str
    width: int
    cell: Callable[[Json, Json], str]
    options: Json


_TEXT, _NUMBER = {"overflow": "fold"}, {"justify": "right", "no_wrap": True}
COLUMNS = (
    _Column("technique", 0, lambda technique, _: escape(technique["name"]), _TEXT | {"ratio": 5}),
    _Column("without / with", 0, lambda technique, _: _spread(technique), _NUMBER),
    _Column("most in", 0, lambda _, case: escape(_name(case)), _TEXT | {"ratio": 4}),
    _Column("with", 0, lambda _, case: shown(case["with_us"]), _NUMBER),
    _Column("without", 0, lambda _, case: shown(case["without_us"]), _NUMBER),
    _Column("of floor", 0, lambda _, case: _percent(case["with_percent"]), _NUMBER),
    _Column("bytes", 100, lambda _, case: sized(case["bytes"]) if case["bytes"] else "", _NUMBER),
    _Column("code", 140, lambda technique, _: escape(_place(technique)), _TEXT),
)


def _techniques(family: Json, console: Console) -> None:
    """A table of the techniques that were measured, one a domain where there are domains."""
    domains: dict[str, list[Json]] = {}
    for technique in filter(lambda technique: technique["cases"], family["techniques"]):
        domain = f": {DOMAINS[technique['domain']]}" if "domain" in technique else ""
        domains.setdefault(domain, []).append(technique)
    for domain, measured in domains.items():
        console.print(_table(f"{family['title']}{domain}", measured, console.width))
    missing = [technique["name"] for technique in family["techniques"] if not technique["cases"]]
    if missing:
        said = f"{escape(family['title'])}, {NOT_YET}: {escape(', '.join(missing))}\n"
        console.print(said, highlight=False)


def _table(title: str, techniques: Sequence[Json], width: int) -> Table:
    """A line a technique: what it is worth, and its best case."""
    table = Table(
        title=f"\n{escape(title)}", title_justify="left", title_style="bold",
        box=box.SIMPLE_HEAD, pad_edge=False, expand=True,
    )  # fmt: skip
    columns = [column for column in COLUMNS if width >= column.width]
    for column in columns:
        table.add_column(column.title, **column.options)
    for technique in techniques:
        case = max(technique["cases"], key=lambda case: case["ratio"])
        table.add_row(*(column.cell(technique, case) for column in columns))
    return table


def _spread(technique: Json) -> str:
    ratios = [case["ratio"] for case in technique["cases"]]
    ends = dict.fromkeys(shown(ratio, "x") for ratio in (min(ratios), max(ratios)))
    return " - ".join(ends)


def _name(case: Json) -> str:
    return f"{case['group'].replace('_', ' ')} {case['case']}".strip()


def _percent(value: float | None) -> str:
    return "" if value is None else shown(value, "%") + "%"


def _place(technique: Json) -> str:
    link = technique["code"][0]
    return f"{link['file']}:{link['first']}"
