"""Every kernel and case of ours, and the ceilings of the GPU: the roofline, and the floors."""

from collections.abc import Iterable, Iterator
from typing import Any

from billfish.compare.charts_data import bytes_moved, general, timed
from billfish.compare.records import Record, Records

Json = dict[str, Any]


def ceilings(records: Records) -> Json | None:
    """GB/s of memory and TFLOP/s of products of matrices, as measured on the same GPU.

    tflops: in 16 bits, float32: without TF32, None where it was not measured.
    """
    for name, record in _of_one_gpu(records).items():
        head = record.head
        if {"bandwidth", "rate"} <= head.keys():
            gbps, tflops = round(head["bandwidth"] / 1e9), round(head["rate"] / 1e12, 1)
            return {"record": name, "gbps": gbps, "tflops": tflops, "float32": None}
        rates = head.get("rates", {})
        products = rates.get("tflops", {})
        half = [products[kind] for kind in ("float16", "bfloat16") if kind in products]
        if "copy_gbps" in rates and half:
            return {"record": name, "gbps": rates["copy_gbps"], "tflops": max(half),
                    "float32": products.get("float32")}  # fmt: skip
    return None


def _of_one_gpu(records: Records) -> Records:
    """Those measured here, if any were, else those recorded: not both under one roof."""
    measured = {name: r for name, r in records.items() if r.origin == "measured"}
    return measured or records


def kernels(records: Records, names: Iterable[str]) -> list[Json]:
    """Every kernel and case of ours: bytes, operations, time, and percent of the floor: that of the
    row where it has one, else what its bytes or operations take under the ceilings.
    """
    names, records = set(names), _of_one_gpu(records)
    points = [
        *(_products(records.get("gemm")) if "marlin" in names else ()),
        *(_attention(records.get("attention")) if "paged_attention" in names else ()),
        *(_moves(records.get("attention_movement")) if "paged_attention" in names else ()),
        *(_generals(records.get("general")) if "general" in names else ()),
    ]
    top = ceilings(records)
    for point in points:
        if "percent" not in point:
            point["percent"] = _percent_under(top, point) if top else None
    return [point for point in points if point["bytes"]]


def _percent_under(top: Json, point: Json) -> float:
    floor = max(point["bytes"] / top["gbps"], point["flops"] / top["tflops"] / 1e3) / 1e3
    return round(100 * floor / point["us"], 1)


def _products(record: Record | None) -> Iterator[Json]:
    for r in timed(record) if record else ():
        if r["impl"] == "billfish":
            weights = r["n"] * r["k"] // 2 + 2 * r["n"] * (r["k"] // r["group_size"])
            yield _point(
                "marlin", "INT4 product", f"{r['n']} x {r['k']}, M = {r['m']}", r["us"],
                weights + 2 * r["m"] * (r["n"] + r["k"]), 2 * r["m"] * r["n"] * r["k"],
            )  # fmt: skip


def _attention(record: Record | None) -> Iterator[Json]:
    for r in timed(record) if record else ():
        if r["impl"] == "billfish" and r["heads_q"] == 32:
            yield _point(
                "paged_attention", r["mode"], r["case"], r["us"],
                round(r["gbps"] * r["us"] * 1e3), round(r["tflops"] * r["us"] * 1e6),
            )  # fmt: skip


def _moves(record: Record | None) -> Iterator[Json]:
    for r in timed(record) if record else ():
        moved = bytes_moved(r)
        if r["impl"] == "billfish" and moved:
            case = f"{r['batch']} {'blocks' if r['mode'] == 'copy' else 'tokens'}"
            yield _point("paged_attention", r["mode"], case, r["us"], moved)


def _generals(record: Record | None) -> Iterator[Json]:
    for line in general(record):
        case = f"{line['size']} {line['dtype']}"
        yield _point(
            "general", line["kernel"], case, line["us"], line["bytes"], line["flops"]
        ) | {"domain": line["domain"], "percent": line["percent"]}  # fmt: skip


def _point(family: str, kernel: str, case: str, us: float, nbytes: float, flops: float = 0) -> Json:
    return {
        "family": family,
        "kernel": kernel,
        "case": case,
        "us": us,
        "bytes": nbytes,
        "flops": flops,
        "gbps": round(nbytes / us / 1e3, 1),
        "tflops": round(flops / us / 1e6, 2),
        "intensity": round(flops / nbytes, 2) if nbytes else None,
    }
