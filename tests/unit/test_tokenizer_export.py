"""Tokenizers of GGUF files written as tokenizer.json: the library reads the same ids from them."""

import json

import pytest
import tokenizers

from billfish.checkpoint.gguf import GGUFFile
from billfish.errors import CheckpointError
from billfish.tokenizer import from_gguf
from billfish.tokenizer.export import to_huggingface
from tests.unit.tokenizer_samples import CONTROL, USER_DEFINED, byte_level, vocabulary

BYTE_LEVEL = ("gpt-2", "llama-bpe", "qwen2")
TEXTS = (
    "Hello, world! It's 12,345.67 degrees; don't ask.",
    "def f(x):\n\treturn x ** 2  # größe\r\n\r\n   end ",
    "日本語 العربية 🎉🎉 e\u0301 Ａ",
    " leading, trailing  ",
)


@pytest.mark.parametrize("name", BYTE_LEVEL)
def test_real_vocabularies(name):
    metadata, path = vocabulary(name)
    ours = from_gguf(metadata, path)
    files = to_huggingface(metadata, path)
    library = tokenizers.Tokenizer.from_str(files["tokenizer.json"])
    for text in TEXTS:
        ids = library.encode(text).ids
        assert ids == ours.encode(text, parse_special=True), text
        assert library.decode(ids) == ours.decode(ids)


def test_the_demo_model(model_path):
    with GGUFFile.open(model_path) as file:
        metadata = dict(file.metadata)
    ours = from_gguf(metadata, str(model_path))
    files = to_huggingface(metadata, str(model_path))
    library = tokenizers.Tokenizer.from_str(files["tokenizer.json"])
    for text in (*TEXTS, "<|im_start|>user\nHi<|im_end|>\n"):
        assert library.encode(text).ids == ours.encode(text, parse_special=True)
    assert library.get_vocab_size() == ours.vocab_size
    config = json.loads(files["tokenizer_config.json"])
    assert (config["bos_token"], config["eos_token"]) == ("<|im_start|>", "<|im_end|>")
    assert files["chat_template.jinja"] == ours.chat_template


def test_begin_and_end_tokens():
    extra = [("<s>", CONTROL), ("</s>", CONTROL), ("[tool]", USER_DEFINED)]
    metadata = byte_level(extra) | {
        "tokenizer.ggml.bos_token_id": 257,
        "tokenizer.ggml.eos_token_id": 258,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": True,
    }
    files = to_huggingface(metadata, "a.gguf")
    library = tokenizers.Tokenizer.from_str(files["tokenizer.json"])
    ids = library.encode("ab[tool]").ids
    assert ids == from_gguf(metadata, "a.gguf").encode("ab[tool]") == [257, 256, 259, 258]
    assert library.decode(ids) == "ab[tool]"  # only control tokens are left out
    assert "chat_template.jinja" not in files


def test_sentencepiece_is_refused():
    metadata, path = vocabulary("llama-spm")
    with pytest.raises(CheckpointError, match="a vocabulary of the kind"):
        to_huggingface(metadata, path)
