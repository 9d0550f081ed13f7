"""Softmax and its derivative on a GPU, in Triton; see `softmax.py`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from billfish.kernels.general.gpu import _on, _rows

RESIDENT = 16384
"""Values of a row that registers hold."""


@triton.jit
def log_sum(x, n, ONLINE: tl.constexpr, BLOCK: tl.constexpr):
    """(the maximum of n values, the sum of exp(value - maximum)), in one read; without ONLINE in
    two, the first for the maximum."""
    most = tl.full([BLOCK], float("-inf"), tl.float32)
    if not ONLINE:
        for start in range(0, n, BLOCK):
            d = start + tl.arange(0, BLOCK)
            most = tl.maximum(most, tl.load(x + d, mask=d < n, other=float("-inf")).to(tl.float32))
        most = tl.full([BLOCK], 0.0, tl.float32) + tl.max(most, 0)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, n, BLOCK):
        d = start + tl.arange(0, BLOCK)
        value = tl.load(x + d, mask=d < n, other=float("-inf")).to(tl.float32)
        more = tl.maximum(most, value)
        # A lane that has seen minus infinities only: there is nothing to add, nor to rescale.
        seen = more > float("-inf")
        shift = tl.where(seen, more, 0.0)
        total = total * tl.exp(most - shift) + tl.where(
            value != value, value, tl.exp(value - shift)
        )
        most = more
    largest = tl.max(most, 0)
    shift = tl.where(largest > float("-inf"), largest, 0.0)
    return largest, tl.sum(total * tl.exp(most - shift), 0)


@triton.jit
def _softmax_kernel(x, out, n, x_stride, RESIDENT: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    x += row * x_stride
    out += row * n
    if RESIDENT:
        d = tl.arange(0, BLOCK)
        value = tl.load(x + d, mask=d < n, other=float("-inf")).to(tl.float32)
        power = tl.exp(value - tl.max(value, 0))
        tl.store(out + d, (power / tl.sum(power, 0)).to(out.dtype.element_ty), mask=d < n)
    else:
        most, total = log_sum(x, n, True, BLOCK)
        for start in range(0, n, BLOCK):
            d = start + tl.arange(0, BLOCK)
            value = tl.load(x + d, mask=d < n, other=0.0).to(tl.float32)
            result = tl.exp(value - most) / total
            tl.store(out + d, result.to(out.dtype.element_ty), mask=d < n)


@triton.jit
def _softmax_backward_kernel(
    dy, y, dx, n, dy_stride, y_stride, RESIDENT: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    dy += row * dy_stride
    y += row * y_stride
    dx += row * n
    if RESIDENT:
        d = tl.arange(0, BLOCK)
        grad = tl.load(dy + d, mask=d < n, other=0.0).to(tl.float32)
        value = tl.load(y + d, mask=d < n, other=0.0).to(tl.float32)
        result = value * (grad - tl.sum(grad * value, 0))
        tl.store(dx + d, result.to(dx.dtype.element_ty), mask=d < n)
    else:
        total = tl.zeros([BLOCK], tl.float32)
        for start in range(0, n, BLOCK):
            d = start + tl.arange(0, BLOCK)
            grad = tl.load(dy + d, mask=d < n, other=0.0).to(tl.float32)
            total += grad * tl.load(y + d, mask=d < n, other=0.0).to(tl.float32)
        dot = tl.sum(total, 0)
        for start in range(0, n, BLOCK):
            d = start + tl.arange(0, BLOCK)
            grad = tl.load(dy + d, mask=d < n, other=0.0).to(tl.float32)
            value = tl.load(y + d, mask=d < n, other=0.0).to(tl.float32)
            tl.store(dx + d, (value * (grad - dot)).to(dx.dtype.element_ty), mask=d < n)


def _plan(n: int, resident: bool, block: int | None) -> tuple[bool, int, int]:
    """(whether a row stays in registers, block, warps)."""
    resident = resident and n <= RESIDENT
    block = block or (triton.next_power_of_2(n) if resident else 4096)
    return resident, block, min(16, max(1, block // 512))


def softmax(x: Tensor, *, resident: bool = True, block: int | None = None) -> Tensor:
    """x: [rows, n]."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        rows = _rows(x)
        resident, block, warps = _plan(x.shape[1], resident, block)
        with _on(x):
            _softmax_kernel[(rows.shape[0],)](
                rows, out, x.shape[1], rows.stride(0), RESIDENT=resident, BLOCK=block,
                num_warps=warps,
            )  # fmt: skip
    return out


def softmax_backward(
    dy: Tensor, y: Tensor, *, resident: bool = True, block: int | None = None
) -> Tensor:
    """dy, y: [rows, n]."""
    out = torch.empty(y.shape, dtype=y.dtype, device=y.device)
    if y.numel():
        grads, rows = _rows(dy), _rows(y)
        resident, block, warps = _plan(y.shape[1], resident, block)
        with _on(y):
            _softmax_backward_kernel[(rows.shape[0],)](
                grads, rows, out, y.shape[1], grads.stride(0), rows.stride(0), RESIDENT=resident,
                BLOCK=block, num_warps=warps,
            )  # fmt: skip
    return out
