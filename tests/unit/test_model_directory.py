"""Model directories: shards, what is missing, and what must never be read or run."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from billfish.checkpoint import hub
from billfish.checkpoint.directory import INDEX, ModelDirectory
from billfish.checkpoint.locate import locate
from billfish.errors import CheckpointError


def write(path: Path, config: Any = None, index: Any = None, **shards: dict[str, int]) -> Path:
    """shards: by file name without extension, the sizes of tensors by name."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(
        json.dumps({"model_type": "llama"} if config is None else config)
    )
    for name, sizes in shards.items():
        tensors = {key: np.full(size, len(key), np.uint8) for key, size in sizes.items()}
        save_file(tensors, path / f"{name}.safetensors")
    if index is not None:
        (path / INDEX).write_text(json.dumps(index))
    return path


def weight_map(**names: str) -> dict[str, Any]:
    return {"metadata": {"total_size": 9}, "weight_map": names}


def test_one_file(tmp_path: Path) -> None:
    with ModelDirectory.open(write(tmp_path, model={"a": 3, "bb": 2})) as directory:
        assert directory.config.text("model_type") == "llama"
        assert set(directory.tensors) == {"a", "bb"}
        assert directory.data("bb").tolist() == [2, 2]
        directory.release("bb")
        assert directory.file_of("a") == str(tmp_path / "model.safetensors")
        assert directory.json("generation_config.json") is None


def test_shards(tmp_path: Path) -> None:
    index = weight_map(a="x.safetensors", b="y.safetensors")
    directory = ModelDirectory.open(write(tmp_path, index=index, x={"a": 3}, y={"b": 2, "ccc": 1}))
    # What the index does not list, but a shard has, is there to be refused by name.
    assert set(directory.tensors) == {"a", "b", "ccc"}
    assert directory.data("ccc").tolist() == [3]
    assert directory.file_of("b").endswith("y.safetensors")


@pytest.mark.parametrize(
    ("index", "file", "reason"),
    [
        (weight_map(a="x.safetensors", b="y.safetensors"), INDEX, "'y.safetensors', which is miss"),
        (weight_map(a="../x.safetensors"), INDEX, "not the name of a file in this directory"),
        (weight_map(a="sub/x.safetensors"), INDEX, "not the name of a file in this directory"),
        (weight_map(a="/etc/passwd"), INDEX, "not the name of a file in this directory"),
        (weight_map(a=".."), INDEX, "not the name of a file in this directory"),
        (weight_map(a="."), INDEX, "not the name of a file in this directory"),
        (weight_map(a=""), INDEX, "not the name of a file in this directory"),
        (weight_map(a="x\0.safetensors"), INDEX, "not the name of a file in this directory"),
        (weight_map(a="x" * 300), INDEX, "not the name of a file in this directory"),
        (weight_map(a=7), INDEX, "not the name of a file in this directory"),
        (weight_map(b="x.safetensors"), "x.safetensors", "is missing, though"),
        (weight_map(), INDEX, "missing or empty"),
        ({}, INDEX, "missing or empty"),
        ({"weight_map": []}, INDEX, "must be an object"),
        ([], INDEX, "must hold an object"),
    ],
)  # fmt: skip
def test_indices_that_lie(tmp_path: Path, index: Any, file: str, reason: str) -> None:
    inner = tmp_path / "model"
    write(inner, index=index, x={"a": 3})
    (tmp_path / "x.safetensors").write_bytes((inner / "x.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match=reason) as error:
        ModelDirectory.open(inner)
    assert error.value.file == str(inner / file)


def test_a_tensor_in_two_shards(tmp_path: Path) -> None:
    index = weight_map(a="x.safetensors", b="y.safetensors")
    write(tmp_path, index=index, x={"a": 3, "c": 1}, y={"b": 2, "c": 1})
    with pytest.raises(CheckpointError, match="is also in"):
        ModelDirectory.open(tmp_path)


def test_a_truncated_shard_is_named(tmp_path: Path) -> None:
    index = weight_map(a="x.safetensors", b="y.safetensors")
    write(tmp_path, index=index, x={"a": 3}, y={"b": 20})
    os.truncate(tmp_path / "y.safetensors", (tmp_path / "y.safetensors").stat().st_size - 1)
    with pytest.raises(CheckpointError, match="past the end") as error:
        ModelDirectory.open(tmp_path)
    assert error.value.file == str(tmp_path / "y.safetensors")
    assert error.value.tensor == "b"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("pytorch_model.bin", "is a pickle"), ("m.pth", "is a pickle"),
        ("m.gguf", "give the path of 'm.gguf' itself"), ("README.md", "has neither"),
    ],
)  # fmt: skip
def test_other_weights_are_not_read(tmp_path: Path, name: str, reason: str) -> None:
    write(tmp_path)
    (tmp_path / name).write_bytes(b"cos\nsystem\n(S'touch /tmp/x'\ntR.")
    with pytest.raises(CheckpointError, match=reason):
        ModelDirectory.open(tmp_path)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "empty"), ("[]", "must hold an object"), ("{", "not JSON"),
        ('{"a": ' * 100_000, "not JSON"), ('{"a": 1' + "0" * 10_000 + "}", "not JSON"),
    ],
)  # fmt: skip
def test_configurations_that_are_none(tmp_path: Path, text: str, reason: str) -> None:
    write(tmp_path, model={"a": 1})
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=reason):
        ModelDirectory.open(tmp_path)


