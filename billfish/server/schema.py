"""What requests may hold. A field that is not here is refused by name, never ignored."""

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    StringConstraints,
    Tag,
    model_validator,
)

from billfish import sampling_params as limits
from billfish.engine.request_checks import MAX_CACHE_SALT_LENGTH
from billfish.errors import InvalidRequestError
from billfish.structured_output import (
    MAX_CHOICES,
    MAX_GRAMMAR_CHARACTERS,
    MAX_REGEX_CHARACTERS,
    StructuredOutput,
)
from billfish.tokenizer.chat_template import MAX_MESSAGES

MAX_PROMPTS = 256
MAX_TOOLS = 128
MAX_TOOL_CALLS = 128
MAX_CONTENT_PARTS = 1024
MAX_CHOICE_LENGTH = 1024
MAX_TOTAL_SAMPLES = 1024
"""Samples of all prompts of a request together."""

TokenId: TypeAlias = Annotated[int, Field(ge=0, lt=2**31)]
TokenIds: TypeAlias = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
StopString: TypeAlias = Annotated[
    str, Field(min_length=1, max_length=limits.MAX_STOP_STRING_LENGTH)
]
Name = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_.\-]{1,64}$")]


def _check_schema(schema: dict[str, Any]) -> dict[str, Any]:
    try:
        StructuredOutput.json_schema(schema)
    except InvalidRequestError as error:
        raise ValueError(error.reason) from None
    return schema


SchemaObject = Annotated[dict[str, Any], AfterValidator(_check_schema)]
"""A JSON schema within the bounds of StructuredOutput. It comes out of JSON: no need to look at
each of its values."""


def _check_is_object(schema: dict[str, Any]) -> dict[str, Any]:
    if schema.get("type", "object") != "object":
        raise ValueError('its type must be "object"')
    return schema


ArgumentsSchema = Annotated[SchemaObject, AfterValidator(_check_is_object)]

NotSupported: TypeAlias = None
"""Of a field that OpenAI has and this server has not: null, as many clients send for what they do
not ask for."""

_ELSEWHERE = {
    "functions": "is not supported: use tools",
    "function_call": "is not supported: use tool_choice",
    "best_of": "is not supported: use n",
    "guided_json": "is not supported: use response_format, or structured_outputs.json",
    "guided_regex": "is not supported: use structured_outputs.regex",
    "guided_choice": "is not supported: use structured_outputs.choice",
    "guided_grammar": "is not supported: use structured_outputs.grammar",
    "chat_template": "is not supported: only the model's own template is used",
}


def _kind(value: Any) -> str:
    """Which alternative is meant, so that an error is about that one."""
    return "str" if isinstance(value, str) else "list"


def _kind_of_prompt(value: Any) -> str:
    if isinstance(value, list) and value and isinstance(value[0], str | list):
        return f"list of {type(value[0]).__name__}"
    return _kind(value)


class Strict(BaseModel):
    """No conversion between types, no unknown fields."""

    model_config = ConfigDict(extra="forbid", strict=True, hide_input_in_errors=True)


class StreamOptions(Strict):
    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class StructuredOutputs(Strict):
    """What the text must match: exactly one of these."""

    json_schema: SchemaObject | None = Field(default=None, alias="json")
    json_object: Literal[True] | None = None
    regex: Annotated[str, Field(min_length=1, max_length=MAX_REGEX_CHARACTERS)] | None = None
    choice: (
        Annotated[
            list[Annotated[str, Field(min_length=1, max_length=MAX_CHOICE_LENGTH)]],
            Field(min_length=1, max_length=MAX_CHOICES),
        ]
        | None
    ) = None
    grammar: Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR_CHARACTERS)] | None = Field(
        default=None, description="In the Lark syntax of llguidance."
    )

    @model_validator(mode="after")
    def _check(self) -> "StructuredOutputs":
        given = [name for name in self.model_fields_set if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError("give exactly one of json, json_object, regex, choice and grammar")
        return self

    def form(self) -> StructuredOutput:
        if self.json_schema is not None:
            return StructuredOutput.json_schema(self.json_schema)
        if self.regex is not None:
            return StructuredOutput.regex(self.regex)
        if self.choice is not None:
            return StructuredOutput.choice(self.choice)
        if self.grammar is not None:
            return StructuredOutput.grammar(self.grammar)
        return StructuredOutput.json_object()


class Sampling(Strict):
    """What chat and completions share. Options beyond OpenAI's have the names that users of other
    servers know; docs/sampling.md says what each does."""

    model: Annotated[str, Field(min_length=1, max_length=1024)]
    n: Annotated[int, Field(ge=1, le=limits.MAX_SAMPLES)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = Field(
        default=None, description="0 and -1: all tokens."
    )
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    logit_bias: (
        Annotated[
            dict[
                Annotated[str, StringConstraints(pattern=r"^[0-9]{1,10}$")],
                Annotated[float, Field(ge=-100, le=100)],
            ],
            Field(max_length=limits.MAX_LOGIT_BIAS),
        ]
        | None
    ) = None
    allowed_token_ids: (
        Annotated[list[TokenId], Field(min_length=1, max_length=limits.MAX_ALLOWED_TOKEN_IDS)]
        | None
    ) = None
    bad_words: (
        Annotated[
            list[Annotated[str, Field(min_length=1, max_length=limits.MAX_BAD_WORD_LENGTH)]],
            Field(max_length=limits.MAX_BAD_WORDS),
        ]
        | None
    ) = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: (
        Annotated[
            Annotated[StopString, Tag("str")]
            | Annotated[list[StopString], Field(max_length=limits.MAX_STOP_STRINGS), Tag("list")],
            Discriminator(_kind),
        ]
        | None
    ) = None
    include_stop_str_in_output: bool | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=limits.MAX_STOP_TOKEN_IDS)] | None = (
        None
    )
    skip_special_tokens: bool | None = Field(
        default=None, description="false: control tokens show in the text by their names."
    )
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    structured_outputs: StructuredOutputs | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_CACHE_SALT_LENGTH)] | None = (
        Field(
            default=None,
            description="Keeps what this leaves in the prefix cache from other requests.",
        )
    )
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = Field(
        default=None, description="Lower is served earlier; 0 if not given."
    )
    user: Annotated[str, Field(max_length=256)] | None = Field(
        default=None, description="Written to the log beside the request."
    )

    @model_validator(mode="before")
    @classmethod
    def _name_alternatives(cls, data: Any) -> Any:
        """Say what to use instead of a field that another server has."""
        for name, what in _ELSEWHERE.items():
            if isinstance(data, dict) and data.get(name) is not None:
                raise FieldError(name, what)
        return data

    @model_validator(mode="after")
    def _check_streaming(self) -> "Sampling":
        if self.stream_options is not None and not self.stream:
            raise FieldError("stream_options", "is allowed only with stream: true")
        return self


class FieldError(ValueError):
    """A ValueError that names the field, where pydantic would name only what holds it."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(reason)
        self.field = field


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
    Discriminator(_kind),
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
