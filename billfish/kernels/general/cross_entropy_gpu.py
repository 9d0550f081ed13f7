"""Cross-entropy on a GPU, in Triton; see `cross_entropy.py`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from billfish.kernels.general.cross_entropy import in_chunks
from billfish.kernels.general.gpu import _on, _rows
from billfish.kernels.general.softmax_gpu import log_sum, sum_warps

BLOCK = 4096


@triton.jit
def _loss_kernel(
    logits, target, loss, total, n, stride, ignore, GRADIENT: tl.constexpr,
    ONLINE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """GRADIENT: softmax - one_hot is written over the logits; else total is kept."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    wanted = tl.load(target + row)
    kept = wanted != ignore
    most, powers = log_sum(logits, n, ONLINE, BLOCK)
    whole = most + tl.log(powers)
    there = kept & (wanted >= 0) & (wanted < n)
    picked = tl.load(logits + wanted, mask=there, other=float("nan")).to(tl.float32)
    tl.store(loss + row, tl.where(kept, whole - picked, 0.0))
    if GRADIENT:
        # Every thread has read its part, and the one logit, before any is written over.
        tl.debug_barrier()
        _gradient(logits, logits, whole, 1.0, wanted, kept, n, BLOCK)
    else:
        tl.store(total + row, whole)


@triton.jit
def _gradient(logits, out, whole, factor, wanted, kept, n, BLOCK: tl.constexpr):
    for start in range(0, n, BLOCK):
        d = start + tl.arange(0, BLOCK)
        value = tl.load(logits + d, mask=d < n, other=0.0).to(tl.float32)
        grad = factor * (tl.exp(value - whole) - tl.where(d == wanted, 1.0, 0.0))
        grad = tl.where(kept, grad, 0.0)
        tl.store(out + d, grad.to(out.dtype.element_ty), mask=d < n)


@triton.jit
def _backward_kernel(
    dloss, logits, total, target, out, n, stride, dloss_stride, ignore, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    wanted = tl.load(target + row)
    factor = tl.load(dloss + row * dloss_stride)
    whole = tl.load(total + row)
    kept = wanted != ignore
    _gradient(logits + row * stride, out + row * n, whole, factor, wanted, kept, n, BLOCK)


def cross_entropy(
    logits: Tensor, target: Tensor, ignore_index: int, *, online: bool = True, block: int = BLOCK
) -> tuple[Tensor, Tensor]:
    """online: maximum and sum in one read."""
    rows = _rows(logits)
    loss = torch.empty(rows.shape[0], dtype=torch.float32, device=logits.device)
    total = torch.empty_like(loss)
    if rows.shape[0]:
        with _on(logits):
            _loss_kernel[(rows.shape[0],)](
                rows, target.contiguous(), loss, total, rows.shape[1], rows.stride(0),
                ignore_index, GRADIENT=False, ONLINE=online, BLOCK=block,
                num_warps=sum_warps(block, logits),
            )  # fmt: skip
    return loss, total


def cross_entropy_backward(
    dloss: Tensor, logits: Tensor, total: Tensor, target: Tensor, ignore_index: int,
    *, block: int = 8192,
) -> Tensor:  # fmt: skip
    rows = _rows(logits)
    out = torch.empty(rows.shape, dtype=logits.dtype, device=logits.device)
    if rows.shape[0]:
        with _on(logits):
            _backward_kernel[(rows.shape[0],)](
                dloss, rows, total, target.contiguous(), out, rows.shape[1], rows.stride(0),
                dloss.stride(0), ignore_index, BLOCK=block, num_warps=min(16, max(1, block // 512)),
            )  # fmt: skip
    return out


def linear_cross_entropy(
    x: Tensor, weight: Tensor, target: Tensor, ignore_index: int, chunk: int, gradients: bool,
    *, block: int = BLOCK,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    def step(logits: Tensor, target: Tensor) -> Tensor:
        loss = torch.empty(logits.shape[0], dtype=torch.float32, device=x.device)
        with _on(x):
            _loss_kernel[(logits.shape[0],)](
                logits, target.contiguous(), loss, loss, logits.shape[1], logits.stride(0),
                ignore_index, GRADIENT=True, ONLINE=True, BLOCK=block,
                num_warps=sum_warps(block, logits),
            )  # fmt: skip
        return loss

    return in_chunks(x, weight, target, ignore_index, chunk, gradients, step, _add_product)


def _add_product(total: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
    """total += a @ b, or = where it is the first, in the product's own pass: float32 from half
    precision without rounding."""
    if a.dtype == total.dtype or not total.is_cuda:
        total.addmm_(a.to(total.dtype), b.to(total.dtype), beta=0 if first else 1)
    elif first:
        torch.mm(a, b, out_dtype=total.dtype, out=total)
    else:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
