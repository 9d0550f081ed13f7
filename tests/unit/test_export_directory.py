"""The writer of model directories: whole or not there."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from billfish.errors import CapacityError, ConfigError
from billfish.export.directory import DirectoryWriter, check_target

TENSORS = {f"layer.{i}.weight": torch.full((8, 4), float(i)) for i in range(5)}


def write(writer):
    for name, tensor in TENSORS.items():
        writer.add(name, tensor)
    writer.write("note.txt", "größe")
    writer.finish({"model_type": "llama"})


def test_one_file(tmp_path):
    out = tmp_path / "model"
    with DirectoryWriter(out) as writer:
        write(writer)
        assert writer.nbytes == 5 * 8 * 4 * 4
    assert sorted(os.listdir(tmp_path)) == ["model"]
    assert sorted(os.listdir(out)) == ["config.json", "model.safetensors", "note.txt"]
    assert json.loads((out / "config.json").read_text()) == {"model_type": "llama"}
    assert (out / "note.txt").read_text() == "größe"
    with safe_open(out / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert set(file.keys()) == set(TENSORS)
        for name, tensor in TENSORS.items():
            assert torch.equal(file.get_tensor(name), tensor)


@pytest.mark.parametrize(("mask", "folder", "file"), [(0o022, 0o755, 0o644), (0o077, 0o700, 0o600)])
def test_whoever_may_read_other_files_may_read_these(tmp_path, mask, folder, file):
    before = os.umask(mask)
    try:
        with DirectoryWriter(tmp_path / "model") as writer:
            write(writer)
    finally:
        os.umask(before)
    out = tmp_path / "model"
    assert out.stat().st_mode & 0o777 == folder
    assert {path.stat().st_mode & 0o777 for path in out.iterdir()} == {file}


def test_shards(tmp_path):
    """A shard ends with the tensor that fills it: two tensors of 128 bytes for 200."""
    out = tmp_path / "model"
    out.mkdir()  # an empty folder is taken
    with DirectoryWriter(out, shard_bytes=200) as writer:
        write(writer)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 640
    shards = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert index["weight_map"] == {name: shards[number // 2] for number, name in enumerate(TENSORS)}
    for name, shard in index["weight_map"].items():
        with safe_open(out / shard, "pt") as file:
            assert torch.equal(file.get_tensor(name), TENSORS[name])


def test_an_error_leaves_nothing(tmp_path):
    def fails():
        with DirectoryWriter(tmp_path / "model", shard_bytes=1) as writer:
            writer.add("a", torch.zeros(4))
            raise RuntimeError("in between")

    with pytest.raises(RuntimeError, match="in between"):
        fails()
    assert os.listdir(tmp_path) == []


def test_without_finish_there_is_nothing(tmp_path):
    with DirectoryWriter(tmp_path / "model") as writer:
        writer.add("a", torch.zeros(4))
    assert os.listdir(tmp_path) == []


def test_a_killed_run_leaves_nothing_that_looks_like_a_model(tmp_path):
    code = (
        "import sys, torch, os, signal; from pathlib import Path\n"
        "from billfish.export.directory import DirectoryWriter\n"
        "with DirectoryWriter(Path(sys.argv[1]), shard_bytes=1) as writer:\n"
        "    writer.add('a', torch.zeros(4)); writer.write('tokenizer.json', '{}')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "model")], check=False)
    assert done.returncode == -signal.SIGKILL
    assert not (tmp_path / "model").exists()
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".model.")
    assert not {"config.json", "model.safetensors"} & set(os.listdir(left))


def test_somebody_else_was_faster(tmp_path):
    out = tmp_path / "model"
    with DirectoryWriter(out) as writer:
        out.mkdir()
        (out / "file").write_text("theirs")
        with pytest.raises(ConfigError, match="cannot be written"):
            write(writer)
    assert (out / "file").read_text() == "theirs"
    assert os.listdir(tmp_path) == ["model"]


def test_targets(tmp_path):
    check_target(tmp_path / "new", 1 << 20)
    check_target(tmp_path, 1 << 20)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="exists and is not empty"):
        check_target(tmp_path, 1)
    with pytest.raises(ConfigError, match="is not a folder"):
        check_target(tmp_path / "file", 1)
    with pytest.raises(ConfigError, match="is not a folder"):
        check_target(tmp_path / "none" / "new", 1)
    with pytest.raises(CapacityError, match=r"takes \d+ MiB, but .* has only \d+ MiB free"):
        check_target(tmp_path / "new", 1 << 60)
    check_target(Path("new-in-this-folder"), 1)


def test_targets_that_no_folder_can_replace_are_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    (tmp_path / "broken").symlink_to(tmp_path / "nowhere")
    for name in ("link", "broken"):
        with pytest.raises(ConfigError, match="is a symbolic link"):
            check_target(tmp_path / name, 0)
    for name in ("x" * 250, "a\0b"):
        with (
            pytest.raises(ConfigError, match="cannot be written: "),
            DirectoryWriter(tmp_path / name),
        ):
            pass
