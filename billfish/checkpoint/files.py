"""Files of unknown origin, mapped or read within bounds."""

import json
import mmap
import os
import stat
from collections.abc import Mapping
from typing import Any, Protocol, Self

import numpy as np

from billfish.errors import CheckpointError


class Place(Protocol):
    """Where a tensor lies: bytes from the start of the file, and how many."""

    @property
    def offset(self) -> int: ...
    @property
    def nbytes(self) -> int: ...


class TensorFile:
    """A file with named tensors, its header read and the file mapped; a format is a subclass.

    `tensors` by name, and their data. Also a context manager. Closing is always safe: arrays that
    were given out keep the memory map alive until the last of them is gone. A file that another
    process cuts short while it is mapped ends the reader with SIGBUS, as any memory map does.
    """

    tensors: Mapping[str, Any]

    def __init__(self, path: str, buffer: mmap.mmap) -> None:
        self.path = path
        self._buffer: mmap.mmap | None = buffer

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Self:
        """Map the file and read its header.

        Raises CheckpointError when the file cannot be read or its header is not what the format
        says (see the class).
        """
        name = os.fsdecode(path)
        buffer = map_file(name)
        try:
            return cls(name, buffer)
        except BaseException:
            buffer.close()
            raise

    def release(self, name: str) -> None:
        """Give the memory of a tensor's pages back to the system; read again, they come back."""
        if self._buffer is not None:
            info = self.tensors[name]
            release_pages(self._buffer, info.offset, info.nbytes)

    def close(self) -> None:
        """Let go of the memory map; it ends with the last array that was given out."""
        self._buffer = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _bytes(self, name: str, place: Place) -> np.ndarray:
        """The bytes of a tensor as they stand in the file: read-only uint8 [nbytes], not copied."""
        if self._buffer is None:
            raise CheckpointError(self.path, "the file has been closed", tensor=name)
        return np.frombuffer(self._buffer, np.uint8, place.nbytes, place.offset)


def map_file(path: str) -> mmap.mmap:
    """The file, mapped to be read. Raises CheckpointError where it cannot be or is empty."""
    try:
        status = os.stat(path)
        # Before opening: to open a named pipe blocks until somebody writes to it.
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(path, "is not a regular file")
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                raise CheckpointError(path, "the file is empty")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except CheckpointError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a path with a null character
        reason = getattr(error, "strerror", None) or str(error)
        raise CheckpointError(path, f"cannot be read: {reason}") from error


def release_pages(buffer: mmap.mmap, offset: int, nbytes: int) -> None:
    """Give the memory of a part of a mapped file back to the system; read again, it comes back."""
    if nbytes and hasattr(mmap, "MADV_DONTNEED"):
        start = offset // mmap.PAGESIZE * mmap.PAGESIZE
        buffer.madvise(mmap.MADV_DONTNEED, start, offset + nbytes - start)


def read_text(path: str, max_bytes: int) -> str:
    """A UTF-8 file. Raises CheckpointError, before it is read, where it is larger than that."""
    with map_file(path) as buffer:
        if len(buffer) > max_bytes:
            raise CheckpointError(path, f"has {len(buffer)} bytes, more than {max_bytes}")
        return _decoded(path, buffer[:])


def read_json(path: str, max_bytes: int = 1 << 24) -> dict[str, Any]:
    """A JSON object. Raises CheckpointError where the file is larger or holds anything else."""
    return parse_object(read_text(path, max_bytes), path)


def parse_object(text: str | bytes, path: str, *, unique: bool = False) -> dict[str, Any]:
    """The JSON object that text is. unique: a key that occurs twice in an object is an error."""
    if isinstance(text, bytes):
        text = _decoded(path, text)

    def object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) < len(pairs):
            seen: set[str] = set()
            for key, _ in pairs:
                if key in seen:
                    raise CheckpointError(path, "stands there twice", tensor=key[:200])
                seen.add(key)
        return values

    try:
        value = json.loads(text, object_pairs_hook=object_of if unique else None)
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits, deep nesting
        raise CheckpointError(path, f"is not JSON: {error}") from None
    if not isinstance(value, Mapping):
        raise CheckpointError(path, f"must hold an object, but holds a {type(value).__name__}")
    return dict(value)


def _decoded(path: str, data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(path, f"is not UTF-8 at byte {error.start}") from None
