"""Finds tool calls in what a model writes, as it is written: a parser for each format."""

import ast
import json
from collections.abc import Collection

from billfish.server import call_parser
from billfish.server.call_parser import JsonCalls, ToolParser
from billfish.server.json_scanner import CallScanner


class HermesParser(JsonCalls):
    """<tool_call>{"name": ..., "arguments": {...}}</tool_call>: Hermes, Qwen and many others."""

    marker = "<tool_call>"
    END = "</tool_call>"
    marks = (marker, END)

    def _step(self, char: str) -> None:
        if self._where == "call":
            state = self._scan(char)
            if state == "closed":
                self._where = "after"
            elif state == "wrong":
                self._where = "text"
                if not self._started:
                    self._text(self.marker + self._scanner.text)
            return
        if self._where == "after":
            if not self._matched and char.isspace():
                return
            found = self._match(self.END, char)
            if found is False:  # an end mark left out; the text goes on
                held, self._matched = self._matched, ""
                self._where = "text"
                self._text(held)
            else:
                self._where = "text" if found else "after"
                return
        self._read_text(char)

    def _read_text(self, char: str) -> None:
        found = self._match(self.marker, char)
        if found:
            self._where = "call"
            self._begin_call()
        elif found is False:
            held, self._matched = self._matched, ""
            self._text(held)
            if held:
                self._read_text(char)
            else:
                self._text(char)

    def _end(self) -> None:
        if self._where == "call" and not self._started:
            self._text(self.marker + self._scanner.text)
        elif self._where == "text":
            self._text(self._matched)


class LlamaJsonParser(JsonCalls):
    """{"name": ..., "parameters": {...}} as the whole answer, several with ; between: Llama 3.1.

    Only functions that were offered count, for an answer may be JSON of another kind.
    """

    PYTHON_TAG = "<|python_tag|>"

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(names)
        self._where = "start"  # start, call, between, text
        self._before: list[str] = []  # read since the last call
        self._lead = ""  # of that, what is no space

    def _step(self, char: str) -> None:
        if self._where == "text":
            self._text(char)
        elif self._where == "call":
            self._continue(char)
        else:
            self._seek(char)

    def _continue(self, char: str) -> None:
        state = self._scan(char)
        if self._started:
            self._before, self._lead = [], ""
        if state == "closed" and self._started:
            self._where = "between"
        elif state != "open":
            self._give_up("" if self._started else self._scanner.text)

    def _seek(self, char: str) -> None:
        """Before a call. Spaces, one tag, and one semicolon between calls may stand there."""
        allowed = self.PYTHON_TAG if self._where == "start" else ";"
        if char == "{" and self._lead in ("", allowed):
            self._where = "call"
            self._begin_call()
            self._continue(char)
        elif char.isspace():
            self._before.append(char)
        elif allowed.startswith(self._lead + char):
            self._before.append(char)
            self._lead += char
        else:
            self._give_up(char)

    def _give_up(self, text: str) -> None:
        """No call after all: what was held back, and `text`."""
        self._where = "text"
        self._text("".join(self._before) + text)

    def _is_call(self, scanner: CallScanner) -> bool:
        return scanner.name in self._names and scanner.has_arguments

    def _end(self) -> None:
        if self._where in ("start", "between"):
            self._give_up("")
        elif self._where == "call" and not self._started:
            self._give_up(self._scanner.text)


