"""The web page at `/`: plain HTML, CSS and JavaScript, read once and served from memory.

The page asks only this server, and only what the API offers everybody; its files need no API key,
which it asks its user for and sends along as any client does.
"""

import hashlib
from dataclasses import dataclass
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

FOLDER = "/page/"
NAMES = (
    "style.css", "app.js", "api.js", "blocks.js", "chat.js", "engine.js", "strip.js", "text.js",
    "icon.svg",
)  # fmt: skip
PATHS = frozenset({b"/", *(f"{FOLDER}{name}".encode() for name in NAMES)})
"""Raw paths, byte for byte."""

_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}

HEADERS = {
    # Nothing inline, nothing from elsewhere, nobody's frame: text that got in as markup could do
    # nothing.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Referrer-Policy": "no-referrer",
    "X-Frame-Options": "DENY",
    "Cache-Control": "no-cache",  # asked for again each time, sent only if it has changed
}


@dataclass(frozen=True, slots=True)
class File:
    content: bytes
    media_type: str
    etag: str

    def response(self, request: Request) -> Response:
        headers = {**HEADERS, "ETag": self.etag}
        known = request.headers.get("if-none-match", "")
        if self.etag in (tag.strip().removeprefix("W/") for tag in known.split(",")):
            return Response(status_code=304, headers=headers)
        return Response(self.content, headers=headers, media_type=self.media_type)


def routes() -> list[Route]:
    """GET and HEAD for each file."""
    found = [_route("/", "index.html")]
    return found + [_route(FOLDER + name, name) for name in NAMES]


def _route(path: str, name: str) -> Route:
    content = (files(__package__) / name).read_bytes()
    tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    file = File(content, _TYPES[name.rpartition(".")[2]], tag)

    async def send(request: Request) -> Response:
        return file.response(request)

    return Route(path, send, methods=["GET"], include_in_schema=False)
