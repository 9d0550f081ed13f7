"""Stream compaction: the values where a mask is true, in their order, without holes.

Where a value goes is how many are kept before it: an exclusive scan of the mask. The scan is done
in the same pass (decoupled look-back, `_triton.py`), so values and mask are read once, and what is
kept and the zeros behind it are written once.

The technique's switch: `compact_gpu.compact(..., fused=False)` runs a scan of its own first, and
writes and reads the places.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from billfish.kernels._library import bad_argument, check_no_grad, check_tensors, register
from billfish.kernels.general._arguments import BITS, check_device, check_same_device


def compact_reference(x: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
    kept = [i for i, wanted in enumerate(keep.tolist()) if wanted]
    out = torch.zeros_like(x, memory_format=torch.contiguous_format)
    out[: len(kept)] = x[kept]
    return out, torch.tensor([len(kept)], dtype=torch.int64)


def _cpu(x: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
    bits = x.view(BITS[x.dtype.itemsize])
    kept = torch.masked_select(bits, keep)
    out = torch.zeros(x.shape, dtype=bits.dtype)
    out[: len(kept)] = kept
    return out.view(x.dtype), torch.tensor([len(kept)], dtype=torch.int64)


def _fake(x: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty((1,), dtype=torch.int64)


_compact: Callable[..., tuple[Tensor, Tensor]] = register(
    "compact(Tensor x, Tensor keep) -> (Tensor, Tensor)",
    fake=_fake,
    cpu=_cpu,
    gpu="billfish.kernels.general.compact_gpu",
)


def compact(x: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
    """(x where keep, moved to the front in their order, the rest 0; how many they are, int64 [1]).

    x: [n], n < 2^31, elements of 1, 2, 4 or 8 bytes of any dtype, any stride; keep: bool [n]. The
    result has n elements, so that the host need not wait for the count; `out[:count.item()]` does.

    Deterministic.

    Raises KernelArgumentError: dtype, device or shape is wrong, or x requires a gradient.
    """
    check_tensors(x=x)
    if x.dim() != 1 or x.shape[0] >= 2**31:
        raise bad_argument("x", tuple(x.shape), "[n], n < 2^31")
    if x.dtype.itemsize not in (1, 2, 4, 8):
        raise bad_argument("x", x.dtype, "elements of 1, 2, 4 or 8 bytes")
    check_device("x", x)
    check_same_device("keep", keep, "x", x)
    if keep.dtype != torch.bool or keep.shape != x.shape:
        raise bad_argument("keep", f"{keep.dtype} {tuple(keep.shape)}", f"bool {tuple(x.shape)}")
    check_no_grad("x", x)
    return _compact(x.resolve_conj().resolve_neg(), keep)
