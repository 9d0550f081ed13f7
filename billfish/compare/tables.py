"""The tables of the documentation that show recorded results, made from benchmarks/.

    python -m billfish.compare.tables docs

writes them anew between the lines `<!-- table NAME -->` and `<!-- end of table -->` of every page
of a folder; so after a record has changed, no figure has to be copied by hand. The names are those
of TABLES.
"""

import re
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from billfish.compare import attention_tables, build, engine_tables, product_tables, records
from billfish.compare.catalogue import DOMAINS, ROWS
from billfish.compare.figures import shown, sized
from billfish.compare.markdown import devices_of, source_of, table_row
from billfish.errors import RecordError

Json = dict[str, Any]
NOT_YET = "not measured yet"
PLACE = re.compile(r"(<!-- table ([\w ]+) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def families(document: Json) -> str:
    """What the three families measure, row by row of the table that describes them."""
    found = document["families"].values()
    lines = [
        table_row(["", *(family["title"] for family in found)]),
        table_row(["---"] * (len(found) + 1)),
    ]
    for key, title in ROWS.items():
        cells = ["<br>".join(map(_claim, family["claims"][key])) for family in found]
        lines.append(table_row([title.lower(), *cells]))
    return "\n".join([*lines, "", _counted_and_recorded(document)])


def _claim(claim: Json) -> str:
    values, unit = claim["values"], claim["unit"]
    if not values:
        return f"{claim['label']}: {NOT_YET}"
    said = [sized(value) if unit == "bytes" else shown(value, unit) for value in values]
    return f"{claim['label']}: **{' to '.join(said)}{'' if unit == 'bytes' else unit}**"


def _counted_and_recorded(document: Json) -> str:
    where = devices_of(document["records"].values())
    return (
        f"Recorded on {where}; requests and memory are counted by running the engine without a "
        "model. Two figures are the least and the most of all cases."
    )


def techniques(document: Json) -> str:
    """Where each technique of a general kernel is, and the least and the most that it is worth."""
    lines = [
        table_row(["technique", "code", "cases", "time without it / time with it"]),
        table_row(["---", "---", "--:", "--:"]),
    ]
    for technique in document["families"]["general"]["techniques"]:
        ratios = [case["ratio"] for case in technique["cases"]]
        ends = dict.fromkeys(shown(f(ratios), "x") for f in (min, max)) if ratios else {}
        worth = f"{' to '.join(ends)}x" if ends else NOT_YET
        code = ", ".join(f"[`{c['symbol']}`](../{c['file']})" for c in technique["code"])
        lines.append(table_row([technique["name"], code, str(len(ratios)), worth]))
    if "ablation_general" not in document["records"]:
        return "\n".join(lines)
    return "\n".join([*lines, "", source_of(document, "ablation_general")])


def general(document: Json, domain: str) -> str:
    """Every case of the general kernels of a domain, beside its floor and its best peer."""
    lines = [
        table_row(["case", "µs", "of the floor", "best peer", "its µs", "its time / ours"]),
        table_row(["---", "--:", "--:", "---", "--:", "--:"]),
    ]
    found = [line for line in document["charts"]["general"] if line["domain"] == domain]
    for line in found:
        peer = ["–", "", ""]
        if line["peer"]:
            peer = [line["peer"], shown(line["peer_us"]), f"{shown(line['ratio'], 'x')}x"]
        case = f"`{line['kernel']}` {line['size']} {line['dtype']}"
        lines.append(table_row([case, shown(line["us"]), f"{shown(line['percent'], '%')}%", *peer]))
    wrong = [case for case in document["charts"]["wrong"] if case["domain"] == domain]
    for case in wrong:
        name = f"`{case['kernel']}` {case['size']} {case['dtype']}"
        lines.append(table_row([name, "wrong result, not timed", "", "", "", ""]))
    if not found and not wrong:
        return f"{NOT_YET.capitalize()}."
    if found:
        lines += ["", _summary(document["charts"]["domains"][domain])]
    return "\n".join([*lines, "", source_of(document, "general")])


def _summary(counts: Json) -> str:
    return (
        f"{counts['even']} of {counts['with_peer']} are at {counts['even_from']} of their best "
        f"peer's speed or faster, {counts['near']} of {counts['cases']} at {counts['near_from']}% "
        "of their floor or nearer."
    )


def tutorial(document: Json) -> str:
    """The steps of docs/write-a-kernel.md: bytes asked for, time, percent of the floor."""
    from billfish.bench.tutorial import STEPS, step_bytes

    lines = [
        table_row(["step", "bytes", "µs", "of the floor"]),
        table_row(["---", "--:", "--:", "--:"]),
    ]
    found = {line["step"]: line for line in document["charts"]["tutorial"]}
    for step in STEPS:
        line = found.get(step)
        times = [shown(line["us"]), f"{shown(line['percent'], '%')}%"] if line else [NOT_YET] * 2
        lines.append(table_row([step, sized(step_bytes(step)), *times]))
    return "\n".join([*lines, "", source_of(document, "tutorial")])


def cache(document: Json) -> str:
    """Output tokens a second of a whole model: with blocks, and with room set aside."""
    found = document["charts"]["cache"]
    lines = [
        table_row(
            ["KV blocks in all", "room set aside", "output tokens/s so", "with blocks", "ratio"]
        ),
        table_row(["--:"] * 5),
    ]
    if found is None:
        return "\n".join([*lines, table_row([NOT_YET, *[""] * 4])])
    for whole in found["contiguous"]:
        blocks = shown(whole["blocks"]) if whole["blocks"] else ""
        room = f"{shown(whole['reserve_tokens'])} tokens a request"
        speeds = [shown(whole["tok_s"]), shown(whole["paged_tok_s"])]
        lines.append(table_row([blocks, room, *speeds, f"{shown(whole['ratio'], 'x')}x"]))
    return "\n".join([*lines, "", source_of(document, "engine_cache")])


def _of_engine(document: Json, name: str) -> str:
    make, record = engine_tables.TABLES[name]
    return f"{make(document)}\n\n{source_of(document, record)}" if record else make(document)


def _of_attention(document: Json, name: str) -> str:
    make, record = attention_tables.TABLES[name]
    table = make()
    return (
        table if table == attention_tables.NOT_YET else f"{table}\n\n{source_of(document, record)}"
    )


TABLES: Mapping[str, Callable[[Json], str]] = {
    "families": families,
    "techniques": techniques,
    **product_tables.TABLES,
    **{f"general {domain}": partial(general, domain=domain) for domain in DOMAINS},
    "tutorial": tutorial,
    "cache": cache,
    **{name: partial(_of_engine, name=name) for name in engine_tables.TABLES},
    **{name: partial(_of_attention, name=name) for name in attention_tables.TABLES},
}


def filled(page: str, document: Json) -> str:
    """A page with its tables made anew. Raises RecordError for a table of another name."""

    def table(match: re.Match[str]) -> str:
        if match[2] not in TABLES:
            raise RecordError(match[2], f"no such table; there are {', '.join(TABLES)}")
        return f"{match[1]}\n{TABLES[match[2]](document)}\n\n{match[3]}"

    return PLACE.sub(table, page)


def recorded_document() -> Json:
    """The comparison of what benchmarks/ has, with all families."""
    found = records.recorded()
    return build.comparison(found, ("marlin", "paged_attention", "general"), gpu=None)


def main(folder: str) -> None:
    document = recorded_document()
    for path in sorted(Path(folder).glob("*.md")):
        before = path.read_text(encoding="utf-8")
        after = filled(before, document)
        if after != before:
            path.write_text(after, encoding="utf-8")
            print(f"wrote {path}")


if __name__ == "__main__":
    main(sys.argv[1])
