"""The tables of docs/w4a16.md: products beside their peers, without a technique, in a row."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import geometric_mean
from typing import Any

from billfish.compare.charts_data import EVEN
from billfish.compare.figures import shown
from billfish.compare.markdown import source_of, table_row

Json = dict[str, Any]
NOT_YET = "Not measured yet."


def products(document: Json, record: str) -> str:
    """W4A16 products, a line a weight: times, and how many times those of peers they are."""
    found = [line for line in document["charts"]["products"] if line["record"] == record]
    if not found:
        return NOT_YET
    counts = sorted({line["m"] for line in found})
    kinds = {(line["dtype"], line["group_size"]) for line in found}
    lines = [
        table_row(["N x K", *(f"M={m}" for m in counts)]),
        table_row(["---", *["--:"] * len(counts)]),
    ]
    weights: dict[str, dict[int, Json]] = {}
    for line in found:
        name = f"{line['n']} x {line['k']}"
        if len(kinds) > 1:
            name += f", {line['dtype']}, groups of {line['group_size']}"
        weights.setdefault(name, {})[line["m"]] = line
    for name, by_count in weights.items():
        lines.append(table_row([name, *(_product(by_count.get(m)) for m in counts)]))
    said = [_over_int4(found), _behind_cublas(weights)]
    return "\n".join([*lines, "", *said, "", source_of(document, record)])


def _over_int4(found: Sequence[Json]) -> str:
    """Geometric mean and least of the ratios to the best INT4 peer, by numbers of tokens."""
    said = []
    for first, last in ((1, 16), (17, 32), (33, 64), (65, 256), (257, 1 << 20)):
        among = [line for line in found if first <= line["m"] <= last and line["over_int4"]]
        if among:
            counts = sorted({line["m"] for line in among})
            name = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
            ratios = [line["over_int4"] for line in among]
            said.append(f"M = {name}: {geometric_mean(ratios):.2f} ({min(ratios):.2f})")
    if not said:
        return "No INT4 peer."
    return f"Over the best INT4 peer, geometric mean (least): {'; '.join(said)}."


def _behind_cublas(weights: Mapping[str, Mapping[int, Json]]) -> str:
    said = []
    for name, by_count in weights.items():
        counts = [m for m, line in by_count.items() if (line["over_cublas"] or 1) < EVEN]
        if counts:
            said.append(f"{name} at M = {', '.join(map(str, counts))}")
    return f"Behind cuBLAS by more than 5%: {'; '.join(said) or 'none'}."


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
        return NOT_YET
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
        table_row(["switched off", *(" ".join(key) for key in with_all)]),
        table_row(["---", *["--:"] * len(with_all)]),
    ]
    for name, times in rows.items():
        cells = (shown(times[key]) if key in times else "–" for key in with_all)
        lines.append(table_row([name, *cells]))
    return "\n".join([*lines, "", source_of(document, "ablation_gemm")])


def layer(document: Json) -> str:
    """The products of a layer in a row, beside the floor of their bytes."""
    found = document["charts"]["layer"]
    if not found:
        return NOT_YET
    lines = [
        table_row(["case", "", "µs", "floor, µs", "times the floor"]),
        table_row(["---", "---", "--:", "--:", "--:"]),
    ]
    for line in found:
        cells = [shown(line["us"]), shown(line["floor_us"]), f"{line['over_floor']:.2f}"]
        lines.append(table_row([line["case"], line["technique"], *cells]))
    return "\n".join([*lines, "", source_of(document, "gemm_chain")])


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
        return NOT_YET
    lines = [
        table_row(["µs, as recorded in", *HOST.values()]),
        table_row(["---", *["--:"] * len(HOST)]),
    ]
    for line in found:
        cells = (shown(line[key]) if key in line else "–" for key in HOST)
        lines.append(table_row([f"`benchmarks/{line['record']}.json`", *cells]))
    return "\n".join(lines)


TABLES: Mapping[str, Callable[[Json], str]] = {
    "products": partial(products, record="gemm"),
    "products of other formats": partial(products, record="gemm_formats"),
    "products switched": switches,
    "products of a layer": layer,
    "products on the host": host,
}
