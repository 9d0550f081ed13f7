"""/v1/chat/completions through the real OpenAI client."""

import asyncio
import json

import httpx
import openai
import pytest

from billfish.server.fake_engine import FakeEngine
from tests.server.conftest import chat, openai_client
from tests.server.live import LiveServer, live

REPLY = "Hello! I am a fake model, and this is all I say. 🐟"


def test_a_chat(client):
    answer = client.chat.completions.create(**chat("Hi"))
    (choice,) = answer.choices
    assert choice.message.content == REPLY
    assert choice.message.role == "assistant"
    assert choice.message.tool_calls is None
    assert choice.finish_reason == "stop"
    assert choice.logprobs is None
    assert answer.object == "chat.completion"
    assert answer.model == "fake"
    assert answer.id.startswith("chatcmpl-")
    usage = answer.usage
    assert usage.completion_tokens == len(REPLY.encode()) + 1  # and the token that ended it
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_a_streamed_chat(client):
    chunks = list(client.chat.completions.create(**chat("Hi", stream=True)))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == REPLY
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.choices for chunk in chunks)  # the usage chunk comes only when asked for
    assert all(chunk.usage is None for chunk in chunks)


def test_usage_in_a_stream(client):
    whole = client.chat.completions.create(**chat("Hello there", n=2))
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(client.chat.completions.create(**chat("Hello there", n=2), **options))
    assert chunks[-1].choices == []
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert getattr(chunks[-1].usage, name) == getattr(whole.usage, name)


def test_the_async_client():
    async def main(server: LiveServer) -> None:
        url = f"{server.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="-", max_retries=0) as client:
            tasks = [client.chat.completions.create(**chat(f"Hi {i}")) for i in range(8)]
            for answer in await asyncio.gather(*tasks):
                assert answer.choices[0].message.content == REPLY
            stream = await client.chat.completions.create(**chat("Hi", stream=True))
            parts = [chunk.choices[0].delta.content or "" async for chunk in stream]
            assert "".join(parts) == REPLY

    with live() as server:
        asyncio.run(main(server))


def test_samples_have_their_own_index(client):
    answer = client.chat.completions.create(**chat("Hi", n=3))
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    texts = {0: "", 1: "", 2: ""}
    finished = []
    for chunk in client.chat.completions.create(**chat("Hi", n=3, stream=True)):
        (choice,) = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        if choice.finish_reason:
            finished.append(choice.index)
    assert texts == dict.fromkeys(range(3), REPLY)
    assert sorted(finished) == [0, 1, 2]


def test_log_probabilities_of_a_chat(client):
    options = {"logprobs": True, "top_logprobs": 2, "max_tokens": 60}
    answer = client.chat.completions.create(**chat("Hi", **options))
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens
    assert [entry.token for entry in content[:2]] == ["H", "e"]
    assert all(len(entry.top_logprobs) == 2 for entry in content)
    assert bytes(b for entry in content[:-1] for b in entry.bytes).decode() == REPLY
    fish = next(entry for entry in content if entry.bytes == [0xF0])  # a quarter of the fish
    assert fish.token == "\\xf0"
    chunks = client.chat.completions.create(**chat("Hi", **options, stream=True))
    streamed = [
        entry
        for chunk in chunks
        if chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content
    ]
    assert streamed == content


def test_log_probabilities_without_likeliest_tokens(client):
    answer = client.chat.completions.create(**chat("Hi", logprobs=True, max_tokens=3))
    assert [entry.top_logprobs for entry in answer.choices[0].logprobs.content] == [[], [], []]


def test_stop_strings_and_lengths(client):
    answer = client.chat.completions.create(**chat("Hi", stop=["model", "zzz"]))
    assert answer.choices[0].message.content == "Hello! I am a fake "
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].stop_reason == "model"
    for name in ("max_tokens", "max_completion_tokens"):
        answer = client.chat.completions.create(**chat("Hi", **{name: 5}))
        assert answer.choices[0].message.content == "Hello"
        assert answer.choices[0].finish_reason == "length"


