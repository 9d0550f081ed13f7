"""A Hugging Face model directory: config.json, and weights in safetensors, whole or in shards.

Nothing in it is ever executed: an `auto_map` in config.json, which names Python files to import, is
not looked at, and weights that are pickles (.bin, .pt, .pth) are not read.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import numpy as np

from billfish.checkpoint.files import read_json, read_text
from billfish.checkpoint.metadata import Metadata
from billfish.checkpoint.safetensors import SafetensorsFile, StoredTensor
from billfish.errors import CheckpointError, shown

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_MAX_SHARDS = 10_000


class ModelDirectory:
    """An open directory: `config` (of config.json), and `tensors` by name, over all files.

    Also a context manager; see SafetensorsFile for what closing means.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = Metadata(read_json(str(path / "config.json")), str(path / "config.json"))
        self._file_of: dict[str, SafetensorsFile] = {}
        self._files: dict[str, SafetensorsFile] = {}
        try:
            self._open_files()
        except BaseException:
            self.close()
            raise
        self.tensors: Mapping[str, StoredTensor] = MappingProxyType(
            {name: file.tensors[name] for name, file in self._file_of.items()}
        )

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Self:
        """Read config.json and the headers of all weight files.

        Raises CheckpointError where one is missing, damaged, or outside of the directory.
        """
        return cls(Path(path))

    def json(self, name: str, max_bytes: int = 1 << 24) -> Metadata | None:
        """The object in a JSON file of the directory, or None where there is no such file."""
        path = self.path / name
        return Metadata(read_json(str(path), max_bytes), str(path)) if path.exists() else None

    def text(self, name: str, max_bytes: int) -> str | None:
        """A UTF-8 file of the directory, or None where there is no such file."""
        path = self.path / name
        return read_text(str(path), max_bytes) if path.exists() else None

    def file_of(self, tensor: str) -> str:
        """The path of the file that holds a tensor."""
        return self._file_of[tensor].path

    def data(self, tensor: str) -> np.ndarray:
        """The bytes of a tensor as they stand in its file: read-only uint8, not copied."""
        return self._file_of[tensor].data(tensor)

    def release(self, tensor: str) -> None:
        """Give the memory of a tensor's pages back to the system; read again, they come back."""
        self._file_of[tensor].release(tensor)

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open_files(self) -> None:
        if (self.path / SINGLE).exists():
            file = self._open(SINGLE)
            self._file_of = dict.fromkeys(file.tensors, file)
        elif (self.path / INDEX).exists():
            self._open_shards()
        else:
            raise CheckpointError(str(self.path), self._nothing_to_read())

    def _open(self, name: str) -> SafetensorsFile:
        if name not in self._files:
            self._files[name] = SafetensorsFile.open(self.path / name)
        return self._files[name]

    def _open_shards(self) -> None:
        path = str(self.path / INDEX)
        index = Metadata(read_json(path, 1 << 26), path)
        weight_map = index.section("weight_map")
        if not weight_map:
            index.fail("weight_map", "is missing or empty")
        shards = dict.fromkeys(weight_map.values())
        if len(shards) > _MAX_SHARDS:
            index.fail("weight_map", f"names {len(shards)} files, more than {_MAX_SHARDS}")
        for name in shards:
            self._check_shard(index, name)
        for tensor, shard in weight_map.items():
            file = self._open(shard)
            if tensor not in file.tensors:
                reason = f"is missing, though {INDEX} says that it is in this file"
                raise CheckpointError(file.path, reason, tensor=tensor[:200])
            self._file_of[tensor] = file
        for file in self._files.values():
            for tensor in file.tensors:
                if self._file_of.setdefault(tensor, file) is not file and tensor not in weight_map:
                    other = self._file_of[tensor].path
                    raise CheckpointError(file.path, f"is also in {other}", tensor=tensor)

    def _check_shard(self, index: Metadata, name: Any) -> None:
        # A name, and not a path: what is read stays within the directory.
        plain = isinstance(name, str) and name.isprintable() and len(name.encode()) < 256
        if not plain or name in ("", "..") or Path(name).name != name:
            index.fail("weight_map", f"{shown(name)} is not the name of a file in this directory")
        if not (self.path / name).exists():
            index.fail("weight_map", f"names {shown(name)}, which is missing")

    def _nothing_to_read(self) -> str:
        pickles = (".bin", ".pt", ".pth", ".ckpt")
        names = sorted(entry.name for entry in self.path.iterdir())
        found = [name for name in names if name.endswith(pickles)]
        if found:
            return (
                f"has neither {SINGLE} nor {INDEX}; {shown(found[0])} is a pickle, which can run "
                "any code and is not read: save the model as safetensors"
            )
        found = [name for name in names if name.endswith(".gguf")]
        if found:
            return f"has neither {SINGLE} nor {INDEX}; give the path of {shown(found[0])} itself"
        return f"has neither {SINGLE} nor {INDEX}"
