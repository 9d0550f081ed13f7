"""The GGUF reader on well-formed files: our own, the gguf package's, and real ones."""

import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from billfish.checkpoint.ggml import READABLE_TYPES
from billfish.checkpoint.gguf import GGMLType, GGUFFile
from billfish.errors import CheckpointError
from tests.conftest import VOCABULARIES, vocabulary_path
from tests.unit import gguf_writer as w

NUMBERS = {
    w.U8: [0, 255], w.I8: [-128, 127], w.U16: [0, 65535], w.I16: [-32768, 32767],
    w.U32: [0, 2**32 - 1], w.I32: [-(2**31), 2**31 - 1], w.U64: [0, 2**64 - 1],
    w.I64: [-(2**63), 2**63 - 1], w.F32: [-1.5, 2.0**127], w.F64: [0.1, -1e308],
    w.BOOL: [False, True],
}  # fmt: skip
DTYPES = {
    w.U8: np.uint8, w.I8: np.int8, w.U16: np.uint16, w.I16: np.int16, w.U32: np.uint32,
    w.I32: np.int32, w.U64: np.uint64, w.I64: np.int64, w.F32: np.float32, w.F64: np.float64,
    w.BOOL: np.bool_,
}  # fmt: skip


@pytest.mark.parametrize("version", [2, 3])
def test_every_value_type(tmp_path, version):
    entries = [w.entry("text", w.STRING, w.text("Grüße\n\0"))]
    entries.append(w.entry("texts", w.ARRAY, w.strings(["", "a", "日本"])))
    for kind, values in NUMBERS.items():
        for i, value in enumerate(values):
            entries.append(w.entry(f"{kind}.{i}", kind, [w.number(kind, value)]))
        entries.append(
            w.entry(f"array.{kind}", w.ARRAY, w.array(kind, [w.number(kind, *values)], 2))
        )
        entries.append(w.entry(f"empty.{kind}", w.ARRAY, w.array(kind, [])))
    path = w.write(entries, version=version).save(tmp_path / "m.gguf")

    file = GGUFFile.open(path)

    assert file.version == version
    assert file.path == str(path)
    assert list(file.metadata)[:2] == ["text", "texts"]
    assert file.metadata["text"] == "Grüße\n\0"
    assert file.metadata["texts"] == ["", "a", "日本"]
    for kind, values in NUMBERS.items():
        for i, value in enumerate(values):
            found = file.metadata[f"{kind}.{i}"]
            assert found == value
            assert type(found) is type(value)
        for name, expected in ((f"array.{kind}", values), (f"empty.{kind}", [])):
            found = file.metadata[name]
            assert found.dtype == DTYPES[kind]
            assert found.tolist() == expected


def test_nested_arrays(tmp_path):
    inner = [b"".join(w.array(w.U16, [w.number(w.U16, i, i + 1)], 2)) for i in (1, 5)]
    texts = b"".join(w.strings(["x", "yz"]))
    entries = [
        w.entry("numbers", w.ARRAY, w.array(w.ARRAY, inner)),
        w.entry("mixed", w.ARRAY, w.array(w.ARRAY, [texts, inner[0]])),
        w.entry("after", w.STRING, w.text("still in step")),
    ]
    file = GGUFFile.open(w.write(entries).save(tmp_path / "m.gguf"))
    assert [item.tolist() for item in file.metadata["numbers"]] == [[1, 2], [5, 6]]
    assert file.metadata["mixed"][0] == ["x", "yz"]
    assert file.metadata["mixed"][1].tolist() == [1, 2]
    assert file.metadata["after"] == "still in step"


@settings(derandomize=True, deadline=None, max_examples=60, database=None)
@given(
    st.dictionaries(
        # With a prefix, so that no key is one that the reader itself gives a meaning.
        st.text(st.characters(categories=("L", "N", "P")), max_size=20).map("x.{}".format),
        st.one_of(
            st.text(max_size=30),
            st.lists(st.text(max_size=5), max_size=8),
            st.integers(-(2**63), 2**63 - 1),
            st.floats(allow_nan=False),
            st.booleans(),
        ),
        max_size=8,
    )
)
def test_any_metadata_comes_back(tmp_path_factory, values):
    writers = {
        bool: lambda v: (w.BOOL, [w.number(w.BOOL, v)]),
        int: lambda v: (w.I64, [w.number(w.I64, v)]),
        float: lambda v: (w.F64, [w.number(w.F64, v)]),
        str: lambda v: (w.STRING, w.text(v)),
        list: lambda v: (w.ARRAY, w.strings(v)),
    }
    entries = [w.entry(key, *writers[type(value)](value)) for key, value in values.items()]
    path = w.write(entries).save(tmp_path_factory.getbasetemp() / "any.gguf")
    with GGUFFile.open(path) as file:
        assert dict(file.metadata) == values