def test_other_options_reach_the_engine(server, client):
    """All of them by the names that clients give them."""
    seen = []
    server.engine.executor.on_step = lambda plan: seen.extend(plan.admitted)
    options = {
        "temperature": 0.5, "top_p": 0.9, "presence_penalty": 1.0, "frequency_penalty": -1.0,
        "seed": 7, "logit_bias": {"5": 2.5, "66": -100}, "stop": "zzz", "max_tokens": 9,
    }  # fmt: skip
    more = {
        "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 2, "ignore_eos": True,
        "stop_token_ids": [3], "bad_words": ["bad"], "include_stop_str_in_output": True,
        "cache_salt": "mine", "priority": 3,
    }  # fmt: skip
    client.chat.completions.create(**chat("Hi", **options), extra_body=more)
    sampling = seen[0].sampling
    for name, value in {**options, **more}.items():
        if name in ("cache_salt", "priority"):
            continue
        expected = {
            "logit_bias": {5: 2.5, 66: -100.0}, "stop": ("zzz",), "stop_token_ids": (3,),
            "bad_words": ("bad",),
        }.get(name, value)  # fmt: skip
        assert getattr(sampling, name) == expected, name
    server.engine.executor.on_step = None


def test_all_roles_and_content_parts(client):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": "d"},
    ]
    tokens = client.post(
        "/../tokenize", body={"messages": messages}, cast_to=httpx.Response
    ).json()["tokens"]
    text = client.post("/../detokenize", body={"tokens": tokens}, cast_to=httpx.Response).json()
    assert text["prompt"] == "system\nBe brief.\nuser\na\nb\nassistant\nc\nuser\nd\nassistant\n"
    assert client.chat.completions.create(model="fake", messages=messages).usage.prompt_tokens == (
        len(tokens)
    )


def test_what_the_client_parses_itself(client):
    """The client's own helpers, which read the answer more strictly."""
    with client.chat.completions.stream(**chat("Hi")) as stream:
        for _ in stream:
            pass
        assert stream.get_final_completion().choices[0].message.content == REPLY


def test_cached_tokens_are_told(server):
    with live(lambda: FakeEngine(block_size=16)) as other, openai_client(other) as client:
        text = "the same words again and again, long enough for some blocks of the cache"
        first = client.chat.completions.create(**chat(text))
        second = client.chat.completions.create(**chat(text))
        assert first.usage.prompt_tokens_details.cached_tokens == 0
        assert second.usage.prompt_tokens_details.cached_tokens >= 64
        salted = client.chat.completions.create(**chat(text), extra_body={"cache_salt": "x"})
        assert salted.usage.prompt_tokens_details.cached_tokens == 0


REFUSED = [
    ({"messages": []}, "messages"),
    ({"messages": "Hi"}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": "x", "name": "Bob"}]}, "messages[0].name"),
    ({"messages": [{"role": "assistant"}]}, "messages[0].content"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"n": True}, "n"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": -1}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": 5, "max_completion_tokens": 5}, "max_tokens"),
    ({"logprobs": 5}, "logprobs"),
    ({"top_logprobs": 5}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop": ["x" * 1025]}, "stop[0]"),
    ({"logit_bias": {"x": 1}}, "logit_bias.x"),
    ({"logit_bias": {"5000": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 101}}, "logit_bias.5"),
    ({"stop_token_ids": [5000]}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
    ({"seed": 2**64}, "seed"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"min_tokens": 9, "max_tokens": 5}, "min_tokens"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"priority": 0.5}, "priority"),
    # Known elsewhere, not here; and not known anywhere.
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"function_call": "auto"}, "function_call"),
    ({"best_of": 2}, "best_of"),
    ({"guided_json": {}}, "guided_json"),
    ({"chat_template": "{{ x }}"}, "chat_template"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    ({"chat_template_kwargs": {"enable_thinking": True}}, "chat_template_kwargs.enable_thinking"),
    ({"audio": {"voice": "x"}}, "audio"),
    ({"modalities": ["audio"]}, "modalities[0]"),
    ({"prediction": {}}, "prediction"),
    ({"web_search_options": {}}, "web_search_options"),
    ({"store": True}, "store"),
    ({"reasoning_effort": "high"}, "reasoning_effort"),
    ({"nonsense": None}, "nonsense"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "param"), REFUSED, ids=lambda value: str(value)[:60])
