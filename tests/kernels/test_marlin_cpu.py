"""W4A16 on the CPU against the float64 reference, over formats, shapes and odd sizes."""

import pytest
import torch

from billfish.errors import KernelArgumentError
from billfish.kernels import marlin
from billfish.kernels.marlin import cpu, reference

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
SHAPES = ((64, 128), (33, 97), (1, 1), (130, 192), (200, 1024), (96, 31))


def make(n, k, group_size, zero_point="symmetric", order=None, seed=0):
    """Arguments of `pack` but for dtype."""
    rng = torch.Generator().manual_seed(seed)
    groups = 1 if group_size == -1 else -(-k // group_size)
    plain = torch.arange(k) // (k if group_size == -1 else group_size)
    arguments = {
        "codes": torch.randint(0, 16, (n, k), dtype=torch.uint8, generator=rng),
        "scales": torch.rand(n, groups, generator=rng) * 0.02 + 0.01,
        "group_size": group_size,
    }
    if zero_point == "integer":
        arguments["zeros"] = torch.randint(0, 16, (n, groups), dtype=torch.uint8, generator=rng)
    if zero_point == "offset":
        arguments["offsets"] = torch.randn(n, groups, generator=rng) * 0.1
    if order == "permuted":
        arguments["g_idx"] = plain[torch.randperm(k, generator=rng)]
    if order == "sliced":
        arguments["g_idx"] = torch.randint(0, groups, (k,), generator=rng).int()
    return arguments


def exact_weight(arguments):
    return reference.dequantize(
        arguments["codes"], arguments["scales"], arguments.get("zeros"), arguments.get("offsets"),
        arguments.get("g_idx"), arguments["group_size"], torch.float64,
    )  # fmt: skip


def weight_bound(arguments, dtype):
    """Most that each weight may be off: scale, shift, and the dequantized weight are rounded."""
    zeroed = {"zeros": torch.zeros_like(arguments["scales"]), "offsets": None}
    ones = torch.ones_like(arguments["codes"])
    scale = exact_weight({**arguments, **zeroed, "codes": ones})
    exact = exact_weight(arguments)
    centred = scale * (arguments["codes"].double() - 8)
    return ROUNDING[dtype] * (2 * centred.abs() + 2 * (exact - centred).abs() + exact.abs())


def assert_product(y, x, arguments, dtype, bias=None):
    exact = reference.w4a16_matmul(x, exact_weight(arguments), bias)
    magnitude = x.double().abs() @ exact_weight(arguments).abs().T
    sums = 2.0**-24 * x.shape[-1] * magnitude
    bound = x.double().abs() @ weight_bound(arguments, dtype).T + sums
    product = exact if bias is None else exact - bias.double()
    bound += 1.01 * ROUNDING[dtype] * (product.abs() + bound + exact.abs()) + 1e-7
    assert y.dtype == dtype
    assert bool(((y.double() - exact).abs() <= bound).all())


@pytest.mark.parametrize("order", [None, "permuted", "sliced"])
@pytest.mark.parametrize("zero_point", ["symmetric", "integer", "offset"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_product_and_unpack(dtype, zero_point, order):
    for n, k in SHAPES:
        for group_size in marlin.GROUP_SIZES:
            arguments = make(n, k, group_size, zero_point, order, seed=n + k)
            weight = marlin.pack(**arguments, dtype=dtype)
            codes, scales, zeros, offsets = weight.unpack()
            assert torch.equal(codes, arguments["codes"])
            assert torch.equal(scales, arguments["scales"].to(dtype))
            assert (zeros is None) == (zero_point != "integer")
            assert zeros is None or torch.equal(zeros, arguments["zeros"])
            assert (offsets is None) == (zero_point != "offset")
            rng = torch.Generator().manual_seed(k)
            x = torch.randn(3, k, generator=rng).to(dtype)
            bias = torch.randn(n, generator=rng).to(dtype)
            assert_product(marlin.w4a16_matmul(x, weight, bias), x, arguments, dtype, bias)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("zero_point", ["symmetric", "integer", "offset"])
def test_dequantize(dtype, zero_point):
    arguments = make(70, 200, 32, zero_point)
    weight = marlin.pack(**arguments, dtype=dtype)
    error = (weight.dequantize(torch.float64) - exact_weight(arguments)).abs()
    assert bool((error <= weight_bound(arguments, dtype) + 1e-12).all())
    assert weight.dequantize().dtype == dtype


@pytest.mark.parametrize("silu_mul", [False, True])
@pytest.mark.parametrize("zero_point", ["symmetric", "integer", "offset"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_epilogues(dtype, zero_point, silu_mul):
    """Residual and gated activation of both layouts, within the rounding of each step."""
    for group_size, rows in ((32, 3), (16, 2), (64, 60)):
        arguments = make(40, 128, group_size, zero_point)
        weight = marlin.pack(**arguments, dtype=dtype, silu_mul=silu_mul)
        assert weight.outputs == (20 if silu_mul else 40)
        assert torch.equal(weight.unpack()[0], arguments["codes"])
        rng = torch.Generator().manual_seed(rows)
        x = torch.randn(rows, 128, generator=rng).to(dtype)
        bias = torch.randn(40, generator=rng).to(dtype)
        residual = torch.randn(rows, weight.outputs, generator=rng).to(dtype)
        before = residual.clone()
        y = marlin.w4a16_matmul(x, weight, bias, residual=residual)
        # What the product alone gives is tested above; these steps round once each.
        plain = marlin.pack(**arguments, dtype=dtype)
        product = marlin.w4a16_matmul(x, plain, bias)
        exact = product.double()
        if silu_mul:
            gate, up = exact.chunk(2, dim=1)
            exact = gate * torch.sigmoid(gate) * up
        bound = 2 * ROUNDING[dtype] * (2 * exact.abs() + residual.double().abs()) + 1e-6
        assert bool(((y.double() - exact - residual.double()).abs() <= bound).all())
        assert torch.equal(residual, before)
        whole = reference.w4a16_matmul(x, exact_weight(arguments), bias, residual, silu_mul)
        assert float((y.double() - whole).norm() / whole.norm()) < 4 * ROUNDING[dtype] + 1e-6


@pytest.mark.parametrize("group_size", [16, 32])
@pytest.mark.parametrize("dtype", DTYPES)
def test_batch_invariant_rows(dtype, group_size):
    """A row gives the same bits alone, among few and among many, at any place."""
    weight = marlin.pack(**make(192, 320, group_size, "offset"), dtype=dtype, silu_mul=True)
    x = torch.randn(130, 320, generator=torch.Generator().manual_seed(4)).to(dtype)
    many = marlin.w4a16_matmul(x, weight, batch_invariant=True)
    for first, last in ((0, 1), (129, 130), (60, 61), (3, 10), (20, 69), (1, 130)):
        few = marlin.w4a16_matmul(x[first:last], weight, batch_invariant=True)
        assert torch.equal(few, many[first:last])
    assert marlin.w4a16_matmul(x[:0], weight, batch_invariant=True).shape == (0, 96)


def test_layouts():
    assert cpu.int4_block_rows() in (0, 16, 32, 64, 128)
    fast = "int4pack" if cpu.int4_block_rows() else "nibble"
    for k, group_size, dtype, layout in (
        (128, 32, torch.bfloat16, fast),
        (128, 64, torch.bfloat16, fast),
        (128, 128, torch.bfloat16, fast),
        (96, -1, torch.bfloat16, fast),
        (128, 16, torch.bfloat16, "nibble"),
        (100, 32, torch.bfloat16, "nibble"),
        (128, 32, torch.float32, "nibble"),
    ):
        assert marlin.pack(**make(48, k, group_size), dtype=dtype).layout == layout


@pytest.mark.parametrize("rows", [cpu.INT4_MAX_ROWS, cpu.INT4_MAX_ROWS + 1])
def test_both_sides_of_the_crossover(rows):
    arguments = make(192, 256, 32, "offset")
    x = torch.randn(rows, 256, generator=torch.Generator().manual_seed(1)).bfloat16()
    weight = marlin.pack(**arguments, dtype=torch.bfloat16)
    assert_product(marlin.w4a16_matmul(x, weight), x, arguments, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_many_runs(dtype, monkeypatch):
    monkeypatch.setattr(cpu, "_RUN_ELEMENTS", 1 << 13)
    arguments = make(300, 256, 64, "integer")
    x = torch.randn(60, 256, generator=torch.Generator().manual_seed(2)).to(dtype)
    weight = marlin.pack(**arguments, dtype=dtype)
    assert weight.layout != "nibble" or len(weight.tensors[0]) > 1
    assert_product(marlin.w4a16_matmul(x, weight), x, arguments, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_shapes_and_strides_of_x(dtype):
    arguments = make(40, 64, 32)
    weight = marlin.pack(**arguments, dtype=dtype)
    wide = torch.randn(2, 3, 130, generator=torch.Generator().manual_seed(3)).to(dtype)
    before = wide.clone()
    for x in (wide[..., :64], wide[..., 1:129:2], wide[0, 0, :64], wide.transpose(0, 1)[..., :64]):
        y = marlin.w4a16_matmul(x, weight)
        assert y.shape == (*x.shape[:-1], 40)
        assert y.is_contiguous()
        assert_product(y, x, arguments, dtype)
    assert marlin.w4a16_matmul(wide[:, :0, :64], weight).shape == (2, 0, 40)
    assert torch.equal(wide, before)


def test_bytes():
    weight = marlin.pack(**make(576, 576, 32, "offset"), dtype=torch.bfloat16)
    assert weight.nbytes == 576 * 576 // 2 + 2 * 2 * 576 * 18
    assert marlin.pack(**make(64, 64, 32), dtype=torch.float32).nbytes == 64 * 32 + 4 * 64 * 2


def test_to_the_same_device_is_the_same_weight():
    weight = marlin.pack(**make(8, 32, 32), dtype=torch.float32)
    assert weight.to("cpu") is weight
    assert weight.device == torch.device("cpu")


def test_repacking_an_unpacked_weight_changes_nothing():
    for zero_point in ("symmetric", "integer", "offset"):
        arguments = make(64, 128, 32, zero_point)
        weight = marlin.pack(**arguments, dtype=torch.bfloat16)
        codes, scales, zeros, offsets = weight.unpack()
        again = marlin.pack(
            codes, scales, zeros=zeros, offsets=offsets, group_size=32, dtype=torch.bfloat16
        )
        assert torch.equal(again.tensors[0], weight.tensors[0])
        if zero_point != "integer":
            assert torch.equal(again.tensors[1], weight.tensors[1])


GOOD = make(4, 64, 32)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("dtype", {"dtype": torch.float64}),
        ("group_size", {"group_size": 48}),
        ("codes", {"codes": torch.zeros(4, 64, dtype=torch.int32)}),
        ("codes", {"codes": torch.zeros(0, 64, dtype=torch.uint8)}),
        ("codes", {"codes": torch.zeros(64, dtype=torch.uint8)}),
        ("codes", {"codes": torch.full((4, 64), 16, dtype=torch.uint8)}),
        ("codes.device", {"codes": torch.zeros(4, 64, dtype=torch.uint8, device="meta")}),
        ("group_size", {"group_size": 32.0}),
        ("scales", {"scales": torch.ones(4, 3)}),
        ("scales", {"scales": torch.ones(5, 2)}),
        ("scales", {"scales": torch.ones(4, 2, dtype=torch.int32)}),
        ("scales", {"scales": torch.full((4, 2), float("nan"))}),
        ("scales", {"scales": torch.full((4, 2), 1e5), "dtype": torch.float16}),
        ("offsets", {"offsets": torch.full((4, 2), float("inf"))}),
        ("offsets", {"offsets": torch.ones(4, 1)}),
        ("zeros", {"zeros": torch.full((4, 2), 16, dtype=torch.uint8)}),
        ("zeros", {"zeros": torch.ones(4, 2)}),
        ("zeros", {"zeros": torch.ones(4, 2, dtype=torch.uint8, device="meta")}),
        ("both", {"zeros": torch.ones(4, 2).byte(), "offsets": torch.ones(4, 2)}),
        ("g_idx", {"g_idx": torch.zeros(63, dtype=torch.int32)}),
        ("g_idx", {"g_idx": torch.zeros(64)}),
        ("g_idx", {"g_idx": torch.full((64,), 2)}),
        ("g_idx", {"g_idx": torch.full((64,), -1)}),
        ("codes", {"codes": [[1]]}),
        ("codes", {"codes": None}),
        ("codes", {"codes": torch.zeros(4, 64, dtype=torch.uint8).to_sparse()}),
        ("scales", {"scales": [[1.0]]}),
        ("scales", {"scales": torch.ones(4, 2).to_sparse()}),
        ("zeros", {"zeros": [[1]]}),
        ("offsets", {"offsets": 0.5}),
        ("g_idx", {"g_idx": [0] * 64}),
    ],
)  # fmt: skip
def test_pack_refuses(name, change):
    with pytest.raises(KernelArgumentError, match=name):
        marlin.pack(**{**GOOD, "dtype": torch.float32, **change})


def test_offsets_that_overflow_the_dtype_once_centred_are_refused():
    """65000 and 100 fit float16, 65000 + 8 * 100 does not."""
    change = {"scales": torch.full((4, 2), 100.0), "offsets": torch.full((4, 2), 65000.0)}
    with pytest.raises(KernelArgumentError, match="offsets"):
        marlin.pack(**{**GOOD, **change}, dtype=torch.float16)


@pytest.mark.parametrize(
    ("name", "x", "bias"),
    [
        ("x", torch.zeros(2, 64, dtype=torch.bfloat16), None),
        ("x", torch.zeros(2, 63), None),
        ("x", torch.zeros(()), None),
        ("gradient", torch.zeros(2, 64, requires_grad=True), None),
        ("x", torch.zeros(2, 64, device="meta"), None),
        ("bias", torch.zeros(2, 64), torch.zeros(5)),
        ("bias", torch.zeros(2, 64), torch.zeros(4, dtype=torch.float16)),
        ("bias", torch.zeros(2, 64), torch.zeros(4, device="meta")),
        ("gradient", torch.zeros(2, 64), torch.zeros(4, requires_grad=True)),
        ("x", None, None),
        ("x", [[0.0] * 64], None),
        ("x", torch.zeros(2, 64).to_sparse(), None),
        ("bias", torch.zeros(2, 64), [0.0] * 4),
        ("bias", torch.zeros(2, 64), torch.zeros(4).to_sparse()),
    ],
)
def test_matmul_refuses(name, x, bias):
    weight = marlin.pack(**GOOD, dtype=torch.float32)
    with pytest.raises(KernelArgumentError, match=name):
        marlin.w4a16_matmul(x, weight, bias)


def test_epilogues_refuse():
    weight = marlin.pack(**GOOD, dtype=torch.float32, silu_mul=True)
    x = torch.zeros(2, 64)
    good = torch.zeros(2, 2)
    assert marlin.w4a16_matmul(x, weight, residual=good).shape == (2, 2)
    for bad in (torch.zeros(2, 4), torch.zeros(2), good.half(), good.to("meta"), 1.0):
        with pytest.raises(KernelArgumentError, match="residual"):
            marlin.w4a16_matmul(x, weight, residual=bad)
    with pytest.raises(KernelArgumentError, match="gradient"):
        marlin.w4a16_matmul(x, weight, residual=good.requires_grad_())
    with pytest.raises(KernelArgumentError, match="weight: got Tensor"):
        marlin.w4a16_matmul(x, weight.tensors[0])
    with pytest.raises(KernelArgumentError, match="codes"):
        marlin.pack(**make(5, 64, 32), dtype=torch.float32, silu_mul=True)
