"""What tests of the general kernels are fed with, and how results are compared with float64."""

import torch


def draw(*shape, dtype=torch.float32, seed=0):
    """Standard normal values, drawn in double precision and rounded; integers from -100 to 99, all
    values of uint8."""
    rng = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point or dtype.is_complex:
        wide = torch.complex128 if dtype.is_complex else torch.float64
        return torch.randn(*shape, generator=rng, dtype=wide).to(dtype)
    low, high = (0, 256) if dtype == torch.uint8 else (-100, 100)
    return torch.randint(low, high, shape, generator=rng, dtype=dtype)


def exact(x):
    """As the definitions want it: in float64, or the integers that it is."""
    return x.double() if x.dtype.is_floating_point else x
