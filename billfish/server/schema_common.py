"""What the schemas of requests share: strictness, and the options of sampling."""

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

MAX_CHOICE_LENGTH = 1024

TokenId: TypeAlias = Annotated[int, Field(ge=0, lt=2**31)]
StopString: TypeAlias = Annotated[
    str, Field(min_length=1, max_length=limits.MAX_STOP_STRING_LENGTH)
]


def _check_schema(schema: dict[str, Any]) -> dict[str, Any]:
    try:
        StructuredOutput.json_schema(schema)
    except InvalidRequestError as error:
        raise ValueError(error.reason) from None
    return schema


SchemaObject = Annotated[dict[str, Any], AfterValidator(_check_schema)]
"""A JSON schema within the bounds of StructuredOutput. It comes out of JSON: no need to look at
each of its values."""


def kind(value: Any) -> str:
    """Which alternative is meant, so that an error is about that one."""
    return "str" if isinstance(value, str) else "list"


class FieldError(ValueError):
    """A ValueError that names the field, where pydantic would name only what holds it."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(reason)
        self.field = field


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
            Discriminator(kind),
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
