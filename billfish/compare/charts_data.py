"""What the charts of a comparison show, from the rows of the records."""

from collections.abc import Callable
from typing import Any

from billfish.compare.catalogue import DOMAINS
from billfish.compare.records import Record, Records, Row

Json = dict[str, Any]

INT4_PEERS = ("marlin", "machete", "humming", "tinygemm")
TOKEN = 256
"""Bytes of a head of a token in the benchmark of block movement: 128 values of 16 bits."""
MOVED: dict[str, Callable[[int], int]] = {
    "write": lambda tokens: 4 * 8 * tokens * TOKEN,
    "rotate and write": lambda tokens: 2 * (32 + 16) * tokens * TOKEN,
    "copy": lambda blocks: 2 * blocks * (16 * 2 * 16 * 8 * TOKEN),
}
"""Bytes read and written: 8 KV heads, 32 query heads, blocks of 16 tokens in 16 layers."""


def bytes_moved(row: Row) -> int | None:
    """Of a row of block movement: bytes read and written; None for a swap."""
    size = MOVED.get(row.get("mode", ""))
    return size(row["batch"]) if size else None


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


def products(records: Records) -> list[Json]:
    """A line a W4A16 product: its time, and how many times those of the best INT4 peer and of
    cuBLAS with 16-bit weights it is."""
    lines = []
    for name in ("gemm", "gemm_formats"):
        cases: dict[tuple[Any, ...], dict[str, float]] = {}
        for row in timed(records[name]) if name in records else ():
            key = tuple(row[field] for field in ("n", "k", "m", "dtype", "group_size"))
            cases.setdefault(key, {})[row["impl"]] = row["us"]
        for (n, k, m, dtype, group_size), times in cases.items():
            us = times.get("billfish")
            if us is None:
                continue
            int4 = min((times[peer] for peer in INT4_PEERS if peer in times), default=None)
            wide = times.get("cublas")
            lines.append(
                {
                    "record": name,
                    "n": n,
                    "k": k,
                    "m": m,
                    "dtype": dtype,
                    "group_size": group_size,
                    "us": us,
                    "over_int4": round(int4 / us, 2) if int4 else None,
                    "over_cublas": round(wide / us, 2) if wide else None,
                }
            )
    return lines


def layer(record: Record | None) -> list[Json]:
    """The products of a layer in a row, beside the floor of their bytes."""
    return [
        {
            "case": row["case"],
            "technique": row["technique"],
            "us": row["us"],
            "floor_us": row["floor_us"],
            "over_floor": round(row["us"] / row["floor_us"], 2),
        }
        for row in (record.rows if record else [])
    ]


def host(records: Records) -> list[Json]:
    """Host time of a W4A16 product outside a CUDA graph, beside torch's calls, by record."""
    found = [(name, record.head.get("host")) for name, record in records.items()]
    return [
        {"record": name, **times}
        for name, times in found
        if isinstance(times, dict) and "host_us" in times
    ]


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
    """Time by size, a chart a mode."""
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
    # Of one memory, so many blocks, both are measured.
    paged = {r.get("num_blocks"): r["value"] for r in rows if r.get("reserve_tokens") is None}
    whole = [
        r for r in rows if r.get("reserve_tokens") is not None and r.get("num_blocks") in paged
    ]
    if not whole:
        return None
    return {
        "record": "engine_cache",
        "origin": record.origin,
        "contiguous": [
            {
                "blocks": r.get("num_blocks"),
                "paged_tok_s": paged[r.get("num_blocks")],
                "reserve_tokens": r["reserve_tokens"],
                "tok_s": r["value"],
                "ratio": round(paged[r.get("num_blocks")] / r["value"], 2),
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
            # Greedy, from INT4 weights, and with a head that nobody has rounded.
            rounded = row.get("head") in ("int8", "int4")
            alike = not rounded and "sampling" not in row and row.get("weights") != "dense"
            if row["measure"] == "tpot_ms" and row["prompt"] == 512 and alike:
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
    # Rows that were measured later stand at the end of a record, whatever their domain.
    lines.sort(key=lambda line: list(DOMAINS).index(line["domain"]))
    return lines


EVEN, NEAR = 0.95, 90
"""Times the best peer's speed, and percent of the floor, from which a case counts as there."""


def domains(record: Record | None) -> Json:
    """How many cases of a domain are as fast as their best peer, and near their floor."""
    found: dict[str, list[Json]] = {}
    for line in general(record):
        found.setdefault(line["domain"], []).append(line)
    return {
        domain: {
            "cases": len(lines),
            "with_peer": sum(line["ratio"] is not None for line in lines),
            "even": sum((line["ratio"] or 0) >= EVEN for line in lines),
            "even_from": EVEN,
            "near": sum(line["percent"] >= NEAR for line in lines),
            "near_from": NEAR,
        }
        for domain, lines in found.items()
    }


def wrong(record: Record | None) -> list[Json]:
    """Cases of general kernels whose result was wrong when they were to be timed."""
    return [
        {key: row[key] for key in ("domain", "kernel", "size", "dtype")}
        for row in (record.rows if record else [])
        if row["impl"] == "billfish" and "us" not in row
    ]


def tutorial(record: Record | None) -> list[Json]:
    """The steps of docs/write-a-kernel.md."""
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


FAMILY_OF = {
    "qkv": "marlin", "o": "marlin", "gate_up": "marlin", "down": "marlin",
    "attention": "paged_attention", "rotate and write": "paged_attention",
    "norm": "general", "activation": "general", "sampling": "general",
}  # fmt: skip
"""Whose kernel does a part of a decode step; what is in none is other people's, or no kernel."""


def step(record: Record | None) -> Json | None:
    """A decode step of a whole model by batch: what share of it is whose."""
    if record is None:
        return None
    first = record.rows[0]
    kind = {key: first.get(key) for key in ("model", "weights", "context")}
    batches: dict[int, dict[str, Row]] = {}
    for row in timed(record):
        if {key: row.get(key) for key in kind} == kind and "sampling" not in row:
            batches.setdefault(row["batch"], {})[row["part"]] = row
    order = dict.fromkeys([*FAMILY_OF, *(part for rows in batches.values() for part in rows)])
    found = []
    for batch, rows in batches.items():
        whole = rows.pop("step", None)
        if whole is None:
            continue
        parts = [
            {"part": part, "family": FAMILY_OF.get(part, "other"), "us": rows[part]["us"],
             "percent": round(100 * rows[part]["us"] / whole["us"], 1)}
            for part in order if part in rows and rows[part]["us"] > 0
        ]  # fmt: skip
        shares: dict[str, float] = {}
        for part in parts:
            shares[part["family"]] = round(shares.get(part["family"], 0) + part["percent"], 1)
        found.append({"batch": batch, "us": whole["us"], "parts": parts, "shares": shares})
    if not found:
        return None
    return {"record": "step", "origin": record.origin, **kind, "batches": found}


def timed(record: Record) -> list[Row]:
    """Rows with a time: one that came out wrong has none."""
    return [row for row in record.rows if "us" in row]
