"""Gravity between all pairs of bodies: the example of data used many times once it is near.

n bodies take n^2 interactions of some twenty operations and one reciprocal square root, and only n
positions: arithmetic is the limit, if the positions come from nearby. A program owns a tile of
bodies, in registers, and walks over all others in tiles: a warp reads one together, a body a
thread, and hands it around through shared memory, from which each thread reads all bodies of the
tile, one read for as many interactions as it owns bodies. Where there are few bodies the walk is
cut into parts, whose sums are added in their order.

Softening keeps close encounters finite; Nyland, Harris & Prins, "Fast N-Body Simulation with CUDA"
(GPU Gems 3, 2007, chapter 31).

The technique's switch: `nbody_gpu.nbody_acceleration(..., tiled=False)` has each thread read each
body from memory (its caches).
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from billfish.kernels._library import (
    bad_argument,
    check_like,
    check_no_grad,
    check_tensors,
    number,
    register,
)
from billfish.kernels.general._arguments import check_device


def nbody_acceleration_reference(
    position: Tensor, mass: Tensor, softening: float = 0.0, G: float = 1.0
) -> Tensor:
    """All pairs at once."""
    apart = position[None, :, :] - position[:, None, :]
    square = apart.square().sum(-1, keepdim=True) + softening**2
    pull = torch.where(square > 0, square, torch.inf) ** -1.5
    return G * (mass[:, None] * pull * apart).sum(1)


def _cpu(position: Tensor, mass: Tensor, softening: float, G: float) -> Tensor:
    """Some bodies at a time, so that what is computed of them stays in cache."""
    n = position.shape[0]
    x = position.t().contiguous()
    out = torch.empty(n, 3, dtype=position.dtype)
    for rows in torch.arange(n).split(max(1, 2**16 // max(n, 1))):
        apart = [x[c][None, :] - x[c][rows, None] for c in range(3)]
        square = torch.full_like(apart[0], softening * softening)
        for d in apart:
            square.addcmul_(d, d)
        pull = square.rsqrt()
        if not softening:
            pull.masked_fill_(square == 0, 0.0)
        pull = (pull * pull).mul_(pull).mul_(mass)
        for c in range(3):
            out[rows, c] = (pull * apart[c]).sum(1)
    return out.mul_(G)


def _fake(position: Tensor, mass: Tensor, softening: float, G: float) -> Tensor:
    return position.new_empty(position.shape)


_nbody_acceleration: Callable[..., Tensor] = register(
    "nbody_acceleration(Tensor position, Tensor mass, float softening, float G) -> Tensor",
    fake=_fake,
    cpu=_cpu,
    gpu="billfish.kernels.general.nbody_gpu",
)


def nbody_acceleration(
    position: Tensor, mass: Tensor, softening: float = 0.0, G: float = 1.0
) -> Tensor:
    """a_i = G * sum over j of m_j * (x_j - x_i) / (|x_j - x_i|^2 + softening^2)^(3/2).

    position: [n, 3] float32 or float64, any strides; mass: [n] of the same dtype; softening: a
    length, 0 or more, in the unit of positions; G: the gravitational constant in units of your
    choice (negative: like charges, which repel). Returns [n, 3], contiguous. Bodies in one place do
    not act on each other. Not finite in, not finite out.

    Deterministic: the same bits from run to run for the same n on the same device.

    Raises KernelArgumentError: dtype, device or shape is wrong, softening is negative or not
    finite, G is not finite, or a tensor requires a gradient.
    """
    check_tensors(position=position, mass=mass)
    softening, G = number("softening", softening), number("G", G)
    if position.dtype not in (torch.float32, torch.float64):
        raise bad_argument("position", position.dtype, "float32 or float64")
    if position.dim() != 2 or position.shape[1] != 3:
        raise bad_argument("position", tuple(position.shape), "[n, 3]")
    if mass.shape != position.shape[:1]:
        raise bad_argument("mass", tuple(mass.shape), f"[{position.shape[0]}]")
    check_device("position", position)
    check_like("mass", mass, "position", position)
    check_no_grad("position", position)
    check_no_grad("mass", mass)
    if not 0 <= softening < math.inf:
        raise bad_argument("softening", softening, "a length of 0 or more")
    if not math.isfinite(G):
        raise bad_argument("G", G, "a finite number")
    return _nbody_acceleration(position, mass, softening, G)


def leapfrog_step(
    position: Tensor, velocity: Tensor, mass: Tensor, dt: float, softening: float = 0.0,
    G: float = 1.0, acceleration: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(position, velocity, acceleration) a time step dt later: kick, drift, kick.

    position, velocity: [n, 3], mass: [n]; softening and G as of `nbody_acceleration`. acceleration:
    [n, 3] at `position`, as the step before returned it (None: computed here, at the price of a
    second evaluation). Second order, and symplectic: errors of the energy stay bounded (Hockney &
    Eastwood, Computer Simulation Using Particles, 1988). A step of -dt leads back.

    Deterministic as `nbody_acceleration` is.

    Raises KernelArgumentError: as `nbody_acceleration`, or velocity or acceleration is of another
    shape, dtype or device than position.
    """
    check_tensors(position=position, velocity=velocity)
    dt = number("dt", dt)
    for name, given in (("velocity", velocity), ("acceleration", acceleration)):
        if given is not None:
            check_tensors(**{name: given})
            check_like(name, given, "position", position)
            if given.shape != position.shape:
                raise bad_argument(name, tuple(given.shape), f"{tuple(position.shape)}")
    if acceleration is None:
        acceleration = nbody_acceleration(position, mass, softening, G)
    velocity = velocity + (dt / 2) * acceleration
    position = position + dt * velocity
    acceleration = nbody_acceleration(position, mass, softening, G)
    return position, velocity + (dt / 2) * acceleration, acceleration
