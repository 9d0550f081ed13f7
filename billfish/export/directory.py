"""Writes a Hugging Face model directory: all of it, or nothing that looks like it.

Everything goes to a folder beside the one asked for, which takes its name at the end. config.json
is written last, so that what a killed run leaves behind cannot be taken for a model.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from safetensors.torch import save_file
from torch import Tensor

from billfish.errors import CapacityError, ConfigError, shown

_SHARD_BYTES = 1 << 30


def check_target(out: Path, nbytes: int) -> None:
    """Whether a model of nbytes can be written to `out`: a path that is free, or an empty folder.

    Raises ConfigError where it is taken or its parent is missing, CapacityError where the disk is
    too small.
    """
    if out.is_dir() and any(out.iterdir()):
        raise ConfigError(f"{out} exists and is not empty")
    if out.is_symlink():  # the folder that takes its name cannot replace it
        raise ConfigError(f"{out} is a symbolic link")
    if out.exists() and not out.is_dir():
        raise ConfigError(f"{out} exists and is not a folder")
    parent = out.absolute().parent
    if not parent.is_dir():
        raise ConfigError(f"{parent} is not a folder")
    free = shutil.disk_usage(parent).free
    if free < nbytes:
        raise CapacityError(
            f"the model takes {nbytes / 2**20:.0f} MiB, but {parent} has only "
            f"{free / 2**20:.0f} MiB free"
        )


class DirectoryWriter:
    """A context manager: what it wrote is there once `finish` was called, and gone otherwise.

    shard_bytes: a file of weights ends with the tensor that reaches it; tensors wait in memory
    until then.
    """

    def __init__(self, out: Path, shard_bytes: int = _SHARD_BYTES) -> None:
        self._out, self._shard_bytes = out, shard_bytes
        self._folder = Path()
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = self.nbytes = 0
        self._shards: list[list[str]] = []

    def __enter__(self) -> Self:
        out = self._out.absolute()
        try:
            folder = tempfile.mkdtemp(prefix=f".{out.name}.", suffix=".part", dir=out.parent)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise ConfigError(f"{shown(str(out))} cannot be written: {reason}") from error
        self._folder = Path(folder)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def add(self, name: str, tensor: Tensor) -> None:
        """A tensor under its full name."""
        self._pending[name] = tensor.contiguous().cpu()
        self._pending_bytes += tensor.nbytes
        self.nbytes += tensor.nbytes
        if self._pending_bytes >= self._shard_bytes:
            self._flush()

    def write(self, name: str, content: str | bytes | Mapping[str, Any]) -> None:
        """A file: text, bytes, or an object as JSON."""
        if isinstance(content, Mapping):
            content = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
        data = content.encode() if isinstance(content, str) else content
        (self._folder / name).write_bytes(data)

    def copy(self, file: Path) -> None:
        shutil.copyfile(file, self._folder / file.name)

    def finish(self, config: Mapping[str, Any]) -> None:
        """Writes what is left, config.json last, and gives the folder its name."""
        if self._pending:
            self._flush()
        self._name_shards()
        self.write("config.json", config)
        allowed = ~_umask()
        for path in self._folder.iterdir():
            path.chmod(0o666 & allowed)  # the library writes weights for their owner only
            _sync(path)
        _sync(self._folder)
        self._folder.chmod(0o777 & allowed)  # and so are temporary folders
        try:
            self._folder.rename(self._out)  # takes the place of an empty folder too
        except OSError as error:
            raise ConfigError(f"{self._out} cannot be written: {error.strerror}") from error
        _sync(self._out.absolute().parent)

    def _flush(self) -> None:
        save_file(
            self._pending, self._folder / f"{len(self._shards)}.part", metadata={"format": "pt"}
        )
        self._shards.append(list(self._pending))
        self._pending, self._pending_bytes = {}, 0

    def _name_shards(self) -> None:
        count = len(self._shards)
        if count == 1:
            (self._folder / "0.part").rename(self._folder / "model.safetensors")
            return
        weight_map = {}
        for number, tensors in enumerate(self._shards):
            name = f"model-{number + 1:05}-of-{count:05}.safetensors"
            (self._folder / f"{number}.part").rename(self._folder / name)
            weight_map.update(dict.fromkeys(tensors, name))
        index = {"metadata": {"total_size": self.nbytes}, "weight_map": weight_map}
        self.write("model.safetensors.index.json", index)


def _sync(path: Path) -> None:
    """Waits until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
