"""All that passes between the server and the engine's process: typed, plain, never pickled.

Messages are msgpack. A message is decoded only into one of the types here, every field checked, so
bytes from the other side can at worst be refused (ProtocolError).
"""

import logging
from typing import Any, Literal

import msgspec

from billfish.config import EngineConfig
from billfish.engine.logprobs import TokenLogprobs
from billfish.engine.outputs import (
    BlockMap,
    EngineStats,
    FinishReason,
    RequestMetrics,
    StepRecord,
)
from billfish.errors import (
    BillfishError,
    CapacityError,
    CheckpointError,
    ConfigError,
    EngineUnavailableError,
    InvalidRequestError,
    ProtocolError,
    QueueFullError,
)
from billfish.sampling_params import SamplingParams

MAX_REQUEST_ID_LENGTH = 256
State = Literal["starting", "ready", "busy", "dead"]


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What one request asks of the engine; see `billfish.engine.Engine.add_request`.

    request_id: chosen by the server, unique among the requests that have not ended. priority: lower
    numbers first. bad_word_ids: filled in by EngineClient from sampling.bad_words.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    priority: int = 0
    cache_salt: str | None = None
    bad_word_ids: tuple[tuple[int, ...], ...] = ()


class Usage(msgspec.Struct, frozen=True, gc=False):
    """Tokens of one sample. cached_tokens: prompt tokens that the prefix cache held."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


class EngineOutput(msgspec.Struct, array_like=True, gc=False):
    """What came for one sample of a request since the last output for it.

    index: which of the `n` samples. text: new text, never half a character nor part of a stop
    string; the texts of a sample add up to exactly its text. token_ids: new tokens, the one that
    stopped the request included. completion_tokens: all tokens of the sample so far.

    finish_reason: None while the sample goes on; "error" where no token could be computed for it,
    and stop_reason then says why, if that is known. stop_reason: the stop string or token id.
    logprobs: of token_ids, where asked for. prompt_logprobs: of the prompt's tokens (None for the
    first), in the first output of a sample, where asked for. metrics: in the last output of a
    sample; times are seconds of CLOCK_MONOTONIC, the same clock in all processes of a machine.
    """

    request_id: str
    index: int
    text: str
    token_ids: list[int]
    completion_tokens: int
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    metrics: RequestMetrics | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def usage(self) -> Usage | None:
        """In the last output of a sample."""
        m = self.metrics
        if m is None:
            return None
        return Usage(m.num_prompt_tokens, m.cached_tokens, m.num_output_tokens)


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The model that the engine serves, and its limits.

    name: as the engine was told. vocab_size: tokens that may be chosen. max_model_len: longest
    sequence in tokens, prompt and output. num_blocks, block_size: the KV cache. default_sampling:
    options that the checkpoint asks for, by their names in SamplingParams; requests that do not set
    them should get them. num_int4_layers: linear layers whose weights are INT4.
    """

    name: str
    architecture: str
    dtype: str
    vocab_size: int
    max_model_len: int
    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_waiting: int
    eos_token_ids: tuple[int, ...]
    default_sampling: dict[str, Any] = {}
    num_int4_layers: int = 0


