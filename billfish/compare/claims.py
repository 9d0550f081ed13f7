"""The figures in the table of the families: one or a few for each thing that it says.

A claim names the record that it comes from, and has one value, or two: the least and the most of
all cases. Where nothing is recorded it has none: not measured yet. What the engine's bookkeeping
gives without a GPU has the record "counted".
"""

from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

from billfish.compare import charts_data
from billfish.compare.catalogue import KINDS
from billfish.compare.charts_data import INT4_PEERS, timed
from billfish.compare.records import Record, Records

Json = dict[str, Any]
COUNTED = "counted"


def claims(
    family: str, records: Records, pictures: Json, techniques: Sequence[Json]
) -> dict[str, list[Json]]:
    """By row of the table (catalogue.ROWS)."""
    if family == "marlin":
        found = _marlin(records)
    elif family == "paged_attention":
        found = _paged_attention(records, pictures.get("memory"))
    else:
        found = _general(records, techniques)
    return {**found, "techniques": _techniques(techniques)}


def _techniques(techniques: Sequence[Json]) -> list[Json]:
    """The most that each technique is worth, or each kind where there are kinds; the best first.

    index: of the technique, of a kind the one that is worth most.
    """
    found: dict[str, Json] = {}
    for index, technique in enumerate(techniques):
        title = KINDS[technique["kind"]] if "kind" in technique else technique["name"]
        most = max((case["ratio"] for case in technique["cases"]), default=None)
        claim = _claim(technique["record"], title, most, "x") | {"index": index}
        if title not in found or (most and most > max(found[title]["values"], default=0)):
            found[title] = claim
    return sorted(found.values(), key=lambda claim: -max(claim["values"], default=0))


def _claim(record: str | None, label: str, value: float | None, unit: str = "") -> Json:
    values = [] if value is None else [value]
    return {"record": record, "label": label, "values": values, "unit": unit}


def _range(record: str, label: str, found: Iterable[float], unit: str) -> Json:
    """The least and the most of them; one value where both are the same."""
    values = sorted(found)
    ends = list(dict.fromkeys((values[0], values[-1]))) if values else []
    return {"record": record, "label": label, "values": ends, "unit": unit}


def _marlin(records: Records) -> dict[str, list[Json]]:
    gemm, ablation = records.get("gemm"), records.get("ablation_gemm")
    chart = charts_data.speedup(gemm)
    speeds: dict[int, list[float]] = {}
    for shape in chart["shapes"] if chart else []:
        for point in shape["lines"].get("billfish", []):
            speeds.setdefault(point["m"], []).append(point["speedup"])
    over_fp16 = [
        _range("gemm", f"speed over FP16, {m} token{'s' if m > 1 else ''}", speeds.get(m, []), "x")
        for m in (1, 16, 64, 256)
    ]
    lead = _leads(gemm, ("n", "k", "m"), INT4_PEERS)
    floors = _percents(row for row in _rows(ablation) if row["technique"] == "all on")
    few = [speed for m, found in speeds.items() if m <= 64 for speed in found]
    many = [speed for m, found in speeds.items() if m >= 256 for speed in found]
    ideal = chart["ideal"] if chart else None
    best = max(speeds.get(1, []), default=None)
    return {
        "answer": [
            _claim("gemm", "the speed of FP16 with 1 token, at most", best, "x"),
            _range("gemm", "with 256 tokens, where arithmetic decides", speeds.get(256, []), "x"),
        ],
        "function": [_claim("gemm", "relative error, at most", _worst_error(gemm))],
        "focus": [_range("ablation_gemm", "of the floor of its bytes", floors, "%")],
        "memory": [_claim("gemm", "fewer bytes than FP16, scales included", ideal, "x")],
        "performance": [*over_fp16, _range("gemm", "over the best INT4 peer", lead, "x")],
        "uses": [
            _range("gemm", "speed over FP16, 64 tokens or fewer", few, "x"),
            _range("gemm", "256 tokens or more", many, "x"),
        ],
    }


