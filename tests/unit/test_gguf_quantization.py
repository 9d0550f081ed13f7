"""GGUF block formats against the gguf package, bit for bit, and against blocks built by hand."""

import warnings

import gguf
import numpy as np
import pytest
import torch

from billfish.checkpoint.gguf import READABLE_TYPES, GGMLType, GGUFFile
from billfish.errors import KernelArgumentError
from billfish.quantization.gguf import INT4_TYPES, SUPPORTED_TYPES, dequantize, int4_groups

T = GGMLType
BLOCK_TYPES = [T.Q4_0, T.Q4_1, T.Q8_0, T.Q4_K, T.Q6_K]
HALVES = {T.Q4_0: [0], T.Q4_1: [0, 2], T.Q8_0: [0], T.Q4_K: [0, 2], T.Q6_K: [208]}
"""Where the float16 of a block stand."""

by_name = pytest.mark.parametrize("type", BLOCK_TYPES, ids=lambda t: t.name)
int4_by_name = pytest.mark.parametrize("type", sorted(INT4_TYPES), ids=lambda t: t.name)


def random_bytes(type, shape, seed=0):
    """Any bytes, with any finite float16 (subnormal ones too) where scales stand."""
    rng = np.random.default_rng(seed)
    count = int(np.prod(shape)) // type.block_size
    blocks = rng.integers(0, 256, (count, type.block_bytes), dtype=np.uint8)
    for start in HALVES[type]:
        bits = rng.integers(0, 0x7C00, count, dtype=np.uint16)
        bits |= rng.integers(0, 2, count, dtype=np.uint16) << 15
        blocks[:, start : start + 2] = bits[:, None].view(np.uint8)
    return blocks.reshape(-1)


def oracle(raw, type, shape):
    rows = raw.reshape(*shape[:-1], -1)
    return gguf.quants.dequantize(rows, gguf.GGMLQuantizationType(type))


def bits(values):
    return np.ascontiguousarray(values).view(np.uint32)


def test_the_types_are_those_that_the_reader_reads():
    assert SUPPORTED_TYPES == READABLE_TYPES
    assert {T.F32, T.F16, T.BF16, *BLOCK_TYPES} == SUPPORTED_TYPES


@by_name
@pytest.mark.parametrize("shape", [(256,), (3, 512), (64, 1024), (2, 3, 256)])
def test_dequantize_equals_the_gguf_package(type, shape):
    raw = random_bytes(type, shape)
    values = dequantize(raw, type, shape)
    assert values.dtype == torch.float32
    assert values.shape == shape
    assert (bits(values.numpy()) == bits(oracle(raw, type, shape))).all()


def test_every_float16():
    raw = np.arange(2**16, dtype=np.uint16)
    values = dequantize(raw.view(np.uint8), T.F16, (256, 256)).numpy().reshape(-1)
    expected = raw.view(np.float16).astype(np.float32)
    numbers = ~np.isnan(expected)
    assert (bits(values)[numbers] == bits(expected)[numbers]).all()
    assert np.isnan(values[~numbers]).all()


def test_every_bfloat16():
    raw = np.arange(2**16, dtype=np.uint16)
    values = dequantize(raw.view(np.uint8), T.BF16, (2**16,)).numpy()
    assert (bits(values) == raw.astype(np.uint32) << 16).all()


def test_float32_is_taken_as_it_stands():
    raw = np.random.default_rng(1).integers(0, 256, 4 * 30, dtype=np.uint8)
    values = dequantize(raw, T.F32, (5, 6)).numpy()
    assert values.tobytes() == raw.tobytes()
    assert dequantize(raw[:4], T.F32, ()).shape == ()


@int4_by_name
def test_int4_groups_give_the_values_of_dequantize(type):
    shape = (48, 768)
    raw = random_bytes(type, shape, seed=2)
    groups = int4_groups(raw, type, shape)
    assert groups.group_size == 32
    assert groups.zeros is None
    assert (groups.offsets is None) == (type == T.Q4_0)
    assert groups.codes.shape == shape
    assert groups.codes.dtype == torch.uint8
    assert int(groups.codes.max()) == 15
    for tensor in (groups.scales, groups.offsets):
        if tensor is not None:
            assert tensor.shape == (48, 24)
            assert tensor.dtype == torch.float32
            assert tensor.is_contiguous()
    codes = groups.codes.float().view(48, 24, 32)
    if groups.offsets is None:
        values = groups.scales[:, :, None] * (codes - 8)
    else:
        values = groups.scales[:, :, None] * codes + groups.offsets[:, :, None]
    assert (bits(values.reshape(shape).numpy()) == bits(oracle(raw, type, shape))).all()


