"""The card of a technique: what it does, what it is worth, its code; every case of it, folded."""

from collections.abc import Sequence
from html import escape
from typing import Any

from billfish.compare.catalogue import KINDS
from billfish.compare.figures import number
from billfish.compare.parts import Href, bar, bars, code_links, excerpts, folded, origin_tag, table

Json = dict[str, Any]


def card(family: str, index: int, technique: Json, href: Href) -> str:
    """index: of the technique in its family, by which other places lead to its card."""
    kind = technique.get("kind")
    tag = f'<span class="tag kind">{KINDS[kind]}</span>' if kind else ""
    switch = (
        f'<p class="switch">Switch: <code>{escape(technique["switch"])}</code></p>'
        if technique["switch"]
        else ""
    )
    cases = _cases(technique["cases"]) + _settings(technique["settings"])
    summary = "Every case, with and without; the code" if cases else "The code"
    return (
        f'<article class="card" id="{family}-{index}"><header><h4>{escape(technique["name"])}</h4>'
        f"{tag}{origin_tag(technique['origin'])}{_worth(technique['cases'])}</header>"
        f"<p>{escape(technique['what'])}</p>{switch}{code_links(technique['code'], href)}"
        f"{folded(summary, cases + excerpts(technique['code']))}</article>"
    )


def _worth(cases: Sequence[Json]) -> str:
    """The least and the most of all cases."""
    if not cases:
        return ""
    ratios = [case["ratio"] for case in cases]
    least, most = min(ratios), max(ratios)
    first = f"{number(least, 'x', bare=True)} to " if least != most else ""
    return (
        '<span class="worth" title="time without it over time with it">'
        f"{first}<b>{number(most, 'x')}</b></span>"
    )


def _cases(cases: Sequence[Json]) -> str:
    """A line a case: two bars on one scale, the times, bytes and percent of the floor."""
    if not cases:
        return ""
    floor = "plain copy of as many bytes" if cases[0]["floor"] == "plain copy" else "floor"
    key = (
        '<td class="key-bars"><span class="k-with">with</span> '
        f'<span class="k-without">without</span> <span class="k-floor">{floor}</span></td>'
    )
    head = ["case", "without / with", key, "with, µs", "without, µs", "bytes", "floor, µs",
            "of the floor, with", "without"]  # fmt: skip
    return table(head, map(_case, cases))


def _case(case: Json) -> list[str]:
    slowest = max(case["with_us"], case["without_us"])
    shown = bar("with", case["with_us"] / slowest) + bar("without", case["without_us"] / slowest)
    if case["floor_us"] is not None and case["floor_us"] <= slowest:
        shown += f'<i class="floor" style="left:{100 * case["floor_us"] / slowest:.1f}%"></i>'
    name = " ".join(part for part in (case["group"].replace("_", " "), case["case"]) if part)
    return [
        escape(name),
        f'<td class="ratio">{number(case["ratio"], "x")}</td>',
        bars(shown),
        number(case["with_us"]),
        number(case["without_us"]),
        number(case["bytes"], "bytes"),
        number(case["floor_us"]),
        number(case["with_percent"], "%"),
        number(case["without_percent"], "%"),
    ]


def _settings(settings: Sequence[Json]) -> str:
    """A line a case, a column a setting: the times."""
    if not settings:
        return ""
    columns = {setting["setting"]: number(setting["setting"]) for setting in settings}
    times: dict[str, dict[float, Json]] = {}
    for setting in settings:
        times.setdefault(f"{setting['group']} {setting['case']}", {})[setting["setting"]] = setting
    head = ["µs by depth", *(columns[setting] for setting in sorted(columns))]
    rows = (
        [escape(case), *(number(found[each]["us"] if each in found else None)
                         for each in sorted(columns))]
        for case, found in times.items()
    )  # fmt: skip
    return table(head, rows)
