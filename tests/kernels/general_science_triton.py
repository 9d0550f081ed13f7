"""The kernels of scientific computing, run in Triton's interpreter against their definitions.

Run by test_general_science_triton.py in a process of its own. By hand:
TRITON_INTERPRET=1 pytest tests/kernels/general_science_triton.py
"""

import pytest
import torch

from billfish.kernels import general
from billfish.kernels.general import (
    matmul_gpu,
    monte_carlo,
    monte_carlo_gpu,
    nbody_gpu,
    spmv_gpu,
    stencil_gpu,
)
from tests.kernels.general_inputs import draw

ROUNDING = {torch.float64: 1e-14, torch.float32: 2e-6, torch.float16: 2.0**-11}


def close(got, want, tolerance=None):
    tolerance = tolerance or ROUNDING[got.dtype]
    torch.testing.assert_close(got.double(), want.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("boundary", "dtype", "shape", "fused"),
    [
        ("dirichlet", torch.float32, (2, 5, 9), 2),
        ("dirichlet", torch.float64, (1, 1, 1), 1),
        ("neumann", torch.float64, (2, 9, 1), 3),
        ("neumann", torch.float16, (1, 3, 20), 1),
        ("periodic", torch.float32, (2, 1, 9), 4),
        ("periodic", torch.float64, (1, 9, 3), 2),
        # Rows that threads read by the 16 bytes.
        ("dirichlet", torch.float32, (2, 3, 32), 1),
        ("dirichlet", torch.float16, (2, 2, 16), 1),
        ("neumann", torch.float32, (2, 3, 16), 1),
        ("periodic", torch.float64, (1, 3, 32), 1),
    ],
)
def test_heat_equation(boundary, dtype, shape, fused):
    x, value = draw(*shape, dtype=dtype), 1.3 if boundary == "dirichlet" else 0.0
    rate = (0.125, 0.0625, 0.1)
    want = general.heat_equation_reference(x.double(), rate, 3, boundary, value)
    got = stencil_gpu.heat_equation(
        x, *rate, 3, boundary, value, fused=fused, rows=16 if fused > 2 else 8, columns=16
    )
    close(got, want)
    assert got.is_contiguous()


def test_heat_equation_of_views_in_chunks():
    x = draw(40, 6, 14)[::2, 1:, ::2]
    want = general.heat_equation_reference(x.double(), (0.1,) * 3, 1)
    for coalesced in (True, False):
        got = stencil_gpu.heat_equation(
            x, 0.1, 0.1, 0.1, 1, "dirichlet", 0.0, fused=2, coalesced=coalesced, columns=32
        )
        close(got, want)
    assert stencil_gpu.heat_equation(x[:0], 0.1, 0.1, 0.1, 2, "periodic", 0.0).shape == (0, 5, 7)


def test_heat_equation_under_another_default_device():
    """What the host asks of the border's value it asks of its own memory."""
    x = draw(2, 3, 4, dtype=torch.float16)
    want = general.heat_equation_reference(x.double(), (0.1,) * 3, 1, "dirichlet", 1.3)
    with torch.device("meta"):
        got = stencil_gpu.heat_equation(x, 0.1, 0.1, 0.1, 1, "dirichlet", 1.3, columns=16)
    close(got, want)