def half(*values):
    return np.array(values, dtype=np.float16).tobytes()


def nibbles(codes):
    """32 codes to 16 bytes: byte i holds code i below code i + 16."""
    return bytes(int(codes[i]) | int(codes[i + 16]) << 4 for i in range(16))


def test_a_q4_0_row_built_by_hand():
    codes = np.random.default_rng(3).integers(0, 16, 64)
    raw = half(0.5) + nibbles(codes[:32]) + half(-2) + nibbles(codes[32:])
    groups = int4_groups(np.frombuffer(raw, np.uint8), T.Q4_0, (1, 64))
    assert groups.codes.tolist() == [codes.tolist()]
    assert groups.scales.tolist() == [[0.5, -2.0]]


def test_a_q4_1_row_built_by_hand():
    codes = np.random.default_rng(4).integers(0, 16, 64)
    raw = half(0.5, -3) + nibbles(codes[:32]) + half(0.25, 7) + nibbles(codes[32:])
    groups = int4_groups(np.frombuffer(raw, np.uint8), T.Q4_1, (1, 64))
    assert groups.codes.tolist() == [codes.tolist()]
    assert groups.scales.tolist() == [[0.5, 0.25]]
    assert groups.offsets.tolist() == [[-3.0, 7.0]]


def test_a_q4_k_row_built_by_hand():
    rng = np.random.default_rng(5)
    codes = rng.integers(0, 16, 256)
    scales, minima = ([int(v) for v in rng.integers(0, 64, 8)] for _ in range(2))
    packed = [scales[i] | scales[i + 4] >> 4 << 6 for i in range(4)]
    packed += [minima[i] | minima[i + 4] >> 4 << 6 for i in range(4)]
    packed += [scales[i + 4] & 15 | (minima[i + 4] & 15) << 4 for i in range(4)]
    raw = half(0.37, 1.7) + bytes(packed)
    for start in range(0, 256, 64):
        low, high = codes[start : start + 32], codes[start + 32 : start + 64]
        raw += bytes(int(a) | int(b) << 4 for a, b in zip(low, high, strict=True))
    groups = int4_groups(np.frombuffer(raw, np.uint8), T.Q4_K, (1, 256))
    assert groups.codes.tolist() == [codes.tolist()]
    # Python's floats are double: equality says that float32 holds the products exactly.
    assert groups.scales.tolist() == [[float(np.float16(0.37)) * v for v in scales]]
    assert groups.offsets.tolist() == [[-float(np.float16(1.7)) * v for v in minima]]


def test_q4_k_scales_are_exact_for_every_float16():
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16)
    blocks = np.zeros((len(halves), 144), np.uint8)
    blocks[:, 0:2] = blocks[:, 2:4] = halves[:, None].view(np.uint8)
    blocks[:, 4] = blocks[:, 8] = 63
    groups = int4_groups(blocks, T.Q4_K, (len(halves), 256))
    exact = halves.astype(np.float64) * 63
    assert (groups.scales[:, 0].double().numpy() == exact).all()
    assert (groups.offsets[:, 0].double().numpy() == -exact).all()


@pytest.mark.parametrize(
    ("type", "bound"), [(T.Q4_0, 0.3), (T.Q4_1, 0.25), (T.Q8_0, 0.02)], ids=lambda v: str(v)
)
def test_quantized_weights_come_back_close(type, bound):
    values = np.random.default_rng(6).standard_normal((16, 256), dtype=np.float32)
    raw = gguf.quants.quantize(values, gguf.GGMLQuantizationType(type))
    error = np.abs(dequantize(raw, type, (16, 256)).numpy() - values).max()
    assert 0 < error < bound


