"""W4A16 products on a GPU, element by element against the float64 product of the exact weights.

Every configuration that ships is forced over small shapes; the shapes that a model has, and every
boundary of the heuristic, go through the public operation.
"""

import copy
import inspect
import itertools
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from billfish.errors import KernelArgumentError
from billfish.kernels import marlin
from billfish.kernels.marlin import reference
from billfish.kernels.marlin.configs import Gpu, Product
from billfish.nn import QuantLinear, quantize_

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.fixture(autouse=True)
def _inference():
    """As models run: plain tensors then go past torch's dispatcher to the implementation."""
    with torch.no_grad():
        yield


UNIT_ROUNDOFF = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
OTHER = Gpu("a GPU without a table", 132)
HALVES = (torch.float16, torch.bfloat16)
ROWS = (
    *range(10), 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 118, 127, 128, 129, 176, 177, 255,
    256, 257, 1000, 4090, 8192,
)  # fmt: skip
OUTPUTS = (8, 16, 32, 48, 64, 72, 96, 192, 576, 1856, 4096, 4104, 28672, 128256, 152064)
INPUTS = (16, 32, 64, 128, 192, 464, 576, 704, 1408, 4096, 4128, 7392, 11008, 14336, 20480)


def is_hopper():
    return torch.cuda.get_device_capability() == (9, 0)


