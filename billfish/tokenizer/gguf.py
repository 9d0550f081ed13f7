"""Rebuild a tokenizer from the metadata of a GGUF file.

Keys are those of the GGUF specification (ggml, docs/gguf.md), section "Tokenizer". Two kinds are
read: `gpt2`, byte-level BPE with a list of merges (GPT-2's scheme), and `llama`, SentencePiece's
BPE with scores. Everything in the file is checked before use; what is wrong or not supported is a
CheckpointError that names the key.
"""

import math
import re
from collections.abc import Callable, Mapping
from enum import IntEnum
from typing import Any

import tokenizers
from tokenizers.models import BPE

from billfish.checkpoint.metadata import Metadata
from billfish.errors import CheckpointError, shown
from billfish.tokenizer.byte_alphabet import LETTERS, alphabet_bytes
from billfish.tokenizer.chat_template import ChatTemplate
from billfish.tokenizer.library import word_ids
from billfish.tokenizer.pretokenizers import WORD_RULES
from billfish.tokenizer.sentencepiece import SPACE, SentencePieceBPE
from billfish.tokenizer.tokenizer import Place, Tokenizer, Vocabulary

_TOKENS = "tokenizer.ggml.tokens"
_TYPES = "tokenizer.ggml.token_type"
_MERGES = "tokenizer.ggml.merges"
_SCORES = "tokenizer.ggml.scores"
_PRE = "tokenizer.ggml.pre"
_SPACE_PREFIX = "tokenizer.ggml.add_space_prefix"

# Tokens that end a turn or a text in some model family, whatever the file names as its end token.
_END_TOKENS = frozenset(
    {
        "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>",
        "<|end_of_turn|>", "<end_of_turn>", "<|EOT|>", "<|END_OF_TURN_TOKEN|>",
        "<｜end▁of▁sentence｜>",
    }
)  # fmt: skip
# Some converters label turn markers "user-defined", as if they were words.
MARKUP = re.compile(r"<[|｜].*[|｜]>", re.DOTALL)
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
# Tokens that are looked for in text are compiled into one pattern, so a file may not have any
# number of them. Command R's has about 1,000.
_MAX_MATCHED = 8192
_MAX_MATCHED_LENGTH = 512


