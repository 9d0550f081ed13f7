"""Every vocabulary that is supported, token by token against llama.cpp's published test files."""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from billfish.errors import CheckpointError
from billfish.tokenizer import Tokenizer, from_gguf
from billfish.tokenizer.pretokenizers import WORD_RULES
from billfish.tokenizer.sentencepiece import SentencePieceBPE
from tests.unit.tokenizer_samples import CONTROL, byte_level, sentencepiece, vocabulary

EXACT = (
    "command-r", "deepseek-coder", "deepseek-llm", "falcon", "gpt-2", "llama-bpe", "llama-spm",
    "mpt", "phi-3", "qwen2", "refact", "starcoder",
)  # fmt: skip
REFUSED = {
    "aquila": "tokenizer.ggml.pre",
    "bert-bge": "tokenizer.ggml.model",
    "gemma-4": "tokenizer.ggml.model",
    "gpt-neox": "tokenizer.ggml.pre",
    "nomic-bert-moe": "tokenizer.ggml.model",
    "qwen35": "tokenizer.ggml.pre",
}


@pytest.mark.parametrize("name", EXACT)
def test_ids_of_the_published_test_texts(name):
    metadata, path = vocabulary(name)
    tokenizer = from_gguf(metadata, path)
    with open(path + ".inp", encoding="utf-8", newline="") as file:
        texts = file.read().split("\n__ggml_vocab_test__\n")
    with open(path + ".out", encoding="utf-8") as file:
        expected = [[int(word) for word in line.split()] for line in file.read().split("\n")]
    assert len(texts) == len(expected) == 47
    for text, ids in zip(texts, expected, strict=True):
        assert tokenizer.encode(text, add_special_tokens=False) == ids, text
        assert tokenizer.decode(ids) == text
        stream = b"".join(map(tokenizer.token_bytes, ids))
        if name in ("llama-spm", "phi-3") and text:
            assert stream == b" " + text.encode()  # encode puts the space there
        else:
            assert stream == text.encode()


@pytest.mark.parametrize("name", REFUSED)
def test_other_kinds_are_refused_by_the_key_that_tells(name):
    metadata, path = vocabulary(name)
    with pytest.raises(CheckpointError) as error:
        from_gguf(metadata, path)
    assert error.value.tensor == REFUSED[name]
    assert error.value.file == path


def test_begin_tokens_and_end_tokens_of_real_models():
    llama3 = from_gguf(*vocabulary("llama-bpe"))
    assert llama3.encode("Hello") == [128000, 9906]  # the file has no flag, the family has
    assert llama3.eos_token_ids == (128001, 128009)
    llama2 = from_gguf(*vocabulary("llama-spm"))
    assert llama2.encode("Hello") == [1, 15043]
    assert llama2.encode("") == [1]
    assert from_gguf(*vocabulary("qwen2")).eos_token_ids == (151643, 151645)


def test_sentencepiece_spaces_around_control_tokens():
    tokenizer = from_gguf(*vocabulary("llama-spm"))
    ids = tokenizer.encode("Hello</s>Hello", parse_special=True)
    assert ids == [1, 15043, 2, 15043]  # text after a control token starts like a text
    assert tokenizer.decode(ids) == "Hello Hello"
    assert tokenizer.decode(ids[3:]) == "Hello"
    assert tokenizer.token_bytes(15043) == b" Hello"
    assert 2 not in tokenizer.encode("Hello</s>Hello")


def test_composed_and_decomposed_accents_are_one_for_vocabularies_trained_so():
    for name in ("qwen2", "command-r"):
        tokenizer = from_gguf(*vocabulary(name))
        assert tokenizer.encode("e\u0301") == tokenizer.encode("\u00e9")
    tokenizer = from_gguf(*vocabulary("llama-bpe"))
    assert tokenizer.encode("e\u0301") != tokenizer.encode("\u00e9")


def test_default_cuts_punctuation_and_groups_of_three_digits():
    merges = ["1 2", "12 3", "123 4", "4 5", "! !", "!! a"]
    extra = [(merge.replace(" ", ""), 1) for merge in merges]
    tokenizer = from_gguf(byte_level(extra, merges, pre="default"), "f")
    pieces = [tokenizer.token_bytes(i) for i in tokenizer.encode("12345!!a")]
    assert pieces == [b"123", b"45", b"!!", b"a"]