class Matrix:
    """A random INT4 matrix: its parameters, packed, and the exact weights in float64."""

    def __init__(self, n, k, group_size=128, zero_point="symmetric", dtype=torch.float16, seed=0,
                 order="plain", spread=0.01, silu_mul=False):  # fmt: skip
        rng = torch.Generator("cuda").manual_seed(seed)
        groups = 1 if group_size == -1 else -(-k // group_size)
        self.g_idx = None
        if order != "plain":
            columns = torch.randperm(k, generator=rng, device="cuda")
            self.g_idx = (columns if group_size == -1 else columns // group_size) % groups
        if order == "slice":
            self.g_idx = torch.randint(0, groups, (k,), generator=rng, device="cuda")
        self.codes = torch.randint(0, 16, (n, k), dtype=torch.uint8, generator=rng, device="cuda")
        scales = torch.rand(n, groups, generator=rng, device="cuda") * spread + spread / 2
        self.scales = scales.to(dtype)
        zeros = torch.randint(0, 16, (n, groups), generator=rng, device="cuda").to(torch.uint8)
        offsets = (torch.randn(n, groups, generator=rng, device="cuda") * 4 * spread).to(dtype)
        self.zeros = zeros if zero_point == "integer" else None
        self.offsets = offsets if zero_point == "offset" else None
        self.group_size, self.dtype, self.silu_mul = group_size, dtype, silu_mul

    def packed(self):
        return marlin.pack(
            self.codes, self.scales, zeros=self.zeros, offsets=self.offsets, g_idx=self.g_idx,
            group_size=self.group_size, dtype=self.dtype, silu_mul=self.silu_mul,
        )  # fmt: skip

    def exact(self):
        return reference.dequantize(
            self.codes, self.scales, self.zeros, self.offsets, self.g_idx, self.group_size,
            torch.float64,
        )  # fmt: skip


def check(y, x, weight, bias=None):
    """Every element within the rounding of a weight, of an output, and of fp32 sums.

    Rounding each weight to dtype moves y by at most u * |x| |W|, rounding y by u * |y|; float32
    sums are finer by far. The bound is by element: an average would hide one wrong column.
    """
    unit = UNIT_ROUNDOFF[y.dtype]
    expected = x.double() @ weight.T
    magnitude = x.double().abs() @ weight.abs().T
    if bias is not None:
        expected += bias.double()
        magnitude += bias.double().abs()
    # Weights and outputs may be subnormal: then half of the smallest number bounds the rounding.
    tiny = torch.finfo(y.dtype).smallest_normal * unit
    bound = unit * (magnitude + expected.abs()) + tiny * (1 + x.double().abs().sum(1, keepdim=True))
    error = (y.double() - expected).abs()
    assert y.shape == expected.shape
    assert bool((error <= bound).all()), f"worst error / bound: {(error / bound).max().item():.3g}"


def check_epilogue(y, x, weight, bias, residual, silu_mul):
    """`check` for a product with a gated activation and a residual.

    An error d of gate or up moves silu(gate) * up by at most 1.1 d |up| or |gate| d. The residual
    and the result are rounded once.
    """
    unit = UNIT_ROUNDOFF[y.dtype]
    y_exact = reference.w4a16_matmul(x, weight, bias, residual, silu_mul)
    off = unit * (x.double().abs() @ weight.abs().T) + 1e-5
    if silu_mul:
        gate, up = reference.w4a16_matmul(x, weight, bias).abs().chunk(2, dim=1)
        gate_off, up_off = off.chunk(2, dim=1)
        off = 1.1 * gate_off * up + gate * up_off + 1.1 * gate_off * up_off
    error = (y.double() - y_exact).abs()
    bound = off + 1.01 * unit * y_exact.abs() + 1e-5
    assert y.shape == y_exact.shape
    assert bool((error <= bound).all()), f"worst error / bound: {(error / bound).max().item():.3g}"


def activations(m, k, dtype, seed=0):
    rng = torch.Generator("cuda").manual_seed(seed + 1)
    return torch.randn(m, k, generator=rng, device="cuda").to(dtype)


def sample():
    """A seeded sample of rows x outputs x inputs in which every value of each appears."""
    rng = random.Random(7)
    picks = []
    for values, place in ((ROWS, 0), (OUTPUTS, 1), (INPUTS, 2)):
        for value in values:
            case = [rng.choice(ROWS), rng.choice(OUTPUTS[:12]), rng.choice(INPUTS[:11])]
            case[place] = value
            if place == 1 and value > 28672:
                case[0], case[2] = rng.choice(ROWS[:20]), rng.choice(INPUTS[:9])
            picks.append(tuple(case))
    return picks


@pytest.mark.parametrize("zero_point", ["symmetric", "integer", "offset"])
@pytest.mark.parametrize("dtype", HALVES)
def test_shapes(zero_point, dtype):
    kinds = itertools.cycle((128, 64, 32, 16, -1))
    for index, (m, n, k) in enumerate(sample()):
        matrix = Matrix(n, k, next(kinds), zero_point, dtype, seed=index)
        bias = activations(1, n, dtype, index)[0] if index % 3 == 0 else None
        x = activations(m, k, dtype, index)
        check(marlin.w4a16_matmul(x, matrix.packed(), bias), x, matrix.exact(), bias)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("m", [1, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 256, 257])
def test_boundaries_of_the_heuristic(m, dtype):
    """Sizes on both sides of each change of configuration."""
    for n, k in [(2368, 4096), (2560, 8192), (9000, 8192), (28672, 8192)]:
        matrix = Matrix(n, k, 128, dtype=dtype, seed=m)
        x = activations(m, k, dtype, m)
        check(marlin.w4a16_matmul(x, matrix.packed()), x, matrix.exact())


@pytest.mark.parametrize("shape", [(4096, 4096), (28672, 4096), (8192, 28672)])
def test_boundaries_of_the_table(shape):
    """Every number of tokens that the GPU's table has a row for, and the next."""
    from billfish.kernels.marlin.tuning import ROWS as TUNED

    n, k = shape
    matrix = Matrix(n, k)
    packed, exact = matrix.packed(), matrix.exact()
    for m in itertools.chain.from_iterable((m, m + 1) for m in TUNED):
        x = activations(m, k, torch.float16, m)
        check(marlin.w4a16_matmul(x, packed), x, exact)


SHARES = 4  # tests among which the configurations are dealt out: compilation takes seconds each


def forced_configs(share):
    """Of all configurations to be tested, those of one test of `SHARES`."""
    from dataclasses import replace

    from billfish.bench.gemm_ablation import DEPTHS
    from billfish.kernels.marlin.configs import HopperConfig
    from tests.compile.test_marlin_compile import shipped_configs

    switches = ("overlap", "stream_k", "pdl", "sum_scale")
    plain = [
        HopperConfig(rows=64, consumers=2, tile_m=16, stages=4, **{s: False}) for s in switches
    ]
    depths = [HopperConfig(rows=64, consumers=2, tile_m=16, stages=depth) for depth in DEPTHS]
    no_policy = replace(plain[0], overlap=True, stream_weights=False, keep_x=False)
    shared = [
        HopperConfig(rows=rows, consumers=consumers, tile_m=tile_m, stages=4, parts=parts)
        for rows, consumers, tile_m, parts in ((64, 2, 16, 2), (128, 1, 8, 2), (64, 1, 32, 4))
    ]
    large = {"consumers": 2, "owned": True, "sharing_cost": 0, "sum_scale": False}
    owned = [
        HopperConfig(rows=64, tile_m=256, stages=3, **large),
        HopperConfig(rows=64, tile_m=128, stages=4, carry=True, **large),
        HopperConfig(rows=128, tile_m=128, stages=4, **large),
    ]
    forced = [*shipped_configs(), *plain, *depths, no_policy, *shared, *owned]
    return forced[share::SHARES]


@pytest.mark.parametrize("share", range(SHARES))
@pytest.mark.parametrize("zero_point", ["symmetric", "integer", "offset"])
@pytest.mark.parametrize("dtype", HALVES)
def test_every_configuration(dtype, zero_point, share):
    """Each shipped kernel over the same data, with group sizes and shapes in turn."""
    if not is_hopper():
        pytest.skip("needs a GPU of compute capability 9.0")
    from billfish.kernels.marlin import gpu, hopper_launch

    shapes = itertools.cycle([(5, 576, 1408), (300, 200, 464), (64, 4104, 1024), (33, 96, 7392)])
    kinds = itertools.cycle((128, 32, -1, 64, 16))
    for config in forced_configs(share):
        (m, n, k), group_size = next(shapes), next(kinds)
        matrix = Matrix(n, k, group_size, zero_point, dtype)
        x = activations(m, k, dtype)
        bias = activations(1, n, dtype, 5)[0]
        rows = gpu.aligned_rows(x)
        y = hopper_launch.launch(
            rows, matrix.packed().tensors[0], Product(n, zero_point, bias), config
        )
        check(y, x, matrix.exact(), bias)


@pytest.mark.parametrize("zero_point", ["symmetric", "integer", "offset"])
@pytest.mark.parametrize("dtype", HALVES)
def test_portable_kernel(dtype, zero_point):
    """The Triton kernel, which other GPUs run, over the same packed copy."""
    from billfish.kernels.marlin import triton_gemm
    from billfish.kernels.marlin.configs import triton_config

    for index, group_size in enumerate((128, 64, 32, 16, -1)):
        for m, n, k in [(1, 4096, 1408), (16, 96, 464), (33, 576, 4096), (300, 1856, 704)]:
            matrix = Matrix(n, k, group_size, zero_point, dtype, seed=index)
            x = activations(m, k, dtype, index)
            units = matrix.packed().tensors[0]
            config = triton_config(m, units.shape, OTHER)
            y = triton_gemm.launch(x, units, Product(n, zero_point), config)
            check(y, x, matrix.exact())


@pytest.mark.parametrize("share", range(SHARES))
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("epilogue", ["residual", "silu_mul", "all"])
def test_epilogues_of_every_configuration(epilogue, dtype, share):
    """Over whole and shared tiles, rows of gate and up that fill their units and that do not."""
    if not is_hopper():
        pytest.skip("needs a GPU of compute capability 9.0")
    from billfish.kernels.marlin import gpu, hopper_launch

    shapes = itertools.cycle([(5, 576, 1408), (300, 202, 464), (64, 4104, 1024), (33, 96, 7392)])
    kinds = itertools.cycle(((128, "symmetric"), (32, "integer"), (64, "offset")))
    silu_mul = epilogue != "residual"
    for config in forced_configs(share):
        (m, n, k), kind = next(shapes), next(kinds)
        matrix = Matrix(n, k, *kind, dtype, silu_mul=silu_mul)
        outputs = n // 2 if silu_mul else n
        x = gpu.aligned_rows(activations(m, k, dtype))
        bias = activations(1, n, dtype, 5)[0] if epilogue == "all" else None
        residual = activations(m, outputs, dtype, 6) if epilogue != "silu_mul" else None
        product = Product(outputs, kind[1], bias, residual, silu_mul)
        y = hopper_launch.launch(x, matrix.packed().tensors[0], product, config)
        check_epilogue(y, x, matrix.exact(), bias, residual, silu_mul)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("silu_mul", [False, True])
def test_epilogues_of_the_operation(silu_mul, dtype):
    for m, n, k in [(1, 8192, 4096), (16, 1856, 704), (3, 28672, 4096), (200, 208, 464)]:
        matrix = Matrix(n, k, 128, "integer", dtype, silu_mul=silu_mul)
        packed, exact = matrix.packed(), matrix.exact()
        x = activations(m, k, dtype).view(1, m, k)
        bias = activations(1, n, dtype, 5)[0]
        wide = activations(m, 2 * packed.outputs, dtype, 6).view(1, m, -1)
        residual = wide[..., ::2]  # strided
        before = wide.clone()
        y = marlin.w4a16_matmul(x, packed, bias, residual=residual)
        assert y.shape == (1, m, packed.outputs)
        check_epilogue(y[0], x[0], exact, bias, residual[0], silu_mul)
        assert torch.equal(wide, before)


@pytest.mark.parametrize("dtype", HALVES)
def test_portable_epilogues(dtype):
    from billfish.kernels.marlin import triton_gemm
    from billfish.kernels.marlin.configs import triton_config

    for silu_mul, (m, n, k) in itertools.product(
        (False, True), [(1, 4096, 1408), (33, 578, 4096), (300, 1856, 704)]
    ):
        matrix = Matrix(n, k, 64, "integer", dtype, silu_mul=silu_mul)
        units, outputs = matrix.packed().tensors[0], n // 2 if silu_mul else n
        x, bias = activations(m, k, dtype), activations(1, n, dtype, 5)[0]
        residual = activations(m, outputs, dtype, 6)
        product = Product(outputs, "integer", bias, residual, silu_mul)
        y = triton_gemm.launch(x, units, product, triton_config(m, units.shape, OTHER))
        check_epilogue(y, x, matrix.exact(), bias, residual, silu_mul)


@pytest.mark.parametrize("kernel", ["of the device", "portable"])
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (192, 7392)])
@pytest.mark.parametrize(("group_size", "zero_point"), [(128, "symmetric"), (32, "offset")])
@pytest.mark.parametrize("dtype", HALVES)
def test_batch_invariant_rows(dtype, group_size, zero_point, n, k, kernel):
    """A row gives the same bits in calls of any number of rows, at any place in them."""
    from billfish.kernels.marlin import triton_gemm
    from billfish.kernels.marlin.configs import triton_config

    matrix = Matrix(n, k, group_size, zero_point, dtype, silu_mul=True)
    packed = matrix.packed()
    x, residual = activations(1000, k, dtype), activations(1000, packed.outputs, dtype, 1)

    def run(rows):
        if kernel != "portable":
            more = residual[rows]
            return marlin.w4a16_matmul(x[rows], packed, residual=more, batch_invariant=True)
        units = packed.tensors[0]
        config = triton_config(len(x[rows]), units.shape, OTHER, batch_invariant=True)
        product = Product(packed.outputs, zero_point, None, residual[rows], True)
        return triton_gemm.launch(x[rows], units, product, config)

    many = run(slice(None))
    check_epilogue(many, x, matrix.exact(), None, residual, True)
    for count in (1, 2, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 256, 257, 600):
        for first in (0, 1000 - count, 377):
            rows = slice(first, min(first + count, 1000))
            assert torch.equal(run(rows), many[rows]), (count, first)


