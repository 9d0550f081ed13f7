"""Chat templates: the Jinja source that a model file carries, rendered for a list of messages."""

from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2.sandbox import SecurityError

from billfish.errors import CheckpointError, InvalidRequestError
from billfish.tokenizer.sandbox import MAX_TEXT, BoundedEnvironment, rendering

ROLES = ("system", "user", "assistant", "tool")
MAX_MESSAGES = 10_000
MAX_CONTENT = MAX_TEXT // 2  # characters of all messages together
_MAX_SOURCE = 1 << 18  # characters; the longest published templates have some 20,000
_KEY = "tokenizer.chat_template"


class ChatTemplate:
    """A compiled template. Rendering changes nothing in it, so threads may share it.

    source: the template; path: the file it is from, for errors; bos_token, eos_token: their texts,
    which templates write out. Raises CheckpointError when the source is not a template, or uses
    what the sandbox does not offer.
    """

    def __init__(self, source: str, path: str, *, bos_token: str = "", eos_token: str = "") -> None:
        if len(source) > _MAX_SOURCE:
            reason = f"has {len(source)} characters, more than {_MAX_SOURCE}"
            raise CheckpointError(path, reason, tensor=_KEY)
        self.source = source
        self._path = path
        names: dict[str, Any] = {
            "bos_token": bos_token,
            "eos_token": eos_token,
            # Published templates ask whether these are none, not whether they are defined.
            "tools": None,
            "documents": None,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }
        try:
            self._template = BoundedEnvironment().from_string(source, names)
        except jinja2.TemplateSyntaxError as error:
            raise CheckpointError(
                path, f"line {error.lineno}: {error.message}", tensor=_KEY
            ) from None
        # Python's own compiler limits: nesting, numbers of thousands of digits.
        except (RecursionError, SyntaxError, ValueError, OverflowError, MemoryError) as error:
            raise CheckpointError(path, f"cannot be compiled: {error}", tensor=_KEY) from None

    def render(self, messages: list[dict[str, Any]], add_generation_prompt: bool) -> str:
        """The text of a chat.

        Raises InvalidRequestError when the messages are not well-formed (`check_messages`) or the
        template refuses them, and CheckpointError when the template exceeds a bound of the sandbox.
        """
        check_messages(messages)
        try:
            with rendering():
                return self._template.render(
                    messages=messages, add_generation_prompt=add_generation_prompt
                )
        except (SecurityError, RecursionError, MemoryError) as error:
            raise CheckpointError(self._path, f"rendering: {error}", tensor=_KEY) from None
        except Exception as error:  # the template is a program: it may raise anything
            raise InvalidRequestError("messages", f"the chat template failed: {error}") from None


def check_messages(messages: Any) -> None:
    """Raise InvalidRequestError, naming the place, unless `messages` is a non-empty list of
    {"role": one of ROLES, "content": string} without further keys."""
    if not isinstance(messages, list | tuple) or not messages:
        raise InvalidRequestError("messages", "must be a list of at least one message")
    if len(messages) > MAX_MESSAGES:
        raise InvalidRequestError("messages", f"at most {MAX_MESSAGES} are allowed")
    characters = 0
    for i, message in enumerate(messages):
        place = f"messages[{i}]"
        if not isinstance(message, dict):
            raise InvalidRequestError(place, "must be an object with role and content")
        for key in message:
            if key not in ("role", "content"):
                raise InvalidRequestError(f"{place}.{key}", "is not supported")
        if message.get("role") not in ROLES:
            known = ", ".join(ROLES)
            raise InvalidRequestError(f"{place}.role", f"must be one of {known}")
        check_text(f"{place}.content", message.get("content"))
        characters += len(message["content"])
        if characters > MAX_CONTENT:
            raise InvalidRequestError(
                place, f"the messages have more than {MAX_CONTENT} characters in all"
            )


def check_text(name: str, text: object) -> None:
    """Raise InvalidRequestError unless `text` is a string that UTF-8 can hold."""
    if not isinstance(text, str):
        raise InvalidRequestError(name, f"must be a string, got {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            name, f"holds a lone surrogate at character {error.start}, which no UTF-8 text can"
        ) from None


def _raise_exception(message: object) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def _strftime_now(pattern: str) -> str:
    if not isinstance(pattern, str) or len(pattern) > 256:
        raise SecurityError("strftime_now takes a format of at most 256 characters")
    return datetime.now().strftime(pattern)
