"""GPTQ on one matrix, against the method written out literally, and for what it promises."""

import pytest
import torch

from billfish.errors import KernelArgumentError
from billfish.quantization.calibrated import (
    GROUP_SIZES,
    Grid,
    Hessian,
    find_grid,
    quantize_matrix,
    round_to_grid,
)

BF16 = torch.bfloat16
both = pytest.mark.parametrize("symmetric", [True, False])


def layer(n, k, tokens=512, seed=0):
    """A weight and inputs whose columns depend on each other and differ in size, as real ones."""
    g = torch.Generator().manual_seed(seed)
    mix = torch.eye(k) + torch.randn(k, k, generator=g) / k**0.5
    inputs = torch.randn(tokens, k, generator=g) @ mix * torch.randn(k, generator=g).exp()
    return torch.randn(n, k, generator=g) * 0.05, inputs


def hessian_of(inputs):
    hessian = Hessian(inputs.shape[-1])
    hessian.add(inputs)
    return hessian.matrix


def output_error(weight, groups, inputs):
    return (inputs @ (weight - groups.dequantize()).t()).square().sum().item()


def literal_gptq(weight, hessian, grid, order, size, damping):
    """One column after the other in float64: rounded, then the exact least-squares correction of
    those left, from the inverse of what is left of the Hessian."""
    work, h = weight.double().clone(), hessian.double().clone()
    h.diagonal().add_(damping * h.diagonal().mean())
    codes = torch.empty_like(work)
    left = order.tolist()
    while left:
        column, *rest = left
        here = Grid(*(t.double()[:, column // size] for t in (grid.scales, grid.zeros)))
        code = here.codes(work[:, column, None])
        codes[:, column] = code[:, 0]
        error = work[:, column] - here.values(code)[:, 0]
        inverse = torch.linalg.inv(h[left][:, left])
        work[:, rest] -= torch.outer(error, inverse[0, 1:] / inverse[0, 0])
        left = rest
    return codes


@both
def test_against_the_method_written_out(symmetric):
    size, damping = 16, 0.01
    weight, inputs = layer(24, 48)
    hessian = hessian_of(inputs)
    groups = quantize_matrix(
        weight, hessian, group_size=size, symmetric=symmetric, damping=damping, scale_dtype=BF16
    )
    zeros = torch.full((24, 3), 8.0) if groups.zeros is None else groups.zeros.float()
    grid = Grid(groups.scales[..., None], zeros[..., None])
    order = hessian.diagonal().argsort(descending=True, stable=True)
    codes = literal_gptq(weight, hessian, grid, order, size, damping)
    # In float32 a value that stands between two codes may fall to either side.
    assert (codes == groups.codes).float().mean() > 0.99


@both
@pytest.mark.parametrize("act_order", [True, False])
@pytest.mark.parametrize("group_size", GROUP_SIZES)
def test_the_output_is_closer_than_of_rounding(symmetric, act_order, group_size):
    weight, inputs = layer(48, 384)
    nearest = round_to_grid(weight, group_size=group_size, symmetric=symmetric, scale_dtype=BF16)
    groups = quantize_matrix(
        weight, hessian_of(inputs), group_size=group_size, symmetric=symmetric, act_order=act_order
    )
    assert output_error(weight, groups, inputs) < 0.5 * output_error(weight, nearest, inputs)
    for each in (groups, nearest):
        assert each.codes.dtype == torch.uint8
        assert int(each.codes.max()) <= 15
        assert each.scales.shape == (48, 1 if group_size == -1 else 384 // group_size)
        assert torch.equal(each.scales, each.scales.to(BF16).float())
        assert (each.zeros is None) == symmetric
        assert each.g_idx is None
        assert each.group_size == group_size


@both
def test_inputs_that_do_not_depend_on_each_other_leave_nothing_to_correct(symmetric):
    """With a diagonal Hessian GPTQ is rounding to the same grid."""
    weight, _ = layer(16, 64)
    diagonal = torch.rand(64, generator=torch.Generator().manual_seed(1)) + 0.1
    for act_order in (True, False):
        groups = quantize_matrix(
            weight, diagonal.diag(), group_size=32, symmetric=symmetric, act_order=act_order
        )
        zeros = 8 if groups.zeros is None else groups.zeros.float()[..., None]
        codes = Grid(groups.scales[..., None], torch.as_tensor(zeros)).codes(weight.view(16, 2, 32))
        assert torch.equal(codes.flatten(1), groups.codes.float())


@both
def test_rounding_is_to_the_nearest_value(symmetric):
    weight, _ = layer(8, 64)
    groups = round_to_grid(weight, group_size=16, symmetric=symmetric, scale_dtype=torch.float32)
    error = (groups.dequantize() - weight).abs().view(8, 4, 16)
    steps = groups.scales.abs()[..., None]
    high = torch.where(groups.codes == 15, 1.01, 0.51).view(
        8, 4, 16
    )  # the end opposite the largest
    assert (error <= high * steps).all()
    assert (error <= 0.51 * steps).float().mean() > 0.9


def test_a_better_grid_is_never_worse():
    weight = torch.randn(32, 4, 64, generator=torch.Generator().manual_seed(2)) ** 3
    importance = torch.rand(4, 64, generator=torch.Generator().manual_seed(3))
    for symmetric in (True, False):
        options = {"symmetric": symmetric, "scale_dtype": BF16}
        losses = []
        for grid in (find_grid(weight, **options),
                     find_grid(weight, importance=importance, **options)):  # fmt: skip
            error = grid.values(grid.codes(weight)) - weight
            losses.append((error.square() * importance).sum(-1))
        assert (losses[1] <= losses[0]).all()
        assert losses[1].sum() < 0.97 * losses[0].sum()


@both
def test_zeros_and_one_value_stay(symmetric):
    weight = torch.zeros(2, 64)
    weight[1, 32:] = 0.5
    weight[0, 32:] = -0.25
    for groups in (
        round_to_grid(weight, group_size=32, symmetric=symmetric, scale_dtype=BF16),
        quantize_matrix(weight, torch.eye(64), group_size=32, symmetric=symmetric),
    ):
        assert torch.equal(groups.dequantize()[:, :32], torch.zeros(2, 32))
        error = groups.dequantize() - weight
        assert (error.abs() <= 0.5 * 2**-8).all()


@pytest.mark.parametrize("act_order", [True, False])
def test_inputs_never_seen_are_rounded(act_order):
    weight, inputs = layer(16, 128)
    inputs[:, ::5] = 0
    groups = quantize_matrix(weight, hessian_of(inputs), group_size=32, act_order=act_order)
    error = (groups.dequantize() - weight)[:, ::5].abs()
    scales = groups.scales[:, groups.group_of_column()][:, ::5].abs()
    assert (error <= 4 * scales).all()
    groups = quantize_matrix(weight, torch.zeros(128, 128), group_size=32, act_order=act_order)
    assert (groups.dequantize() - weight).abs().max() < 0.1


def test_fewer_tokens_than_columns():
    """The Hessian has no inverse of its own."""
    weight, inputs = layer(16, 256, tokens=20)
    groups = quantize_matrix(weight, hessian_of(inputs), group_size=64, damping=1e-4)
    nearest = round_to_grid(weight, group_size=64, scale_dtype=BF16)
    assert output_error(weight, groups, inputs) < 0.2 * output_error(weight, nearest, inputs)


def test_a_hessian_added_up_in_pieces():
    _, inputs = layer(1, 32)
    pieces = Hessian(32)
    pieces.add(inputs[:100].bfloat16())
    pieces.add(inputs[100:].view(4, 103, 32))
    assert pieces.count == 512
    exact = torch.cat([inputs[:100].bfloat16().float(), inputs[100:]]).double()
    assert torch.allclose(pieces.matrix.double(), exact.t() @ exact, rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"weight": torch.zeros(4, 64, dtype=torch.int8)}, "weight: got torch.int8"),
        ({"weight": torch.zeros(64)}, "weight: got torch.float32"),
        ({"weight": torch.full((4, 64), torch.nan)}, "weight: got values that are not finite"),
        ({"weight": torch.full((4, 64), 3e38)}, "too large for the dtype of scales"),
        ({"group_size": 48}, "group_size: got 48, expected one of"),
        ({"group_size": 128}, "group_size: got 128, of which 64 columns are no multiple"),
        (
            {"hessian": torch.eye(63)},
            r"hessian: got \(63, 63\), expected finite numbers \[64, 64\]",
        ),
        ({"hessian": torch.full((64, 64), torch.inf)}, "hessian: got"),
        ({"damping": 0.0}, "damping: got 0.0"),
        ({"damping": float("nan")}, "damping: got nan"),
    ],
)
def test_wrong_arguments(changes, reason):
    arguments = {"weight": torch.ones(4, 64), "hessian": torch.eye(64), "group_size": 32}
    with pytest.raises(KernelArgumentError, match=reason):
        quantize_matrix(**arguments | changes, scale_dtype=torch.float16)
