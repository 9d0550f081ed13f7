"""A sparse matrix, in compressed rows, times a vector or a few: the example of uneven work.

Each stored element is read once and multiplied with an element of x from anywhere, so time is that
of memory, if all of the machine is at work to the end. Rows differ: a thread each leaves memory
uncoalesced, a program each idles on short ones, and either waits for the longest. Here a tile of
threads takes several rows at once, as many lanes to a row as rows are long on average, and whoever
meets a row much longer than that leaves it alone and puts pieces of it, of one size, on a list. A
second launch works that list off, and a third adds the pieces of a row in their order. Whether
there are any is known on the GPU only, and the host need not wait to know.

The technique's switch: `spmv_gpu.spmv(..., balanced=False)` does each row where it is met.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from billfish.kernels._library import (
    bad_argument,
    check_like,
    check_no_grad,
    check_tensors,
    register,
)
from billfish.kernels.general._arguments import (
    FLOATS,
    accumulator,
    check_device,
    check_same_device,
)


def spmv_reference(values: Tensor, columns: Tensor, offsets: Tensor, x: Tensor) -> Tensor:
    """One row after another."""
    bounds = offsets.tolist()
    out = torch.zeros(len(bounds) - 1, *x.shape[1:], dtype=x.dtype, device=x.device)
    for i in range(len(bounds) - 1):
        row = slice(bounds[i], bounds[i + 1])
        out[i] = values[row] @ x[columns[row].long()]
    return out


def _cpu(values: Tensor, columns: Tensor, offsets: Tensor, x: Tensor) -> Tensor:
    wide = accumulator(values.dtype, "sum")
    first, last = int(offsets[0]), int(offsets[-1])
    products = values[first:last, None].to(wide) * x[columns[first:last].long()].to(wide)
    sums = torch.segment_reduce(
        products, "sum", offsets=(offsets - first).long(), axis=0, unsafe=True, initial=0.0
    )
    return sums.to(values.dtype)


def _fake(values: Tensor, columns: Tensor, offsets: Tensor, x: Tensor) -> Tensor:
    return x.new_empty((offsets.shape[0] - 1, x.shape[1]))


_spmv: Callable[..., Tensor] = register(
    "spmv(Tensor values, Tensor columns, Tensor offsets, Tensor x) -> Tensor",
    fake=_fake,
    cpu=_cpu,
    gpu="billfish.kernels.general.spmv_gpu",
)


def spmv(
    values: Tensor, columns: Tensor, offsets: Tensor, x: Tensor, check_indices: bool = False
) -> Tensor:
    """y = A x: y[i] = sum of values[e] * x[columns[e]] for e in offsets[i] to offsets[i + 1] - 1.

    values: [stored] floats (64, 32, bf16, fp16); columns: [stored] int32 or int64, in any order, a
    pair twice counts twice; offsets: [rows + 1] int32 or int64, never decreasing, from 0 or more to
    `stored` or less (as torch.sparse_csr_tensor has them). x: [columns of A] or [columns of A, k],
    any strides, of values' dtype. Returns [rows] or [rows, k], contiguous; rows without elements
    give 0. Half floats are added in float32 and rounded once. check_indices: look at all indices of
    a matrix on a GPU too, which waits for it; without, an element whose column is none of A's
    counts as 0, offsets out of order give wrong sums, and nothing outside of the tensors is read.

    Deterministic: the same bits from run to run for the same matrix on the same device.

    Raises KernelArgumentError: dtype, device or shape is wrong, a tensor requires a gradient, and,
    on a CPU or with check_indices, offsets that decrease or leave the elements, or columns that
    leave x.
    """
    check_tensors(values=values, columns=columns, offsets=offsets, x=x)
    if values.dtype not in FLOATS or values.dim() != 1:
        raise bad_argument("values", f"{values.dtype} {tuple(values.shape)}", "floats [stored]")
    check_device("values", values)
    for name, indices, length in (
        ("columns", columns, len(values)),
        ("offsets", offsets, max(offsets.numel(), 1)),
    ):
        good = indices.dtype in (torch.int32, torch.int64) and indices.shape == (length,)
        if not good:
            got = f"{indices.dtype} {tuple(indices.shape)}"
            wanted = f"[{length}]" if name == "columns" else "[rows + 1]"
            raise bad_argument(name, got, f"int32 or int64 {wanted}")
        check_same_device(name, indices, "values", values)
    check_like("x", x, "values", values)
    if x.dim() not in (1, 2):
        raise bad_argument("x", tuple(x.shape), "[columns] or [columns, k]")
    check_no_grad("values", values)
    check_no_grad("x", x)
    known = values.is_cpu and type(offsets) is Tensor
    if (known or check_indices) and not torch.compiler.is_compiling():
        _check_indices(columns, offsets, x.shape[0])
    y = _spmv(values, columns, offsets, x if x.dim() == 2 else x[:, None])
    return y if x.dim() == 2 else y.view(-1)


def _check_indices(columns: Tensor, offsets: Tensor, count: int) -> None:
    inside = int(offsets[0]) >= 0 and int(offsets[-1]) <= len(columns)
    if not inside or bool((offsets.diff() < 0).any()):
        wanted = f"0 to {len(columns)}, in order"
        raise bad_argument("offsets", "values out of order or of the elements", wanted)
    if len(columns) and not bool(((columns >= 0) & (columns < count)).all()):
        span = f"{int(columns.min())} to {int(columns.max())}"
        raise bad_argument("columns", span, f"0 to {count - 1}, the rows of x")
