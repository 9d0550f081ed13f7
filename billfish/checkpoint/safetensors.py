"""A bounds-checked reader of safetensors files.

Layout (huggingface/safetensors, README, "Format"): a little-endian uint64 N, then N bytes of JSON,

    {"name": {"dtype": "F16", "shape": [2, 3], "data_offsets": [begin, end]}, ...,
     "__metadata__": {"text": "text"}}

then the data, in which offsets count from its start; it is fully covered, without overlap.

Why not the library of that name: its Rust reader checks the same, but its Python interface gives a
tensor only as a copy, or as a torch tensor, which this package does not import, and it does not let
go of the pages that were read, so that loading would take the memory of the file twice.
"""

import itertools
import math
import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NoReturn

import numpy as np

from billfish.checkpoint.files import TensorFile, parse_object
from billfish.errors import CheckpointError, shown

_MAX_HEADER_BYTES = 1 << 25  # a quarter of a million tensors with long names
_MAX_DIMENSIONS = 8
_ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I16": 2, "U16": 2,
    "F16": 2, "BF16": 2, "I32": 4, "U32": 4, "F32": 4, "C64": 8, "F64": 8, "I64": 8, "U64": 8,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies. dtype as the format names it; offset, nbytes: bytes in the file."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    nbytes: int


class SafetensorsFile(TensorFile):
    """An open safetensors file: `tensors` by name, and their data, mapped.

    Opening one raises CheckpointError when the file cannot be read or contradicts itself: a header
    or offsets past its end, a size that is not that of the shape, unknown dtypes, duplicate names,
    tensors that overlap, bytes that belong to none.
    """

    def __init__(self, path: str, buffer: mmap.mmap) -> None:
        super().__init__(path, buffer)
        self.tensors: Mapping[str, StoredTensor] = MappingProxyType(_read_header(path, buffer))

    def data(self, name: str) -> np.ndarray:
        """The bytes of a tensor as they stand in the file: read-only uint8 [nbytes], not copied."""
        return self._bytes(name, self.tensors[name])


def _read_header(path: str, buffer: mmap.mmap) -> dict[str, StoredTensor]:
    size = len(buffer)
    if size < 8:
        raise CheckpointError(path, f"has {size} bytes, but a header takes at least 8")
    length = int.from_bytes(buffer[:8], "little")
    if length > min(size - 8, _MAX_HEADER_BYTES):
        raise CheckpointError(
            path,
            f"a header of {length} bytes is more than the {size - 8} bytes that follow"
            if length > size - 8
            else f"a header of {length} bytes is longer than {_MAX_HEADER_BYTES}",
        )
    entries = parse_object(buffer[8 : 8 + length], path, unique=True)
    entries.pop("__metadata__", None)
    start = 8 + length
    tensors = {name: _entry(path, name, value, start, size) for name, value in entries.items()}
    _check_covered(path, tensors, start, size)
    return tensors


def _entry(path: str, name: str, value: Any, start: int, size: int) -> StoredTensor:
    def fail(reason: str) -> NoReturn:
        raise CheckpointError(path, reason, tensor=name[:200])

    if not name or not name.isprintable():  # names end up in messages and logs
        raise CheckpointError(path, f"a name must be printable and not empty, but is {shown(name)}")
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        fail(f"must have dtype, shape and data_offsets, but is {shown(value)}")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _ITEM_BYTES:
        fail(f"unknown dtype {shown(dtype)}")
    if not _are_sizes(shape) or len(shape) > _MAX_DIMENSIONS:
        fail(f"impossible shape {shown(shape)}")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        fail(f"impossible data_offsets {shown(offsets)}")
    begin, end = offsets
    if start + end > size:
        fail(f"ends at byte {start + end}, past the end of the file at {size}")
    nbytes = math.prod(shape) * _ITEM_BYTES[dtype]
    if nbytes != end - begin:
        held = f"but data_offsets hold {end - begin}"
        fail(f"{dtype} {shown(shape)} takes {shown(nbytes)} bytes, {held}")
    return StoredTensor(name, tuple(shape), dtype, start + begin, nbytes)


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(v) is int and 0 <= v < 2**63 for v in values)


def _check_covered(path: str, tensors: dict[str, StoredTensor], start: int, size: int) -> None:
    """Every byte belongs to one tensor, so nothing can hide and nothing was cut off."""
    ordered = sorted(tensors.values(), key=lambda info: (info.offset, info.nbytes))
    for before, after in itertools.pairwise(ordered):
        if before.offset + before.nbytes > after.offset:
            raise CheckpointError(path, f"overlaps tensor {before.name}", tensor=after.name)
    end = start
    for info in ordered:
        if info.offset != end:
            reason = f"starts at byte {info.offset}, though what is before it ends at {end}"
            raise CheckpointError(path, reason, tensor=info.name)
        end = info.offset + info.nbytes
    if end != size:
        raise CheckpointError(path, f"has {size} bytes, but its tensors end at {end}")
