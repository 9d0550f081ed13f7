"""The comparison as one JSON document, from records of measurements.

Every figure that a report shows is in it, next to the record it comes from; what was not measured
has no figures and says so. A ratio is the time without a technique over the time with it, a percent
of the floor is the floor's time over the measured one.
"""

import datetime
from collections import Counter
from collections.abc import Iterable
from typing import Any

from billfish.compare import charts_data, claims, engine_tables, pictures, roof_data
from billfish.compare.catalogue import DOMAINS, FAMILIES, KINDS, Family, Rows, Technique
from billfish.compare.links import resolve_all
from billfish.compare.records import Record, Records, Row
from billfish.compare.topics import Topic, benchmarked, topic_of
from billfish.errors import RecordError
from billfish.version import __version__

FORMAT = 2
MEASURED, RECORDED, MISSING = "measured", "recorded", "not measured yet"

Json = dict[str, Any]


def comparison(
    records: Records,
    names: Iterable[str],
    *,
    gpu: str | None,
    seconds: float | None = None,
    left_out: Iterable[str] = (),
) -> Json:
    """The document for the families named. gpu: the name of this machine's, None without one;
    seconds: how long measuring took here, left_out: what it left out, if anything was measured.
    """
    names = tuple(names)
    shown = pictures.pictures(names)
    families = {f.name: _family(f, records, shown) for f in FAMILIES if f.name in names}
    here = any(record.origin == MEASURED for record in records.values())
    return {
        "format": FORMAT,
        "made": {
            "version": __version__,
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "gpu": gpu,
            "origin": MEASURED if here else RECORDED,
            "seconds": seconds,
            "left_out": list(left_out),
            "file": None,  # of a comparison that is shown from a file: its name
        },
        "records": {name: _source(record) for name, record in records.items()},
        "families": families,
        "charts": _charts(records, names),
        "pictures": shown,
    }


def _charts(records: Records, names: Iterable[str]) -> Json:
    """By chart; None or empty where nothing of it is recorded."""
    names = set(names)
    return {
        "speedup": charts_data.speedup(records.get("gemm")) if "marlin" in names else None,
        "products": charts_data.products(records) if "marlin" in names else [],
        "layer": charts_data.layer(records.get("gemm_chain")) if "marlin" in names else [],
        "host": charts_data.host(records) if "marlin" in names else [],
        "decode": charts_data.decode(records.get("attention"))
        if "paged_attention" in names
        else None,
        "movement": charts_data.movement(records.get("attention_movement"))
        if "paged_attention" in names
        else [],
        "cache": charts_data.cache(records.get("engine_cache"))
        if "paged_attention" in names
        else None,
        "step": charts_data.step(records.get("step")),
        "serving": charts_data.serving(records),
        "engine": engine_tables.summary(records),
        "engine_step": engine_tables.step_rows(records),
        "agreement": _rows(records, "engine_agreement"),
        "general": charts_data.general(records.get("general")) if "general" in names else [],
        "domains": charts_data.domains(records.get("general")) if "general" in names else {},
        "wrong": charts_data.wrong(records.get("general")) if "general" in names else [],
        "tutorial": charts_data.tutorial(records.get("tutorial")) if "general" in names else [],
        "kernels": roof_data.kernels(records, names),
        "ceilings": roof_data.ceilings(records),
    }


def check(document: Json, source: str) -> Json:
    """A document made before. Raises RecordError unless it is of this format."""
    if document.get("format") != FORMAT:
        raise RecordError(source, f"not a comparison of format {FORMAT}")
    for key in ("made", "records", "families", "charts", "pictures"):
        if not isinstance(document.get(key), dict):
            raise RecordError(source, f"{key} is missing")
    return document


def _rows(records: Records, name: str) -> list[Json]:
    return list(records[name].rows) if name in records else []


def _source(record: Record) -> Json:
    head = record.head
    return {
        "origin": record.origin,
        "file": f"benchmarks/{record.name}.json" if record.origin == RECORDED else None,
        **{key: head.get(key) for key in ("device", "date", "commit", "versions", "command")},
        "rows": len(record.rows),
        "earlier": dict(Counter(row["commit"] for row in record.rows if row.get("commit"))),
    }


def _family(family: Family, records: Records, shown: Json) -> Json:
    if family.name == "general":
        techniques = _general(records)
    else:
        techniques = [_technique(technique, records) for technique in family.techniques]
    return {
        "title": family.title,
        "package": family.package,
        "page": family.page,
        "answer": family.answer,
        "function": family.function,
        "focus": family.focus,
        "memory": family.memory,
        "uses": family.uses,
        "code": resolve_all(family.code),
        "claims": claims.claims(family.name, records, shown, techniques),
        "techniques": techniques,
    }


