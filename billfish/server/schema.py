"""What requests may hold. A field that is not here is refused by name, never ignored."""

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import (
    AfterValidator,
    Discriminator,
    Field,
    StringConstraints,
    Tag,
    model_validator,
)

from billfish import sampling_params as limits
from billfish.server.schema_common import FieldError, Sampling, SchemaObject, Strict, TokenId, kind
from billfish.tokenizer.chat_template import MAX_MESSAGES

MAX_PROMPTS = 256
MAX_TOOLS = 128
MAX_TOOL_CALLS = 128
MAX_CONTENT_PARTS = 1024
MAX_TOTAL_SAMPLES = 1024
"""Samples of all prompts of a request together."""

TokenIds: TypeAlias = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
Name = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_.\-]{1,64}$")]


def _check_is_object(schema: dict[str, Any]) -> dict[str, Any]:
    if schema.get("type", "object") != "object":
        raise ValueError('its type must be "object"')
    return schema


ArgumentsSchema = Annotated[SchemaObject, AfterValidator(_check_is_object)]

NotSupported: TypeAlias = None
"""Of a field that OpenAI has and this server has not: null, as many clients send for what they do
not ask for."""


def _kind_of_prompt(value: Any) -> str:
    if isinstance(value, list) and value and isinstance(value[0], str | list):
        return f"list of {type(value[0]).__name__}"
    return kind(value)


class CompletionRequest(Sampling):
    prompt: Annotated[
        Annotated[str, Tag("str")]
        | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS), Tag("list of str")]
        | Annotated[TokenIds, Tag("list")]
        | Annotated[
            list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS), Tag("list of list")
        ],
        Discriminator(_kind_of_prompt),
    ] = Field(description="One or several, as text or as token ids.")
    max_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = Field(
        default=16, description="0: no more than the prompt, for echo and its log-probabilities."
    )
    logprobs: Annotated[int, Field(ge=0, le=limits.MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    best_of: NotSupported = None
    suffix: NotSupported = None
    add_special_tokens: bool | None = Field(
        default=None, description="Begin a text prompt as the model asks for; true if not given."
    )
    response_format: "ResponseFormat | None" = None


class TextPart(Strict):
    type: Literal["text"]
    text: str

    @model_validator(mode="before")
    @classmethod
    def _only_text(cls, data: Any) -> Any:
        kind = data.get("type") if isinstance(data, dict) else None
        if isinstance(kind, str) and kind != "text":
            raise FieldError("type", "only text is supported; nothing is fetched from elsewhere")
        return data


Content: TypeAlias = Annotated[
    Annotated[str, Tag("str")]
    | Annotated[
        list[TextPart],
        Field(min_length=1, max_length=MAX_CONTENT_PARTS, fail_fast=True),
        Tag("list"),
    ],
    Discriminator(kind),
]


class SystemMessage(Strict):
    role: Literal["system", "developer"]
    content: Content


class UserMessage(Strict):
    role: Literal["user"]
    content: Content


class CalledFunction(Strict):
    name: Name
    arguments: Annotated[str, Field(max_length=1 << 20)]


class ToolCall(Strict):
    id: Annotated[str, Field(min_length=1, max_length=256)]
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(Strict):
    """What the model said before. Fields that a reply holds may be sent back with null."""

    role: Literal["assistant"]
    content: Content | None = None
    tool_calls: (
        Annotated[list[ToolCall], Field(max_length=MAX_TOOL_CALLS, fail_fast=True)] | None
    ) = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: None = None

    @model_validator(mode="after")
    def _not_empty(self) -> "AssistantMessage":
        if self.content is None and not self.tool_calls:
            raise FieldError("content", "is required where there are no tool_calls")
        return self


class ToolMessage(Strict):
    role: Literal["tool"]
    content: Content
    tool_call_id: Annotated[str, Field(min_length=1, max_length=256)]


Message = Annotated[
    SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")
]
Messages: TypeAlias = Annotated[
    list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
]


class Function(Strict):
    name: Name
    description: Annotated[str, Field(max_length=1 << 16)] | None = None
    parameters: ArgumentsSchema | None = None
    strict: bool | None = Field(
        default=None, description="Arguments keep to the schema, whatever tool_choice is."
    )


class Tool(Strict):
    type: Literal["function"]
    function: Function


Tools: TypeAlias = Annotated[list[Tool], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)]


class NamedFunction(Strict):
    name: Name


class NamedToolChoice(Strict):
    type: Literal["function"]
    function: NamedFunction


class TextFormat(Strict):
    type: Literal["text"]


class JsonObjectFormat(Strict):
    type: Literal["json_object"]


class JsonSchema(Strict):
    name: Name
    description: Annotated[str, Field(max_length=1 << 16)] | None = None
    json_schema: SchemaObject = Field(alias="schema")
    strict: bool | None = Field(default=None, description="The text keeps to it either way.")


class JsonSchemaFormat(Strict):
    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")
]


class ChatTemplateArguments(Strict):
    """Those names of a template that a request may set: nothing that could replace the
    conversation or the template itself."""

    enable_thinking: bool | None = None


class ChatRequest(Sampling):
    messages: Messages
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = Field(
        default=None, description="The older name of max_completion_tokens."
    )
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = Field(
        default=None, description="As many as the model's context has room for, if not given."
    )
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=limits.MAX_LOGPROBS)] | None = None
    response_format: ResponseFormat | None = None
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: ChatTemplateArguments | None = None
    add_generation_prompt: bool | None = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None
    modalities: list[Literal["text"]] | None = None
    audio: NotSupported = None
    function_call: NotSupported = None
    functions: NotSupported = None
    metadata: NotSupported = None
    prediction: NotSupported = None
    prompt_cache_key: NotSupported = None
    prompt_cache_retention: NotSupported = None
    reasoning_effort: NotSupported = None
    safety_identifier: NotSupported = None
    verbosity: NotSupported = None
    web_search_options: NotSupported = None

    @model_validator(mode="after")
    def _check_chat(self) -> "ChatRequest":
        if None not in (self.max_tokens, self.max_completion_tokens):
            raise FieldError("max_tokens", "give either this or max_completion_tokens")
        if self.top_logprobs is not None and not self.logprobs:
            raise FieldError("top_logprobs", "is allowed only with logprobs: true")
        self._check_tools()
        return self

    def _check_tools(self) -> None:
        if self.tools is None:
            if self.tool_choice not in (None, "none"):
                raise FieldError("tool_choice", "is allowed only with tools")
            if self.parallel_tool_calls is not None:
                raise FieldError("parallel_tool_calls", "is allowed only with tools")
            return
        names = [tool.function.name for tool in self.tools]
        if len(set(names)) < len(names):
            raise FieldError("tools", "two of them have the same name")
        choice = self.tool_choice
        if isinstance(choice, NamedToolChoice) and choice.function.name not in names:
            raise FieldError("tool_choice", "names a function that is not among the tools")


class TokenizeRequest(Strict):
    """A text, or the messages of a chat."""

    model: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: ChatTemplateArguments | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _one_input(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise FieldError("prompt", "give either this or messages")
        if self.prompt is not None:
            for name in ("tools", "add_generation_prompt", "chat_template_kwargs"):
                if getattr(self, name) is not None:
                    raise FieldError(name, "is allowed only with messages")
        elif self.add_special_tokens is not None:
            raise FieldError("add_special_tokens", "is allowed only with prompt")
        return self


class DetokenizeRequest(Strict):
    model: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]
