"""The engine's own process, started by `EngineSupervisor`: python -m billfish.server.engine_process

It has two file descriptors of the server: a socket for messages, and the reading end of a pipe on
which nothing ever comes. When the server ends, however it ends, the pipe closes, and this process
ends at once, in the middle of a step if need be.
"""

import ctypes
import gc
import logging
import os
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from typing import NoReturn

from billfish.checkpoint.locate import locate
from billfish.errors import (
    BillfishError,
    CapacityError,
    CheckpointError,
    ConfigError,
    InvariantError,
    ProtocolError,
)
from billfish.server import logs
from billfish.server.connection import Closed, Connection
from billfish.server.engine_host import Build, Host, Report
from billfish.server.frames import MAX_FRAME
from billfish.server.messages import (
    Drain,
    Draining,
    Failed,
    FromEngine,
    Launch,
    LaunchFake,
    Loading,
    ModelInfo,
    Outputs,
    Ping,
    Pong,
    Problem,
    Ready,
    ToEngine,
    decode_to_engine,
    encode,
)

logger = logging.getLogger("billfish.engine")

MAX_FAILURES = 3
"""Steps that may fail one after the other before the process gives up."""
LAUNCH_SECONDS = 30.0


class EngineLoop:
    """Handles what has come, computes a step, says what it brought; sleeps when there is nothing.

    Whatever the clients do, a step never waits for one: outputs go to the server as they are, and
    the server keeps them for slow readers. Only if the server itself does not read, so that
    `Connection.MAX_UNSENT` bytes have gathered, no step is made until it does.
    """

    def __init__(self, connection: Connection, host: Host, drain_seconds: float) -> None:
        self._connection = connection
        self._host = host
        self._drain_seconds = drain_seconds
        self._deadline: float | None = None
        self._failures = 0
        self._steps_done = 0
        self.terminated = False  # set by the handler of SIGTERM
        host.wake = connection.wake

    def run(self) -> None:
        """Until it has drained. Closed when the server is gone; InvariantError, or what a step
        raised, when there is no use in going on."""
        while True:
            if self.terminated and self._deadline is None:
                self._drain(self._drain_seconds, "the engine was told to end")
            if self._deadline is not None and self._drained(self._deadline):
                return
            stuck = self._connection.congested
            if stuck or not self._host.busy:
                self._wait()
            for data in self._connection.receive():
                self._handle(decode_to_engine(data))
            if self._host.busy and not self._connection.congested:
                self._step()

    def _handle(self, message: ToEngine) -> None:
        match message:
            case Ping():
                self._send(Pong(message.number))
            case Drain():
                self._drain(message.seconds, "the server is ending")
            case Launch() | LaunchFake():
                raise ProtocolError("the engine runs already")
            case _:
                self._host.handle(message)

    def _step(self) -> None:
        try:
            messages = self._host.step()
        except InvariantError:
            raise
        except Exception:
            # The requests of this step have ended; the next one says so.
            self._failures += 1
            logger.exception("a step failed (%d in a row)", self._failures)
            if self._failures == MAX_FAILURES:
                raise
            return
        if self._host.steps_done > self._steps_done:
            self._steps_done, self._failures = self._host.steps_done, 0
        for message in messages:
            self._send(message)

    def _wait(self) -> None:
        left = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
        self._connection.wait(left)

    def _drain(self, seconds: float, reason: str) -> None:
        self._host.draining = True
        self._deadline = time.monotonic() + seconds
        self._send(Draining(reason))

    def _drained(self, deadline: float) -> bool:
        """Whether nothing is left to do; at the deadline, all that is left is aborted."""
        if time.monotonic() >= deadline:
            for message in self._host.abort_all():
                self._send(message)
        elif not self._host.idle:
            return False
        self._connection.flush(1.0)
        return True

    def _send(self, message: FromEngine) -> None:
        data = encode(message)
        if len(data) > MAX_FRAME and isinstance(message, Outputs) and len(message.outputs) > 1:
            for part in _halves(message):
                self._send(part)
        else:
            self._connection.send(data)


def _halves(message: Outputs) -> tuple[Outputs, Outputs]:
    """The same in two messages."""
    outputs, middle = message.outputs, len(message.outputs) // 2
    running, waiting = message.running, message.waiting
    first = Outputs(outputs[:middle], message.accepted, message.refused, running, waiting)
    return first, Outputs(outputs[middle:], [], [], running, waiting)


def build(launch: Launch | LaunchFake, report: Report) -> tuple[Host, ModelInfo]:
    """The engine that a launch asks for."""
    if isinstance(launch, LaunchFake):
        from billfish.server import fake_engine

        return fake_engine.build(launch)
    report("loading the libraries", 0, 0)
    locate(launch.config.model)  # said at once, if it is not there
    from billfish.server import llm_host

    return llm_host.build(launch, report)


def main(arguments: list[str], build: Build = build) -> int:
    """arguments: the socket's and the pipe's file descriptors."""
    socket_fd, pipe_fd = map(int, arguments)
    die_with_the_server(pipe_fd)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the server's to handle
    logs.configure("text")
    connection = Connection(socket.socket(fileno=socket_fd))
    signal.set_wakeup_fd(connection.wake_fd, warn_on_full_buffer=False)
    try:
        return _serve(connection, build)
    except Closed:
        return 0  # the server is gone, and nobody waits for anything
    except Exception as error:
        logger.error("the engine ends: %s", error, exc_info=not isinstance(error, BillfishError))
        # Settings and files stay as they are, and so would the error.
        lasting = isinstance(error, ConfigError | CheckpointError | CapacityError)
        with suppress(Closed, ProtocolError):
            connection.send(encode(Failed(Problem.of(error), lasting)))
            connection.flush(1.0)
        return 1


def _serve(connection: Connection, build: Build) -> int:
    launch = _launch(connection)
    if isinstance(launch, Launch):
        logs.configure(launch.log_format, launch.log_level)

    def report(stage: str, done: int, total: int) -> None:
        connection.send(encode(Loading(stage, done, total)))

    host, model = build(launch, report)
    loop = EngineLoop(connection, host, launch.drain_seconds)

    def terminate(number: int, _frame: object) -> None:
        loop.terminated = True

    signal.signal(signal.SIGTERM, terminate)
    gc.collect()
    gc.freeze()  # the model's objects need not be looked at again and again
    connection.send(encode(Ready(model)))
    loop.run()
    return 0


def _launch(connection: Connection) -> Launch | LaunchFake:
    """The first message."""
    end = time.monotonic() + LAUNCH_SECONDS
    while (data := connection.receive_one()) is None:
        if (left := end - time.monotonic()) <= 0:
            raise ProtocolError("the server says nothing")
        connection.wait(left)
    message = decode_to_engine(data)
    if not isinstance(message, Launch | LaunchFake):
        raise ProtocolError("the first message must say what to serve")
    return message


def die_with_the_server(pipe_fd: int) -> None:
    """End when the pipe closes; on Linux also by a signal, which needs nothing of Python to run."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL, 0, 0, 0)
    os.set_inheritable(pipe_fd, False)
    threading.Thread(target=_watch, args=(pipe_fd,), name="death-pipe", daemon=True).start()


def _watch(pipe_fd: int) -> NoReturn:
    with suppress(OSError):
        os.read(pipe_fd, 1)
    # With all that this process has started: it leads a group of its own.
    if os.getpgid(0) == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
