"""The fused norm, rotation and block write on the CPU, against the float64 reference."""

import pytest
import torch
from torch.library import opcheck

from billfish.errors import KernelArgumentError
from billfish.kernels import paged_attention as pa
from billfish.kernels.paged_attention import reference

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def arguments(dtype=torch.float32, head_dim=24, rotary_dim=16, norm=True):
    rng = torch.Generator().manual_seed(0)
    qkv = torch.randn(7, 8, head_dim, generator=rng).to(dtype)
    query, key, value = qkv.split((4, 2, 2), dim=1)
    caches = torch.full((2, 3, 4, 2, head_dim), float("nan"), dtype=dtype)
    slots = torch.tensor([3, -1, 11, 0, -1, 7, 5])
    options = {}
    if rotary_dim:
        options["positions"] = torch.tensor([4, 0, 9, 1, 1, 8, 3])
        options["cos_sin"] = torch.rand(10, rotary_dim, generator=rng)
    if norm:
        options["q_norm"], options["k_norm"] = torch.rand(2, head_dim, generator=rng).to(dtype)
    return (query, key, value, caches[0], caches[1], slots), options


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("rotary_dim", [0, 16, 24])
@pytest.mark.parametrize("norm", [False, True])
def test_against_float64(dtype, rotary_dim, norm):
    (query, key, value, *caches, slots), options = arguments(dtype, 24, rotary_dim, norm)
    exact_caches = [torch.full(cache.shape, float("nan")).double() for cache in caches]
    wide = {k: v.double() if v.is_floating_point() else v for k, v in options.items()}
    expected = reference.rotate_and_write(
        query.double(), key.double(), value.double(), *exact_caches, slots, **wide
    )
    out = pa.rotate_and_write(query, key, value, *caches, slots, **options)
    assert out.is_contiguous()
    tolerance = {"rtol": TOLERANCE[dtype], "atol": 1e-6, "equal_nan": True}
    torch.testing.assert_close(out.double(), expected, **tolerance)
    for cache, exact in zip(caches, exact_caches, strict=True):
        torch.testing.assert_close(cache.double(), exact, **tolerance)


def test_the_query_is_new_memory():
    (query, *rest), _ = arguments(rotary_dim=0, norm=False)
    before = query.clone()
    pa.rotate_and_write(query, *rest).zero_()
    assert torch.equal(query, before)


def test_opcheck_and_compile():
    step, options = arguments()
    names = ("positions", "cos_sin", "q_norm", "k_norm")
    op = torch.ops.billfish.rotate_and_write.default
    opcheck(op, (*step, *(options[name] for name in names), 1e-6))
    compiled = torch.compile(pa.rotate_and_write, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*step, **options), pa.rotate_and_write(*step, **options))


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"positions": None}, "both or neither"),
        ({"k_norm": None}, "both or neither"),
        ({"cos_sin": torch.rand(10, 7)}, "cos_sin"),
        ({"cos_sin": torch.rand(10, 26)}, "cos_sin"),
        ({"cos_sin": torch.rand(10, 16).double()}, "cos_sin"),
        ({"positions": torch.arange(6)}, "positions"),
        ({"positions": torch.full((7,), 10)}, "positions"),
        ({"q_norm": torch.rand(23)}, "q_norm"),
    ],
)
def test_wrong_arguments(changed, match):
    step, options = arguments()
    with pytest.raises(KernelArgumentError, match=match):
        pa.rotate_and_write(*step, **{**options, **changed})
    assert step[3].isnan().all()


def test_wrong_query():
    (query, *rest), options = arguments()
    with pytest.raises(KernelArgumentError, match="query"):
        pa.rotate_and_write(query[:6], *rest, **options)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_no_gradient_is_lost_in_silence(place):
    step, options = arguments()
    followed = list(step)
    followed[place] = step[place].clone().requires_grad_()
    with pytest.raises(KernelArgumentError, match="gradient"):
        pa.rotate_and_write(*followed, **options)
    if place:
        with pytest.raises(KernelArgumentError, match="gradient"):
            pa.write_kv(*followed[1:])
    with torch.no_grad():
        pa.rotate_and_write(*followed, **options)