@pytest.mark.parametrize("tiled", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nbody_acceleration(dtype, tiled):
    sizes = ((1, 0.0, None), (37, 0.25, 1), (70, 0.0, 3)) if tiled else ((9, 0.0, None),)
    for n, softening, parts in sizes:
        position, mass = draw(n, 3, dtype=dtype), draw(n, dtype=dtype, seed=1).abs()
        position[n // 2] = position[0]
        got = nbody_gpu.nbody_acceleration(
            position, mass, softening, 2.0, tiled=tiled, bodies=32, parts=parts
        )
        want = general.nbody_acceleration_reference(position.double(), mass.double(), softening, 2)
        close(got, want, 1e-5 if dtype == torch.float32 else 1e-12)
    assert nbody_gpu.nbody_acceleration(position[:0], mass[:0], 0.0, 1.0).shape == (0, 3)


CONTRACTS = torch.tensor(
    [[100.0, 90.0, 0.03, 0.2, 1.5, 0.01], [50.0, 55.0, 0.01, 0.4, 0.5, 0.0]], dtype=torch.float64
)


@pytest.mark.parametrize(("steps", "kind"), [(1, "european"), (5, "asian"), (2, "geometric_asian")])
def test_option_price(steps, kind):
    """The same paths as on the CPU, fused or not, and whatever the shape of a launch."""
    seed = 2**40 + 3
    want = monte_carlo.option_price_reference(CONTRACTS, 77, steps, kind, False, seed)
    for fused in (True, False):
        got = monte_carlo_gpu.option_price(
            CONTRACTS, 77, steps, kind, False, seed, fused=fused, block=32
        )
        close(got, want, 1e-5)
    paths = monte_carlo_gpu.market_paths(CONTRACTS, 77, steps, seed, block=64)
    close(paths, torch.ops.billfish.market_paths(CONTRACTS, 77, steps, seed), 1e-6)
    assert monte_carlo_gpu.option_price(CONTRACTS[:0], 9, 1, kind, True, 0).shape == (0, 2)


@pytest.mark.parametrize(
    ("dtype", "index", "vectors"),
    [
        (torch.float32, torch.int32, 1),
        (torch.float16, torch.int64, 3),
        (torch.float64, torch.int32, 1),
    ],
)
def test_spmv(dtype, index, vectors):
    for lengths in ([0, 3, 1, 0, 200, 5, 130, 64, 65, 0], [0, 0], [2] * 70):
        offsets = torch.tensor([0, *lengths]).cumsum(0).to(index)
        values, x = draw(int(offsets[-1]), dtype=dtype), draw(vectors, 50, dtype=dtype, seed=1).t()
        columns = (torch.arange(len(values)) * 17 % 50).to(index)
        want = general.spmv_reference(values.double(), columns, offsets, x.double())
        for balanced in (True, False):
            got = spmv_gpu.spmv(values, columns, offsets, x, balanced=balanced, piece=64)
            close(got, want, max(ROUNDING[dtype], 1e-13) * 4)


@pytest.mark.parametrize(("width", "steps", "vectors"), [(2, 1, 1), (4, 2, 4), (1, 4, 1)])
def test_spmv_of_some_tiles_a_program(monkeypatch, width, steps, vectors):
    monkeypatch.setattr(spmv_gpu, "PROGRAMS", 2)
    lengths = torch.arange(90) % 9 + 60 * (torch.arange(90) % 40 == 39)
    offsets = torch.cat((torch.zeros(1), lengths.cumsum(0))).int()
    values, x = draw(int(offsets[-1])), draw(40, vectors, seed=1)
    columns = (torch.arange(len(values)) * 7 % 40).int()
    want = general.spmv_reference(values.double(), columns, offsets, x.double())
    settings = spmv_gpu.Config(width, steps, elements=16 * width * steps, tiles=3)
    for options in ({"piece": 32}, {"balanced": False}):
        close(spmv_gpu.spmv(values, columns, offsets, x, settings=settings, **options), want, 1e-5)


def test_spmv_reads_nothing_outside():
    """What is wrong with indices a GPU cannot say."""
    values, x = torch.ones(200), torch.ones(50, 1)
    columns = torch.arange(200) - 75
    offsets = torch.tensor([-5, 200, 3, 9999, 9, 200])
    got = spmv_gpu.spmv(values, columns, offsets, x, piece=64)
    assert got[0] == 50
    assert got[1] == got[3] == 0


SMALL = matmul_gpu.Config(block_m=32, block_n=32, block_k=32, warps=4, stages=2, split=1)
WIDE = matmul_gpu.Config(block_m=16, block_n=256, block_k=16, warps=4, stages=2, split=1)


@pytest.mark.parametrize("turned", [True, False])
@pytest.mark.parametrize(
    ("dtype", "m", "n", "k", "activation"),
    [
        (torch.float32, 1, 1, 1, "none"),
        (torch.float16, 40, 34, 64, "silu"),
        (torch.float32, 33, 12, 100, "gelu_tanh"),
        (torch.float16, 5, 8, 0, "relu"),
    ],
)
def test_matmul(dtype, m, n, k, activation, turned):
    a, b = draw(m, k, dtype=dtype), draw(k, n, dtype=dtype, seed=1)
    b = b.t().contiguous().t() if turned else b
    bias, residual = draw(n, dtype=dtype, seed=2), draw(m, n, dtype=dtype, seed=3)
    want = general.matmul_reference(
        a.double(), b.double(), bias.double(), activation, residual.double()
    )
    switched = ({"fused": False}, {"group": 1}, {"split": 3}, {"settings": WIDE})
    for options in ({"tma": False}, *switched) if turned else ({},):
        got = matmul_gpu.matmul(
            a, b, bias, activation, residual, "ieee", **{"settings": SMALL} | options
        )
        # Apart, what is half is rounded twice.
        twice = 16 * 2.0**-11 if dtype == torch.float16 and "fused" in options else 0
        torch.testing.assert_close(
            got.double(), want, rtol=ROUNDING[dtype], atol=max(2e-5, twice)
        )  # fmt: skip


def test_matmul_of_views():
    a, b = draw(40, 70)[::2, ::2], draw(80, 35).t()[:, ::2]
    got = matmul_gpu.matmul(a, b, None, "none", None, "ieee", settings=SMALL)
    torch.testing.assert_close(got.double(), a.double() @ b.double(), rtol=1e-5, atol=2e-5)
    assert matmul_gpu.matmul(a[:0], b, None, "none", None, "ieee").shape == (0, 40)
    whole = matmul_gpu.matmul(a, b, None, "relu", None, "ieee")
    torch.testing.assert_close(whole, (a @ b).relu(), rtol=1e-5, atol=2e-5)
