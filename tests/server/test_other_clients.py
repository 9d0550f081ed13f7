"""Clients that others have written, as their users use them."""

from collections.abc import Iterator

import pytest

from billfish.server.fake_engine import FakeEngine
from tests.server.clients import run_client
from tests.server.live import LiveServer, live

REPLY = "Hello! I am a fake model, and this is all I say. 🐟"
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


def reply(prompt: str) -> str:
    if "<tool_response>\nRain" in prompt:
        return "It rains in Oslo."
    if "weather in Oslo" in prompt:
        return CALL
    return '{"city": "Oslo"}' if "as JSON" in prompt else REPLY


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live(lambda: FakeEngine(reply)) as running:
        yield running


def test_langchain(server: LiveServer):
    found = run_client("langchain", server.url)
    assert found["whole"] == found["async"] == found["streamed"] == REPLY
    (usage,) = found["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert found["logprobs"] == usage["output_tokens"]
    for calls in (found["calls"], found["streamed_calls"]):
        ((name, arguments),) = [(call["name"], call["args"]) for call in calls]
        assert (name, arguments) == ("get_weather", {"city": "Oslo"})
    assert found["after"] == "It rains in Oslo."
    assert found["structured"] == {"city": "Oslo"}


def test_llm(server: LiveServer):
    found = run_client("llm", server.url)
    assert found == {"streamed": f"{REPLY}\n", "whole": f"{REPLY}\n"}
