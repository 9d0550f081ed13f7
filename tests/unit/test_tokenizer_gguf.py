"""Metadata that is damaged or hostile: one CheckpointError with file and key, before any use."""

import numpy as np
import pytest

from billfish.errors import CheckpointError, InvalidRequestError
from billfish.tokenizer import from_gguf
from tests.unit.tokenizer_samples import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    byte_level,
    sentencepiece,
)

K = "tokenizer.ggml."
PIECES = {"▁": 0.0, "a": 0.0}


def _without(metadata, key):
    return {k: v for k, v in metadata.items() if k != key}


BROKEN = [
    ({}, K + "model", "missing"),
    (byte_level() | {K + "model": 3}, K + "model", "string"),
    (byte_level() | {K + "model": "bert"}, K + "model", "'bert'"),
    (_without(byte_level(), K + "tokens"), K + "tokens", "missing"),
    (byte_level() | {K + "tokens": []}, K + "tokens", "at least one"),
    (byte_level() | {K + "tokens": "abc"}, K + "tokens", "array"),
    (byte_level() | {K + "tokens": [1, 2]}, K + "tokens", "strings only"),
    (byte_level([("\ud800", NORMAL)]), K + "tokens", "surrogate"),
    (byte_level([("ab", NORMAL)]), K + "tokens", "'ab', stands there twice"),
    (_without(byte_level(), K + "token_type"), K + "token_type", "missing"),
    (byte_level() | {K + "token_type": [1, 1]}, K + "token_type", "2 entries, expected 257"),
    (byte_level() | {K + "token_type": [1.0] * 257}, K + "token_type", "integers only"),
    (byte_level([("x y", 7)]), K + "token_type", "7 is not a token type"),
    (byte_level([("x y", -1)]), K + "token_type", "-1 is not a token type"),
    (byte_level([("c" * 513, CONTROL)]), K + "token_type", "513 characters"),
    (byte_level([(f"<{i}>", CONTROL) for i in range(8193)]), K + "token_type", "8193 control"),
    (_without(byte_level(), K + "pre"), K + "pre", "missing"),
    (byte_level(pre="tekken-9"), K + "pre", "'tekken-9' is not supported"),
    (_without(byte_level(), K + "merges"), K + "merges", "missing"),
    (byte_level(merges=["a zz"]), K + "merges", "zz"),
    (byte_level(merges=["b a"]), K + "merges", "ba"),
    (byte_level(merges=["a b c"]), K + "merges", "'a b c'"),
    (byte_level(merges=["ab"]), K + "merges", "'ab'"),
    (byte_level([("ba", CONTROL)], ["b a"]), K + "merges", "ba"),
    (byte_level(bos_token_id=257), K + "bos_token_id", "257 is outside the vocabulary of 257"),
    (byte_level(eos_token_id=-1), K + "eos_token_id", "outside"),
    (byte_level(eot_token_id="x"), K + "eot_token_id", "integer"),
    (byte_level(eos_token_id=True), K + "eos_token_id", "integer"),
    (byte_level(add_bos_token=1), K + "add_bos_token", "true or false"),
    (byte_level(add_bos_token=True), K + "add_bos_token", "no bos_token_id"),
    (byte_level(add_eos_token=True), K + "add_eos_token", "no eos_token_id"),
    (byte_level(add_space_prefix=True), K + "add_space_prefix", "not supported"),
    (byte_level(pre="llama-bpe"), K + "add_bos_token", "no bos_token_id"),
    (_without(sentencepiece(PIECES), K + "scores"), K + "scores", "missing"),
    (sentencepiece(PIECES) | {K + "scores": [0.0]}, K + "scores", "1 entries, expected 258"),
    (sentencepiece(PIECES | {"b": float("nan")}), K + "scores", "finite"),
    (sentencepiece(PIECES, [("<0xZZ>", BYTE)]), K + "tokens", "'<0xZZ>'"),
    (sentencepiece(PIECES, remove_extra_whitespaces=True), K + "remove_extra_whitespaces", "not"),
    (sentencepiece(PIECES, precompiled_charsmap=[1]), K + "precompiled_charsmap", "not"),
    (byte_level() | {"tokenizer.chat_template": 5}, "tokenizer.chat_template", "string"),
]


@pytest.mark.parametrize(("metadata", "key", "reason"), BROKEN)
def test_what_is_wrong_is_named(metadata, key, reason):
    with pytest.raises(CheckpointError) as error:
        from_gguf(metadata, "some.gguf")
    assert (error.value.file, error.value.tensor) == ("some.gguf", key)
    assert reason in error.value.reason


def test_a_byte_level_vocabulary_without_a_common_byte_is_refused():
    metadata = byte_level()
    metadata[K + "tokens"][metadata[K + "tokens"].index("q")] = "qq"
    with pytest.raises(CheckpointError, match="no token for byte 0x71"):
        from_gguf(metadata, "f")


def test_sentencepiece_without_all_bytes_is_refused():
    metadata = sentencepiece(PIECES)
    metadata[K + "token_type"][7] = NORMAL
    with pytest.raises(CheckpointError, match="255 of 256 byte tokens"):
        from_gguf(metadata, "f")


def test_numpy_arrays_are_as_good_as_lists():
    metadata = byte_level([("<e>", CONTROL)], eos_token_id=np.uint32(257))
    metadata[K + "token_type"] = np.array(metadata[K + "token_type"], dtype=np.int32)
    tokenizer = from_gguf(metadata, "f")
    assert tokenizer.eos_token_ids == (257,)
    assert all(type(i) is int for i in tokenizer.encode("ab<e>", parse_special=True))
    pieces = sentencepiece(PIECES)
    pieces[K + "scores"] = np.array(pieces[K + "scores"], dtype=np.float32)
    assert from_gguf(pieces, "f").encode("a") == [0, 256, 257]