def test_first_call_under_capture(monkeypatch):
    """With nothing there of earlier calls, neither kernel nor workspace."""
    matrix = Matrix(1152, 4096, 64, "integer", torch.bfloat16)
    packed = matrix.packed()
    forget_all_launches(monkeypatch)
    for m in (3, 70):
        x = activations(m, 4096, torch.bfloat16)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = marlin.w4a16_matmul(x, packed)
        for seed in range(2):
            x.copy_(activations(m, 4096, torch.bfloat16, seed))
            graph.replay()
            torch.cuda.synchronize()
            check(y, x, matrix.exact())


def forget_all_launches(monkeypatch):
    """As in a process that has launched nothing yet, but for what is compiled on disk."""
    from billfish.kernels.marlin import gpu, workspace

    monkeypatch.setattr(gpu, "_launches", {})
    monkeypatch.setattr(workspace, "_pools", {})
    if is_hopper():
        from billfish.kernels.marlin import hopper_gemm, hopper_launch

        monkeypatch.setattr(hopper_launch, "_kernels", {})
        hopper_gemm.w4a16_hopper.device_caches.clear()


@pytest.mark.parametrize("order", ["act-order", "slice"])
@pytest.mark.parametrize("zero_point", ["symmetric", "integer", "offset"])
def test_act_order(order, zero_point):
    for dtype, (n, k, group_size) in itertools.product(HALVES, [(576, 704, 64), (96, 4096, 128)]):
        matrix = Matrix(n, k, group_size, zero_point, dtype, order=order)
        for m in (1, 40):
            x = activations(m, k, dtype)
            check(marlin.w4a16_matmul(x, matrix.packed()), x, matrix.exact())