def _technique(technique: Technique, records: Records) -> Json:
    cases: list[Json] = []
    record = None
    for rows in technique.sources:
        cases = _cases(rows, records)
        if cases:
            record = rows.record
            break
    return {
        "name": technique.name,
        "what": technique.what,
        "switch": technique.switch,
        "code": resolve_all(technique.code),
        "record": record,
        "origin": records[record].origin if record else MISSING,
        "cases": cases,
        "settings": _settings(technique.settings, records),
    }


def _cases(rows: Rows, records: Records) -> list[Json]:
    """With and without, for every case that has both."""
    record = records.get(rows.record)
    if record is None:
        return []
    with_it, without = {}, {}
    for row in record.rows:
        if all(row.get(key) == value for key, value in rows.where) and "us" in row:
            name = " ".join(str(row[key]) for key in rows.case)
            if row.get(rows.key) == rows.on:
                with_it[_group(row), name] = row
            elif row.get(rows.key) == rows.off:
                without[_group(row), name] = row
    plain = {
        (_group(row), str(row["batch"])): row["us"]
        for row in record.rows
        if rows.record == "attention_movement" and row["impl"] == "plain"
    }
    return [
        pair(key[0], key[1], with_it[key], row, plain.get(key)) for key, row in without.items()
        if key in with_it
    ]  # fmt: skip


def _group(row: Row) -> str:
    """What cases belong together: a shape, a kernel, a mode."""
    if row.get("family") == "marlin":
        return str(row["case"]).partition(" ")[0]
    return str(row.get("mode") or row.get("kernel", ""))


def pair(group: str, case: str, with_it: Row, without: Row, plain_us: float | None = None) -> Json:
    """plain_us: the time of a plain copy of as many bytes, where the row itself has no floor."""
    nbytes = with_it.get("bytes") or charts_data.bytes_moved(with_it)
    floor = with_it.get("floor_us") or plain_us
    if group and case.startswith(group):
        case = case[len(group) :].strip()
    return {
        "group": group,
        "case": case,
        "with_us": with_it["us"],
        "without_us": without["us"],
        "ratio": round(without["us"] / with_it["us"], 2),
        "bytes": nbytes,
        "floor_us": floor,
        "floor": None if floor is None else "plain copy" if plain_us == floor else "bytes",
        "with_percent": None if floor is None else round(100 * floor / with_it["us"], 1),
        "without_percent": None if floor is None else round(100 * floor / without["us"], 1),
    }


def _settings(source: tuple[str, str] | None, records: Records) -> list[Json]:
    """Rows of a technique with more settings than two: "queue depth 4" has the setting 4."""
    if source is None or source[0] not in records:
        return []
    found = []
    for row in records[source[0]].rows:
        name = row["technique"]
        if name.startswith(source[1] + " "):
            found.append(
                {"group": _group(row), "case": str(row["case"]).partition(" ")[2],
                 "setting": int(name.removeprefix(source[1])), "us": row["us"],
                 "percent": round(100 * row["floor_us"] / row["us"], 1)}
            )  # fmt: skip
    return found


def _general(records: Records) -> list[Json]:
    """What is recorded of the general kernels' techniques, and those of which nothing is."""
    record = records.get("ablation_general")
    rows = record.rows if record else []
    base = {(r["kernel"], r["case"]): r for r in rows if r["technique"] == "all"}
    found: dict[Topic, list[Json]] = {}
    for row in rows:
        key = (row["kernel"], row["case"])
        if row["technique"] != "all" and key in base:
            topic = topic_of(row["domain"], row["kernel"], row["technique"])
            setting = "" if row["setting"] == "off" else f", {row['setting']}"
            case = pair("", f"{row['case']}{setting}", base[key], row)
            found.setdefault(topic, []).append(case)
    listed = list(dict.fromkeys((*found, *benchmarked())))
    listed.sort(key=lambda t: (list(DOMAINS).index(t.domain), list(KINDS).index(t.kind)))
    return [
        {
            "name": f"{topic.kernel}: {topic.technique}",
            "domain": topic.domain,
            "kind": topic.kind,
            "what": topic.what,
            "switch": None,
            "code": resolve_all(topic.code),
            "record": "ablation_general" if topic in found else None,
            "origin": record.origin if record and topic in found else MISSING,
            "cases": found.get(topic, []),
            "settings": [],
        }
        for topic in listed
    ]
