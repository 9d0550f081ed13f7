"""A bounds-checked reader of GGUF files, versions 2 and 3, little-endian.

Layout, after the GGUF specification (ggml, docs/gguf.md); all numbers are little-endian:

    magic "GGUF", uint32 version, uint64 tensor count, uint64 metadata count
    metadata:  string key, uint32 value type, value
    tensors:   string name, uint32 dimensions, uint64 sizes (fastest first), uint32 type,
               uint64 offset from the start of the data section
    padding to `general.alignment` (32 unless stated), then the data section

A string is a uint64 length and that many bytes of UTF-8; an array is a uint32 element type, a
uint64 count and the elements. A file may come from anyone, so every count, length and offset is
held against the bytes that are left before anything is allocated or looped over, and whatever is
wrong is one CheckpointError that names the file, the key or tensor, and the reason.
"""

import itertools
import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NoReturn, TypeAlias

import numpy as np

from billfish.checkpoint.files import TensorFile
from billfish.checkpoint.ggml import READABLE_TYPES, GGMLType
from billfish.checkpoint.metadata import Metadata
from billfish.errors import CheckpointError

Value: TypeAlias = int | float | bool | str | list[Any] | np.ndarray

_MAX_HEADER_BYTES = 1 << 28  # the largest real headers (vocabularies of 262,144) take 16 MiB
_MAX_STRINGS = 1 << 21  # the largest real vocabularies have 800,000 tokens and merges
_MAX_ENTRIES = 1 << 16  # keys, tensors and nested arrays; the largest real models have thousands
_MAX_NAME_BYTES = (1 << 16) - 1  # the specification's limit for keys
_MAX_DEPTH = 4  # arrays within arrays
_MAX_DIMENSIONS = 4
_DEFAULT_ALIGNMENT = 32

