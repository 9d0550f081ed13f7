"""The engine as the messages see it: what they ask of it, and what it has to say."""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from billfish.engine import Engine, RequestOutput
from billfish.errors import (
    BillfishError,
    CapacityError,
    EngineUnavailableError,
    InvalidRequestError,
    QueueFullError,
    shown,
)
from billfish.server.messages import (
    Abort,
    Ask,
    Drain,
    EngineOutput,
    EngineRequest,
    FromEngine,
    Launch,
    LaunchFake,
    ModelInfo,
    Outputs,
    Problem,
    Snapshot,
    StepRecord,
    Submit,
    ToEngine,
)
from billfish.structured_output import StructuredOutput

logger = logging.getLogger(__name__)

RECENT_TTFTS = 256
RATE_SECONDS = 5.0
"""Over which tokens per second are told."""
MAX_PROMPT_LOGPROBS = 1 << 22
"""Log-probabilities of a request's prompt, some 16 bytes each on the way; a token has four more."""
MAX_COMPILING = 256
"""Requests whose required form may wait to be compiled."""


class Host(Protocol):
    """Answers messages; `EngineHost` is the one with an engine."""

    draining: bool
    wake: Callable[[], None]

    @property
    def busy(self) -> bool: ...
    @property
    def idle(self) -> bool: ...
    @property
    def steps_done(self) -> int: ...
    def handle(self, message: ToEngine) -> None: ...
    def step(self) -> list[FromEngine]: ...
    def abort_all(self) -> list[FromEngine]: ...


Report = Callable[[str, int, int], None]
"""Called with (stage, done, total) while the engine is built."""
Build = Callable[[Launch | LaunchFake, Report], tuple[Host, ModelInfo]]