@pytest.mark.parametrize("order", ["act-order", "slice"])
def test_act_order_of_a_gated_activation(order):
    matrix = Matrix(202, 704, 64, "integer", torch.bfloat16, order=order, silu_mul=True)
    packed, exact = matrix.packed(), matrix.exact()
    bias = activations(1, 202, torch.bfloat16, 5)[0]
    for m in (1, 40):
        x, residual = activations(m, 704, torch.bfloat16), activations(m, 101, torch.bfloat16, 6)
        y = marlin.w4a16_matmul(x, packed, bias, residual=residual)
        check_epilogue(y, x, exact, bias, residual, True)


@pytest.mark.parametrize("zero_point", ["symmetric", "integer", "offset"])
@pytest.mark.parametrize("dtype", HALVES)
def test_one_hot_rows_give_back_the_weights(dtype, zero_point):
    """Bit for bit: the rounded product of scale and code, and nothing of its neighbours."""
    for group_size in (128, 16):
        matrix = Matrix(200, 464, group_size, zero_point, dtype)
        y = marlin.w4a16_matmul(torch.eye(464, device="cuda", dtype=dtype), matrix.packed())
        assert torch.equal(y, matrix.exact().to(dtype).T)


@pytest.mark.parametrize("dtype", HALVES)
def test_extreme_scales(dtype):
    """Scales of zero, subnormal, large and negative."""
    matrix = Matrix(64, 512, 128, dtype=dtype)
    small = torch.finfo(dtype).smallest_normal / 4
    matrix.scales[:, 0], matrix.scales[:, 1] = 0.0, small
    matrix.scales[:, 2], matrix.scales[:, 3] = 100.0, -0.01
    for m in (1, 17, 100):
        x = activations(m, 512, dtype)
        check(marlin.w4a16_matmul(x, matrix.packed()), x, matrix.exact())


def test_overflow_and_subnormal_activations():
    matrix = Matrix(128, 256, 128, dtype=torch.float16, spread=1.0)
    packed, exact = matrix.packed(), matrix.exact()
    x = activations(4, 256, torch.float16)
    x[0], x[1] = 65504.0, -65504.0
    x[2] = 3e-8  # subnormal
    y = marlin.w4a16_matmul(x, packed)
    dense = x.float() @ exact.float().T
    assert torch.equal(y.isinf(), dense.half().isinf())
    check(y[2:], x[2:], exact)
    big = Matrix(128, 256, 128, dtype=torch.bfloat16)
    x = torch.full((2, 256), 1e30, device="cuda", dtype=torch.bfloat16)
    check(marlin.w4a16_matmul(x, big.packed()), x, big.exact())


@pytest.mark.parametrize("m", [4, 20, 70, 300])
def test_bad_values_stay_in_their_row(m):
    matrix = Matrix(576, 704, 64, "integer")
    packed = matrix.packed()
    x = activations(m, 704, torch.float16)
    clean = marlin.w4a16_matmul(x, packed)
    bad = x.clone()
    bad[1, 3], bad[2, 700] = float("nan"), float("inf")
    y = marlin.w4a16_matmul(bad, packed)
    others = [i for i in range(m) if i not in (1, 2)]
    assert torch.equal(y[others], clean[others])
    assert y[1].isnan().all()
    assert not y[2].isfinite().any()


def test_layouts_of_activations():
    """Strided, offset and 3-D inputs, one row, no row; inputs are left as they were."""
    matrix = Matrix(192, 464, 16)
    packed, exact = matrix.packed(), matrix.exact()
    wide = activations(40, 1000, torch.float16)
    for x in (
        wide[:, :464], wide[:, 3:467], wide[::3, 8:472], wide[:7, ::2][:, :464],
        wide[:, :464].t().contiguous().t(), wide[:1, :464].expand(9, 464),
    ):  # fmt: skip
        before = wide.clone()
        check(marlin.w4a16_matmul(x, packed), x, exact)
        assert torch.equal(wide, before)
    x = activations(24, 464, torch.float16).view(2, 3, 4, 464)
    y = marlin.w4a16_matmul(x, packed)
    assert y.shape == (2, 3, 4, 192)
    check(y.view(24, 192), x.view(24, 464), exact)
    assert marlin.w4a16_matmul(wide[:0, :464], packed).shape == (0, 192)
    assert marlin.w4a16_matmul(wide[0, :464], packed).shape == (192,)


