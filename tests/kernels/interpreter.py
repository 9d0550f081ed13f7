"""Runs a module of tests with Triton's interpreter, which needs no GPU."""

import os
import subprocess
import sys
from pathlib import Path


def run_in_interpreter(module: str) -> None:
    """module: the name of a file in this folder whose tests interpret kernels, all of which pass.

    In a process of its own, for a process either interprets kernels or compiles them.
    """
    path = Path(__file__).with_name(module)
    # numpy, which the interpreter computes with, warns of every infinity.
    options = ["-q", "-x", "-p", "no:cacheprovider", "-o", "filterwarnings=ignore"]
    command = [sys.executable, "-m", "pytest", *options, str(path)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    for name in ("PYTEST_XDIST_WORKER", "PYTEST_ADDOPTS"):
        environment.pop(name, None)
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout
