"""The bilateral filter: a blur that keeps edges (Tomasi & Manduchi, 1998).

Each neighbour counts by its distance in the image and by its difference in value, two Gaussians
that multiply. Their exponents add, so one exponential a neighbour does for both, and the exponent
of the distance is the same for all pixels: it comes from a table of the window. As in
`convolve2d`, a value read serves the windows of several rows out of a register.

The techniques' switches: `bilateral_gpu.bilateral(..., reuse=False)`: a row at a time, each value
read for each neighbour; `table=False`: programs compute the distances' weights, and multiply.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from billfish.kernels._library import bad_argument, register
from billfish.kernels.general._image import (
    MOST,
    check_image,
    check_mode,
    padded,
    rounded,
    windows,
)

_TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.uint8)


def bilateral_reference(
    x: Tensor, radius: int, sigma_space: float, sigma_range: float, mode: str = "reflect"
) -> Tensor:
    """Of [images, H, W], in x's dtype."""
    size = 2 * radius + 1
    seen = windows(x, size, size, mode, 0.0)
    away = torch.arange(-radius, radius + 1, dtype=x.dtype) ** 2
    near = -(away[:, None] + away) / (2 * sigma_space**2)
    like = -((seen - x[..., None, None]) ** 2) / (2 * sigma_range**2)
    weights = near.exp() * like.exp()
    return (weights * seen).sum((-2, -1)) / weights.sum((-2, -1))


def _cpu(x: Tensor, radius: int, sigma_space: float, sigma_range: float, mode: str) -> Tensor:
    if not x.numel():
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    size = 2 * radius + 1
    height, width = x.shape[1:]
    own = x.float()
    seen = padded(own, size, size, mode, 0.0)
    total, weight = torch.zeros_like(own), torch.zeros_like(own)
    for down in range(size):
        for across in range(size):
            other = seen[:, down : down + height, across : across + width]
            away = (down - radius) ** 2 + (across - radius) ** 2
            near = -away / (2 * sigma_space**2)
            counts = (near - (other - own).square() / (2 * sigma_range**2)).exp()
            weight += counts
            total += counts * other
    return rounded(total / weight, x.dtype).contiguous()


def _fake(x: Tensor, radius: int, sigma_space: float, sigma_range: float, mode: str) -> Tensor:
    return x.new_empty(x.shape)


_bilateral: Callable[..., Tensor] = register(
    "bilateral(Tensor x, int radius, float sigma_space, float sigma_range, str mode) -> Tensor",
    fake=_fake,
    cpu=_cpu,
    gpu="billfish.kernels.general.bilateral_gpu",
)


def bilateral(
    x: Tensor,
    sigma_space: float,
    sigma_range: float,
    radius: int | None = None,
    mode: str = "reflect",
) -> Tensor:
    """Each image's weighted means over windows of 2 radius + 1 pixels a side, all of them.

    x: [..., H, W], each image of one channel; uint8, float16, bfloat16 or float32, any strides
    (copied where not contiguous). sigma_space: in pixels; sigma_range: in the values' unit; radius:
    2 sigma_space, rounded up, at most 15, if not given. Returns x's shape and dtype: computed in
    float32, rounded once; bytes to the nearest, halves up. A NaN makes NaN of the pixels that see
    it. mode: what lies outside: "reflect", "replicate", "circular" or "constant" (0), as
    `convolve2d` has them.

    Deterministic. The first call of a sigma_space and radius makes a table, which is kept: it
    cannot be captured in a CUDA graph.

    Raises KernelArgumentError: dtype, device, shape, mode, a sigma or the radius is wrong, x
    requires a gradient, or a first call is captured.
    """
    check_image(x, _TYPES)
    for name, sigma in (("sigma_space", sigma_space), ("sigma_range", sigma_range)):
        if not isinstance(sigma, (int, float)) or not 1e-6 < sigma < 1e6:
            raise bad_argument(name, sigma, "a number, 1e-6 to 1e6")
    if radius is None:
        radius = min(MOST // 2, math.ceil(2 * sigma_space))
    if not isinstance(radius, int) or not 0 <= radius <= MOST // 2:
        raise bad_argument("radius", radius, f"0 to {MOST // 2}")
    size = 2 * radius + 1
    check_mode(mode, 0.0, size, size, x)
    images = x.reshape(x.shape[:-2].numel(), *x.shape[-2:])
    return _bilateral(images, radius, float(sigma_space), float(sigma_range), mode).view(x.shape)