@pytest.mark.parametrize("alignment", [8, 32, 4096])
def test_tensors_lie_where_the_table_says(tmp_path, alignment):
    first, second = np.arange(24, dtype=np.float32), np.arange(36, dtype=np.uint8)
    start = -(-first.nbytes // alignment) * alignment
    entries = [w.entry("general.alignment", w.U32, [w.number(w.U32, alignment)])]
    table = [
        w.tensor("second", (64,), GGMLType.Q4_0, start),
        w.tensor("first", (4, 3, 2), GGMLType.F32, 0),
    ]
    data = first.tobytes().ljust(start, b"\xff") + second.tobytes()
    written = w.write(entries, table, data, alignment=alignment)
    with GGUFFile.open(written.save(tmp_path / "m.gguf")) as file:
        assert list(file.tensors) == ["second", "first"]
        info = file.tensors["first"]
        assert (info.name, info.shape, info.type) == ("first", (2, 3, 4), GGMLType.F32)
        assert info.offset == len(written.data) - len(data)
        assert info.nbytes == 96
        assert (file.data("first").view(np.float32) == first).all()
        assert (file.data("second") == second).all()
        assert not file.data("second").flags.writeable


def test_a_tensor_without_dimensions_is_one_value(tmp_path):
    written = w.write([], [w.tensor("x", (), GGMLType.F32, 0)], w.number(w.F32, 2.5))
    file = GGUFFile.open(written.save(tmp_path / "m.gguf"))
    assert file.tensors["x"].shape == ()
    assert file.data("x").view(np.float32).tolist() == [2.5]


def test_a_file_of_the_gguf_package(tmp_path):
    path = tmp_path / "m.gguf"
    values = np.random.default_rng(0).standard_normal((6, 64), dtype=np.float32)
    quantized = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q4_1)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("llama.block_count", 30)
    writer.add_array("tokenizer.ggml.tokens", ["a", "b"])
    writer.add_tensor("plain", values)
    writer.add_tensor("packed", quantized, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with GGUFFile.open(path) as file:
        assert file.metadata.text("general.architecture") == "llama"
        assert file.metadata.integer("llama.block_count", 1, 100) == 30
        assert file.metadata["tokenizer.ggml.tokens"] == ["a", "b"]
        assert file.tensors["packed"].shape == (6, 64)
        assert file.tensors["packed"].type == GGMLType.Q4_1
        assert file.data("packed").tobytes() == quantized.tobytes()
        assert file.data("plain").tobytes() == values.tobytes()


def test_block_sizes_match_the_gguf_package():
    sizes = {int(type): size for type, size in gguf.GGML_QUANT_SIZES.items()}
    # The package still has Q8_1 with two float32; ggml's structure has had two float16 since 2023.
    sizes[GGMLType.Q8_1] = (32, 36)
    assert {int(t): (t.block_size, t.block_bytes) for t in GGMLType} == sizes
    assert all(t.name == gguf.GGMLQuantizationType(t).name for t in GGMLType)


@pytest.mark.parametrize("type", sorted(set(GGMLType) - READABLE_TYPES), ids=lambda t: t.name)
def test_other_known_types_are_listed_but_not_read(tmp_path, type):
    table = [w.tensor("x", (type.block_size,), type, 0)]
    path = w.write([], table, bytes(type.block_bytes)).save(tmp_path / "m.gguf")
    with GGUFFile.open(path) as file:
        assert file.tensors["x"].type is type
        with pytest.raises(CheckpointError, match=rf"m\.gguf: x: type {type.name} ") as caught:
            file.data("x")
    assert caught.value.tensor == "x"


@pytest.fixture(scope="module")
def typed(tmp_path_factory):
    entries = [
        w.entry("int", w.U16, [w.number(w.U16, 7)]),
        w.entry("float", w.F32, [w.number(w.F32, 0.5)]),
        w.entry("infinite", w.F64, [w.number(w.F64, float("inf"))]),
        w.entry("nan", w.F32, [w.number(w.F32, float("nan"))]),
        w.entry("bool", w.BOOL, [w.number(w.BOOL, True)]),
        w.entry("zero", w.I32, [w.number(w.I32, 0)]),
        w.entry("str", w.STRING, w.text("hi")),
        w.entry("strings", w.ARRAY, w.strings(["a"])),
        w.entry("numbers", w.ARRAY, w.array(w.I32, [w.number(w.I32, -1, 2)], 2)),
    ]
    return GGUFFile.open(w.write(entries).save(tmp_path_factory.mktemp("typed") / "m.gguf"))


def test_getters(typed):
    assert typed.metadata.integer("int", 0, 7) == 7
    assert typed.metadata.integer("zero", 0, 7, default=5) == 0
    assert typed.metadata.integer("absent", 0, 7, default=5) == 5
    assert typed.metadata.number("float", 0, 1) == 0.5
    assert typed.metadata.number("int", 0, 7) == 7
    assert typed.metadata.number("absent", 0, 1, default=0.0) == 0.0
    assert typed.metadata.text("str") == "hi"
    assert typed.metadata.text("absent", default="") == ""


@pytest.mark.parametrize(
    ("key", "get", "reason"),
    [
        ("absent", lambda f, k: f.metadata.integer(k, 0, 1), "is missing"),
        ("int", lambda f, k: f.metadata.integer(k, 8, 9), "must be from 8 to 9, but is 7"),
        ("absent", lambda f, k: f.metadata.integer(k, 8, 9, default=7), "must be from 8 to 9"),
        ("float", lambda f, k: f.metadata.integer(k, 0, 9), "must be an integer, but is float"),
        ("bool", lambda f, k: f.metadata.integer(k, 0, 9), "must be an integer, but is bool"),
        (
            "strings",
            lambda f, k: f.metadata.integer(k, 0, 9),
            "must be an integer, but is an array",
        ),
        ("float", lambda f, k: f.metadata.number(k, 1, 9), "from 1 to 9, but is 0.5"),
        ("infinite", lambda f, k: f.metadata.number(k, 0, float("inf")), "must be finite"),
        ("nan", lambda f, k: f.metadata.number(k, 0, 9), "must be finite"),
        ("strings", lambda f, k: f.metadata.text(k), "must be a string, but is an array"),
        ("str", lambda f, k: f.metadata.number(k, 0, 9), "must be a number, but is str"),
    ],
)
def test_getters_name_file_key_and_reason(typed, key, get, reason):
    with pytest.raises(CheckpointError, match=reason) as caught:
        get(typed, key)
    assert caught.value.tensor == key
    assert caught.value.file == typed.path


def test_metadata_and_tensor_table_cannot_be_changed(typed):
    with pytest.raises(TypeError):
        typed.metadata["int"] = 8
    with pytest.raises(TypeError):
        typed.tensors["x"] = None


def test_arrays_outlive_the_file(tmp_path):
    values = np.arange(1000, dtype=np.float32)
    table = [w.tensor("x", (1000,), GGMLType.F32, 0)]
    entries = [w.entry("a", w.ARRAY, w.array(w.U32, [w.number(w.U32, 9)]))]
    path = w.write(entries, table, values.tobytes()).save(tmp_path / "m.gguf")
    with GGUFFile.open(path) as file:
        data = file.data("x")
    file.close()
    path.unlink()
    assert (data.view(np.float32) == values).all()
    assert file.metadata["a"].tolist() == [9]
    with pytest.raises(CheckpointError, match="x: the file has been closed"):
        file.data("x")


def test_unknown_tensor(typed):
    with pytest.raises(CheckpointError, match="nope: the file has no such tensor"):
        typed.data("nope")


def test_importing_the_reader_is_light():
    program = (
        "import sys, billfish.checkpoint; assert 'numpy' not in sys.modules\n"
        "import billfish.checkpoint.gguf; assert 'torch' not in sys.modules"
    )
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", program], check=True, cwd=root)


def oracle_metadata(reader):
    # "GGUF.*" are fields the package invents for the counts and the version.
    return {k: f.contents() for k, f in reader.fields.items() if not k.startswith("GGUF.")}


def plain(metadata):
    return {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in metadata.items()}


def test_smollm2_equals_the_gguf_package(model_path):
    file, oracle = GGUFFile.open(model_path), gguf.GGUFReader(model_path)
    assert plain(file.metadata) == oracle_metadata(oracle)
    assert list(file.tensors) == [t.name for t in oracle.tensors]
    assert len(file.tensors) == 272
    for tensor in oracle.tensors:
        info = file.tensors[tensor.name]
        assert info.shape == tuple(reversed(tensor.shape.tolist()))
        assert (int(info.type), info.offset) == (int(tensor.tensor_type), tensor.data_offset)
        assert info.nbytes == tensor.n_bytes
    for tensor in oracle.tensors[::9]:
        assert file.data(tensor.name).tobytes() == tensor.data.tobytes()


COMPARED = {"aquila", "bert-bge", "phi-3"}  # aquila: version 2


def test_real_vocabularies():
    """All open and agree with themselves; a few, as it is slow, are held against the package."""
    for name in COMPARED:
        vocabulary_path(f"ggml-vocab-{name}.gguf")
    for path in VOCABULARIES.glob("*.gguf"):
        with GGUFFile.open(path) as file:
            tokens = file.metadata["tokenizer.ggml.tokens"]
            assert len(tokens) > 30_000
            assert len(file.metadata["tokenizer.ggml.token_type"]) == len(tokens)
            assert not file.tensors
        if path.stem.removeprefix("ggml-vocab-") in COMPARED:
            assert plain(file.metadata) == oracle_metadata(gguf.GGUFReader(path))
