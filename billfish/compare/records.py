"""Records of measurements, as benchmarks/ keeps them: read and checked before anything uses them.

A record is missing, and then what it would have said is not measured yet, or it is whole: one that
is damaged is refused.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import billfish
from billfish.errors import RecordError

Row = dict[str, Any]

_ABLATION = {"family": str, "kernel": str, "technique": str, "setting": str, "case": str,
             "us": float, "bytes": float, "floor_us": float}  # fmt: skip
_MODEL = {"measure": str, "impl": str, "batch": float, "prompt": float, "value": float}

FIELDS: dict[str, dict[str, type]] = {
    "gemm": {"n": float, "k": float, "m": float, "impl": str, "group_size": float},
    "gemm_formats": {"n": float, "k": float, "m": float, "impl": str, "group_size": float},
    "ablation_gemm": _ABLATION,
    "gemm_chain": {"case": str, "technique": str, "us": float, "bytes": float, "floor_us": float},
    "attention": {"mode": str, "case": str, "heads_q": float, "heads_kv": float, "impl": str,
                  "us": float, "gbps": float, "tflops": float},
    "attention_movement": {"mode": str, "batch": float, "impl": str, "us": float},
    "ablation_attention": _ABLATION,
    "general": {"kernel": str, "domain": str, "size": str, "dtype": str, "impl": str,
                "bytes": float, "flops": float, "floor_us": float},
    "ablation_general": {**_ABLATION, "domain": str},
    "tutorial": {"step": str, "size": str, "us": float, "bytes": float, "floor_us": float},
    "step": {"part": str, "batch": float},  # gaps between kernels may be below 0
    "engine_gpu": _MODEL,
    "engine_vllm": _MODEL,
    "engine_cache": _MODEL,
}  # fmt: skip
"""The records that a comparison is made from, and what each of their rows must have."""

MAY_BE_WRONG = ("gemm", "gemm_formats", "general")
"""Records in whose rows a result that came out wrong has no time."""
MAY_BE_ZERO = {"flops", "prompt", "gbps", "tflops", "floor_us"}


@dataclass(frozen=True, slots=True)
class Record:
    """One file of benchmarks/, or rows measured here.

    origin: "recorded" or "measured". head: device, date, commit, versions, command, and what else
    the file says.
    """

    name: str
    origin: str
    head: dict[str, Any]
    rows: list[Row]


Records = dict[str, Record]


def folder() -> Path:
    """Where the recorded results are: inside an installed package, else in its repository.

    Raises RecordError where there is neither.
    """
    package = Path(billfish.__file__).parent
    for place in (package / "benchmarks", package.parent / "benchmarks"):
        if place.is_dir():
            return place
    raise RecordError(str(package / "benchmarks"), "the recorded results are missing")


def recorded(place: Path | None = None) -> Records:
    """All recorded results of a folder that there are. Raises RecordError for a damaged one."""
    place = place or folder()
    paths = ((name, place / f"{name}.json") for name in FIELDS)
    return {name: read(path, name) for name, path in paths if path.exists()}


def read(path: Path, name: str) -> Record:
    """One record. Raises RecordError unless it is whole."""
    content = read_json(path)
    return checked(Record(name, "recorded", content, content.pop("rows", None)), str(path))


def read_json(path: Path) -> dict[str, Any]:
    """An object of JSON from a file. Raises RecordError: no file, no JSON, NaN, no object."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no number of JSON")

    try:
        content = json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)
    except OSError as error:
        raise RecordError(str(path), error.strerror or "it cannot be read") from error
    except (ValueError, RecursionError) as error:
        raise RecordError(str(path), f"not JSON: {error}") from error
    if not isinstance(content, dict):
        raise RecordError(str(path), "not an object of JSON")
    return content


def checked(record: Record, source: str) -> Record:
    """The record, if it is whole. Raises RecordError that names `source`, the row and the field."""
    head: dict[str, type] = {"device": str, "date": str, "command": str, "versions": dict}
    for key, kind in head.items():
        if not isinstance(record.head.get(key), kind):
            raise RecordError(source, f"{key} is missing or not of type {kind.__name__}")
    if not isinstance(record.head.get("commit"), str | None):
        raise RecordError(source, "commit is not a string")
    if not isinstance(record.rows, list) or not record.rows:
        raise RecordError(source, "rows is missing, empty or not a list")
    for index, row in enumerate(record.rows):
        if not isinstance(row, dict):
            raise RecordError(source, f"row {index} is not an object")
        for key, kind in FIELDS[record.name].items():
            problem = _problem(row, key, kind)
            if problem:
                raise RecordError(source, f"row {index}: {key} {problem}")
        if record.name in MAY_BE_WRONG and "us" in row and _problem(row, "us", float):
            raise RecordError(source, f"row {index}: us {_problem(row, 'us', float)}")
    return record


def _problem(row: Row, key: str, kind: type) -> str:
    if key not in row:
        return "is missing"
    value = row[key]
    if kind is str:
        return "" if isinstance(value, str) else "is not a string"
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return "is not a number"
    if value < 0 or (value == 0 and key not in MAY_BE_ZERO):
        return f"is {value:g}, which cannot be"
    return ""
