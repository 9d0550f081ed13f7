"""The server's side of the engine: one EngineClient in the server's process."""

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import ParamSpec, Protocol, TypeVar

import msgspec

from billfish.engine.request_checks import Room, check_priority
from billfish.errors import (
    EngineDiedError,
    EngineUnavailableError,
    InvalidRequestError,
    ProtocolError,
    QueueFullError,
    shown,
)
from billfish.sampling_params import SamplingParams
from billfish.server.messages import (
    MAX_REQUEST_ID_LENGTH,
    Abort,
    Ask,
    Drain,
    Draining,
    EngineHealth,
    EngineOutput,
    EngineRequest,
    Failed,
    FromEngine,
    Loading,
    ModelInfo,
    Outputs,
    Ready,
    Snapshot,
    State,
    Submit,
    ToEngine,
)
from billfish.server.offload import Offload
from billfish.server.streams import Mailbox, RequestStream
from billfish.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

NOT_RUNNING = {
    "starting": "the engine is starting: try again later",
    "dead": "the engine has ended; it is started again if that can help",
}
MAX_UNSENT = 1 << 26
"""Bytes that may wait for the engine to take them before no more requests are."""
SILENT_SECONDS = 2.0
"""Without an answer, after which health says so."""

_P = ParamSpec("_P")
_T = TypeVar("_T")


class Backend(Protocol):
    """Where messages go. Calls back, on the event loop: `receive` with each message that comes,
    `lost` with a reason when the engine has ended, and whether it will be started again."""

    receive: Callable[[FromEngine], None]
    lost: Callable[[str, bool], None]

    async def start(self) -> None: ...

    @property
    def silent_seconds(self) -> float:
        """How long the engine has owed a sign of life; 0 when it owes none."""

    @property
    def unsent_bytes(self) -> int:
        """What was sent, and the engine has not taken yet."""

    def send(self, message: ToEngine) -> None:
        """ProtocolError if it cannot be encoded or is too large; passed over if the engine is
        gone."""

    async def stop(self) -> None:
        """End the engine now, whatever it does."""


