"""Normalization, rotary embedding and gated activation on the CPU, against float64."""

import pytest
import torch

from billfish.errors import KernelArgumentError
from billfish.kernels import general
from tests.kernels.general_inputs import draw

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def assert_rounded_once(result, exact, dtype, slack):
    """Within half a unit in the last place of dtype, and `slack` for float32 arithmetic."""
    assert result.dtype == dtype
    assert result.is_contiguous()
    assert result.shape == exact.shape
    tiny = 2.0**-25 if dtype == torch.float16 else 0.0
    bound = ROUNDING[dtype] * exact.abs() + slack + tiny
    assert bool(((result.double() - exact).abs() <= bound).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 576), (0, 64), (7, 33), (2, 3, 64), (64,), (5, 1)])
def test_rms_norm(dtype, shape):
    x, weight = draw(*shape, dtype=dtype), draw(shape[-1], dtype=dtype, seed=1)
    before = x.clone()
    exact = general.rms_norm_reference(x.double(), weight.double(), 1e-5)
    assert_rounded_once(general.rms_norm(x, weight, 1e-5), exact, dtype, 4e-7 * exact.abs() + 1e-9)
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_of_a_sum_is_the_norm_of_the_rounded_sum(dtype):
    x, residual = draw(9, 64, dtype=dtype), draw(9, 64, dtype=dtype, seed=2)
    weight = draw(64, dtype=dtype, seed=1)
    before = (x.clone(), residual.clone())
    out, total = general.rms_norm(x, weight, 1e-6, residual)
    assert torch.equal(total, x + residual)
    assert torch.equal(out, general.rms_norm(total, weight, 1e-6))
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])


def test_rms_norm_strides_and_zeros():
    wide = draw(4, 2, 64)
    assert general.rms_norm(wide[:, 1], torch.ones(64), 1e-5).is_contiguous()
    out, total = general.rms_norm(wide[:, 1], torch.ones(64), 1e-5, wide[:, 0])
    assert out.is_contiguous()
    assert total.is_contiguous()
    assert torch.equal(general.rms_norm(torch.zeros(2, 8), torch.ones(8), 1e-5), torch.zeros(2, 8))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (64, 32), (80, 2), (6, 6)])
def test_rotary_embedding(dtype, head_dim, rotary_dim):
    merged = draw(5, 7 * head_dim, dtype=dtype).view(5, 7, head_dim)
    query, key = merged[:, :4], merged[:, 4:6]
    before = merged.clone()
    angles = draw(11, rotary_dim // 2, seed=3) * 3
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
    positions = torch.tensor([10, 0, 3, 3, 7])
    exact = general.rotary_embedding_reference(
        query.double(), key.double(), positions, cos_sin.double()
    )
    result = general.rotary_embedding(query, key, positions, cos_sin)
    for got, wanted in zip(result, exact, strict=True):
        assert_rounded_once(got, wanted, dtype, 1e-6)
    assert torch.equal(result[0][..., rotary_dim:], query[..., rotary_dim:])
    assert torch.equal(merged, before)


def test_rotary_embedding_depends_on_distance_only():
    """Scores of rotated queries and keys are a function of the difference of their positions."""
    frequencies = 10000.0 ** (-torch.arange(8) / 8)
    angles = torch.arange(64).unsqueeze(1) * frequencies
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
    query, key = draw(1, 1, 16), draw(1, 1, 16, seed=1)
    scores = []
    for shift in (0, 20):
        rotated, _ = general.rotary_embedding(query, key, torch.tensor([9 + shift]), cos_sin)
        _, turned = general.rotary_embedding(query, key, torch.tensor([4 + shift]), cos_sin)
        scores.append((rotated * turned).sum().item())
    assert scores[0] == pytest.approx(scores[1], abs=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 3072), (0, 8), (2, 3, 34), (2,)])
def test_silu_mul(dtype, shape):
    gate_up = draw(*shape, dtype=dtype) * 4
    before = gate_up.clone()
    exact = general.silu_mul_reference(gate_up.double())
    assert_rounded_once(general.silu_mul(gate_up), exact, dtype, 5e-7 * exact.abs() + 1e-9)
    assert torch.equal(gate_up, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 3072), (0, 8), (2, 3, 34), (2,)])
