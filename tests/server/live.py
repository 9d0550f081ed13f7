"""A server in this process, on a port of its own, in a thread with an event loop."""

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeVar

import httpx

from billfish.engine.outputs import EngineStats
from billfish.server.engine_client import EngineClient
from billfish.server.fake_engine import FakeEngine
from billfish.server.run import Server, bind
from billfish.server.settings import ServerSettings

_T = TypeVar("_T")

KEY = "a-key-for-tests"
PATIENCE = 120.0  # seconds: a machine may be slow; nothing waits so long on one that is not
ONE_REQUEST = httpx.Limits(max_keepalive_connections=0)
"""A connection for each request: a server may close one just when a client uses it again."""


class LiveServer:
    """url: where it listens. http: a client of it. engine: call it through `call`, which runs on
    its loop."""

    def __init__(self, make_engine: Callable[[], EngineClient], settings: ServerSettings) -> None:
        self._listener = bind(settings.host, 0)
        self.port = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.http = httpx.Client(base_url=self.url, timeout=PATIENCE, limits=ONE_REQUEST)
        self.settings = settings
        self._make_engine = make_engine
        self._started: Future[None] = Future()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self._thread.start()
        self._started.result(PATIENCE)

    async def _run(self) -> None:
        try:
            self.loop = asyncio.get_running_loop()
            self.engine: Any = self._make_engine()
            self.uvicorn = Server(self.engine, self.settings)
            await self.engine.start()
        except BaseException as error:
            self._started.set_exception(error)
            raise
        self._started.set_result(None)
        await self.uvicorn.serve(sockets=[self._listener])

    def call(self, function: Callable[..., _T], *args: Any) -> _T:
        """function(*args) on the server's loop; a coroutine is awaited there."""

        async def run() -> Any:
            result = function(*args)
            return await result if asyncio.iscoroutine(result) else result

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(PATIENCE)

    def pause_after(self, steps: int) -> None:
        """The fake engine stops by itself after so many more steps, until `engine.resume`."""
        left = steps

        def count(_plan: object) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                self.engine.pause()

        self.engine.executor.on_step = count

    def wait_paused(self) -> None:
        wait_until(lambda: self.engine.paused)

    def counters(self) -> EngineStats:
        """The engine's counters, now."""
        return self.call(self.engine.stats).counters

    def wait_idle(self) -> None:
        """Until the engine has let go of all requests and their blocks."""

        def idle() -> bool:
            stats = self.counters()
            return stats.running == stats.waiting == stats.blocks_in_use == 0

        wait_until(idle)

    def refuses(self) -> bool:
        """Whether it no longer takes connections."""
        try:
            socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE).close()
        except ConnectionRefusedError:
            return True
        return False

    def stop(self) -> None:
        self.uvicorn.should_exit = True
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()


def wait_until(condition: Callable[[], object], seconds: float = PATIENCE) -> None:
    """Wait for what comes and stays: what may pass again can pass unseen on a busy machine.

    In turns, not by the clock alone, which goes on while the machine stands still.
    """
    for _ in range(int(seconds * 100)):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError(f"it has not come in {seconds:g} seconds")


@contextmanager
def live(
    make_engine: Callable[[], EngineClient] = FakeEngine, **settings: Any
) -> Iterator[LiveServer]:
    patient = {"shutdown_seconds": 5.0, "header_seconds": PATIENCE, "body_seconds": PATIENCE}
    settings = {"model_names": ("fake",), **patient, **settings}
    server = LiveServer(make_engine, ServerSettings(**settings))
    try:
        yield server
    finally:
        server.stop()
        server.http.close()
