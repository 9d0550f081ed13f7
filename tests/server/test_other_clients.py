"""Clients that others have written, where they are installed."""

import pytest

from tests.server.live import LiveServer

REPLY = "Hello! I am a fake model, and this is all I say. 🐟"


def test_langchain(server: LiveServer):
    chat = pytest.importorskip(
        "langchain_openai", reason="langchain-openai is not installed"
    ).ChatOpenAI(base_url=f"{server.url}/v1", api_key="none", model="fake", max_retries=0)
    assert chat.invoke("Hi").content == REPLY
    assert "".join(chunk.content for chunk in chat.stream("Hi")) == REPLY


def test_llm(server: LiveServer):
    """Simon Willison's `llm`, with the model class that it uses for OpenAI-compatible servers."""
    models = pytest.importorskip("llm.default_plugins.openai_models", reason="llm is not installed")
    model = models.Chat(model_id="fake", api_base=f"{server.url}/v1", model_name="fake")
    model.key = "none"
    for stream in (False, True):
        assert model.prompt("Hi", stream=stream).text() == REPLY