@pytest.mark.parametrize(("n", "k"), [(72, 203), (1, 1), (7, 15), (9, 17), (65, 129)])
def test_odd_sizes(n, k):
    """K that is no multiple of 8: rows that TMA cannot read are copied; sizes under those of a
    tensor core's fragment, and one more than that of a unit.
    """
    matrix = Matrix(n, k, 32, "integer")
    packed, exact = matrix.packed(), matrix.exact()
    assert torch.equal(packed.unpack()[0], matrix.codes)
    for m in (1, 9, 70):
        x = activations(m, k, torch.float16)
        for y in both_kernels(x, packed):
            check(y, x, exact)


@pytest.mark.parametrize("m", [1, 5, 63, 65, 200])
def test_nothing_outside_the_output_is_written(m, monkeypatch):
    """The output is carved from marked memory; what lies around it stays."""
    n, k, margin = 72, 4096, 4096
    matrix = Matrix(n, k, 128)
    packed = matrix.packed()
    x = activations(m, k, torch.float16)
    marlin.w4a16_matmul(x, packed)
    arena = torch.full((m * n + 2 * margin,), 777.0, device="cuda", dtype=torch.float16)
    out = arena[margin:-margin].view(m, n)
    if is_hopper():
        from billfish.kernels.marlin import hopper_launch

        monkeypatch.setattr(hopper_launch, "_empty", lambda *_: out)
    else:
        empty = torch.empty
        monkeypatch.setattr(
            torch, "empty", lambda *size, **kw: out if size == ((m, n),) else empty(*size, **kw)
        )
    y = marlin.w4a16_matmul(x, packed)
    monkeypatch.undo()
    assert y.data_ptr() == out.data_ptr()
    assert (arena[:margin] == 777).all()
    assert (arena[-margin:] == 777).all()
    check(y, x, matrix.exact())


def test_round_trip_and_moves():
    for order, zero_point in itertools.product(
        ("plain", "act-order", "slice"), ("symmetric", "integer", "offset")
    ):
        matrix = Matrix(130, 320, 32, zero_point, torch.bfloat16, order=order)
        packed = matrix.packed()
        codes, scales, zeros, offsets = packed.unpack()
        assert torch.equal(codes, matrix.codes)
        assert torch.equal(scales, matrix.scales)
        assert zeros is None or torch.equal(zeros, matrix.zeros)
        assert offsets is None or torch.equal(offsets, matrix.offsets)
        back = packed.to("cpu").to("cuda")
        assert torch.equal(back.unpack()[0], matrix.codes)


@pytest.mark.parametrize("zero_point", ["symmetric", "integer", "offset"])
def test_packing_gives_the_same_bits_on_a_cpu(zero_point):
    from billfish.kernels.marlin import gpu

    matrix = Matrix(200, 464, 16, zero_point)
    on_cpu = [
        None if t is None else t.cpu()
        for t in (matrix.codes, matrix.scales, matrix.zeros, matrix.offsets)
    ]
    there = gpu.pack(
        *on_cpu, group_size=16, dtype=torch.float16, g_idx=None, silu_mul=False
    )["tensors"][0]  # fmt: skip
    assert torch.equal(matrix.packed().tensors[0].cpu(), there)


def both_kernels(x, packed):
    """The product as this GPU computes it, and by the portable kernel."""
    from billfish.kernels.marlin import triton_gemm
    from billfish.kernels.marlin.configs import triton_config

    yield marlin.w4a16_matmul(x, packed)
    units = packed.tensors[0]
    product = Product(packed.outputs, packed.zero_point)
    yield triton_gemm.launch(x, units, product, triton_config(len(x), units.shape, OTHER))


@pytest.mark.parametrize(("n", "k"), [(2112, 128), (64, 2112)])
def test_rows_beyond_32_bits(n, k):
    """2^20 rows, of which Y or X has more than 2^31 elements; one more is refused."""
    matrix = Matrix(n, k, 64)
    packed, exact = matrix.packed(), matrix.exact()
    rng = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(2**20, k, generator=rng, device="cuda", dtype=torch.float16)
    edge = 2**31 // 2112
    rows = [*range(40), *range(2**19 - 9, 2**19 + 9), *range(edge - 99, edge + 99), 2**20 - 1]
    for y in both_kernels(x, packed):
        assert y.shape == (2**20, n)
        check(y[rows], x[rows], exact)
        del y
    with pytest.raises(KernelArgumentError, match="1048576 rows"):
        marlin.w4a16_matmul(x[:1].expand(2**20 + 1, k), packed)


