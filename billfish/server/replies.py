"""What answers hold, for the OpenAPI description. Answers are plain dictionaries: cheap to make."""

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict  # what pydantic takes before Python 3.12


class ErrorBody(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(TypedDict):
    error: ErrorBody


class PromptTokensDetails(TypedDict):
    cached_tokens: int


class UsageReply(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TopLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    content: list[TokenLogprob]
    refusal: None


class FunctionReply(TypedDict):
    name: str
    arguments: str


class ToolCallReply(TypedDict):
    id: str
    type: Literal["function"]
    function: FunctionReply


class MessageReply(TypedDict):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: NotRequired[list[ToolCallReply]]


class ChatChoiceReply(TypedDict):
    index: int
    message: MessageReply
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    stop_reason: str | int | None


class ChatCompletion(TypedDict):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoiceReply]
    usage: UsageReply


class CompletionLogprobs(TypedDict):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoiceReply(TypedDict):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"]
    stop_reason: str | int | None


class Completion(TypedDict):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoiceReply]
    usage: UsageReply


class ModelReply(TypedDict):
    """default_sampling: options of the model's file, applied where a request is silent."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    default_sampling: dict[str, Any]


class ModelList(TypedDict):
    object: Literal["list"]
    data: list[ModelReply]


class TokenizeReply(TypedDict):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeReply(TypedDict):
    prompt: str


class HealthReply(TypedDict):
    status: Literal["starting", "ready", "busy", "dead"]
    detail: str
    accepting: bool
    running: int
    waiting: int
    restarts: int
    loaded: int
    to_load: int


class EngineModelReply(TypedDict):
    """num_blocks: KV blocks, of block_size tokens. max_model_len: tokens of prompt and output."""

    architecture: str
    dtype: str
    max_model_len: int
    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_waiting: int
    num_int4_layers: int


class TtftReply(TypedDict):
    """Seconds to first token, of the latest requests that got one."""

    latest: float | None
    p50: float | None
    p95: float | None


class BlocksReply(TypedDict):
    """The KV blocks in order. runs: a count and a code, and so on; code 0: free, 1: cached and held
    by nobody, 2 + i: held by groups[i]. groups: a reference count, and the holders as indexes into
    requests."""

    runs: list[int]
    groups: list[tuple[int, list[int]]]
    requests: list[str]


class SnapshotReply(TypedDict):
    """counters: totals since the engine started, and what is in use now. steps, oldest first:
    number, seconds, prefill tokens, decode tokens, output tokens, requests in it, and after it
    requests running, requests waiting, KV blocks in use."""

    counters: dict[str, Any]
    tokens_per_second: float
    ttft: TtftReply
    steps: list[list[float]]
    blocks: BlocksReply | None


class EngineStateReply(TypedDict):
    """model: null until it has been loaded once. engine: null while it starts or is dead, and when
    a step takes so long that it does not answer."""

    health: HealthReply
    model: EngineModelReply | None
    engine: SnapshotReply | None


class VersionReply(TypedDict):
    version: str
