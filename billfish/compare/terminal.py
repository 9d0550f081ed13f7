"""The comparison in a terminal: the families side by side, then each technique with and without."""

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from billfish.compare.catalogue import KINDS, ROWS
from billfish.compare.figures import shown, sized

Json = dict[str, Any]
NOT_YET = "[dim]not measured yet[/dim]"


def show(document: Json, console: Console) -> None:
    _say_where(document, console)
    families = document["families"]
    table = Table(title="Side by side", title_justify="left", show_lines=True)
    table.add_column("")
    for family in families.values():
        table.add_column(family["title"])
    for title, key in ROWS[:3]:
        table.add_row(title, *(_said(family, key) for family in families.values()))
    table.add_row("Key techniques", *(_techniques(family) for family in families.values()))
    performance = (_claims(family["claims"]["performance"]) for family in families.values())
    table.add_row("Performance", *performance)
    table.add_row(ROWS[3][0], *(_said(family, ROWS[3][1]) for family in families.values()))
    console.print(table)
    for family in families.values():
        _cases(family, console)
    console.print("Every case, plots and code: --html FILE. All figures: --json FILE.")


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
            console.print("This machine has no GPU.")
    for name, record in document["records"].items():
        if record["origin"] == "recorded":
            commit = (record["commit"] or "unknown")[:12]
            console.print(
                f"  {name}: recorded on {record['device']}, {record['date']}, commit {commit}",
                style="dim",
                highlight=False,
                markup=False,
            )
    console.print()


def _techniques(family: Json) -> str:
    best: dict[str, list[float]] = {}
    for technique in family["techniques"]:
        title = KINDS[technique["kind"]] if "kind" in technique else technique["name"]
        best.setdefault(title, []).extend(case["ratio"] for case in technique["cases"])
    return "\n".join(
        f"{escape(title)}: " + (f"up to {shown(max(ratios), 'x')}x" if ratios else NOT_YET)
        for title, ratios in best.items()
    )


def _said(family: Json, key: str) -> str:
    return f"{escape(family[key])}\n[dim]{_claims(family['claims'][key])}[/dim]"


def _claims(claims: Sequence[Json]) -> str:
    return "\n".join(f"{escape(claim['label'])}: {_value(claim)}" for claim in claims)


def _value(claim: Json) -> str:
    value, unit = claim["value"], claim["unit"]
    if value is None:
        return NOT_YET
    return sized(value) if unit == "bytes" else shown(value, unit) + unit


def _cases(family: Json, console: Console) -> None:
    """A line a technique: what it is worth, and the case in which it is worth most."""
    title = f"{family['title']}: without / with, and the case in which it is worth most"
    table = Table("technique", title=title, title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("without / with", justify="right", no_wrap=True)
    table.add_column("case")
    for column in ("with, us", "without", "bytes", "of floor"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("code", overflow="fold")
    for technique in family["techniques"]:
        link = technique["code"][0]
        where = escape(f"{link['file'].rpartition('/')[2]}:{link['first']}")
        cases = sorted(technique["cases"], key=lambda case: case["ratio"])
        if not cases:
            table.add_row(escape(technique["name"]), "", NOT_YET, "", "", "", "", where)
            continue
        most, percent = cases[-1], cases[-1]["with_percent"]
        table.add_row(
            escape(technique["name"]),
            f"{shown(cases[0]['ratio'], 'x')} - {shown(most['ratio'], 'x')}",
            escape(f"{most['group'].replace('_', ' ')} {most['case']}".strip()),
            shown(most["with_us"]),
            shown(most["without_us"]),
            "" if most["bytes"] is None else sized(most["bytes"]),
            "" if percent is None else shown(percent, "%") + "%",
            where,
        )
    console.print(table)
