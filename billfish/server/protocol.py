"""uvicorn's HTTP/1.1 connection, with limits on what comes before the body, and on what waits to be
read by the client.

uvicorn itself waits for headers and readers for ever, and with httptools takes any amount of
headers.
"""

import asyncio
import fcntl
import json
import sys
import termios
from contextlib import suppress
from functools import partial
from typing import Any

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)
from uvicorn.server import ServerState

from billfish.server.api_errors import ApiError
from billfish.server.settings import ServerSettings

MAX_HEADERS = 100
MAX_PIPELINED = 100
"""Requests that may wait on a connection for the answer to the one before them."""
_FRAMING = (b"content-length", b"transfer-encoding")


class _Refused(Exception):
    pass


class BoundedProtocol(HttpToolsProtocol):
    """max_header_bytes: of the request line and all headers. header_seconds: from the first byte of
    a connection, or the end of the request before, until they are complete. write_seconds: without
    the client reading anything of its answer."""

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
        self._held = False  # the refusal waits for the answers before it
        self._running: RequestResponseCycle | None = None
        self._size = 0
        self._in_head = True
        self._resuming = False
        self._deadline: asyncio.TimerHandle | None = None
        self._reader_check: asyncio.TimerHandle | None = None

    # The connection.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        if len(self.connections) > self._settings.max_connections:
            self._refuse(503, "too many connections")
            self.send_400_response("")
            return
        self._start_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_deadline()
        self._stop_reader_check()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()  # after a reset uvicorn leaves it, and all this
        if self._running is not None:  # uvicorn tells only the latest request
            self._running.disconnected = True
            self._running.message_event.set()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._check_reader(before=None)

    def resume_writing(self) -> None:
        self._stop_reader_check()
        super().resume_writing()

    def _check_reader(self, before: int | None) -> None:
        """before: bytes that waited for the client the last time."""
        waiting = unread(self.transport)
        if before is not None and waiting >= before:
            self.transport.abort()
            return
        self._reader_check = self.loop.call_later(
            self._settings.write_seconds, self._check_reader, waiting
        )

    def _stop_reader_check(self) -> None:
        if self._reader_check is not None:
            self._reader_check.cancel()
            self._reader_check = None

    # What the client sends.

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        if self._deadline is None and not self._answering:
            self._start_deadline()
        if self._held or self.transport.is_closing():
            return
        try:
            self._feed(data)
        except HttpParserError:  # a _Refused too, which the parser passes on as one of its own
            self.send_400_response("")

    def _feed(self, data: bytes) -> None:
        """Nothing is offered to upgrade to, so whoever asks for it is answered as if it had not."""
        while data:
            try:
                self.parser.feed_data(data)
                return
            except HttpParserUpgrade as upgrade:
                data = data[upgrade.args[0] :]
                self._replace_parser()

    def _replace_parser(self) -> None:
        """By one that goes on where the old one gave up: before the body, if there is one."""
        self.parser = HttpRequestParser(self)
        lines = [name + b": " + value for name, value in self.headers if name in _FRAMING]
        if lines:
            self._resuming = True
            self.parser.feed_data(b"\r\n".join([b"POST / HTTP/1.1", *lines, b"", b""]))
            self._resuming = False

    def on_message_begin(self) -> None:
        if not self._resuming:
            self._size, self._in_head = 0, True
            super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        if not self._resuming:
            self._count(len(url))
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._resuming:
            return
        self._count(len(name) + len(value))
        if not self._in_head:
            return  # a trailer: it must not pass for a header
        if len(self.headers) >= MAX_HEADERS:
            self._refuse(431, f"more than {MAX_HEADERS} headers")
            raise _Refused
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._resuming:
            return
        self._in_head = False
        self._stop_deadline()
        if b"#" in self.url:  # uvicorn would drop what follows
            self._refuse(400, "the request target must be a path")
            raise _Refused
        if len(self.pipeline) >= MAX_PIPELINED:
            self._refuse(400, "too many requests at once on one connection")
            raise _Refused
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade() and any(name in _FRAMING for name, _ in self.headers):
            return  # the body is still to come: see _replace_parser
        super().on_message_complete()

    def _count(self, size: int) -> None:
        self._size += size
        most = self._settings.max_header_bytes
        if self._size > most:
            self._refuse(431, f"request line and headers have more than {most} bytes")
            raise _Refused

    # Requests and answers.

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    @property
    def _answering(self) -> bool:
        return self._running is not None and not self._running.response_complete

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._held and not self._answering:
            self._send_refusal()

    def _start_deadline(self) -> None:
        self._deadline = self.loop.call_later(self._settings.header_seconds, self._too_slow)

    def _stop_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _too_slow(self) -> None:
        self._refuse(408, "the headers did not arrive in time")
        self.send_400_response("")

    def _refuse(self, status: int, message: str) -> None:
        self._refusal = ApiError(status, message)

    def send_400_response(self, msg: str) -> None:
        """Called by uvicorn for what it cannot parse, and here for what is refused.

        Answers keep the order of the requests: those before it are sent first.
        """
        running = self._running
        if running is None or running.response_complete:
            self._send_refusal()
        elif running is not self.cycle or not running.more_body:  # a later request is at fault
            self._held = True
            if running is not self.cycle and self.cycle.more_body:
                self.pipeline.popleft()  # its own body is: it is never going to be complete
        elif running.response_started:
            self.transport.abort()
        else:
            self._send_refusal()

    def _send_refusal(self) -> None:
        if self.transport.is_closing():
            return
        if self._running is not None:
            self._running.disconnected = True  # whatever it had to say comes too late
            self._running.message_event.set()
        refusal = self._refusal or ApiError(400, "this is not an HTTP request")
        body = json.dumps(refusal.body).encode()
        self.transport.write(
            STATUS_LINE[refusal.status_code]
            + b"content-type: application/json\r\nconnection: close\r\n"
            + b"content-length: %d\r\n\r\n" % len(body)
            + body
        )
        self.transport.close()


def unread(transport: asyncio.Transport) -> int:
    """Bytes that the other side has not taken: those here, and where it tells, the system's. That
    takes megabytes, and says that it takes more only when a third of them is gone."""
    waiting = transport.get_write_buffer_size()
    with suppress(OSError, ValueError):  # ValueError: it is closed
        sock = transport.get_extra_info("socket")
        waiting += int.from_bytes(
            fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4)), sys.byteorder
        )
    return waiting


def protocol(settings: ServerSettings) -> Any:
    """What uvicorn takes for its `http` option."""
    return partial(BoundedProtocol, settings=settings)
