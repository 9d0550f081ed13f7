"""The GGUF reader on damaged and malicious files: CheckpointError at once, in little memory.

A pipe, a directory, a text file; files cut anywhere; counts, lengths and offsets that lie; bytes
changed at random.
"""

import os
import random
import re
import time
import tracemalloc

import pytest

from billfish.checkpoint.gguf import GGMLType, GGUFFile
from billfish.errors import CheckpointError
from tests.unit import gguf_writer as w

SECONDS, BYTES = 10.0, 100 << 20  # what believes a count that lies takes minutes, or gigabytes
HUGE = [2**40, 2**63, 2**64 - 1]


def refuses(path, reason, what=None):
    """Opening names the file, the key or tensor, and the reason, in little time of the processor
    and 100 MB of Python and numpy allocations."""
    start = time.thread_time()
    with pytest.raises(CheckpointError, match=reason) as caught:
        GGUFFile.open(path)
    seconds = time.thread_time() - start
    assert caught.value.file == str(path)
    assert caught.value.tensor == what
    assert str(caught.value).startswith(f"{path}: {what}: " if what else f"{path}: ")
    assert seconds < SECONDS

    tracemalloc.start()
    with pytest.raises(CheckpointError):
        GGUFFile.open(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < BYTES


def rewrite(path, data):
    path.unlink(missing_ok=True)  # many times faster than to truncate on some file systems
    path.write_bytes(data)


def good_entries():
    nested = b"".join(w.array(w.U16, [w.number(w.U16, 1, 2)], 2))
    return [
        w.entry("general.architecture", w.STRING, w.text("llama")),
        w.entry("general.alignment", w.U32, [w.number(w.U32, 32)]),
        w.entry("eps", w.F64, [w.number(w.F64, 1e-5)]),
        w.entry("flag", w.BOOL, [w.number(w.BOOL, 1)]),
        w.entry("tokens", w.ARRAY, w.strings(["a", "bc", "é"])),
        w.entry("scores", w.ARRAY, w.array(w.F32, [w.number(w.F32, i) for i in range(5)])),
        w.entry("nested", w.ARRAY, w.array(w.ARRAY, [nested, nested])),
    ]


def good_tensors():
    return [
        w.tensor("norm", (8,), GGMLType.F32, 0),
        w.tensor("w", (32, 3), GGMLType.Q4_1, 32),
        w.tensor("x", (256,), GGMLType.Q4_K, 96),
    ]


GOOD = w.write(good_entries(), good_tensors(), bytes(range(240)))


def test_the_good_file_opens(tmp_path):
    with GGUFFile.open(GOOD.save(tmp_path / "good.gguf")) as file:
        assert file.data("x").tobytes() == bytes(range(96, 240))
        assert len(file.metadata) == 7


# What is no GGUF file at all


def test_missing_file(tmp_path):
    refuses(tmp_path / "none.gguf", "cannot be read: No such file")


def test_directory(tmp_path):
    refuses(tmp_path, "is not a regular file")


def test_named_pipe_does_not_block(tmp_path):
    os.mkfifo(tmp_path / "pipe.gguf")
    refuses(tmp_path / "pipe.gguf", "is not a regular file")


def test_device():
    refuses("/dev/zero", "is not a regular file")


def test_path_with_a_null_character():
    refuses("a\0b", "cannot be read: embedded null")


def test_empty_file(tmp_path):
    path = tmp_path / "empty.gguf"
    path.touch()
    refuses(path, "the file is empty")


@pytest.mark.parametrize("content", [b"Hello, world. " * 9, b"GG", b"\0" * 64, b"PK\3\4" * 8])
def test_other_files(tmp_path, content):
    path = tmp_path / "notes.txt"
    path.write_bytes(content)
    refuses(path, re.escape(f"not a GGUF file: it begins with {content[:4]!r}"))


@pytest.mark.parametrize("version", [0x0300_0000, 0x0200_0000])
def test_big_endian(tmp_path, version):
    refuses(w.write(version=version).save(tmp_path / "m"), "big-endian", "version")


@pytest.mark.parametrize("version", [1, 4, 2**32 - 1])
def test_other_versions(tmp_path, version):
    path = w.write(version=version).save(tmp_path / "m")
    refuses(path, f"version {version} is not supported", "version")


# Cut short


def test_truncated_anywhere(tmp_path):
    path = tmp_path / "cut.gguf"
    assert len(GOOD.boundaries) > 60
    for size in range(len(GOOD.data)):
        rewrite(path, GOOD.data[:size])
        with pytest.raises(CheckpointError) as caught:
            GGUFFile.open(path)
        assert caught.value.file == str(path), size


@pytest.mark.parametrize("field", range(1, 4))
def test_truncated_preamble_is_named(tmp_path, field):
    path = tmp_path / "cut.gguf"
    path.write_bytes(GOOD.data[: GOOD.boundaries[field] - 1])
    what = "version" if field == 1 else "tensor and metadata counts"
    refuses(path, "needs .* bytes at offset", what)


# Counts and lengths that lie


@pytest.mark.parametrize("count", [8, 10**6, *HUGE])
def test_key_count(tmp_path, count):
    path = w.write(good_entries(), num_entries=count).save(tmp_path / "m")
    # One key too many is noticed where it would begin, nonsense before the first is read.
    refuses(path, "needs", "metadata entry 7" if count == 8 else f"metadata count {count}")


@pytest.mark.parametrize("count", [4, 10**6, *HUGE])
def test_tensor_count(tmp_path, count):
    tensors, data = good_tensors(), bytes(240)
    path = w.write(good_entries(), tensors, data, num_tensors=count).save(tmp_path / "m")
    # The fourth name would be padding.
    what = "tensor 3" if count == 4 else f"tensor count {count}"
    refuses(path, "a name must be printable" if count == 4 else "needs", what)


@pytest.mark.parametrize("length", [6, 10**6, *HUGE])
def test_string_length(tmp_path, length):
    path = w.write([w.entry("k", w.STRING, w.text("hello", length))]).save(tmp_path / "m")
    refuses(path, f"needs {length} bytes at offset .*, but 5 are left of the file", "k")


@pytest.mark.parametrize("length", [2**16, *HUGE])
def test_name_length(tmp_path, length):
    key = [*w.text("k", length), w.number(w.U32, w.U8), w.number(w.U8, 1)]
    refuses(w.write([key]).save(tmp_path / "m"), f"name of {length} bytes", "metadata entry 0")
    name = [*w.text("t", length), *w.tensor("t", (8,), GGMLType.F32, 0)[2:]]
    refuses(w.write([], [name], bytes(32)).save(tmp_path / "m"), f"name of {length}", "tensor 0")


@pytest.mark.parametrize("count", [5, 10**6, *HUGE])
@pytest.mark.parametrize("element", [*w.FORMATS, w.STRING, w.ARRAY])
def test_array_length(tmp_path, element, count):
    one = {w.STRING: b"".join(w.text("")), w.ARRAY: b"".join(w.array(w.U8, []))}
    item = one.get(element) or w.number(element, 0)
    payload = w.array(element, [item] * 4, count)
    refuses(w.write([w.entry("k", w.ARRAY, payload)]).save(tmp_path / "m"), "needs", "k")


@pytest.mark.parametrize("count", [5, 2**31, 2**32 - 1])
def test_number_of_dimensions(tmp_path, count):
    table = [w.tensor("t", (8, 1, 1, 1, 1), GGMLType.F32, 0, num_dims=count)]
    path = w.write([], table, bytes(32)).save(tmp_path / "m")
    refuses(path, f"{count} dimensions are more than 4", "t")


@pytest.mark.parametrize(
    "dims", [(2**40,), (2**64 - 1,), (2**32, 2**32), (2**63, 2), (2**64 - 1,) * 4, (9,), (4, 3)]
)
def test_dimensions_that_do_not_fit(tmp_path, dims):
    """Products that wrap to something small in 64 bits included."""
    path = w.write([], [w.tensor("t", dims, GGMLType.F32, 0)], bytes(32)).save(tmp_path / "m")
    refuses(path, "bytes at offset .* pass the end of the file", "t")


@pytest.mark.parametrize("dims", [(0,), (8, 0), (0, 2**64 - 1)])
def test_a_dimension_of_zero(tmp_path, dims):
    path = w.write([], [w.tensor("t", dims, GGMLType.F32, 0)], bytes(32)).save(tmp_path / "m")
    refuses(path, "a dimension is 0", "t")


@pytest.mark.parametrize(
    ("type", "dims"),
    [(GGMLType.Q4_0, (31,)), (GGMLType.Q4_1, (16, 2)), (GGMLType.Q6_K, (128, 2)),
     (GGMLType.Q8_0, ())],
)  # fmt: skip
def test_rows_of_partial_blocks(tmp_path, type, dims):
    path = w.write([], [w.tensor("t", dims, type, 0)], bytes(512)).save(tmp_path / "m")
    refuses(path, f"no multiple of the {type.block_size} that a block of {type.name}", "t")


# Where tensors lie


@pytest.mark.parametrize("offset", [32, 2**40, 2**63, 2**64 - 32])
def test_offset_past_the_end(tmp_path, offset):
    path = w.write([], [w.tensor("t", (8,), GGMLType.F32, offset)], bytes(32)).save(tmp_path / "m")
    refuses(path, f"32 bytes at offset {offset + 64} pass the end of the file at 96", "t")


@pytest.mark.parametrize("offset", [1, 31, 33, 2**64 - 1])
def test_misaligned_offset(tmp_path, offset):
    path = w.write([], [w.tensor("t", (8,), GGMLType.F32, offset)], bytes(96)).save(tmp_path / "m")
    refuses(path, f"offset {offset} is no multiple of 32", "t")


@pytest.mark.parametrize("alignment", [0, 3, 24, 2**31 + 1, 2**32 - 1])
def test_alignment(tmp_path, alignment):
    entries = [w.entry("general.alignment", w.U32, [w.number(w.U32, alignment)])]
    path = w.write(entries, good_tensors(), bytes(240)).save(tmp_path / "m")
    refuses(path, "must be", "general.alignment")


def test_alignment_of_the_wrong_type(tmp_path):
    entries = [w.entry("general.alignment", w.STRING, w.text("32"))]
    refuses(w.write(entries).save(tmp_path / "m"), "must be an integer", "general.alignment")


def test_an_alignment_beyond_the_file(tmp_path):
    entries = [w.entry("general.alignment", w.U32, [w.number(w.U32, 2**31)])]
    path = w.write(entries, [w.tensor("t", (8,), GGMLType.F32, 0)], bytes(64)).save(tmp_path / "m")
    refuses(path, "pass the end of the file", "t")


def test_overlapping_tensors(tmp_path):
    table = [w.tensor("b", (8,), GGMLType.F32, 32), w.tensor("a", (9,), GGMLType.F32, 0)]
    refuses(w.write([], table, bytes(96)).save(tmp_path / "m"), "overlaps tensor a", "b")


def test_tensors_in_one_place(tmp_path):
    table = [w.tensor("a", (8,), GGMLType.F32, 0), w.tensor("b", (8,), GGMLType.F32, 0)]
    refuses(w.write([], table, bytes(96)).save(tmp_path / "m"), "overlaps tensor a", "b")


# Names and types


def test_duplicate_key(tmp_path):
    entries = [w.entry("k", w.U8, [b"\1"]), w.entry("k", w.U16, [b"\1\0"])]
    refuses(w.write(entries).save(tmp_path / "m"), "the key occurs twice", "k")


def test_duplicate_tensor(tmp_path):
    table = [w.tensor("t", (8,), GGMLType.F32, 0), w.tensor("t", (8,), GGMLType.F32, 32)]
    refuses(w.write([], table, bytes(96)).save(tmp_path / "m"), "the tensor occurs twice", "t")


@pytest.mark.parametrize("data", [b"\xff", b"ab\xc3", b"\xed\xa0\x80", b"\xc0\xaf"])
def test_text_that_is_not_utf8(tmp_path, data):
    path = tmp_path / "m"
    refuses(w.write([w.entry(data, w.U8, [b"\1"])]).save(path), "not UTF-8", "metadata entry 0")
    table = [w.tensor(data, (8,), GGMLType.F32, 0)]
    refuses(w.write([], table, bytes(32)).save(path), "not UTF-8", "tensor 0")
    refuses(w.write([w.entry("k", w.STRING, w.text(data))]).save(path), "not UTF-8", "k")
    tokens = w.array(w.STRING, [b"".join(w.text(item)) for item in (b"fine", data)])
    refuses(w.write([w.entry("k", w.ARRAY, tokens)]).save(path), "not UTF-8", "k")


@pytest.mark.parametrize("name", ["", "a\nb", "\x1b[31mred", "nul\0"])
def test_names_that_would_garble_a_log(tmp_path, name):
    path = w.write([w.entry(name, w.U8, [b"\1"])]).save(tmp_path / "m")
    refuses(path, "a name must be printable", "metadata entry 0")


@pytest.mark.parametrize("type", [13, 255, 2**32 - 1])
def test_unknown_value_type(tmp_path, type):
    path = tmp_path / "m"
    refuses(w.write([w.entry("k", type, [bytes(8)])]).save(path), f"value type {type}", "k")
    entry = w.entry("k", w.ARRAY, w.array(type, [bytes(8)]))
    refuses(w.write([entry]).save(path), f"unknown element type {type} of an array", "k")


@pytest.mark.parametrize("type", [4, 5, 31, 36, 1000, 2**32 - 1])
def test_unknown_tensor_type(tmp_path, type):
    path = w.write([], [w.tensor("t", (256,), type, 0)], bytes(1024)).save(tmp_path / "m")
    refuses(path, f"unknown tensor type {type}", "t")


def test_bools_that_are_neither(tmp_path):
    path = tmp_path / "m"
    refuses(w.write([w.entry("k", w.BOOL, [b"\2"])]).save(path), "0 or 1, but is 2", "k")
    entry = w.entry("k", w.ARRAY, w.array(w.BOOL, [b"\0", b"\1", b"\xff"]))
    refuses(w.write([entry]).save(path), "0 or 1", "k")


# Bombs: small files or sparse ones that ask for much work


@pytest.mark.parametrize("depth", [5, 1000, 100_000])
def test_deeply_nested_arrays(tmp_path, depth):
    header = b"".join(w.array(w.ARRAY, [b""]))
    payload = [header * (depth - 1), *w.array(w.U8, [b"\1"])]
    refuses(w.write([w.entry("k", w.ARRAY, payload)]).save(tmp_path / "m"), "more than 4 deep", "k")


def test_four_levels_are_not_too_deep(tmp_path):
    payload = [b"".join(w.array(w.ARRAY, [b""])) * 3, *w.array(w.U8, [b"\1"])]
    file = GGUFFile.open(w.write([w.entry("k", w.ARRAY, payload)]).save(tmp_path / "m"))
    assert file.metadata["k"][0][0][0].tolist() == [1]


def sparse(path, written, size):
    """`written` followed by zeros up to `size`, which take no room on the disk."""
    written.save(path)
    os.truncate(path, size)
    return path


@pytest.mark.parametrize(
    ("element", "count", "reason"),
    [
        (w.STRING, 10_000_000, "more than 2097152 strings"),
        (w.ARRAY, 10_000_000, "more than 65536 keys, tensors and nested arrays"),
        (w.U8, 2**30, "of the 268435456 bytes that a header may take"),
        (w.F64, 2**26, "of the 268435456 bytes that a header may take"),
    ],
)
def test_arrays_that_a_large_file_does_hold(tmp_path, element, count, reason):
    entry = w.entry("k", w.ARRAY, w.array(element, [], count))
    refuses(sparse(tmp_path / "m", w.write([entry]), 1 << 32), reason, "k")


def test_wide_nesting_is_counted_over_all_levels(tmp_path):
    inner = b"".join(w.array(w.ARRAY, [bytes(12)] * 300))
    entry = w.entry("k", w.ARRAY, w.array(w.ARRAY, [inner] * 250))
    refuses(w.write([entry]).save(tmp_path / "m"), "more than 65536 keys", "k")


@pytest.mark.parametrize("what", ["num_entries", "num_tensors"])
def test_counts_that_a_large_file_does_hold(tmp_path, what):
    path = sparse(tmp_path / "m", w.write(**{what: 5_000_000}), 1 << 32)
    kind = "metadata" if what == "num_entries" else "tensor"
    refuses(path, "more than 65536 keys", f"{kind} count 5000000")


def test_a_string_that_a_large_file_does_hold(tmp_path):
    written = w.write([w.entry("k", w.STRING, w.text("", 1 << 31))])
    refuses(sparse(tmp_path / "m", written, 1 << 32), "that a header may take", "k")


def test_as_many_tensors_as_are_allowed(tmp_path):
    table = [w.tensor(f"t{i}", (8,), GGMLType.F32, 0) for i in range(20_000)]
    refuses(w.write([], table, bytes(64)).save(tmp_path / "m"), "overlaps tensor t0", "t1")


# Chance


def mutations(seed, count):
    rng = random.Random(seed)
    extreme = [b"\xff" * 8, b"\0" * 8, b"\0" * 5 + b"\1\0\0", b"\xff" * 7 + b"\x7f", b"\xff" * 4]
    for _ in range(count):
        data = bytearray(GOOD.data)
        kind = rng.randrange(4)
        for _ in range(rng.choice([1, 1, 1, 2, 8])):
            at = rng.randrange(len(data))
            if kind == 0:
                data[at] ^= 1 << rng.randrange(8)
            elif kind == 1:
                data[at] = rng.randrange(256)
            elif kind == 2:
                value = rng.choice(extreme)
                at = rng.choice(GOOD.boundaries[:-2])
                data[at : at + len(value)] = value
            else:
                del data[at : at + rng.choice([1, 4, 8, 64])]
                data = data or bytearray(b"\0")
        yield bytes(data)


@pytest.mark.parametrize("seed", range(4))
def test_random_damage(tmp_path, seed):
    """Opens and reads, or says what is wrong; never anything else, never much memory."""
    path = tmp_path / "m.gguf"
    outcomes = {True: 0, False: 0}
    tracemalloc.start()
    for data in mutations(seed, 1000):
        rewrite(path, data)
        try:
            with GGUFFile.open(path) as file:
                for name, info in file.tensors.items():
                    if info.type in (GGMLType.F32, GGMLType.Q4_1, GGMLType.Q4_K):
                        assert len(file.data(name).tobytes()) == info.nbytes
            outcomes[True] += 1
        except CheckpointError:
            outcomes[False] += 1
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 << 20
    assert min(outcomes.values()) > 100, outcomes
