"""Requests that fit our own OpenAPI description, and many that do not: never a 5xx, and what comes
back is as described."""

import os
from collections.abc import Iterator

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, reject, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.errors import InvalidSchema
from schemathesis.specs.openapi import checks

from billfish.server.fake_engine import FakeEngine
from tests.server.live import LiveServer, live

CHECKS = (
    not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
    checks.negative_data_rejection,
    checks.unsupported_method,
)


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    # A short context: some requests ask for many samples of many prompts without an end.
    with live(lambda: FakeEngine(max_model_len=64)) as running:
        yield running


@pytest.fixture(scope="module")
def description(server: LiveServer):
    return schemathesis.openapi.from_url(f"{server.url}/openapi.json")


EXAMPLES = int(os.environ.get("OPENAPI_EXAMPLES", "20"))
PATHS = {
    "/v1/chat/completions": "POST",
    "/v1/completions": "POST",
    "/tokenize": "POST",
    "/detokenize": "POST",
    "/v1/models": "GET",
    "/v1/models/{name}": "GET",
    "/health": "GET",
    "/metrics": "GET",
    "/engine/state": "GET",
    "/version": "GET",
}


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
@pytest.mark.parametrize("path", PATHS)
def test_every_path(description, path, mode):
    operation = description[path][PATHS[path]]
    try:
        cases = operation.as_strategy(generation_mode=mode)
        call_it(drawable(cases), EXAMPLES if PATHS[path] == "POST" else 3, mode)
    except Unsatisfiable:
        assert mode == GenerationMode.NEGATIVE  # nothing can be wrong with a request without fields


@st.composite
def drawable(draw, cases):
    """Now and then the generator contradicts itself when it makes data that does not fit."""
    try:
        return draw(cases)
    except InvalidSchema:
        reject()


def call_it(cases, examples: int, mode: GenerationMode) -> None:
    @given(cases)
    @settings(
        derandomize=True,
        max_examples=examples,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    def call(case):
        if mode == GenerationMode.POSITIVE and isinstance(case.body, dict):
            case.body["model"] = "fake"  # a name made up would be all that is wrong
        case.call_and_validate(checks=CHECKS, timeout=60)

    call()


def test_nothing_is_left_running(server):
    server.wait_idle()


def test_the_paths_that_are_described(description):
    paths = {operation.ok().path for operation in description.get_all_operations()}
    assert paths == set(PATHS)
