"""What every general operation keeps on a GPU: views of any kind, nothing at all, tensors that are
somewhere else, and what lies beside its inputs."""

import pytest
import torch

from billfish.errors import KernelArgumentError
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
