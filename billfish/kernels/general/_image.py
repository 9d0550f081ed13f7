"""What the kernels of images check alike, and what lies outside of an image."""

import math

import torch
from torch import Tensor

from billfish.kernels._library import bad_argument, check_no_grad, number
from billfish.kernels.general._arguments import FLOATS, check_device, check_same_device

IMAGES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.uint8)
MODES = ("constant", "reflect", "replicate", "circular")
MOST = 31
"""Rows and columns of a window."""


def check_image(x: Tensor, types: tuple[torch.dtype, ...] = IMAGES) -> None:
    if not isinstance(x, Tensor):
        raise bad_argument("x", type(x).__name__, "a tensor")
    if x.dim() < 2:
        raise bad_argument("x", tuple(x.shape), "[..., H, W]")
    if x.dtype not in types:
        names = ", ".join(str(t).removeprefix("torch.") for t in types)
        raise bad_argument("x", x.dtype, f"one of {names}")
    check_device("x", x)
    check_no_grad("x", x)


def check_weights(name: str, weights: Tensor, dims: int, x: Tensor) -> None:
    if not isinstance(weights, Tensor):
        raise bad_argument(name, type(weights).__name__, "a tensor")
    odd = all(size % 2 == 1 and size <= MOST for size in weights.shape)
    if weights.dim() != dims or not odd:
        raise bad_argument(name, tuple(weights.shape), f"{dims} odd sizes up to {MOST}")
    if weights.dtype not in FLOATS:
        raise bad_argument(name, weights.dtype, "floats")
    check_same_device(name, weights, "x", x)
    check_no_grad(name, weights)


def check_mode(mode: str, value: float, height: int, width: int, x: Tensor) -> None:
    """height, width: of the window."""
    if mode not in MODES:
        raise bad_argument("mode", repr(mode), " or ".join(MODES))
    if not isinstance(value, (int, float)) or (mode != "constant" and value):
        raise bad_argument("value", value, 'a number, and 0 unless mode is "constant"')
    number("value", value)
    # One turn at most: of what is mirrored without its edge, or wrapped around.
    reach = {"reflect": 1, "circular": 0}.get(mode, -math.inf)
    for size, window in zip(x.shape[-2:], (height, width), strict=True):
        if size and size < window // 2 + reach:
            raise bad_argument("x", tuple(x.shape), f"{window // 2 + reach} pixels for {mode!r}")


def wide_type(dtype: torch.dtype) -> torch.dtype:
    """What is computed in, for images of dtype."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x as an image of dtype: to the nearest byte, halves up, of what bytes can hold."""
    if dtype == torch.uint8:
        return (x + 0.5).floor().clamp(0, 255).to(dtype)
    return x.to(dtype)


def padded(x: Tensor, height: int, width: int, mode: str, value: float) -> Tensor:
    """x: [images, H, W], widened for a window. A copy for any mode but "constant" of no value."""
    pads = [width // 2] * 2 + [height // 2] * 2
    if mode == "constant":
        return torch.nn.functional.pad(x, pads, value=value)
    return torch.nn.functional.pad(x[:, None], pads, mode=mode)[:, 0]


def windows(x: Tensor, height: int, width: int, mode: str, value: float) -> Tensor:
    """[images, H, W, height, width]: what the window sees at each pixel. For references."""
    return padded(x, height, width, mode, value).unfold(1, height, 1).unfold(2, width, 1)
