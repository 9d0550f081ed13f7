"""Many clients at once, a third of whom leave in the middle.

LOAD_CLIENTS and LOAD_REQUESTS, of each, make it larger than a test run wants.
"""

import asyncio
import json
import os
import random

from billfish.config import SchedulerConfig
from billfish.server.fake_engine import FakeEngine
from tests.server.conftest import chat
from tests.server.live import LiveServer, live

CLIENTS = int(os.environ.get("LOAD_CLIENTS", "150"))
REQUESTS = int(os.environ.get("LOAD_REQUESTS", "2"))
REPLY = "All the fish in the sea 🐟 and all the rivers. " * 2


class Client:
    """Sends streaming requests one after another over connections of its own."""

    def __init__(self, server: LiveServer, number: int) -> None:
        self._server = server
        self._random = random.Random(number)
        self.left = 0

    async def run(self) -> None:
        for _ in range(REQUESTS):
            reader, writer = await asyncio.open_connection("127.0.0.1", self._server.port)
            leaves = self._random.random() < 1 / 3
            try:
                writer.write(self._request())
                await self._read(reader, self._random.randrange(20) if leaves else None)
            finally:
                writer.transport.abort()

    def _request(self) -> bytes:
        body = json.dumps(chat(f"{self._random.random()}", stream=True)).encode()
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body

    async def _read(self, reader: asyncio.StreamReader, most: int | None) -> None:
        """All of the answer, or so many lines of it before the client leaves."""
        text, lines = "", 0
        status = await reader.readline()
        assert status == b"HTTP/1.1 200 OK\r\n", status
        done = False
        while line := await reader.readline():
            lines += 1
            if most is not None and lines > most:
                self.left += 1
                return
            if line.startswith(b"data: {"):
                body = json.loads(line[6:])
                assert "error" not in body, body
                text += body["choices"][0]["delta"].get("content") or ""
            done = done or line == b"data: [DONE]\n"
        assert done
        assert text == REPLY


def test_many_streams_and_a_third_of_them_leave():
    def engine() -> FakeEngine:
        scheduler = SchedulerConfig(max_num_seqs=128, max_num_batched_tokens=8192)
        return FakeEngine(REPLY, scheduler=scheduler)

    async def run(server: LiveServer) -> list[Client]:
        clients = [Client(server, number) for number in range(CLIENTS)]
        await asyncio.gather(*(client.run() for client in clients))
        return clients

    with live(engine) as server:
        clients = asyncio.run(run(server))
        # Some of the third get it all: a server that is slow sends long pieces.
        assert sum(client.left for client in clients) > CLIENTS * REQUESTS // 10
        server.wait_idle()
        stats = server.call(server.engine.stats).counters
        assert stats.blocks_free + stats.blocks_cached == stats.blocks_total
        assert not server.engine._streams
        assert server.engine._open == 0
