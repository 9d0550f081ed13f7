"""The kernels of scientific computing on a GPU, against float64."""

import pytest
import torch

from billfish.errors import KernelArgumentError
from billfish.kernels import general
from billfish.kernels.general import (
    matmul_gpu,
    monte_carlo,
    monte_carlo_gpu,
    nbody_gpu,
    spmv_gpu,
    stencil_gpu,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

ROUNDING = {
    torch.float64: 1e-13, torch.float32: 4e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11,
}  # fmt: skip


def draw(*shape, dtype=torch.float32, seed=0):
    rng = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, generator=rng, device="cuda", dtype=torch.float64).to(dtype)


def close(got, want, tolerance=None):
    tolerance = tolerance or ROUNDING[got.dtype]
    torch.testing.assert_close(got.double(), want.double(), rtol=tolerance, atol=tolerance)


GRIDS = ((1, 1, 1), (3, 2, 5), (65, 1, 300), (40, 130, 127), (9, 64, 64))


@pytest.mark.parametrize("boundary", ["dirichlet", "neumann", "periodic"])
@pytest.mark.parametrize(
    ("dtype", "shape"),
    [*((torch.float32, shape) for shape in GRIDS), (torch.float64, GRIDS[1]),
     (torch.float64, GRIDS[4]), (torch.bfloat16, GRIDS[3]), (torch.float16, GRIDS[4])],
)  # fmt: skip
def test_heat_equation(dtype, boundary, shape):
    x, value = draw(*shape, dtype=dtype), 1.5 if boundary == "dirichlet" else 0.0
    rate = (0.1, 0.2, 0.05)
    want = general.heat_equation_reference(x.double(), rate, 9, boundary, value)
    for fused in (1, 2, 4):
        for coalesced in (True, False):
            options = {"fused": fused, "coalesced": coalesced}
            got = stencil_gpu.heat_equation(x, *rate, 9, boundary, value, **options)
            close(got, want)
            again = stencil_gpu.heat_equation(x, *rate, 9, boundary, value, **options)
            assert torch.equal(got, again)
    view = torch.stack((x, x), -1)[..., 0].transpose(0, 2)
    close(
        general.heat_equation(view, rate[::-1], 9, boundary, value), want.transpose(0, 2),
    )  # fmt: skip


def test_heat_equation_of_more_than_two_thousand_million_values():
    x = torch.zeros(2049, 1024, 1024, dtype=torch.float16, device="cuda")
    x[2048, 1000, 1000] = 1.0
    got = general.heat_equation(x, 0.125, 1)
    assert got[2048, 1000, 1000] == 0.25
    assert got[2047, 1000, 1000] == got[2048, 1000, 1001] == got[2048, 999, 1000] == 0.125
    assert got.sum(dtype=torch.float64) == 0.875  # an eighth has left


