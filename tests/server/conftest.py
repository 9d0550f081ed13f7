"""A server over the fake engine, shared by the tests of a file, and real OpenAI clients of it."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from tests.e2e import tiny_gguf
from tests.server.live import ONE_REQUEST, PATIENCE, LiveServer, live


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live() as running:
        yield running


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai_client(server) as client:
        yield client


@pytest.fixture(scope="module")
def http(server: LiveServer) -> httpx.Client:
    return server.http


@pytest.fixture(scope="module")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of random weights: whatever it writes, it writes fast."""
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    # A template that takes tools, and is short: a token is a byte here.
    return tiny_gguf.write(
        path, template="{% if tools %}<tool_call>{% endif %}" + tiny_gguf.TEMPLATE
    )


def openai_client(server: LiveServer, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=PATIENCE,
        http_client=openai.DefaultHttpxClient(limits=ONE_REQUEST),
    )  # fmt: skip


def chat(text: str = "Hi", **options: object) -> dict:
    """The body of a chat request."""
    return {"model": "fake", "messages": [{"role": "user", "content": text}], **options}
