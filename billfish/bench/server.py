"""What the server itself costs: an instant engine in its own process, streams to real sockets.

The engine writes a token a step for each request at next to no cost. The server's processor time is
what counts: tokens for each second of it are what one core can stream, however busy the machine is
otherwise. With `step_s` 0 the engine is ahead, and tokens that wait for the same stream go out in
one event; with a pause between steps nearly each token is an event of its own, which is the most
that a token can cost. `events` says how many there were.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

from billfish.bench import record
from billfish.server import run
from billfish.server.engine_client import EngineClient
from billfish.server.fake_engine import byte_tokenizer
from billfish.server.messages import LaunchFake
from billfish.server.settings import ServerSettings
from billfish.server.supervisor import EngineSupervisor


def serve(pipe: Connection, step_seconds: float) -> None:
    """In a process of its own: tells the port, and on request its processor seconds."""
    settings = ServerSettings(port=0, model_names=("fake",), shutdown_seconds=1.0)
    listener = run.bind(settings.host, 0)
    supervisor = EngineSupervisor(LaunchFake(instant=True, step_seconds=step_seconds))
    engine = EngineClient(supervisor, byte_tokenizer)

    async def answer() -> None:
        loop = asyncio.get_running_loop()
        while await loop.run_in_executor(None, pipe.recv):
            pipe.send((time.process_time(), _processor_seconds(supervisor.pid)))

    def ready(_model: object) -> None:
        pipe.send(listener.getsockname()[1])
        tasks.append(asyncio.ensure_future(answer()))

    tasks: list[asyncio.Future[None]] = []
    run.run(engine, settings, listener, ready)


def _processor_seconds(pid: int | None) -> float:
    """Of another process, user and system (Linux)."""
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def stream(port: int, path: str, body: dict[str, Any]) -> tuple[int, int]:
    """Events and bytes of one answer, read as fast as they come and hardly looked at."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    data = json.dumps(body).encode()
    writer.write(
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n".encode()
        + data
    )
    events = size = 0
    while part := await reader.read(1 << 16):
        events += part.count(b"data: {")
        size += len(part)
    writer.close()
    return events, size


async def measure(
    port: int, pipe: Connection, streams: int, tokens: int, chat: bool
) -> dict[str, Any]:
    body: dict[str, Any] = {"model": "fake", "max_tokens": tokens, "stream": True}
    path = "/v1/chat/completions" if chat else "/v1/completions"
    body |= {"messages": [{"role": "user", "content": "Hi"}]} if chat else {"prompt": "Hi"}
    pipe.send(True)
    before, wall = pipe.recv(), time.perf_counter()
    answers = await asyncio.gather(*(stream(port, path, body) for _ in range(streams)))
    wall = time.perf_counter() - wall
    pipe.send(True)
    server, engine = (b - a for a, b in zip(before, pipe.recv(), strict=True))
    total = streams * tokens
    return {
        "api": "chat" if chat else "completions",
        "streams": streams,
        "tokens": total,
        "events": sum(events for events, _ in answers),
        "bytes": sum(size for _, size in answers),
        "wall_s": round(wall, 3),
        "server_cpu_s": round(server, 3),
        "engine_cpu_s": round(engine, 3),
        "tokens_per_server_cpu_s": round(total / server),
    }


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="billfish bench server", description=__doc__)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--tokens", type=int, default=2000, help="of each stream")
    parser.add_argument("--step-seconds", type=float, nargs="+", default=[0.0, 0.004])
    parser.add_argument("--output", help="the JSON file to write")
    options = parser.parse_args(arguments)
    rows = []
    for step_seconds in options.step_seconds:
        for row in _rows(step_seconds, options.streams, options.tokens):
            rows.append({"step_s": step_seconds, **row})
            print(json.dumps(rows[-1]), flush=True)
    if options.output:
        command = f"billfish bench server {' '.join(arguments)}".strip()
        packages = ("uvicorn", "httptools", "uvloop", "fastapi", "msgspec")
        record.write(options.output, record.environment(command, packages), rows)


def _rows(step_seconds: float, streams: list[int], tokens: int) -> Iterator[dict[str, Any]]:
    context = multiprocessing.get_context("spawn")
    pipe, other = context.Pipe()
    process = context.Process(target=serve, args=(other, step_seconds))
    process.start()
    try:
        port = pipe.recv()
        for chat in (True, False):
            for count in streams:
                asyncio.run(measure(port, pipe, count, 50, chat))  # warm
                yield asyncio.run(measure(port, pipe, count, tokens, chat))
    finally:
        process.terminate()
        process.join()