def test_gelu_tanh_mul(dtype, shape):
    gate_up = draw(*shape, dtype=dtype) * 2
    before = gate_up.clone()
    exact = general.gelu_tanh_mul_reference(gate_up.double())
    # Where the tanh is nearly -1, what is left of 1 has float32's absolute accuracy.
    gate, up = gate_up.double().chunk(2, dim=-1)
    slack = 5e-7 * exact.abs() + 1e-7 * (gate * up).abs()
    assert_rounded_once(general.gelu_tanh_mul(gate_up), exact, dtype, slack)
    assert torch.equal(gate_up, before)


def test_gelu_tanh_mul_at_the_extremes():
    gate_up = torch.tensor([[-1e4, 1e4, 0.0, 2.0, 2.0, 3.0]])
    assert torch.equal(general.gelu_tanh_mul(gate_up), torch.tensor([[-0.0, 2e4, 0.0]]))
    with pytest.raises(KernelArgumentError, match="gate_up"):
        general.gelu_tanh_mul(torch.zeros(3, 5))


def test_silu_mul_at_the_extremes():
    gate_up = torch.tensor([[-1e4, 1e4, -90.0, 2.0, 2.0, 3.0]])
    assert torch.equal(general.silu_mul(gate_up)[0, :2], torch.tensor([-0.0, 2e4]))


X, W = torch.zeros(2, 8), torch.zeros(8)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("x", (X.double(), W, 1e-5)),
        ("x.device", (X.to("meta"), W, 1e-5)),
        ("weight", (X, torch.zeros(7), 1e-5)),
        ("weight", (X, W.half(), 1e-5)),
        ("weight", (X, W.to("meta"), 1e-5)),
        ("weight", (torch.zeros(()), W, 1e-5)),
        ("eps", (X, W, -1.0)),
        ("eps", (X, W, float("nan"))),
        ("residual", (X, W, 1e-5, torch.zeros(1, 8))),
        ("residual", (X, W, 1e-5, X.half())),
    ],
)
def test_rms_norm_refuses(name, arguments):
    with pytest.raises(KernelArgumentError, match=name):
        general.rms_norm(*arguments)


ROTARY = {
    "query": torch.zeros(3, 2, 8),
    "key": torch.zeros(3, 1, 8),
    "positions": torch.zeros(3, dtype=torch.int64),
    "cos_sin": torch.zeros(4, 8),
}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("query", torch.zeros(3, 16)),
        ("query", torch.zeros(3, 2, 8, dtype=torch.float64)),
        ("key", torch.zeros(2, 1, 8)),
        ("key", torch.zeros(3, 1, 6)),
        ("key", torch.zeros(3, 1, 8, dtype=torch.float16)),
        ("positions", torch.zeros(3, dtype=torch.int32)),
        ("positions", torch.zeros(2, dtype=torch.int64)),
        ("positions", torch.tensor([0, 1, 4])),
        ("positions", torch.tensor([0, 1, -1])),
        ("cos_sin", torch.zeros(4, 10)),
        ("cos_sin", torch.zeros(4, 7)),
        ("cos_sin", torch.zeros(4, 8, dtype=torch.bfloat16)),
        ("cos_sin", torch.zeros(4, 8, device="meta")),
    ],
)
def test_rotary_embedding_refuses(name, value):
    with pytest.raises(KernelArgumentError, match=name):
        general.rotary_embedding(**{**ROTARY, name: value})


@pytest.mark.parametrize(
    "gate_up",
    [
        torch.zeros(2, 7),
        torch.zeros(2, 0),
        torch.zeros(()),
        torch.zeros(2, 8, dtype=torch.int32),
        torch.zeros(2, 8, device="meta"),
    ],
)
def test_silu_mul_refuses(gate_up):
    with pytest.raises(KernelArgumentError, match="gate_up"):
        general.silu_mul(gate_up)
