"""Server-sent events: the answer to a request that streams."""

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from billfish.errors import BillfishError
from billfish.server.access_log import RequestInfo, info_of
from billfish.server.api_errors import ApiError, from_error
from billfish.server.generation import ClientGone, while_connected

logger = logging.getLogger(__name__)

encode = msgspec.json.Encoder().encode
"""Anything plain as JSON bytes; a string in a fraction of a microsecond."""

DONE = b"data: [DONE]\n\n"


def event(body: object) -> bytes:
    return b"data: " + encode(body) + b"\n\n"


class EventStream(Response):
    """Sends what `events` yields, until it ends or the client goes; `close` is called either way.

    An error after the first byte cannot change the status any more: it is an event of its own, and
    no [DONE] follows, so that nobody takes what came for the whole answer.
    """

    def __init__(
        self, events: AsyncGenerator[bytes, None], close: Callable[[], Awaitable[None]]
    ) -> None:
        super().__init__(media_type="text/event-stream")
        del self.headers["content-length"]
        # Proxies must neither keep nor collect what is to be seen at once.
        self.headers["cache-control"] = "no-store"
        self.headers["x-accel-buffering"] = "no"
        self._events = events
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await while_connected(receive, self._send_all(send, info_of(scope)))
        except ClientGone:
            info_of(scope).outcome = "disconnected"
        finally:
            await self._close()

    async def _send_all(self, send: Send, info: RequestInfo) -> None:
        try:
            async for data in self._events:
                await send({"type": "http.response.body", "body": data, "more_body": True})
            last = DONE
        except Exception as error:
            if not isinstance(error, BillfishError | ApiError):
                logger.error("a stream failed", exc_info=error)
            told = from_error(error)
            info.outcome = told.code or told.kind
            last = event(told.body)
        finally:
            await self._events.aclose()
        await send({"type": "http.response.body", "body": last, "more_body": False})
