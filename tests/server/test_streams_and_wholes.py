"""What is streamed is what comes whole, byte for byte, and tokens add up."""

import json
import re
from collections.abc import Iterator

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from billfish.server.fake_engine import FakeEngine
from tests.server.conftest import chat
from tests.server.live import LiveServer, live

MARK = "Reply with: "


def echo(prompt: str) -> str:
    """The model repeats what the prompt tells it to."""
    return prompt.partition(MARK)[2].removesuffix("assistant\n").removesuffix("\n")


@pytest.fixture(scope="module")
def parrot() -> Iterator[LiveServer]:
    with live(lambda: FakeEngine(echo)) as server:
        yield server


@pytest.fixture(scope="module")
def http(parrot: LiveServer) -> httpx.Client:
    return parrot.http


def events(answer: httpx.Response) -> list[dict]:
    lines = [line for line in answer.text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def both(http: httpx.Client, body: dict) -> tuple[dict, list[dict]]:
    """The same request, whole and streamed."""
    whole = http.post("/v1/chat/completions", json=body)
    assert whole.status_code == 200, whole.text
    options = {"stream": True, "stream_options": {"include_usage": True}}
    return whole.json(), events(http.post("/v1/chat/completions", json={**body, **options}))


def message(chunks: list[dict], index: int = 0) -> dict:
    """What a client makes of the chunks of one choice."""
    made: dict = {"content": None}
    finish = None
    for chunk in chunks:
        for choice in chunk["choices"]:
            if choice["index"] != index:
                continue
            delta = choice["delta"]
            made["role"] = delta.get("role", made.get("role"))
            if delta.get("content"):
                made["content"] = (made["content"] or "") + delta["content"]
            for part in delta.get("tool_calls", ()):
                calls = made.setdefault("tool_calls", [])
                if part["index"] == len(calls):
                    calls.append({"name": part["function"]["name"], "arguments": "", **part})
                calls[part["index"]]["arguments"] += part["function"]["arguments"]
            assert finish is None
            finish = choice["finish_reason"]
    return {**made, "finish_reason": finish}


TEXT = st.lists(
    st.sampled_from(["a", "b", "ab", "STOP", "ST", "OP", " ", "\n", "é", "🐟", "👩\u200d🚀", "漢"])
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=3),
    max_size=12,
).map("".join)


@given(TEXT, st.lists(st.sampled_from(["STOP", "b", "🐟", "\n", "OP"]), max_size=3))
@settings(max_examples=60)
def test_any_text_and_any_stop_strings(http, text, stops):
    whole, chunks = both(http, chat(MARK + text, stop=stops))
    expected = echo(f"{MARK}{text}\n")
    if stops:
        expected = re.split("|".join(map(re.escape, stops)), expected, maxsplit=1)[0]
    (choice,) = whole["choices"]
    streamed = message(chunks)
    assert choice["message"]["content"] == expected
    assert (streamed["content"] or "") == expected
    assert streamed["finish_reason"] == choice["finish_reason"]
    assert chunks[-1]["usage"] | {"prompt_tokens_details": None} == whole["usage"] | {
        "prompt_tokens_details": None
    }
    usage = whole["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


CALL = '<tool_call>\n{"name": "f", "arguments": %s}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


def tool_chat(text: str, **options: object) -> dict:
    return chat(MARK + text, tools=TOOLS, **options)


@given(
    st.lists(TEXT | st.dictionaries(st.text('ab"\\🐟', max_size=3), TEXT, max_size=2), max_size=3),
    st.integers(1, 200),
)
@settings(max_examples=40)
def test_tool_calls_streamed_and_whole(http, parts, most):
    text = "".join(
        part if isinstance(part, str) else CALL % json.dumps(part, ensure_ascii=False)
        for part in parts
    )
    whole, chunks = both(http, tool_chat(text, max_tokens=most))
    (choice,) = whole["choices"]
    streamed = message(chunks)
    assert (streamed["content"] or "") == (choice["message"]["content"] or "")
    calls = choice["message"].get("tool_calls", [])
    assert [(call["name"], call["arguments"]) for call in streamed.get("tool_calls", [])] == [
        (call["function"]["name"], call["function"]["arguments"]) for call in calls
    ]
    assert streamed["finish_reason"] == choice["finish_reason"]
    if choice["finish_reason"] != "length":
        arguments = [part for part in parts if isinstance(part, dict)]
        assert [json.loads(call["function"]["arguments"]) for call in calls] == arguments
        assert choice["finish_reason"] == ("tool_calls" if calls else "stop")


def test_a_tool_call_as_clients_see_it(http):
    text = 'Let me look.\n<tool_call>\n{"name": "f", "arguments": {"a": [1, "x"]}}\n</tool_call>'
    whole, chunks = both(http, tool_chat(text))
    (choice,) = whole["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Let me look."
    (call,) = choice["message"]["tool_calls"]
    assert call["type"] == "function"
    assert call["id"].startswith("call_")
    assert call["function"] == {"name": "f", "arguments": '{"a": [1, "x"]}'}
    first = next(c for c in chunks for d in c["choices"] if d["delta"].get("tool_calls"))
    (part,) = first["choices"][0]["delta"]["tool_calls"]
    assert part["id"].startswith("call_")
    assert part["function"] == {"name": "f", "arguments": ""}
    later = [
        part
        for chunk in chunks
        for choice in chunk["choices"]
        for part in choice["delta"].get("tool_calls", ())
    ][1:]
    assert all(set(part) == {"index", "function"} for part in later)


def test_without_tools_nothing_is_taken_for_a_call(http):
    text = CALL % "{}"
    for more in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        whole, _ = both(http, chat(MARK + text, **more))
        assert whole["choices"][0]["message"]["content"] == text


def test_log_probabilities_and_tools_together(http):
    text = "x" + CALL % '{"a": 1}'
    whole, chunks = both(http, tool_chat(text, logprobs=True))
    content = [
        entry
        for chunk in chunks
        for choice in chunk["choices"]
        if choice["logprobs"]
        for entry in choice["logprobs"]["content"]
    ]
    assert content == whole["choices"][0]["logprobs"]["content"]
    assert len(content) == whole["usage"]["completion_tokens"]


def test_a_conversation_with_tools_goes_back_to_the_model(http):
    messages = [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "call_1",
                    "type": "function",
                    "function": {"name": "f", "arguments": '{"city": "Oslo"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "Rain"},
    ]
    body = {"messages": messages, "tools": TOOLS}
    tokens = http.post("/tokenize", json=body).json()["tokens"]
    text = http.post("/detokenize", json={"tokens": tokens}).json()["prompt"]
    assert '<tool_call>\n{"name": "f", "arguments": {"city": "Oslo"}}\n</tool_call>' in text
    assert "<tool_response>\nRain\n</tool_response>" in text
    assert '"name": "f"' in text.split("Weather?")[0]  # the model is told what there is
    bad = json.loads(json.dumps(messages))
    bad[1]["tool_calls"][0]["function"]["arguments"] = "[1"
    answer = http.post("/v1/chat/completions", json={"model": "fake", "messages": bad})
    assert answer.json()["error"]["param"] == "messages[1].tool_calls[0].function.arguments"


def test_samples_of_a_stream_and_of_a_whole(http):
    whole, chunks = both(http, chat(MARK + "🐟 and 🐠", n=4, max_tokens=6))
    assert len(whole["choices"]) == 4
    for choice in whole["choices"]:
        streamed = message(chunks, choice["index"])
        assert streamed["content"] == choice["message"]["content"]
    assert chunks[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"] == 24