def test_weight_beyond_32_bits():
    """More than 2^32 codes in more than 2^31 bytes: packed, multiplied, unpacked."""
    n, k = 65600, 65664
    rng = torch.Generator("cuda").manual_seed(0)
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8, generator=rng, device="cuda")
    scales = torch.rand(n, k // 128, generator=rng, device="cuda").half() * 0.01
    packed = marlin.pack(codes, scales, group_size=128, dtype=torch.float16)
    assert packed.nbytes > 2**31
    some = [*range(70), *range(63360, 63552), *range(n - 70, n)]
    exact = reference.dequantize(
        codes[some], scales[some], None, None, None, 128, torch.float64
    )  # fmt: skip
    assert torch.equal(packed.unpack()[0], codes)
    del codes
    for m in (2, 70):
        x = activations(m, k, torch.float16)
        for y in both_kernels(x, packed):
            check(y[:, some], x, exact)


def test_what_lies_around_rows_is_not_read():
    """NaN before and after each row, between rows, and behind the last."""
    matrix = Matrix(192, 464, 16)
    packed, exact = matrix.packed(), matrix.exact()
    for m, first in itertools.product((1, 40, 200), (8, 3)):
        memory = torch.full((2 * m + 2, 1000), torch.nan, device="cuda", dtype=torch.float16)
        x = memory[2 : 2 * m + 2 : 2, first : first + 464]
        x.copy_(activations(m, 464, torch.float16))
        for y in both_kernels(x, packed):
            check(y, x, exact)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("symmetric", [True, False])
def test_layers_of_a_module(symmetric, dtype):
    """Rounded on the GPU or on the CPU and moved; saved on one and loaded on the other."""
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Linear(256, 576), nn.SiLU(), nn.Linear(576, 192, bias=False)).to(dtype)
    options = {"group_size": 64, "symmetric": symmetric}
    on_cpu = quantize_(copy.deepcopy(dense), **options)
    moved = copy.deepcopy(on_cpu).to("cuda")
    made_here = quantize_(copy.deepcopy(dense).to("cuda"), **options)
    for m, model in itertools.product((1, 40), (moved, made_here)):
        first, second = model[0], model[2]
        assert type(first) is type(second) is QuantLinear
        x = activations(m, 256, dtype)
        hidden = first(x)
        check(hidden, x, first.weight.dequantize(torch.float64), first.bias)
        y = second(hidden.view(1, m, 576))
        check(y[0], hidden, second.weight.dequantize(torch.float64))
        near = dense.to("cuda")(x)
        error = (model(x) - near).float().norm() / near.float().norm()
        assert 0 < error < 0.25
    for there, here in ((moved, on_cpu), (on_cpu, made_here)):
        there.load_state_dict(here.state_dict())
        for place in (0, 2):
            codes, scales, *_ = there[place].weight.unpack()
            expected = here[place].weight.unpack()
            assert torch.equal(codes.cpu(), expected[0].cpu())
            assert torch.equal(scales.cpu(), expected[1].cpu())


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_compiled_module(mode, monkeypatch):
    """By torch's own compiler, and in the CUDA graphs that it makes; a product whose tiles are
    shared is one of them, so that a workspace is made while they are.
    """
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4096, 4096), nn.SiLU(), nn.Linear(4096, 576, bias=False))
    model = quantize_(model.to("cuda", torch.float16), group_size=64)
    forget_all_launches(monkeypatch)
    compiled = torch.compile(model, mode=mode, fullgraph=True)
    for seed in range(5):
        x = activations(5, 4096, torch.float16, seed)
        y = compiled(x).clone()
        torch.testing.assert_close(y, model(x), rtol=1e-2, atol=5e-3)
    assert not counters["graph_break"]
    assert not counters["inductor"]["cudagraph_skips"]
    torch._dynamo.reset()


