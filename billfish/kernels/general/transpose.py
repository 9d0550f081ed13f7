"""A matrix's transpose, written out: the example of coalesced access.

Neighbours in a row are columns apart in the result, so a program that copies element by element
either reads or writes 32 bytes of memory for each element. A tile makes both sides whole: its rows
are read as runs of memory, turned around through shared memory, and written as runs.

The technique's switch: `transpose_gpu.transpose(..., tiled=False)` copies rows element by element:
coalesced reads, scattered writes.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from billfish.kernels._library import bad_argument, check_no_grad, check_tensors, register
from billfish.kernels.general._arguments import check_device


def transpose_reference(x: Tensor) -> Tensor:
    return torch.stack(x.unbind(-1), -2)


def _cpu(x: Tensor) -> Tensor:
    return x.transpose(1, 2).clone(memory_format=torch.contiguous_format)


def _fake(x: Tensor) -> Tensor:
    return x.new_empty((x.shape[0], x.shape[2], x.shape[1]))


_transpose: Callable[..., Tensor] = register(
    "transpose_copy(Tensor x) -> Tensor",
    fake=_fake,
    cpu=_cpu,
    gpu="billfish.kernels.general.transpose_gpu",
)


def transpose(x: Tensor) -> Tensor:
    """[..., M, N] to a new, contiguous [..., N, M].

    Elements of 1, 2, 4 or 8 bytes of any dtype, any strides. Bits are copied: deterministic, NaN
    included.

    Raises KernelArgumentError: fewer than two dimensions, elements of another size, a wrong device,
    or x requires a gradient.
    """
    check_tensors(x=x)
    if x.dim() < 2:
        raise bad_argument("x", tuple(x.shape), "[..., M, N]")
    if x.dtype.itemsize not in (1, 2, 4, 8):
        raise bad_argument("x", x.dtype, "elements of 1, 2, 4 or 8 bytes")
    check_device("x", x)
    check_no_grad("x", x)
    x = x.resolve_conj().resolve_neg()
    m, n = x.shape[-2:]
    out = _transpose(x.reshape(x.shape[:-2].numel(), m, n))
    return out.view((*x.shape[:-2], n, m))
