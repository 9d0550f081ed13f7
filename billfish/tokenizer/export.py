"""The tokenizer of a GGUF file as the files of a Hugging Face directory."""

import json
import unicodedata
from collections.abc import Mapping
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, normalizers, processors
from tokenizers.models import BPE

from billfish.checkpoint.metadata import Metadata
from billfish.errors import CheckpointError, shown
from billfish.tokenizer.gguf import from_gguf
from billfish.tokenizer.pretokenizers import WORD_RULES

_DECOMPOSED = "e\N{COMBINING ACUTE ACCENT}"


def to_huggingface(metadata: Mapping[str, Any], path: str) -> dict[str, str]:
    """Names and texts of the files: tokenizer.json, tokenizer_config.json, chat_template.jinja.

    They give the ids that the file's own tokenizer gives. metadata: the key-value part of the GGUF
    file `path`. Raises CheckpointError as `from_gguf` does, and for a SentencePiece vocabulary,
    whose scores those files have no place for.
    """
    source = Metadata(metadata, path)
    kind = source.text("tokenizer.ggml.model")
    if kind != "gpt2":
        reason = f"a vocabulary of the kind {shown(kind)} cannot be written as tokenizer.json"
        raise CheckpointError(path, reason, tensor="tokenizer.ggml.model")
    vocabulary = from_gguf(metadata, path).vocabulary
    texts = vocabulary.texts
    ids = {text: i for i, text in enumerate(texts)}
    rules = WORD_RULES[source.text("tokenizer.ggml.pre")]
    pairs = (merge.partition(" ") for merge in source.strings("tokenizer.ggml.merges"))
    merges = [(left, right) for left, _, right in pairs]
    tokenizer = tokenizers.Tokenizer(BPE(vocab=ids, merges=merges, ignore_merges=rules.whole_words))
    if rules.normalize(_DECOMPOSED) == unicodedata.normalize("NFC", _DECOMPOSED):
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = rules.cut()
    tokenizer.decoder = decoders.ByteLevel()
    special = {texts[i] for i in vocabulary.control_ids} | set(vocabulary.control)
    matched = sorted({*special, *vocabulary.user_defined}, key=ids.__getitem__)
    tokenizer.add_tokens(
        [AddedToken(text, special=text in special, normalized=False) for text in matched]
    )
    names = {"bos_token": vocabulary.bos_token_id}
    eos = source.token_id("tokenizer.ggml.eos_token_id", len(texts))
    names["eos_token"] = eos if eos is not None else next(iter(vocabulary.eos_token_ids), None)
    names["pad_token"] = source.token_id("tokenizer.ggml.padding_token_id", len(texts))
    config: dict[str, Any] = {name: texts[i] for name, i in names.items() if i is not None}
    config |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    begin = [config["bos_token"]] if vocabulary.add_bos else []
    end = [config["eos_token"]] if vocabulary.add_eos else []
    if begin or end:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*begin, "$A", *end],
            special_tokens=[(text, ids[text]) for text in {*begin, *end}],
        )
    files = {
        "tokenizer.json": tokenizer.to_str(pretty=True),
        "tokenizer_config.json": json.dumps(config, indent=2, ensure_ascii=False) + "\n",
    }
    if "tokenizer.chat_template" in source:
        files["chat_template.jinja"] = source.text("tokenizer.chat_template")
    return files
