"""The gradient of an image by Sobel's windows, as magnitude and direction: the example of fusion.

Written as operators, it is two convolutions, then a root and an angle: the image read twice, the
gradients written, and read twice again. Here they are registers: one read, two writes.

The technique's switch: `sobel_gpu.sobel(..., fused=False)`: two convolutions, and a third launch.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from billfish.kernels._library import register
from billfish.kernels.general._image import check_image, check_mode, padded, windows

_TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.uint8)

SMOOTH = (1.0, 2.0, 1.0)
DIFFERENCE = (-1.0, 0.0, 1.0)


def sobel_reference(x: Tensor, mode: str = "reflect") -> tuple[Tensor, Tensor]:
    """Of [images, H, W], in x's dtype."""
    seen = windows(x, 3, 3, mode, 0.0)
    smooth, difference = x.new_tensor(SMOOTH), x.new_tensor(DIFFERENCE)
    across = (seen * smooth[:, None] * difference).sum((-2, -1))
    down = (seen * difference[:, None] * smooth).sum((-2, -1))
    return torch.hypot(across, down), torch.atan2(down, across)


def _cpu(x: Tensor, mode: str) -> tuple[Tensor, Tensor]:
    if not x.numel():
        return _fake(x, mode)
    seen = padded(x.float(), 3, 3, mode, 0.0)
    rows = seen[:, :, 2:] - seen[:, :, :-2]
    across = rows[:, :-2] + 2 * rows[:, 1:-1] + rows[:, 2:]
    columns = seen[:, 2:] - seen[:, :-2]
    down = columns[:, :, :-2] + 2 * columns[:, :, 1:-1] + columns[:, :, 2:]
    return torch.hypot(across, down).contiguous(), torch.atan2(down, across).contiguous()


def _fake(x: Tensor, mode: str) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=torch.float32), x.new_empty(x.shape, dtype=torch.float32)


_sobel: Callable[..., tuple[Tensor, Tensor]] = register(
    "sobel(Tensor x, str mode) -> (Tensor, Tensor)",
    fake=_fake,
    cpu=_cpu,
    gpu="billfish.kernels.general.sobel_gpu",
)


def sobel(x: Tensor, mode: str = "reflect") -> tuple[Tensor, Tensor]:
    """(magnitude, direction) of each image's gradient, float32, x's shape.

    x: [..., H, W], uint8, float16, bfloat16 or float32, any strides (copied where not contiguous).
    The gradient along columns is [1, 2, 1]^T [-1, 0, 1], that along rows [-1, 0, 1]^T [1, 2, 1]
    (Sobel, 1968), not divided by 8; the direction is atan2 of the second by the first, in radians,
    -pi to pi, clockwise from the right on a screen; 0 where there is no gradient (its error is
    below 1e-6). mode: what lies outside: "reflect", "replicate", "circular" or "constant" (0), as
    `convolve2d` has them.

    Deterministic.

    Raises KernelArgumentError: dtype, device, shape or mode is wrong, or x requires a gradient.
    """
    check_image(x, _TYPES)
    check_mode(mode, 0.0, 3, 3, x)
    magnitude, direction = _sobel(x.reshape(x.shape[:-2].numel(), *x.shape[-2:]), mode)
    return magnitude.view(x.shape), direction.view(x.shape)
