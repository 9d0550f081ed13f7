"""How byte-level BPE vocabularies cut text into words, by the name a GGUF file gives in
`tokenizer.ggml.pre`.

A merge never crosses a word boundary, so a wrong table does not fail: it quietly yields other
tokens than the model was trained on. Each entry therefore follows the tokenizer that was published
with the model family, and a name that is not here is refused.
"""

import unicodedata
from collections.abc import Callable
from dataclasses import dataclass

from tokenizers import Regex
from tokenizers.pre_tokenizers import (
    ByteLevel,
    Digits,
    PreTokenizer,
    Punctuation,
    Sequence,
    Split,
)

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_QWEN2 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

# The letters of the DeepSeek LLM tokenizer: cased letters as of an older Unicode, in hexadecimal.
_DEEPSEEK_LETTERS = (
    "41-5a 61-7a b5 c0-d6 d8-f6 f8-1ba 1bc-1bf 1c4-293 295-2af 370-373 376-377 37b-37d 37f 386 "
    "388-38a 38c 38e-3a1 3a3-3f5 3f7-481 48a-52f 531-556 10a0-10c5 13a0-13f5 13f8-13fd 1c90-1cba "
    "1cbd-1cbf 1d00-1d2b 1d6b-1d77 1d79-1d9a 1e00-1f15 1f18-1f1d 1f20-1f45 1f48-1f4d 1f50-1f57 "
    "1f59 1f5b 1f5d 1f5f-1f7d 1f80-1fb4 1fb6-1fbc 1fbe 1fc2-1fc4 1fc6-1fcc 1fd0-1fd3 1fd6-1fdb "
    "1fe0-1fec 1ff2-1ff4 1ff6-1ffc 2102 2107 210a-2113 2115 2119-211d 2124 2126 2128 212a-212d "
    "212f-2134 2139 213c-213f 2145-2149 214e 2183-2184 2c00-2c7b 2c7e-2ce4 2ceb-2cee 2cf2-2cf3 "
    "a640-a66d a680-a69b a722-a76f a771-a787 a78b-a78e ab70-abbf fb00-fb06 fb13-fb17 ff21-ff3a "
    "ff41-ff5a 10400-1044f 104b0-104d3 104d8-104fb 10c80-10cb2 10cc0-10cf2 118a0-118df 1e900-1e943"
)
_DEEPSEEK_PUNCTUATION = "21-2f 3a-7e ff01-ff0f ff1a-ff5e 2018-201f 3000-3002"
_DEEPSEEK_CJK = "4e00-9fa5 800-4e00 ac00-d7ff"


def _nfc(text: str) -> str:
    return unicodedata.normalize("NFC", text)


def _unchanged(text: str) -> str:
    return text


@dataclass(frozen=True, slots=True)
class WordRules:
    """What a byte-level vocabulary does before its merges.

    cut: makes the pre-tokenizer, whose words are in the byte alphabet. normalize: applied to the
    text first. whole_words: a word that is a vocabulary entry is taken as it is, without merges.
    add_bos: whether a begin token is put in front when the file does not say.
    """

    cut: Callable[[], PreTokenizer]
    normalize: Callable[[str], str] = _unchanged
    whole_words: bool = False
    add_bos: bool = False


def _split(pattern: str) -> PreTokenizer:
    return Split(Regex(pattern), behavior="isolated")


def _characters(ranges: str) -> str:
    """A regular-expression class from hexadecimal code points and ranges of them."""
    ends = (item.partition("-")[::2] for item in ranges.split())
    return "[" + "".join(rf"\x{{{a}}}-\x{{{b or a}}}" for a, b in ends) + "]"


def _to_bytes() -> PreTokenizer:
    return ByteLevel(add_prefix_space=False, use_regex=False)


def _gpt2() -> PreTokenizer:
    return ByteLevel(add_prefix_space=False, use_regex=True)


def _digits_then_gpt2() -> PreTokenizer:
    return Sequence([Digits(individual_digits=True), _gpt2()])


def _falcon() -> PreTokenizer:
    # The digit rules come after the byte mapping, as published: a few bytes of longer characters
    # map to superscripts and fractions, which count as digits there.
    digits = [Digits(individual_digits=False), _split("[0-9][0-9][0-9]")]
    return Sequence([Punctuation(behavior="contiguous"), _gpt2(), *digits])


def _one_pattern(pattern: str) -> Callable[[], PreTokenizer]:
    return lambda: Sequence([_split(pattern), _to_bytes()])


def _deepseek_llm() -> PreTokenizer:
    patterns = (
        r"[\r\n]",
        rf"\s?{_characters(_DEEPSEEK_LETTERS)}+",
        rf"\s?{_characters(_DEEPSEEK_PUNCTUATION)}+",
        # The published pattern has no look-behind. It changes no match, since a match starts
        # where its run of spaces starts, but without it a long run inside a line costs the
        # square of its length.
        r"(?<!\s)\s+$",
        rf"{_characters(_DEEPSEEK_CJK)}+",
    )
    digits = Digits(individual_digits=True)
    return Sequence([*(_split(pattern) for pattern in patterns), digits, _to_bytes()])


def _deepseek_coder() -> PreTokenizer:
    patterns = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", rf"{_characters(_DEEPSEEK_CJK)}+")
    digits = Digits(individual_digits=True)
    return Sequence([*(_split(pattern) for pattern in patterns), digits, _to_bytes()])


def _default() -> PreTokenizer:
    """What llama.cpp does for a vocabulary marked "default" (LLAMA_VOCAB_PRE_TYPE_DEFAULT)."""
    patterns = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")
    return Sequence([*(_split(pattern) for pattern in patterns), _to_bytes()])


_DIGITS = WordRules(_digits_then_gpt2)
_LLAMA3_RULES = WordRules(_one_pattern(_LLAMA3), whole_words=True, add_bos=True)

WORD_RULES = {
    "default": WordRules(_default),
    "gpt-2": WordRules(_gpt2),
    "mpt": WordRules(_gpt2, _nfc),
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "command-r": WordRules(_digits_then_gpt2, _nfc),
    "llama-bpe": _LLAMA3_RULES,
    "llama3": _LLAMA3_RULES,
    "llama-v3": _LLAMA3_RULES,
    "qwen2": WordRules(_one_pattern(_QWEN2), _nfc),
    "falcon": WordRules(_falcon),
    "deepseek-llm": WordRules(_deepseek_llm),
    "deepseek-coder": WordRules(_deepseek_coder),
}
