"""The tokenizer of a Hugging Face directory: tokenizer.json, and what stands beside it.

The library `tokenizers` reads tokenizer.json, normalizes, cuts and merges; it also finds added
tokens that are not special. Special tokens are found here, so that only the program can write them.
As in transformers 5, the post-processor in tokenizer.json says whether begin and end tokens are
added, and `add_bos_token` in tokenizer_config.json does not; a chat has those of its template.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tokenizers

from billfish.checkpoint.files import parse_object, read_json, read_text
from billfish.checkpoint.metadata import Metadata
from billfish.checkpoint.sampling_defaults import end_token_ids
from billfish.errors import CheckpointError, shown
from billfish.tokenizer.byte_alphabet import alphabet_bytes
from billfish.tokenizer.chat_template import ChatTemplate
from billfish.tokenizer.gguf import MARKUP, check_matched
from billfish.tokenizer.library import failure, word_ids
from billfish.tokenizer.sentencepiece import SPACE
from billfish.tokenizer.tokenizer import EncodeWords, Place, Tokenizer, Vocabulary

_MAX_BYTES = 1 << 27  # Gemma 3's tokenizer.json has 33 MB
_MAX_TOKENS = 1 << 22
_MAX_TEMPLATE_BYTES = 1 << 20
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")


def from_directory(path: Path) -> Tokenizer:
    """The tokenizer of the model in a directory.

    The tokens that end a request are those of generation_config.json, or of config.json where it
    names none, and the tokenizer's own. A control token is matched in text only where the caller
    asks for it; that holds also for added tokens that look like turn markers, <|...|>. Raises
    CheckpointError for files that are missing, malformed or of a kind that is not supported; for a
    chat template that cannot be used, only when a chat is to be rendered.
    """
    file = str(path / "tokenizer.json")
    if not (path / "tokenizer.json").exists():
        raise CheckpointError(file, "is missing: convert the tokenizer to it with transformers")
    text = read_text(file, _MAX_BYTES)
    library = _parse(text, file)
    config = _optional(path, "tokenizer_config.json")
    named = _named_tokens(config, _optional(path, "special_tokens_map.json"))
    vocabulary = _vocabulary(library, named, _end_token_ids(path), file)
    return Tokenizer(
        vocabulary, _word_encoder(library, text, vocabulary, file), _template(path, config, named)
    )


def _parse(text: str, file: str) -> tokenizers.Tokenizer:
    try:
        library = tokenizers.Tokenizer.from_str(text)
    except BaseException as error:  # plain Exception for bad JSON, a panic for what it trips over
        raise CheckpointError(file, f"cannot be used: {failure(error)}") from None
    library.no_truncation()
    library.no_padding()
    return library


def _optional(path: Path, name: str) -> Metadata:
    file = path / name
    return Metadata(read_json(str(file)) if file.exists() else {}, str(file))


def _end_token_ids(path: Path) -> tuple[int, ...]:
    config = _optional(path, "config.json")
    sources = (_optional(path, "generation_config.json"), config, config.section("text_config"))
    found = (end_token_ids(source) for source in sources if source is not None)
    return next((ids for ids in found if ids), ())


def _named_tokens(config: Metadata, special_map: Metadata) -> dict[str, str]:
    """The texts of bos_token, eos_token and so on; either file may name them, the first counts."""
    named = {}
    for key in _NAMED:
        for source in (config, special_map):
            value = source.get(key)
            section = source.section(key) if isinstance(value, dict) else None
            if value is not None:
                named[key] = section.text("content") if section else source.text(key)
                break
    return named


def _vocabulary(
    library: tokenizers.Tokenizer, named: dict[str, str], eos_token_ids: tuple[int, ...], file: str
) -> Vocabulary:
    ids = library.get_vocab(with_added_tokens=True)
    size = max(ids.values(), default=-1) + 1
    if not 0 < size <= min(_MAX_TOKENS, 2 * len(ids) + (1 << 16)):
        raise CheckpointError(file, f"{len(ids)} tokens with ids up to {size - 1}")
    texts = [""] * size
    for text, token_id in ids.items():
        texts[token_id] = text
    decoder = _state(library.decoder)
    to_bytes = _token_bytes(decoder, file)
    token_bytes = [to_bytes(text) for text in texts]
    control: dict[str, int] = {}
    hidden, before, after = set(), set(), set()
    for token_id, token in library.get_added_tokens_decoder().items():
        token_bytes[token_id] = token.content.encode()
        if token.special:
            token_bytes[token_id] = b""
            hidden.add(token_id)
        if len(token.content) > 1 and (token.special or MARKUP.fullmatch(token.content)):
            if token.single_word:
                reason = "special tokens that must be whole words are not supported"
                raise CheckpointError(file, reason, tensor=token.content[:80])
            control[token.content] = token_id
            before |= {token.content} if token.lstrip else set()
            after |= {token.content} if token.rstrip else set()
    check_matched(list(control), file, "added_tokens")
    bos, eos = (ids.get(named.get(key, "")) for key in ("bos_token", "eos_token"))
    first, last = _surrounding(library, file)
    if first is not None:
        if first >= size:
            reason = f"begin token {first} is outside the vocabulary of {size}"
            raise CheckpointError(file, reason, tensor="post_processor")
        bos = first  # what stands in front, whatever its name
    ends = dict.fromkeys(i for i in (last, *eos_token_ids, eos) if i is not None)
    for token_id in ends:
        if not 0 <= token_id < size:
            reason = f"end token {token_id} is outside the vocabulary of {size}"
            raise CheckpointError(file, reason)
    return Vocabulary(
        texts=texts,
        token_bytes=token_bytes,
        control=control,
        control_ids=frozenset(hidden),
        user_defined={},
        bos_token_id=bos,
        eos_token_ids=tuple(ends),
        add_bos=first is not None,
        add_eos=last is not None,
        bos_before_chat=False,
        space_prefix=_takes_space_off(decoder),
        strip_before=frozenset(before),
        strip_after=frozenset(after),
    )


def _surrounding(library: tokenizers.Tokenizer, file: str) -> tuple[int | None, int | None]:
    """The tokens that the post-processor puts before and behind every text."""
    try:
        plain = library.encode("a", add_special_tokens=False).ids
        whole = library.encode("a", add_special_tokens=True).ids
    except BaseException as error:
        raise CheckpointError(file, f"cannot encode a text: {failure(error)}") from None
    for start in range(len(whole) - len(plain) + 1):
        first, last = whole[:start], whole[start + len(plain) :]
        if whole[start : start + len(plain)] == plain and len(first) < 2 and len(last) < 2:
            return (first[0] if first else None), (last[0] if last else None)
    reason = "adds more than a begin and an end token, which is not supported"
    raise CheckpointError(file, reason, tensor="post_processor")


def _state(part: Any) -> dict[str, Any]:
    """The JSON of a part of a tokenizer, {} if there is none."""
    return {} if part is None else json.loads(part.__getstate__())


def _steps(part: Any) -> Iterator[dict[str, Any]]:
    """The steps of a normalizer, pre-tokenizer or decoder, however they are nested."""
    if isinstance(part, dict):
        for key in ("normalizers", "pretokenizers", "decoders"):
            for step in part.get(key, ()):
                yield from _steps(step)
        if part.get("type") != "Sequence":
            yield part


def _token_bytes(decoder: dict[str, Any], file: str) -> Any:
    """What a token adds to the text."""
    kinds = {step.get("type") for step in _steps(decoder)}
    # Conversions leave the others in, which find nothing to do in a vocabulary of that alphabet.
    if "ByteLevel" in kinds and kinds <= {"ByteLevel", "Replace", "ByteFallback", "Fuse"}:
        return alphabet_bytes
    known = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}
    replaced = [s.get("pattern") for s in _steps(decoder) if s.get("type") == "Replace"]
    spaced = all(p == {"String": SPACE} for p in replaced) and (replaced or "Metaspace" in kinds)
    if not kinds <= known or not spaced:
        found = shown(sorted(map(str, kinds)))
        reason = f"{found} is not supported (supported: ByteLevel, or U+2581 for spaces)"
        raise CheckpointError(file, reason, tensor="decoder")

    def to_bytes(text: str) -> bytes:
        match = _BYTE_TOKEN.fullmatch(text) if "ByteFallback" in kinds else None
        return bytes([int(match[1], 16)]) if match else text.replace(SPACE, " ").encode()

    return to_bytes


def _takes_space_off(decoder: dict[str, Any]) -> bool:
    return any(
        (step.get("type") == "Strip" and step.get("start", 0) > 0)
        or (step.get("type") == "Metaspace" and step.get("prepend_scheme") != "never")
        for step in _steps(decoder)
    )


def _word_encoder(
    library: tokenizers.Tokenizer, text: str, vocabulary: Vocabulary, file: str
) -> EncodeWords:
    """Encodes text in which special tokens are text. Where the tokenizer puts a space in front of
    some texts, there is one tokenizer for each kind of place."""
    tokenizers_of = dict.fromkeys(Place, library)
    if any(_prefixes(step) for part in _cutters(library) for step in _steps(_state(part))):
        for place in (Place.INNER, Place.BARE):
            document = parse_object(text, file)
            for key in ("normalizer", "pre_tokenizer"):
                document[key] = _without_prefix(document.get(key), place)
            tokenizers_of[place] = _parse(json.dumps(document), file)
    marked = [token for token in vocabulary.control if library.token_to_id(token) is not None]
    for tokenizer in set(tokenizers_of.values()):
        # Also those that look like turn markers without being special.
        tokenizer.add_special_tokens(
            [_as_special(tokenizer, vocabulary.control[token]) for token in marked]
        )
        tokenizer.encode_special_tokens = True

    def encode_words(words: str, place: Place) -> list[int]:
        return word_ids(tokenizers_of[place], words)

    return encode_words


def _as_special(tokenizer: tokenizers.Tokenizer, token_id: int) -> tokenizers.AddedToken:
    token = tokenizer.get_added_tokens_decoder()[token_id]
    token.special = True
    return token


def _cutters(library: tokenizers.Tokenizer) -> tuple[Any, Any]:
    return library.normalizer, library.pre_tokenizer


def _prefixes(step: dict[str, Any]) -> bool:
    return (
        step.get("type") == "Prepend"
        or (step.get("type") == "Metaspace" and step.get("prepend_scheme") != "never")
        or (step.get("type") == "ByteLevel" and step.get("add_prefix_space") is True)
    )


def _without_prefix(part: Any, place: Place) -> Any:
    """A normalizer or pre-tokenizer that puts no space before texts in a place: those in the middle
    get one unless it is said to be for the first only, bare ones never."""
    if not isinstance(part, dict):
        return part
    part = dict(part)
    for key in ("normalizers", "pretokenizers"):
        if key in part:
            steps = [_without_prefix(step, place) for step in part[key]]
            part[key] = [step for step in steps if step is not None]
    if part.get("type") == "Metaspace" and (
        place is Place.BARE or part.get("prepend_scheme") == "first"
    ):
        part["prepend_scheme"] = "never"
        part.pop("add_prefix_space", None)  # what older files have in its place
    if place is Place.BARE and part.get("type") == "ByteLevel":
        part["add_prefix_space"] = False
    return None if place is Place.BARE and part.get("type") == "Prepend" else part


def _template(
    path: Path, config: Metadata, named: dict[str, str]
) -> ChatTemplate | CheckpointError | None:
    """From chat_template.jinja, chat_template.json or tokenizer_config.json, the first there is."""
    try:
        found = _template_source(path, config)
        if found is None:
            return None
        source, file = found
        tokens = {key: named.get(key, "") for key in ("bos_token", "eos_token")}
        return ChatTemplate(source, file, key="chat_template", **tokens)
    except CheckpointError as error:  # the model can still continue texts
        return error


def _template_source(path: Path, config: Metadata) -> tuple[str, str] | None:
    file = path / "chat_template.jinja"
    if file.exists():
        return read_text(str(file), _MAX_TEMPLATE_BYTES), str(file)
    for source in (_optional(path, "chat_template.json"), config):
        value = source.get("chat_template")
        if isinstance(value, list):  # several, by name
            entries = (Metadata(v, source.path) for v in value if isinstance(v, dict))
            by_name = {e.text("name", ""): e for e in entries}
            if "default" in by_name:
                return by_name["default"].text("template"), source.path
        elif value is not None:
            return source.text("chat_template"), source.path
    return None
