"""The comparison in a terminal: the families side by side, then each technique with and without."""

from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from billfish.compare.catalogue import KINDS
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
    for title, key in (("Primary function", "function"), ("Optimization focus", "focus"),
                       ("Memory management", "memory")):  # fmt: skip
        table.add_row(title, *(family[key] for family in families.values()))
    table.add_row("Key techniques", *(_techniques(family) for family in families.values()))
    table.add_row("Performance", *(_performance(family) for family in families.values()))
    table.add_row("Use cases", *(family["uses"] for family in families.values()))
    console.print(table)
    for family in families.values():
        _cases(family, console)


def _say_where(document: Json, console: Console) -> None:
    made = document["made"]
    if made["origin"] == "measured":
        console.print(f"Measured here, on {made['gpu']}, {made['date']}.", style="green")
    else:
        console.print("Recorded results: nothing was measured here.", style="bold yellow")
        if made["gpu"] is None:
            console.print("This machine has no GPU.")
    for name, record in document["records"].items():
        if record["origin"] == "recorded":
            commit = (record["commit"] or "unknown")[:12]
            console.print(
                f"  {name}: recorded on {record['device']}, {record['date']}, commit {commit}",
                style="dim", highlight=False, markup=False,
            )  # fmt: skip
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


def _performance(family: Json) -> str:
    return "\n".join(
        f"{escape(claim['label'])}: "
        + (NOT_YET if claim["value"] is None else shown(claim["value"], claim["unit"]) + claim["unit"])
        for claim in family["performance"]
    )  # fmt: skip


def _cases(family: Json, console: Console) -> None:
    table = Table(
        "technique", "case", title=f"{family['title']}, with and without", title_justify="left"
    )
    for column in ("with, us", "without, us", "without / with", "bytes", "of the floor"):
        table.add_column(column, justify="right")
    table.add_column("code")
    for technique in family["techniques"]:
        link = technique["code"][0]
        where = escape(f"{link['file']}:{link['first']}")
        if not technique["cases"]:
            table.add_row(escape(technique["name"]), NOT_YET, *[""] * 5, where)
        for index, case in enumerate(technique["cases"]):
            percent = case["with_percent"]
            table.add_row(
                "" if index else escape(technique["name"]),
                escape(f"{case['group']} {case['case']}".strip()),
                shown(case["with_us"]), shown(case["without_us"]), shown(case["ratio"], "x"),
                "" if case["bytes"] is None else sized(case["bytes"]),
                "" if percent is None else shown(percent, "%") + "%",
                "" if index else where,
            )  # fmt: skip
        table.add_section()
    console.print(table)
