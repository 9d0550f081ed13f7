"""Log-probabilities in the two shapes of OpenAI's API."""

import codecs
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, TypeAlias

from billfish.engine.logprobs import TokenLogprobs
from billfish.tokenizer import Tokenizer

BytesOf: TypeAlias = Callable[[int], bytes]


class LogprobFormatter:
    """Knows the text of each token of one vocabulary."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.raw = lru_cache(1 << 16)(tokenizer.named_token_bytes)

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

    def __init__(self, prompt: BytesOf, output: BytesOf, num_prompt: int) -> None:
        """What a token adds to the text: the first num_prompt of them, and those after."""
        self._prompt, self._output, self._prompt_left = prompt, output, num_prompt
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._at = 0

    def next(self, token_id: int) -> int:
        at = self._at
        bytes_of = self._prompt if self._prompt_left else self._output
        self._prompt_left = max(0, self._prompt_left - 1)
        self._at += len(self._decoder.decode(bytes_of(token_id)))
        return at


def _text(raw: bytes, prefix: str) -> str:
    """A token's text; where it is part of a character, its bytes written out."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return prefix + "".join(f"\\x{byte:02x}" for byte in raw)
