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


class VersionReply(TypedDict):
    version: str