def test_every_word_rule_keeps_any_text():
    text = " \t x1½\r\n\u3000漢字 e\u0301 <|x|> 'S 've\u2028\x85 ٣٣٣ 1234567 \u200d\U0001f469 "
    for name, rules in WORD_RULES.items():
        tokenizer = from_gguf(byte_level([("<s>", CONTROL)], pre=name, bos_token_id=257), "f")
        assert tokenizer.decode(tokenizer.encode(text)) == rules.normalize(text), name


@pytest.mark.parametrize("pre", WORD_RULES)
def test_long_lines_cost_no_square_of_their_length(pre):
    metadata = byte_level([("<s>", CONTROL)], pre=pre, bos_token_id=257)
    tokenizer = from_gguf(metadata, "f")
    size = 200_000  # at this size a quadratic rule takes many minutes
    spaces = [" " * size + end for end in ("x", "1", "漢")]
    for text in (*spaces, "a" * size, "\t\n" * (size // 2), "1" * size, "<" * size):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_long_sentencepiece_words_cost_no_square_of_their_length():
    tokenizer = from_gguf(*vocabulary("llama-spm"))
    for text in ("a" * 100_000, " " * 100_000, "ab" * 50_000, "é\x00" * 20_000):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
    assert len(tokenizer.encode(" " * 16_000)) < 1_100  # runs become the 16-space piece


def _by_scanning(word: str, scores: dict[str, float]) -> list[str]:
    """The definition, read aloud: find the best pair, the leftmost of equals; join; again."""
    symbols = list(word)
    while True:
        pairs = [(scores[a + b], -i) for i, (a, b) in enumerate(itertools.pairwise(symbols))
                 if a + b in scores]  # fmt: skip
        if not pairs:
            return symbols
        i = -max(pairs)[1]
        symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]


@pytest.mark.parametrize("seed", range(40))
def test_sentencepiece_merges_as_its_definition_says(seed):
    """Small alphabets, equal scores and pieces that overlap themselves: where order matters."""
    draw = random.Random(seed)
    letters = "ab▁"
    texts = {"".join(draw.choices(letters, k=draw.randint(2, 5))) for _ in range(25)}
    scores = {text: float(-draw.randint(0, 6)) for text in sorted(texts)}
    ids = {text: 256 + i for i, text in enumerate([*letters, *scores])}
    by_id = [0.0] * (256 + len(letters)) + list(scores.values())
    encode = SentencePieceBPE(ids, by_id, range(256))
    for _ in range(40):
        text = "".join(draw.choices("ab ", k=draw.randint(0, 30)))
        expected = [ids[symbol] for symbol in _by_scanning(text.replace(" ", "▁"), scores)]
        assert encode(text) == expected, text


@given(st.text(st.characters(exclude_categories=("Cs",))))
@settings(derandomize=True, max_examples=200, deadline=None)
def test_sentencepiece_keeps_any_text(text):
    tokenizer = _pieces()
    for given_text in (text, " " + text):
        ids = tokenizer.encode(given_text, add_special_tokens=False)
        # "▁" is how the vocabulary writes a space, so it comes back as one.
        assert tokenizer.decode(ids) == given_text.replace("▁", " ")


def _pieces() -> Tokenizer:
    pieces = {"▁": 0.0, "a": 0.0, "e": 0.0, "▁a": -1.0, "ae": -2.0, "▁▁": -3.0}
    return from_gguf(sentencepiece(pieces), "f")


def test_space_prefix_can_be_off():
    metadata = sentencepiece({"▁": 0.0, "a": 0.0, "▁a": -1.0}, add_space_prefix=False)
    tokenizer = from_gguf(metadata, "f")
    assert tokenizer.encode("a a", add_special_tokens=False) == [257, 258]
    assert tokenizer.decode([258]) == " a"


def test_bytes_that_a_vocabulary_lacks_are_left_out():
    tokenizer = from_gguf(*vocabulary("falcon"))
    assert tokenizer.encode("a\x14b") == tokenizer.encode("a") + tokenizer.encode("b")
