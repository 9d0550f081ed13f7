"""From tokens to text, one token at a time: whole characters only, and stop strings.

Tokens are pieces of UTF-8, so a character may span several of them, and so may a stop string. Text
goes out as soon as it is certain: characters when their last byte is there, and what might be the
beginning of a stop string when it turns out not to be.
"""

import codecs
from collections.abc import Callable, Sequence

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")

MAX_PENDING_BYTES = 3
"""An unfinished UTF-8 character has at most three bytes (RFC 3629)."""


class StopStrings:
    """Finds the first stop string to be complete, reading the text character by character.

    Several complete at the same character: the longest wins. So what is found depends on the text
    alone, not on how tokens cut it. Each string is matched by the method of Knuth, Morris and Pratt
    (SIAM J. Comput. 6, 1977): the work is linear in the text, whatever the strings.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        """include: the stop string found is part of the text, so none of it has to be held back."""
        self._include = include
        self._stops = sorted(set(stops), key=len, reverse=True)
        self._borders = [_border_lengths(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)
        self._held = ""

    def push(self, text: str, passing: bool = False) -> tuple[str, str | None]:
        """The text that is certain now, and the stop string found: it ends before that string.

        passing: stop strings that this text completes do not count. After a stop string was found,
        nothing more may be pushed.
        """
        pending = self._held + text
        for end, char in enumerate(text, start=len(self._held) + 1):
            for index, stop in enumerate(self._stops):
                if self._advance(index, char) < len(stop):
                    continue
                if passing:  # its end may still begin the next one
                    self._matched[index] = self._borders[index][-1]
                    continue
                self._held = ""
                return pending[: end if self._include else end - len(stop)], stop
        certain = len(pending) - (0 if self._include else max(self._matched))
        self._held = pending[certain:]
        return pending[:certain], None

    def flush(self) -> str:
        """The text held back: no more comes that could complete it."""
        held, self._held = self._held, ""
        return held

    def _advance(self, index: int, char: str) -> int:
        """Read one character; how much of this stop string the text now ends in."""
        stop, borders, matched = self._stops[index], self._borders[index], self._matched[index]
        while matched and stop[matched] != char:
            matched = borders[matched - 1]
        if stop[matched] == char:
            matched += 1
        self._matched[index] = matched
        return matched


def _border_lengths(text: str) -> list[int]:
    """For each prefix of text, the length of the longest proper prefix that also ends it."""
    borders = [0] * len(text)
    length = 0
    for i in range(1, len(text)):
        while length and text[length] != text[i]:
            length = borders[length - 1]
        if text[length] == text[i]:
            length += 1
        borders[i] = length
    return borders


class Detokenizer:
    """The text of one request. Bytes that are not UTF-8 become U+FFFD.

    A prompt may end in half a character. If the first bytes generated continue it, the whole
    character belongs to the output.
    """

    def __init__(
        self,
        token_bytes: Callable[[int], bytes],
        prompt_token_ids: Sequence[int],
        stops: Sequence[str],
        include_stop: bool = False,
    ) -> None:
        self._token_bytes = token_bytes
        self._decoder = _Utf8Decoder(errors="replace")
        self._inside = False  # whether the decoder holds the beginning of a character
        self._stops = StopStrings(stops, include_stop) if stops else None
        self._prompt_tail = _unfinished_character(token_bytes, prompt_token_ids)

    def append(self, token_id: int, passing: bool = False) -> tuple[str, str | None]:
        """The new text that is certain, and the stop string that ends it, if one does.

        passing: stop strings that this token completes do not count.
        """
        data = self._token_bytes(token_id)
        if self._prompt_tail and data:
            if _is_continuation(data[0]):
                data = self._prompt_tail + data
            self._prompt_tail = b""
        if data.isascii() and not self._inside:
            text = data.decode("ascii")
        else:
            text = self._decoder.decode(data)
            self._inside = bool(self._decoder.getstate()[0])
        return self._stops.push(text, passing) if self._stops else (text, None)

    def finish(self, passing: bool = False) -> tuple[str, str | None]:
        """The rest of the text, when no more tokens come, and the stop string that ends it."""
        text = self._decoder.decode(b"", final=True)
        if not self._stops:
            return text, None
        text, stop = self._stops.push(text, passing)
        return text + self._stops.flush(), stop


def _is_continuation(byte: int) -> bool:
    return byte & 0xC0 == 0x80


def _unfinished_character(token_bytes: Callable[[int], bytes], token_ids: Sequence[int]) -> bytes:
    """The bytes at the end of these tokens that begin a character and do not complete it."""
    tail = b""
    for token_id in reversed(token_ids[-MAX_PENDING_BYTES:]):
        data = token_bytes(token_id)
        if not data:  # a control token: no character reaches across it
            break
        tail = data[-MAX_PENDING_BYTES:] + tail
        if len(tail) >= MAX_PENDING_BYTES:
            break
    decoder = _Utf8Decoder(errors="replace")
    decoder.decode(tail[-MAX_PENDING_BYTES:])
    return decoder.getstate()[0]