_BOOL, _STRING, _ARRAY = 7, 8, 9
_NUMBERS = {  # value type: format character, the same in struct and numpy
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", _BOOL: "B", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_LEAST_KEY_BYTES = 8 + 4 + 1
_LEAST_TENSOR_BYTES = 8 + 4 + 4 + 8
_LEAST_STRING_BYTES = 8
_LEAST_ARRAY_BYTES = 4 + 8


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies. `shape` is row-major ([rows, columns]), `offset` and `nbytes` are bytes
    from the start of the file."""

    name: str
    shape: tuple[int, ...]
    type: GGMLType
    offset: int
    nbytes: int


class GGUFFile(TensorFile):
    """An open GGUF file: `metadata`, `tensors` by name in file order, and their data, mapped.

    metadata: numbers and bools are Python's own, arrays of them numpy arrays, strings `str`, arrays
    of strings and of arrays lists; its getters check what they give.

    Opening one raises CheckpointError when the file cannot be read, is no little-endian GGUF of
    version 2 or 3, or contradicts itself: values past its end, unknown types, duplicate keys or
    tensors, overlapping or misaligned tensors, text that is no UTF-8.
    """

    def __init__(self, path: str, buffer: mmap.mmap) -> None:
        super().__init__(path, buffer)
        cursor = _Cursor(buffer, path)
        self.version, num_tensors, num_keys = _read_preamble(cursor)
        self.metadata = Metadata(_read_metadata(cursor, num_keys), path)
        alignment = self.metadata.integer("general.alignment", 1, 1 << 31, _DEFAULT_ALIGNMENT)
        if alignment & (alignment - 1):
            cursor.fail(f"must be a power of two, but is {alignment}", "general.alignment")
        tensors = _read_tensors(cursor, num_tensors, alignment)
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(tensors)

    def data(self, name: str) -> np.ndarray:
        """The bytes of a tensor as they stand in the file: read-only uint8 [nbytes], not copied.

        Raises CheckpointError when there is no such tensor, when its type is not one of
        READABLE_TYPES, or when the file has been closed.
        """
        info = self.tensors.get(name)
        if info is None:
            raise CheckpointError(self.path, "the file has no such tensor", tensor=name)
        if info.type not in READABLE_TYPES:
            readable = ", ".join(t.name for t in sorted(READABLE_TYPES))
            reason = f"type {info.type.name} is not supported (supported: {readable})"
            raise CheckpointError(self.path, reason, tensor=name)
        return self._bytes(name, info)


class _Cursor:
    """A position in the header. Each read checks what is left; `what` names it in errors."""

    def __init__(self, buffer: mmap.mmap, path: str) -> None:
        self.buffer = buffer
        self.path = path
        self.position = 0
        self.end = min(len(buffer), _MAX_HEADER_BYTES)
        self.num_strings = 0
        self.num_entries = 0

    def fail(self, reason: str, what: str | None = None) -> NoReturn:
        raise CheckpointError(self.path, reason, tensor=what)

    def require(self, nbytes: int, what: str | None) -> None:
        left = self.end - self.position
        if nbytes > left:
            whole = self.end == len(self.buffer)
            bound = "the file" if whole else f"the {self.end} bytes that a header may take"
            self.fail(
                f"needs {nbytes} bytes at offset {self.position}, but {left} are left of {bound}",
                what,
            )

    def claim(self, count: int, least_bytes: int, what: str | None) -> None:
        """Check that `count` more entries, of at least `least_bytes` each, can follow."""
        self.require(count * least_bytes, what)
        self.num_entries += count
        if self.num_entries > _MAX_ENTRIES:
            self.fail(f"more than {_MAX_ENTRIES} keys, tensors and nested arrays", what)

    def numbers(self, format: str, what: str | None) -> tuple[Any, ...]:
        size = struct.calcsize(format)
        self.require(size, what)
        values = struct.unpack_from(format, self.buffer, self.position)
        self.position += size
        return values

    def name(self, what: str) -> str:
        (length,) = self.numbers("<Q", what)
        if length > _MAX_NAME_BYTES:
            self.fail(f"a name of {length} bytes is longer than {_MAX_NAME_BYTES}", what)
        self.position -= 8
        name = self.strings(1, what)[0]
        if not name or not name.isprintable():  # names end up in messages and logs
            self.fail(f"a name must be printable and not empty, but is {name[:80]!r}", what)
        return name

    def strings(self, count: int, what: str) -> list[str]:
        """`count` strings in one tight loop: a vocabulary has hundreds of thousands."""
        self.require(count * _LEAST_STRING_BYTES, what)
        self.num_strings += count
        if self.num_strings > _MAX_STRINGS:
            self.fail(f"more than {_MAX_STRINGS} strings", what)
        buffer, position, end = self.buffer, self.position, self.end
        unpack = struct.Struct("<Q").unpack_from
        result = []
        for _ in range(count):
            start = position + 8
            if start > end or (length := unpack(buffer, position)[0]) > end - start:
                self.position = position
                self.require(8, what)
                self.position = start
                self.require(length, what)
            position = start + length
            try:
                result.append(str(buffer[start:position], "utf-8"))
            except UnicodeDecodeError as error:
                self.fail(f"the string at offset {start} is not UTF-8: {error.reason}", what)
        self.position = position
        return result

    def value(self, type: int, what: str) -> Value:
        if type == _STRING:
            return self.strings(1, what)[0]
        if type == _ARRAY:
            return self.array(what, depth=1)
        format = _NUMBERS.get(type)
        if format is None:
            self.fail(f"unknown value type {type}", what)
        number: int | float = self.numbers("<" + format, what)[0]
        if type != _BOOL:
            return number
        if number > 1:
            self.fail(f"a bool must be 0 or 1, but is {number}", what)
        return bool(number)

    def array(self, what: str, depth: int) -> Value:
        if depth > _MAX_DEPTH:
            self.fail(f"arrays are nested more than {_MAX_DEPTH} deep", what)
        type, count = self.numbers("<IQ", what)
        if type == _STRING:
            return self.strings(count, what)
        if type == _ARRAY:
            self.claim(count, _LEAST_ARRAY_BYTES, what)
            return [self.array(what, depth + 1) for _ in range(count)]
        format = _NUMBERS.get(type)
        if format is None:
            self.fail(f"unknown element type {type} of an array", what)
        dtype = np.dtype("<" + format)
        self.require(count * dtype.itemsize, what)
        # A copy: metadata outlives the map, and the file does not align its arrays.
        values = np.frombuffer(self.buffer, dtype, count, self.position).copy()
        self.position += values.nbytes
        if type != _BOOL:
            return values
        if values.size and values.max() > 1:
            self.fail("a bool must be 0 or 1", what)
        return values.astype(np.bool_)


def _read_preamble(cursor: _Cursor) -> tuple[int, int, int]:
    """(version, tensor count, metadata count)."""
    magic = cursor.buffer[:4]
    if magic != b"GGUF":
        cursor.fail(f"not a GGUF file: it begins with {magic!r}, not with b'GGUF'")
    _, version = cursor.numbers("<4sI", "version")
    if version & 0xFFFF == 0:
        cursor.fail("big-endian GGUF is not supported", "version")
    if version not in (2, 3):
        cursor.fail(f"GGUF version {version} is not supported, only 2 and 3 are", "version")
    num_tensors, num_keys = cursor.numbers("<QQ", "tensor and metadata counts")
    return version, num_tensors, num_keys


def _read_metadata(cursor: _Cursor, count: int) -> dict[str, Value]:
    cursor.claim(count, _LEAST_KEY_BYTES, f"metadata count {count}")
    values: dict[str, Value] = {}
    for index in range(count):
        key = cursor.name(f"metadata entry {index}")
        if key in values:
            cursor.fail("the key occurs twice", key)
        (type,) = cursor.numbers("<I", key)
        values[key] = cursor.value(type, key)
    return values


def _read_tensors(cursor: _Cursor, count: int, alignment: int) -> dict[str, TensorInfo]:
    cursor.claim(count, _LEAST_TENSOR_BYTES, f"tensor count {count}")
    tensors: dict[str, TensorInfo] = {}
    for index in range(count):
        info = _read_tensor(cursor, index)
        if info.name in tensors:
            cursor.fail("the tensor occurs twice", info.name)
        if info.offset % alignment:
            cursor.fail(f"offset {info.offset} is no multiple of {alignment}", info.name)
        tensors[info.name] = info
    data_start = -(-cursor.position // alignment) * alignment
    return _place(cursor, tensors, data_start)


def _read_tensor(cursor: _Cursor, index: int) -> TensorInfo:
    """One entry of the table; its offset still counts from the start of the data section."""
    name = cursor.name(f"tensor {index}")
    (num_dimensions,) = cursor.numbers("<I", name)
    if num_dimensions > _MAX_DIMENSIONS:
        cursor.fail(f"{num_dimensions} dimensions are more than {_MAX_DIMENSIONS}", name)
    sizes = cursor.numbers(f"<{num_dimensions}Q", name)
    number, offset = cursor.numbers("<IQ", name)
    try:
        type = GGMLType(number)
    except ValueError:
        cursor.fail(f"unknown tensor type {number}", name)
    if 0 in sizes:
        cursor.fail(f"a dimension is 0: {sizes}", name)
    columns = sizes[0] if sizes else 1
    if columns % type.block_size:
        cursor.fail(
            f"rows of {columns} values are no multiple of the {type.block_size} that a block of "
            f"{type.name} holds",
            name,
        )
    nbytes = math.prod(sizes) // type.block_size * type.block_bytes
    return TensorInfo(name, tuple(reversed(sizes)), type, offset, nbytes)


def _place(cursor: _Cursor, tensors: dict[str, TensorInfo], start: int) -> dict[str, TensorInfo]:
    """Turn offsets into offsets in the file; no tensor may pass its end or overlap another."""
    size = len(cursor.buffer)
    for info in tensors.values():
        if start + info.offset + info.nbytes > size:
            cursor.fail(
                f"{info.nbytes} bytes at offset {start + info.offset} pass the end of the file at "
                f"{size}",
                info.name,
            )
    by_offset = sorted(tensors.values(), key=lambda info: info.offset)
    for before, after in itertools.pairwise(by_offset):
        if before.offset + before.nbytes > after.offset:
            cursor.fail(f"overlaps tensor {before.name}", after.name)
    return {
        name: TensorInfo(name, info.shape, info.type, start + info.offset, info.nbytes)
        for name, info in tensors.items()
    }
