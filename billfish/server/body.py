"""The body of a request: how large it may be, how long it may take, and what JSON it may hold."""

import asyncio
from typing import Any

from pydantic_core import from_json
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from billfish.server.api_errors import RETRY_AFTER, ApiError

MAX_HELD = 1 << 30
"""Bytes of the bodies of all requests that have not ended."""
MAX_CONTAINERS = 50_000
"""Objects and lists that a body may hold."""
MAX_COMMAS = 300_000
"""Commas in a body, those in texts too: as good as a count of its elements, before it is parsed."""
MAX_KEYS = 2_048
"""Keys that an object may have."""
MAX_DEPTH = 100


class BodyLimit:
    """Refuses bodies that are too large before they are read, and those that come too slowly."""

    def __init__(self, app: ASGIApp, max_bytes: int, seconds: float) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._seconds = seconds
        self._held = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        self._check_headers(scope)
        deadline = asyncio.get_running_loop().time() + self._seconds
        size, complete = 0, False

        async def limited() -> Message:
            nonlocal size, complete
            if complete:  # only the end of the connection is awaited now
                return await receive()
            message = await self._before(deadline, receive)
            complete = not message.get("more_body", False)
            length = len(message.get("body", b""))
            size += length
            self._held += length
            if size > self._max_bytes:
                raise self._too_large()
            if self._held > MAX_HELD:
                raise ApiError(
                    429, "too much is being sent at once: try again later",
                    kind="rate_limit_error", code="rate_limit_exceeded",
                    headers={"Connection": "close", "Retry-After": str(RETRY_AFTER)},
                )  # fmt: skip
            return message

        try:
            await self._app(scope, limited, send)
        finally:
            self._held -= size

    def _check_headers(self, scope: Scope) -> None:
        headers = dict(scope["headers"])
        length = headers.get(b"content-length")
        if length is not None and int(length) > self._max_bytes:
            raise self._too_large()
        if headers.get(b"content-encoding", b"identity").lower() != b"identity":
            raise ApiError(
                415, "Content-Encoding is not supported: send the body as it is",
                code="unsupported_media_type",
            )  # fmt: skip
        if headers.get(b"transfer-encoding", b"chunked").lower() != b"chunked":
            raise ApiError(400, "Transfer-Encoding may only be chunked")
        if scope["method"] == "POST":
            # Another type would let any web page send requests from its visitors' browsers.
            kind, _, parameters = headers.get(b"content-type", b"").lower().partition(b";")
            charset = parameters.strip().removeprefix(b"charset=").strip(b'"')
            if kind.strip() != b"application/json" or charset not in (b"", b"utf-8"):
                raise ApiError(
                    415, "Content-Type must be application/json, in UTF-8",
                    code="unsupported_media_type",
                )  # fmt: skip

    async def _before(self, deadline: float, receive: Receive) -> Message:
        try:
            async with asyncio.timeout_at(deadline):
                return await receive()
        except TimeoutError:
            raise ApiError(
                408, "the body did not arrive in time", code="request_timeout",
                headers={"Connection": "close"},
            ) from None  # fmt: skip

    def _too_large(self) -> ApiError:
        return ApiError(
            413, f"the body is larger than {self._max_bytes} bytes", code="request_too_large",
            headers={"Connection": "close"},
        )  # fmt: skip


class JsonRequest(Request):
    """A request whose body is read as strict JSON: no NaN, no deep nesting, no endless lists."""

    async def json(self) -> Any:
        if not hasattr(self, "_json"):
            body = await self.body()
            if body.count(b",") > MAX_COMMAS:
                raise ApiError(400, f"the body holds more than {MAX_COMMAS} commas")
            try:
                value = from_json(body, allow_inf_nan=False, cache_strings="keys")
            except ValueError as error:
                raise ApiError(400, f"the body is not valid JSON: {error}") from None
            _check_shape(value)
            self._json = value
        return self._json


def _check_shape(value: Any) -> None:
    """Whether it is cheap to look at more closely: validation reports every single fault."""
    level, found = [value], 0
    for _ in range(MAX_DEPTH):
        level = [inner for outer in level for inner in _containers(outer)]
        found += len(level)
        if not level:
            return
        if found > MAX_CONTAINERS:
            raise ApiError(400, f"the body holds more than {MAX_CONTAINERS} lists and objects")
    raise ApiError(400, f"the body is nested more than {MAX_DEPTH} deep")


def _containers(value: Any) -> list[Any]:
    if isinstance(value, dict):
        if len(value) > MAX_KEYS:
            raise ApiError(400, f"an object in the body has more than {MAX_KEYS} keys")
        return [inner for inner in value.values() if isinstance(inner, dict | list)]
    if not isinstance(value, list) or set(map(type, value)).isdisjoint((dict, list)):
        return []
    return [inner for inner in value if isinstance(inner, dict | list)]
