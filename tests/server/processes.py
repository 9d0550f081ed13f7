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
from tests.server.live import PATIENCE, wait_until

ROOT = Path(__file__).parents[2]
MISBEHAVING = "tests.server.misbehaving_engine"
QUICK = Watch(first_delay=0.01, answer=PATIENCE)
"""An engine that has ended is started again at once, one that a machine is too slow for is not
taken for hung."""

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
            async with asyncio.timeout(2 * PATIENCE):
                if ready:
                    await client.wait_ready()
                    pid = supervisor.pid
                await test(client, supervisor)
        finally:
            await client.close()
            assert pid is None or not alive(pid)

    with asyncio.Runner(loop_factory=LOOP.get()) as runner:
        runner.run(run())


def stat(path: Path) -> list[str]:
    """Of a process or thread: its state, and the numbers after it (man proc_pid_stat)."""
    return (path / "stat").read_text().rpartition(")")[2].split()


def alive(pid: int) -> bool:
    try:
        return stat(Path(f"/proc/{pid}"))[0] != "Z"
    except OSError:
        return False


def asleep(pid: int) -> bool:
    """All of its threads wait for something, and none for a processor."""
    states = [stat(thread)[0] for thread in Path(f"/proc/{pid}/task").iterdir()]
    return set(states) == {"S"}


def children() -> set[int]:
    """Of this process, dead ones not waited for included."""
    listed = Path("/proc/self/task").glob("*/children")
    return {int(pid) for path in listed for pid in path.read_text().split()}


def wait_until_gone(pid: int) -> None:
    wait_until(lambda: not alive(pid))


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
        self.socket.settimeout(PATIENCE)
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
        numbers = stat(Path(f"/proc/{self.process.pid}"))
        return (int(numbers[11]) + int(numbers[12])) / os.sysconf("SC_CLK_TCK")

    def seconds_while_quiet(self) -> float:
        """Used in half a second, once it has come to rest."""
        rested = 0

        def at_rest() -> bool:  # not once, by chance, but for a while
            nonlocal rested
            rested = rested + 1 if asleep(self.process.pid) else 0
            return rested == 20

        wait_until(at_rest)
        before = self.seconds()
        time.sleep(0.5)
        return self.seconds() - before