class EngineClient:
    """What the HTTP side sees of the engine. For one event loop.

        client = EngineClient(backend, load_tokenizer)
        await client.start()
        model = await client.wait_ready()
        async for output in client.generate(request):
            ...
        await client.drain(30.0)

    backend: an `EngineSupervisor`, or an engine in this process in tests. load_tokenizer: called in
    a thread by `start`. max_requests: requests that have not been read to their end; one more gets
    QueueFullError, so memory stays bounded whatever clients do.
    """

    def __init__(
        self,
        backend: Backend,
        load_tokenizer: Callable[[], Tokenizer],
        *,
        max_requests: int = 4096,
    ) -> None:
        self._backend = backend
        self._load_tokenizer = load_tokenizer
        self._max_requests = max_requests
        self._tokenizer: Tokenizer | None = None
        self._model: ModelInfo | None = None
        self._offload = Offload()
        self._streams: dict[str, Mailbox] = {}
        self._open = 0
        self._snapshots: dict[int, asyncio.Future[Snapshot]] = {}
        self._numbers = itertools.count()
        self._state: State = "starting"
        self._detail = "the engine starts"
        self._lasting = False
        self._draining = False
        self._engine_draining = ""  # why the engine itself takes no more requests
        self._since = time.monotonic()
        self._changed = asyncio.Event()
        self._loading = Loading("the engine starts")
        self._running = self._waiting = self._restarts = 0
        backend.receive = self._receive
        backend.lost = self._lost

    async def start(self) -> None:
        """Start the engine and load the tokenizer. Does not wait for the engine: see `wait_ready`.

        Raises what load_tokenizer raises, before an engine is started.
        """
        self._tokenizer = await self.run(0, self._load_tokenizer)
        await self._backend.start()

    async def wait_ready(self) -> ModelInfo:
        """Wait until the engine takes requests.

        EngineUnavailableError("dead") once it is not going to be started again, with the reason.
        """
        while self._state in ("starting", "dead"):
            if self._lasting:
                raise EngineUnavailableError("dead", self._detail)
            self._changed.clear()
            await self._changed.wait()
        return self.model

    async def drain(self, seconds: float) -> None:
        """Take no more requests, let those here run for so long, abort the rest, end the engine."""
        self._draining = True
        if self._state in ("ready", "busy"):
            self._backend.send(Drain(seconds))
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._streams:
                    self._changed.clear()
                    await self._changed.wait()
        await self.close()

    async def close(self) -> None:
        """End the engine now. Requests still here get EngineUnavailableError("draining")."""
        self._draining = True
        self._fail_all(lambda: EngineUnavailableError("draining", "the server is ending"))
        await self._backend.stop()
        self._set_state("dead", "the server is ending")
        self._lasting = True
        self._offload.close()

    @property
    def model(self) -> ModelInfo:
        """Known once the engine was ready for the first time; EngineUnavailableError before."""
        if self._model is None:
            raise EngineUnavailableError("starting", NOT_RUNNING["starting"])
        return self._model

    @property
    def tokenizer(self) -> Tokenizer:
        """Known after `start`. Call it through `run` where a text may be long."""
        if self._tokenizer is None:
            raise EngineUnavailableError("starting", "the server starts")
        return self._tokenizer

    async def run(
        self, size: int, function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs
    ) -> _T:
        """function(*args, **kwargs) off the event loop, for tokenization, templates and the like.

        size: characters that it works on; large work has threads of its own.
        """
        return await self._offload.run(size, function, *args, **kwargs)

    async def submit(self, request: EngineRequest) -> RequestStream:
        """Hand a request to the engine; returns once it has taken it.

        InvalidRequestError, CapacityError: it can never be served. QueueFullError: it may be later.
        EngineUnavailableError: the engine starts, is dead, or drains. EngineDiedError: it died
        before it answered. Cancelling the call, or closing the stream, aborts the request.
        """
        self._check(request)
        if request.sampling.bad_words and not request.bad_word_ids:
            spelled = await self.run(0, self.tokenizer.bad_word_ids, request.sampling.bad_words)
            request = msgspec.structs.replace(request, bad_word_ids=spelled)
            self._check(request)  # time has passed
        mailbox = Mailbox(request.request_id, request.sampling.n, self._closed)
        self._streams[request.request_id] = mailbox
        self._open += 1
        try:
            self._backend.send(Submit(request))
            await mailbox.accepted()
        except BaseException as error:
            mailbox.close()
            if isinstance(error, ProtocolError):
                raise InvalidRequestError("request", str(error)) from error
            raise
        return RequestStream(mailbox)

    async def generate(self, request: EngineRequest) -> AsyncIterator[EngineOutput]:
        """`submit`, and the outputs as they come. Closing or cancelling it aborts the request."""
        stream = await self.submit(request)
        try:
            async for output in stream:
                yield output
        finally:
            await stream.aclose()

    async def health(self) -> EngineHealth:
        """Answered from what is known here, at once, however busy the engine is."""
        state, detail = self._state, self._detail
        if state == "ready":
            silent = self._backend.silent_seconds
            if self._draining or self._engine_draining:
                state, detail = "busy", self._engine_draining or "the server is ending"
            elif silent > SILENT_SECONDS:
                state, detail = "busy", f"a step takes long: no answer for {silent:.0f} s"
            elif self._waiting or self._open >= self._max_requests:
                state, detail = "busy", f"{self._waiting} requests are waiting"
        return EngineHealth(
            state=state,
            detail=detail,
            accepting=self._refusal() is None,
            loaded=self._loading.done,
            to_load=self._loading.total,
            running=self._running,
            waiting=self._waiting,
            restarts=self._restarts,
            seconds_in_state=time.monotonic() - self._since,
        )

    async def stats(self, *, block_map: bool = False) -> Snapshot:
        """The engine's counters and latest steps. EngineUnavailableError while there is none."""
        self._check_alive()
        number = next(self._numbers)
        answer = asyncio.get_running_loop().create_future()
        self._snapshots[number] = answer
        try:
            self._backend.send(Ask(number, block_map))
            return await answer
        finally:
            del self._snapshots[number]

    # What a request must be before it is sent.

    def _check(self, request: EngineRequest) -> None:
        if (refusal := self._refusal()) is not None:
            raise refusal
        check_types(request)
        if request.request_id in self._streams:
            raise InvalidRequestError("request_id", f"{shown(request.request_id)} is in use")
        # A prompt that can never fit is not even sent.
        room = Room(self.model.max_model_len, self.model.num_blocks, self.model.block_size)
        room.max_tokens(len(request.prompt_token_ids), None)

    def _refusal(self) -> Exception | None:
        """Why no request is taken now."""
        if self._draining:
            return EngineUnavailableError("draining", "the server is ending")
        if self._engine_draining:
            return EngineUnavailableError("draining", self._engine_draining)
        if self._state in ("starting", "dead"):
            # Why, which may name files, is for `health`, not for whoever sends requests.
            return EngineUnavailableError(self._state, NOT_RUNNING[self._state])
        if self._open >= self._max_requests:
            return QueueFullError(f"{self._open} requests are here already: try again later")
        if self._backend.unsent_bytes > MAX_UNSENT:  # a step hangs, and clients come and go
            return QueueFullError("the engine does not keep up with what it is sent")
        return None

    def _check_alive(self) -> None:
        if self._state in ("starting", "dead"):
            raise EngineUnavailableError(self._state, NOT_RUNNING[self._state])

    # What comes back.

    def _receive(self, message: FromEngine) -> None:
        match message:
            case Outputs():
                self._receive_outputs(message)
            case Snapshot():
                answer = self._snapshots.get(message.number)
                if answer is not None and not answer.done():
                    answer.set_result(message)
            case Loading():
                self._loading = message
                self._set_state("starting", message.stage)
            case Draining():
                self._engine_draining = message.reason
            case Ready():
                self._model = message.model
                self._engine_draining = ""
                self._set_state("ready", "the engine is ready")
            case Failed():
                self._detail = str(message.problem.error())

    def _receive_outputs(self, message: Outputs) -> None:
        self._running, self._waiting = message.running, message.waiting
        streams = self._streams
        for request_id in message.accepted:
            if (stream := streams.get(request_id)) is not None:
                stream.accept()
        for request_id, problem in message.refused:
            if (stream := streams.get(request_id)) is not None:
                self._remove(request_id)
                stream.fail(problem.error())
        for output in message.outputs:
            stream = streams.get(output.request_id)
            if stream is None:  # aborted meanwhile
                continue
            stream.put(output)
            if output.finish_reason is not None and stream.ended:
                self._remove(output.request_id)

    def _lost(self, reason: str, again: bool) -> None:
        """The engine has ended. again: it will be started again."""
        self._restarts += again
        self._lasting = not again
        self._running = self._waiting = 0
        self._engine_draining = ""
        self._set_state("dead", reason)
        self._fail_all(lambda: EngineDiedError(reason))

    def _fail_all(self, error: Callable[[], Exception]) -> None:
        streams, self._streams = list(self._streams.values()), {}
        for stream in streams:
            stream.fail(error())
        for answer in self._snapshots.values():
            if not answer.done():
                answer.set_exception(error())
        self._changed.set()

    def _closed(self, request_id: str, unfinished: bool) -> None:
        """A stream is done with."""
        self._open -= 1
        if unfinished and self._streams.get(request_id) is not None:
            self._remove(request_id)
            self._backend.send(Abort((request_id,)))

    def _remove(self, request_id: str) -> None:
        del self._streams[request_id]
        if self._draining and not self._streams:
            self._changed.set()

    def _set_state(self, state: State, detail: str) -> None:
        if state != self._state:
            self._since = time.monotonic()
        self._state, self._detail = state, detail
        self._changed.set()