class TokenType(IntEnum):
    """Values of `tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def from_gguf(metadata: Mapping[str, Any], path: str) -> Tokenizer:
    """The tokenizer that `metadata`, the key-value part of the GGUF file `path`, describes.

    Arrays may be lists or numpy arrays. A control token is matched in text only where the caller
    asks for it (see Tokenizer.encode); that holds also for user-defined tokens that look like turn
    markers, <|...|>. Raises CheckpointError for metadata that is missing, malformed,
    contradictory, or of a kind that is not supported; for a chat template that cannot be used, only
    when a chat is to be rendered.
    """
    source = Metadata(metadata, path)
    kind = source.text("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        reason = f"{shown(kind)} is not supported (supported: 'gpt2', 'llama')"
        raise CheckpointError(path, reason, tensor="tokenizer.ggml.model")
    texts = source.strings(_TOKENS)
    _check_distinct(texts, path)
    types = _token_types(source, texts)
    build = _byte_level if kind == "gpt2" else _sentencepiece
    encode, token_bytes, add_bos = build(source, texts, types)
    vocabulary = _vocabulary(source, texts, types, token_bytes, kind == "llama", add_bos)

    def encode_words(text: str, place: Place) -> list[int]:
        prefix = " " if vocabulary.space_prefix and place is not Place.BARE else ""
        return encode(prefix + text)

    return Tokenizer(vocabulary, encode_words, _chat_template(source, vocabulary))


_Built = tuple[Callable[[str], list[int]], list[bytes], bool]


def _byte_level(source: Metadata, texts: list[str], types: list[int]) -> _Built:
    if _PRE not in source:
        reason = "is missing: files without it do not say how text is cut; convert the model anew"
        raise CheckpointError(source.path, reason, tensor=_PRE)
    pre = source.text(_PRE)
    rules = WORD_RULES.get(pre)
    if rules is None:
        known = ", ".join(WORD_RULES)
        raise CheckpointError(
            source.path, f"{shown(pre)} is not supported (supported: {known})", tensor=_PRE
        )
    if source.flag(_SPACE_PREFIX, False):
        reason = "is not supported for a byte-level vocabulary"
        raise CheckpointError(source.path, reason, tensor=_SPACE_PREFIX)
    words = {texts[i]: i for i in _of_type(types, TokenType.NORMAL)}
    # Some vocabularies lack rare control characters; none can do without these.
    for byte in (*range(0x20, 0x7F), *range(0x80, 0xC0)):
        if LETTERS[byte] not in words:
            raise CheckpointError(source.path, f"no token for byte 0x{byte:02x}", tensor=_TOKENS)
    merges = []
    for merge in source.strings(_MERGES):
        left, _, right = merge.partition(" ")
        if not left or not right or " " in right:
            reason = f"a merge must be two tokens with a space between, not {shown(merge)}"
            raise CheckpointError(source.path, reason, tensor=_MERGES)
        merges.append((left, right))
    try:
        model = BPE(vocab=words, merges=merges, ignore_merges=rules.whole_words)
    except Exception as error:  # the library raises plain Exception: an unknown token in a merge
        raise CheckpointError(source.path, str(error), tensor=_MERGES) from None
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = rules.cut()

    def encode_words(text: str) -> list[int]:
        return word_ids(tokenizer, rules.normalize(text))

    return encode_words, [alphabet_bytes(text) for text in texts], rules.add_bos


def _sentencepiece(source: Metadata, texts: list[str], types: list[int]) -> _Built:
    for key in ("remove_extra_whitespaces", "precompiled_charsmap"):
        key = f"tokenizer.ggml.{key}"
        value = source.get(key)
        if value is not None and value is not False:
            raise CheckpointError(source.path, "text normalization is not supported", tensor=key)
    scores = source.numbers(_SCORES, len(texts))
    if not all(map(math.isfinite, scores)):
        raise CheckpointError(source.path, "a score is not a finite number", tensor=_SCORES)
    byte_ids: dict[int, int] = {}
    for i in _of_type(types, TokenType.BYTE):
        match = _BYTE_TOKEN.fullmatch(texts[i])
        if match is None:
            reason = (
                f"token {i}, {shown(texts[i])}, is marked as a byte but is not <0x00> to <0xFF>"
            )
            raise CheckpointError(source.path, reason, tensor=_TOKENS)
        byte_ids[int(match[1], 16)] = i
    if len(byte_ids) != 256:
        reason = f"{len(byte_ids)} of 256 byte tokens: some text could not be written"
        raise CheckpointError(source.path, reason, tensor=_TOKENS)
    pieces = {texts[i]: i for i in _of_type(types, TokenType.NORMAL)}
    token_bytes = [text.replace(SPACE, " ").encode() for text in texts]
    for byte, i in byte_ids.items():
        token_bytes[i] = bytes([byte])
    encode = SentencePieceBPE(pieces, scores, [byte_ids[byte] for byte in range(256)])
    return encode, token_bytes, True


def _vocabulary(
    source: Metadata,
    texts: list[str],
    types: list[int],
    token_bytes: list[bytes],
    sentencepiece: bool,
    add_bos: bool,
) -> Vocabulary:
    hidden = [*_of_type(types, TokenType.CONTROL), *_of_type(types, TokenType.UNKNOWN)]
    for i in (*hidden, *_of_type(types, TokenType.UNUSED)):
        token_bytes[i] = b""
    markers, user_defined = list(hidden), {}
    for i in _of_type(types, TokenType.USER_DEFINED):
        text = texts[i].replace(SPACE, " ") if sentencepiece else texts[i]
        token_bytes[i] = text.encode()
        if MARKUP.fullmatch(text):
            markers.append(i)
        elif text:
            user_defined[text] = i
    # One character is too short for a marker: it would be matched all over ordinary text.
    control = {texts[i]: i for i in markers if len(texts[i]) > 1}
    check_matched([*control, *user_defined], source.path)
    size = len(texts)
    bos = source.token_id("tokenizer.ggml.bos_token_id", size)
    eos = source.token_id("tokenizer.ggml.eos_token_id", size)
    eot = source.token_id("tokenizer.ggml.eot_token_id", size)
    well_known = sorted(i for text, i in control.items() if text in _END_TOKENS)
    ends = dict.fromkeys(i for i in (eos, eot, *well_known) if i is not None)
    add_bos = source.flag("tokenizer.ggml.add_bos_token", add_bos)
    add_eos = source.flag("tokenizer.ggml.add_eos_token", False)
    for wanted, token, name in ((add_bos, bos, "bos"), (add_eos, eos, "eos")):
        if wanted and token is None:
            reason = f"is to be added, but the file has no {name}_token_id"
            raise CheckpointError(source.path, reason, tensor=f"tokenizer.ggml.add_{name}_token")
    return Vocabulary(
        texts=texts,
        token_bytes=token_bytes,
        control=control,
        control_ids=frozenset(hidden),
        user_defined=user_defined,
        bos_token_id=bos,
        eos_token_ids=tuple(ends),
        add_bos=add_bos,
        add_eos=add_eos,
        space_prefix=sentencepiece and source.flag(_SPACE_PREFIX, True),
    )


def _chat_template(
    source: Metadata, vocabulary: Vocabulary
) -> ChatTemplate | CheckpointError | None:
    key = "tokenizer.chat_template"
    if key not in source:
        return None
    eos = source.token_id("tokenizer.ggml.eos_token_id", len(vocabulary.texts))
    bos = vocabulary.bos_token_id
    text = source.text(key)
    try:
        return ChatTemplate(
            text,
            source.path,
            bos_token="" if bos is None else vocabulary.texts[bos],
            eos_token="" if eos is None else vocabulary.texts[eos],
        )
    except CheckpointError as error:  # the model can still continue texts
        return error


def _token_types(source: Metadata, texts: list[str]) -> list[int]:
    types = source.integers(_TYPES, len(texts))
    unknown = set(types).difference(TokenType)
    if unknown:
        reason = f"{min(unknown)} is not a token type (types are 1 to {TokenType.BYTE:d})"
        raise CheckpointError(source.path, reason, tensor=_TYPES)
    # Converters fill a vocabulary up to the size of the embedding with entries of this form, and
    # label them user-defined; nobody means them when they write the same characters.
    for i, text in enumerate(texts):
        if text.startswith("[PAD") and text == f"[PAD{i}]":
            types[i] = TokenType.UNUSED
    return types


def _of_type(types: list[int], wanted: TokenType) -> list[int]:
    """Ids of the tokens of a type."""
    number = int(wanted)
    return [i for i, kind in enumerate(types) if kind == number]


def check_matched(matched: list[str], path: str, key: str = _TYPES) -> None:
    """Refuse more, or longer, tokens that are looked for in text than a pattern can take."""
    longest = max(map(len, matched), default=0)
    if len(matched) > _MAX_MATCHED or longest > _MAX_MATCHED_LENGTH:
        reason = (
            f"{len(matched)} control and user-defined tokens of up to {longest} characters; "
            f"at most {_MAX_MATCHED} of {_MAX_MATCHED_LENGTH} are supported"
        )
        raise CheckpointError(path, reason, tensor=key)


def _check_distinct(texts: list[str], path: str) -> None:
    if len(set(texts)) == len(texts):
        return
    seen: set[str] = set()
    for i, text in enumerate(texts):
        if text in seen:
            raise CheckpointError(
                path, f"token {i}, {shown(text)}, stands there twice", tensor=_TOKENS
            )
        seen.add(text)
