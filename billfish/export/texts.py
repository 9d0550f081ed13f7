"""Texts that a model is calibrated on and measured with.

Without files of the user's own, both are from the reference manual of Python, which every Python
carries for its `help` (Python Software Foundation License): some 100,000 tokens of English prose
and code.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from billfish.errors import ConfigError
from billfish.tokenizer import Tokenizer

MAX_BYTES = 1 << 24
"""No more of a file is read: it is many times what a calibration needs."""
_HELD_SHARE = 8  # one part in so many of a text is held back, from its end


@dataclass(frozen=True, slots=True)
class Texts:
    """calibration, held: texts that do not overlap. names: where each is from."""

    calibration: str
    held: str
    names: tuple[str, str]


def read_texts(calibration: Path | None, held: Path | None) -> Texts:
    """The texts of two files in UTF-8, or of one: then its last eighth is held back.

    Raises ConfigError for a file that cannot be read, is no text, or is empty.
    """
    if calibration is None:
        whole, name = _manual(), "the Python reference manual"
    else:
        whole, name = _read(calibration), str(calibration)
    if held is not None:
        return Texts(whole, _read(held), (name, str(held)))
    cut = len(whole) - len(whole) // _HELD_SHARE
    return Texts(whole[:cut], whole[cut:], (name, f"the last eighth of {name}"))


def sequences(tokenizer: Tokenizer, text: str, name: str, *, length: int, number: int) -> Tensor:
    """int64 [S, length] token ids of pieces of a text, evenly spread over it; S <= number.

    Each begins as a text does for this model. Raises ConfigError where not one fits.
    """
    begin = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    begin = begin if tokenizer.encode("a")[: len(begin)] == begin else []
    ids = tokenizer.encode(text, add_special_tokens=False)
    body = length - len(begin)
    pieces = len(ids) // body
    if not pieces:
        raise ConfigError(
            f"{name} is too short: {len(ids)} tokens, of which no piece of {length} can be made"
        )
    chosen = (
        [piece * pieces // number for piece in range(number)] if pieces > number else range(pieces)
    )
    return torch.tensor([begin + ids[i * body : (i + 1) * body] for i in chosen])


def _manual() -> str:
    """Its sections, each paragraph once: some sections are parts of others."""
    try:
        from pydoc_data import topics
    except ImportError:
        raise ConfigError(
            "this Python comes without its manual: give a text with --calibration"
        ) from None
    paragraphs = "\n\n".join(topics.topics.values()).split("\n\n")
    return "\n\n".join(dict.fromkeys(paragraphs))


def _read(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_BYTES)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{path} cannot be read: {reason}") from error
    try:
        # The last character may have been cut.
        text = data.decode("utf-8", "ignore" if len(data) == MAX_BYTES else "strict")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text: {error.reason}") from error
    if not text.strip():
        raise ConfigError(f"{path} is empty")
    return text
