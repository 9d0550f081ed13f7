"""Log-probabilities in the two shapes of OpenAI's API."""

import codecs
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

from billfish.engine.logprobs import TokenLogprobs
from billfish.tokenizer import Tokenizer


class LogprobFormatter:
    """Knows the text of each token of one vocabulary."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.raw = lru_cache(1 << 16)(self._raw)

    def _raw(self, token_id: int) -> bytes:
        """The bytes of a token; of a control token those of its name."""
        found = self._tokenizer.token_bytes(token_id)
        if not found:
            found = self._tokenizer.decode([token_id], skip_special_tokens=False).encode()
        return found

    def chat(self, tokens: Iterable[TokenLogprobs]) -> list[dict[str, Any]]:
        """The `content` list of a chat's logprobs."""
        return [
            {
                **self._entry(each.token_id, each.logprob),
                "top_logprobs": [self._entry(*pair) for pair in each.top],
            }
            for each in tokens
        ]

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        raw = self.raw(token_id)
        return {"token": _text(raw, ""), "logprob": logprob, "bytes": list(raw)}

    def completion(
        self, token_ids: Sequence[int], tokens: Sequence[TokenLogprobs | None], offsets: "Offsets"
    ) -> dict[str, Any]:
        """The object of a completion's logprobs. tokens: None where nothing precedes a token.

        The token itself is among its top_logprobs always, as OpenAI has it.
        """
        top: list[dict[str, float] | None] = []
        for each in tokens:
            if each is None:
                top.append(None)
                continue
            likely: dict[str, float] = {}
            for token_id, logprob in (*each.top, (each.token_id, each.logprob)):
                likely.setdefault(_text(self.raw(token_id), "bytes:"), logprob)
            top.append(likely)
        return {
            "tokens": [_text(self.raw(token_id), "bytes:") for token_id in token_ids],
            "token_logprobs": [None if each is None else each.logprob for each in tokens],
            "top_logprobs": top,
            "text_offset": [offsets.next(token_id) for token_id in token_ids],
        }


class Offsets:
    """Where in the text each token begins, in characters. A token that begins within a character
    has the place of that character."""

    def __init__(self, tokenizer: Tokenizer, start: int = 0) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._at = start

    def next(self, token_id: int) -> int:
        at = self._at
        self._at += len(self._decoder.decode(self._tokenizer.token_bytes(token_id)))
        return at


def _text(raw: bytes, prefix: str) -> str:
    """A token's text; where it is part of a character, its bytes written out."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return prefix + "".join(f"\\x{byte:02x}" for byte in raw)
