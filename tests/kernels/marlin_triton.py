"""The portable Triton GEMM, run in Triton's interpreter against float64.

Run by test_marlin_triton.py in a process of its own: a process either interprets Triton kernels or
compiles them. By hand: TRITON_INTERPRET=1 pytest tests/kernels/marlin_triton.py

The interpreter cannot run inline assembly; `test_assembly_and_its_twin_agree` therefore executes
the assembly's few instructions in Python, so that both forms of the kernel rest on the same codes.
"""

import re

import numpy as np
import pytest
import torch

from billfish.kernels.marlin import dequant, gpu, reference, triton_gemm
from billfish.kernels.marlin.configs import Gpu, Product, TritonConfig, triton_config
from billfish.kernels.marlin.packing import pack_units

HALF_ULP = 2.0**-11  # of float16


def multiply(
    m, n, k, group_size, zero_point, config, bias=False, seed=0, x=None, residual=False,
    silu_mul=False,
):  # fmt: skip
    """(result, float64 result, its bound by element) of one product with random operands."""
    rng = torch.Generator().manual_seed(seed)
    groups = 1 if group_size == -1 else -(-k // group_size)
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8, generator=rng)
    scales = (torch.rand(n, groups, generator=rng) * 0.02 + 0.01).half()
    zeros = torch.randint(0, 16, (n, groups), dtype=torch.uint8, generator=rng)
    offsets = (torch.randn(n, groups, generator=rng) * 0.1).half()
    zeros = zeros if zero_point == "integer" else None
    offsets = offsets if zero_point == "offset" else None
    second = zeros if zeros is not None else offsets
    packed = [
        t if t is None or not silu_mul else gpu.interleave(t) for t in (codes, scales, second)
    ]
    units = pack_units(*packed, group_size, torch.float16)
    x = torch.randn(m, k, generator=rng).half() if x is None else x
    b = torch.randn(n, generator=rng).half() if bias else None
    outputs = n // 2 if silu_mul else n
    r = torch.randn(m, outputs, generator=rng).half() if residual else None
    product = Product(outputs, zero_point, b, r, silu_mul)
    y = triton_gemm.launch(x, units, product, config, interpret=True)
    weight = reference.dequantize(codes, scales, zeros, offsets, None, group_size, torch.float64)
    expected = reference.w4a16_matmul(x, weight, b, r, silu_mul)
    magnitude = x.double().abs() @ weight.abs().T
    if silu_mul:
        gate, up = reference.w4a16_matmul(x, weight, b).abs().chunk(2, dim=1)
        gate_off, up_off = magnitude.chunk(2, dim=1)
        # |silu(g)| <= |g| and |silu'| < 1.1.
        magnitude = 1.1 * gate_off * up + gate * up_off + HALF_ULP * 1.1 * gate_off * up_off
    if residual:
        magnitude += r.double().abs() * 2**-10
    return y, expected, HALF_ULP * (magnitude + expected.abs()) + 1e-6


@pytest.mark.parametrize(
    ("m", "n", "k", "group_size", "zero_point", "rows", "tile_m", "split"),
    [
        (3, 64, 128, 128, "symmetric", 64, 16, 1),
        (1, 200, 256, 128, "integer", 128, 16, 2),
        (18, 72, 192, 32, "integer", 64, 16, 2),
        (3, 130, 464, 16, "offset", 128, 16, 2),
        (5, 64, 384, -1, "integer", 64, 16, 3),
        (17, 8, 16, 16, "symmetric", 64, 16, 1),
        (3, 1, 1, 32, "integer", 64, 16, 1),
        (9, 1, 300, 32, "symmetric", 64, 16, 2),
        (33, 96, 200, 64, "symmetric", 64, 32, 1),
        (2, 64, 320, -1, "offset", 128, 16, 1),
    ],
)
@pytest.mark.parametrize("bias", [False, True])
def test_product(m, n, k, group_size, zero_point, rows, tile_m, split, bias):
    config = TritonConfig(rows=rows, tile_m=tile_m, split=split, stages=2)
    y, expected, bound = multiply(m, n, k, group_size, zero_point, config, bias)
    assert y.shape == expected.shape
    assert ((y.double() - expected).abs() <= bound).all()


