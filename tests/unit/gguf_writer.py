"""Writes GGUF bytes, well-formed or hostile, for tests. Shares nothing with the reader.

Every piece is a list of fields, and a field is the bytes of one number, text or array; whatever
can be derived (counts, lengths, offsets) can also be given, and so be a lie.
"""

import itertools
import struct
from dataclasses import dataclass
from pathlib import Path

Fields = list[bytes]

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
FORMATS = {
    U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "B",
    U64: "Q", I64: "q", F64: "d",
}  # fmt: skip


def number(type: int, *values: float) -> bytes:
    return struct.pack(f"<{len(values)}{FORMATS[type]}", *values)


def text(value: str | bytes, length: int | None = None) -> Fields:
    data = value.encode() if isinstance(value, str) else value
    return [number(U64, len(data) if length is None else length), data]


def array(element_type: int, elements: Fields, count: int | None = None) -> Fields:
    """`elements`: one item for each element, unless `count` says otherwise."""
    counted = len(elements) if count is None else count
    return [number(U32, element_type), number(U64, counted), *elements]


def strings(values: list[str]) -> Fields:
    return array(STRING, [b"".join(text(value)) for value in values])


def entry(key: str | bytes, type: int, payload: Fields) -> Fields:
    return [*text(key), number(U32, type), *payload]


def tensor(
    name: str | bytes,
    dims: tuple[int, ...],
    type: int,
    offset: int,
    *,
    num_dims: int | None = None,
) -> Fields:
    """dims: fastest first, as in the file. offset: from the start of the data section."""
    counted = len(dims) if num_dims is None else num_dims
    sizes = [number(U64, size) for size in dims]
    return [*text(name), number(U32, counted), *sizes, number(U32, type), number(U64, offset)]


@dataclass(frozen=True)
class Written:
    data: bytes
    boundaries: list[int]
    """Where each field ends."""

    def save(self, path: Path) -> Path:
        path.write_bytes(self.data)
        return path


def write(
    entries: list[Fields] = (),
    tensors: list[Fields] = (),
    data: bytes = b"",
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    num_entries: int | None = None,
    num_tensors: int | None = None,
    alignment: int = 32,
) -> Written:
    """`alignment` pads the header; stating it in the metadata is up to the entries."""
    fields = [
        magic,
        number(U32, version),
        number(U64, len(tensors) if num_tensors is None else num_tensors),
        number(U64, len(entries) if num_entries is None else num_entries),
        *itertools.chain.from_iterable(entries),
        *itertools.chain.from_iterable(tensors),
    ]
    if tensors:
        fields.append(b"\0" * (-sum(map(len, fields)) % alignment))
    fields.append(data)
    return Written(b"".join(fields), list(itertools.accumulate(map(len, fields))))
