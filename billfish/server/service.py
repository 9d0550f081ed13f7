"""What the paths do, apart from HTTP itself."""

import asyncio
import time
from contextlib import suppress
from functools import cached_property
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from billfish.errors import BillfishError, InvalidRequestError
from billfish.sampling_params import SamplingParams
from billfish.server import chat, completions
from billfish.server.access_log import RequestInfo, info_of
from billfish.server.api_errors import ApiError, from_error
from billfish.server.engine_client import EngineClient
from billfish.server.engine_state import EngineView, describe_health
from billfish.server.generation import Generation, while_connected
from billfish.server.logprobs import LogprobFormatter
from billfish.server.metrics import ServerMetrics
from billfish.server.prompts import encode_chat, encode_prompts, encode_text
from billfish.server.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from billfish.server.settings import ServerSettings
from billfish.server.streaming import EventStream
from billfish.server.tools import ToolFormat, find_format, offered

STATS_SECONDS = 0.5
"""How long /metrics waits for the engine before it shows what was known last."""

Reply = chat.ChatReply | completions.CompletionReply


class Service:
    """What the handlers of one server share. Each method answers one path."""

    def __init__(self, engine: EngineClient, settings: ServerSettings) -> None:
        self.engine = engine
        self.settings = settings
        self.model_name = settings.model_names[0]
        self.metrics = ServerMetrics(self.model_name)
        self.view = EngineView(engine)
        self._created = int(time.time())

    @cached_property
    def formatter(self) -> LogprobFormatter:
        return LogprobFormatter(self.engine.tokenizer)

    @cached_property
    def tool_format(self) -> ToolFormat | None:
        tokenizer, name = self.engine.tokenizer, self.settings.tool_call_parser
        return find_format(tokenizer.chat_template, name, tokenizer.vocabulary.control)

    async def chat(self, request: Request, body: ChatRequest) -> Response:
        self._check_model(body.model)
        info, form = info_of(request.scope), self.tool_format
        try:
            sampling = chat.sampling(body, self.engine.model, form)
            generation = await while_connected(
                request.receive, self._start_chat(info, body, sampling)
            )
        except BillfishError as error:
            raise from_error(error, chat.renamed(body)) from error
        reply = chat.ChatReply(
            body,
            generation,
            request_id=info.request_id,
            model=self.model_name,
            form=form,
            formatter=self.formatter,
        )
        return await self._respond(request, body.stream, reply, generation)

    async def _start_chat(
        self, info: RequestInfo, body: ChatRequest, sampling: SamplingParams
    ) -> Generation:
        prompt = await encode_chat(
            self.engine,
            body.messages,
            offered(body),
            self.tool_format,
            body.chat_template_kwargs,
            body.add_generation_prompt,
        )
        return await Generation.start(
            self.engine, self.metrics, info, [prompt], sampling, body, chat.renamed(body)
        )

    async def complete(self, request: Request, body: CompletionRequest) -> Response:
        self._check_model(body.model)
        info = info_of(request.scope)
        prompts: list[list[int]] = []

        async def start() -> Generation:
            sampling = completions.sampling(body, self.engine.model)
            prompts.extend(await encode_prompts(self.engine, body))
            return await Generation.start(
                self.engine, self.metrics, info, prompts, sampling, body, completions.renamed(body)
            )

        try:
            generation = await while_connected(request.receive, start())
        except BillfishError as error:
            raise from_error(error, completions.renamed(body)) from error
        reply = completions.CompletionReply(
            body,
            generation,
            request_id=info.request_id,
            model=self.model_name,
            prompts=prompts,
            tokenizer=self.engine.tokenizer,
            formatter=self.formatter,
        )
        return await self._respond(request, body.stream, reply, generation)

    async def _respond(
        self, request: Request, stream: bool | None, reply: Reply, generation: Generation
    ) -> Response:
        if stream:
            return EventStream(reply.stream(), generation.close)
        try:
            return json_response(await while_connected(request.receive, reply.whole()))
        finally:
            await generation.close()

    async def tokenize(self, body: TokenizeRequest) -> Response:
        self._check_model(body.model)
        longest = self.engine.model.max_model_len
        if body.messages is not None:
            functions = [tool.function for tool in body.tools or ()]
            ids = await encode_chat(
                self.engine,
                body.messages,
                functions,
                self.tool_format,
                body.chat_template_kwargs,
                body.add_generation_prompt,
            )
        else:
            ids = await encode_text(self.engine, body.prompt or "", body.add_special_tokens)
        tokenizer, texts = self.engine.tokenizer, None
        if body.return_token_strs:
            texts = [tokenizer.decode([each], skip_special_tokens=False) for each in ids]
        return json_response(
            {"count": len(ids), "max_model_len": longest, "tokens": ids, "token_strs": texts}
        )

    async def detokenize(self, body: DetokenizeRequest) -> Response:
        self._check_model(body.model)
        try:
            text = await self.engine.run(
                4 * len(body.tokens), self.engine.tokenizer.decode, body.tokens
            )
        except InvalidRequestError as error:
            raise InvalidRequestError("tokens", error.reason) from error
        return json_response({"prompt": text})

    def models(self) -> Response:
        data = [self._model(name) for name in self.settings.model_names]
        return json_response({"object": "list", "data": data})

    def model(self, name: str) -> Response:
        self._check_model(name)
        return json_response(self._model(name))

    def _model(self, name: str) -> dict[str, Any]:
        model = self.engine.model
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "billfish",
            "max_model_len": model.max_model_len,
            "default_sampling": model.default_sampling,
        }

    def _check_model(self, name: str | None) -> None:
        if name is not None and name not in self.settings.model_names:
            raise ApiError(
                404,
                f"the model {name[:100]!r} does not exist here",
                param="model",
                code="model_not_found",
            )

    async def health(self) -> Response:
        """200 while the engine serves, 503 while it starts or is dead."""
        health = await self.engine.health()
        body = describe_health(health)
        return json_response(body, 200 if health.state in ("ready", "busy") else 503)

    async def prometheus(self) -> Response:
        self.metrics.health = await self.engine.health()
        with suppress(BillfishError, TimeoutError):
            async with asyncio.timeout(STATS_SECONDS):
                self.metrics.engine = (await self.engine.stats()).counters
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


def json_response(body: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")
