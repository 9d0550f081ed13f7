"""Text to token ids and back. Control tokens come from the program, never from a user's text."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any

from billfish.errors import CheckpointError, InvalidRequestError, shown
from billfish.tokenizer.chat_template import ChatTemplate, check_text
from billfish.tokenizer.content_guard import ContentGuard


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """The tokens of a model.

    texts: the text of each token as the file gives it. token_bytes: what each adds to the text
    stream, b"" for control tokens and unused entries. control: id by text of the tokens that mark
    structure (turns, begin, end). user_defined: id by text of the tokens that are matched in any
    text before it is cut into words. bos_token_id may be None; eos_token_ids end a request.
    add_bos, add_eos: put them around a text. bos_before_chat: put the begin token before a chat
    too, where add_bos is set and the template has not written one. space_prefix: text starts with
    an added space, as in SentencePiece. strip_before, strip_after: control tokens that take the
    white space on that side with them.
    """

    texts: Sequence[str]
    token_bytes: Sequence[bytes]
    control: Mapping[str, int]
    user_defined: Mapping[str, int]
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    add_bos: bool = False
    add_eos: bool = False
    bos_before_chat: bool = True
    space_prefix: bool = False
    strip_before: frozenset[str] = frozenset()
    strip_after: frozenset[str] = frozenset()
    control_ids: frozenset[int] = field(default=frozenset())


class Place(Enum):
    """Where a text stands that is cut into words: SentencePiece puts a space before some."""

    FIRST = "at the start of the whole"
    INNER = "behind a control token or a user-defined one"
    BARE = "anywhere, and no space is wanted"


EncodeWords = Callable[[str, Place], list[int]]
"""Ids of a text without control and user-defined tokens."""


class Tokenizer:
    """Encodes, decodes, and renders chats. Immutable after construction; safe to use in threads.

    template: None if the model has none, the error if it has one that cannot be used: that hinders
    chats, nothing else.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        encode_words: EncodeWords,
        template: ChatTemplate | CheckpointError | None,
    ) -> None:
        self._vocabulary = vocabulary
        self._encode_words = encode_words
        self._template = template
        self._guard = ContentGuard(vocabulary.control)
        self._plain = _matcher(vocabulary.user_defined)
        self._special_ids = {**vocabulary.user_defined, **vocabulary.control}
        self._special = _matcher(self._special_ids)

    @property
    def vocabulary(self) -> Vocabulary:
        return self._vocabulary

    @property
    def vocab_size(self) -> int:
        return len(self._vocabulary.texts)

    @cached_property
    def max_token_bytes(self) -> int:
        """Bytes of the longest token."""
        return max(map(len, self._vocabulary.token_bytes))

    @property
    def bos_token_id(self) -> int | None:
        return self._vocabulary.bos_token_id

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a request, the model's end-of-sequence token first."""
        return self._vocabulary.eos_token_ids

    @property
    def chat_template(self) -> str | None:
        """Source of the chat template (Jinja), or None if there is none that can be used."""
        return self._template.source if isinstance(self._template, ChatTemplate) else None

    def encode(
        self, text: str, *, add_special_tokens: bool = True, parse_special: bool = False
    ) -> list[int]:
        """Token ids of `text`.

        add_special_tokens: put the begin and end tokens around it where the model asks for them.
        parse_special: control tokens written out in `text`, such as <|im_end|>, become their ids.
        Leave it off for any text that is not the program's own: otherwise whoever wrote the text
        can end their turn and speak as somebody else. User-defined tokens, which are plain text
        that the vocabulary holds whole, are matched either way.

        A few vocabularies lack tokens for rare bytes (SmolLM2: six control characters such as
        U+0014, and planes 4 to 11 of Unicode, which are unassigned). Those bytes are left out, as
        by the tokenizers these models were trained with.

        Takes time n log n in the length of the text, whatever it holds. Raises
        InvalidRequestError when `text` is no string or holds lone surrogates, which no UTF-8 has.
        """
        check_text("text", text)
        ids = self._encode(text, parse_special)
        return self._surround(ids) if add_special_tokens else ids

    def spellings(self, word: str) -> tuple[tuple[int, ...], ...]:
        """The ids of `word` as it may stand inside a text: alone, and after a space.

        Each as the tokenizer cuts it; a model may still write the same word in other pieces. Raises
        InvalidRequestError when `word` is no string, holds lone surrogates, or has no tokens.
        """
        check_text("word", word)
        bare = word.lstrip(" ") or word
        found = {tuple(self._encode(text, False, bare=True)) for text in (bare, " " + bare)}
        if () in found:
            raise InvalidRequestError("word", f"{shown(word)} has no tokens in this vocabulary")
        return tuple(sorted(found))

    def bad_word_ids(self, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
        """All spellings of these words, for a request that must not write them. Raises what
        `spellings` raises, for "bad_words"."""
        try:
            return tuple(ids for word in words for ids in self.spellings(word))
        except InvalidRequestError as error:
            raise InvalidRequestError("bad_words", error.reason) from error

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `ids`: their token_bytes joined and read as UTF-8, U+FFFD where they are not.

        skip_special_tokens: control tokens are left out; otherwise they show as their text. Where
        encode puts a space in front (SentencePiece), one space at the very start is taken off
        again, and nothing else is: text generated after a prompt keeps its leading space in
        token_bytes. Raises InvalidRequestError for an id outside the vocabulary.
        """
        vocabulary = self._vocabulary
        bytes_of = self.token_bytes if skip_special_tokens else self.named_token_bytes
        data = b"".join(map(bytes_of, ids))
        if vocabulary.space_prefix:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """What a token adds to the text, as raw bytes; b"" for control tokens.

        A token may hold part of a character. Raises InvalidRequestError for an id outside the
        vocabulary.
        """
        self._check_id(token_id)
        return self._vocabulary.token_bytes[token_id]

    def named_token_bytes(self, token_id: int) -> bytes:
        """token_bytes, but of a control token its name. Raises what token_bytes raises."""
        self._check_id(token_id)
        if token_id in self._vocabulary.control_ids:
            return self._vocabulary.texts[token_id].encode()
        return self._vocabulary.token_bytes[token_id]

    def render_chat(
        self, messages: list[dict[str, Any]], *, add_generation_prompt: bool = True
    ) -> str:
        """The text of a chat, as the model's template writes it; for people to read.

        Encoding this string with parse_special would turn control tokens that a user has typed
        into real ones: use `encode_chat` for that. Raises InvalidRequestError for messages that
        are not well-formed, that the template refuses, or when there is no template, and
        CheckpointError when the template exceeds its bounds.
        """
        return self._template_or_fail().render(messages, add_generation_prompt)

    def encode_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[dict[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a chat: control tokens of the template only, never of a message's content.

        tools: what the model may call, as the template takes them. variables: other names of the
        template; they come from the program, not from a user.

        A message that holds "<|im_end|>" keeps it as ordinary characters, which the model reads as
        text. Where the vocabulary has bos_before_chat, the begin token is put in front when the
        model asks for one and the template has not written it. Raises what `render_chat` raises.
        """
        template = self._template_or_fail()
        guarded, known, mark = self._guard.protect(messages, template.source, tools)
        text = template.render(guarded, add_generation_prompt, tools=known, variables=variables)
        ids = self._encode(text, True, mark)
        begin = self._vocabulary.bos_token_id
        wanted = self._vocabulary.add_bos and self._vocabulary.bos_before_chat
        if wanted and begin is not None and ids[:1] != [begin]:
            ids.insert(0, begin)
        return ids

    def _encode(
        self, text: str, parse_special: bool, mark: str = "", bare: bool = False
    ) -> list[int]:
        """Ids of `text`. `mark`, where there is one, keeps written-out tokens from being matched
        and is itself dropped."""
        matcher = self._special if parse_special else self._plain
        place = Place.BARE if bare else Place.FIRST
        ids: list[int] = []
        for part, token in self._parts(matcher, text):
            words = part.replace(mark, "") if mark else part
            if words:
                ids += self._encode_words(words, place)
            if token is not None:
                ids.append(self._special_ids[token])
            place = Place.BARE if bare else Place.INNER
        return ids

    def _parts(
        self, matcher: re.Pattern[str] | None, text: str
    ) -> Iterator[tuple[str, str | None]]:
        """Cut `text` into what lies between the tokens that `matcher` finds, and the token behind
        each part."""
        start = 0
        for match in matcher.finditer(text) if matcher else ():
            token, end, after = match.group(), match.start(), match.end()
            if token in self._vocabulary.strip_before:
                while end > start and text[end - 1].isspace():
                    end -= 1
            if token in self._vocabulary.strip_after:
                while after < len(text) and text[after].isspace():
                    after += 1
            yield text[start:end], token
            start = after
        yield text[start:], None

    def _surround(self, ids: list[int]) -> list[int]:
        vocabulary = self._vocabulary
        if vocabulary.add_bos and vocabulary.bos_token_id is not None:
            ids.insert(0, vocabulary.bos_token_id)
        if vocabulary.add_eos:
            ids.append(vocabulary.eos_token_ids[0])
        return ids

    def _template_or_fail(self) -> ChatTemplate:
        if self._template is None:
            raise InvalidRequestError("messages", "the model has no chat template")
        if isinstance(self._template, CheckpointError):
            raise self._template
        return self._template

    def _check_id(self, token_id: int) -> None:
        if not 0 <= token_id < self.vocab_size:
            raise InvalidRequestError(
                "token id", f"must be between 0 and {self.vocab_size - 1}, got {token_id}"
            )


def _matcher(tokens: Iterable[str]) -> re.Pattern[str] | None:
    """Finds the leftmost, and there the longest, of `tokens`."""
    longest_first = sorted(tokens, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