class MistralParser(JsonCalls):
    """[TOOL_CALLS] and then a JSON list of calls, or name[ARGS]{...} again and again, which may be
    name[CALL_ID]id[ARGS]{...}."""

    marker = "[TOOL_CALLS]"
    CALL_ID = "[CALL_ID]"
    ARGS = "[ARGS]"
    marks = (marker, CALL_ID, ARGS)
    LONGEST_NAME = 256

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(names)
        self._held: list[str] = []  # from the marker, or the call before, to the next call
        self._name = ""

    def _step(self, char: str) -> None:
        match self._where:
            case "text":
                self._in_text(char)
            case "lead":
                self._in_lead(char)
            case "list":
                self._in_list(char)
            case "call":
                self._in_call(char)
            case "name":
                self._in_name(char)
            case "arguments":
                self._in_arguments(char)

    def _in_text(self, char: str) -> None:
        found = self._match(self.marker, char)
        if found:
            self._where, self._held, self._name = "lead", [self.marker], ""
        elif found is False:
            matched, self._matched = self._matched, ""
            self._text(matched)
            if matched:
                self._in_text(char)
            else:
                self._text(char)

    def _in_lead(self, char: str) -> None:
        if char == "[":
            self._where = "list"
            self._held.append(char)
        elif char.isspace():
            self._held.append(char)
        else:
            self._where = "name"
            self._in_name(char)

    def _in_list(self, char: str) -> None:
        """Between the calls of a list. While the marker is held there was none."""
        if char == "{":
            self._where = "call"
            self._begin_call()
            self._in_call(char)
        elif char == "," or char.isspace():
            self._held.append(char)
        elif char == "]" and self._held[:1] != [self.marker]:
            self._where = "text"
        else:
            self._give_up(char)

    def _in_call(self, char: str) -> None:
        state = self._scan(char)
        if self._started:
            self._held = []
        if state == "closed":
            self._where = "list"
        elif state == "wrong":
            self._give_up("" if self._started else self._scanner.text)

    def _in_name(self, char: str) -> None:
        name = self._name.removesuffix(self.ARGS).partition(self.CALL_ID)[0].rstrip()
        if char == "{" and name:
            self._where = "arguments"
            self._begin_call()
            for each in f'{{"name":{json.dumps(name)},"arguments":':
                self._scanner.push(each)
            self._in_arguments(char)
        elif char == "\n" or len(self._name) == self.LONGEST_NAME:
            self._give_up(self._name + char)
        else:
            self._name += char

    def _in_arguments(self, char: str) -> None:
        """Of a call by name: they have ended where the scanner waits for a comma."""
        self._scan(char)
        if self._scanner.after_value:
            self._where = "text"

    def _give_up(self, text: str) -> None:
        """No call after all: what was held back, and `text`."""
        self._where = "text"
        self._text("".join(self._held) + text)

    def _end(self) -> None:
        if self._where == "text":
            self._text(self._matched)
        elif self._where == "call" and not self._started:
            self._give_up(self._scanner.text)
        elif self._where in ("lead", "name"):
            self._give_up(self._name)
        elif self._where == "list" and self._held[:1] == [self.marker]:
            self._give_up("")


class PythonicParser(ToolParser):
    """[f(x=1), g(y="a")] as the whole answer: Llama 3.2 and 4. Each call comes when it is complete,
    because its arguments have to be turned into JSON."""

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(names)
        self._where = "start"  # start, list, after, text
        self._raw: list[str] = []  # read and not yet sent on
        self._quote = ""
        self._escaped = False
        self._depth = 0

    def _step(self, char: str) -> None:
        if self._where == "text":
            self._text(char)
            return
        self._raw.append(char)
        if self._where == "start":
            if char == "[":
                self._where = "list"
            elif not char.isspace():
                self._give_up()
        elif self._where == "after":
            if not char.isspace():
                self._give_up()
        elif len(self._raw) > call_parser.MAX_CALL_LENGTH:
            self._give_up()
        else:
            self._in_list(char)

    def _in_list(self, char: str) -> None:
        if self._quote:
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == self._quote:
                self._quote = ""
        elif char in "\"'":
            self._quote = char
        elif char in "([{":
            self._depth += 1
        elif char in ")}" or (char == "]" and self._depth):
            self._depth -= 1
            if not self._depth and char == ")":
                self._call()
        elif char == "]":
            if "".join(self._raw).strip() == "]" and self._calls:
                self._where, self._raw = "after", []
            else:
                self._give_up()

    def _call(self) -> None:
        source = "".join(self._raw).lstrip()
        source = source.removeprefix("," if self._calls else "[").strip()
        found = _python_call(source)
        if found is None or found[0] not in self._names:
            self._give_up()
            return
        self._start(found[0])
        self._arguments(found[1])
        self._raw = []

    def _give_up(self) -> None:
        self._where = "text"
        raw, self._raw = "".join(self._raw), []
        self._text(raw)

    def _end(self) -> None:
        self._text("".join(self._raw))


def _python_call(source: str) -> tuple[str, str] | None:
    """Name and arguments, as JSON, of a call with keyword arguments that are literals."""
    try:
        call = ast.parse(source, mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            return None
        values = {each.arg: ast.literal_eval(each.value) for each in call.keywords if each.arg}
        if len(values) != len(call.keywords):
            return None
        return ast.unparse(call.func), json.dumps(values, ensure_ascii=False, allow_nan=False)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


PARSERS: dict[str, type[ToolParser]] = {
    "hermes": HermesParser,
    "llama3_json": LlamaJsonParser,
    "mistral": MistralParser,
    "pythonic": PythonicParser,
}
