"""Cases of `billfish bench general`: scientific computing and simulation."""

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
    ]


def tiny() -> list[Case]:
    return [
        heat_equation((3, 4, 5), 3, torch.float32),
        nbody_acceleration(70, torch.float32),
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
    fused = {"steps fused": {"off": switched(fused=1), "4": switched(fused=4)}}
    return Case(
        domain=DOMAIN, kernel="heat_equation", dtype=dtype,
        size=f"{' x '.join(map(str, shape))}, {steps} steps",
        draw=draw, run=lambda x, weight: general.heat_equation(x, HEAT, steps),
        reference=lambda x, weight: general.heat_equation_reference(x.double(), (HEAT,) * 3, steps),
        read=moved, written=moved,
        peers={"torch conv3d": convolved, "torch.compile": compiled(chain)},
        settings={"coalesced": {"off": switched(coalesced=False)}} | (fused if steps > 1 else {}),
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
        flops=20 * n * n, peers=peers, settings={"tiles in shared memory": {"off": off}},
    )  # fmt: skip