@pytest.mark.parametrize("softening", [0.0, 0.1])
@pytest.mark.parametrize("n", [0, 1, 63, 64, 65, 1000, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nbody_acceleration(dtype, n, softening):
    position, mass = draw(n, 3, dtype=dtype), draw(n, dtype=dtype, seed=1).abs()
    if n:
        position[n // 2] = position[0]
    want = general.nbody_acceleration_reference(position.double(), mass.double(), softening)
    scale = want.norm() / max(n, 1) ** 0.5 if n else 1.0
    for tiled in (True, False):
        for parts in (None, 1, 7):
            options = {"tiled": tiled, "parts": parts}
            got = nbody_gpu.nbody_acceleration(position, mass, softening, 1.0, **options)
            limit = (2e-6 if dtype == torch.float32 else 1e-13) * (1 + n**0.5)
            assert bool(
                ((got.double() - want).norm(dim=1) <= limit * (want.norm(dim=1) + scale)).all()
            )
            again = nbody_gpu.nbody_acceleration(position, mass, softening, 1.0, **options)
            assert torch.equal(got, again)


def test_a_cluster_keeps_momentum():
    position, velocity, mass = draw(4096, 3), 0.1 * draw(4096, 3, seed=1), draw(4096, seed=2).abs()
    mass /= mass.sum()
    before = (mass[:, None] * velocity).sum(0)
    acceleration = None
    for _ in range(50):
        position, velocity, acceleration = general.leapfrog_step(
            position, velocity, mass, 0.01, 0.05, acceleration=acceleration
        )
    torch.testing.assert_close((mass[:, None] * velocity).sum(0), before, rtol=0, atol=1e-5)


CONTRACTS = torch.tensor(
    [[100.0, 90.0, 0.03, 0.2, 1.5, 0.01], [50.0, 55.0, 0.01, 0.4, 0.5, 0.0]], dtype=torch.float64
)


@pytest.mark.parametrize("kind", monte_carlo.KINDS)
@pytest.mark.parametrize(
    ("paths", "steps"), [(1, 1), (1023, 1), (100_001, 1), (5000, 7), (333, 252)]
)
def test_option_price_walks_the_same_paths_as_a_cpu(paths, steps, kind):
    seed = 2**40 + 3
    own = CONTRACTS.cuda()
    walked = monte_carlo_gpu.market_paths(own, paths, steps, seed)
    close(walked.cpu(), torch.ops.billfish.market_paths(CONTRACTS, paths, steps, seed), 1e-4)
    want = torch.ops.billfish.option_price(CONTRACTS, paths, steps, kind, True, seed)
    for fused in (True, False):
        got = monte_carlo_gpu.option_price(own, paths, steps, kind, True, seed, fused=fused)
        close(got.cpu(), want, 1e-4)
        for _ in range(5):
            again = monte_carlo_gpu.option_price(own, paths, steps, kind, True, seed, fused=fused)
            assert torch.equal(got, again)
        other = monte_carlo_gpu.option_price(
            own, paths, steps, kind, True, seed, fused=fused, block=1024
        )
        close(got, other, 1e-9)


def test_option_price_against_the_closed_form():
    strike = torch.tensor([80.0, 100.0, 120.0], device="cuda")
    terms = {"rate": 0.03, "volatility": 0.25, "maturity": 1.5}
    got, error = general.option_price(100.0, strike, **terms, paths=1 << 28, seed=11)
    want = general.black_scholes(100.0, strike, **terms)
    assert bool(((got - want).abs() < 4 * error + 1e-5 * want).all())
    assert bool((error < 3e-3).all())


@pytest.mark.parametrize("vectors", [1, 3, 20])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", ROUNDING)
def test_spmv(dtype, index, vectors):
    lengths = torch.cat((
        torch.arange(3000) % 11, torch.tensor([511, 512, 513, 0, 1_000_003, 1024, 2, 70_000]),
        torch.full((900,), 600),
    ))  # fmt: skip
    offsets = torch.cat((torch.zeros(1), lengths.cumsum(0))).to("cuda", index)
    columns = torch.randint(0, 5000, (int(offsets[-1]),), device="cuda").to(index)
    values, x = draw(len(columns), dtype=dtype), draw(5000, vectors, dtype=dtype, seed=1)
    row = torch.arange(len(lengths), device="cuda").repeat_interleave(offsets.diff().long())
    want, size = torch.zeros(2, len(lengths), vectors, dtype=torch.float64, device="cuda")
    products = values.double()[:, None] * x.double()[columns.long()]
    want.index_add_(0, row, products)
    size.index_add_(0, row, products.abs())
    unit = {torch.float64: 1e-14, torch.float32: 2e-6}.get(dtype, 2e-6)
    for balanced in (True, False):
        got = spmv_gpu.spmv(values, columns, offsets, x, balanced=balanced)
        limit = unit * size + ROUNDING[dtype] * want.abs()
        if dtype == torch.float16:
            limit += 2.0**-25  # half of the step between the least of its numbers
        assert bool(((got.double() - want).abs() <= limit).all())
        for _ in range(5):
            assert torch.equal(spmv_gpu.spmv(values, columns, offsets, x, balanced=balanced), got)
    assert general.spmv(values, columns, offsets, x[:, 0]).shape == (len(lengths),)


@pytest.mark.parametrize("vectors", [1, 4, 8])
@pytest.mark.parametrize("mean", [3, 7, 20, 150])
def test_spmv_of_some_tiles_a_program(mean, vectors):
    generator = torch.Generator("cuda").manual_seed(mean)
    lengths = torch.randint(0, 2 * mean, (400_000,), device="cuda", generator=generator)
    offsets = torch.cat((lengths.new_zeros(1), lengths.cumsum(0))).int()
    stored, count = int(offsets[-1]), 30_000
    columns = torch.randint(0, count, (stored,), device="cuda", generator=generator).int()
    values, x = draw(stored), draw(count, vectors, seed=1)
    got = general.spmv(values, columns, offsets, x)
    matrix = torch.sparse_csr_tensor(
        offsets.long(), columns.long(), values.double(), (len(lengths), count),
        check_invariants=False,
    )  # fmt: skip
    want = matrix @ x.double()
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4)


def test_spmv_looks_at_indices_where_asked():
    values, x = torch.ones(4, device="cuda"), torch.ones(3, device="cuda")
    offsets = torch.tensor([0, 2, 4], device="cuda")
    columns = torch.tensor([0, 1, 7, -1], device="cuda")
    assert general.spmv(values, columns, offsets, x).tolist() == [2.0, 0.0]
    with pytest.raises(KernelArgumentError, match="columns"):
        general.spmv(values, columns, offsets, x, check_indices=True)
    with pytest.raises(KernelArgumentError, match="offsets"):
        general.spmv(values, columns.clamp(0, 2), offsets.flip(0), x, check_indices=True)


PRODUCTS = [(1, 1, 1), (1, 4096, 4096), (16, 136, 8192), (333, 257, 129), (70, 33, 0), (0, 5, 4),
            (1000, 2048, 512), (4096, 4096, 1024), (4111, 4104, 200)]  # fmt: skip
SETTINGS = ({"fused": False}, {"group": 1}, {"tma": False}, {"split": 3}, {"stages": 1})


@pytest.mark.parametrize(
    ("dtype", "precision", "size"),
    [*((torch.float16, "ieee", size) for size in PRODUCTS),
     *((torch.float32, "ieee", size) for size in PRODUCTS),
     *((torch.bfloat16, "ieee", size) for size in PRODUCTS[2:4]),
     *((torch.float32, p, size) for p in ("tf32", "tf32x3") for size in PRODUCTS[3::2])],
)  # fmt: skip
def test_matmul(dtype, precision, size):
    m, n, k = size
    a, weight = draw(m, k, dtype=dtype), (draw(n, k, seed=1) / max(k, 1) ** 0.5).to(dtype)
    bias, residual = draw(n, dtype=dtype, seed=2), draw(m, n, dtype=dtype, seed=3)
    limit = {"tf32": 5e-3, "tf32x3": 2e-5, "ieee": 2e-5}[precision]
    product = a.double() @ weight.double().t()
    want = torch.nn.functional.silu(product + bias.double()) + residual.double()
    # Memory in which k is in a row or not, of either; techniques off where it is.
    cases = [
        (left, right, {})
        for left in (a, a.t().contiguous().t())
        for right in (weight.t(), weight.t().contiguous())
    ] + [(a, weight.t(), options) for options in SETTINGS]
    for left, right, options in cases:
        got = matmul_gpu.matmul(left, right, bias, "silu", residual, precision, **options)
        # Apart, half floats are rounded twice.
        unit = 4 * ROUNDING[dtype] if "fused" in options else ROUNDING[dtype]
        atol = limit + (4 * unit if "fused" in options else 0)
        torch.testing.assert_close(got.double(), want, rtol=unit, atol=atol)
        again = matmul_gpu.matmul(left, right, bias, "silu", residual, precision, **options)
        assert torch.equal(got, again)
    odd = torch.stack((a, a), -1)[..., 0]
    close(general.matmul(odd, weight.t(), precision=precision), product,
          max(limit, ROUNDING[dtype]))  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("activation", ["none", "relu", "gelu_tanh"])
def test_activations_of_matmul(dtype, activation):
    """Where there are tiles for a whole GPU; silu is in `test_matmul`."""
    a, b = draw(2048, 64, dtype=dtype), draw(64, 1024, dtype=dtype, seed=1)
    bias = draw(1024, dtype=dtype, seed=2)
    bias[5] = torch.nan
    want = a.double() @ b.double() + bias.double()
    if activation == "relu":
        want = want.relu()
    elif activation == "gelu_tanh":
        want = torch.nn.functional.gelu(want, approximate="tanh")
    got = general.matmul(a, b, bias, activation)
    unit = ROUNDING[dtype]
    torch.testing.assert_close(got.double(), want, rtol=unit, atol=2e-5 + unit, equal_nan=True)


def test_matmul_of_more_than_two_thousand_million_results():
    a = torch.ones(66_000, 8, dtype=torch.float16, device="cuda")
    b = torch.ones(8, 33_000, dtype=torch.float16, device="cuda")
    a[65_999] = 2.0
    got = general.matmul(a, b)
    assert got[65_999, 32_999] == 16.0
    assert got[0, 0] == got[65_998, 32_999] == 8.0


@pytest.mark.sanitize
def test_a_few_of_each():
    """Small enough for a memory checker: tiles that stick out on all sides."""
    x = draw(5, 7, 9)
    close(
        general.heat_equation(x, 0.1, 3, "periodic"),
        general.heat_equation_reference(x.double(), (0.1,) * 3, 3, "periodic"),
    )
    mass = draw(45).abs()
    position = draw(45, 3)
    want = general.nbody_acceleration_reference(position.double(), mass.double(), 0.1)
    close(general.nbody_acceleration(position, mass, 0.1), want, 1e-4)
    price, _ = general.option_price(100.0, 90.0, 0.0, 0.2, 1.0, paths=1001, steps=3, device="cuda")
    there, _ = general.option_price(100.0, 90.0, 0.0, 0.2, 1.0, paths=1001, steps=3)
    close(price.cpu(), there, 1e-4)
    offsets = torch.tensor([0, 3, 3, 700, 701], device="cuda")
    columns = torch.arange(701, device="cuda") * 7 % 50
    values, vector = draw(701), draw(50, seed=1)
    want = general.spmv_reference(values.double(), columns, offsets, vector.double())
    close(general.spmv(values, columns, offsets, vector), want, 1e-4)
    a, b = draw(33, 24, dtype=torch.float16), draw(24, 40, dtype=torch.float16, seed=1)
    close(general.matmul(a, b), a.double() @ b.double(), 1e-2)
