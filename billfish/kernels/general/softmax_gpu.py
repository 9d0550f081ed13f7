"""Softmax and its derivative on a GPU, in Triton; see `softmax.py`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from billfish.kernels.general.gpu import _on, _rows

RESIDENT = 16384
"""Values of a row that registers hold."""


@triton.jit
def _some(x, start, n, DEEP: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK values from start on as [DEEP, BLOCK / DEEP], minus infinity behind the n-th."""
    WIDTH: tl.constexpr = BLOCK // DEEP
    d = start + tl.arange(0, DEEP)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    return tl.load(x + d, mask=d < n, other=float("-inf"))


@triton.jit
def log_sum(x, n, ONLINE: tl.constexpr, BLOCK: tl.constexpr):
    """(the maximum of n values, the sum of exp(value - maximum)), in one read; without ONLINE in
    two, the first for the maximum.

    A thread keeps a maximum and a sum of its own, and rescales the sum once for several values: an
    exponential for each value and another to rescale would take longer than to read it.
    """
    DEEP: tl.constexpr = 4 if BLOCK >= 4096 else 1
    most = tl.full([BLOCK // DEEP], float("-inf"), tl.float32)
    if not ONLINE:
        for start in range(0, n, BLOCK):
            most = tl.maximum(most, tl.max(_some(x, start, n, DEEP, BLOCK).to(tl.float32), 0))
        most = tl.full([BLOCK // DEEP], 0.0, tl.float32) + tl.max(most, 0)
    total = tl.zeros([BLOCK // DEEP], tl.float32)
    coming = _some(x, 0, n, DEEP, BLOCK)
    for start in range(0, n, BLOCK):
        value = coming.to(tl.float32)
        # The next are on their way while these are added.
        coming = _some(x, start + BLOCK, n, DEEP, BLOCK)
        more = tl.maximum(most, tl.max(value, 0))
        # Of minus infinities only: there is nothing to add, nor to rescale.
        shift = tl.where(more > float("-inf"), more, 0.0)
        # A maximum passes NaN by, its exponential is in the sum.
        total = total * tl.exp(most - shift) + tl.sum(tl.exp(value - shift[None, :]), 0)
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
        scale = 1.0 / total
        for start in range(0, n, BLOCK):
            d = start + tl.arange(0, BLOCK)
            value = tl.load(x + d, mask=d < n, other=0.0).to(tl.float32)
            result = tl.exp(value - most) * scale
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


def softmax(x: Tensor, *, resident: bool = True, block: int | None = None) -> Tensor:
    """x: [rows, n]."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        rows, n = _rows(x), x.shape[1]
        resident = resident and n <= RESIDENT
        # A long row takes all threads of a multiprocessor: so few are under way that the L2 cache
        # holds them until they are read again. Unaligned ones would not find enough registers.
        most = (65536 if n % 16 == 0 else 32768) // x.dtype.itemsize
        block = block or min(RESIDENT if resident else most, triton.next_power_of_2(n))
        with _on(x):
            _softmax_kernel[(rows.shape[0],)](
                rows, out, n, rows.stride(0), RESIDENT=resident, BLOCK=block,
                num_warps=_warps(block) if resident else sum_warps(block, x),
            )  # fmt: skip
    return out


def softmax_backward(
    dy: Tensor, y: Tensor, *, resident: bool = True, block: int | None = None
) -> Tensor:
    """dy, y: [rows, n]."""
    out = torch.empty(y.shape, dtype=y.dtype, device=y.device)
    if y.numel():
        grads, rows, n = _rows(dy), _rows(y), y.shape[1]
        resident = resident and n <= RESIDENT
        block = block or (triton.next_power_of_2(n) if resident else 4096)
        with _on(y):
            _softmax_backward_kernel[(rows.shape[0],)](
                grads, rows, out, n, grads.stride(0), rows.stride(0), RESIDENT=resident,
                BLOCK=block, num_warps=_warps(block),
            )  # fmt: skip
    return out


def _warps(block: int) -> int:
    return min(16, max(1, block // 512))


def sum_warps(block: int, x: Tensor) -> int:
    """Warps for `log_sum`: each thread has 4 times 16 bytes of a block. With more, the 4 would be
    on several threads, which would wait for each other in every turn."""
    return max(1, block * x.dtype.itemsize // 2048)
