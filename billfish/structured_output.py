"""The form that a text must have: a JSON schema, a regular expression, a grammar, a choice."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from billfish.errors import InvalidRequestError, shown

Kind = Literal["json_schema", "json_object", "regex", "grammar", "choice"]

MAX_SCHEMA_CHARACTERS = 1 << 17
MAX_SCHEMA_DEPTH = 64
MAX_REGEX_CHARACTERS = 1 << 13
MAX_GRAMMAR_CHARACTERS = 1 << 16
MAX_CHOICES = 1024
MAX_CHOICE_CHARACTERS = 1 << 16


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """The form of one request's text. Use the class methods; they take what people have at hand.

    kind and text: "json_schema": the schema as JSON text (draft 2020-12, as far as llguidance
    implements it). "json_object": any JSON object; no text. "regex": the whole text matches it
    (the syntax of Rust's regex crate, without look-around). "grammar": a context-free grammar in
    llguidance's variant of Lark. "choice": one of several strings, as a JSON array.

    Validated on construction in size and nesting; what it means is checked when it is compiled.
    Either raises InvalidRequestError for the parameter "structured".
    """

    kind: Kind
    text: str = ""

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            known = ", ".join(get_args(Kind))
            raise _invalid(f"kind must be one of {known}, got {shown(self.kind)}")
        if not isinstance(self.text, str):
            raise _invalid(f"text must be a string, got {shown(self.text)}")
        if not _is_unicode(self.text):
            raise _invalid("holds a lone surrogate, which no text can match")
        if self.kind == "json_object":
            if self.text:
                raise _invalid("json_object takes no text; use json_schema for a schema")
        elif not self.text:
            raise _invalid(f"{self.kind} needs a text")
        if self.kind == "json_schema":
            self._check_schema()
        elif self.kind == "regex":
            _check_length("the regex", self.text, MAX_REGEX_CHARACTERS)
        elif self.kind == "grammar":
            _check_length("the grammar", self.text, MAX_GRAMMAR_CHARACTERS)
        elif self.kind == "choice":
            self.choices()

    @staticmethod
    def json_schema(schema: Mapping[str, Any] | bool | str) -> "StructuredOutput":
        """schema: as a dict, or as JSON text. True, and {}, allow any JSON value."""
        return StructuredOutput("json_schema", schema if isinstance(schema, str) else _dump(schema))

    @staticmethod
    def json_object() -> "StructuredOutput":
        return StructuredOutput("json_object")

    @staticmethod
    def regex(pattern: str) -> "StructuredOutput":
        return StructuredOutput("regex", pattern)

    @staticmethod
    def grammar(lark: str) -> "StructuredOutput":
        return StructuredOutput("grammar", lark)

    @staticmethod
    def choice(choices: Sequence[str]) -> "StructuredOutput":
        if isinstance(choices, str) or not isinstance(choices, Sequence):
            raise _invalid(f"choices must be a list of strings, got {shown(choices)}")
        return StructuredOutput("choice", _dump(list(choices)))

    def choices(self) -> list[str]:
        """The strings of a choice."""
        _check_length("the choices", self.text, 2 * MAX_CHOICE_CHARACTERS)
        found = _parse(self.text)
        if not isinstance(found, list) or not 1 <= len(found) <= MAX_CHOICES:
            raise _invalid(f"a choice is a list of 1 to {MAX_CHOICES} strings")
        for choice in found:
            if not isinstance(choice, str) or not choice:
                raise _invalid(f"each choice must be a string that is not empty: {shown(choice)}")
            if not _is_unicode(choice):
                raise _invalid("a choice holds a lone surrogate, which no text can match")
        if sum(map(len, found)) > MAX_CHOICE_CHARACTERS:
            raise _invalid(f"the choices have more than {MAX_CHOICE_CHARACTERS} characters in all")
        return found

    def _check_schema(self) -> None:
        _check_length("the schema", self.text, MAX_SCHEMA_CHARACTERS)
        schema = _parse(self.text)
        if not isinstance(schema, dict | bool):
            raise _invalid(f"a schema is an object, true or false, got {shown(schema)}")
        level: list[Any] = [] if isinstance(schema, bool) else [schema]
        for _ in range(MAX_SCHEMA_DEPTH):
            level = [
                inner
                for value in level
                for inner in (value.values() if isinstance(value, dict) else value)
                if isinstance(inner, (dict, list))
            ]
            if not level:
                return
        raise _invalid(f"the schema is nested more than {MAX_SCHEMA_DEPTH} levels deep")


def _is_unicode(text: str) -> bool:
    """Whether it holds no lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise _invalid(f"the JSON is nested more than {MAX_SCHEMA_DEPTH} levels deep") from None
    except ValueError as error:
        raise _invalid(f"is not JSON: {error}") from None


def _dump(value: object) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise _invalid(f"cannot be written as JSON: {error}") from None


def _check_length(what: str, text: str, most: int) -> None:
    if len(text) > most:
        raise _invalid(f"{what} has {len(text)} characters; at most {most} are allowed")


def _invalid(reason: str) -> InvalidRequestError:
    return InvalidRequestError("structured", reason)
