"""Convolution of images with a small window: the example of reuse.

Each pixel is seen by every place of the window, so to read it once for each is as many reads as
products. Here a program computes 8 to 32 rows of a strip of columns at a time, a thread one column
of them: a value that is read serves all rows whose window it is in, out of a register, and only the
shifts along a row are read again, out of the first-level cache.

A window that is a column times a row (a Gaussian, a box) needs height + width products a pixel, not
height x width. `separable_convolve2d` does both in one launch where the window is small: the rows'
results stay in registers until the columns' are done. With sides longer than 5, too many rows
that a program filters are for its neighbours' windows: two launches, each of a side, are less work,
though what is between them is written and read. In float32 a thread of either has four columns.

The techniques' switches: `convolve2d_gpu.convolve2d(..., reuse=False)`: a row at a time, each value
read for each product; `convolve2d_gpu.separable_convolve2d(..., fused=)`: False is two launches,
True one.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from billfish.kernels._library import bad_argument, number, register
from billfish.kernels.general._image import (
    MOST,
    check_image,
    check_mode,
    check_weights,
    padded,
    rounded,
    wide_type,
    windows,
)

_GPU = "billfish.kernels.general.convolve2d_gpu"


def convolve2d_reference(
    x: Tensor, kernel: Tensor, mode: str = "constant", value: float = 0.0, correlate: bool = False
) -> Tensor:
    """Of [images, H, W], in x's dtype, pixel by pixel."""
    weights = kernel if correlate else kernel.flip(0, 1)
    height, width = kernel.shape
    return (windows(x, height, width, mode, value) * weights).sum((-2, -1))


def _correlated(x: Tensor, weights: Tensor) -> Tensor:
    out: Tensor = torch.nn.functional.conv2d(x[:, None], weights[None, None])
    return out[:, 0]


def _cpu(x: Tensor, weights: Tensor, mode: str, value: float) -> Tensor:
    if not x.numel():
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    height, width = weights.shape
    around = padded(x.to(weights.dtype), height, width, mode, value)
    return rounded(_correlated(around, weights), x.dtype).contiguous()


def _separable_cpu(x: Tensor, column: Tensor, row: Tensor, mode: str, value: float) -> Tensor:
    if not x.numel():
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    around = padded(x.to(row.dtype), column.shape[0], row.shape[0], mode, value)
    return rounded(_correlated(_correlated(around, row[None]), column[:, None]), x.dtype)


def _fake(x: Tensor, weights: Tensor, mode: str, value: float) -> Tensor:
    return x.new_empty(x.shape)


def _separable_fake(x: Tensor, column: Tensor, row: Tensor, mode: str, value: float) -> Tensor:
    return x.new_empty(x.shape)


_convolve: Callable[..., Tensor] = register(
    "convolve2d(Tensor x, Tensor weights, str mode, float value) -> Tensor",
    fake=_fake,
    cpu=_cpu,
    gpu=_GPU,
)
_separable: Callable[..., Tensor] = register(
    "separable_convolve2d(Tensor x, Tensor column, Tensor row, str mode, float value) -> Tensor",
    fake=_separable_fake,
    cpu=_separable_cpu,
    gpu=_GPU,
)


def convolve2d(
    x: Tensor, kernel: Tensor, mode: str = "constant", value: float = 0.0, correlate: bool = False
) -> Tensor:
    """Each image convolved with kernel, or correlated (its window not turned around).

    x: [..., H, W], uint8, float16, bfloat16, float32 or float64, any strides (copied where not
    contiguous); kernel: floats [rows, columns], odd sizes up to 31, centred. Returns x's shape and
    dtype: computed in float32 (float64 of float64), rounded once; bytes to the nearest, halves up,
    limited to 0..255. NaN spreads over its window.

    mode: what lies outside: "constant" (value, 0 if not given), "reflect" (mirrored, the edge not
    repeated), "replicate" (the edge) or "circular", as torch.nn.functional.pad has them; an image
    that is smaller than half the window can be neither reflected nor circular.

    Deterministic.

    Raises KernelArgumentError: dtype, device, shape, mode or value is wrong, or an input requires a
    gradient.
    """
    check_image(x)
    check_weights("kernel", kernel, 2, x)
    check_mode(mode, value, kernel.shape[0], kernel.shape[1], x)
    weights = (kernel if correlate else kernel.flip(0, 1)).to(wide_type(x.dtype)).contiguous()
    images = x.reshape(x.shape[:-2].numel(), *x.shape[-2:])
    return _convolve(images, weights, mode, float(value)).view(x.shape)


def separable_convolve2d(
    x: Tensor,
    column: Tensor,
    row: Tensor,
    mode: str = "constant",
    value: float = 0.0,
    correlate: bool = False,
) -> Tensor:
    """convolve2d with the kernel column[:, None] * row: rows first, then columns.

    column, row: floats, odd sizes up to 31. What is between them is not rounded to x's dtype. All
    else as `convolve2d`.
    """
    check_image(x)
    check_weights("column", column, 1, x)
    check_weights("row", row, 1, x)
    check_mode(mode, value, column.shape[0], row.shape[0], x)
    dtype = wide_type(x.dtype)
    sides = [(s if correlate else s.flip(0)).to(dtype).contiguous() for s in (column, row)]
    images = x.reshape(x.shape[:-2].numel(), *x.shape[-2:])
    return _separable(images, *sides, mode, float(value)).view(x.shape)


def gaussian(
    sigma: float, radius: int | None = None, device: torch.device | str | None = None
) -> Tensor:
    """The weights of a Gaussian at -radius..radius, float64, of sum 1: a side of a blur.

    sigma: in pixels; radius: 3 sigma, rounded up, if not given. Deterministic.

    Raises KernelArgumentError: sigma is not a positive number, or the window exceeds 31.
    """
    if not isinstance(sigma, (int, float)) or not 0 < sigma < math.inf:
        raise bad_argument("sigma", sigma, "a positive number")
    sigma = number("sigma", sigma)
    radius = math.ceil(min(3 * sigma, MOST)) if radius is None else radius
    if not isinstance(radius, int) or not 0 <= radius <= MOST // 2:
        raise bad_argument("radius", radius, f"0 to {MOST // 2}")
    at = torch.arange(-radius, radius + 1, dtype=torch.float64, device=device)
    weights = (-0.5 * (at / sigma) ** 2).exp()
    return weights / weights.sum()
