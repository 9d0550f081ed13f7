"""uvicorn's HTTP/1.1 connection, with limits on what comes before the body.

uvicorn itself waits for headers for ever, and with httptools takes any amount of them.
"""

import asyncio
import json
from functools import partial
from typing import Any

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from billfish.server.api_errors import ApiError
from billfish.server.settings import ServerSettings

MAX_HEADERS = 100


class _Refused(Exception):
    pass


class BoundedProtocol(HttpToolsProtocol):
    """max_header_bytes: of the request line and all headers. header_seconds: from the first byte of
    a connection, or the end of the request before, until they are complete."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        settings: ServerSettings,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._settings = settings
        self._refusal: ApiError | None = None
        self._size = 0
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        if len(self.connections) > self._settings.max_connections:
            self._refuse(503, "too many connections")
            self.send_400_response("")
            return
        self._start_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_deadline()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._deadline is None and (self.cycle is None or self.cycle.response_complete):
            self._start_deadline()
        if not self.transport.is_closing():
            super().data_received(data)

    def on_message_begin(self) -> None:
        self._size = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value))
        if len(self.headers) >= MAX_HEADERS:
            self._refuse(431, f"more than {MAX_HEADERS} headers")
            raise _Refused
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._stop_deadline()
        if b"#" in self.url:  # uvicorn would drop what follows
            self._refuse(400, "the request target must be a path")
            raise _Refused
        super().on_headers_complete()

    def _count(self, size: int) -> None:
        self._size += size
        most = self._settings.max_header_bytes
        if self._size > most:
            self._refuse(431, f"request line and headers have more than {most} bytes")
            raise _Refused  # the parser passes it on as an error of its own

    def _start_deadline(self) -> None:
        self._deadline = self.loop.call_later(self._settings.header_seconds, self._too_slow)

    def _stop_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _too_slow(self) -> None:
        if not self.transport.is_closing():
            self._refuse(408, "the headers did not arrive in time")
            self.send_400_response("")

    def _refuse(self, status: int, message: str) -> None:
        self._refusal = ApiError(status, message)

    def send_400_response(self, msg: str) -> None:
        """Called by uvicorn for what it cannot parse, and here for what is refused."""
        refusal = self._refusal or ApiError(400, "this is not an HTTP request")
        body = json.dumps(refusal.body).encode()
        self.transport.write(
            STATUS_LINE[refusal.status_code]
            + b"content-type: application/json\r\nconnection: close\r\n"
            + b"content-length: %d\r\n\r\n" % len(body)
            + body
        )
        self.transport.close()


def protocol(settings: ServerSettings) -> Any:
    """What uvicorn takes for its `http` option."""
    return partial(BoundedProtocol, settings=settings)
