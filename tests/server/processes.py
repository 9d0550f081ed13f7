"""What the tests of the engine's process share: processes, under a supervisor or by hand."""

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Self

import pytest

from billfish.sampling_params import SamplingParams
from billfish.server.engine_client import EngineClient
from billfish.server.fake_engine import byte_tokenizer
from billfish.server.frames import FrameReader, frame
from billfish.server.messages import (
    EngineOutput,
    EngineRequest,
    FromEngine,
    Launch,
    LaunchFake,
    Snapshot,
    ToEngine,
    decode_from_engine,
    encode,
)
from billfish.server.supervisor import EngineSupervisor, Watch

ROOT = Path(__file__).parents[2]
MISBEHAVING = "tests.server.misbehaving_engine"
QUICK = Watch(first_delay=0.01, answer=20.0, load=60.0)

NEEDS_PROC = pytest.mark.skipif(
    not hasattr(os, "killpg") or not Path("/proc/self/stat").exists(),
    reason="needs process groups and /proc",
)


def request(name: str = "a", prompt: str = "Hello", **options: Any) -> EngineRequest:
    return EngineRequest(
        request_id=name,
        prompt_token_ids=tuple(prompt.encode()),
        sampling=SamplingParams(**options),
    )


LOOP: ContextVar[Callable[[], asyncio.AbstractEventLoop] | None] = ContextVar("LOOP", default=None)


Test = Callable[[EngineClient, EngineSupervisor], Awaitable[None]]


def with_process(
    test: Test,
    launch: Launch | LaunchFake | None = None,
    *,
    watch: Watch = QUICK,
    module: str = MISBEHAVING,
    ready: bool = True,
) -> None:
    async def run() -> None:
        supervisor = EngineSupervisor(launch or LaunchFake(), watch=watch, module=module)
        client = EngineClient(supervisor, byte_tokenizer)
        await client.start()
        pid = supervisor.pid
        try:
            async with asyncio.timeout(120):
                if ready:
                    await client.wait_ready()
                    pid = supervisor.pid
                await test(client, supervisor)
        finally:
            await client.close()
            assert pid is None or not alive(pid)

    with asyncio.Runner(loop_factory=LOOP.get()) as runner:
        runner.run(run())


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def children() -> set[int]:
    """Of this process, dead ones not waited for included."""
    listed = Path("/proc/self/task").glob("*/children")
    return {int(pid) for path in listed for pid in path.read_text().split()}


def wait_until_gone(pid: int) -> None:
    end = time.monotonic() + 30
    while alive(pid):
        assert time.monotonic() < end, "an orphan"
        time.sleep(0.02)


def memory(pid: int) -> int:
    """Resident bytes."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def collect(client: EngineClient, wanted: EngineRequest) -> list[EngineOutput]:
    return [output async for output in client.generate(wanted)]


def text_of(outputs: list[EngineOutput]) -> str:
    return "".join(output.text for output in outputs)


async def idle(client: EngineClient) -> Snapshot:
    """Wait until all blocks are back."""
    while True:
        snapshot = await client.stats()
        counters = snapshot.counters
        if not (counters.blocks_in_use or counters.running or counters.waiting):
            assert counters.blocks_free + counters.blocks_cached == counters.blocks_total
            return snapshot


class RawEngine:
    """An engine's process without a supervisor: the test holds its socket and its pipe."""

    def __init__(self, *messages: ToEngine) -> None:
        self.socket, theirs = socket.socketpair()
        read_end, self.pipe = os.pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-m", MISBEHAVING, str(theirs.fileno()), str(read_end)],
            cwd=ROOT, pass_fds=(theirs.fileno(), read_end), start_new_session=True,
        )  # fmt: skip
        theirs.close()
        os.close(read_end)
        self.socket.settimeout(60)
        self.reader = FrameReader()
        for message in messages:
            self.socket.sendall(frame(encode(message)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.wait()
        self.socket.close()
        self.close_pipe()

    def close_pipe(self) -> None:
        if self.pipe >= 0:
            os.close(self.pipe)
            self.pipe = -1

    def read(self) -> list[FromEngine]:
        """What comes next; empty at the end."""
        while data := self.socket.recv(1 << 20):
            if messages := [decode_from_engine(part) for part in self.reader.feed(data)]:
                return messages
        return []

    def read_until(self, kind: type) -> None:
        while messages := self.read():
            if any(isinstance(message, kind) for message in messages):
                return
        raise AssertionError(f"it ended without {kind.__name__}")

    def seconds(self) -> float:
        """Of a processor, used so far."""
        stat = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK")

    def seconds_while_quiet(self) -> float:
        """Used in half a second, once it has come to rest."""
        end, before = time.monotonic() + 60, -1.0
        while (now := self.seconds()) - before > 0.02:
            assert time.monotonic() < end, "it does not come to rest"
            before = now
            time.sleep(0.3)
        time.sleep(0.5)
        return self.seconds() - now
