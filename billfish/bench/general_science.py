"""Cases of `billfish bench general`: scientific computing and simulation."""

import math
import warnings
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from billfish.bench.general_case import Case, Function, compiled
from billfish.kernels import general

DOMAIN = "science"


def cases() -> list[Case]:
    return [
        heat_equation((512, 512, 512), 8, torch.float32),
        heat_equation((512, 512, 512), 1, torch.float32),
        heat_equation((512, 512, 512), 1, torch.float64),
        heat_equation((768, 768, 768), 1, torch.bfloat16),
        nbody_acceleration(16384, torch.float32),
        nbody_acceleration(262144, torch.float32),
        nbody_acceleration(32768, torch.float64),
        option_price(1 << 26, 1),
        option_price(1 << 20, 252),
        spmv("seven-point, 192^3", 1, torch.float32),
        spmv("seven-point, 192^3", 1, torch.float64),
        spmv("uniform, 1000000 rows of 64", 1, torch.float32),
        spmv("skewed, 1000000 rows of 32", 1, torch.float32),
        spmv("uniform, 1000000 rows of 64", 8, torch.float32),
        matmul(8192, 8192, 8192, torch.bfloat16),
        matmul(4096, 14336, 4096, torch.float16),
        matmul(4096, 14336, 4096, torch.bfloat16, follow=True),
        matmul(16, 4096, 4096, torch.bfloat16, follow=True),
        matmul(4096, 4096, 4096, torch.float32, "tf32"),
        matmul(4096, 4096, 4096, torch.float32, "tf32x3"),
        matmul(4096, 4096, 4096, torch.float32),
    ]


def tiny() -> list[Case]:
    return [
        heat_equation((3, 4, 5), 3, torch.float32),
        nbody_acceleration(70, torch.float32),
        option_price(4000, 1),
        option_price(1000, 5),
        spmv("skewed, 40 rows of 60", 1, torch.float32),
        spmv("seven-point, 3^3", 3, torch.float32),
        matmul(20, 40, 50, torch.float32, follow=True),
    ]


HEAT = 0.125


def _one_step(x: Tensor) -> Tensor:
    """Of the heat equation, nothing but 0 outside."""
    padded = functional.pad(x, (1, 1) * 3)
    total = (1 - 6 * HEAT) * x
    for dim, size in enumerate(x.shape):
        inner = padded
        for other in {0, 1, 2} - {dim}:
            inner = inner.narrow(other, 1, x.shape[other])
        total = total + HEAT * (inner.narrow(dim, 0, size) + inner.narrow(dim, 2, size))
    return total


def _by_convolution(x: Tensor, weight: Tensor) -> Tensor:
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        return functional.conv3d(x[None, None], weight, padding=1)[0, 0]


def heat_equation(shape: tuple[int, int, int], steps: int, dtype: torch.dtype) -> Case:
    """The floor reads and writes the grid once, however many steps there are."""

    def draw(device: torch.device) -> tuple[Tensor, Tensor]:
        weight = torch.zeros(3, 3, 3, device=device)
        for offset in ((0, 1, 1), (2, 1, 1), (1, 0, 1), (1, 2, 1), (1, 1, 0), (1, 1, 2)):
            weight[offset] = HEAT
        weight[1, 1, 1] = 1 - 6 * HEAT
        return torch.rand(shape, device=device).to(dtype), weight.to(dtype)[None, None]

    def switched(**options: Any) -> Function:
        def run(x: Tensor, weight: Tensor) -> Tensor:
            from billfish.kernels.general import stencil_gpu

            rates = (HEAT,) * 3
            return stencil_gpu.heat_equation(x, *rates, steps, "dirichlet", 0.0, **options)

        return run

    def convolved(x: Tensor, weight: Tensor) -> Tensor:
        for _ in range(steps):
            x = _by_convolution(x, weight)
        return x

    def chain(x: Tensor, weight: Tensor) -> Tensor:
        for _ in range(steps):
            x = _one_step(x)
        return x

    moved = torch.Size(shape).numel() * dtype.itemsize
    marched = {"one step a launch": {str(n): switched(fused=n) for n in (2, 3, 4)}}
    return Case(
        domain=DOMAIN, kernel="heat_equation", dtype=dtype,
        size=f"{' x '.join(map(str, shape))}, {steps} steps",
        draw=draw, run=lambda x, weight: general.heat_equation(x, HEAT, steps),
        reference=lambda x, weight: general.heat_equation_reference(x.double(), (HEAT,) * 3, steps),
        read=moved, written=moved,
        peers={"torch conv3d": convolved, "torch.compile": compiled(chain)},
        settings={"coalesced": {"off": switched(coalesced=False)}} | (marched if steps > 1 else {}),
    )  # fmt: skip


