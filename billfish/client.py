"""A client of running OpenAI-compatible servers, for the commands that use one."""

import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import httpx

from billfish.errors import BillfishError, ConfigError, visible

CONNECT_SECONDS = 10.0


class ServerError(BillfishError):
    """A request failed. kind: in a word or two, to count by. status: of HTTP; None without one."""

    def __init__(self, kind: str, message: str, status: int | None = None) -> None:
        super().__init__(visible(message))
        self.kind, self.status = visible(kind), status


@dataclass(frozen=True, slots=True)
class Piece:
    """Some of an answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


class Client:
    """For one event loop; `async with`. url: of the server, with or without /v1. timeout: seconds
    without anything from the server.

    All methods raise ServerError, in words for a person. Proxies of the environment are used only
    for servers elsewhere.
    """

    def __init__(self, url: str, api_key: str | None = None, timeout: float = 600.0) -> None:
        base = url.rstrip("/").removesuffix("/v1")
        if not base.startswith(("http://", "https://")):
            raise ConfigError(f"the URL of a server begins with http:// or https://, not {url!r}")
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            raise ConfigError("an API key must be printable ASCII characters")
        self.url = base
        try:
            local = httpx.URL(base).host in ("localhost", "127.0.0.1", "::1")
        except httpx.InvalidURL as error:
            raise ConfigError(f"{url!r} is not a URL: {error}") from None
        self._http = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx.Timeout(timeout, connect=CONNECT_SECONDS, pool=None),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            trust_env=not local,
        )

    async def __aenter__(self) -> "Client":
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._http.aclose()

    async def first_model(self) -> str:
        """The name of the model that the server lists first."""
        try:
            return str((await self._json("GET", "/v1/models"))["data"][0]["id"])
        except (LookupError, TypeError):
            raise ServerError("no model", f"{self.url} lists no model") from None

    async def version(self) -> str | None:
        try:
            return str((await self._json("GET", "/version")).get("version"))
        except ServerError:  # not every server tells
            return None

    async def token_ids(self, text: str) -> list[int] | None:
        """The text's tokens; None from a server that does not say."""
        body = {"prompt": text, "add_special_tokens": False}
        try:
            found = (await self._json("POST", "/tokenize", body)).get("tokens")
        except ServerError as error:
            if error.status in (404, 405):
                return None
            raise
        return found if isinstance(found, list) else None

    async def stream(self, path: str, body: Mapping[str, Any]) -> AsyncIterator[Piece | Usage]:
        """The answer to a completion or chat that streams, as it comes. Closing it ends it."""
        try:
            async with self._http.stream("POST", self.url + path, json=body) as response:
                await _check(response)
                complete = False
                async for line in response.aiter_lines():
                    if not line.startswith("data:"):
                        continue
                    data = line[5:].strip()
                    if data == "[DONE]":
                        complete = True
                        break
                    for found in _events(data):
                        yield found
                if not complete:
                    raise ServerError("ended early", "the answer ended before it was complete")
        except httpx.HTTPError as error:
            raise self._failure(error) from None

    async def _json(
        self, method: str, path: str, body: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        try:
            response = await self._http.request(method, self.url + path, json=body)
            await _check(response)
            answer = response.json()
        except httpx.HTTPError as error:
            raise self._failure(error) from None
        except ValueError:
            raise ServerError("not JSON", f"{self.url}{path} does not answer in JSON") from None
        if not isinstance(answer, dict):
            raise ServerError("not JSON", f"{self.url}{path} answers something else")
        return answer

    def _failure(self, error: httpx.HTTPError) -> ServerError:
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            return ServerError("no connection", f"no server answers at {self.url}")
        if isinstance(error, httpx.TimeoutException):
            return ServerError("timeout", f"{self.url} took too long to answer")
        return ServerError("connection lost", f"the connection to {self.url} was lost")


async def _check(response: httpx.Response) -> None:
    if response.is_success:
        return
    await response.aread()
    status = response.status_code
    try:
        message = response.json()["error"]["message"]
    except (ValueError, LookupError, TypeError):
        message = response.reason_phrase or "no reason given"
    raise ServerError(f"HTTP {status}", f"the server says: {message} (HTTP {status})", status)


def _events(data: str) -> list[Piece | Usage]:
    try:
        event = json.loads(data)
        if error := event.get("error"):
            kind = error.get("code") or error.get("type") or "unknown"
            raise ServerError(
                f"error in the stream: {kind}", f"the server says: {error['message']}"
            )
        found: list[Piece | Usage] = []
        for choice in event.get("choices", ()):
            text = choice.get("text")
            if text is None:
                text = (choice.get("delta") or {}).get("content")
            if text:
                found.append(Piece(text))
        if usage := event.get("usage"):
            details = usage.get("prompt_tokens_details") or {}
            found.append(
                Usage(
                    usage["prompt_tokens"], usage["completion_tokens"],
                    details.get("cached_tokens") or 0,
                )
            )  # fmt: skip
        return found
    except (ValueError, LookupError, TypeError, AttributeError):
        raise ServerError("malformed event", "the server sent an event that is none") from None
