"""What the kernels of parallel data processing check alike, and the operators they know."""

from collections.abc import Callable

import torch
from torch import Tensor

from billfish.kernels._library import bad_argument, check_dense, check_no_grad

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers of so many bytes, to move elements of any dtype by."""

OPERATORS = ("sum", "max", "min")
COMBINE: dict[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}


def check_device(name: str, tensor: Tensor) -> None:
    """Refuse a tensor that is neither on a CPU nor on a CUDA device."""
    if not (tensor.is_cpu or tensor.is_cuda):
        raise bad_argument(f"{name}.device", tensor.device, "cpu or cuda")
    check_dense(name, tensor)


def check_numbers(name: str, tensor: Tensor) -> None:
    """Refuse what is not a tensor of numbers, or one that autograd would follow."""
    if not isinstance(tensor, Tensor):
        raise bad_argument(name, type(tensor).__name__, "a tensor")
    if tensor.dtype not in FLOATS + INTEGERS:
        raise bad_argument(name, tensor.dtype, "a float or an integer of 8 to 64 bits")
    check_device(name, tensor)
    check_no_grad(name, tensor)


def check_same_device(name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    check_dense(name, tensor)
    if tensor.device != other.device:
        raise bad_argument(f"{name}.device", tensor.device, f"that of {other_name}, {other.device}")


def check_operator(op: str) -> None:
    if op not in OPERATORS:
        raise bad_argument("op", repr(op), " or ".join(OPERATORS))


def dimension(dim: int, tensor: Tensor) -> int:
    """dim counted from the front."""
    if not isinstance(dim, int) or isinstance(dim, bool) or not -tensor.dim() <= dim < tensor.dim():
        raise bad_argument("dim", dim, f"a dimension of shape {tuple(tensor.shape)}")
    return dim % tensor.dim()


def accumulator(dtype: torch.dtype, op: str) -> torch.dtype:
    """What a sum, maximum or minimum of values of dtype is computed in."""
    if dtype == torch.float64:
        return torch.float64
    if dtype in FLOATS:
        return torch.float32
    return torch.int64 if op == "sum" or dtype == torch.int64 else torch.int32


def result(dtype: torch.dtype, op: str) -> torch.dtype:
    """The dtype of the answer: as torch's, int64 for sums of integers, else that of the values."""
    return torch.int64 if op == "sum" and dtype in INTEGERS else dtype


def identity(dtype: torch.dtype, op: str) -> float | int:
    """What changes nothing: 0, or the least or the largest value of dtype."""
    if op == "sum":
        return 0
    if dtype.is_floating_point:
        return float("-inf") if op == "max" else float("inf")
    limits = torch.iinfo(dtype)
    return limits.min if op == "max" else limits.max
