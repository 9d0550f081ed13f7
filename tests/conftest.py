"""What tests of several folders need, and what they do where it is missing."""

import os
import random
import signal
import sys
from contextlib import suppress
from operator import attrgetter
from pathlib import Path

import pytest

from billfish.checkpoint.locate import DEMO_MODEL, locate
from billfish.errors import CheckpointError

# The first compiled step of a machine takes seconds to compile: tests of it turn it on.
os.environ.setdefault("BILLFISH_CPU_NATIVE", "0")

# A shell starts background jobs with Ctrl-C ignored, and what they start inherits that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

os.environ["HF_HUB_OFFLINE"] = "1"
# Servers of tests are on this machine, whatever proxy it uses for others.
os.environ["NO_PROXY"] = os.environ["no_proxy"] = "127.0.0.1,localhost"

# The same examples in every run; how long a machine takes to draw one says nothing about the code.
with suppress(ImportError):
    from hypothesis import HealthCheck, settings

    settings.register_profile(
        "tests", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("tests")

VOCABULARIES = Path(__file__).parents[1] / ".cache" / "vocabs"


@pytest.fixture(autouse=True)
def seeded() -> None:
    """What a test draws without a generator of its own does not depend on the tests before it."""
    random.seed(0)
    for name, seed in (("numpy", "random.seed"), ("torch", "manual_seed")):
        if module := sys.modules.get(name):
            attrgetter(seed)(module)(0)


def lacking(what: str) -> None:
    """Skip for want of something, except where nothing may be wanting."""
    if os.environ.get("CI"):
        pytest.fail(f"CI must have it: {what}")
    pytest.skip(what)


@pytest.fixture(scope="session")
def model_path() -> Path:
    """The demo model's GGUF file."""
    try:
        return locate(DEMO_MODEL)
    except CheckpointError as error:
        lacking(str(error))
        raise


def vocabulary_path(name: str) -> Path:
    """A vocabulary with expected token ids; see tests/fetch_vocabularies.py."""
    path = VOCABULARIES / name
    if not path.exists():
        lacking(f"{name} is not in .cache/vocabs: run `make test` where a package index is reached")
    return path


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that load the demo model are marked by the fixtures they use. Files that take a minute
    run first: processes that share the tests then end at about the same time."""
    items.sort(key=lambda item: not item.path.name.endswith("_triton.py"))
    for item in items:
        if "model_path" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.model)
