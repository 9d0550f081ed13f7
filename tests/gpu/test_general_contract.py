"""What every general operation keeps on a GPU: views of any kind, nothing at all, tensors that are
somewhere else, and what lies beside its inputs."""

from collections.abc import Callable

import pytest
import torch
from torch.utils._pytree import tree_leaves

from billfish.errors import KernelArgumentError
from billfish.kernels import general
from tests.kernels.general_calls import EMPTY, VIEWS, calls, of_nothing

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
# Of one number for all, or drawn: their results are not held against the CPU's here.
STATISTICAL = {"option_price", "market_paths"}


@pytest.mark.parametrize("name", calls())
def test_views_and_places(name: str) -> None:
    """As on the CPU; views as what is contiguous; inputs stay; a tensor of the CPU is refused."""
    call, there = calls("cuda"), calls("cpu")
    call, there = call[name], there[name]
    before = {argument: tensor.clone() for argument, tensor in call.tensors.items()}
    want = call()
    exact = there()
    assert len(want) == len(exact)
    for got, wanted in zip(want, exact, strict=True):
        assert (got.shape, got.dtype, got.device.type) == (wanted.shape, wanted.dtype, "cuda")
        if name not in STATISTICAL:
            torch.testing.assert_close(got.cpu(), wanted, rtol=2e-5, atol=2e-5, equal_nan=True)
    for argument, tensor in call.tensors.items():
        assert torch.equal(tensor, before[argument]) == (argument not in call.written)
    for view in VIEWS.values():
        for argument in call.tensors:
            if call.contiguous:
                continue
            given = view(call.arguments[argument])
            for got, wanted in zip(call(**{argument: given}), want, strict=True):
                torch.testing.assert_close(got, wanted, rtol=2e-6, atol=2e-6, equal_nan=True)
    if len(call.tensors) > 1 and name not in (*STATISTICAL, "black_scholes"):
        for argument in call.tensors:
            with pytest.raises(KernelArgumentError):
                call(**{argument: there.arguments[argument]})


@pytest.mark.parametrize("name", EMPTY)
def test_of_nothing(name: str) -> None:
    """The same shapes and values as the CPU gives, and no error of a launch without work."""
    want, got = (of_nothing(name, device) for device in ("cpu", "cuda"))
    torch.cuda.synchronize()
    for one, other in zip(want, got, strict=True):
        torch.testing.assert_close(other.cpu(), one, equal_nan=True)


def large(device: str = "cuda") -> dict[str, Callable[[], object]]:
    """Calls of several programs each, which meet in whatever order they end."""
    rng = torch.Generator().manual_seed(1)

    def r(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=rng).to(device)

    g = general
    flat, wide, cube, image = r(1_000_003), r(300, 5_001), r(40, 50, 60), r(2, 300, 257)
    weight, vocabulary, bodies = r(5_001), r(5_001, 64), r(700, 3)
    ends = torch.randint(0, 1_000_003, (500,), generator=rng).sort()[0].to(device)
    stored = torch.cat((torch.zeros(1, dtype=torch.int64), torch.arange(1, 301) ** 2)).to(device)
    columns = torch.randint(0, 300, (90_000,), generator=rng).to(device)
    labels = torch.randint(0, 5_001, (300,), generator=rng).to(device)

    def gradients(function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> object:
        leaves = [x.clone().requires_grad_() for x in inputs]
        return torch.autograd.grad(function(*leaves).sum(), leaves)

    return {
        "reduce": lambda: g.reduce(flat),
        "reduce columns": lambda: g.reduce(wide, dim=0),
        "segment_reduce": lambda: g.segment_reduce(flat, ends),
        "scan": lambda: g.scan(flat, deterministic=True),
        "histogram": lambda: g.histogram(flat, bins=1000, low=-3.0, high=3.0),
        "sort": lambda: g.sort(wide, wide),
        "compact": lambda: g.compact(flat, flat > 0.5),
        "softmax": lambda: g.softmax(flat[None]),
        "layer_norm": lambda: gradients(g.layer_norm, wide, weight),
        "rms_norm": lambda: gradients(lambda x, w: g.rms_norm(x, w, 1e-5), wide, weight),
        "cross_entropy": lambda: gradients(lambda x: g.cross_entropy(x, labels), wide),
        "linear_cross_entropy": lambda: g.linear_cross_entropy(
            vocabulary[:300], vocabulary, labels
        ),
        "heat_equation": lambda: g.heat_equation(cube, 0.1, steps=5),
        "nbody_acceleration": lambda: g.nbody_acceleration(bodies, bodies[:, 0].abs()),
        "option_price": lambda: g.option_price(
            1.0, 1.0, 0.0, 0.2, 1.0, paths=100_000, steps=3, kind="asian", device=device
        ),
        "spmv": lambda: g.spmv(flat[:90_000], columns, stored, weight[:300]),
        "matmul": lambda: g.matmul(wide, vocabulary),
        "separable_convolve2d": lambda: g.separable_convolve2d(image, weight[:9], weight[:7]),
        "bilateral": lambda: g.bilateral(image, 1.5, 0.5),
        "fft": lambda: g.fft(wide),
        "fir": lambda: g.fir(wide, weight[:900])[0],
    }  # fmt: skip


@pytest.mark.parametrize("name", large("cpu"))
def test_the_same_bits_from_run_to_run(name: str) -> None:
    call = large()[name]
    want = tree_leaves(call())
    for _ in range(5):
        for got, wanted in zip(tree_leaves(call()), want, strict=True):
            assert torch.equal(got, wanted)
