"""The reader of safetensors files: against the library's writer, and against hostile headers."""

import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from billfish.checkpoint.safetensors import SafetensorsFile
from billfish.errors import CheckpointError


def raw(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(begin: int, end: int, shape: Any = None, dtype: Any = "U8") -> dict[str, Any]:
    shape = [end - begin] if shape is None else shape
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def open_bytes(tmp_path: Path, data: bytes) -> SafetensorsFile:
    path = tmp_path / "m.safetensors"
    path.write_bytes(data)
    return SafetensorsFile.open(path)


def test_reads_what_the_library_writes(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    tensors = {
        "a.weight": draw.standard_normal((3, 5)).astype(np.float32),
        "b": draw.integers(0, 255, 7).astype(np.uint8),
        "half": draw.standard_normal((2, 1, 4)).astype(np.float16),
        "scalar": np.array(5, np.int64),
        "empty": np.zeros((0, 4), np.float32),
    }
    path = tmp_path / "m.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    with SafetensorsFile.open(path) as file:
        assert set(file.tensors) == set(tensors)
        for name, values in tensors.items():
            assert file.tensors[name].shape == values.shape
            assert file.data(name).tobytes() == values.tobytes()
            file.release(name)
            assert file.data(name).tobytes() == values.tobytes()
        assert file.tensors["half"].dtype == "F16"
        kept = file.data("a.weight")
        assert not kept.flags.writeable
    assert kept.tobytes() == tensors["a.weight"].tobytes()
    with pytest.raises(CheckpointError, match="closed"):
        file.data("b")


TWICE = b'{"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}, "a": 1}'


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "empty"),
        (b"\x01\x02", "has 2 bytes"),
        (raw({}, length=3), "past|JSON|is more than"),
        (raw({}, length=2**63), "more than the 2 bytes"),
        (raw(b"{" * 50), "not JSON"),
        (raw(b"[" * 100_000), "not JSON"),
        (raw(b"\xff\xfe"), "not UTF-8"),
        (raw([]), "must hold an object"),
        (raw(b'{"a": ' + b"9" * 5000 + b"}"), "JSON|must have dtype"),
        (raw(TWICE, b"x"), "stands there twice"),
        (raw({"a": 1}), "must have dtype"),
        (raw({"a": {**entry(0, 1), "more": 1}}, b"x"), "must have dtype"),
        (raw({"a": entry(0, 1, dtype="U9")}, b"x"), "unknown dtype 'U9'"),
        (raw({"a": entry(0, 1, dtype=[])}, b"x"), "unknown dtype"),
        (raw({"a": entry(0, 1, shape=[-1])}, b"x"), "impossible shape"),
        (raw({"a": entry(0, 1, shape=[1.0])}, b"x"), "impossible shape"),
        (raw({"a": entry(0, 1, shape=[True])}, b"x"), "impossible shape"),
        (raw({"a": entry(0, 1, shape=[1] * 9)}, b"x"), "impossible shape"),
        (raw({"a": entry(0, 1, shape=[2**62, 4])}, b"x"), "takes .* bytes"),
        (raw({"a": entry(0, 1, shape=[2**62] * 8)}, b"x"), r"takes \d{100}\.\.\. bytes"),
        (raw({"a": entry(0, 1, shape=2**70)}, b"x"), "impossible shape"),
        (raw({"a": entry(1, 0, shape=[1])}, b"x"), "impossible data_offsets"),
        (raw({"a": {**entry(0, 1), "data_offsets": [0]}}, b"x"), "impossible data_offsets"),
        (raw({"a": entry(0, 2)}, b"x"), "past the end of the file"),
        (raw({"a": entry(0, 2**60)}, b"x"), "past the end of the file"),
        (raw({"a": entry(0, 4, shape=[3])}, b"xxxx"), "takes 3 bytes, but data_offsets hold 4"),
        (raw({"a": entry(0, 3), "b": entry(2, 4)}, b"xxxx"), "overlaps tensor a"),
        (raw({"a": entry(0, 1), "b": entry(2, 4)}, b"xxxx"), "starts at byte"),
        (raw({"a": entry(0, 3)}, b"xxxx"), "its tensors end at"),
        (raw({"a\n": entry(0, 1)}, b"x"), "printable"),
        (raw({"": entry(0, 1)}, b"x"), "printable"),
    ],
)  # fmt: skip
def test_what_contradicts_itself_is_refused(tmp_path: Path, data: bytes, reason: str) -> None:
    with pytest.raises(CheckpointError, match=reason) as error:
        open_bytes(tmp_path, data)
    assert error.value.file == str(tmp_path / "m.safetensors")
    assert len(str(error.value)) < 1000


def test_a_huge_header_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    with path.open("wb") as file:  # sparse
        file.write((1 << 30).to_bytes(8, "little"))
        file.truncate((1 << 30) + 8)
    tracemalloc.start()
    with pytest.raises(CheckpointError, match="longer than"):
        SafetensorsFile.open(path)
    assert tracemalloc.get_traced_memory()[1] < 1e6
    tracemalloc.stop()


def test_every_cut_is_noticed(tmp_path: Path) -> None:
    whole = raw({"a": entry(0, 8, [2], "F32"), "b": entry(8, 10)}, bytes(10))
    assert set(open_bytes(tmp_path, whole).tensors) == {"a", "b"}
    for length in range(len(whole)):
        with pytest.raises(CheckpointError):
            open_bytes(tmp_path, whole[:length])
