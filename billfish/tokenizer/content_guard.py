"""Keeps message content from speaking in control tokens.

A chat template mixes its own control tokens with the content of messages into one string, in which
nobody can tell anymore who wrote "<|im_end|>". So before rendering, every control token written out
in content is broken by a mark: a code point that Unicode reserves for a program's own use (the
noncharacters U+FDD0 to U+FDEF) and that occurs neither in the messages nor in the template. In the
rendered string the template's tokens are whole and the content's are not; the mark is dropped from
the text that remains, so the model sees exactly what was typed, as text.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Any

from billfish.errors import InvalidRequestError
from billfish.tokenizer.chat_template import check_messages, check_tools, texts_in

_MARKS = [chr(code) for code in range(0xFDD0, 0xFDF0)]


class ContentGuard:
    """Breaks the texts in `control`, each of at least two characters, wherever content has them."""

    def __init__(self, control: Iterable[str]) -> None:
        texts = sorted(control, key=len, reverse=True)
        alternatives = "|".join(map(re.escape, texts))
        # A look-ahead finds overlapping tokens too; each is broken after its first character.
        self._inside = re.compile(f"(?=(?:{alternatives}))(.)", re.DOTALL) if texts else None
        self._starts = {text[:end] for text in texts for end in range(1, len(text))}
        self._ends = {text[start:] for text in texts for start in range(1, len(text))}
        self._longest = max(map(len, texts), default=0) - 1

    def protect(
        self, messages: Any, template: str, tools: Any = None
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None, str]:
        """Copies of the messages and tools with marks in what they hold, and the mark.

        Raises InvalidRequestError for messages or tools that are not well-formed, or that use up
        all 32 code points a mark could be.
        """
        check_messages(messages)
        check_tools(tools)
        used = set(template).union(*texts_in("messages", messages), *texts_in("tools", tools))
        mark = next((c for c in _MARKS if c not in used), None)
        if mark is None:
            raise InvalidRequestError("messages", "content holds all of U+FDD0 to U+FDEF")
        guarded = [self._message(message, mark) for message in messages]
        return guarded, None if tools is None else [self._tool(t, mark) for t in tools], mark

    def _message(self, message: dict[str, Any], mark: str) -> dict[str, Any]:
        known = {
            key: self._break(value, mark) if key != "role" and isinstance(value, str) else value
            for key, value in message.items()
        }
        if "tool_calls" in message:
            known["tool_calls"] = [self._tool(call, mark) for call in message["tool_calls"]]
        return known

    def _tool(self, tool: dict[str, Any], mark: str) -> dict[str, Any]:
        """The names that templates ask for stay as they are: those of a tool and its function."""
        return {
            key: self._tool(value, mark) if key == "function" and isinstance(value, dict)
            else self._data(value, mark)
            for key, value in tool.items()
        }  # fmt: skip

    def _data(self, value: Any, mark: str) -> Any:
        """Nested data; not deep, as was checked."""
        if isinstance(value, str):
            return self._break(value, mark)
        if isinstance(value, dict):
            return {self._break(k, mark): self._data(v, mark) for k, v in value.items()}
        if isinstance(value, Sequence):
            return [self._data(each, mark) for each in value]
        return value

    def _break(self, content: str, mark: str) -> str:
        if self._inside is None:
            return content
        content = self._inside.sub(rf"\1{mark}", content)
        core = content.strip()
        if not core:
            return content
        # A token may also form across the edge, of the content's last characters and whatever the
        # template puts behind them (another message, say). Templates trim spaces, hence the core.
        lengths = range(1, min(self._longest, len(core)) + 1)
        start = len(content) - len(content.lstrip())
        before = mark if any(core[:n] in self._ends for n in lengths) else ""
        after = mark if any(core[-n:] in self._starts for n in lengths) else ""
        return content[:start] + before + core + after + content[start + len(core) :]
