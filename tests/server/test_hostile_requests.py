"""Bodies that are well-formed and mean harm, or mean nothing."""

import asyncio
import json
import time
from contextlib import suppress

import pytest

from billfish.errors import InvalidRequestError, QueueFullError
from billfish.server import engine_client
from billfish.server.fake_engine import FakeEngine, byte_tokenizer
from billfish.server.messages import LaunchFake
from billfish.server.offload import LARGE
from billfish.server.prompts import encode_chat
from billfish.server.schema import ChatRequest
from billfish.server.supervisor import EngineSupervisor, Watch
from billfish.server.tool_parsers import PARSERS
from billfish.server.tools import ToolFormat, constraint
from tests.server.conftest import chat
from tests.server.live import live
from tests.server.processes import QUICK, collect, request


def refused(http, field: str, **options: object) -> str:
    answer = http.post("/v1/chat/completions", json=chat(**options))
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, field), answer.text
    return error["message"]


def tool(**function: object) -> list[dict]:
    return [{"type": "function", "function": {"name": "f", **function}}]


def called(arguments: str) -> list[dict]:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "1"},
    ]


@pytest.mark.parametrize("given", [{"regex": None}, {"regex": None, "json": None}])
def test_a_form_of_null_is_no_form(http, given):
    assert "exactly one" in refused(http, "structured_outputs", structured_outputs=given)


def test_nulls_beside_a_form_are_nothing(http):
    given = {"regex": "a", "json": None, "choice": None}
    answer = http.post("/v1/chat/completions", json=chat(structured_outputs=given, max_tokens=1))
    assert answer.status_code == 200


@pytest.mark.parametrize("kind", ["string", ["object", "null"], None, 5])
def test_arguments_of_tools_are_objects(http, kind):
    place = "tools[0].function.parameters"
    assert '"object"' in refused(http, place, tools=tool(parameters={"type": kind}))


@pytest.mark.parametrize(
    "arguments",
    ["", "[]", "{", '{"a":NaN}', '{"a":Infinity}', '{"a":' * 500 + "1" + "}" * 500,
     '{"a":"\\ud800"}', '{"\\udfff":1}', "{} {}"],
    ids=lambda text: text[:12],
)  # fmt: skip
def test_arguments_of_calls_in_the_history_are_json_objects(http, arguments):
    refused(http, "messages[1].tool_calls[0].function.arguments", messages=called(arguments))


def test_strict_tools_of_every_format_are_enforced_or_refused():
    body = ChatRequest.model_validate(chat(tools=tool(strict=True)))
    for name in PARSERS:
        with suppress(InvalidRequestError):
            constraint(body, ToolFormat(name, native=True), None)


def test_long_arguments_in_the_history_do_not_hold_up_small_work():
    async def run() -> None:
        engine = FakeEngine()
        await engine.start()
        sizes = []

        async def noting(size: int, function: object, *args: object) -> list[int]:
            sizes.append(size)
            return []

        engine.run = noting  # type: ignore[assignment]
        messages = called(json.dumps({"a": "x" * LARGE}))
        body = ChatRequest.model_validate(chat(messages=messages))
        await encode_chat(engine, body.messages, [], None, None, None)
        await engine.close()
        assert sizes[0] > LARGE

    asyncio.run(run())


def test_validation_of_large_bodies_is_quick():
    """It holds up the event loop. Counted in the work that reading the same JSON is."""
    properties = {f"p{i}": {"type": "string", "description": "d" * 20} for i in range(380)}
    parameters = {"type": "object", "properties": properties}
    function = {"name": "f", "parameters": parameters}
    tools = [{"type": "function", "function": {**function, "name": f"f{i}"}} for i in range(100)]
    parts = [{"type": "text", "txt": "x"}] * 1000
    wrong = [{"role": "user", "content": parts}] * 40

    def seconds(work) -> float:
        began = time.process_time()
        work()
        return time.process_time() - began

    for body in (chat(tools=tools), chat(messages=wrong)):
        text = json.dumps(body)
        reading = min(seconds(lambda text=text: json.loads(text)) for _ in range(3))

        def validate(body=body) -> None:
            with suppress(ValueError):
                ChatRequest.model_validate(body)

        assert min(seconds(validate) for _ in range(3)) < 15 * reading


def test_requests_for_an_engine_that_takes_nothing_are_not_kept_without_end(monkeypatch):
    """A step hangs, and clients send long prompts, go away, and send more."""
    with live() as server:
        backend = server.engine._backend
        monkeypatch.setattr(backend, "unsent_bytes", engine_client.MAX_UNSENT + 1, raising=False)
        with pytest.raises(QueueFullError):
            server.call(server.engine.submit, request())
        assert server.call(server.engine.health).accepting is False
        monkeypatch.setattr(backend, "unsent_bytes", 0)
        assert server.call(collect, server.engine, request(max_tokens=1))


def test_an_engine_that_cannot_be_started_for_now_is_started_later(monkeypatch):
    """With no file descriptors left, say: that is not the engine's fault, and passes."""
    from billfish.server import supervisor as module

    real, failures = module._Process.start, 3 * QUICK.give_up

    async def start(*args: object) -> object:
        nonlocal failures
        failures -= 1
        if failures >= 0:
            raise OSError(24, "Too many open files")
        return await real(*args)

    monkeypatch.setattr(module._Process, "start", start)

    async def run() -> None:
        watch = Watch(first_delay=0.001, longest_delay=0.01)
        engine = engine_client.EngineClient(
            EngineSupervisor(LaunchFake(), watch=watch), byte_tokenizer
        )
        await engine.start()
        async with asyncio.timeout(120):
            await engine.wait_ready()
        await engine.close()

    asyncio.run(run())
