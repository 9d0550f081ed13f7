"""The heat equation in three dimensions: the example of a stencil, and of blocking in time.

A step of the explicit scheme (forward in time, centred in space) reads each value and its six
neighbours, and writes one. Read from memory each time, that is eight accesses for ten additions and
multiplications, so two things decide: that neighbours are read once, and how often the whole grid
crosses the memory bus.

A program owns a tile of (y, x) and marches along z. Planes it has read stay in registers for as
long as they are neighbours; neighbours in a plane are read once more, from the L1 cache that the
plane came through, but for those along x that the same 16 bytes brought: these are in the same
thread. That is one step a launch.

And it can take several steps in the same march: one plane behind the values that are read come
those of a step later, one behind these the next, so that a grid is read and written once for all of
them. Planes between are written to a scratch that stays in the caches, for the neighbours along y;
those along x are in a thread's own registers, or one shuffle away. The price is a rim: each further
step makes one more ring of a tile wrong, which the tiles beside it compute right. On an H200 one
step a launch is faster for grids of any size that was tried, so it is what is done unless a number
is given.

The technique's switches: `stencil_gpu.heat_equation(..., fused=2)`, or 3 or 4, are as many steps a
launch, `coalesced=False` lays a tile's fast side along z, so that each value read is of another
line.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from billfish.kernels._library import bad_argument, check_no_grad, check_tensors, number, register
from billfish.kernels.general._arguments import FLOATS, accumulator, check_device

BOUNDARIES = ("dirichlet", "neumann", "periodic")


def heat_equation_reference(
    x: Tensor,
    rate: Sequence[float],
    steps: int = 1,
    boundary: str = "dirichlet",
    value: float = 0.0,
) -> Tensor:
    """Step by step, dimension by dimension."""
    for _ in range(steps if x.numel() else 0):
        change = torch.zeros_like(x)
        for dim, factor in enumerate(rate):
            first, last = x.narrow(dim, 0, 1), x.narrow(dim, x.shape[dim] - 1, 1)
            ends = {
                "dirichlet": (torch.full_like(first, value), torch.full_like(last, value)),
                "neumann": (first, last),
                "periodic": (last, first),
            }[boundary]
            longer = torch.cat((ends[0], x, ends[1]), dim)
            before, after = (longer.narrow(dim, i, x.shape[dim]) for i in (0, 2))
            change = change + factor * (before - 2 * x + after)
        x = x + change
    return x


def _refresh(padded: Tensor, boundary: str) -> None:
    """Values outside of the grid, which the next step reads; those of Dirichlet never change."""
    if boundary == "dirichlet":
        return
    for dim in range(3):
        n = padded.shape[dim]
        first, last = (1, n - 2) if boundary == "neumann" else (n - 2, 1)
        padded.select(dim, 0).copy_(padded.select(dim, first))
        padded.select(dim, n - 1).copy_(padded.select(dim, last))


def _cpu(
    x: Tensor, rate_z: float, rate_y: float, rate_x: float, steps: int, boundary: str, value: float
) -> Tensor:
    """In place between two grids that hold what is outside too."""
    wide = accumulator(x.dtype, "sum")
    if not x.numel() or not steps:
        return x.clone(memory_format=torch.contiguous_format)
    now = torch.full([n + 2 for n in x.shape], value, dtype=wide)
    now[1:-1, 1:-1, 1:-1] = x
    then = now.clone()
    kept = 1.0 - 2.0 * (rate_z + rate_y + rate_x)
    for _ in range(steps):
        _refresh(now, boundary)
        inner = then[1:-1, 1:-1, 1:-1]
        torch.mul(now[1:-1, 1:-1, 1:-1], kept, out=inner)
        inner.add_(now[:-2, 1:-1, 1:-1], alpha=rate_z).add_(now[2:, 1:-1, 1:-1], alpha=rate_z)
        inner.add_(now[1:-1, :-2, 1:-1], alpha=rate_y).add_(now[1:-1, 2:, 1:-1], alpha=rate_y)
        inner.add_(now[1:-1, 1:-1, :-2], alpha=rate_x).add_(now[1:-1, 1:-1, 2:], alpha=rate_x)
        now, then = then, now
    return now[1:-1, 1:-1, 1:-1].to(x.dtype).contiguous()


def _fake(
    x: Tensor, rate_z: float, rate_y: float, rate_x: float, steps: int, boundary: str, value: float
) -> Tensor:
    return x.new_empty(x.shape)


_heat_equation: Callable[..., Tensor] = register(
    "heat_equation(Tensor x, float rate_z, float rate_y, float rate_x, int steps, str boundary,"
    " float value) -> Tensor",
    fake=_fake,
    cpu=_cpu,
    gpu="billfish.kernels.general.stencil_gpu",
)


def heat_equation(
    x: Tensor,
    rate: float | Sequence[float],
    steps: int = 1,
    boundary: str = "dirichlet",
    value: float = 0.0,
) -> Tensor:
    """Temperatures after `steps` steps of du/dt = k * (d2u/dz2 + d2u/dy2 + d2u/dx2).

    u' = u + sum over dimensions of rate * (u_before - 2 u + u_after): forward Euler in time, second
    differences in space (for example Press et al., Numerical Recipes, 3rd ed., 20.2).

    x: [Z, Y, X] floats (64, 32, bf16, fp16), any size and strides. rate: k * time step /
    (grid spacing)^2, without unit, one for all dimensions or [rate_z, rate_y, rate_x]. boundary:
    "dirichlet": `value` is what lies just outside of the grid at all times; "neumann": no heat
    passes the border, so the sum over the grid stays; "periodic": the last is the first's
    neighbour. Returns a new, contiguous [Z, Y, X] of x's dtype. Half floats are computed in float32
    and rounded once, after the last step.

    Deterministic: the same bits from run to run.

    Raises KernelArgumentError: dtype, device or shape is wrong, steps is negative or 2^31 or more,
    the rates are negative or come to more than 1/2 (where the scheme is unstable), the boundary is
    none of the above, a value is given to another than dirichlet's, or x requires a gradient.
    """
    check_tensors(x=x)
    listed = isinstance(rate, Sequence) and not isinstance(rate, str)
    rates = [number("rate", r) for r in (rate if listed else (rate,) * 3)]  # type: ignore[union-attr]
    value = number("value", value)
    if x.dtype not in FLOATS or x.dim() != 3:
        raise bad_argument("x", f"{x.dtype} {tuple(x.shape)}", "floats [Z, Y, X]")
    check_device("x", x)
    check_no_grad("x", x)
    if len(rates) != 3 or not all(r >= 0 for r in rates) or not sum(rates) <= 0.5:
        raise bad_argument("rate", rate, "one or three of 0 or more whose sum is 1/2 at most")
    if not isinstance(steps, int) or isinstance(steps, bool) or not 0 <= steps < 2**31:
        raise bad_argument("steps", steps, "0 to 2^31 - 1")
    if boundary not in BOUNDARIES:
        raise bad_argument("boundary", repr(boundary), " or ".join(BOUNDARIES))
    if value != 0.0 and boundary != "dirichlet":
        raise bad_argument("value", value, f"none with {boundary}")
    return _heat_equation(x, *rates, steps, boundary, value)
