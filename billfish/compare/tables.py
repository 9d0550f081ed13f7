"""The tables of the documentation that show recorded results, made from benchmarks/.

    python -m billfish.compare.tables docs

writes them anew between the lines `<!-- table NAME -->` and `<!-- end of table -->` of every page
of a folder; so after a record has changed, no figure has to be copied by hand. The names are those
of TABLES.
"""

import re
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from billfish.compare import attention_tables, build, engine_tables, records
from billfish.compare.catalogue import DOMAINS, ROWS
from billfish.compare.figures import shown, sized
from billfish.errors import RecordError

Json = dict[str, Any]
NOT_YET = "not measured yet"
PLACE = re.compile(r"(<!-- table ([\w ]+) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def families(document: Json) -> str:
    """What the three families measure, row by row of the table that describes them."""
    found = document["families"].values()
    lines = [_line(["", *(family["title"] for family in found)]), _line(["---"] * (len(found) + 1))]
    for key, title in ROWS.items():
        cells = ["<br>".join(map(_claim, family["claims"][key])) for family in found]
        lines.append(_line([title.lower(), *cells]))
    return "\n".join([*lines, "", _counted_and_recorded(document)])


def _claim(claim: Json) -> str:
    values, unit = claim["values"], claim["unit"]
    if not values:
        return f"{claim['label']}: {NOT_YET}"
    said = [sized(value) if unit == "bytes" else shown(value, unit) for value in values]
    return f"{claim['label']}: **{' to '.join(said)}{'' if unit == 'bytes' else unit}**"


def _counted_and_recorded(document: Json) -> str:
    devices = sorted({f"{r['device']}, {r['date']}" for r in document["records"].values()})
    return (
        f"Recorded on {'; '.join(devices)}; requests and memory are counted by running the engine "
        "without a model. Two figures are the least and the most of all cases."
    )


def techniques(document: Json) -> str:
    """The least and the most that each technique of a general kernel is worth."""
    lines = [
        _line(["technique", "cases", "time without it / time with it"]),
        _line(["---", "--:", "--:"]),
    ]
    found = [t for t in document["families"]["general"]["techniques"] if t["cases"]]
    for technique in found:
        ratios = [case["ratio"] for case in technique["cases"]]
        ends = dict.fromkeys(shown(f(ratios), "x") for f in (min, max))
        lines.append(_line([technique["name"], str(len(ratios)), f"{' to '.join(ends)}x"]))
    if not found:
        return f"{NOT_YET.capitalize()}."
    return "\n".join([*lines, "", _source(document, "ablation_general")])


def products(document: Json, record: str) -> str:
    """W4A16 products, a line a weight: times, and how many times those of peers they are."""
    found = [line for line in document["charts"]["products"] if line["record"] == record]
    if not found:
        return f"{NOT_YET.capitalize()}."
    counts = sorted({line["m"] for line in found})
    kinds = {(line["dtype"], line["group_size"]) for line in found}
    lines = [
        _line(["N x K", *(f"M={m}" for m in counts)]),
        _line(["---", *["--:"] * len(counts)]),
    ]
    weights: dict[str, Json] = {}
    for line in found:
        name = f"{line['n']} x {line['k']}"
        if len(kinds) > 1:
            name += f", {line['dtype']}, groups of {line['group_size']}"
        weights.setdefault(name, {})[line["m"]] = line
    for name, by_count in weights.items():
        lines.append(_line([name, *(_product(by_count.get(m)) for m in counts)]))
    return "\n".join([*lines, "", _source(document, record)])


def _product(line: Json | None) -> str:
    if line is None:
        return "–"
    ratios = [line["over_int4"], line["over_cublas"]]
    return f"{shown(line['us'])} ({', '.join('–' if r is None else f'{r:.2f}' for r in ratios)})"


def switches(document: Json) -> str:
    """Microseconds of W4A16 products with each technique switched off."""
    found = document["families"]["marlin"]["techniques"]
    found = [t for t in found if t["record"] == "ablation_gemm"]
    with_all = {(c["group"], c["case"]): c for t in found for c in t["cases"]}
    if not found:
        return f"{NOT_YET.capitalize()}."
    rows = {
        t["name"]: {(c["group"], c["case"]): c["without_us"] for c in t["cases"]} for t in found
    }
    rows = {
        "nothing": {key: case["with_us"] for key, case in with_all.items()},
        **rows,
        "floor: the bytes at the rate of one long read": {
            key: case["floor_us"] for key, case in with_all.items()
        },
    }
    for setting in [s for t in found for s in t["settings"]]:
        name = f"queue of {setting['setting']} stages"
        rows.setdefault(name, {})[setting["group"], setting["case"]] = setting["us"]
    lines = [
        _line(["switched off", *(" ".join(key) for key in with_all)]),
        _line(["---", *["--:"] * len(with_all)]),
    ]
    for name, times in rows.items():
        cells = (shown(times[key]) if key in times else "–" for key in with_all)
        lines.append(_line([name, *cells]))
    return "\n".join([*lines, "", _source(document, "ablation_gemm")])


def layer(document: Json) -> str:
    """The products of a layer in a row, beside the floor of their bytes."""
    found = document["charts"]["layer"]
    if not found:
        return f"{NOT_YET.capitalize()}."
    lines = [
        _line(["case", "", "µs", "floor, µs", "times the floor"]),
        _line(["---", "---", "--:", "--:", "--:"]),
    ]
    for line in found:
        cells = [shown(line["us"]), shown(line["floor_us"]), f"{line['over_floor']:.2f}"]
        lines.append(_line([line["case"], line["technique"], *cells]))
    return "\n".join([*lines, "", _source(document, "gemm_chain")])


HOST = {
    "host_us": "`w4a16_matmul`",
    "host_us_quant_linear": "`QuantLinear`",
    "host_us_torch_matmul": "`torch.matmul`",
    "host_us_torch_empty": "`torch.empty`",
}


def host(document: Json) -> str:
    """Host microseconds of a product outside a CUDA graph, beside calls of torch."""
    found = document["charts"]["host"]
    if not found:
        return f"{NOT_YET.capitalize()}."
    lines = [_line(["µs, as recorded in", *HOST.values()]), _line(["---", *["--:"] * len(HOST)])]
    for line in found:
        cells = (shown(line[key]) if key in line else "–" for key in HOST)
        lines.append(_line([f"`benchmarks/{line['record']}.json`", *cells]))
    return "\n".join(lines)


def general(document: Json, domain: str) -> str:
    """Every case of the general kernels of a domain, beside its floor and its best peer."""
    lines = [
        _line(["case", "µs", "of the floor", "best peer", "its µs", "its time / ours"]),
        _line(["---", "--:", "--:", "---", "--:", "--:"]),
    ]
    found = [line for line in document["charts"]["general"] if line["domain"] == domain]
    for line in found:
        peer = ["–", "", ""]
        if line["peer"]:
            peer = [line["peer"], shown(line["peer_us"]), f"{shown(line['ratio'], 'x')}x"]
        case = f"`{line['kernel']}` {line['size']} {line['dtype']}"
        lines.append(_line([case, shown(line["us"]), f"{shown(line['percent'], '%')}%", *peer]))
    wrong = [case for case in document["charts"]["wrong"] if case["domain"] == domain]
    for case in wrong:
        name = f"`{case['kernel']}` {case['size']} {case['dtype']}"
        lines.append(_line([name, "wrong result, not timed", "", "", "", ""]))
    if not found and not wrong:
        return f"{NOT_YET.capitalize()}."
    if found:
        lines += ["", _summary(document["charts"]["domains"][domain])]
    return "\n".join([*lines, "", _source(document, "general")])


def _summary(counts: Json) -> str:
    return (
        f"{counts['even']} of {counts['with_peer']} are at {counts['even_from']} of their best "
        f"peer's speed or faster, {counts['near']} of {counts['cases']} at {counts['near_from']}% "
        "of their floor or nearer."
    )


def tutorial(document: Json) -> str:
    """The steps of docs/write-a-kernel.md: bytes asked for, time, percent of the floor."""
    from billfish.bench.tutorial import STEPS, step_bytes

    lines = [_line(["step", "bytes", "µs", "of the floor"]), _line(["---", "--:", "--:", "--:"])]
    found = {line["step"]: line for line in document["charts"]["tutorial"]}
    for step in STEPS:
        line = found.get(step)
        times = [shown(line["us"]), f"{shown(line['percent'], '%')}%"] if line else [NOT_YET] * 2
        lines.append(_line([step, sized(step_bytes(step)), *times]))
    return "\n".join([*lines, "", _source(document, "tutorial")])


def cache(document: Json) -> str:
    """Output tokens a second of a whole model: with blocks, and with room set aside."""
    found = document["charts"]["cache"]
    lines = [
        _line(["KV blocks in all", "room set aside", "output tokens/s so", "with blocks", "ratio"]),
        _line(["--:"] * 5),
    ]
    if found is None:
        return "\n".join([*lines, _line([NOT_YET, *[""] * 4])])
    for whole in found["contiguous"]:
        blocks = shown(whole["blocks"]) if whole["blocks"] else ""
        room = f"{shown(whole['reserve_tokens'])} tokens a request"
        speeds = [shown(whole["tok_s"]), shown(whole["paged_tok_s"])]
        lines.append(_line([blocks, room, *speeds, f"{shown(whole['ratio'], 'x')}x"]))
    return "\n".join([*lines, "", _source(document, "engine_cache")])


def _of_engine(document: Json, name: str) -> str:
    make, record = engine_tables.TABLES[name]
    return f"{make(document)}\n\n{_source(document, record)}" if record else make(document)


def _of_attention(document: Json, name: str) -> str:
    make, record = attention_tables.TABLES[name]
    table = make()
    return table if table == attention_tables.NOT_YET else f"{table}\n\n{_source(document, record)}"


def _line(cells: Iterable[str]) -> str:
    # A bar would end a cell, and stars in a formula would be read as emphasis.
    escaped = (
        cell.replace("|", "\\|").replace(" * ", " \\* ").strip() if cell.strip("-:") else cell
        for cell in cells
    )
    return f"| {' | '.join(escaped)} |"


def _source(document: Json, name: str) -> str:
    """Where figures come from: the file, device, date, commit and versions."""
    record = document["records"].get(name)
    if record is None:
        return f"From `benchmarks/{name}.json`, which is not recorded yet."
    versions = ", ".join(f"{key} {value}" for key, value in record["versions"].items())
    commit = (record["commit"] or "unknown")[:12]
    return (
        f"From `benchmarks/{name}.json`: {record['device']}, {record['date']}, commit {commit}; "
        f"{versions}."
    )


TABLES: Mapping[str, Callable[[Json], str]] = {
    "families": families,
    "techniques": techniques,
    "products": partial(products, record="gemm"),
    "products of other formats": partial(products, record="gemm_formats"),
    "products switched": switches,
    "products of a layer": layer,
    "products on the host": host,
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