def test_a_captured_module():
    """A layer's graph replays with other inputs, and again after it was captured anew."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 576), nn.SiLU(), nn.Linear(576, 192)).half()
    model = quantize_(model.to("cuda"), group_size=32, symmetric=False)
    x = activations(3, 256, torch.float16)
    model(x)
    for _ in range(20):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = model(x)
        for seed in range(2):
            x.copy_(activations(3, 256, torch.float16, seed))
            graph.replay()
            assert torch.equal(y, model(x))


def test_calls_on_the_same_memory():
    """Launches are kept by addresses: other contents, shapes, dtypes and weights at the same place,
    in calls that take turns."""
    memory = torch.empty(64 * 1024, dtype=torch.int16, device="cuda")
    matrices = [
        Matrix(n, k, group_size, zero_point, dtype)
        for n, k, group_size, zero_point, dtype in (
            (192, 512, 128, "symmetric", torch.float16),
            (192, 512, 128, "integer", torch.bfloat16),
            (320, 512, 32, "offset", torch.float16),
            (192, 1024, 128, "symmetric", torch.float16),
        )
    ]
    weights = [(matrix, matrix.packed(), matrix.exact()) for matrix in matrices]
    shapes = [(1,), (7,), (1, 7), (2, 2), (33,)]
    for seed, (shape, (matrix, packed, exact)) in enumerate(
        3 * list(itertools.product(shapes, weights))
    ):
        k = packed.k
        x = memory.view(matrix.dtype)[: torch.Size(shape).numel() * k].view(*shape, k)
        x.copy_(activations(x.numel() // k, k, matrix.dtype, seed).view_as(x))
        y = marlin.w4a16_matmul(x, packed)
        assert y.shape == (*shape, packed.n)
        check(y.view(-1, packed.n), x.view(-1, k), exact)


def test_calls_without_the_dispatcher_give_the_same():
    """In inference mode, under autograd's eyes, through torch.ops and by Triton's launcher."""
    triton = pytest.importorskip("triton")
    matrix = Matrix(576, 1408, 64, "integer")
    packed = matrix.packed()
    bias, residual = activations(1, 576, torch.float16)[0], activations(5, 576, torch.float16)
    x = activations(5, 1408, torch.float16)

    def run():
        return marlin.w4a16_matmul(x, packed, bias, residual=residual)

    expected = [run() for _ in range(3)][-1]
    with torch.inference_mode():
        assert torch.equal(run(), expected)
    with torch.enable_grad():
        assert torch.equal(run(), expected)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        assert torch.equal(run(), expected)
    seen = []

    def watch(metadata):
        seen.append(metadata)

    triton.knobs.runtime.launch_enter_hook.add(watch)
    try:
        assert torch.equal(run(), expected)
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(watch)
    assert seen


def test_a_device_that_is_not_the_current_one():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two NVIDIA GPUs")
    matrix = Matrix(192, 512, 128)
    packed, exact = matrix.packed(), matrix.exact()
    x = activations(5, 512, torch.float16)
    elsewhere, there = packed.to("cuda:1"), x.to("cuda:1")
    for _ in range(3):
        check(marlin.w4a16_matmul(x, packed), x, exact)
        y = marlin.w4a16_matmul(there, elsewhere)
        assert y.device == there.device
        check(y.to("cuda:0"), x, exact)


def test_graph_replay_with_other_inputs():
    matrix = Matrix(4096, 4096, 128)
    packed, exact = matrix.packed(), matrix.exact()
    for m in (1, 64, 200):
        x = activations(m, 4096, torch.float16)
        graph = torch.cuda.CUDAGraph()
        marlin.w4a16_matmul(x, packed)
        with torch.cuda.graph(graph):
            y = marlin.w4a16_matmul(x, packed)
            z = marlin.w4a16_matmul(y, packed)  # depends on the product before it
        for seed in range(3):
            x.copy_(activations(m, 4096, torch.float16, seed))
            graph.replay()
            torch.cuda.synchronize()
            check(y, x, exact)
            check(z, y, exact)


def test_two_graphs_and_a_stream_at_once():
    """Counters of arrivals are not shared between what may run at the same time."""
    matrix = Matrix(2048, 8192, 128)
    packed = matrix.packed()
    xs = [activations(16, 8192, torch.float16, seed) for seed in range(3)]
    expected = [marlin.w4a16_matmul(x, packed) for x in xs]
    graphs, outputs = [], []
    for x in xs[:2]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs.append([marlin.w4a16_matmul(x, packed) for _ in range(20)])
        graphs.append(graph)
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    for _ in range(5):
        for stream, graph in zip(streams, graphs, strict=False):
            with torch.cuda.stream(stream):
                graph.replay()
        with torch.cuda.stream(streams[2]):
            eager = [marlin.w4a16_matmul(xs[2], packed) for _ in range(20)]
        torch.cuda.synchronize()
        assert all(torch.equal(y, expected[2]) for y in eager)
        for mine, reference_y in zip(outputs, expected, strict=False):
            assert all(torch.equal(y, reference_y) for y in mine)


@pytest.mark.parametrize("m", [1, 16, 33, 64, 100])
def test_repeats_are_bit_equal(m):
    """Whoever of the blocks that share a tile comes last, the sums are added in the same order."""
    matrix = Matrix(4096, 4096, 128)
    packed = matrix.packed()
    x = activations(m, 4096, torch.float16)
    first = marlin.w4a16_matmul(x, packed)
    different = sum((marlin.w4a16_matmul(x, packed) != first).sum() for _ in range(1000))
    assert int(different) == 0


def test_dirty_workspace():
    """Partial sums are never read before they are written, and counters are left at zero."""
    from billfish.kernels.marlin import workspace

    matrix = Matrix(1856, 7392, 32)
    packed = matrix.packed()
    x = activations(33, 7392, torch.float16)
    first = marlin.w4a16_matmul(x, packed)
    del matrix
    pool = workspace._pools[x.device]
    for _ in range(3):
        for memory in pool._by_stream.values():
            memory.sums.fill_(float("nan"))
        assert torch.equal(marlin.w4a16_matmul(x, packed), first)
        assert not any(memory.counters.any() for memory in pool._by_stream.values())


def test_capture_with_no_counters_left():
    """As after some thousand captured calls: then the graph clears its own."""
    from billfish.kernels.marlin import workspace

    packed = Matrix(1856, 7392, 32).packed()
    x = activations(33, 7392, torch.float16)
    first = marlin.w4a16_matmul(x, packed)
    counters = workspace._pools[x.device].counters[-1]
    before, counters.taken = counters.taken, counters.zeros.numel()
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            ys = [marlin.w4a16_matmul(x, packed) for _ in range(3)]
    finally:
        counters.taken = before
    for _ in range(3):
        for y in ys:
            y.fill_(torch.nan)
        graph.replay()
        assert all(torch.equal(y, first) for y in ys)


def test_early_launch_changes_nothing():
    """Programmatic dependent launch on and off, in a chain in which each product needs the last."""
    if not is_hopper():
        pytest.skip("needs a GPU of compute capability 9.0")
    from dataclasses import replace

    from billfish.kernels.marlin import configs, hopper_launch
    from billfish.kernels.marlin.workspace import gpu_of

    matrix = Matrix(4096, 4096, 128, spread=0.002)
    units = matrix.packed().tensors[0]
    for m in (1, 64):
        config = configs.hopper_config(m, units.shape, gpu_of(units.device))
        results = []
        for pdl in (True, False):
            setting = replace(config, pdl=pdl)
            for seed in range(20):
                y = activations(m, 4096, torch.float16, seed)
                for _ in range(6):
                    y = hopper_launch.launch(y, units, Product(4096), setting)
                results.append(y)
        assert bool(torch.stack(results).isfinite().all())
        assert all(torch.equal(*pair) for pair in zip(results[:20], results[20:], strict=True))


@pytest.mark.parametrize("parts", [0, 1, 2, 4, 8, 16])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 4096, 2048), (8, 200, 4096), (31, 6144, 8192)])
def test_equal_parts(m, n, k, parts):
    """However many blocks share a tile, each step is added once and in the same order."""
    if not is_hopper():
        pytest.skip("needs a GPU of compute capability 9.0")
    from billfish.kernels.marlin import hopper_launch
    from billfish.kernels.marlin.configs import HopperConfig

    matrix = Matrix(n, k, seed=parts)
    units, x = matrix.packed().tensors[0], activations(m, k, torch.float16, m)
    tile_m = 8 if m <= 8 else 32
    for rows, consumers, stages in ((128, 1, 2), (64, 2, 3), (64, 1, 5)):
        config = HopperConfig(
            rows=rows, consumers=consumers, tile_m=tile_m, stages=stages, parts=parts,
            blocks_per_sm=2, grid_per_sm=2, overlap=tile_m == 8,
        )  # fmt: skip
        y = [hopper_launch.launch(x, units, Product(n), config) for _ in range(3)]
        check(y[0], x, matrix.exact())
        assert torch.equal(y[0], y[1])
        assert torch.equal(y[0], y[2])


@pytest.mark.parametrize("lead", [-4, 0, 2, 6])
@pytest.mark.parametrize(
    ("m", "n", "k"), [(128, 4096, 4096), (250, 18432, 2048), (600, 6144, 2816), (256, 200, 7392)]
)
def test_owners_of_tiles(m, n, k, lead, monkeypatch):
    """Whether a tile's owner comes before its helpers or after them, it is the same tile."""
    if not is_hopper():
        pytest.skip("needs a GPU of compute capability 9.0")
    from billfish.kernels.marlin import hopper_launch, hopper_plan, workspace
    from billfish.kernels.marlin.configs import HopperConfig

    monkeypatch.setattr(hopper_plan, "_LEAD", lead)
    hopper_plan.plan.cache_clear()
    matrix = Matrix(n, k, seed=lead)
    units, x = matrix.packed().tensors[0], activations(m, k, torch.float16, m)
    exact, residual = matrix.exact(), activations(m, n, torch.float16, 3)
    large = {"consumers": 2, "owned": True, "sharing_cost": 0, "sum_scale": False}
    for config in (
        HopperConfig(rows=64, tile_m=256, stages=3, **large),
        HopperConfig(rows=64, tile_m=128, stages=4, carry=True, **large),
    ):
        processors = workspace.gpu_of(x.device).processors
        assert hopper_plan.divide(config, m, *units.shape[:2], processors).divided
        first = hopper_launch.launch(x, units, Product(n, residual=residual), config)
        check_epilogue(first, x, exact, None, residual, False)
        pool = workspace._pools[x.device]
        for _ in range(20):
            for memory in pool._by_stream.values():
                memory.sums.fill_(float("nan"))
            again = hopper_launch.launch(x, units, Product(n, residual=residual), config)
            assert torch.equal(again, first)
        assert not any(memory.counters.any() for memory in pool._by_stream.values())
    hopper_plan.plan.cache_clear()


