"""How the server is set up: who may use it, and how much of it."""

import ipaddress
from dataclasses import dataclass

from billfish.errors import ConfigError, shown
from billfish.server.tool_parsers import PARSERS

MIN_KEY_LENGTH = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Settings of the HTTP side.

    host, port: where to listen; port 0 takes a free one. model_names: names that requests may give
    the model; the first is the one that answers carry. api_keys: a request must bring one of them;
    none: everybody may.
    allowed_hosts: what a request's Host header may name, "*" for anything. Without, a server on
    the loopback interface takes only names of that interface, so that no web page can reach it by
    pointing its own name there, and others take any. allowed_origins: web pages of which origins
    may use the API from a browser; none unless given.
    tool_call_parser: how the model writes tool calls; None finds out from its chat template.
    max_body_bytes: of a request. body_seconds: for all of it to arrive. max_header_bytes: request
    line and headers together. header_seconds: for them to arrive. write_seconds: without the client
    reading any more of an answer that waits for it. max_connections: open at once.
    shutdown_seconds: for running requests to end after SIGTERM.
    log_format: "text" or "json".
    """

    host: str = "127.0.0.1"
    port: int = 8000
    model_names: tuple[str, ...] = ("model",)
    api_keys: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    tool_call_parser: str | None = None
    max_body_bytes: int = 4 << 20
    body_seconds: float = 30.0
    max_header_bytes: int = 1 << 15
    header_seconds: float = 10.0
    write_seconds: float = 60.0
    max_connections: int = 4096
    shutdown_seconds: float = 30.0
    log_format: str = "text"

    def __post_init__(self) -> None:
        if not self.model_names or not all(self.model_names):
            raise ConfigError("the model needs a name that is not empty")
        for key in self.api_keys:
            if len(key) < MIN_KEY_LENGTH or not key.isascii() or not key.isprintable():
                raise ConfigError(
                    f"an API key must be {MIN_KEY_LENGTH} or more printable ASCII characters"
                )
        if self.tool_call_parser not in (None, *PARSERS):
            known = ", ".join(PARSERS)
            raise ConfigError(
                f"tool_call_parser must be one of {known}, got {shown(self.tool_call_parser)}"
            )
        if self.log_format not in ("text", "json"):
            raise ConfigError(f'log_format must be "text" or "json", got {shown(self.log_format)}')
        if not 0 <= self.port < 2**16:
            raise ConfigError(f"port must be between 0 and {2**16 - 1}, got {self.port}")
        for name in (
            "max_body_bytes", "body_seconds", "max_header_bytes", "header_seconds", "write_seconds",
            "max_connections",
        ):  # fmt: skip
            if not getattr(self, name) > 0:  # NaN is not, either
                raise ConfigError(f"{name} must be above 0, got {shown(getattr(self, name))}")
        if not 0 <= self.shutdown_seconds < 1e6:
            raise ConfigError("shutdown_seconds must be a number from 0 up")

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the server."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False
