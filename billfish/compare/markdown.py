"""What tables of the documentation are made of: rows, and where their figures are from."""

from collections.abc import Iterable
from typing import Any


def table_row(cells: Iterable[str]) -> str:
    # A bar would end a cell, and stars in a formula would be read as emphasis.
    escaped = (
        cell.replace("|", "\\|").replace(" * ", " \\* ").strip() if cell.strip("-:") else cell
        for cell in cells
    )
    return f"| {' | '.join(escaped)} |"


def source_of(document: dict[str, Any], name: str) -> str:
    """Where figures come from: the file, device, date, commit and versions."""
    record = document["records"].get(name)
    if record is None:
        return f"From `benchmarks/{name}.json`, which is not recorded yet."
    versions = ", ".join(f"{key} {value}" for key, value in record["versions"].items())
    return (
        f"From `benchmarks/{name}.json`: {record['device']}, {record['date']}, "
        f"commit {commits_of(record)}; {versions}."
    )


def devices_of(records: Iterable[dict[str, Any]]) -> str:
    """Where and when they were taken: "one GPU, 2026-01-01 and 2026-01-02; another, ..."."""
    dates: dict[str, set[str]] = {}
    for record in records:
        dates.setdefault(record["device"], set()).add(record["date"])
    return "; ".join(f"{one}, {' and '.join(sorted(days))}" for one, days in sorted(dates.items()))


def commits_of(record: dict[str, Any]) -> str:
    """The commit that was measured; rows kept from before it name their own."""
    commit = (record["commit"] or "unknown")[:12]
    earlier = [
        f"{rows:.0f} row{'s' if rows > 1 else ''} of {one[:12]}"
        for one, rows in record.get("earlier", {}).items()
    ]
    return f"{commit} ({', '.join(earlier)})" if earlier else commit
