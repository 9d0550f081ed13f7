"""The tables of docs/paged_attention.md: kernels beside their peers, and without a technique."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from billfish.compare import records
from billfish.compare.figures import shown
from billfish.compare.records import Row

NOT_YET = "Not measured yet."
PEERS = ("fa3", "paged_attention_v2")
DECODE = {
    "billfish": "billfish", "portable": "portable", "fa3": "FA3", "paged_attention_v2": "v2",
    "contiguous": "cuDNN",
}  # fmt: skip
PREFILL = {
    "billfish": "billfish", "planned": "with planning", "two calls": "two calls",
    "portable": "portable", "fa3": "FA3", "contiguous": "cuDNN",
}  # fmt: skip
WRITES = {
    ("write", "billfish"): "write", ("write", "plain"): "plain copy",
    ("rotate and write", "billfish"): "rotate and write",
    ("rotate and write", "separate"): "separately", ("rotate and write", "plain"): "plain copy",
}  # fmt: skip
MOVES = {
    ("copy", "billfish"): "copy", ("copy", "one by one"): "one by one",
    ("copy", "4 bytes a thread"): "4-byte accesses", ("copy", "plain"): "plain copy",
    ("swap", "billfish out"): "swap out", ("swap", "plain out"): "plain",
    ("swap", "billfish in"): "swap in", ("swap", "plain in"): "plain",
}  # fmt: skip
"""Columns: titles by implementation, and by mode and implementation, as records name them."""


def beside_peers(heads: str, modes: Sequence[str], columns: Mapping[str, str]) -> str:
    """Microseconds, a line a case, and how many times ours the peers' are. heads: query/KV."""
    times: dict[str, dict[str, float]] = {}
    for row in _rows("attention"):
        if f"{row['heads_q']}/{row['heads_kv']}" == heads and row["mode"] in modes:
            times.setdefault(f"{row['mode']} {row['case']}", {})[row["impl"]] = row["us"]
    used = {
        impl: title for impl, title in columns.items() if any(impl in t for t in times.values())
    }
    peers = [impl for impl in PEERS if impl in used]
    lines = []
    for case, by_impl in times.items():
        ours = by_impl["billfish"]
        ratios = [shown(by_impl[peer] / ours, "x") if peer in by_impl else "–" for peer in peers]
        lines.append([case, *(_time(by_impl.get(impl)) for impl in used), *ratios])
    titles = [*used.values(), *(f"{used[peer]} / billfish" for peer in peers)]
    return _table([f"{heads} heads", *titles], lines)


def movement(columns: Mapping[tuple[str, str], str], of: str) -> str:
    """Microseconds of what moves KV, by size. of: what sizes count."""
    times: dict[int, dict[tuple[str, str], float]] = {}
    for row in _rows("attention_movement"):
        if (row["mode"], row["impl"]) in columns:
            times.setdefault(row["batch"], {})[row["mode"], row["impl"]] = row["us"]
    lines = [
        [shown(size), *(_time(found.get(key)) for key in columns)] for size, found in times.items()
    ]
    return _table([of, *columns.values()], lines)


def switches(kernel: str) -> str:
    """Microseconds of a kernel with each technique switched off."""
    rows = [row for row in _rows("ablation_attention") if row["kernel"] == kernel]
    cases = list(dict.fromkeys(row["case"] for row in rows))
    times: dict[str, dict[str, float]] = {}
    for row in rows:
        name = "nothing" if row["technique"] == "all" else row["technique"]
        times.setdefault(name, {})[row["case"]] = row["us"]
    lines = [[name, *(_time(found.get(c)) for c in cases)] for name, found in times.items()]
    return _table(["switched off", *cases], lines)


def _rows(record: str) -> list[Row]:
    found = records.recorded().get(record)
    return found.rows if found else []


def _time(us: float | None) -> str:
    return "–" if us is None else shown(us)


def _table(titles: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    if not lines:
        return NOT_YET
    rule = ["---", *["--:"] * (len(titles) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (titles, rule, *lines))


TABLES: Mapping[str, tuple[Callable[[], str], str]] = {
    **{
        f"attention {name} {heads.replace('/', ' ')}": (
            partial(beside_peers, heads, modes, columns), "attention",
        )
        for name, modes, columns in (
            ("decode", ("decode", "ragged"), DECODE),
            ("prefill", ("prefill", "chunk", "mixed"), PREFILL),
        )
        for heads in ("32/8", "64/8", "32/32")
    },
    "attention writes": (partial(movement, WRITES, "tokens"), "attention_movement"),
    "attention moves": (partial(movement, MOVES, "blocks"), "attention_movement"),
    "attention decode switched": (partial(switches, "hopper_decode"), "ablation_attention"),
    "attention prefill switched": (partial(switches, "hopper_prefill"), "ablation_attention"),
}  # fmt: skip
"""What makes each table, and the record that it is of."""