def hazards(report):
    """Lines of our code that racecheck reports, but those of the hand-over to the partitions.

    Triton passes a partition its arguments through shared memory and wakes it by a named barrier,
    which racecheck does not follow: it reports the kernel's first line and the warp_specialize.
    """
    from billfish.kernels.marlin import hopper_gemm

    kernel = hopper_gemm.w4a16_hopper.fn
    lines, first = inspect.getsourcelines(kernel)
    handover = {f"hopper_gemm.py:{line}" for line in range(first, first + len(lines))}
    places = re.findall(r"(?:Read|Write) access at \S+ in (\S+)", report)
    return [place for place in places if place not in handover]


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_under_the_sanitizer(tool):
    """A few small products without a bad access or a race in shared memory."""
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("needs compute-sanitizer, of the CUDA toolkit")
    script = Path(__file__).with_name("marlin_products.py")
    command = [sanitizer, "--tool", tool, "--error-exitcode", "9", sys.executable, str(script)]
    environment = {**os.environ, "PYTHONPATH": str(script.parents[2])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    if tool == "racecheck":
        assert "RACECHECK SUMMARY" in done.stdout
        assert not hazards(done.stdout)
    else:
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "all products are right" in done.stdout


def test_bad_arguments():
    packed = Matrix(64, 128).packed()
    x = activations(2, 128, torch.float16)
    for bad in (x.bfloat16(), x.float(), x[:, :64], x.cpu()):
        with pytest.raises(KernelArgumentError, match="x"):
            marlin.w4a16_matmul(bad, packed)
    for bad in (x[0], x[0, :64].float(), x[0, :64].cpu()):
        with pytest.raises(KernelArgumentError, match="bias"):
            marlin.w4a16_matmul(x, packed, bad)
    for bad in (x, x[:, :64].float(), x[:, :64].cpu(), x[0, :64]):
        with pytest.raises(KernelArgumentError, match="residual"):
            marlin.w4a16_matmul(x, packed, residual=bad)
    with pytest.raises(KernelArgumentError, match="x"):
        marlin.w4a16_matmul(x, packed.to("cpu"))
    matrix = Matrix(64, 128)
    with pytest.raises(KernelArgumentError, match="dtype"):
        marlin.pack(matrix.codes, matrix.scales, group_size=128, dtype=torch.float32)


def test_compiled():
    packed = Matrix(192, 256, 64).packed()
    x = activations(5, 256, torch.float16)
    plain = marlin.w4a16_matmul(x, packed)
    compiled = torch.compile(lambda t: marlin.w4a16_matmul(t, packed) * 2, backend="eager")
    assert torch.equal(compiled(x), plain * 2)
