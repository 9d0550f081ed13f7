"""The kernels of scientific computing by their public functions, on the CPU."""

import math

import pytest
import torch
from torch.library import opcheck

from billfish.errors import KernelArgumentError
from billfish.kernels import general
from billfish.kernels.general import monte_carlo
from tests.kernels.general_inputs import draw

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
ROUNDING = {
    torch.float64: 1e-14, torch.float32: 2e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11,
}  # fmt: skip


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


def cluster(n, dtype=torch.float64):
    """Positions, velocities and masses whose centre rests."""
    wide = {"dtype": torch.float64}
    position, velocity = draw(n, 3, **wide), 0.3 * draw(n, 3, seed=1, **wide)
    mass = draw(n, seed=2, **wide).abs() + 0.1
    mass /= mass.sum()
    for part in (position, velocity):
        part -= (mass[:, None] * part).sum(0)
    return position.to(dtype), velocity.to(dtype), mass.to(dtype)


@pytest.mark.parametrize("softening", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nbody_acceleration(dtype, softening):
    for n in (0, 1, 2, 300):
        position, _, mass = cluster(n, dtype)
        position[n // 2 :] = position[: n - n // 2].flip(0)  # some in one place
        want = general.nbody_acceleration_reference(position.double(), mass.double(), softening, 2)
        got = general.nbody_acceleration(position, mass, softening, 2.0)
        close(got, want, 1e-5 if dtype == torch.float32 else 1e-12)
        assert got.is_contiguous()
    two = torch.tensor([[0.0, 0.0, 0.0], [2.0, 0.0, 0.0]], dtype=dtype)
    pull = general.nbody_acceleration(two, torch.tensor([3.0, 5.0], dtype=dtype))
    assert pull.tolist() == [[1.25, 0.0, 0.0], [-0.75, 0.0, 0.0]]


def energy(position, velocity, mass, softening):
    kinetic = 0.5 * (mass * velocity.square().sum(1)).sum()
    apart = torch.pdist(position).square() + softening**2
    i, j = torch.triu_indices(len(mass), len(mass), 1)
    return kinetic - (mass[i] * mass[j] / apart.sqrt()).sum()


def test_leapfrog_keeps_energy_and_momentum_and_runs_backwards():
    position, velocity, mass = cluster(40)
    softening, dt = 0.1, 0.01
    before = energy(position, velocity, mass, softening)
    state, errors = (position, velocity, None), []
    for _ in range(200):
        state = general.leapfrog_step(*state[:2], mass, dt, softening, acceleration=state[2])
        errors.append(abs(energy(*state[:2], mass, softening) / before - 1))
    assert max(errors) < 2e-3
    assert (mass[:, None] * state[1]).sum(0).abs().max() < 1e-14
    assert (state[0] - position).abs().max() > 0.3
    for _ in range(200):
        state = general.leapfrog_step(*state[:2], mass, -dt, softening, acceleration=state[2])
    close(state[0], position, 1e-9)
    close(state[1], velocity, 1e-9)


def test_leapfrog_is_of_second_order():
    """Two bodies on a circle are back after a turn."""
    position = torch.tensor([[0.5, 0, 0], [-0.5, 0, 0]], dtype=torch.float64)
    velocity, mass = position[:, [1, 0, 2]].clone(), torch.full((2,), 0.5, dtype=torch.float64)
    away = []
    for steps in (100, 200):
        x, v, a = position, velocity, None
        for _ in range(steps):
            x, v, a = general.leapfrog_step(x, v, mass, 2 * math.pi / steps, acceleration=a)
        away.append((x - position).norm())
    assert away[0] / away[1] == pytest.approx(4.0, rel=0.02)


def test_philox_is_the_published_one():
    """Known answers of Random123, for philox4x32 of ten rounds."""
    for word, seed, answer in (
        (0, 0, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        (0xFFFFFFFF, -1, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    ):
        counter = (torch.tensor([word]),) * 4
        assert [w.item() for w in monte_carlo.philox(seed, counter)] == answer


MARKET = {"rate": 0.03, "volatility": 0.25, "maturity": 1.5, "dividend": 0.01}


@pytest.mark.parametrize("call", [True, False])
def test_european_options_against_the_closed_form(call):
    strike = torch.tensor([[80.0, 100.0], [120.0, 150.0]])
    want = general.black_scholes(100.0, strike, call=call, **MARKET)
    for steps in (1, 6):
        got, error = general.option_price(
            100.0, strike, call=call, **MARKET, paths=60_000, steps=steps, seed=5
        )
        assert got.shape == error.shape == strike.shape
        assert got.dtype == torch.float64
        assert bool(((got - want).abs() < 4 * error).all())
        assert bool((error < 0.2).all())


def test_black_scholes():
    """Hull, Options, Futures, and Other Derivatives, the example of 42, 40, 10%, 20%, half a year:
    4.76 for the call and 0.81 for the put."""
    terms = (42.0, 40.0, 0.1, 0.2, 0.5)
    assert round(general.black_scholes(*terms).item(), 2) == 4.76
    assert round(general.black_scholes(*terms, call=False).item(), 2) == 0.81


def test_geometric_asian_options_against_the_closed_form():
    """The geometric mean of log-normal prices is log-normal."""
    spot, strike, steps = 100.0, 100.0, 8
    rate, volatility, maturity, dividend = MARKET.values()
    times = [maturity * (k + 1) / steps for k in range(steps)]
    mean = (rate - dividend - volatility**2 / 2) * sum(times) / steps
    spread = volatility * math.sqrt(sum(min(s, t) for s in times for t in times)) / steps
    # A European option on a market with that mean and spread at maturity.
    forward = spot * math.exp(mean + spread**2 / 2)
    want = math.exp(-rate * maturity) * general.black_scholes(forward, strike, 0.0, spread, 1.0)
    got, error = general.option_price(
        spot, strike, **MARKET, paths=60_000, steps=steps, kind="geometric_asian"
    )
    assert abs(got - want) < 4 * error
    arithmetic, _ = general.option_price(
        spot, strike, **MARKET, paths=60_000, steps=steps, kind="asian"
    )
    assert want < arithmetic < want * 1.1


@pytest.mark.parametrize("steps", [1, 5])
def test_paths_of_the_market(steps):
    """The same paths as in float64, however many are walked, and the option's price from them."""
    walked = general.market_paths(100.0, **MARKET, paths=30_001, steps=steps, seed=2**40 + 3)
    assert walked.shape == (steps, 30_001)
    fewer = general.market_paths(100.0, **MARKET, paths=77, steps=steps, seed=2**40 + 3)
    assert torch.equal(walked[:, :77], fewer)
    other = general.market_paths(100.0, **MARKET, paths=77, steps=steps, seed=3)
    assert not torch.equal(other, fewer)
    growth = torch.cat((torch.full((1, 30_001), 100.0), walked)).double().log().diff(dim=0)
    dt = MARKET["maturity"] / steps
    assert growth.std() == pytest.approx(0.25 * math.sqrt(dt), rel=0.01)
    if steps > 1:
        assert abs(torch.corrcoef(growth)[0, 1]) < 0.02
    for kind, settled in (("european", walked[-1]), ("asian", walked.mean(0))):
        got, error = general.option_price(
            100.0, 90.0, **MARKET, paths=30_001, steps=steps, kind=kind, seed=2**40 + 3
        )
        paid = (settled.double() - 90.0).clamp(min=0) * math.exp(-0.045)
        torch.testing.assert_close(got, paid.mean(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(error, paid.std() / 30_001**0.5, rtol=1e-4, atol=1e-6)


def test_options_of_no_risk_and_of_no_contracts():
    certain, error = general.option_price(100.0, 90.0, 0.0, 0.0, 1.0, paths=1000, steps=3)
    assert certain.item() == pytest.approx(10.0, rel=1e-5)
    assert error < 1e-6
    none, _ = general.option_price(torch.ones(0, 2), 90.0, 0.0, 0.2, 1.0, paths=10)
    assert none.shape == (0, 2)


def sparse(lengths, columns, dtype=torch.float32, index=torch.int64):
    """Values, columns and offsets of a matrix whose rows have the lengths given."""
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    stored = int(offsets[-1])
    rng = torch.Generator().manual_seed(1)
    at = torch.randint(0, columns, (stored,), generator=rng)
    return draw(stored, dtype=dtype), at.to(index), offsets.to(index)


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", FLOATS)
def test_spmv(dtype, index):
    for lengths in ([0], [3], [0, 5, 0, 0, 200, 1], [2] * 30):
        values, columns, offsets = sparse(lengths, 40, dtype, index)
        for x in (draw(40, dtype=dtype), draw(40, 3, dtype=dtype), draw(5, 40, dtype=dtype).t()):
            wide = general.spmv_reference(values.double(), columns, offsets, x.double())
            got = general.spmv(values, columns, offsets, x)
            torch.testing.assert_close(
                got.double(), wide, rtol=ROUNDING[dtype], atol=20 * torch.finfo(torch.float32).eps
            )
            assert got.dtype == dtype
            assert got.is_contiguous()
    assert general.spmv(values, columns, offsets[:1], x).shape == (0, 5)
    # Offsets may be of a part of the elements.
    part = offsets[5:20]
    want = general.spmv_reference(values.double(), columns, part, x.double())
    close(general.spmv(values, columns, part, x), want, 2.0**-7)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_spmv_is_a_dense_product():
    dense = draw(9, 7) * (draw(9, 7, seed=1) > 0)
    csr = dense.to_sparse_csr()
    x = draw(7, 2, seed=2)
    got = general.spmv(csr.values(), csr.col_indices(), csr.crow_indices(), x)
    close(got, dense.double() @ x.double())


@pytest.mark.parametrize("activation", ["none", "relu", "gelu_tanh", "silu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_matmul(dtype, activation):
    for shape, n in (((1, 1), 1), ((3, 0), 5), ((0, 4), 5), ((7, 33), 0), ((2, 3, 50), 9)):
        a, b = draw(*shape, dtype=dtype), draw(n, shape[-1], dtype=dtype, seed=1).t()
        bias, residual = draw(n, dtype=dtype, seed=2), draw(*shape[:-1], n, dtype=dtype, seed=3)
        for more in ((), (bias,), (bias, activation, residual), (None, activation, residual)):
            wide = [t.double() if isinstance(t, torch.Tensor) else t for t in more]
            want = general.matmul_reference(a.double(), b.double(), *wide)
            got = general.matmul(a, b, *more)
            torch.testing.assert_close(got.double(), want, rtol=ROUNDING[dtype], atol=2e-5)
            assert got.shape == (*shape[:-1], n)
            assert got.is_contiguous()


def test_matmul_is_a_linear_layer():
    x, linear = draw(4, 6, 10), torch.nn.Linear(10, 8).requires_grad_(False)
    got = general.matmul(x, linear.weight.t(), linear.bias, "relu")
    torch.testing.assert_close(got, linear(x).relu())
    view = draw(12, 20)[::2, ::2]
    torch.testing.assert_close(general.matmul(view, linear.weight.t()), view @ linear.weight.t())


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
    "nbody shape": lambda: general.nbody_acceleration(draw(3, 2), draw(3)),
    "nbody mass": lambda: general.nbody_acceleration(draw(3, 3), draw(2)),
    "nbody dtypes": lambda: general.nbody_acceleration(draw(3, 3), draw(3).double()),
    "nbody half": lambda: general.nbody_acceleration(draw(3, 3).half(), draw(3).half()),
    "nbody softening": lambda: general.nbody_acceleration(draw(3, 3), draw(3), -1.0),
    "nbody G": lambda: general.nbody_acceleration(draw(3, 3), draw(3), 0.0, math.inf),
    "nbody gradient": lambda: general.nbody_acceleration(draw(3, 3).requires_grad_(), draw(3)),
    "leapfrog shape": lambda: general.leapfrog_step(draw(3, 3), draw(2, 3), draw(3), 0.1),
    "option kind": lambda: general.option_price(1, 1, 0, 0.1, 1, paths=9, kind="american"),
    "option paths": lambda: general.option_price(1, 1, 0, 0.1, 1, paths=0),
    "option steps": lambda: general.option_price(1, 1, 0, 0.1, 1, paths=9, steps=1.5),
    "option seed": lambda: general.option_price(1, 1, 0, 0.1, 1, paths=9, seed=-1),
    "option volatility": lambda: general.option_price(1, 1, 0, -0.1, 1, paths=9),
    "option spot": lambda: general.option_price(math.inf, 1, 0, 0.1, 1, paths=9),
    "option shapes": lambda: general.option_price(draw(3).abs(), draw(2).abs(), 0, 1, 1, paths=9),
    "option gradient": lambda: general.market_paths(
        draw(3).abs().requires_grad_(), 0, 1, 1, paths=9
    ),
    "spmv values": lambda: general.spmv(draw(2, 2), *sparse([2], 3)[1:], draw(3)),
    "spmv columns": lambda: general.spmv(
        draw(2), torch.zeros(3, dtype=torch.int64), torch.tensor([0, 2]), draw(3)
    ),
    "spmv column dtype": lambda: general.spmv(draw(2), draw(2), torch.tensor([0, 2]), draw(3)),
    "spmv no offsets": lambda: general.spmv(*sparse([2], 3)[:2], torch.tensor([]).int(), draw(3)),
    "spmv x dtype": lambda: general.spmv(*sparse([2], 3), draw(3).double()),
    "spmv x shape": lambda: general.spmv(*sparse([2], 3), draw(3, 1, 1)),
    "spmv order": lambda: general.spmv(*sparse([2], 3)[:2], torch.tensor([0, 2, 1]), draw(3)),
    "spmv end": lambda: general.spmv(*sparse([2], 3)[:2], torch.tensor([0, 3]), draw(3)),
    "spmv column": lambda: general.spmv(
        draw(2), torch.tensor([0, 3]), torch.tensor([0, 2]), draw(3)
    ),
    "spmv negative column": lambda: general.spmv(
        draw(2), torch.tensor([0, -1]), torch.tensor([0, 2]), draw(3)
    ),
    "spmv gradient": lambda: general.spmv(*sparse([2], 3), draw(3).requires_grad_()),
    "matmul shapes": lambda: general.matmul(draw(2, 3), draw(2, 3)),
    "matmul vector": lambda: general.matmul(draw(3), draw(3, 2)),
    "matmul dtypes": lambda: general.matmul(draw(2, 3), draw(3, 2).half()),
    "matmul double": lambda: general.matmul(draw(2, 3).double(), draw(3, 2).double()),
    "matmul bias": lambda: general.matmul(draw(2, 3), draw(3, 2), draw(3)),
    "matmul residual": lambda: general.matmul(draw(2, 3), draw(3, 2), residual=draw(2)),
    "matmul activation": lambda: general.matmul(draw(2, 3), draw(3, 2), None, "gelu"),
    "matmul precision": lambda: general.matmul(draw(2, 3), draw(3, 2), precision="tf16"),
    "matmul gradient": lambda: general.matmul(draw(2, 3).requires_grad_(), draw(3, 2)),
    "heat device": lambda: general.heat_equation(draw(3, 3, 3).to("meta"), 0.1),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(name):
    with pytest.raises(KernelArgumentError):
        BAD[name]()


def test_operations_as_torch_sees_them():
    ops = torch.ops.billfish
    contracts = torch.rand(2, 6, dtype=torch.float64)
    for op, arguments in (
        (ops.heat_equation, (draw(2, 3, 4), 0.1, 0.1, 0.2, 2, "neumann", 0.0)),
        (ops.nbody_acceleration, (draw(5, 3), draw(5), 0.1, 1.0)),
        (ops.spmv, (*sparse([2, 0, 3], 4), draw(4, 2))),
        (ops.matmul, (draw(3, 4), draw(4, 2), draw(2), "silu", None, "ieee")),
        (ops.option_price, (contracts, 50, 3, "asian", False, 1)),
        (ops.market_paths, (contracts, 50, 3, 1)),
    ):
        opcheck(op.default, arguments)
