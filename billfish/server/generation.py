"""What chat and completions share: from a request to running samples, and their outputs back."""

import asyncio
import itertools
import time
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Coroutine,
    Mapping,
    Sequence,
)
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.types import Receive

from billfish.engine.plan import NOT_FINITE
from billfish.errors import EngineUnavailableError
from billfish.sampling_params import SamplingParams
from billfish.server.access_log import RequestInfo
from billfish.server.api_errors import SERVER, ApiError
from billfish.server.engine_client import EngineClient
from billfish.server.messages import EngineOutput, EngineRequest
from billfish.server.metrics import RequestMeter, ServerMetrics
from billfish.server.schema_common import Sampling
from billfish.server.streams import RequestStream
from billfish.structured_output import StructuredOutput

_T = TypeVar("_T")

_SAME = (
    "n", "temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "allowed_token_ids", "bad_words", "seed", "stop",
    "include_stop_str_in_output", "stop_token_ids", "skip_special_tokens", "ignore_eos",
    "min_tokens",
)  # fmt: skip

_numbers = itertools.count()


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


def sampling_params(
    request: Sampling,
    defaults: Mapping[str, Any],
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
    structured: StructuredOutput | None,
    shown_special_token_ids: Sequence[int] = (),
) -> SamplingParams:
    """What a request asks for, and where it is silent the defaults of the model's file."""
    options: dict[str, Any] = dict(defaults)
    for name in _SAME:
        if (value := getattr(request, name)) is not None:
            options[name] = value
    if request.top_k is not None:
        options["top_k"] = max(0, request.top_k)
    if request.logit_bias is not None:
        options["logit_bias"] = {int(key): value for key, value in request.logit_bias.items()}
    return SamplingParams(
        **options,
        max_tokens=max_tokens,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        structured=structured,
        shown_special_token_ids=tuple(shown_special_token_ids),
    )


@dataclass(slots=True)
class Usage:
    """Tokens of a whole request, counted as its samples end."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: dict[int, int] = field(default_factory=dict)  # by prompt

    def take(self, prompt: int, output: EngineOutput) -> None:
        """A sample's last output."""
        self.completion_tokens += output.completion_tokens
        if output.metrics is not None and output.index == 0:
            self.cached_tokens[prompt] = output.metrics.cached_tokens

    def body(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self.cached_tokens.values())},
        }


class Generation:
    """The running requests of one HTTP request: one for each of its prompts."""

    def __init__(
        self,
        streams: Sequence[RequestStream],
        meters: Sequence[RequestMeter],
        usage: Usage,
        info: RequestInfo,
        eos_token_ids: Collection[int],
        form: str | None,
    ) -> None:
        """form: the field of the request that asks for a form of the text, if one does."""
        self._streams = streams
        self._meters = meters
        self.usage = usage
        self._info = info
        self._eos = eos_token_ids
        self._form = form

    @classmethod
    async def start(
        cls,
        engine: EngineClient,
        metrics: ServerMetrics,
        info: RequestInfo,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams,
        request: Sampling,
        renamed: Mapping[str, str],
    ) -> "Generation":
        """Returns once the engine has taken all prompts. If it refuses one, none is run."""
        info.user = request.user
        asked = [
            EngineRequest(
                request_id=f"{info.request_id}-{next(_numbers)}",
                prompt_token_ids=tuple(prompt),
                sampling=sampling,
                priority=request.priority or 0,
                cache_salt=request.cache_salt,
            )
            for prompt in prompts
        ]
        if len(asked) == 1:
            streams = [await engine.submit(asked[0])]
        else:
            streams = await _all(engine.submit, asked)
        meters = [metrics.track(sampling.n, len(prompt), info.started) for prompt in prompts]
        usage = Usage(sum(map(len, prompts)))
        info.prompt_tokens = usage.prompt_tokens
        form = None if sampling.structured is None else renamed["structured"]
        return cls(streams, meters, usage, info, engine.model.eos_token_ids, form)

    async def outputs(self) -> AsyncIterator[list[tuple[int, EngineOutput]]]:
        """What came, in batches: (which prompt, output). All that came together is in one batch."""
        async for number, batch in _merged(self._streams):
            meter = self._meters[number]
            for output in batch:
                meter.take(output)
                if output.finish_reason is not None:
                    self._finish(number, output)
            yield [(number, output) for output in batch]

    def _finish(self, number: int, output: EngineOutput) -> None:
        self._info.outcome = output.finish_reason
        if output.finish_reason == "error":
            raise self._failure(str(output.stop_reason or "no token could be computed"))
        if output.finish_reason == "abort":  # by us only when the server ends
            raise EngineUnavailableError("draining", "the server is shutting down")
        if output.stop_reason in self._eos:  # an ordinary end: nothing that was asked for
            output.stop_reason = None
        self.usage.take(number, output)
        self._info.completion_tokens = self.usage.completion_tokens

    def _failure(self, reason: str) -> ApiError:
        """A form that costs too much, or leaves no token, is the request's own fault."""
        if self._form is not None and reason != NOT_FINITE:
            return ApiError(400, f"{self._form}: {reason}", param=self._form)
        return ApiError(500, f"no answer: {reason}", kind=SERVER, code="generation_failed")

    async def close(self) -> None:
        """Abort what has not ended."""
        for stream in self._streams:
            await stream.aclose()


async def _merged(
    streams: Sequence[RequestStream],
) -> AsyncIterator[tuple[int, list[EngineOutput]]]:
    if len(streams) == 1:
        while batch := await streams[0].batch():
            yield 0, batch
        return
    queue: asyncio.Queue[tuple[int, list[EngineOutput], Exception | None]] = asyncio.Queue(16)

    async def pump(number: int, stream: RequestStream) -> None:
        try:
            while batch := await stream.batch():
                await queue.put((number, batch, None))
            await queue.put((number, [], None))
        except Exception as error:
            await queue.put((number, [], error))

    tasks = [asyncio.create_task(pump(i, stream)) for i, stream in enumerate(streams)]
    try:
        left = len(tasks)
        while left:
            number, batch, error = await queue.get()
            if error is not None:
                raise error
            if batch:
                yield number, batch
            else:
                left -= 1
    finally:
        for task in tasks:
            task.cancel()


async def _all(
    submit: Callable[[EngineRequest], Awaitable[RequestStream]], asked: Sequence[EngineRequest]
) -> list[RequestStream]:
    """Submit all at once; if one fails, drop all."""
    tasks = [asyncio.ensure_future(submit(each)) for each in asked]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, RequestStream):
                await result.aclose()
        raise


async def while_connected(receive: Receive, work: Coroutine[Any, Any, _T]) -> _T:
    """The result of `work`, which is cancelled when the client goes: ClientGone is raised then.

    The body of the request has to be read before.
    """
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGone
    finally:
        for task in (working, gone):
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await task


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def now() -> int:
    """For the field `created`."""
    return int(time.time())
