"""Thousands of requests over HTTP leave no memory behind, however they end."""

import asyncio
import gc
import itertools
import json
import os
import sys
from pathlib import Path

from billfish.server.fake_engine import FakeEngine
from tests.server.conftest import chat
from tests.server.live import LiveServer, live, wait_until
from tests.server.processes import NEEDS_PROC, memory
from tests.server.test_real_model import ready

CONNECTIONS = 16
KINDS = 8


def body(number: int, model: str, most: int) -> tuple[str, dict, int]:
    """A request, all kinds in turn: its path, what it holds, and the status of its answer."""
    text = f"Request {number}: tell me more of it. "
    options = [
        {},
        {"stream": True, "stream_options": {"include_usage": True}},
        {"n": 2, "logprobs": True, "top_logprobs": 2},
        {"stop": ["e", "model"], "stream": True, "user": f"user {number}"},
        {"tools": [{"type": "function", "function": {"name": f"f{number}"}}]},
        {"temperature": "hot"},
    ]
    kind = number % KINDS
    if kind < len(options):
        asked = chat(text, max_tokens=most, **options[kind]) | {"model": model}
        return "/v1/chat/completions", asked, 400 if kind == 5 else 200
    asked = {"model": model, "prompt": [text, text], "max_tokens": most, "echo": kind == 6}
    return "/v1/completions", asked, 200


async def send(server: LiveServer, numbers: list[int], model: str, most: int) -> None:
    """One after another over one connection, but a client that leaves in the middle now and then
    takes a new one."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    for number in numbers:
        path, asked, status = body(number, model, most)
        data = json.dumps(asked).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        whole = f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data
        writer.write(whole)
        first = await reader.readline()
        if not first:  # the server had closed a connection that was not used for long
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(whole)
            first = await reader.readline()
        assert first.split()[1] == str(status).encode(), first
        headers = (await reader.readuntil(b"\r\n\r\n")).lower()
        if asked.get("stream") and number % 3 == 0:
            writer.transport.abort()
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        elif b"chunked" in headers:
            await reader.readuntil(b"0\r\n\r\n")
        else:
            length = headers.partition(b"content-length: ")[2].partition(b"\r\n")[0]
            await reader.readexactly(int(length))
    writer.transport.abort()


def request_all(server: LiveServer, numbers: range, model: str = "fake", most: int = 6) -> None:
    async def run() -> None:
        parts = [list(numbers[i::CONNECTIONS]) for i in range(CONNECTIONS)]
        await asyncio.gather(*(send(server, part, model, most) for part in parts))

    asyncio.run(run())
    server.wait_idle()


def test_five_thousand_requests():
    """The server and an engine without a model, in this process. All pieces of memory that Python
    has given out are counted, three times: a leak of one object a request adds a thousand to each
    count, a cache that fills adds to some."""

    def blocks() -> int:
        connections = server.uvicorn.server_state.connections
        wait_until(lambda: not server.call(lambda: len(connections)))  # each holds some dozens
        gc.collect()
        return sys.getallocatedblocks()

    with live(lambda: FakeEngine(num_blocks=256)) as server:
        request_all(server, range(800))  # fills caches, which have bounds
        counts = [blocks()]
        for begin in range(800, 5000, 1400):
            request_all(server, range(begin, begin + 1400))
            counts.append(blocks())
        growth = [after - before for before, after in itertools.pairwise(counts)]
        assert min(growth) < 700, growth
        assert not server.engine._streams


@NEEDS_PROC
def test_the_engines_process(tiny_path: Path):
    """A model of random weights in a process of its own: the memory of both stays where it was."""
    with ready(tiny_path) as server:
        pid = server.engine._backend.pid
        request_all(server, range(300), "served", most=3)
        before = memory(pid), memory(os.getpid())
        request_all(server, range(300, 700), "served", most=3)
        after = memory(pid), memory(os.getpid())
        growth = [new - old for old, new in zip(before, after, strict=True)]
        assert max(growth) < 8 << 20, growth
