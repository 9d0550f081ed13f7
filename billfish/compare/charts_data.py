"""What the charts of a comparison show, from the rows of the records."""

from collections.abc import Callable, Iterable
from typing import Any

from billfish.compare.records import Record, Records, Row

Json = dict[str, Any]

TOKEN = 256
"""Bytes of a head of a token in the benchmark of block movement: 128 values of 16 bits."""
MOVED: dict[str, Callable[[int], int]] = {
    "write": lambda tokens: 4 * 8 * tokens * TOKEN,
    "rotate and write": lambda tokens: 2 * (32 + 16) * tokens * TOKEN,
    "copy": lambda blocks: 2 * blocks * (16 * 2 * 16 * 8 * TOKEN),
}
"""Bytes read and written: 8 KV heads, 32 query heads, blocks of 16 tokens in 16 layers."""


def bytes_moved(row: Row) -> int | None:
    size = MOVED.get(row.get("mode", ""))
    return size(row["batch"]) if size else None


def charts(records: Records, names: Iterable[str]) -> Json:
    names = set(names)
    return {
        "speedup": speedup(records.get("gemm")) if "marlin" in names else None,
        "decode": decode(records.get("attention")) if "paged_attention" in names else None,
        "movement": movement(records.get("attention_movement"))
        if "paged_attention" in names
        else [],
        "cache": cache(records.get("engine_cache")) if "paged_attention" in names else None,
        "serving": serving(records),
        "general": general(records.get("general")) if "general" in names else [],
        "wrong": wrong(records.get("general")) if "general" in names else [],
        "tutorial": tutorial(records.get("tutorial")) if "general" in names else [],
        "kernels": kernels(records, names),
        "ceilings": ceilings(records),
    }


def speedup(record: Record | None) -> Json | None:
    """Times FP16 by number of tokens, of each implementation, a line a shape.

    ideal: bits of an FP16 weight over those of an INT4 weight with a 16-bit scale a group.
    """
    if record is None:
        return None
    shapes: dict[str, dict[str, list[Json]]] = {}
    base = {(r["n"], r["k"], r["m"]): r["us"] for r in timed(record) if r["impl"] == "cublas"}
    for row in timed(record):
        key = (row["n"], row["k"], row["m"])
        if row["impl"] != "cublas" and key in base:
            lines = shapes.setdefault(f"{row['n']} x {row['k']}", {})
            lines.setdefault(row["impl"], []).append(
                {
                    "m": row["m"],
                    "us": row["us"],
                    "fp16_us": base[key],
                    "speedup": round(base[key] / row["us"], 2),
                }
            )
    group = record.rows[0]["group_size"]
    return {
        "record": "gemm",
        "origin": record.origin,
        "ideal": round(16 / (4 + 16 / group), 2),
        "group_size": group,
        "shapes": [{"shape": shape, "lines": lines} for shape, lines in shapes.items()],
    }


def decode(record: Record | None) -> Json | None:
    """Decode over blocks beside attention over a contiguous cache and the peers, by case."""
    if record is None:
        return None
    cases: dict[str, Json] = {}
    for row in timed(record):
        if row["mode"] == "decode" and (row["heads_q"], row["heads_kv"]) == (32, 8):
            case = cases.setdefault(row["case"], {"case": row["case"], "impls": {}})
            case["impls"][row["impl"]] = {"us": row["us"]}
    kept = [case for case in cases.values() if "contiguous" in case["impls"]]
    for case in kept:
        bound = case["impls"]["contiguous"]["us"]
        for impl in case["impls"].values():
            impl["ratio"] = round(bound / impl["us"], 3)
    return {"record": "attention", "origin": record.origin, "cases": kept}


def movement(record: Record | None) -> list[Json]:
    if record is None:
        return []
    found: dict[str, dict[str, list[Json]]] = {}
    for row in record.rows:
        if row["mode"] in MOVED:
            lines = found.setdefault(row["mode"], {})
            lines.setdefault(row["impl"], []).append(
                {"size": row["batch"], "us": row["us"], "bytes": bytes_moved(row)}
            )
    return [
        {
            "record": "attention_movement",
            "origin": record.origin,
            "mode": mode,
            "unit": "blocks" if mode == "copy" else "tokens",
            "lines": lines,
        }
        for mode, lines in found.items()
    ]


def cache(record: Record | None) -> Json | None:
    """Output tokens/s of the engine with blocks, and with room set aside for each request."""
    if record is None:
        return None
    rows = [r for r in record.rows if r["measure"] == "output_tok_s" and r["impl"] == "billfish"]
    paged = [r for r in rows if r.get("reserve_tokens") is None]
    whole = [r for r in rows if r.get("reserve_tokens") is not None]
    if not paged or not whole:
        return None
    return {
        "record": "engine_cache",
        "origin": record.origin,
        "paged_tok_s": paged[0]["value"],
        "contiguous": [
            {
                "reserve_tokens": r["reserve_tokens"],
                "tok_s": r["value"],
                "ratio": round(paged[0]["value"] / r["value"], 2),
            }
            for r in whole
        ],
    }


def serving(records: Records) -> Json | None:
    """Milliseconds a token of a whole model by batch, beside another engine's."""
    ours, theirs = records.get("engine_gpu"), records.get("engine_vllm")
    if ours is None:
        return None
    lines: dict[str, list[Json]] = {}
    for record in filter(None, (ours, theirs)):
        for row in record.rows:
            if row["measure"] == "tpot_ms" and row["prompt"] == 512 and "sampling" not in row:
                lines.setdefault(row["impl"], []).append(
                    {
                        "batch": row["batch"],
                        "tpot_ms": row["value"],
                        "tok_s": round(1000 * row["batch"] / row["value"]),
                    }
                )
    for points in lines.values():
        points.sort(key=lambda point: point["batch"])
    sources = ["engine_gpu", *(["engine_vllm"] if theirs else [])]
    return {"records": sources, "origin": ours.origin, "lines": lines}


