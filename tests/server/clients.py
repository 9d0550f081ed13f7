"""Runs other people's clients, which `make test` installs in an environment of their own."""

import json
import subprocess
from pathlib import Path
from typing import Any

from tests.conftest import lacking
from tests.server.live import PATIENCE
from tests.server.processes import ROOT

PYTHON = ROOT / ".cache" / "clients" / "bin" / "python"


def run_client(name: str, url: str, **asked: Any) -> Any:
    """What the program of this name in client_programs.py found at the server."""
    if not PYTHON.parents[1].joinpath(".done").exists():
        lacking(".cache/clients is missing: run `make test` where a package index is reached")
    program = Path(__file__).with_name("client_programs.py")
    done = subprocess.run(
        [PYTHON, program, name, url],
        input=json.dumps(asked), text=True, capture_output=True, timeout=5 * PATIENCE, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