class EngineHealth(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's true state.

    starting: it loads; loaded, to_load: parts of the model, 0 of 0 before that is known. ready: it
    would begin with a new request at once. busy: it is alive, and a new request waits, or is
    refused: detail says why. dead: it has ended; detail says why, and whether it will be started
    again. accepting: whether a request sent now would be taken at all.
    running, waiting: requests, as the engine last said. restarts: since the server started.
    seconds_in_state: how long it has been so.
    """

    state: State
    detail: str
    accepting: bool
    loaded: int = 0
    to_load: int = 0
    running: int = 0
    waiting: int = 0
    restarts: int = 0
    seconds_in_state: float = 0.0


class Problem(msgspec.Struct, frozen=True, array_like=True):
    """An error on its way to the other side. kind: which class; what: the parameter or file."""

    kind: Literal["invalid", "capacity", "queue_full", "config", "checkpoint", "draining", "other"]
    message: str
    what: str = ""

    @staticmethod
    def of(error: BaseException) -> "Problem":
        """Errors that are not Billfish's own show their type alone: their text may be anything."""
        match error:
            case InvalidRequestError():
                return Problem("invalid", error.reason, error.parameter)
            case QueueFullError():
                return Problem("queue_full", str(error))
            case CapacityError():
                return Problem("capacity", str(error))
            case ConfigError():
                return Problem("config", str(error))
            case CheckpointError():
                return Problem("checkpoint", error.reason, error.file)
            case EngineUnavailableError():
                return Problem("draining", str(error))
            case BillfishError():
                return Problem("other", str(error))
        return Problem("other", f"internal error: {type(error).__name__}")

    def error(self) -> BillfishError:
        match self.kind:
            case "invalid":
                return InvalidRequestError(self.what, self.message)
            case "capacity":
                return CapacityError(self.message)
            case "queue_full":
                return QueueFullError(self.message)
            case "config":
                return ConfigError(self.message)
            case "checkpoint":
                return CheckpointError(self.what, self.message)
            case "draining":
                return EngineUnavailableError("draining", self.message)
        return BillfishError(self.message)


# From the server to the engine.


class Launch(msgspec.Struct, frozen=True, tag=True, array_like=True, kw_only=True):
    """The first message: which model to serve. drain_seconds: after SIGTERM, for what runs.
    log_format, log_level: see `billfish.server.logs`."""

    config: EngineConfig
    seed: int | None = None
    drain_seconds: float = 30.0
    log_format: str = "text"
    log_level: int = logging.INFO


class LaunchFake(msgspec.Struct, frozen=True, tag=True, array_like=True, kw_only=True):
    """The first message to an engine without a model; see `billfish.server.fake_engine`.

    reply: what it answers; "" goes on for ever. instant: no scheduler either, only outputs, and a
    step takes step_seconds.
    """

    reply: str = ""
    instant: bool = False
    step_seconds: float = 0.0
    drain_seconds: float = 30.0


class Submit(msgspec.Struct, frozen=True, tag=True, array_like=True):
    request: EngineRequest


class Abort(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Nobody reads the outputs of these any more. Unknown ids are passed over."""

    request_ids: tuple[str, ...]


class Ask(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Answered by a Snapshot with the same number. block_map: with the map of the KV blocks."""

    number: int
    block_map: bool = False


class Drain(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Take no more requests; after so many seconds abort those that still run, and end."""

    seconds: float


class Ping(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Answered by a Pong with the same number, between two steps."""

    number: int


# From the engine to the server.


class Loading(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """How far the start is. done of total parts of the model; 0 of 0 where there is no count."""

    stage: str
    done: int = 0
    total: int = 0


class Ready(msgspec.Struct, frozen=True, tag=True, array_like=True):
    model: ModelInfo


class Outputs(msgspec.Struct, tag=True, array_like=True, gc=False):
    """All that is new since the last of these: one step's outputs, usually.

    accepted: requests that the engine has taken. refused: those that it has not, and why.
    running, waiting: requests now.
    """

    outputs: list[EngineOutput]
    accepted: list[str]
    refused: list[tuple[str, Problem]]
    running: int
    waiting: int


class Snapshot(msgspec.Struct, frozen=True, tag=True, array_like=True, kw_only=True):
    """The engine at one moment.

    counters: totals since it started, and what is in use now. steps: the latest, oldest first.
    ttfts: seconds to first token of the requests that got one lately. tokens_per_second: generated
    in the last five seconds.
    """

    number: int
    counters: EngineStats
    steps: list[StepRecord]
    ttfts: list[float]
    tokens_per_second: float
    block_map: BlockMap | None = None


class Pong(msgspec.Struct, frozen=True, tag=True, array_like=True):
    number: int


class Draining(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """It takes no more requests, and ends when those here have."""

    reason: str


class Failed(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The last message: why the engine ends. lasting: starting it again would end the same way."""

    problem: Problem
    lasting: bool


ToEngine = Launch | LaunchFake | Submit | Abort | Ask | Drain | Ping
FromEngine = Loading | Ready | Outputs | Snapshot | Pong | Draining | Failed

_encoder = msgspec.msgpack.Encoder()
_to_engine = msgspec.msgpack.Decoder(ToEngine)
_from_engine = msgspec.msgpack.Decoder(FromEngine)


def encode(message: ToEngine | FromEngine) -> bytes:
    """ProtocolError for what msgpack cannot hold, such as text with lone surrogates."""
    try:
        return _encoder.encode(message)
    except (UnicodeEncodeError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ProtocolError(f"a message cannot be encoded: {type(error).__name__}") from error


def decode_to_engine(data: bytes | bytearray | memoryview) -> ToEngine:
    """ProtocolError unless it is one."""
    try:
        return _to_engine.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ProtocolError(f"not a message to the engine: {error}") from error


def decode_from_engine(data: bytes | bytearray | memoryview) -> FromEngine:
    """ProtocolError unless it is one."""
    try:
        return _from_engine.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ProtocolError(f"not a message from the engine: {error}") from error
