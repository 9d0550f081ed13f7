"""SentencePiece's BPE: pieces with scores instead of a list of merges.

Kudo and Richardson, "SentencePiece" (arXiv 1808.06226). Starting from single characters, the two
neighbours whose concatenation is the best-scored piece are joined, the leftmost first among equals,
until no two neighbours make a piece. Characters that are no piece become their UTF-8 bytes.

A list of merges cannot state this: Llama 2 gives every run of spaces the same score, and among
equals the position decides, not the pair.
"""

import heapq
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

SPACE = "▁"  # U+2581 stands for a space within pieces

_CACHED_WORDS = 1 << 16
_LONGEST_CACHED_WORD = 64


class SentencePieceBPE:
    """Turns text into piece ids; time n log n in the length of the text.

    pieces: id by text, of the pieces that merging may make. scores: by id, higher joins first.
    byte_ids: the 256 ids of the byte tokens, by byte.
    """

    def __init__(
        self, pieces: Mapping[str, int], scores: Sequence[float], byte_ids: Sequence[int]
    ) -> None:
        self._ids = pieces
        self._byte_ids = byte_ids
        self._cost = {text: -scores[i] for text, i in pieces.items() if len(text) > 1}
        # A join makes a piece, so two characters that are neighbours in no piece never end up in
        # one token: the text may be cut between them, and each part is a word of its own.
        self._neighbours = {text[i : i + 2] for text in self._cost for i in range(len(text) - 1)}
        self._cached = lru_cache(_CACHED_WORDS)(self._encode_word)

    def __call__(self, text: str) -> list[int]:
        """Ids of `text`, in which spaces are still spaces."""
        ids: list[int] = []
        for word in self._words(text.replace(" ", SPACE)):
            encode = self._cached if len(word) <= _LONGEST_CACHED_WORD else self._encode_word
            ids += encode(word)
        return ids

    def _words(self, text: str) -> Iterator[str]:
        start = 0
        for i in range(1, len(text)):
            if text[i - 1 : i + 1] not in self._neighbours:
                yield text[start:i]
                start = i
        if text:
            yield text[start:]

    def _encode_word(self, word: str) -> tuple[int, ...]:
        ids: list[int] = []
        for symbol in self._merge(word):
            piece = self._ids.get(symbol)
            if piece is not None:
                ids.append(piece)
            else:
                ids += (self._byte_ids[byte] for byte in symbol.encode())
        return tuple(ids)

    def _merge(self, word: str) -> list[str]:
        """Join neighbours until none make a piece. `symbols[i]` is "" once joined to its left."""
        cost, symbols, end = self._cost, list(word), len(word)
        following, preceding = list(range(1, end + 1)), list(range(-1, end - 1))
        heap = [
            (cost[pair], i, pair)
            for i in range(end - 1)
            if (pair := word[i : i + 2]) in cost
        ]  # fmt: skip
        heapq.heapify(heap)
        while heap:
            _, left, piece = heapq.heappop(heap)
            right = following[left]
            # Stale when either side has changed since; the same text is the same join.
            if not symbols[left] or right == end or symbols[left] + symbols[right] != piece:
                continue
            symbols[left], symbols[right] = piece, ""
            after = following[left] = following[right]
            before = preceding[left]
            if before >= 0:
                pair = symbols[before] + piece
                if pair in cost:
                    heapq.heappush(heap, (cost[pair], before, pair))
            if after < end:
                preceding[after] = left
                pair = piece + symbols[after]
                if pair in cost:
                    heapq.heappush(heap, (cost[pair], left, pair))
        return [symbol for symbol in symbols if symbol]
