"""INT4 layers in anybody's module: rounding, replacing, moving, saving, compiling."""

import copy
import io

import pytest
import torch
from torch import nn

from billfish.errors import KernelArgumentError
from billfish.kernels import marlin
from billfish.layers.linear import Int8Linear, Linear, quantized_head
from billfish.nn import QuantLinear, quantize_
from billfish.quantization.int4 import round_to_nearest


def dequantized(weight: torch.Tensor, group_size: int, symmetric: bool) -> torch.Tensor:
    groups = round_to_nearest(weight, group_size, symmetric=symmetric)
    size = weight.shape[1] if group_size == -1 else group_size
    column = torch.arange(weight.shape[1]) // size
    scales = groups.scales.double()[:, column]
    if groups.offsets is None:
        return scales * (groups.codes.double() - 8)
    return scales * groups.codes.double() + groups.offsets.double()[:, column]


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("k", "group_size"), [(64, 16), (72, 32), (5, 128), (100, -1)])
def test_rounding_is_as_near_as_the_scale_allows(k: int, group_size: int, symmetric: bool) -> None:
    generator = torch.Generator().manual_seed(k)
    weight = torch.randn(7, k, generator=generator).double()
    groups = round_to_nearest(weight, group_size, symmetric=symmetric)
    size = k if group_size == -1 else group_size
    steps = groups.scales.abs().double()[:, torch.arange(k) // size]
    error = (dequantized(weight, group_size, symmetric) - weight).abs()
    limit = 1.0 if symmetric else 0.5
    assert bool((error <= steps * limit * (1 + 1e-5)).all())
    # All but the far end of a symmetric group is rounded to the nearest.
    assert (error <= steps * 0.5 * (1 + 1e-5)).double().mean() > 0.9
    # The scale is as small as the values allow: it shrinks with them.
    spread = steps.unique().max()
    assert float(spread) <= float(weight.abs().max()) / (8 if symmetric else 7)


@pytest.mark.parametrize("symmetric", [True, False])
def test_extremes_are_exact(symmetric: bool) -> None:
    weight = torch.tensor([[0.5, -0.25, 0.1, 0.0], [-3.0, 1.0, 2.0, 0.0], [7.0, 7.0, 7.0, 7.0]])
    got = dequantized(weight, -1, symmetric)
    for row, column in ((0, 0), (1, 0), (2, 3)):
        assert float(got[row, column]) == pytest.approx(float(weight[row, column]), rel=1e-6)
    assert torch.equal(dequantized(torch.zeros(2, 4), -1, symmetric), torch.zeros(2, 4).double())


@pytest.mark.parametrize(
    ("name", "weight", "group_size"),
    [
        ("weight", torch.zeros(4), 32), ("weight", torch.zeros(2, 4).int(), 32),
        ("weight", torch.zeros(0, 4), 32), ("weight", torch.full((2, 4), float("nan")), 32),
        ("group_size", torch.zeros(2, 4), 0), ("group_size", torch.zeros(2, 4), -2),
    ],
)  # fmt: skip
def test_rounding_refuses(name: str, weight: torch.Tensor, group_size: int) -> None:
    with pytest.raises(KernelArgumentError, match=name):
        round_to_nearest(weight, group_size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [True, False])
def test_a_drop_in_for_linear(dtype: torch.dtype, bias: bool) -> None:
    torch.manual_seed(0)
    dense = nn.Linear(96, 40, bias=bias, dtype=dtype)
    layer = QuantLinear.from_linear(dense, group_size=32)
    assert (layer.in_features, layer.out_features) == (96, 40)
    exact = dequantized(dense.weight.detach(), 32, True)
    for shape in ((96,), (3, 96), (2, 0, 96), (2, 5, 96)):
        x = torch.randn(shape, dtype=dtype)
        expected = x.double() @ exact.T + (dense.bias.double() if bias else 0)
        y = layer(x)
        assert y.shape == expected.shape
        assert y.dtype == dtype
        tolerance = 1e-5 if dtype == torch.float32 else 0.03
        torch.testing.assert_close(y.double(), expected, rtol=tolerance, atol=tolerance)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(64, 64)
        self.body = nn.Sequential(nn.Linear(64, 64), nn.GELU(), self.shared)
        self.lm_head = nn.Linear(64, 10, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.body(self.shared(x)))


def test_a_model_is_quantized_in_place_but_for_what_is_left_out() -> None:
    torch.manual_seed(0)
    model, x = Model().eval(), torch.randn(5, 64)
    with torch.no_grad():
        before = model(x)
        assert quantize_(model, group_size=32, only=lambda name, _: name != "lm_head") is model
        after = model(x)
    assert type(model.lm_head) is nn.Linear
    assert type(model.body[0]) is QuantLinear
    assert model.shared is model.body[2]
    assert not model.shared.training
    error = (after - before).norm() / before.norm()
    assert 0 < error < 0.2


def test_nothing_is_replaced_where_one_layer_cannot_be() -> None:
    model = Model()
    model.lm_head.weight.data[3, 4] = float("inf")
    with pytest.raises(KernelArgumentError, match="not finite"):
        quantize_(model)
    assert type(model.shared) is nn.Linear
    with pytest.raises(KernelArgumentError, match="bare Linear"):
        quantize_(nn.Linear(4, 4))


def test_casting_packs_anew_and_the_bias_follows() -> None:
    torch.manual_seed(0)
    layer = QuantLinear.from_linear(nn.Linear(64, 64), group_size=32)
    codes, x = layer.weight.unpack()[0], torch.randn(2, 64)
    expected = layer(x)
    layer.to(torch.bfloat16)
    assert layer.weight.dtype == layer.bias.dtype == torch.bfloat16
    assert torch.equal(layer.weight.unpack()[0], codes)
    torch.testing.assert_close(layer(x.bfloat16()).float(), expected, rtol=0.05, atol=0.05)


def test_a_layer_that_cannot_be_cast_stays_whole() -> None:
    layer, x = QuantLinear.from_linear(nn.Linear(64, 64), group_size=32), torch.randn(2, 64)
    expected = layer(x)
    for cast in (layer.double, lambda: layer.to("meta")):
        with pytest.raises(KernelArgumentError):
            cast()
        assert layer.bias is not None
        assert layer.bias.dtype == layer.weight.dtype == torch.float32
        assert torch.equal(layer(x), expected)


def test_a_model_is_copied_and_pickled_like_any_other() -> None:
    torch.manual_seed(0)
    model, x = quantize_(Model(), group_size=32), torch.randn(5, 64)
    expected = model(x)
    twin = copy.deepcopy(model)
    assert twin.shared is twin.body[2]
    assert twin.shared.weight.tensors[0] is not model.shared.weight.tensors[0]
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (twin, torch.load(file, weights_only=False)):
        assert torch.equal(other(x), expected)


@pytest.mark.parametrize("symmetric", [True, False])
def test_saved_and_loaded_with_the_model(symmetric: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 64)
    model = quantize_(Model(), group_size=32, symmetric=symmetric)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other = quantize_(Model(), group_size=16)
    other.load_state_dict(torch.load(file, weights_only=True))
    with torch.no_grad():
        assert torch.equal(other(x), model(x))
    assert other.shared.weight.group_size == 32
    with pytest.raises(KernelArgumentError, match="saved weight"):
        QuantLinear.from_linear(nn.Linear(64, 32)).set_extra_state(model.shared.get_extra_state())


def test_what_is_loaded_comes_in_the_dtype_of_the_layer() -> None:
    """Weight and bias alike, as in a dense layer: else neither dtype would do for x."""
    torch.manual_seed(0)
    saved = QuantLinear.from_linear(nn.Linear(64, 32).bfloat16(), group_size=32)
    x = torch.randn(3, 64)
    for dtype in (torch.float16, torch.float32, torch.bfloat16):
        layer = QuantLinear.from_linear(nn.Linear(64, 32).to(dtype))
        layer.load_state_dict(saved.state_dict())
        assert layer.weight.dtype == layer.bias.dtype == dtype
        y, want = layer(x.to(dtype)), saved(x.bfloat16())
        torch.testing.assert_close(y.float(), want.float(), rtol=0.05, atol=0.05)
        assert torch.equal(layer.weight.unpack()[0], saved.weight.unpack()[0])
    for damaged in ({"codes": None}, None, {**saved.get_extra_state(), "codes": 3}):
        with pytest.raises(KernelArgumentError, match="saved weight"):
            saved.set_extra_state(damaged)
    assert saved(x.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gate_and_up_in_one_layer(dtype: torch.dtype) -> None:
    """silu(gate) * up of merged rows, with a residual; saved, loaded and cast with what it is."""
    rng = torch.Generator().manual_seed(3)
    merged = torch.randn(48, 64, generator=rng) / 8
    groups = round_to_nearest(merged, 32)
    weight = marlin.pack(groups.codes, groups.scales, group_size=32, dtype=dtype, silu_mul=True)
    layer = QuantLinear(weight, batch_invariant=True)
    assert (layer.in_features, layer.out_features) == (64, 24)
    assert "silu_mul" in repr(layer)
    x = torch.randn(5, 64, generator=rng).to(dtype)
    residual = torch.randn(5, 24, generator=rng).to(dtype)
    gate, up = (x.double() @ dequantized(merged, 32, True).T).chunk(2, dim=1)
    expected = gate * torch.sigmoid(gate) * up
    tolerance = 1e-4 if dtype == torch.float32 else 0.03
    torch.testing.assert_close(layer(x).double(), expected, rtol=tolerance, atol=tolerance)
    both = layer(x, residual)
    torch.testing.assert_close(
        both.double(), expected + residual.double(), rtol=tolerance, atol=tolerance
    )
    assert torch.equal(layer(x[3:4], residual[3:4]), both[3:4])
    other = QuantLinear(marlin.pack(groups.codes, groups.scales, group_size=32, dtype=dtype))
    other.load_state_dict(layer.state_dict())
    assert other.weight.silu_mul
    other.batch_invariant = True  # how to run it is no part of what is saved
    assert torch.equal(other(x), layer(x))
    assert layer.to(torch.float16).weight.silu_mul


@pytest.mark.parametrize("symmetric", [True, False])
def test_modules_of_torch_that_read_weights_themselves(symmetric: bool) -> None:
    """In inference a layer of torch's encoder calls one function with the weights of its linear
    layers, unless these are of another kind."""
    torch.manual_seed(0)
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(64, 4, 96, batch_first=True), 2, enable_nested_tensor=False
    ).eval()
    x = torch.randn(2, 5, 64)
    quantize_(encoder, group_size=32, symmetric=symmetric)
    layers = [module for module in encoder.modules() if isinstance(module, QuantLinear)]
    assert len(layers) == 4
    with torch.no_grad():
        y = encoder(x)
        dense = copy.deepcopy(encoder)
        for layer in dense.layers:
            for name in ("linear1", "linear2"):
                packed = getattr(layer, name)
                linear = nn.Linear(packed.in_features, packed.out_features)
                linear.weight.copy_(packed.weight.dequantize())
                linear.bias.copy_(packed.bias)
                setattr(layer, name, linear)
        torch.testing.assert_close(y, dense(x), rtol=1e-3, atol=1e-4)


def test_compiles_without_a_break() -> None:
    torch.manual_seed(0)
    model, x = quantize_(Model(), group_size=32).eval(), torch.randn(5, 64)
    with torch.no_grad():
        expected = model(x)
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(x), expected)