def check_types(request: EngineRequest) -> None:
    """InvalidRequestError unless the engine's process will be able to read it.

    What the values mean is checked there; a message that cannot be read would end the connection.
    """
    for name in ("request_id", "cache_salt"):
        text = getattr(request, name)
        if text is None and name == "cache_salt":
            continue
        if not isinstance(text, str) or not 0 < len(text) <= MAX_REQUEST_ID_LENGTH * 4:
            raise InvalidRequestError(name, f"must be a short text, got {shown(text)}")
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise InvalidRequestError(name, "holds a lone surrogate")
    if len(request.request_id) > MAX_REQUEST_ID_LENGTH:
        raise InvalidRequestError(
            "request_id", f"must have 1 to {MAX_REQUEST_ID_LENGTH} characters"
        )
    if not isinstance(request.sampling, SamplingParams):
        raise InvalidRequestError("sampling", "must be SamplingParams")
    check_priority(request.priority)
    prompt = request.prompt_token_ids
    if not isinstance(prompt, list | tuple):
        raise InvalidRequestError("prompt_token_ids", "must be a list of token ids")
    if prompt and (set(map(type, prompt)) != {int} or min(prompt) < 0 or max(prompt) >= 2**31):
        raise InvalidRequestError("prompt_token_ids", "must hold token ids only")
