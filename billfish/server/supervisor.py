"""Starts the engine's process, watches it, ends it, and starts it again when it dies."""

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import msgspec

from billfish.errors import ProtocolError
from billfish.server.frames import FrameReader, frame
from billfish.server.messages import (
    Drain,
    Failed,
    FromEngine,
    Launch,
    LaunchFake,
    Loading,
    Ping,
    Pong,
    Ready,
    ToEngine,
    decode_from_engine,
    encode,
)

logger = logging.getLogger(__name__)

LONGEST_PAUSE = 5.0
"""Between two questions whether the engine is alive, in seconds."""
END_SECONDS = 5.0
"""How long a process that has closed its socket, or was told to end, may take to do so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """When an engine counts as hung, and when it is started again. Times in seconds.

    answer: how long it may say nothing at all, asked between steps; the longest step must be
    shorter. load: how long a start may make no progress.
    first_delay, longest_delay: before it is started again, doubled with each death at once.
    at_once: a process that died before it was ready for so long; after this many in a row
    (give_up) it is not started again.
    """

    answer: float = 300.0
    load: float = 600.0
    first_delay: float = 0.25
    longest_delay: float = 30.0
    at_once: float = 10.0
    give_up: int = 4


class EngineSupervisor:
    """A `Backend` whose engine is a process of its own. See `EngineClient`.

    launch: what it is to serve. module: what the process runs; it takes the arguments of
    `billfish.server.engine_process`.
    """

    receive: Callable[[FromEngine], None]
    lost: Callable[[str, bool], None]

    def __init__(
        self,
        launch: Launch | LaunchFake,
        *,
        watch: Watch | None = None,
        module: str = "billfish.server.engine_process",
    ) -> None:
        self._launch = launch
        self._watch = watch or Watch()
        self._module = module
        self._process: _Process | None = None
        self._task: asyncio.Task[None] | None = None
        self._ending = False

    @property
    def pid(self) -> int | None:
        """Of the engine's process, while there is one."""
        return self._process.pid if self._process else None

    @property
    def silent_seconds(self) -> float:
        """How long an answer has been due."""
        return self._process.silent_seconds if self._process else 0.0

    @property
    def unsent_bytes(self) -> int:
        """What the engine's process has not taken yet."""
        return self._process.unsent_bytes if self._process else 0

    async def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())

    def send(self, message: ToEngine) -> None:
        if isinstance(message, Drain):
            self._ending = True
        data = frame(encode(message))  # an error is the caller's, whether there is an engine or not
        if self._process is not None:
            self._process.send(data)

    async def stop(self) -> None:
        self._ending = True
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        if self._process is not None:
            self._process.end()
            try:
                async with asyncio.timeout(3 * END_SECONDS):
                    await asyncio.shield(self._process.ended)
            except TimeoutError:  # not even SIGKILL ends it: it hangs in a driver
                logger.error("the engine's process %d cannot be ended", self._process.pid)
            self._process = None

    async def _run(self) -> None:
        """Start it again and again, until it is to end or there is no use in it."""
        tries = deaths = 0  # one after the other: in vain, and of processes that did start
        while True:
            started = True
            try:
                death = await self._serve()
            except OSError as error:  # no memory, or no file descriptors: there may be some later
                started = False
                death = _Death(f"the engine's process cannot be started: {error}", False, 0.0)
            if death.served < self._watch.at_once:
                tries, deaths = tries + 1, deaths + started
            else:
                tries = deaths = 0
            lasting = death.lasting or deaths >= self._watch.give_up
            reason = death.reason
            if lasting and not death.lasting:
                reason += f" ({deaths} times in a row, each soon after the start)"
            level = logging.INFO if self._ending else logging.ERROR
            logger.log(level, "the engine has ended: %s", reason)
            self.lost(reason, not (lasting or self._ending))
            if lasting or self._ending:
                return
            delay = self._watch.first_delay * 2 ** min(max(0, tries - 1), 30)
            await asyncio.sleep(min(delay, self._watch.longest_delay))

    async def _serve(self) -> "_Death":
        """One process, from start to end."""
        process = await _Process.start(self._module, self._launch, self.receive)
        self._process = process
        watching = asyncio.get_running_loop().create_task(self._ask(process))
        try:
            self.receive(Loading("the engine's process starts"))
            return await asyncio.shield(process.ended)
        finally:
            watching.cancel()
            if process.ended.done():
                self._process = None

    async def _ask(self, process: "_Process") -> None:
        """Ask for a sign of life again and again; kill the process if none comes.

        Counted in questions, not by the clock alone: that jumps when a machine was asleep.
        """
        watch = self._watch
        pause, unanswered = min(watch.answer / 4, LONGEST_PAUSE), 0
        while True:
            process.ask()
            await asyncio.sleep(pause)
            unanswered = unanswered + 1 if process.silent_seconds else 0
            limit = watch.answer if process.is_ready else watch.load
            if unanswered * pause >= limit:
                what = "a step hangs" if process.is_ready else "its start hangs"
                process.kill(f"the engine has said nothing for {limit:g} seconds: {what}")
                return


class _Death(msgspec.Struct, frozen=True):
    """lasting: the next one would end the same way. served: seconds that it was ready."""

    reason: str
    lasting: bool
    served: float