def test_kinds_of_tokens():
    extra = [("<c>", CONTROL), ("<unk>", UNKNOWN), ("user word", USER_DEFINED),
             ("<|turn|>", USER_DEFINED), ("idle", UNUSED), ("[PAD262]", USER_DEFINED),
             ("漢", CONTROL), ("user", USER_DEFINED)]  # fmt: skip
    tokenizer = from_gguf(byte_level(extra), "f")
    text = "<c><unk>user word<|turn|>idle[PAD262]user漢"
    plain = tokenizer.encode(text)
    assert 259 in plain
    assert 264 in plain
    assert not {257, 258, 260, 261, 262, 263} & set(plain)
    assert tokenizer.decode(plain) == text
    special = tokenizer.encode(text, parse_special=True)
    assert special[:4] == [257, 258, 259, 260]
    assert not {261, 262, 263} & set(special)
    assert [tokenizer.token_bytes(i) for i in range(257, 265)] == [
        b"", b"", b"user word", b"<|turn|>", b"", b"", b"", b"user"
    ]  # fmt: skip
    assert tokenizer.decode([257, 34, 258]) == "C"
    assert tokenizer.decode([257, 34, 258], skip_special_tokens=False) == "<c>C<unk>"


def test_the_longest_token_wins_where_several_start():
    tokenizer = from_gguf(byte_level([("<a>", CONTROL), ("<a><b>", CONTROL)]), "f")
    assert tokenizer.encode("<a><b><a>", parse_special=True) == [258, 257]


def test_a_word_that_is_a_control_token_stays_text():
    """Vocabularies that take whole words unmerged must not take a control token that way."""
    metadata = byte_level([("stop", CONTROL)], pre="llama-bpe", bos_token_id=257)
    tokenizer = from_gguf(metadata, "f")
    assert 257 not in tokenizer.encode("stop", add_special_tokens=False)
    assert tokenizer.encode("stop", add_special_tokens=False, parse_special=True) == [257]


def test_begin_and_end_tokens_are_added_as_the_file_asks():
    extra = [("<s>", CONTROL), ("</s>", CONTROL), ("<|im_end|>", CONTROL), ("<t>", CONTROL)]
    ids = {"bos_token_id": 257, "eos_token_id": 258, "eot_token_id": 260}
    tokenizer = from_gguf(byte_level(extra, **ids, add_bos_token=True, add_eos_token=True), "f")
    assert tokenizer.encode("ab") == [257, 256, 258]
    assert tokenizer.encode("ab", add_special_tokens=False) == [256]
    assert tokenizer.eos_token_ids == (258, 260, 259)
    assert tokenizer.bos_token_id == 257
    assert from_gguf(byte_level(extra, **ids), "f").encode("ab") == [256]


def test_end_tokens_by_name_must_be_control_tokens():
    assert from_gguf(byte_level([("<end_of_turn>", USER_DEFINED)]), "f").eos_token_ids == ()


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb", None, b"bytes", 3])
def test_text_that_is_none_is_refused(text):
    with pytest.raises(InvalidRequestError, match=r"^text: "):
        from_gguf(byte_level(), "f").encode(text)


@pytest.mark.parametrize("token_id", [-1, 257, 2**40])
def test_ids_outside_the_vocabulary_are_refused(token_id):
    tokenizer = from_gguf(byte_level(), "f")
    assert tokenizer.vocab_size == 257
    with pytest.raises(InvalidRequestError, match="between 0 and 256"):
        tokenizer.decode([token_id])
    with pytest.raises(InvalidRequestError, match="between 0 and 256"):
        tokenizer.token_bytes(token_id)


def test_half_a_character_is_raw_bytes_in_the_stream_and_marked_in_text():
    tokenizer = from_gguf(byte_level(), "f")
    ids = tokenizer.encode("é")
    assert [tokenizer.token_bytes(i) for i in ids] == [b"\xc3", b"\xa9"]
    assert tokenizer.decode(ids[:1]) == "\ufffd"
    assert tokenizer.decode(ids) == "é"


def test_a_template_that_cannot_be_used_hinders_chats_only():
    metadata = byte_level() | {"tokenizer.chat_template": "{% if %}"}
    tokenizer = from_gguf(metadata, "model.gguf")
    assert tokenizer.decode(tokenizer.encode("abc")) == "abc"
    assert tokenizer.chat_template is None
    with pytest.raises(CheckpointError, match="line 1") as error:
        tokenizer.encode_chat([{"role": "user", "content": "abc"}])
    assert error.value.tensor == "tokenizer.chat_template"


@pytest.mark.parametrize("word", ["ab", " ab"])
def test_spellings_are_the_word_alone_and_after_a_space(word):
    def texts(tokenizer):
        return {
            b"".join(map(tokenizer.token_bytes, ids)).decode() for ids in tokenizer.spellings(word)
        }

    assert texts(from_gguf(byte_level(), "f")) == {"ab", " ab"}
    # SentencePiece puts a space in front of a text; a word inside of one has none, or its own.
    pieces = {"▁": 0.0, "a": 0.0, "b": 0.0, "▁ab": 1.0, "ab": 0.5}
    tokenizer = from_gguf(sentencepiece(pieces), "f")
    assert texts(tokenizer) == {"ab", " ab"}
    assert {len(ids) for ids in tokenizer.spellings(word)} == {1}


@pytest.mark.parametrize("word", ["\ud800", 5, None])
def test_spellings_of_what_is_no_text_are_refused(word):
    with pytest.raises(InvalidRequestError):
        from_gguf(byte_level(), "f").spellings(word)