def general(record: Record | None) -> list[Json]:
    """A line a case of a general kernel: its time, its floor, its best peer."""
    if record is None:
        return []
    cases: dict[tuple[str, ...], dict[str, Row]] = {}
    for row in timed(record):
        key = (row["domain"], row["kernel"], row["size"], row["dtype"])
        cases.setdefault(key, {})[row["impl"]] = row
    lines = []
    for (domain, kernel, size, dtype), impls in cases.items():
        if "billfish" not in impls:
            continue
        ours = impls["billfish"]
        peers = {name: row["us"] for name, row in impls.items() if name != "billfish"}
        best = min(peers, key=lambda name: peers[name], default=None)
        lines.append(
            {
                "domain": domain,
                "kernel": kernel,
                "size": size,
                "dtype": dtype,
                "us": ours["us"],
                "bytes": ours["bytes"],
                "flops": ours["flops"],
                "floor_us": ours["floor_us"],
                "percent": round(100 * ours["floor_us"] / ours["us"], 1),
                "peer": best,
                "peer_us": peers[best] if best else None,
                "ratio": round(peers[best] / ours["us"], 2) if best else None,
            }
        )
    return lines


def wrong(record: Record | None) -> list[Json]:
    """Cases of general kernels whose result was wrong when they were to be timed."""
    return [
        {key: row[key] for key in ("domain", "kernel", "size", "dtype")}
        for row in (record.rows if record else [])
        if row["impl"] == "billfish" and "us" not in row
    ]


def tutorial(record: Record | None) -> list[Json]:
    if record is None:
        return []
    return [
        {
            "step": row["step"],
            "size": row["size"],
            "us": row["us"],
            "bytes": row["bytes"],
            "floor_us": row["floor_us"],
            "percent": round(100 * row["floor_us"] / row["us"], 1),
        }
        for row in timed(record)
    ]


def ceilings(records: Records) -> Json | None:
    """GB/s of memory and TFLOP/s of 16-bit products, as measured on the same GPU."""
    for name, record in _of_one_gpu(records).items():
        head = record.head
        if {"bandwidth", "rate"} <= head.keys():
            gbps, tflops = head["bandwidth"] / 1e9, head["rate"] / 1e12
            return {"record": name, "gbps": round(gbps), "tflops": round(tflops, 1)}
        rates = head.get("rates", {})
        half = [rates.get("tflops", {}).get(kind) for kind in ("float16", "bfloat16")]
        if "copy_gbps" in rates and any(half):
            return {"record": name, "gbps": rates["copy_gbps"], "tflops": next(filter(None, half))}
    return None


def _of_one_gpu(records: Records) -> Records:
    """Those measured here, if any were, else those recorded: not both under one roof."""
    measured = {name: r for name, r in records.items() if r.origin == "measured"}
    return measured or records


def kernels(records: Records, names: Iterable[str]) -> list[Json]:
    """Every kernel and case of ours: bytes, operations, time; for the roofline."""
    names, records = set(names), _of_one_gpu(records)
    points = []
    if "marlin" in names and "gemm" in records:
        for r in timed(records["gemm"]):
            if r["impl"] == "billfish":
                weights = r["n"] * r["k"] // 2 + 2 * r["n"] * (r["k"] // r["group_size"])
                points.append(
                    _point(
                        "marlin",
                        "gemm",
                        f"{r['n']} x {r['k']}, M = {r['m']}",
                        r["us"],
                        weights + 2 * r["m"] * (r["n"] + r["k"]),
                        2 * r["m"] * r["n"] * r["k"],
                    )
                )
    if "paged_attention" in names and "attention" in records:
        for r in timed(records["attention"]):
            if r["impl"] == "billfish" and r["heads_q"] == 32:
                points.append(
                    _point(
                        "paged_attention",
                        "attention",
                        f"{r['mode']} {r['case']}",
                        r["us"],
                        round(r["gbps"] * r["us"] * 1e3),
                        round(r["tflops"] * r["us"] * 1e6),
                    )
                )
    if "paged_attention" in names and "attention_movement" in records:
        for r in timed(records["attention_movement"]):
            moved = bytes_moved(r)
            if r["impl"] == "billfish" and moved:
                unit = "blocks" if r["mode"] == "copy" else "tokens"
                name = f"{r['mode']}, {r['batch']} {unit}"
                points.append(_point("paged_attention", "attention_movement", name, r["us"], moved))
    if "general" in names:
        for line in general(records.get("general")):
            name = f"{line['kernel']} {line['size']} {line['dtype']}"
            points.append(
                _point("general", "general", name, line["us"], line["bytes"], line["flops"])
            )
    top = ceilings(records)
    for point in points:
        point["percent"] = None
        if top:
            floor = max(point["bytes"] / top["gbps"], point["flops"] / top["tflops"] / 1e3) / 1e3
            point["percent"] = round(100 * floor / point["us"], 1)
    return [point for point in points if point["bytes"]]


def _point(family: str, record: str, name: str, us: float, nbytes: float, flops: float = 0) -> Json:
    return {
        "family": family,
        "record": record,
        "name": name,
        "us": us,
        "bytes": nbytes,
        "flops": flops,
        "gbps": round(nbytes / us / 1e3, 1),
        "tflops": round(flops / us / 1e6, 2),
        "intensity": round(flops / nbytes, 2),
    }


def timed(record: Record) -> list[Row]:
    """Rows with a time: one that came out wrong has none."""
    return [row for row in record.rows if "us" in row]