@pytest.mark.parametrize(
    ("m", "n", "k", "zero_point", "rows", "split", "bias", "residual", "silu_mul"),
    [
        (3, 72, 128, "symmetric", 64, 1, False, True, False),
        (2, 80, 256, "integer", 64, 2, False, False, True),
        (5, 26, 128, "offset", 64, 1, True, False, True),
        (18, 200, 256, "symmetric", 128, 2, True, True, True),
    ],
)
def test_epilogues(m, n, k, zero_point, rows, split, bias, residual, silu_mul):
    config = TritonConfig(rows=rows, tile_m=16, split=split, stages=2)
    y, expected, bound = multiply(
        m, n, k, 32, zero_point, config, bias, residual=residual, silu_mul=silu_mul
    )
    assert y.shape == expected.shape == (m, n // 2 if silu_mul else n)
    assert ((y.double() - expected).abs() <= bound).all()


def test_batch_invariant_rows():
    """A row alone and among others, bit for bit, with the tilings that the mode chooses."""
    x = torch.randn(40, 256, generator=torch.Generator().manual_seed(4)).half()
    results = {}
    for m in (1, 17, 40):
        config = triton_config(m, (2, 2, 1056), Gpu("some GPU", 132), batch_invariant=True)
        results[m], *_ = multiply(m, 128, 256, 128, "symmetric", config, x=x[:m])
    assert torch.equal(results[1], results[40][:1])
    assert torch.equal(results[17], results[40][:17])


def test_strided_rows():
    rng = torch.Generator().manual_seed(3)
    x = torch.randn(6, 256, generator=rng).half()[::2, :128]
    config = TritonConfig(rows=64, tile_m=16, split=1, stages=2)
    y, expected, bound = multiply(3, 64, 128, 32, "symmetric", config, x=x)
    assert ((y.double() - expected).abs() <= bound).all()


def test_bad_values_stay_in_their_row():
    x = torch.ones(4, 128).half()
    x[1, 5] = float("nan")
    x[2, 7] = float("inf")
    config = TritonConfig(rows=64, tile_m=16, split=1, stages=2)
    y, expected, bound = multiply(4, 64, 128, 128, "symmetric", config, x=x)
    assert y[1].isnan().all()
    assert not y[2].isfinite().any()
    for row in (0, 3):
        assert ((y[row].double() - expected[row]).abs() <= bound[row]).all()


def half_pair(word, dtype):
    """The two 16-bit values of a 32-bit register, in float64."""
    halves = torch.from_numpy(np.array([word & 0xFFFF, word >> 16], dtype=np.uint16).view(np.int16))
    return halves.view(dtype).double()


def register(values, dtype):
    low, high = values.to(dtype).view(torch.int16).tolist()
    return (low & 0xFFFF) | (high & 0xFFFF) << 16


def execute(assembly, operands, dtype):
    """Run the PTX of `dequant.assembly` on 32-bit integers; returns the eight results."""
    values = {f"${8 + i}": word for i, word in enumerate(operands)}

    def read(name):
        return (
            int(name, 16)
            if name.startswith("0x")
            else int(name)
            if name.isdigit()
            else values[name]
        )

    for line in assembly.strip("{}\n").splitlines():
        if line.startswith(".reg"):
            continue
        opcode, arguments = line.rstrip(";").split(" ", 1)
        target, *sources = re.split(r",\s*", arguments)
        a = [read(s) for s in sources]
        if opcode == "mov.b32":
            values[target] = a[0]
        elif opcode == "shr.u32":
            values[target] = a[0] >> a[1]
        elif opcode == "lop3.b32":
            assert a[3] == 0xEA  # (a & b) | c
            values[target] = (a[0] & a[1]) | a[2]
        elif opcode == "prmt.b32":
            bytes_ = (a[0] | a[1] << 32).to_bytes(8, "little")
            picked = bytes(bytes_[a[2] >> (4 * i) & 7] for i in range(4))
            values[target] = int.from_bytes(picked, "little")
        else:
            assert opcode.startswith("fma.rn.")
            product = half_pair(a[0], dtype) * half_pair(a[1], dtype) + half_pair(a[2], dtype)
            values[target] = register(product, dtype)
    return [values[f"${i}"] for i in range(8)]


@pytest.mark.parametrize("mode", dequant.MODES)
@pytest.mark.parametrize(("name", "dtype"), [("f16", torch.float16), ("bf16", torch.bfloat16)])
def test_assembly_and_its_twin_agree(name, dtype, mode):
    """Every code in every nibble, through both, for some scales and zero points."""
    rng = torch.Generator().manual_seed(5)
    for shift in range(16):
        words = [sum(((j + shift) % 16) << (4 * j) for j in range(8)), 0x01234567 * (shift + 1)]
        words = [w & 0xFFFFFFFF for w in words]
        scales = (torch.rand(2, 2, generator=rng) + 0.5).to(dtype)
        zeros = torch.randint(0, 16, (2, 2), generator=rng).to(dtype)
        if mode == "scale_offset":
            zeros = torch.randn(2, 2, generator=rng).to(dtype)
        operands = list(words)
        if mode in ("scale", "scale_zero", "scale_offset"):
            operands += [register(s, dtype) for s in scales]
        if mode in ("zero", "scale_zero", "scale_offset"):
            operands += [register(z, dtype) for z in zeros]
        got = execute(dequant.assembly(name, mode), operands, dtype)
        for i, j in ((i, j) for i in range(2) for j in range(4)):
            row = j & 1
            codes = torch.tensor([words[i] >> (4 * j) & 15, words[i] >> (4 * j + 16) & 15])
            value = codes.double()
            if mode in ("code", "scale"):
                value -= 8
            elif mode in ("zero", "scale_zero"):
                value -= zeros[i, row].double()
            if mode.startswith("scale"):
                value = value * scales[i, row].double()
            if mode == "scale_offset":
                value = value + zeros[i, row].double()
            assert torch.equal(half_pair(got[4 * i + j], dtype), value.to(dtype).double())
