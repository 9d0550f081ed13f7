"""The HTTP API: which path does what, and the layers that every request passes through."""

from collections.abc import Callable, Coroutine
from typing import Annotated, Any

from fastapi import FastAPI, Query
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from billfish.errors import BillfishError
from billfish.server import page, replies
from billfish.server.access import ApiKeyCheck, RequestCheck
from billfish.server.access_log import AccessLog
from billfish.server.api_errors import ApiError, from_error, from_validation
from billfish.server.body import BodyLimit, JsonRequest
from billfish.server.engine_client import EngineClient
from billfish.server.generation import ClientGone
from billfish.server.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from billfish.server.service import Service, json_response
from billfish.server.settings import ServerSettings
from billfish.version import __version__

CLIENT_GONE = 499
"""The status that the log shows for a client that went; nobody receives it."""


class JsonRoute(APIRoute):
    """Reads bodies as `JsonRequest` does."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def bounded(request: Request) -> Response:
            return await handle(JsonRequest(request.scope, request.receive))

        return bounded


def create_app(engine: EngineClient, settings: ServerSettings) -> ASGIApp:
    """The whole application, for an engine that others start and end."""
    service = Service(engine, settings)
    app = _routes(service)
    # The last layer added here is the first that a request meets.
    layers: ASGIApp = BodyLimit(app, settings.max_body_bytes, settings.body_seconds)
    if settings.api_keys:
        layers = ApiKeyCheck(layers, settings.api_keys)
    if settings.allowed_origins:  # outside of the key: a browser asks first, without one
        layers = CORSMiddleware(
            _answering(layers),
            allow_origins=settings.allowed_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],  # clients in browsers send headers of their own
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    return AccessLog(RequestCheck(layers, settings), service.metrics)


def _answering(app: ASGIApp) -> ASGIApp:
    """Errors of these layers as answers, so that what is around them may add its headers."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await app(scope, receive, send)
        except ApiError as error:
            await error.response()(scope, receive, send)

    return answer


def _routes(service: Service) -> FastAPI:
    app = FastAPI(
        title="Billfish",
        version=__version__,
        docs_url=None,  # they would fetch scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,  # a redirect would repeat whatever the Host header says
    )
    app.router.route_class = JsonRoute
    _add_handlers(app)
    _add_paths(app, service)
    app.router.routes += page.routes()
    return app


def _errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return {status: {"model": replies.ErrorReply} for status in statuses}


_ALWAYS = _errors(400, 401, 403, 408, 413, 500)


def _add_paths(app: FastAPI, service: Service) -> None:
    generation = {**_ALWAYS, **_errors(404, 415, 429, 503)}
    text = {**_ALWAYS, **_errors(404, 415, 503)}

    @app.post(
        "/v1/chat/completions",
        responses={200: _either(replies.ChatCompletion), **generation},
    )
    async def chat_completions(request: Request, body: ChatRequest) -> Response:
        return await service.chat(request, body)

    @app.post("/v1/completions", responses={200: _either(replies.Completion), **generation})
    async def completions(request: Request, body: CompletionRequest) -> Response:
        return await service.complete(request, body)

    @app.post("/tokenize", responses={200: {"model": replies.TokenizeReply}, **text})
    async def tokenize(body: TokenizeRequest) -> Response:
        return await service.tokenize(body)

    @app.post("/detokenize", responses={200: {"model": replies.DetokenizeReply}, **text})
    async def detokenize(body: DetokenizeRequest) -> Response:
        return await service.detokenize(body)

    @app.get("/v1/models", responses={200: {"model": replies.ModelList}, **_ALWAYS, **_errors(503)})
    async def models() -> Response:
        return service.models()

    @app.get(
        "/v1/models/{name:path}",
        responses={200: {"model": replies.ModelReply}, **_ALWAYS, **_errors(404, 503)},
    )
    async def model(name: str) -> Response:
        return service.model(name)

    health = {"model": replies.HealthReply}

    @app.get("/health", responses={200: health, 503: health, **_ALWAYS})
    async def engine_health() -> Response:
        return await service.health()

    plain = {"content": {"text/plain": {"schema": {"type": "string"}}}}

    @app.get("/metrics", responses={200: plain, **_ALWAYS}, response_class=Response)
    async def metrics() -> Response:
        return await service.prometheus()

    @app.get(
        "/engine/state",
        responses={200: {"model": replies.EngineStateReply}, **_ALWAYS},
    )
    async def engine_state(after: Annotated[int, Query(ge=-1, lt=2**53)] = -1) -> Response:
        """The engine at this moment; of its latest steps, those numbered higher than `after`."""
        return json_response(await service.view.state(after))

    @app.get("/version", responses={200: {"model": replies.VersionReply}, **_ALWAYS})
    async def version() -> Response:
        return json_response({"version": __version__})


def _either(whole: type) -> dict[str, Any]:
    """An answer that comes whole or, with stream: true, as events."""
    return {"model": whole, "content": {"text/event-stream": {"schema": {"type": "string"}}}}


def _add_handlers(app: FastAPI) -> None:
    @app.exception_handler(RequestValidationError)
    async def invalid(_request: Request, error: RequestValidationError) -> Response:
        return from_validation(error.errors(), error.body).response()

    async def known(_request: Request, error: Exception) -> Response:
        return from_error(error).response()

    app.add_exception_handler(HTTPException, known)
    app.add_exception_handler(BillfishError, known)
    app.add_exception_handler(Exception, known)

    @app.exception_handler(ClientGone)
    async def gone(_request: Request, _error: ClientGone) -> Response:
        return Response(status_code=CLIENT_GONE)
