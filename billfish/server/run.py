"""Serves until SIGTERM or SIGINT: the socket, uvicorn around the application, the engine's life."""

import asyncio
import logging
import resource
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import uvicorn

from billfish.errors import ConfigError
from billfish.server.app import create_app
from billfish.server.engine_client import EngineClient
from billfish.server.messages import ModelInfo
from billfish.server.protocol import protocol
from billfish.server.settings import ServerSettings

logger = logging.getLogger(__name__)

BACKLOG = 2048
OTHER_FILES = 64
"""File descriptors that the server needs besides those of its connections: with none left, no
engine could be started again."""
GRACE_SECONDS = 5.0
"""Beyond the time that running requests have to end: what uvicorn waits before it cuts them off."""


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. ConfigError, in one sentence, where there can be none."""
    try:
        family, kind, number, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}: {error.strerror}") from None
    listener = socket.socket(family, kind, number)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        hint = "; choose another with --port" if port else ""
        raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror}{hint}") from None
    return listener


def with_enough_files(settings: ServerSettings) -> ServerSettings:
    """Settings whose connections leave file descriptors for everything else, after the system's
    soft limit was raised as far as need be."""
    wanted = settings.max_connections + OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return settings
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, allowed), hard))
    most = max(1, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - OTHER_FILES)
    if most >= settings.max_connections:
        return settings
    logger.warning(
        "at most %d connections instead of %d: the system allows no more open files (ulimit -n)",
        most, settings.max_connections,
    )  # fmt: skip
    return replace(settings, max_connections=most)


class Server(uvicorn.Server):
    """uvicorn's server, which lets the engine drain while the last requests end."""

    def __init__(self, engine: EngineClient, settings: ServerSettings) -> None:
        grace = int(settings.shutdown_seconds + GRACE_SECONDS)
        super().__init__(
            uvicorn.Config(
                create_app(engine, settings),
                http=protocol(settings),
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=30,
                timeout_graceful_shutdown=grace,
            )
        )
        self._engine = engine
        self._settings = settings

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        draining = asyncio.create_task(self._engine.drain(self._settings.shutdown_seconds))
        await super().shutdown(sockets)
        if self.force_exit:  # asked twice
            draining.cancel()
            with suppress(asyncio.CancelledError):
                await draining
            await self._engine.close()
        else:
            await draining


async def serve(
    engine: EngineClient,
    settings: ServerSettings,
    listener: socket.socket,
    on_ready: Callable[[ModelInfo], None] = lambda model: None,
) -> None:
    """Start the engine and answer requests until a signal asks for the end. Requests get 503 while
    the engine starts.

    Raises what hinders the engine's first start; one that dies later is restarted meanwhile.
    """
    await engine.start()
    server = Server(engine, settings)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    ready = asyncio.create_task(engine.wait_ready())
    try:
        await asyncio.wait((serving, ready), return_when=asyncio.FIRST_COMPLETED)
        if ready.done():
            on_ready(ready.result())
    finally:
        if ready.done() and ready.exception() is not None:
            server.should_exit = True
        ready.cancel()
        await serving


def run(
    engine: EngineClient,
    settings: ServerSettings,
    listener: socket.socket,
    on_ready: Callable[[ModelInfo], None] = lambda model: None,
) -> None:
    """`serve`, on an event loop of its own."""
    settings = with_enough_files(settings)
    factory = None
    if sys.platform != "win32":
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(serve(engine, settings, listener, on_ready))
