"""Host memory that a GPU reads and writes by itself, while the host goes on."""

import torch
from torch import Tensor


def pinned(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros in host memory, page-locked where `device` is a GPU."""
    return torch.zeros(shape, dtype=dtype, pin_memory=device.type == "cuda")


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A host tensor on the device, without waiting for the device."""
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def to_host(tensor: Tensor) -> Tensor:
    """A copy in host memory that is there once the device has come to this point of its stream."""
    if not tensor.is_cuda:
        return tensor
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return copy.copy_(tensor, non_blocking=True)
