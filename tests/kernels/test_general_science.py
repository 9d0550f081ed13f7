"""The kernels of scientific computing by their public functions, on the CPU."""

import math

import pytest
import torch
from torch.library import opcheck

from billfish.errors import KernelArgumentError
from billfish.kernels import general

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
ROUNDING = {
    torch.float64: 1e-14, torch.float32: 2e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11,
}  # fmt: skip


def draw(*shape, dtype=torch.float32, seed=0):
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=rng, dtype=torch.float64).to(dtype)


def close(got, want, tolerance=None):
    tolerance = tolerance or ROUNDING[got.dtype]
    torch.testing.assert_close(got.double(), want.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("boundary", ["dirichlet", "neumann", "periodic"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_heat_equation(dtype, boundary):
    for shape in ((1, 1, 1), (2, 1, 3), (4, 5, 6)):
        x, value = draw(*shape, dtype=dtype), 1.5 if boundary == "dirichlet" else 0.0
        for steps in (0, 1, 7):
            want = general.heat_equation_reference(
                x.double(), (0.1, 0.2, 0.05), steps, boundary, value
            )
            got = general.heat_equation(x, (0.1, 0.2, 0.05), steps, boundary, value)
            close(got, want)
            assert got.is_contiguous()
            assert got.dtype == dtype
    assert general.heat_equation(draw(3, 0, 2), 0.1, 3, boundary).shape == (3, 0, 2)


def test_heat_equation_against_its_solution():
    """A product of sines decays by a factor a step, which is known exactly."""
    n, steps = (8, 12, 15), 50
    rate = (0.05, 0.1, 0.15)
    walls, ring, closed = torch.ones(n).double(), torch.ones(n).double(), torch.ones(n).double()
    decay = dict.fromkeys(("walls", "ring", "closed"), 1.0)
    for dim, (size, factor) in enumerate(zip(n, rate, strict=True)):
        shape = [size if d == dim else 1 for d in range(3)]
        i = torch.arange(size).double().view(shape)
        walls *= torch.sin(math.pi * (i + 1) / (size + 1))
        ring *= torch.cos(2 * math.pi * i / size)
        closed *= torch.cos(math.pi * (i + 0.5) / size)
        decay["walls"] -= 4 * factor * math.sin(math.pi / (2 * (size + 1))) ** 2
        decay["ring"] -= 4 * factor * math.sin(math.pi / size) ** 2
        decay["closed"] -= 4 * factor * math.sin(math.pi / (2 * size)) ** 2
    for x, boundary, name in (
        (walls, "dirichlet", "walls"), (ring, "periodic", "ring"), (closed, "neumann", "closed"),
    ):  # fmt: skip
        got = general.heat_equation(x, rate, steps, boundary)
        torch.testing.assert_close(got, x * decay[name] ** steps, rtol=1e-12, atol=1e-13)


def test_heat_equation_keeps_heat():
    x = draw(5, 6, 7, dtype=torch.float64)
    for boundary in ("neumann", "periodic"):
        got = general.heat_equation(x, 1 / 6, 30, boundary)
        torch.testing.assert_close(got.sum(), x.sum(), rtol=1e-12, atol=1e-12)
        assert got.std() < 0.2 * x.std()
    strided = draw(8, 6, 9)[::2, 1:, ::3].transpose(0, 2)
    close(general.heat_equation(strided, 0.1, 2), general.heat_equation(strided.clone(), 0.1, 2))


BAD = {
    "heat shape": lambda: general.heat_equation(draw(3, 3), 0.1),
    "heat dtype": lambda: general.heat_equation(draw(3, 3, 3).int(), 0.1),
    "heat unstable": lambda: general.heat_equation(draw(3, 3, 3), 0.17),
    "heat negative": lambda: general.heat_equation(draw(3, 3, 3), -0.1),
    "heat not a number": lambda: general.heat_equation(draw(3, 3, 3), math.nan),
    "heat two rates": lambda: general.heat_equation(draw(3, 3, 3), (0.1, 0.1)),
    "heat steps": lambda: general.heat_equation(draw(3, 3, 3), 0.1, -1),
    "heat boundary": lambda: general.heat_equation(draw(3, 3, 3), 0.1, 1, "open"),
    "heat value": lambda: general.heat_equation(draw(3, 3, 3), 0.1, 1, "periodic", 2.0),
    "heat gradient": lambda: general.heat_equation(draw(3, 3, 3).requires_grad_(), 0.1),
    "heat device": lambda: general.heat_equation(draw(3, 3, 3).to("meta"), 0.1),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(name):
    with pytest.raises(KernelArgumentError):
        BAD[name]()


def test_operations_as_torch_sees_them():
    ops = torch.ops.billfish
    for op, arguments in ((ops.heat_equation, (draw(2, 3, 4), 0.1, 0.1, 0.2, 2, "neumann", 0.0)),):
        opcheck(op.default, arguments)
