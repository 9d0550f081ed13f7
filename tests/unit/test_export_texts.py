"""The texts that a model is calibrated on and measured with."""

import pytest

from billfish.errors import ConfigError
from billfish.export import texts
from billfish.export.texts import read_texts, sequences


class Letters:
    """A tokenizer of one token a character, which may begin texts with token 0."""

    def __init__(self, bos=None):
        self.bos_token_id = bos

    def encode(self, text, add_special_tokens=True):
        begin = [self.bos_token_id] if add_special_tokens and self.bos_token_id is not None else []
        return begin + [ord(letter) for letter in text]


def test_the_manual_is_prose_and_nothing_of_it_is_in_both_parts():
    both = read_texts(None, None)
    assert len(both.calibration) > 200_000
    assert len(both.held) > 30_000
    paragraphs = [set(text.split("\n\n")) for text in (both.calibration, both.held)]
    assert len(paragraphs[0] & paragraphs[1]) <= 1  # what the cut leaves of one on either side
    assert both.names[1] == "the last eighth of the Python reference manual"


def test_files(tmp_path):
    one, two = tmp_path / "one.txt", tmp_path / "two.txt"
    one.write_text("é" * 80, encoding="utf-8")
    two.write_text("b" * 8)
    assert read_texts(one, two).calibration == "é" * 80
    assert read_texts(one, two).held == "b" * 8
    assert (read_texts(one, None).calibration, read_texts(one, None).held) == ("é" * 70, "é" * 10)
    assert read_texts(None, two).held == "b" * 8


def test_no_more_of_a_file_is_read_than_needed(tmp_path, monkeypatch):
    monkeypatch.setattr(texts, "MAX_BYTES", 9)
    path = tmp_path / "text"
    path.write_text("é" * 80, encoding="utf-8")
    assert read_texts(path, path).held == "é" * 4  # half a character is dropped


@pytest.mark.parametrize(
    ("content", "reason"),
    [(None, "cannot be read: No such file"), (b"\xff\xfe", "is not UTF-8"), (b" \n", "is empty")],
)
def test_files_that_are_no_text(tmp_path, content, reason):
    path = tmp_path / "text"
    if content is not None:
        path.write_bytes(content)
    for arguments in ((path, None), (None, path)):
        with pytest.raises(ConfigError, match=reason):
            read_texts(*arguments)


def test_pieces_are_spread_over_the_text():
    text = "".join(chr(ord("a") + i // 10) for i in range(105))
    ids = sequences(Letters(), text, "a text", length=10, number=4)
    assert ["".join(map(chr, row)) for row in ids.tolist()] == [c * 10 for c in "acfh"]
    ids = sequences(Letters(), text, "a text", length=10, number=99)
    assert ids.shape == (10, 10)


def test_pieces_begin_as_texts_do():
    ids = sequences(Letters(bos=0), "abcdefgh", "a text", length=4, number=9)
    assert ids.tolist() == [[0, 97, 98, 99], [0, 100, 101, 102]]


def test_a_text_that_is_too_short():
    with pytest.raises(ConfigError, match="a text is too short: 8 tokens, of which no piece of 10"):
        sequences(Letters(), "abcdefgh", "a text", length=10, number=1)