def test_refused_by_name(http, change, param):
    answer = http.post("/v1/chat/completions", json={**chat(), **change})
    error = answer.json()["error"]
    assert answer.status_code == 400, error
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith(param.split(".")[0].split("[")[0])


def test_a_role_that_there_is_not_is_told_with_those_that_there_are(http):
    answer = http.post("/v1/chat/completions", json=chat(messages=[{"role": "king"}]))
    assert answer.json()["error"]["message"] == (
        "messages[0].role: must be one of 'system', 'developer', 'user', 'assistant', 'tool', "
        "got 'king'"
    )


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"messages": ["x"]}, "messages[0]: should be an object"),
        ({"messages": [{"role": "user", "content": 5}]},
         "messages[0].content: should be a string or a list"),
        ({"messages": [{"role": "user", "content": ["x"]}]},
         "messages[0].content[0]: should be an object"),
        ({"messages": "x"}, "messages: should be a valid list"),
        ({"stop": 5}, "stop: should be a string or a list"),
        ({"stop": ["a", 5]}, "stop[1]: should be a valid string"),
        ({"logit_bias": []}, "logit_bias: should be an object"),
        ({"response_format": 5}, "response_format: should be an object"),
    ],
)  # fmt: skip
def test_what_is_of_another_kind_is_told_as_json_calls_it(http, change, says):
    answer = http.post("/v1/chat/completions", json=chat(**change))
    assert answer.json()["error"]["message"] == says


def test_an_unknown_model(http):
    answer = http.post("/v1/chat/completions", json=chat(model="gpt-4"))
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "model_not_found"
    assert http.get("/v1/models/gpt-4").status_code == 404
    assert http.get("/v1/models/fake").json()["id"] == "fake"


def test_a_prompt_that_is_too_long(http):
    for text in ("x" * 4096, "x" * 100_000):
        answer = http.post("/v1/chat/completions", json=chat(text))
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "context_length_exceeded"
        assert answer.json()["error"]["param"] == "messages"


def test_request_ids_go_in_and_out(http):
    answer = http.post("/v1/chat/completions", json=chat(), headers={"X-Request-Id": "my-id_1.2:3"})
    assert answer.headers["x-request-id"] == "my-id_1.2:3"
    assert answer.json()["id"] == "chatcmpl-my-id_1.2:3"
    own = http.get("/version").headers["x-request-id"]
    assert own != http.get("/version").headers["x-request-id"]
    for bad in ("x" * 129, "a b", "a\tb", ""):
        answer = http.get("/version", headers={"X-Request-Id": bad})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "X-Request-Id"


def test_the_same_request_id_at_once(http):
    """Two clients may choose the same; neither may hurt the other."""
    body = chat(stream=True)
    headers = {"X-Request-Id": "same"}
    with (
        http.stream("POST", "/v1/chat/completions", json=body, headers=headers) as first,
        http.stream("POST", "/v1/chat/completions", json=body, headers=headers) as second,
    ):
        texts = [b"".join(each.iter_raw()) for each in (first, second)]
    assert all(text.endswith(b"data: [DONE]\n\n") for text in texts)


def test_events_have_the_form_of_server_sent_events(http):
    with http.stream("POST", "/v1/chat/completions", json=chat(stream=True)) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.headers["cache-control"] == "no-store"
        text = answer.read().decode()
    events = text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    for event in events[:-2]:
        body = json.loads(event.removeprefix("data: "))
        assert "usage" not in body