class EngineHost:
    """Answers messages with one Engine; knows nothing of how they travel. Not thread-safe.

    compile: checks a required form, and keeps what it made of it for the executor; raises what is
    wrong with it. It runs in a thread, and the request reaches the engine only when that is done.
    draining: takes no more requests. wake: called, from any thread, when it has become busy.
    """

    def __init__(self, engine: Engine, compile: Callable[[StructuredOutput], None]) -> None:
        self.engine = engine
        self._compile = compile
        self._compilers = ThreadPoolExecutor(2, "grammar")
        self._compiling: dict[str, tuple[EngineRequest, Future[None]]] = {}
        self._compiled: deque[str] = deque()
        self.draining = False
        self.wake: Callable[[], None] = lambda: None
        self._accepted: list[str] = []
        self._refused: list[tuple[str, Problem]] = []
        self._answers: list[FromEngine] = []
        self._ttfts: deque[float] = deque(maxlen=RECENT_TTFTS)

    @property
    def busy(self) -> bool:
        """Whether `step` has anything to do or to say."""
        said = self._accepted or self._refused or self._answers or self._compiled
        return bool(said) or self.engine.has_unfinished

    @property
    def idle(self) -> bool:
        """Whether nothing at all is here."""
        return not (self.busy or self._compiling)

    @property
    def steps_done(self) -> int:
        """Steps that the executor completed."""
        return self.engine.num_steps

    def handle(self, message: ToEngine) -> None:
        match message:
            case Submit():
                self._submit(message.request)
            case Abort():
                for request_id in message.request_ids:
                    self._drop_compiling(request_id)
                    self.engine.abort(request_id)
            case Ask():
                self._answers.append(self._snapshot(message))
            case Drain():
                self.draining = True

    def step(self) -> list[FromEngine]:
        """Compute one step, if there is any; what there is to say."""
        while self._compiled:
            self._take_compiled(self._compiled.popleft())
        outputs = self.engine.step() if self.engine.has_unfinished else []
        return self.say(outputs)

    def say(self, outputs: list[RequestOutput]) -> list[FromEngine]:
        """These outputs, and the answers since the last time."""
        messages, self._answers = self._answers, []
        if outputs or self._accepted or self._refused:
            running, waiting = self.engine.num_running, self.engine.num_waiting
            converted = [self._convert(output) for output in outputs]
            messages.append(Outputs(converted, self._accepted, self._refused, running, waiting))
            self._accepted, self._refused = [], []
        return messages

    def abort_all(self) -> list[FromEngine]:
        """End all requests; what there is to say of it."""
        for request_id in list(self._compiling):
            self._drop_compiling(request_id)
            self._refused.append((request_id, Problem.of(_draining())))
        outputs = [out for name in self.engine.request_ids for out in self.engine.abort(name)]
        if self.engine.has_unfinished:  # the executor is told
            outputs += self.engine.step()
        return self.say(outputs)

    def _submit(self, request: EngineRequest) -> None:
        structured = request.sampling.structured
        try:
            if self.draining:
                raise _draining()
            if structured is None:
                self._add(request)
            else:
                self._begin_compiling(request, structured)
        except BillfishError as error:
            self._refused.append((request.request_id, Problem.of(error)))

    def _add(self, request: EngineRequest) -> None:
        check_prompt_logprobs(request)
        self.engine.add_request(
            request.request_id,
            request.prompt_token_ids,
            request.sampling,
            bad_word_ids=request.bad_word_ids,
            cache_salt=request.cache_salt,
            priority=request.priority,
        )
        self._accepted.append(request.request_id)

    def _begin_compiling(self, request: EngineRequest, structured: StructuredOutput) -> None:
        request_id = request.request_id
        if request_id in self._compiling:
            raise InvalidRequestError("request_id", f"{shown(request_id)} is in use")
        if len(self._compiling) >= MAX_COMPILING:
            raise QueueFullError(
                f"{MAX_COMPILING} requests wait for their required form to be compiled: "
                "try again later"
            )
        future = self._compilers.submit(self._compile, structured)
        self._compiling[request_id] = (request, future)
        future.add_done_callback(lambda _: self._end_compiling(request_id))

    def _end_compiling(self, request_id: str) -> None:
        """Called in whatever thread."""
        self._compiled.append(request_id)
        self.wake()

    def _take_compiled(self, request_id: str) -> None:
        request, future = self._compiling.get(request_id, (None, None))
        if request is None or future is None or not future.done():
            return  # aborted meanwhile
        del self._compiling[request_id]
        try:
            future.result()
            self._add(request)
        except Exception as error:
            if not isinstance(error, BillfishError):
                logger.exception("a required form could not be compiled")
            self._refused.append((request_id, Problem.of(error)))

    def _drop_compiling(self, request_id: str) -> None:
        if (found := self._compiling.pop(request_id, None)) is not None:
            found[1].cancel()

    def _convert(self, output: RequestOutput) -> EngineOutput:
        first = output.num_output_tokens == len(output.new_token_ids) > 0
        prompt = output.prompt_logprobs if first else None
        logprobs = output.new_logprobs
        metrics = output.metrics if output.finish_reason is not None else None
        if first and (ttft := (metrics or output.metrics).ttft) is not None:
            self._ttfts.append(ttft)
        return EngineOutput(
            output.request_id,
            output.index,
            output.delta,
            list(output.new_token_ids),
            output.num_output_tokens,
            output.finish_reason,
            output.stop_reason,
            None if logprobs is None else list(logprobs),
            None if prompt is None else list(prompt),
            metrics,
        )

    def _snapshot(self, ask: Ask) -> Snapshot:
        steps = list(self.engine.recent_steps)
        return Snapshot(
            number=ask.number,
            counters=self.engine.stats(),
            steps=steps,
            ttfts=list(self._ttfts),
            tokens_per_second=tokens_per_second(steps, time.monotonic()),
            block_map=self.engine.block_map() if ask.block_map else None,
        )


def tokens_per_second(steps: Sequence[StepRecord], now: float) -> float:
    """Generated in the last RATE_SECONDS, or since the first of these steps began."""
    recent = [step for step in steps if step.ended > now - RATE_SECONDS]
    if not recent:
        return 0.0
    since = max(now - RATE_SECONDS, steps[0].ended - steps[0].seconds)
    return sum(step.output_tokens for step in recent) / max(now - since, 1e-9)


def check_prompt_logprobs(request: EngineRequest) -> None:
    """CapacityError if those of its samples are more than should be sent at once."""
    top, tokens = request.sampling.prompt_logprobs, len(request.prompt_token_ids)
    if top is None:
        return
    size = tokens * (top + 4) * request.sampling.n
    if size > MAX_PROMPT_LOGPROBS:
        raise CapacityError(
            f"prompt_logprobs={top} of {tokens} tokens and n={request.sampling.n} are too many: "
            f"tokens * (prompt_logprobs + 4) * n may be {MAX_PROMPT_LOGPROBS}, and is {size}"
        )


def _draining() -> EngineUnavailableError:
    return EngineUnavailableError("draining", "the engine takes no more requests")
