"""What every recorded result says of where it comes from: device, date, commit, versions."""

import datetime
import json
import platform
import subprocess
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch


def environment(command: str, packages: Sequence[str] = ()) -> dict[str, Any]:
    """The head of a file in benchmarks/. packages: those of peers, whose versions matter too."""
    commit = _output("git", "rev-parse", "HEAD")
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("triton", *packages):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    if driver:
        versions["driver"] = driver.splitlines()[0]
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else _processor(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": commit or None,
        "versions": versions,
        "command": command,
    }


def write(path: str, head: dict[str, Any], rows: Sequence[dict[str, Any]]) -> None:
    """One row a line, so that a change of one figure is a change of one line."""
    text = json.dumps({**head, "rows": []}, indent=1)
    lines = ",\n".join("  " + json.dumps(row) for row in rows)
    Path(path).write_text(text.replace('"rows": []', f'"rows": [\n{lines}\n ]') + "\n")


def _processor() -> str:
    names = [
        line.partition(":")[2].strip()
        for line in _output("cat", "/proc/cpuinfo").splitlines()
        if line.startswith("model name")
    ]
    name = names[0] if names else platform.processor() or platform.machine()
    return f"{name}, {len(names) or '?'} cores, {torch.backends.cpu.get_cpu_capability()}"


def _output(*command: str) -> str:
    try:
        run = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return run.stdout.strip() if run.returncode == 0 else ""
