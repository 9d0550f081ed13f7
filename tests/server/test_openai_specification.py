"""Requests made from OpenAI's own specification: each is answered as it says, or refused by the
name of a field, and never an error of the server."""

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode

from billfish.server.fake_engine import FakeEngine
from tests.server import openai_specification as specification
from tests.server.conftest import chat
from tests.server.live import ONE_REQUEST, PATIENCE, LiveServer, live

BASE: dict[str, dict[str, Any]] = {
    "/chat/completions": chat(),
    "/completions": {"model": "fake", "prompt": "Hi"},
}
TOOLS = {"tools": [{"type": "function", "function": {"name": "f"}}]}
TOGETHER: dict[str, dict[str, Any]] = {
    "top_logprobs": {"logprobs": True},
    "stream_options": {"stream": True},
    "tool_choice": TOOLS,
    "parallel_tool_calls": TOOLS,
}
"""What a field needs beside it."""

NOT_SUPPORTED = {
    "/chat/completions": {
        "audio", "function_call", "functions", "metadata", "prediction", "prompt_cache_key",
        "prompt_cache_retention", "reasoning_effort", "safety_identifier", "verbosity",
        "web_search_options",
    },
    "/completions": {"best_of", "suffix"},
}  # fmt: skip
TOO_LONG = "context_length_exceeded"
FIELDS = [(path, field) for path in BASE for field in sorted(specification.fields(path))]


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live(lambda: FakeEngine(max_model_len=1024)) as running:
        yield running


@pytest.fixture(scope="module")
def http(server: LiveServer) -> Iterator[httpx.Client]:
    url = f"{server.url}/v1"
    with httpx.Client(base_url=url, timeout=PATIENCE, limits=ONE_REQUEST) as client:
        yield client


def examples(count: int):
    return settings(
        derandomize=True, max_examples=count, deadline=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip


def check(http: httpx.Client, path: str, body: Any) -> httpx.Response:
    """The answer, which fits the specification whatever it is."""
    content = json.dumps(body).encode()  # with escapes: drawn texts may hold lone surrogates
    answer = http.post(path, content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code < 500, answer.text
    if answer.status_code != 200:
        fits("ErrorResponse", answer.json())
    elif body.get("stream"):
        name = (
            "CreateChatCompletionStreamResponse" if "chat" in path else "CreateCompletionResponse"
        )
        *events, last = [line[6:] for line in answer.text.split("\n\n") if line]
        assert last == "[DONE]"
        for event in map(json.loads, events):
            if "chat" not in path:  # the specification has no other schema for parts of a text
                for choice in event["choices"]:
                    choice["finish_reason"] = choice["finish_reason"] or "length"
                if event.get("usage", ()) is None:
                    del event["usage"]
            fits(name, event)
    else:
        name = "CreateChatCompletionResponse" if "chat" in path else "CreateCompletionResponse"
        fits(name, answer.json())
    return answer


def fits(name: str, body: Any) -> None:
    assert list(specification.errors(name, body)) == []


def refused(answer: httpx.Response, body: dict[str, Any]) -> str:
    """The field of the request that an error names."""
    error = answer.json()["error"]
    assert answer.status_code == (404 if error["code"] == "model_not_found" else 400)
    (name,) = {name for name in body if re.match(re.escape(name) + r"([.\[]|$)", error["param"])}
    assert name in error["message"] or name == "model" or error["code"] == TOO_LONG
    return name


@pytest.mark.parametrize(("path", "field"), FIELDS, ids=lambda each: each.strip("/"))
def test_every_field_is_taken_or_refused_by_its_name(http, path, field):
    """Each field that is supported is taken with some of its values, the others with none."""
    taken = []

    @given(specification.values(path, field))
    @examples(30 if field in ("messages", "tools", "prompt") else 10)
    def call(value):
        body = {**BASE[path], **TOGETHER.get(field, {}), field: value}
        answer = check(http, path, body)
        if answer.status_code != 200:
            too_long = answer.json()["error"]["code"] == TOO_LONG  # names the prompt
            assert refused(answer, body) == field or too_long
        elif value is not None:
            taken.append(value)

    call()
    assert bool(taken) == (field not in NOT_SUPPORTED[path] and field != "model")


@pytest.mark.parametrize("path", BASE)
def test_null_is_no_request_for_what_is_not_supported(http, path):
    body = {**BASE[path], **dict.fromkeys(NOT_SUPPORTED[path])}
    assert check(http, path, body).status_code == 200


@pytest.mark.parametrize("path", BASE)
def test_whole_requests_that_fit(http, path):
    @given(specification.requests(path, GenerationMode.POSITIVE))
    @examples(40)
    def call(body):
        body["model"] = "fake"  # a name made up would be all that is wrong
        answer = check(http, path, body)
        if answer.status_code != 200:
            refused(answer, body)

    call()


@pytest.mark.parametrize("path", BASE)
def test_requests_that_do_not_fit(http, path):
    """Some are taken: what this server allows goes further in places."""

    @given(specification.requests(path, GenerationMode.NEGATIVE))
    @examples(20)
    def call(body):
        check(http, path, body if isinstance(body, dict) else {})

    call()


def test_models(http):
    fits("ListModelsResponse", http.get("/models").json())
    fits("Model", http.get("/models/fake").json())
    missing = http.get("/models/nobody")
    assert missing.status_code == 404
    fits("ErrorResponse", missing.json())


TOOL_ANSWER = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BASE)
def test_answers_that_hold_all_there_is(path, stream):
    """Log-probabilities, several samples, tool calls, usage in a stream."""
    options = {"stream_options": {"include_usage": True}} if stream else {}
    more = {"logprobs": True, "top_logprobs": 3, **TOOLS} if "chat" in path else {
        "logprobs": 3, "echo": True,
    }  # fmt: skip
    body = {**BASE[path], **options, **more, "n": 2, "stream": stream, "max_tokens": 60}
    with (
        live(lambda: FakeEngine(f"Hm. {TOOL_ANSWER}")) as server,
        httpx.Client(base_url=f"{server.url}/v1", timeout=PATIENCE) as http,
    ):
        answer = check(http, path, body)
        assert answer.status_code == 200
        assert ("tool_calls" in answer.text) == ("chat" in path)


def test_a_field_that_nobody_knows_does_not_fit():
    """That the checks above would see one."""
    body = {"id": "x", "object": "model", "created": 1, "owned_by": "x"}
    fits("Model", body)
    assert list(specification.errors("Model", {**body, "more": 1}))
    assert list(specification.errors("Model", {**body, "created": "now"}))


def test_nothing_is_left_running(server):
    server.wait_idle()