@by_name
def test_the_bytes_may_be_read_only_and_anywhere(type):
    """Memory maps are read-only, and put a tensor at any address; no warning, no change."""
    shape = (2, 256)
    raw = random_bytes(type, shape)
    shifted = np.empty(len(raw) + 1, np.uint8)[1:]
    shifted[:] = raw
    shifted.flags.writeable = False
    strided = torch.from_numpy(np.repeat(raw, 2))[::2]
    expected = dequantize(raw, type, shape)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(dequantize(shifted, type, shape), expected)
        if type in INT4_TYPES:
            int4_groups(shifted, type, shape).codes.zero_()
    assert torch.equal(dequantize(strided, type, shape), expected)
    assert torch.equal(dequantize(torch.from_numpy(raw), type, shape), expected)
    dequantize(torch.from_numpy(raw), type, shape).zero_()
    assert (raw == shifted).all()


@pytest.mark.parametrize("raw", [np.zeros(16, np.uint8), torch.zeros(16, dtype=torch.uint8)])
def test_a_result_does_not_share_the_bytes_given(raw):
    dequantize(raw, T.F32, (4,)).fill_(1)
    assert not raw.any()


@int4_by_name
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_scales_that_are_not_finite_are_refused(type, value):
    for start in HALVES[type]:
        raw = random_bytes(type, (2, 256))
        raw[-type.block_bytes + start :][:2] = np.array([value], np.float16).view(np.uint8)
        if type == T.Q4_K:
            raw[-type.block_bytes + 4 :][:12] = 0xFF
        with pytest.raises(KernelArgumentError, match="are not all finite"):
            int4_groups(raw, type, (2, 256))


def test_values_that_are_not_finite_stay_so():
    raw = np.frombuffer(half(np.inf) + bytes([1] * 32), np.uint8)
    assert torch.isinf(dequantize(raw, T.Q8_0, (32,))).all()


@pytest.mark.parametrize("function", [int4_groups, dequantize])
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"type": T.Q5_K}, "type must be one of .*Q4_0, Q4_1.*Q4_K.*, got .*Q5_K"),
        ({"raw": np.zeros(39, np.uint8)}, r"Q4_1 of shape \[2, 32\] takes 40 bytes, got 39"),
        ({"raw": np.zeros(41, np.uint8)}, "takes 40 bytes, got 41"),
        ({"raw": np.zeros(40, np.int8)}, "raw must be uint8, got int8"),
        ({"raw": torch.zeros(10, dtype=torch.float32)}, "raw must be uint8, got torch.float32"),
        ({"shape": (4, 16)}, "rows of a multiple of 32 for Q4_1"),
        ({"shape": (0, 32), "raw": np.zeros(0, np.uint8)}, "must be positive"),
        ({"shape": (-2, -32)}, "must be positive"),
        ({"shape": (2, 2**62)}, "takes .* bytes, got 40"),
    ],
)
def test_wrong_arguments(function, change, reason):
    arguments = {"raw": np.zeros(40, np.uint8), "type": T.Q4_1, "shape": (2, 32)} | change
    with pytest.raises(KernelArgumentError, match=reason):
        function(**arguments)


@pytest.mark.parametrize("type", [T.F32, T.F16, T.BF16, T.Q8_0, T.Q6_K], ids=lambda t: t.name)
def test_other_types_are_no_int4(type):
    with pytest.raises(KernelArgumentError, match="type must be one of Q4_0, Q4_1, Q4_K"):
        int4_groups(np.zeros(type.block_bytes, np.uint8), type, (1, type.block_size))


@pytest.mark.parametrize("shape", [(64,), (1, 2, 32), ()])
def test_only_matrices_are_int4(shape):
    with pytest.raises(KernelArgumentError, match="must be a matrix"):
        int4_groups(np.zeros(40, np.uint8), T.Q4_1, shape)


def test_smollm2_equals_the_gguf_package(model_path):
    names = ["blk.0.attn_q.weight", "blk.29.ffn_down.weight", "blk.7.attn_norm.weight"]
    with GGUFFile.open(model_path) as file:
        assert [file.tensors[name].type for name in names] == [T.Q4_1, T.Q4_1, T.F32]
        for name in [*names, "token_embd.weight"]:
            info, raw = file.tensors[name], file.data(name)
            values = dequantize(raw, info.type, info.shape)
            assert torch.isfinite(values).all()
            if info.type == T.F32:
                assert values.numpy().tobytes() == raw.tobytes()
            else:
                assert (bits(values.numpy()) == bits(oracle(raw, info.type, info.shape))).all()
