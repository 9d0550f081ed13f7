"""Who gets in: what a request looks like from outside, its Host, and its API key.

Everything here sees the raw request, before any router has had its way with the path.
"""

import hmac
import re
from collections.abc import Collection

from starlette.types import ASGIApp, Receive, Scope, Send

from billfish.server import page
from billfish.server.api_errors import ApiError
from billfish.server.settings import ServerSettings

OPEN_PATHS = page.PATHS | {b"/health"}
"""Raw paths that need no API key, byte for byte."""

LOOPBACK_HOSTS = frozenset({"localhost", "127.0.0.1", "::1"})

_HOST = re.compile(rb"(?:\[([0-9a-fA-F:.]{2,45})\]|([A-Za-z0-9._\-]{1,253}))(?::[0-9]{1,5})?")
_PATH = re.compile(rb"/[!-~]*")  # origin form: absolute, visible ASCII


class RequestCheck:
    """Refuses what no honest client sends: a target that is no path, several or malformed Host
    headers, and a Host that is not ours."""

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app = app
        allowed = frozenset(host.lower().strip("[]") for host in settings.allowed_hosts)
        if not allowed:
            allowed = LOOPBACK_HOSTS if settings.is_loopback else frozenset("*")
            if settings.is_loopback:
                allowed |= {settings.host}
        self._allowed = allowed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            self._check(scope)
        elif scope["type"] != "lifespan":
            return
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        if not _PATH.fullmatch(scope["raw_path"]):
            raise ApiError(400, "the request target must be a path")
        hosts = _values(scope, b"host")
        if len(hosts) > 1:
            raise ApiError(400, "more than one Host header")
        if not hosts:
            if scope["http_version"] == "1.1":
                raise ApiError(400, "the Host header is missing")
            return
        match = _HOST.fullmatch(hosts[0])
        if match is None:
            raise ApiError(400, "the Host header is malformed")
        host = (match[1] or match[2]).decode().lower()
        if host not in self._allowed and "*" not in self._allowed:
            raise ApiError(
                403, "this server does not answer to the host that the request names",
                code="host_not_allowed",
            )  # fmt: skip


class ApiKeyCheck:
    """Refuses all but requests that bring a key as `Authorization: Bearer KEY`, whatever their
    method and however their path is written. Only the raw paths in `open_paths` are free, to GET
    and HEAD."""

    def __init__(
        self, app: ASGIApp, keys: Collection[str], open_paths: Collection[bytes] = OPEN_PATHS
    ) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]
        self._open = frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._free(scope) and not self._has_key(scope):
            raise ApiError(
                401, "an API key is needed: Authorization: Bearer KEY", code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )  # fmt: skip
        await self._app(scope, receive, send)

    def _free(self, scope: Scope) -> bool:
        return scope["raw_path"] in self._open and scope["method"] == "GET"

    def _has_key(self, scope: Scope) -> bool:
        given = _values(scope, b"authorization")
        if len(given) != 1:
            return False
        scheme, _, key = given[0].partition(b" ")
        if scheme.lower() != b"bearer":
            return False
        # Every key is compared, each in constant time, so that time tells nothing about any.
        matches = [hmac.compare_digest(key.strip(), known) for known in self._keys]
        return any(matches)


def _values(scope: Scope, name: bytes) -> list[bytes]:
    return [value for key, value in scope["headers"] if key == name]
