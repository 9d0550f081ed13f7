"""Reads the JSON of a tool call one character at a time, to send its arguments on as they come."""

import json

_SPACE = " \t\r\n"


class CallScanner:
    """Follows one JSON object that holds a function's name and its arguments, in either order.

    Feed it characters with `push`. `state` is "open" until the object has ended ("closed") or
    turned out not to be such a call ("wrong"). `name` is None until it is known. Arguments are
    handed out by `take` as the model wrote them, not a character added or lost; where they were not
    an object but a string that holds one, as some models write, they are what the string says.
    """

    ARGUMENTS = ("arguments", "parameters")

    def __init__(self) -> None:
        self.state = "open"
        self.name: str | None = None
        self.has_arguments = False
        self.num_read = 0
        self._read: list[str] = []
        self._expected = "{"  # what comes next: { key : value ,
        self._key = ""
        self._value: list[str] = []  # of the key or value that is being read
        self._depth = 0
        self._in_string = self._escaped = False
        self._arguments: list[str] = []

    def push(self, char: str) -> None:
        self._read.append(char)
        self.num_read += 1
        if self._value:
            self._continue(char)
        elif char not in _SPACE:
            self._begin(char)

    @property
    def text(self) -> str:
        """All that was read."""
        return "".join(self._read)

    @property
    def after_value(self) -> bool:
        """Whether a value has just ended, and the object has not."""
        return self._expected == "," and not self._value

    def take(self) -> str:
        """Arguments that came since the last call."""
        new = "".join(self._arguments)
        self._arguments.clear()
        return new

    def _begin(self, char: str) -> None:
        """A character between values."""
        expected = self._expected
        if expected == "{" and char == "{":
            self._expected = "key"
        elif expected in ("key", ",") and char == "}":
            self._close()
        elif expected == "key" and char == '"':
            self._value, self._in_string = [char], True
        elif expected == ":" and char == ":":
            self._expected = "value"
        elif expected == "," and char == ",":
            self._expected = "key"
        elif expected == "value" and char not in "}],:":
            self._start_value(char)
        else:
            self.state = "wrong"

    def _start_value(self, char: str) -> None:
        self._value = [char]
        self._in_string = char == '"'
        self._depth = 1 if char in "{[" else 0
        if self._streams:
            self.has_arguments = True
            self._arguments.append(char)

    @property
    def _streams(self) -> bool:
        return self._key in self.ARGUMENTS and self._value[0] in "{["

    def _continue(self, char: str) -> None:
        """A character inside a key or value, or the one that ends a number or a literal."""
        if not self._in_string and not self._depth and (char in ",}" or char in _SPACE):
            self._end_value()
            if self.state == "open" and char not in _SPACE:
                self._begin(char)
            return
        self._value.append(char)
        if self._expected == "value" and self._streams:
            self._arguments.append(char)
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self._in_string = False
                if not self._depth:
                    self._end_value()
        elif char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            if not self._depth:
                self._end_value()

    def _end_value(self) -> None:
        text, self._value = "".join(self._value), []
        if self._expected == "key":
            self._key = str(self._decode(text))
            self._expected = ":"
            return
        self._expected = ","
        if self._key == "name":
            name = self._decode(text)
            self.name = name if isinstance(name, str) and self.name is None else None
            if not self.name:
                self.state = "wrong"
        elif self._key in self.ARGUMENTS and text[0] not in "{[":
            value = self._decode(text)
            if isinstance(value, str):
                self.has_arguments = True
                self._arguments.append(value)
            elif value is not None:
                self.state = "wrong"

    def _decode(self, text: str) -> object:
        try:
            return json.loads(text, strict=False)
        except (ValueError, RecursionError):
            self.state = "wrong"
            return ""

    def _close(self) -> None:
        self.state = "closed" if self.name else "wrong"