SOFTENING = 0.01


def _all_pairs(position: Tensor, mass: Tensor) -> Tensor:
    """Component by component: torch.compile makes one kernel of sums of it, with no n x n."""
    x, y, z = position.unbind(1)
    away = [c[None, :] - c[:, None] for c in (x, y, z)]
    square = away[0] * away[0] + away[1] * away[1] + away[2] * away[2] + SOFTENING**2
    pull = mass * square.rsqrt() ** 3
    return torch.stack([(pull * d).sum(1) for d in away], 1)


def _some_at_a_time(position: Tensor, mass: Tensor) -> Tensor:
    """The reference, with no n x n in memory."""
    wide, heavy = position.double(), mass.double()
    parts = []
    for own in wide.split(2048):
        total = torch.zeros_like(own)
        for other, weight in zip(wide.split(8192), heavy.split(8192), strict=True):
            away = other[None] - own[:, None]
            square = away.square().sum(-1, keepdim=True) + SOFTENING**2
            total += (weight[:, None] * away * square**-1.5).sum(1)
        parts.append(total)
    return torch.cat(parts)


def nbody_acceleration(n: int, dtype: torch.dtype) -> Case:
    """Bound by arithmetic: twenty operations a pair."""

    def off(position: Tensor, mass: Tensor) -> Tensor:
        from billfish.kernels.general import nbody_gpu

        return nbody_gpu.nbody_acceleration(position, mass, SOFTENING, 1.0, tiled=False)

    peers = {"torch.compile": compiled(_all_pairs)}
    if n <= 16384:
        peers["torch"] = _all_pairs
    return Case(
        domain=DOMAIN, kernel="nbody_acceleration", size=f"{n}", dtype=dtype,
        draw=lambda device: (
            torch.randn(n, 3, device=device).to(dtype), torch.rand(n, device=device).to(dtype)),
        run=lambda position, mass: general.nbody_acceleration(position, mass, SOFTENING),
        reference=_some_at_a_time, read=4 * n * dtype.itemsize, written=3 * n * dtype.itemsize,
        flops=20 * n * n, peers=peers,
        settings={} if dtype == torch.float64 else {"tiles in shared memory": {"off": off}},
    )  # fmt: skip


TERMS = (100.0, 105.0, 0.03, 0.2, 1.0)  # spot, strike, rate, volatility, maturity


def option_price(paths: int, steps: int) -> Case:
    """A European call for one step, else an Asian one; bound by arithmetic, of which a normal
    number and its exponential are some thirty multiplications and additions.

    torch draws other numbers: all are within their statistical error of the value.
    """
    kind = "european" if steps == 1 else "asian"
    contract = [*TERMS, 0.0]

    def exact(contracts: Tensor) -> Tensor:
        if steps == 1:
            return general.black_scholes(*TERMS).to(contracts.device)
        own = general.option_price_reference(contracts.cpu(), 50_000, steps, kind, True, 123)
        return own[0, 0].to(contracts.device)

    def off(contracts: Tensor) -> Tensor:
        from billfish.kernels.general import monte_carlo_gpu

        return monte_carlo_gpu.option_price(
            contracts, paths, steps, kind, True, 7, fused=False
        )[0, 0]  # fmt: skip

    def chain(contracts: Tensor) -> Tensor:
        spot, strike, rate, volatility, maturity, _ = contract
        dt = maturity / steps
        normal = torch.randn(steps, paths, device=contracts.device)
        drift = (rate - volatility**2 / 2) * dt
        growth = (drift + volatility * math.sqrt(dt) * normal).cumsum(0)
        settled = spot * growth.exp().mean(0)
        return math.exp(-rate * maturity) * (settled - strike).clamp(min=0).double().mean()

    return Case(
        domain=DOMAIN, kernel="option_price", size=f"{paths} paths, {steps} steps",
        dtype=torch.float32,
        draw=lambda device: (torch.tensor([contract], dtype=torch.float64, device=device),),
        run=lambda contracts: torch.ops.billfish.option_price(
            contracts, paths, steps, kind, True, 7)[0, 0],
        reference=exact, read=48, written=16, flops=60 * paths * steps,
        peers={"torch": chain, "torch.compile": compiled(chain)},
        settings={"fused": {"off": off}}, tolerance=8 / min(paths, 50_000) ** 0.5,
    )  # fmt: skip