class _Process(asyncio.Protocol):
    """A running process, and the server's end of its socket."""

    def __init__(
        self, popen: subprocess.Popen[bytes], pipe: int, receive: Callable[[FromEngine], None]
    ) -> None:
        loop = asyncio.get_running_loop()
        self.pid = popen.pid
        self.ended: asyncio.Future[_Death] = loop.create_future()
        self._loop = loop
        self._popen = popen
        self._pipe = pipe
        self._receive = receive
        self._reader = FrameReader()
        self._transport: asyncio.Transport | None = None
        self._reason: str | None = None
        self._lasting = False
        self._ready_since: float | None = None
        self._asked_since: float | None = None
        self._status: int | None = None
        threading.Thread(target=self._reap, name="engine-reaper", daemon=True).start()

    @classmethod
    async def start(
        cls, module: str, launch: Launch | LaunchFake, receive: Callable[[FromEngine], None]
    ) -> "_Process":
        """A fresh interpreter: nothing of this process is copied but two file descriptors."""
        ours, theirs = socket.socketpair()
        read_end, write_end = os.pipe()
        environment = dict(os.environ)
        # The same package as here, and nothing that merely lies in the current folder (-P).
        home = str(Path(__file__).resolve().parents[2])
        environment["PYTHONPATH"] = os.pathsep.join(
            [home, *filter(None, [environment.get("PYTHONPATH")])]
        )
        try:
            popen = subprocess.Popen(
                [sys.executable, "-P", "-m", module, str(theirs.fileno()), str(read_end)],
                pass_fds=(theirs.fileno(), read_end),
                stdin=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,  # Ctrl-C in the terminal is for the server alone
            )
        except BaseException:
            ours.close()
            os.close(write_end)
            raise
        finally:
            theirs.close()
            os.close(read_end)
        process = cls(popen, write_end, receive)
        try:
            await asyncio.get_running_loop().create_unix_connection(lambda: process, sock=ours)
        except BaseException:  # cancelled, say: nobody would know of the process
            process.kill("the server is ending")
            ours.close()
            raise
        process.send(frame(encode(launch)))
        return process

    @property
    def is_ready(self) -> bool:
        return self._ready_since is not None

    @property
    def silent_seconds(self) -> float:
        return 0.0 if self._asked_since is None else time.monotonic() - self._asked_since

    @property
    def unsent_bytes(self) -> int:
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def ask(self) -> None:
        """Ask for a sign of life, unless it is due already."""
        if self._asked_since is None:
            self._asked_since = time.monotonic()
            self.send(frame(encode(Ping(0))))

    def send(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def kill(self, reason: str) -> None:
        """End it now, with all that it has started."""
        self._reason = self._reason or reason
        with suppress(ProcessLookupError, PermissionError):
            if self._status is None:
                os.killpg(self.pid, signal.SIGKILL)

    def end(self) -> None:
        """Close the pipe, on which it ends itself, and kill it if it does not."""
        self._reason = self._reason or "the server ended it"
        self._close_pipe()
        if self._transport is not None:
            self._transport.close()
        self._loop.call_later(END_SECONDS, self.kill, "it did not end")

    # Called by asyncio.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is of no such class

    def data_received(self, data: bytes) -> None:
        self._asked_since = None
        try:
            for part in self._reader.feed(data):
                self._take(decode_from_engine(part))
        except ProtocolError as error:
            self.kill(f"the engine does not keep to the protocol: {error}")
            if self._transport is not None:
                self._transport.abort()

    def eof_received(self) -> None:
        # Its process has ended or is about to.
        self._loop.call_later(END_SECONDS, self.kill, "the engine has closed its socket")

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._settle()

    def _take(self, message: FromEngine) -> None:
        if isinstance(message, Pong):
            return
        if isinstance(message, Ready):
            self._ready_since = time.monotonic()
        if isinstance(message, Failed):
            self._reason = self._reason or str(message.problem.error())
            self._lasting = message.lasting
        self._receive(message)

    # The end.

    def _reap(self) -> None:
        status = self._popen.wait()
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._exited, status)

    def _exited(self, status: int) -> None:
        self._status = status
        self._close_pipe()
        # What it said last is read first; something it started may hold the socket open.
        self._loop.call_later(1.0, self._abort)
        self._settle()

    def _abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _settle(self) -> None:
        """Once the process has ended and all it said is read, tell."""
        if self._status is None or self._transport is not None or self.ended.done():
            return
        reason = self._reason or describe(self._status)
        ready = self._ready_since
        served = 0.0 if ready is None else time.monotonic() - ready
        self.ended.set_result(_Death(reason, self._lasting, served))

    def _close_pipe(self) -> None:
        if self._pipe >= 0:
            os.close(self._pipe)
            self._pipe = -1


def describe(status: int) -> str:
    """A process's exit status in words."""
    if status >= 0:
        return f"the engine's process ended with status {status}"
    name = signal.Signals(-status).name if -status in list(signal.Signals) else f"signal {-status}"
    hint = ": out of memory, or somebody's doing" if -status == signal.SIGKILL else ""
    return f"the engine's process was killed by {name}{hint}"
