"""Every feature through OpenAI's own client, sync and async, whole and streamed, in front of an
engine in its own process: four ways to the same answer."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any, Literal

import openai
import pydantic
import pytest

from tests.server.conftest import openai_client
from tests.server.live import LiveServer, live
from tests.server.test_real_model import BAD_FORMS, TOOLS, ready

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Name a city."}]},
]
SIZE = {
    "type": "object",
    "properties": {"size": {"enum": ["small", "large"]}},
    "required": ["size"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "city", "schema": SIZE, "strict": True}}
NAMED = {"type": "function", "function": {"name": "add"}}
STRICT = [{**tool, "function": {**tool["function"], "strict": True}} for tool in TOOLS]

CHATS: dict[str, dict[str, Any]] = {
    "plain": {},
    "samples": {"n": 3, "temperature": 1.0, "seed": 5},
    "nucleus": {"temperature": 0.7, "top_p": 0.5, "seed": 7},
    "log-probabilities": {"logprobs": True, "top_logprobs": 3},
    "stop": {"stop": ["a", "e", "o", "i"]},
    "bias": {"logit_bias": {str(token): -100 for token in range(40, 90)}},
    "penalties": {"presence_penalty": 1.5, "frequency_penalty": -0.5},
    "length": {"max_tokens": None, "max_completion_tokens": 3},
    "json object": {"response_format": {"type": "json_object"}, "max_tokens": 20},
    "json schema": {"response_format": FORM, "max_tokens": 200},
    "text": {"response_format": {"type": "text"}},
    "tools": {"tools": TOOLS},
    "no tools": {"tools": TOOLS, "tool_choice": "none"},
    "a tool": {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False,
               "max_tokens": 200},
    "this tool": {"tools": TOOLS, "tool_choice": NAMED, "max_tokens": 200},
    "strict tools": {"tools": STRICT},
    "a form or tools": {"tools": TOOLS, "response_format": FORM, "max_tokens": 30},
    "regex": {"extra_body": {"structured_outputs": {"regex": "[a-c]{3}-[0-9]"}}},
    "choice": {"extra_body": {"structured_outputs": {"choice": ["yes", "no"]}}},
    "grammar": {"extra_body": {"structured_outputs": {"grammar": 'start: "<" /[a-z]{1,5}/ ">"'}}},
    "of others": {"extra_body": {"top_k": 1, "min_p": 0.1, "repetition_penalty": 1.2,
                                 "priority": 3, "cache_salt": "mine", "min_tokens": 2}},
}  # fmt: skip

COMPLETIONS: dict[str, dict[str, Any]] = {
    "a text": {"prompt": "Once upon"},
    "texts": {"prompt": ["Once upon", "There was"]},
    "token ids": {"prompt": [[70, 71, 72], [80]]},
    "samples": {"prompt": "Once", "n": 2, "temperature": 1.0, "seed": 3},
    "echo": {"prompt": "Once upon", "echo": True, "logprobs": 2},
    "scores": {"prompt": ["Once upon", "There"], "echo": True, "logprobs": 1, "max_tokens": 0},
    "stop": {"prompt": "Once", "stop": ["a", "e"], "max_tokens": 12},
    "schema": {"prompt": "x", "extra_body": {"response_format": FORM}, "max_tokens": 200},
}


@pytest.fixture(scope="module")
def server(tiny_path) -> Iterator[LiveServer]:
    with ready(tiny_path) as running:
        yield running


def entry(made: dict[int, dict[str, Any]], choice: Any) -> dict[str, Any]:
    empty = {"text": "", "calls": [], "tokens": [], "finish": None}
    return made.setdefault(choice.index, empty)


def add(made: dict[int, dict[str, Any]], choice: Any) -> None:
    """A choice of an answer, or of a part of one, to what is known of it."""
    found = entry(made, choice)
    message = getattr(choice, "message", None) or getattr(choice, "delta", None)
    found["text"] += (choice.text if message is None else message.content) or ""
    for call in (message and message.tool_calls) or ():
        if call.id:
            found["calls"].append([call.function.name, ""])
        found["calls"][-1][1] += call.function.arguments
    if message is None and choice.logprobs:
        found["tokens"] += zip(choice.logprobs.tokens, choice.logprobs.text_offset, strict=True)
    elif choice.logprobs:
        found["tokens"] += [
            (each.token, len(each.top_logprobs)) for each in choice.logprobs.content
        ]
    found["finish"] = choice.finish_reason or found["finish"]


def summary(parts: list[Any]) -> tuple[list[dict[str, Any]], tuple[int, int, int]]:
    made: dict[int, dict[str, Any]] = {}
    for part in parts:
        for choice in part.choices:
            add(made, choice)
    usage = parts[-1].usage
    numbers = (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens)
    return [made[index] for index in sorted(made)], numbers


async def listed(stream: AsyncIterator[Any]) -> list[Any]:
    return [part async for part in stream]


async def four_ways(server: LiveServer, path: str, body: dict[str, Any]) -> list[Any]:
    body = {"model": "served", "max_tokens": 8, "temperature": 0, **body}
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
    url = f"{server.url}/v1"
    with openai_client(server) as client:
        api = client.chat.completions if path == "chat" else client.completions
        found = [summary([api.create(**body)]), summary(list(api.create(**streamed)))]
    async with openai.AsyncOpenAI(base_url=url, api_key="-", max_retries=0) as later:
        api = later.chat.completions if path == "chat" else later.completions
        found.append(summary([await api.create(**body)]))
        found.append(summary(await listed(await api.create(**streamed))))
    return found


@pytest.mark.parametrize("feature", CHATS)
def test_chats(server, feature):
    body = {"messages": MESSAGES, **CHATS[feature]}
    first, *others = asyncio.run(four_ways(server, "chat", body))
    assert others == [first] * 3
    choices, (prompt, completion, total) = first
    assert len(choices) == CHATS[feature].get("n", 1)
    assert total == prompt + completion
    assert all(choice["text"] or choice["calls"] or choice["finish"] for choice in choices)


@pytest.mark.parametrize("feature", COMPLETIONS)
def test_completions(server, feature):
    first, *others = asyncio.run(four_ways(server, "text", COMPLETIONS[feature]))
    assert others == [first] * 3
    prompts = COMPLETIONS[feature]["prompt"]
    several = len(prompts) if isinstance(prompts, list) else 1
    assert len(first[0]) == several * COMPLETIONS[feature].get("n", 1)


class City(pydantic.BaseModel):
    name: Literal["Oslo", "Bergen"]
    coast: bool


class Look(pydantic.BaseModel):
    """Looks a city up."""

    city: Literal["Oslo", "Bergen"]


def test_answers_that_the_client_parses(server):
    """Forms and tools given as pydantic models come back as such."""
    asked = {"model": "served", "messages": MESSAGES, "max_tokens": 200, "temperature": 0}
    tool = {"tools": [openai.pydantic_function_tool(Look)], "tool_choice": "required",
            "parallel_tool_calls": False}  # fmt: skip

    async def later() -> list[Any]:
        url = f"{server.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="-", max_retries=0) as client:
            form = await client.chat.completions.parse(**asked, response_format=City)
            call = await client.chat.completions.parse(**asked, **tool)
            async with client.chat.completions.stream(**asked, response_format=City) as stream:
                final = await stream.get_final_completion()
            return [form, call, final]

    with openai_client(server) as client:
        form = client.chat.completions.parse(**asked, response_format=City)
        call = client.chat.completions.parse(**asked, **tool)
        with client.chat.completions.stream(**asked, response_format=City) as stream:
            now = [form, call, stream.get_final_completion()]
    for first, look, last in (now, asyncio.run(later())):
        assert isinstance(first.choices[0].message.parsed, City)
        assert isinstance(last.choices[0].message.parsed, City)
        (made,) = look.choices[0].message.tool_calls
        assert isinstance(made.function.parsed_arguments, Look)


def test_errors_are_the_clients_own_types(server):
    asked = {"messages": MESSAGES, "max_tokens": 2}
    with openai_client(server) as client:
        create = client.chat.completions.create
        with pytest.raises(openai.NotFoundError):
            create(model="nobody", **asked)
        for change, _ in BAD_FORMS:
            with pytest.raises(openai.BadRequestError):
                create(model="served", **asked, extra_body=change)
        with pytest.raises(openai.NotFoundError):
            client.embeddings.create(model="served", input="x")
        assert [model.id for model in client.models.list()] == ["served", "alias"]
        assert client.models.retrieve("alias").id == "alias"
    with (
        live(api_keys=("a-key-for-tests",)) as locked,
        openai_client(locked, "wrong") as client,
        pytest.raises(openai.AuthenticationError),
    ):
        client.models.list()


def test_nothing_is_left_running(server):
    server.wait_idle()