def _paged_attention(records: Records, memory: Json | None) -> dict[str, list[Json]]:
    attention = records.get("attention")
    decode = (charts_data.decode(attention) or {"cases": []})["cases"]
    bound = [c["impls"]["billfish"]["ratio"] for c in decode if "billfish" in c["impls"]]
    lead = _leads(attention, ("mode", "case", "heads_q"), ("fa3",), mode="decode")
    whole = charts_data.cache(records.get("engine_cache"))
    ratios = [c["ratio"] for c in whole["contiguous"]] if whole else []
    serving = charts_data.serving(records)
    rates = [p["tok_s"] for p in serving["lines"].get("billfish", [])] if serving else []

    def counted(label: str, way: str, key: str, unit: str = "") -> Json:
        return _claim(COUNTED, label, memory[way][key] if memory else None, unit)

    more = memory["running_ratio"] if memory else None
    return {
        "answer": [
            _claim(COUNTED, "as many requests at once in the same memory", more, "x"),
            _range("attention", "the decode speed of a contiguous cache", bound, "x"),
        ],
        "function": [_claim("attention", "relative error, at most", _worst_error(attention))],
        "focus": [
            counted("memory that holds tokens, with blocks", "paged", "used_percent", "%"),
            counted("in one piece a request", "contiguous", "used_percent", "%"),
        ],
        "memory": [
            counted("requests at once, with blocks", "paged", "running"),
            counted("in one piece a request", "contiguous", "running"),
        ],
        "performance": [
            _range("attention", "decode, speed over a contiguous cache", bound, "x"),
            _range("attention", "decode, over FlashAttention-3", lead, "x"),
            _range("engine_cache", "throughput over a contiguous cache", ratios, "x"),
        ],
        "uses": [
            _claim("engine_gpu", "output tokens/s of a whole model, most", max(rates, default=None))
        ],
    }


def _general(records: Records, techniques: Sequence[Json]) -> dict[str, list[Json]]:
    general = records.get("general")
    lines = charts_data.general(general)
    percents = [line["percent"] for line in lines]
    ratios = [line["ratio"] for line in lines if line["ratio"]]
    near = sum(percent >= 90 for percent in percents) if lines else None
    ahead = sum(ratio >= 1 for ratio in ratios) if ratios else None
    largest = max((line["bytes"] for line in lines), default=None)
    worth = [case["ratio"] for t in techniques for case in t["cases"]]
    return {
        "answer": [
            _claim("general", "of its floor, the median case", _median(percents), "%"),
            _claim(
                "ablation_general",
                "what a technique is worth, the median case",
                _median(worth),
                "x",
            ),
        ],
        "function": [_claim("general", "relative error, at most", _worst_error(general))],
        "focus": [_claim("general", "cases at 90% of the floor or nearer", near)],
        "memory": [_claim("general", "bytes of the largest case", largest, "bytes")],
        "performance": [
            _range("general", "of the floor", percents, "%"),
            _range("general", "over the best peer", ratios, "x"),
            _claim("general", "cases no slower than the best peer", ahead),
        ],
        "uses": [
            _claim("general", "kernels measured", len({x["kernel"] for x in lines}) or None),
            _claim("general", "cases measured", len(lines) or None),
        ],
    }


def _median(values: Sequence[float]) -> float | None:
    return round(median(values), 2) if values else None


def _rows(record: Record | None) -> list[Json]:
    return timed(record) if record else []


def _percents(rows: Iterable[Json]) -> list[float]:
    return [round(100 * row["floor_us"] / row["us"], 1) for row in rows]


def _worst_error(record: Record | None) -> float | None:
    """Of what was timed; errors of the others are why they were not."""
    errors = [r.get("rel_err") for r in _rows(record) if r["impl"] == "billfish"]
    return max((error for error in errors if error is not None), default=None)


def _leads(
    record: Record | None, keys: tuple[str, ...], peers: tuple[str, ...], **where: str
) -> list[float]:
    """The best peer's time over ours, in every case that has both."""
    cases: dict[tuple[Any, ...], dict[str, float]] = {}
    for row in _rows(record):
        if all(row[key] == value for key, value in where.items()):
            cases.setdefault(tuple(row[key] for key in keys), {})[row["impl"]] = row["us"]
    return [
        round(min(us for name, us in impls.items() if name in peers) / impls["billfish"], 2)
        for impls in cases.values()
        if "billfish" in impls and set(peers) & set(impls)
    ]
