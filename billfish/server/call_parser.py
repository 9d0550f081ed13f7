"""What parsers of tool calls share: events, text that is held back, calls that are JSON objects.

A parser reads characters, so what it finds does not depend on how the text was cut into pieces.
What looks like a call and turns out to be none is text after all, and no character of it is lost.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

from billfish.server.json_scanner import CallScanner

MAX_CALL_LENGTH = 1 << 20
"""Characters held back while it is not known whether they are a call."""


@dataclass(frozen=True, slots=True)
class Text:
    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call begins; `index` counts them from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """The next part of the JSON of a call's arguments."""

    index: int
    text: str


Event: TypeAlias = Text | CallStart | Arguments


class ToolParser:
    """Text in, events out. names: of the functions that were offered."""

    marker: ClassVar[str] = ""
    """What the model writes in front of its calls; "" where they start the answer."""
    marks: ClassVar[tuple[str, ...]] = ()
    """What the parser looks for that may be a control token, and has to be shown to be found."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._events: list[Event] = []
        self._calls = 0
        self._spaces = ""  # held back: text after all, unless a call follows
        self._matched = ""  # what there is of a marker
        self._where = "text"  # what is being read; each parser has its own names for more

    def feed(self, text: str) -> list[Event]:
        position = 0
        while position < len(text):
            if self._where == "text" and not self._matched:
                found = text.find(self.marker[0], position) if self.marker else -1
                end = len(text) if found < 0 else found
                self._text(text[position:end])
                position = end
            else:
                end = position
            if end < len(text):
                self._step(text[end])
                position = end + 1
        return self._taken()

    def finish(self) -> list[Event]:
        """The answer has ended: what was held back comes out."""
        self._end()
        if not self._calls:
            self._emit(self._spaces)
            self._spaces = ""
        return self._taken()

    @property
    def num_calls(self) -> int:
        return self._calls

    def _step(self, char: str) -> None:
        raise NotImplementedError

    def _end(self) -> None:
        raise NotImplementedError

    def _taken(self) -> list[Event]:
        merged = list(_merge(self._events))
        self._events.clear()
        return merged

    def _emit(self, text: str) -> None:
        if text:
            self._events.append(Text(text))

    def _text(self, text: str) -> None:
        """Text of the answer. Spaces wait: they are dropped where a call follows."""
        solid = text.rstrip()
        if solid:
            self._emit(self._spaces + solid)
            self._spaces = ""
        self._spaces += text[len(solid) :]

    def _start(self, name: str) -> None:
        self._spaces = ""
        self._events.append(CallStart(self._calls, name))
        self._calls += 1

    def _arguments(self, text: str) -> None:
        if text:
            self._events.append(Arguments(self._calls - 1, text))

    def _match(self, marker: str, char: str) -> bool | None:
        """Follow a marker: True when it is complete, None while it may be, False if it is not.

        Its first character must not occur in it again, so nothing but that can begin it anew.
        """
        if marker.startswith(self._matched + char):
            self._matched += char
            if self._matched == marker:
                self._matched = ""
                return True
            return None
        return False


class JsonCalls(ToolParser):
    """What the formats share whose calls are JSON objects."""

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(names)
        self._scanner = CallScanner()
        self._started = False

    def _begin_call(self) -> None:
        self._scanner, self._started = CallScanner(), False

    def _scan(self, char: str) -> str:
        """Read one character of a call; its scanner's state."""
        scanner = self._scanner
        scanner.push(char)
        if not self._started and self._is_call(scanner):
            self._started = True
            self._start(scanner.name or "")
        if self._started:
            self._arguments(scanner.take())
            if scanner.state == "closed" and not scanner.has_arguments:
                self._arguments("{}")
        elif scanner.num_read > MAX_CALL_LENGTH:
            scanner.state = "wrong"
        return scanner.state

    def _is_call(self, scanner: CallScanner) -> bool:
        return bool(scanner.name) and (scanner.has_arguments or scanner.state == "closed")


def _merge(events: Iterable[Event]) -> Iterable[Event]:
    """Neighbours of the same kind and call as one."""
    last: Event | None = None
    for event in events:
        if isinstance(last, Text) and isinstance(event, Text):
            last = Text(last.text + event.text)
        elif (
            isinstance(last, Arguments)
            and isinstance(event, Arguments)
            and last.index == event.index
        ):
            last = Arguments(last.index, last.text + event.text)
        else:
            if last is not None:
                yield last
            last = event
    if last is not None:
        yield last