def test_a_configuration_too_large_is_refused_before_it_is_read(tmp_path: Path) -> None:
    write(tmp_path, model={"a": 1})
    os.truncate(tmp_path / "config.json", 1 << 32)  # sparse
    with pytest.raises(CheckpointError, match="more than"):
        ModelDirectory.open(tmp_path)


def test_a_directory_is_located_by_its_path(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"without config\.json"):
        locate(str(tmp_path))
    assert locate(str(write(tmp_path))) == tmp_path


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        ("HuggingFaceTB/SmolLM2-135M", True), ("a/b", True), ("a", False), ("a/b/c", False),
        ("../b", False), ("a/..", False), ("/a", False), ("a/", False), ("a b/c", False),
        ("ä/b", False), ("a/" + "b" * 97, False),
    ],
)  # fmt: skip
def test_names_of_repositories(name: str, is_one: bool) -> None:
    assert hub.is_repository(name) is is_one


def fake_hub(monkeypatch: pytest.MonkeyPatch, download: Callable[..., Any]) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)


def test_a_repository_without_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(CheckpointError, match="network cannot be reached") as error:
        locate("nobody/has-fetched-this")
    assert error.value.file == "nobody/has-fetched-this"


def test_only_what_is_needed_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = weight_map(a="x.safetensors", b="y.safetensors")
    source = write(tmp_path / "there", index=index, x={"a": 3}, y={"b": 2}, consolidated={"c": 1})
    (source / "modeling.py").write_text("raise SystemExit")
    target = tmp_path / "here"
    target.mkdir()

    def download(repository: str, allow_patterns: list[str]) -> str:
        assert repository == "org/name"
        for file in source.iterdir():
            if any(file.match(pattern) for pattern in allow_patterns):
                (target / file.name).write_bytes(file.read_bytes())
        return str(target)

    fake_hub(monkeypatch, download)
    assert locate("org/name") == target
    names = {file.name for file in target.iterdir()}
    assert names == {"config.json", INDEX, "x.safetensors", "y.safetensors"}


def test_what_the_hub_refuses_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*args: Any, **options: Any) -> str:
        raise OSError("no space\nleft on device")

    fake_hub(monkeypatch, download)
    with pytest.raises(CheckpointError, match="cannot be fetched: no space left on device"):
        locate("org/name")