def test_compiled_graphs_take_the_weights_where_they_are() -> None:
    """What is no parameter and not known to stay in place is copied at every replay of a graph."""
    model, x = quantize_(Model(), group_size=32).eval(), torch.randn(5, 64)
    taken = {}

    def backend(graph, inputs):
        for node in graph.graph.find_nodes(op="placeholder"):
            kind = node.meta.get("tensor_dict", {}).get("_dynamo_static_input_type")
            taken[node.meta["example_value"].dtype, node.name] = kind
        return graph.forward

    torch.compiler.reset()
    with torch.no_grad():
        torch.compile(model, backend=backend, fullgraph=True)(x)
    codes = [kind for (dtype, _), kind in taken.items() if dtype == torch.uint8]
    assert len(codes) == 3
    assert all(codes)
    assert sum(kind is None for kind in taken.values()) == 1  # x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("k", [128, 200, 576])
def test_an_8_bit_layer_from_two_int4_ones(dtype: torch.dtype, k: int) -> None:
    """Off by at most half a step of 1 / 119 of the largest weight of its group, and rounding."""
    rng = torch.Generator().manual_seed(0)
    weight = torch.randn(48, k, generator=rng).to(dtype)
    layer = Int8Linear.from_dense(weight)
    dequantized = layer.high.weight.dequantize(torch.float64)
    dequantized += layer.low.weight.dequantize(torch.float64)
    groups = torch.nn.functional.pad(weight.double(), (0, -k % 128)).view(48, -1, 128)
    largest = groups.abs().amax(-1).repeat_interleave(128, dim=1)[:, :k]
    slack = 0.52 if dtype == torch.float32 else 1.1  # the scale itself is rounded
    assert ((dequantized - weight.double()).abs() <= slack * largest / 119).all()
    x = torch.randn(3, k, generator=rng).to(dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    want = x.double() @ dequantized.T
    error = (layer(x).double() - want).norm() / want.norm()
    assert error < tolerance


def test_only_a_dense_head_is_rounded() -> None:
    dense = Linear(torch.randn(64, 128, generator=torch.Generator().manual_seed(0)))
    assert isinstance(quantized_head(dense, "int8"), Int8Linear)
    packed = quantized_head(dense, "int4")
    assert isinstance(packed, QuantLinear)
    assert packed.weight.group_size == 32
    assert quantized_head(packed, "int8") is packed
