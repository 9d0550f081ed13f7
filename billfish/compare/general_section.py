"""The general kernels in a report: beside their peers, by domain and kind, the tutorial."""

from collections.abc import Sequence
from html import escape
from typing import Any

from billfish.compare import strips
from billfish.compare.cards import card
from billfish.compare.catalogue import DOMAINS, KINDS
from billfish.compare.figures import number
from billfish.compare.parts import (
    NONE,
    NOT_YET,
    Href,
    bar,
    bars,
    both_widths,
    figure,
    folded,
    table,
)

Json = dict[str, Any]


def charts(doc: Json) -> str:
    """Beside their peers, and the steps of the tutorial."""
    lines = doc["charts"]["general"]
    if not lines:
        parts = [
            f"<p>Times of the general kernels and of their peers: {NOT_YET}. On a machine with a "
            "GPU <code>billfish bench general --out FILE</code> takes them.</p>"
        ]
    else:
        parts = [_beside_peers(doc)]
    tutorial = doc["charts"]["tutorial"]
    if tutorial:
        parts.append(
            figure(
                "Write your own kernel, step by step",
                _tutorial(tutorial),
                "One operation (scale, bias, SiLU, channels last) over "
                f"{escape(tutorial[0]['size'])} values, from three naive kernels to one that is "
                "fused, coalesced and tiled: the steps of docs/write-a-kernel.md.",
                doc["records"]["tutorial"]["origin"],
            )
        )
    return "".join(parts)


def _beside_peers(doc: Json) -> str:
    lines, domains = doc["charts"]["general"], doc["charts"]["domains"]
    wrong = doc["charts"]["wrong"]
    told = "".join(_domain(title, domains[name], [x for x in lines if x["domain"] == name])
                   for name, title in DOMAINS.items() if name in domains)  # fmt: skip
    if wrong:
        names = ", ".join(escape(f"{w['kernel']} {w['size']} {w['dtype']}") for w in wrong)
        told += f'<p class="reading">Came out wrong, and so have no time: {names}.</p>'
    return figure(
        "Beside the best of their peers",
        both_widths(lambda width: strips.beside_peers(lines, width)) + told,
        "Right of the line Billfish is faster. Peers are torch (with cuBLAS, cuDNN, cuFFT and "
        "cuSPARSE), torch.compile, CuPy with CUB and cuFFT, and Liger-Kernel, where they have the "
        "operation; the best of them in every case.",
        doc["records"]["general"]["origin"],
    )


def _domain(title: str, counts: Json, lines: Sequence[Json]) -> str:
    said = (
        f"<b>{title}</b>: {number(counts['even'])} of {number(counts['with_peer'])} cases at "
        f"{number(counts['even_from'])} of the best peer's speed or faster, "
        f"{number(counts['near'])} of {number(counts['cases'])} at "
        f"{number(counts['near_from'])}% of their floor or nearer"
    )
    head = ["kernel", "µs", "", "of the floor", "floor, µs", "bytes", "best peer", "its µs",
            "its time / ours"]  # fmt: skip
    rows = (
        [
            escape(f"{line['kernel']} {line['size']} {line['dtype']}"),
            number(line["us"]),
            bars(bar("with", min(1.0, line["percent"] / 100))),
            number(line["percent"], "%"),
            number(line["floor_us"]),
            number(line["bytes"], "bytes"),
            escape(line["peer"] or ""),
            number(line["peer_us"]),
            f'<td class="ratio">{number(line["ratio"], "x")}</td>',
        ]
        for line in lines
    )
    return folded(said, table(head, rows))


def _tutorial(steps: Sequence[Json]) -> str:
    slowest = max(step["us"] for step in steps)
    rows = (
        [escape(step["step"]), number(step["us"]),
         bars(bar("with", step["us"] / slowest)), number(step["bytes"], "bytes"),
         number(step["percent"], "%")]
        for step in steps
    )  # fmt: skip
    return table(["step", "µs", "", "bytes", "of the floor"], rows)


def matrix(techniques: Sequence[Json]) -> str:
    """Domains by kinds of technique: the most that one of them is worth, and of which kernel."""
    kinds = [kind for kind in KINDS if any(t["kind"] == kind for t in techniques)]

    def cell(domain: str, kind: str) -> str:
        here = [t for t in techniques if (t["domain"], t["kind"]) == (domain, kind)]
        cases = [(case["ratio"], t) for t in here for case in t["cases"]]
        if not cases:
            return NOT_YET if here else NONE
        ratio, technique = max(cases, key=lambda pair: pair[0])
        kernel = escape(technique["name"].partition(":")[0])
        return f'<b>{number(ratio, "x")}</b><span class="of">{kernel}</span>'

    rows = ([title, *(cell(domain, kind) for kind in kinds)] for domain, title in DOMAINS.items())
    return table(["domain", *(KINDS[kind] for kind in kinds)], rows, "matrix")


def cards(techniques: Sequence[Json], href: Href) -> str:
    """Under the title of each domain."""
    indexed = list(enumerate(techniques))
    parts = []
    for domain, title in DOMAINS.items():
        inside = "".join(card("general", i, t, href) for i, t in indexed if t["domain"] == domain)
        parts.append(f"<h4 class='domain'>{title}</h4>{inside or f'<p>{NOT_YET}</p>'}")
    return "".join(parts)
