"""What the tokenizer tests share: where real vocabularies lie, and small ones made by hand."""

from pathlib import Path
from typing import Any

from billfish.checkpoint.gguf import GGUFFile
from tests.conftest import vocabulary_path

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


def vocabulary(name: str) -> tuple[dict[str, Any], str]:
    """Metadata and path of one of llama.cpp's vocabulary files, or a skip."""
    return read_metadata(vocabulary_path(f"ggml-vocab-{name}.gguf"))


def read_metadata(path: Path) -> tuple[dict[str, Any], str]:
    with GGUFFile.open(path) as file:
        return dict(file.metadata), file.path


def byte_level(
    extra: list[tuple[str, int]] = (), merges: list[str] = (), **keys: Any
) -> dict[str, Any]:  # type: ignore[assignment]
    """Metadata of a byte-level vocabulary: the 256 letters of the byte alphabet, "ab", and more."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = [chr(b) for b in visible] + [chr(256 + n) for n in range(256 - len(visible))]
    return _with([*alphabet, "ab"], NORMAL, extra, keys) | {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": keys.get("pre", "gpt-2"),
        "tokenizer.ggml.merges": ["a b", *merges],
    }


def sentencepiece(
    pieces: dict[str, float], extra: list[tuple[str, int]] = (), **keys: Any
) -> dict[str, Any]:  # type: ignore[assignment]
    """Metadata of a SentencePiece vocabulary: 256 byte tokens, the pieces, and more."""
    tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    made = _with(tokens, BYTE, [(text, NORMAL) for text in pieces] + list(extra), keys)
    return made | {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.scores": [0.0] * 256 + [*pieces.values()] + [0.0] * len(extra),
        "tokenizer.ggml.bos_token_id": 0,
    }


def _with(
    tokens: list[str], kind: int, extra: list[tuple[str, int]], keys: dict[str, Any]
) -> dict[str, Any]:
    return {
        "tokenizer.ggml.tokens": tokens + [text for text, _ in extra],
        "tokenizer.ggml.token_type": [kind] * len(tokens) + [kind for _, kind in extra],
    } | {f"tokenizer.ggml.{key}": value for key, value in keys.items() if key != "pre"}
