"""The kernels of products and of attention, compiled by a later release of Triton as well.

In processes of their own: one process has one Triton. The release is in `.cache`, where `make test`
puts it.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

RELEASE = "3.7.1"
ROOT = Path(__file__).parents[2]
TRITON = ROOT / ".cache" / f"triton-{RELEASE}"

if not (TRITON / ".done").exists():
    pytest.skip(
        f"Triton {RELEASE} is not in .cache: run `make test` where a package index is reached",
        allow_module_level=True,
    )


def run(*arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(TRITON), str(ROOT)))}
    for name in ("PYTEST_XDIST_WORKER", "PYTEST_ADDOPTS"):
        environment.pop(name, None)
    done = subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    return done.stdout


def test_release():
    assert run("-c", "import triton; print(triton.__version__)").strip() == RELEASE


@pytest.mark.timeout(2400)  # two minutes of a processor in all
@pytest.mark.parametrize(
    ("family", "tests"),
    [
        ("marlin", "test_hopper_kernel"), ("marlin", "not test_hopper_kernel"),
        ("paged_attention", "test"),
    ],
)  # fmt: skip
def test_every_kernel_compiles(family, tests):
    """The same tests as with the installed release, and the same look at the machine code; of
    products, each configuration with one dtype."""
    path = Path(__file__).with_name(f"test_{family}_compile.py")
    said = run("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", tests, str(path))
    assert " passed" in said
    assert "skipped" not in said
