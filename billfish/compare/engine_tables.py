"""The tables of docs/gpu_engine.md: a whole model on a GPU, beside vLLM's recorded figures."""

import json
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from billfish.compare.figures import shown
from billfish.compare.records import Records, Row

Json = dict[str, Any]
NOT_YET = "Not measured yet."
VLLM = "vLLM, INT4, recorded"
PARTS = ("qkv", "attention", "o", "gate_up", "down", "head", "norm", "rotate and write", "sampling",
         "inputs", "gaps", "step")  # fmt: skip
"""Of a step, in the order in which the table shows them."""


def summary(records: Records) -> Json | None:
    """What the tables show, of the rows of engine_gpu, engine_vllm and step.

    decode, prefill: milliseconds by line ("billfish", ...) and case ("32" or "32, 8192 in"), the
    better of vLLM's INT4 kernels. sampling: by options and batch. starts: seconds, and those of
    their phases. many: output tokens/s of requests that come at once. many_steps: where the
    time of the fastest run goes, what takes most of it first.
    """
    ours, theirs = records.get("engine_gpu"), records.get("engine_vllm")
    if ours is None:
        return None
    rows = [*ours.rows, *(theirs.rows if theirs else [])]
    greedy = [row for row in rows if "sampling" not in row and _line_of(row)]
    at_once = [row for row in greedy if row["measure"] == "output_tok_s"]
    many = {_with_seats(row): row["value"] for row in at_once}
    told = [row for row in at_once if _line_of(row) == "billfish" and "steps" in row]
    steps = max(told, key=lambda row: row["value"])["steps"] if told else []
    return {
        "decode": _by_case(r for r in greedy if r["measure"] == "tpot_ms"),
        "prefill": _by_case(r for r in greedy if r["measure"] == "prefill_ms"),
        "sampling": [
            {"options": row["sampling"], "batch": row["batch"], "ms": row["value"]}
            for row in ours.rows
            if "sampling" in row
        ],
        "starts": [
            {"kind": row.get("compiled", row.get("cache", "cold")), "seconds": row["value"],
             "phases": row.get("phases", {}), "commit": row.get("commit")}
            for row in ours.rows
            if row["measure"] == "start_s"
        ],
        "many": many,
        "many_steps": sorted(steps, key=lambda step: -step["seconds"]),
    }  # fmt: skip


def _line_of(row: Row) -> str | None:
    """Which line of a table a row belongs to; None for one that no table shows."""
    if row["impl"] == "billfish":
        if row.get("head") in ("int8", "int4"):
            return f"with the head in {row['head'].upper()}"
        return "billfish, bfloat16 weights" if row.get("weights") == "dense" else "billfish"
    return VLLM if row["impl"] in ("vllm-machete", "vllm-marlin") else None


def _with_seats(row: Row) -> str:
    """The line of many requests at once; how many are served at a time is a choice."""
    seats = f", up to {row['seats']:,} at a time" if "seats" in row else ""
    return f"{_line_of(row)}{seats}"


def _by_case(rows: Iterable[Row]) -> dict[str, dict[str, float]]:
    """The least value by line and case."""
    found: dict[str, dict[str, float]] = {}
    for row in sorted(rows, key=lambda row: (row["prompt"] != 512, row["batch"])):
        decodes = row["measure"] == "tpot_ms"
        case = str(row["batch"]) if decodes else f"{row['batch']} x {row['prompt']}"
        if decodes and row["prompt"] != 512:
            case += f", {row['prompt']} in"
        line = found.setdefault(str(_line_of(row)), {})
        line[case] = min(row["value"], line.get(case, row["value"]))
    return found


def times(document: Json, kind: str) -> str:
    """Milliseconds by case; kind: "decode" or "prefill"."""
    found = document["charts"]["engine"]
    lines = (found or {}).get(kind, {})
    if "billfish" not in lines:
        return NOT_YET
    cases = list(lines["billfish"])
    title = "time per output token, ms" if kind == "decode" else "prefill, ms"
    rows = [[title, *cases], ["---", *["--:"] * len(cases)]]
    for name, values in lines.items():
        rows.append([name, *(shown(values[c]) if c in values else "–" for c in cases)])
    if VLLM in lines:
        ours, theirs = lines["billfish"], lines[VLLM]
        ratios = [f"{theirs[c] / ours[c]:.2f}x" if c in theirs else "–" for c in cases]
        rows.append(["vLLM's time over ours", *ratios])
    return _table(rows)


def sampling(document: Json) -> str:
    """Milliseconds a token of requests that draw their tokens, by batch."""
    found = (document["charts"]["engine"] or {}).get("sampling")
    if not found:
        return NOT_YET
    batches = sorted({row["batch"] for row in found})
    rows = [["options", *(f"batch {batch}" for batch in batches)], ["---", *["--:"] * len(batches)]]
    for options in dict.fromkeys(row["options"] for row in found):
        values = {row["batch"]: row["ms"] for row in found if row["options"] == options}
        said = ", ".join(f"{key} {value}" for key, value in json.loads(options).items())
        rows.append([said, *(shown(values[b]) if b in values else "–" for b in batches)])
    return _table(rows)


def starts(document: Json) -> str:
    """Seconds from the start of a process to its first token, by phase."""
    found = (document["charts"]["engine"] or {}).get("starts")
    if not found:
        return NOT_YET
    names = list(dict.fromkeys(name for start in found for name in start["phases"]))
    rows = [["start, s", "in all", *names], ["---", *["--:"] * (1 + len(names))]]
    for start in found:
        phases = [shown(start["phases"][n]) if n in start["phases"] else "–" for n in names]
        kind = {"cold": "first", "warm": "again"}.get(start["kind"], start["kind"])
        kind += f", commit {start['commit'][:7]}" if start["commit"] else ""
        rows.append([kind, shown(start["seconds"]), *phases])
    return _table(rows)


def many(document: Json) -> str:
    """Output tokens a second of many requests at once."""
    found = (document["charts"]["engine"] or {}).get("many")
    if not found or all(name == VLLM for name in found):
        return NOT_YET
    rows = [["1000 requests at once", "output tokens/s"], ["---", "--:"]]
    rows += [[name, shown(value)] for name, value in found.items()]
    return _table(rows)


def many_steps(document: Json) -> str:
    """Where the time of many requests at once goes, by kind of step."""
    found = (document["charts"]["engine"] or {}).get("many_steps")
    if not found:
        return NOT_YET
    rows = [["steps of 1000 requests at once", "steps", "tokens", "seconds", "the engine waited"],
            ["---", *["--:"] * 4]]  # fmt: skip
    for step in found:
        seconds = [f"{step[key]:.2f}" for key in ("seconds", "waited")]
        rows.append([step["kind"], f"{step['steps']:,}", f"{step['tokens']:,}", *seconds])
    return _table(rows)


def step_rows(records: Records) -> Json | None:
    """Microseconds and floors of the parts of a step, by batch: of records.step."""
    record = records.get("step")
    if record is None:
        return None
    found: dict[str, dict[str, Json]] = {}
    for row in record.rows:
        values = {"us": row["us"], "floor_us": row.get("floor_us")}
        found.setdefault(str(row["batch"]), {})[row["part"]] = values
    return found


def steps(document: Json) -> str:
    """Microseconds of each part of a step, beside its floor, by batch."""
    found = document["charts"]["engine_step"]
    if not found:
        return NOT_YET
    rows = [["part", *(cell for b in found for cell in (f"batch {b}", "floor"))]]
    rows.append(["---", *["--:"] * (2 * len(found))])
    for part in PARTS:
        if not any(part in parts for parts in found.values()):
            continue
        cells = []
        for parts in found.values():
            values = parts.get(part, {})
            for key in ("us", "floor_us"):
                value = values.get(key)
                cells.append("–" if value is None else f"{value:,.0f}")
        rows.append([part.replace("_", " and "), *cells])
    return _table(rows)


def agreement(document: Json) -> str:
    """Greedy tokens and log-probabilities of the demo model beside those in float32."""
    found = document["charts"]["agreement"]
    if not found:
        return NOT_YET
    rows = [["activations and KV", "same best token", "log-probabilities off by, on average",
             "at most", "same texts"], ["---", *["--:"] * 4]]  # fmt: skip
    for row in found:
        rows.append([
            row["dtype"], f"{row['same_best']} of {row['tokens']}", f"{row['logprob_mean']:.4f}",
            f"{row['logprob_max']:.4f}", f"{row['same_texts']} of {row['texts']}",
        ])  # fmt: skip
    return _table(rows)


def _table(rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


TABLES: Mapping[str, tuple[Callable[[Json], str], str | None]] = {
    "engine decode": (partial(times, kind="decode"), "engine_gpu"),
    "engine prefill": (partial(times, kind="prefill"), None),
    "engine many": (many, None),
    "engine many steps": (many_steps, None),
    "engine starts": (starts, None),
    "engine sampling": (sampling, None),
    "engine step": (steps, "step"),
    "engine agreement": (agreement, "engine_agreement"),
}
"""By name: what makes it, and the record that is named under it; others are of the same."""
