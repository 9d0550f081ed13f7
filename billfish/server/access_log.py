"""One line of log for each request, and the id that ties it to the client's own records."""

import logging
import re
import secrets
import time
from dataclasses import dataclass, field

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from billfish.server.api_errors import ApiError, from_error
from billfish.server.metrics import ServerMetrics

logger = logging.getLogger("billfish.access")

REQUEST_ID = re.compile(r"[A-Za-z0-9._:\-]{1,128}")
_QUIET = frozenset({b"/health", b"/metrics", b"/engine/state"})


@dataclass(slots=True)
class RequestInfo:
    """What is known of a request; handlers fill in what they learn.

    status: None until a response begins. complete: all of it is sent. outcome: how its text ended.
    """

    request_id: str
    status: int | None = None
    complete: bool = False
    user: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    outcome: str | None = None
    started: float = field(default_factory=time.monotonic)


def info_of(scope: Scope) -> RequestInfo:
    return scope["billfish"]


class AccessLog:
    """The outermost layer. Gives each request an id (its own X-Request-Id, if it brings one), turns
    whatever is raised inside into an answer, and writes one line when it is over."""

    def __init__(self, app: ASGIApp, metrics: ServerMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        info = scope["billfish"] = RequestInfo(secrets.token_hex(12))
        # HEAD is GET whose answer has no body: uvicorn, which sees the original, leaves it out.
        inner = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                info.status = message["status"]
                headers = message.setdefault("headers", [])
                headers.append((b"x-request-id", info.request_id.encode()))
                headers.append((b"x-content-type-options", b"nosniff"))
            else:
                info.complete = not message.get("more_body", False)
            await send(message)

        try:
            _take_id(scope, info)
            await self._app(inner, receive, sending)
        except Exception as error:
            if not isinstance(error, HTTPException):
                logger.error("request %s failed", info.request_id, exc_info=error)
            if info.status is None:
                await from_error(error).response()(scope, receive, sending)
            elif not info.complete:
                raise  # the server closes the connection, so that the client sees it end early
        finally:
            self._metrics.count_response(inner, info.status)
            _write(scope, info)


def _take_id(scope: Scope, info: RequestInfo) -> None:
    given = [value for name, value in scope["headers"] if name == b"x-request-id"]
    if not given:
        return
    text = given[0].decode("latin-1")
    if len(given) > 1 or not REQUEST_ID.fullmatch(text):
        raise ApiError(
            400,
            "X-Request-Id must be 1 to 128 letters, digits and any of . _ : -",
            param="X-Request-Id",
        )
    info.request_id = text


def _write(scope: Scope, info: RequestInfo) -> None:
    """Nothing a client sends may forge a line or a terminal sequence: what is not printable ASCII
    is written out as an escape."""
    level = logging.DEBUG if scope["raw_path"] in _QUIET else logging.INFO
    if not logger.isEnabledFor(level):
        return
    client = scope.get("client")
    fields = {
        "request_id": info.request_id,
        "client": client[0] if client else None,
        "method": scope["method"],
        "path": printable(scope["raw_path"].decode("latin-1")),
        "status": info.status,
        "seconds": round(time.monotonic() - info.started, 4),
        "user": None if info.user is None else printable(info.user),
        "prompt_tokens": info.prompt_tokens,
        "completion_tokens": info.completion_tokens,
        "outcome": info.outcome,
    }
    known = {name: value for name, value in fields.items() if value is not None}
    message = " ".join(f"{name}={value}" for name, value in known.items())
    logger.log(level, "%s", message, extra={"fields": known})


def printable(text: str, most: int = 200) -> str:
    cut = text if len(text) <= most else f"{text[:most]}..."
    return cut.encode("unicode_escape").decode("ascii").replace(" ", "\\x20")
