"""Records of measurements, as benchmarks/ keeps them: read and checked before anything uses them.

A record is missing, and then what it would have said is not measured yet, or it is whole: one that
is damaged is refused.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import billfish
from billfish.errors import RecordError

Row = dict[str, Any]

_ABLATION = {"family": str, "kernel": str, "technique": str, "setting": str, "case": str,
             "us": float, "bytes": float, "floor_us": float}  # fmt: skip
_MODEL = {"measure": str, "impl": str, "batch": float, "prompt": float, "value": float}

_PRODUCT = {"n": float, "k": float, "m": float, "dtype": str, "impl": str, "group_size": float}


class Signed(float):
    """A number that may be below 0."""


FIELDS: dict[str, dict[str, type]] = {
    "gemm": _PRODUCT,
    "gemm_formats": _PRODUCT,
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
    "step": {"part": str, "batch": float, "us": Signed},  # gaps between kernels may be below 0
    "engine_gpu": _MODEL,
    "engine_vllm": _MODEL,
    "engine_cache": _MODEL,
    "engine_agreement": {"dtype": str, "tokens": float, "same_best": float, "texts": float,
                         "same_texts": float, "logprob_mean": float, "logprob_max": float},
}  # fmt: skip
"""The records that a comparison is made from, and what each of their rows must have."""

OPTIONAL: dict[str, type] = {
    **dict.fromkeys(
        ("model", "weights", "head", "kv_dtype", "sampling", "compiled", "commit"), str
    ),
    **dict.fromkeys(("us", "floor_us", "bytes", "flops", "gbps", "tflops", "rel_err"), float),
    "held_bytes": float,
    **dict.fromkeys(("context", "output", "num_blocks", "reserve_tokens"), float),
    **dict.fromkeys(("requests_s", "mean_request_s"), float),
    "phases": dict,
}
"""Fields that a row of any record may have, and that then are of this kind."""
MAY_BE_NULL = {"rel_err", "reserve_tokens", "commit"}

LEAST, MOST = 1e-20, 1e18
"""Of any number in a record, but for 0: figures made of several stay within what JSON holds."""

MAY_BE_ZERO = {"flops", "prompt", "gbps", "tflops", "floor_us", "rel_err", "output", "same_texts"}


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
    for problem in _head_problems(record.head):
        raise RecordError(source, problem)
    if not isinstance(record.rows, list) or not record.rows:
        raise RecordError(source, "rows is missing, empty or not a list")
    for index, row in enumerate(record.rows):
        if not isinstance(row, dict):
            raise RecordError(source, f"row {index} is not an object")
        there = {key: kind for key, kind in OPTIONAL.items() if _is_there(row, key)}
        for key, kind in {**there, **FIELDS[record.name]}.items():
            problem = _problem(row, key, kind)
            if problem:
                raise RecordError(source, f"row {index}: {key} {problem}")
    return record


def _is_there(row: Row, key: str) -> bool:
    return key in row and not (row[key] is None and key in MAY_BE_NULL)


def _head_problems(head: dict[str, Any]) -> Iterator[str]:
    """What is wrong with the rates and versions of a record's head."""
    if not all(isinstance(version, str | int) for version in head["versions"].values()):
        yield "a version is no text"
    rates = head.get("rates", {})
    if not isinstance(rates, dict) or not isinstance(rates.get("tflops", {}), dict):
        yield "rates is not an object, or its tflops are none"
        return
    numbers: dict[str, Any] = {key: head[key] for key in ("bandwidth", "rate") if key in head}
    numbers |= {key: rate for key, rate in rates.items() if key != "tflops"}
    numbers |= rates.get("tflops", {})
    for key in numbers:
        if problem := _problem(numbers, key, float):
            yield f"{key} {problem}"


def _problem(row: Row, key: str, kind: type) -> str:
    if key not in row:
        return "is missing"
    value = row[key]
    if kind is str:
        return "" if isinstance(value, str) else "is not a string"
    if kind is dict:
        numbers = isinstance(value, dict) and not any(_problem(value, k, Signed) for k in value)
        return "" if numbers else "is not an object of numbers"
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        return "is not a number"
    if kind is not Signed and (value < 0 or (value == 0 and key not in MAY_BE_ZERO)):
        return f"is {value:g}, which cannot be"
    if value and not LEAST <= abs(value) <= MOST:
        return f"is not within {LEAST:g} to {MOST:g}"
    return ""
