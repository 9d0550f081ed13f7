"""Chat templates: the Jinja source that a model file carries, rendered for a list of messages."""

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2.sandbox import SecurityError

from billfish.errors import CheckpointError, InvalidRequestError
from billfish.tokenizer.sandbox import MAX_TEXT, BoundedEnvironment, rendering

ROLES = ("system", "user", "assistant", "tool")
MAX_MESSAGES = 10_000
MAX_CONTENT = MAX_TEXT // 2  # characters of all messages together
MAX_NESTING = 64  # of what tools and the arguments of their calls hold
_MAX_SOURCE = 1 << 18  # characters; the longest published templates have some 20,000


class ChatTemplate:
    """A compiled template. Rendering changes nothing in it, so threads may share it.

    source: the template; path: the file it is from, for errors; bos_token, eos_token: their texts,
    which templates write out; key: where in the file it stands. Raises CheckpointError when the
    source is not a template, or uses what the sandbox does not offer.
    """

    def __init__(
        self,
        source: str,
        path: str,
        *,
        bos_token: str = "",
        eos_token: str = "",
        key: str = "tokenizer.chat_template",
    ) -> None:
        if len(source) > _MAX_SOURCE:
            reason = f"has {len(source)} characters, more than {_MAX_SOURCE}"
            raise CheckpointError(path, reason, tensor=key)
        self.source = source
        self._path, self._key = path, key
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
                path, f"line {error.lineno}: {error.message}", tensor=key
            ) from None
        # Python's own compiler limits: nesting, numbers of thousands of digits.
        except (RecursionError, SyntaxError, ValueError, OverflowError, MemoryError) as error:
            raise CheckpointError(path, f"cannot be compiled: {error}", tensor=key) from None

    def render(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool,
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of a chat. tools: as the template takes them; variables: others of its names.

        Raises InvalidRequestError when the messages or tools are not well-formed
        (`check_messages`, `check_tools`) or the template refuses them, and CheckpointError when the
        template exceeds a bound of the sandbox.
        """
        check_messages(messages)
        check_tools(tools)
        names = {
            **(variables or {}),
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            with rendering():
                return self._template.render(names)
        except (SecurityError, RecursionError, MemoryError) as error:
            raise CheckpointError(self._path, f"rendering: {error}", tensor=self._key) from None
        except Exception as error:  # the template is a program: it may raise anything
            raise InvalidRequestError("messages", f"the chat template failed: {error}") from None


def check_messages(messages: Any) -> None:
    """Raise InvalidRequestError, naming the place, unless `messages` is a non-empty list of
    {"role": one of ROLES, "content": string}.

    An assistant's message may also hold "tool_calls", a list of {"function": {"name": string,
    "arguments": object}} with or without "id" and "type", and a tool's "tool_call_id" and "name".
    """
    if not isinstance(messages, list | tuple) or not messages:
        raise InvalidRequestError("messages", "must be a list of at least one message")
    if len(messages) > MAX_MESSAGES:
        raise InvalidRequestError("messages", f"at most {MAX_MESSAGES} are allowed")
    characters = 0
    for i, message in enumerate(messages):
        place = f"messages[{i}]"
        if not isinstance(message, dict):
            raise InvalidRequestError(place, "must be an object with role and content")
        role = message.get("role")
        if role not in ROLES:
            raise InvalidRequestError(f"{place}.role", f"must be one of {', '.join(ROLES)}")
        for key in message:
            if key not in ("role", "content", *_MORE_KEYS.get(role, ())):
                raise InvalidRequestError(f"{place}.{key}", "is not supported")
        check_text(f"{place}.content", message.get("content"))
        if "tool_calls" in message:
            _check_calls(f"{place}.tool_calls", message["tool_calls"])
        more = {key: message[key] for key in message if key not in ("role", "content")}
        characters += len(message["content"])
        characters += sum(map(len, texts_in(place, more)))
        if characters > MAX_CONTENT:
            raise InvalidRequestError(
                place, f"the messages have more than {MAX_CONTENT} characters in all"
            )


_MORE_KEYS = {"assistant": ("tool_calls",), "tool": ("tool_call_id", "name")}


def _check_calls(place: str, calls: Any) -> None:
    if not isinstance(calls, list | tuple):
        raise InvalidRequestError(place, "must be a list")
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise InvalidRequestError(f"{place}[{i}]", "must hold a function with a name")
        if not isinstance(function.get("arguments"), dict):
            raise InvalidRequestError(f"{place}[{i}].function.arguments", "must be an object")


def check_tools(tools: Any) -> None:
    """Raise InvalidRequestError unless `tools` is None or a list of objects of plain data, of at
    most MAX_CONTENT characters in all."""
    if tools is None:
        return
    if not isinstance(tools, list | tuple) or not all(isinstance(tool, dict) for tool in tools):
        raise InvalidRequestError("tools", "must be a list of objects")
    if sum(map(len, texts_in("tools", tools))) > MAX_CONTENT:
        raise InvalidRequestError("tools", f"have more than {MAX_CONTENT} characters in all")


def texts_in(name: str, value: Any) -> Iterator[str]:
    """All strings in nested dicts and lists, keys too.

    Raises InvalidRequestError for what JSON cannot hold, and for more than MAX_NESTING levels.
    """
    level = [value]
    for _ in range(MAX_NESTING):
        below: list[Any] = []
        for each in level:
            if isinstance(each, str):
                check_text(name, each)
                yield each
            elif isinstance(each, dict):
                below += each
                below += each.values()
            elif isinstance(each, list | tuple):
                below += each
            elif not isinstance(each, bool | int | float | None):
                raise InvalidRequestError(name, f"holds a {type(each).__name__}")
        if not below:
            return
        level = below
    raise InvalidRequestError(name, f"is nested more than {MAX_NESTING} levels deep")


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