Matrix = tuple[Tensor, Tensor, Tensor]


def _seven_point(side: int, device: torch.device) -> Matrix:
    """The Laplacian of a cube: values, columns and offsets of its compressed rows."""
    place = torch.arange(side, device=device)
    z, y, x = (c.reshape(-1) for c in torch.meshgrid(place, place, place, indexing="ij"))
    row = torch.arange(side**3, device=device)
    columns, there = [], []
    for by, at in ((-side * side, z), (-side, y), (-1, x), (0, x), (1, x), (side, y),
                   (side * side, z)):  # fmt: skip
        columns.append(row + by)
        step = (by > 0) - (by < 0)
        there.append((at + step >= 0) & (at + step < side))
    kept = torch.stack(there, 1)
    values = torch.full((7,), -1.0, device=device)
    values[3] = 6.0
    counts = kept.sum(1)
    offsets = torch.cat((counts.new_zeros(1), counts.cumsum(0)))
    return values.expand(side**3, 7)[kept], torch.stack(columns, 1)[kept], offsets


def _lengths(kind: str, size: str) -> Tensor:
    """Of "skewed" rows one in a thousand has half of the elements, and the first a tenth."""
    rows, mean = (int(word) for word in size.split() if word.isdigit())
    lengths = torch.full((rows,), mean)
    if kind == "skewed":
        lengths.fill_(max(1, mean * 4 // 10))
        lengths[::1000] = mean * rows // 2 // max(1, rows // 1000)
        lengths[0] = mean * rows // 10
    return lengths


def _random_rows(lengths: Tensor) -> Matrix:
    rows, device = len(lengths), lengths.device
    offsets = torch.cat((lengths.new_zeros(1), lengths.cumsum(0)))
    stored = int(offsets[-1])
    columns = torch.randint(0, rows, (stored,), device=device)
    return torch.randn(stored, device=device), columns, offsets


def _matrix(name: str, device: torch.device) -> Matrix:
    kind, _, size = name.partition(", ")
    if kind == "seven-point":
        return _seven_point(int(size.partition("^")[0]), device)
    return _random_rows(_lengths(kind, size).to(device))


def spmv(name: str, vectors: int, dtype: torch.dtype) -> Case:
    """Indices are int32. The floor reads x once: caches decide how far that is true.

    CuPy calls cuSPARSE too, but sorts the elements of each row before, which takes far longer.
    """
    rows, stored = _matrix_size(name)

    def draw(device: torch.device) -> tuple[Tensor, ...]:
        values, columns, offsets = _matrix(name, device)
        x = torch.randn(len(offsets) - 1, vectors, device=device).to(dtype)
        return values.to(dtype), columns.int(), offsets.int(), x[:, 0] if vectors == 1 else x

    def reference(values: Tensor, columns: Tensor, offsets: Tensor, x: Tensor) -> Tensor:
        counts = offsets.diff()
        row = torch.arange(len(counts), device=x.device).repeat_interleave(counts)
        wide = x.double().view(len(counts), -1)
        out = torch.zeros_like(wide)
        for v in range(wide.shape[1]):
            out[:, v].index_add_(0, row, values.double() * wide[columns, v])
        return out.view(x.shape)

    def off(values: Tensor, columns: Tensor, offsets: Tensor, x: Tensor) -> Tensor:
        from billfish.kernels.general import spmv_gpu

        both = x if x.dim() == 2 else x[:, None]
        return spmv_gpu.spmv(values, columns, offsets, both, balanced=False).view(x.shape)

    def with_torch(values: Tensor, columns: Tensor, offsets: Tensor, x: Tensor) -> Tensor:
        shape = (len(offsets) - 1, len(x))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta")
            matrix = torch.sparse_csr_tensor(
                offsets, columns, values, shape, check_invariants=False
            )
        return matrix @ x

    return Case(
        domain=DOMAIN, kernel="spmv", size=name + (f", {vectors} vectors" if vectors > 1 else ""),
        dtype=dtype, draw=draw, run=general.spmv, reference=reference,
        read=stored * (dtype.itemsize + 4) + 4 * rows + rows * vectors * dtype.itemsize,
        written=rows * vectors * dtype.itemsize,
        peers={"torch cusparse": with_torch},
        settings={"long rows in pieces": {"off": off}},
    )  # fmt: skip


def _matrix_size(name: str) -> tuple[int, int]:
    """(rows, stored elements)."""
    kind, _, size = name.partition(", ")
    if kind == "seven-point":
        side = int(size.partition("^")[0])
        return side**3, 7 * side**3 - 6 * side**2
    lengths = _lengths(kind, size)
    return len(lengths), int(lengths.sum())


def matmul(
    m: int, n: int, k: int, dtype: torch.dtype, precision: str = "ieee", follow: bool = False
) -> Case:
    """a @ weight.t(); follow: a bias, SiLU and a residual after it."""

    def draw(device: torch.device) -> tuple[Tensor, ...]:
        a = torch.randn(m, k, device=device).to(dtype)
        weight = (torch.randn(n, k, device=device) / k**0.5).to(dtype)
        more = (torch.randn(n, device=device).to(dtype), torch.randn(m, n, device=device).to(dtype))
        return (a, weight.t(), *more) if follow else (a, weight.t())

    def run(a: Tensor, b: Tensor, bias: Any = None, residual: Any = None) -> Tensor:
        return general.matmul(a, b, bias, "silu" if follow else "none", residual, precision)

    def reference(a: Tensor, b: Tensor, bias: Any = None, residual: Any = None) -> Tensor:
        wide = [None if t is None else t.double() for t in (bias, residual)]
        kind = "silu" if follow else "none"
        return general.matmul_reference(a.double(), b.double(), wide[0], kind, wide[1])

    def switched(**options: Any) -> Function:
        def call(a: Tensor, b: Tensor, bias: Any = None, residual: Any = None) -> Tensor:
            from billfish.kernels.general import matmul_gpu

            kind = "silu" if follow else "none"
            return matmul_gpu.matmul(a, b, bias, kind, residual, precision, **options)

        return call

    def chain(a: Tensor, b: Tensor, bias: Any = None, residual: Any = None) -> Tensor:
        before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
        try:
            if not follow:
                return a @ b
            return functional.silu(torch.addmm(bias, a, b)) + residual
        finally:
            torch.backends.cuda.matmul.allow_tf32 = before

    settings = {
        "tiles in groups": {"off": switched(group=1)},
        "queue": {str(stages): switched(stages=stages) for stages in (1, 2, 3)},
        "tiles by the copy engine": {"off": switched(tma=False)},
    }
    if follow:
        settings["fused"] = {"off": switched(fused=False)}
    extra = m * n + n if follow else 0
    peers = {"torch cublas": chain}
    if follow:
        peers["torch.compile"] = compiled(
            lambda a, b, bias, residual: functional.silu(torch.addmm(bias, a, b)) + residual
        )
    return Case(
        domain=DOMAIN, kernel="matmul", dtype=dtype, size=f"{m} x {n} x {k}"
        + (f" {precision}" if precision != "ieee" else "") + (", epilogue" if follow else ""),
        draw=draw, run=run, reference=reference, read=(m * k + n * k + extra) * dtype.itemsize,
        written=m * n * dtype.itemsize, flops=2 * m * n * k * (3 if precision == "tf32x3" else 1),
        math=None if precision == "ieee" else "tf32", peers=peers, settings=settings,
        tolerance=2e-3 if precision == "tf32" else None,
    )  # fmt: skip
