"""The figures in the table of the families: one or a few for each thing that it says.

A claim names the record that it comes from. Where there is none its value is None: not measured
yet. What the engine's bookkeeping gives without a GPU has the record "counted".
"""

from collections.abc import Iterable
from typing import Any

from billfish.compare import charts_data
from billfish.compare.charts_data import timed
from billfish.compare.records import Record, Records

Json = dict[str, Any]
COUNTED = "counted"
INT4_PEERS = ("marlin", "machete", "humming")


def claims(family: str, records: Records, pictures: Json) -> dict[str, list[Json]]:
    """By row of the table: function, focus, memory, performance, uses."""
    if family == "marlin":
        return _marlin(records)
    if family == "paged_attention":
        return _paged_attention(records, pictures.get("memory"))
    return _general(records)


def _claim(record: str, label: str, value: float | None, unit: str = "") -> Json:
    return {"record": record, "label": label, "value": value, "unit": unit}


def _range(record: str, label: str, values: Iterable[float], unit: str) -> list[Json]:
    found = list(values)
    return [
        _claim(record, f"{label}, least", min(found, default=None), unit),
        _claim(record, f"{label}, most", max(found, default=None), unit),
    ]


def _marlin(records: Records) -> dict[str, list[Json]]:
    gemm, ablation = records.get("gemm"), records.get("ablation_gemm")
    chart = charts_data.speedup(gemm)
    points = [
        (point["m"], point["speedup"], shape["shape"])
        for shape in (chart["shapes"] if chart else [])
        for point in shape["lines"].get("billfish", [])
    ]
    performance = []
    for m in (1, 16, 64, 256):
        best = max(((s, name) for count, s, name in points if count == m), default=(None, ""))
        of = f", {best[1]}" if best[1] else ""
        performance.append(_claim("gemm", f"over FP16, M = {m}{of}", best[0], "x"))
    lead = _leads(gemm, ("n", "k", "m"), INT4_PEERS)
    floors = _percents(row for row in _rows(ablation) if row["technique"] == "all on")
    few = [speed for m, speed, _ in points if m <= 64]
    many = [speed for m, speed, _ in points if m >= 256]
    return {
        "function": [_claim("gemm", "relative error, at most", _worst_error(gemm))],
        "focus": _range("ablation_gemm", "of the floor of its bytes", floors, "%"),
        "memory": [
            _claim(
                "gemm", "fewer bytes than FP16, with scales", chart["ideal"] if chart else None, "x"
            )
        ],
        "performance": performance + _range("gemm", "over the best INT4 peer", lead, "x"),
        "uses": [
            _claim("gemm", "over FP16 up to M = 64, least", min(few, default=None), "x"),
            _claim("gemm", "over FP16 from M = 256 on, most", max(many, default=None), "x"),
        ],
    }


def _paged_attention(records: Records, memory: Json | None) -> dict[str, list[Json]]:
    attention = records.get("attention")
    decode = (charts_data.decode(attention) or {"cases": []})["cases"]
    bound = [c["impls"]["billfish"]["ratio"] for c in decode if "billfish" in c["impls"]]
    lead = _leads(attention, ("mode", "case", "heads_q"), ("fa3",), mode="decode")
    whole = charts_data.cache(records.get("engine_cache"))
    ratio = whole["contiguous"][0]["ratio"] if whole else None
    serving = charts_data.serving(records)
    rates = [p["tok_s"] for p in serving["lines"].get("billfish", [])] if serving else []
    used = {key: memory[key] for key in ("paged", "contiguous")} if memory else {}
    return {
        "function": [_claim("attention", "relative error, at most", _worst_error(attention))],
        "focus": [
            _claim(COUNTED, f"memory that holds tokens, {words}", value, "%")
            for words, value in (
                ("with blocks", used["paged"]["used_percent"] if used else None),
                ("contiguous", used["contiguous"]["used_percent"] if used else None),
            )
        ],
        "memory": [
            _claim(
                COUNTED, "requests at once, with blocks", used["paged"]["running"] if used else None
            ),
            _claim(COUNTED, "contiguous", used["contiguous"]["running"] if used else None),
        ],
        "performance": [
            *_range("attention", "beside a contiguous cache, decode", bound, "x"),
            *_range("attention", "over FlashAttention-3, decode", lead, "x"),
            _claim("engine_cache", "throughput over a contiguous cache", ratio, "x"),
        ],
        "uses": [
            _claim("engine_gpu", "output tokens/s of a whole model, most", max(rates, default=None))
        ],
    }


def _general(records: Records) -> dict[str, list[Json]]:
    general = records.get("general")
    lines = charts_data.general(general)
    percents = [line["percent"] for line in lines]
    ratios = [line["ratio"] for line in lines if line["ratio"]]
    near = sum(percent >= 90 for percent in percents) if lines else None
    domains = {line["domain"] for line in lines}
    return {
        "function": [_claim("general", "relative error, at most", _worst_error(general))],
        "focus": [_claim("general", "cases at 90% of the floor or nearer", near)],
        "memory": [
            _claim(
                "general",
                "bytes of the largest case",
                max((x["bytes"] for x in lines), default=None),
                "bytes",
            )
        ],
        "performance": [
            *_range("general", "percent of the floor", percents, "%"),
            *_range("general", "over the best peer", ratios, "x"),
        ],
        "uses": [
            _claim("general", "domains measured", len(domains) or None),
            _claim("general", "cases measured", len(lines) or None),
        ],
    }


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
