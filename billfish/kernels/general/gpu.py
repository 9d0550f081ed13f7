"""The general kernels on an NVIDIA GPU, in Triton: one program a row, or a part of one.

Each but those of derivatives lets the kernel behind it start at once, and waits for the one ahead
before it reads what that wrote (programmatic dependent launch), so launches of a chain overlap.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from billfish.kernels._library import launches_early

WIDEST = 65536
"""Values of the longest row that a program normalizes in its registers; torch does longer ones."""


def launch_options(pdl: bool) -> dict[str, bool]:
    """What a launch takes besides, so that older Triton back ends and the interpreter do too."""
    return {"launch_pdl": True} if pdl else {}


@triton.jit
def activated(value, ACTIVATION: tl.constexpr):
    """What follows a product, of float32; for kernels in Triton and in Gluon."""
    if ACTIVATION == "relu":
        return tl.maximum(value, 0.0, propagate_nan=tl.PropagateNan.ALL)
    elif ACTIVATION == "silu":
        return value / (1.0 + tl.exp(-value))
    elif ACTIVATION == "gelu_tanh":  # (1 + tanh(x)) / 2 = sigmoid(2 x)
        z = 1.5957691216057308 * (value + 0.044715 * value * value * value)
        return value / (1.0 + tl.exp(-z))
    else:
        return value


def _on(tensor: Tensor) -> AbstractContextManager[object]:
    """Makes the tensor's GPU the current one, at no cost where it is."""
    if not tensor.is_cuda or tensor.device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(tensor.device)


def _rows(x: Tensor) -> Tensor:
    """x as [rows, D], its last dimension contiguous."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


@triton.jit
def _rms_norm_kernel(
    x, residual, weight, out, total, x_stride, residual_stride, eps,
    D: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    inside = d < D
    if PDL:
        gdc_launch_dependents()
    scale = tl.load(weight + d, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    value = tl.load(x + row * x_stride + d, mask=inside, other=0.0)
    if ADD:
        more = tl.load(residual + row * residual_stride + d, mask=inside, other=0.0)
        # The sum is rounded first: the norm is of what the next layer adds to.
        value = (value.to(tl.float32) + more.to(tl.float32)).to(value.dtype)
        tl.store(total + row * D + d, value, mask=inside)
    wide = value.to(tl.float32)
    inverse = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / D + eps)
    tl.store(out + row * D + d, (wide * inverse * scale).to(value.dtype), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _norm(x, None, weight, eps)[0]


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return _norm(x, residual, weight, eps)


def _norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    size = x.shape[-1]
    if size > WIDEST:
        return _norm_of_torch(x, residual, weight, eps)
    rows = _rows(x)
    more = rows if residual is None else _rows(residual)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = out if residual is None else torch.empty_like(out)
    if rows.shape[0]:
        block = triton.next_power_of_2(size)
        pdl = launches_early(x.device)
        with _on(x):
            _rms_norm_kernel[(rows.shape[0],)](
                rows, more, weight.contiguous(), out, total, rows.stride(0), more.stride(0), eps,
                D=size, BLOCK=block, ADD=residual is not None, PDL=pdl,
                num_warps=_norm_warps(block, rows.shape[0]), **launch_options(pdl),
            )  # fmt: skip
    return out, total


def _norm_of_torch(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    total = (x if residual is None else x + residual).contiguous()
    norm = torch.nn.functional.rms_norm(total.float(), weight.shape, weight.float(), eps)
    return norm.to(x.dtype), total


def _norm_warps(block: int, rows: int) -> int:
    """Few rows: as many threads as have 16 bytes each to read, for the least time. Many: fewer
    threads with more reads in flight, so that more rows are under way."""
    return min(16, max(1, block // (256 if rows < 512 else 1024)))


@triton.jit
def _gated_kernel(
    gate_up, out, row_stride,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, GELU: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """gate * sigmoid(z) * up, where z is the gate for SiLU, and for the GELU approximated by tanh
    twice the argument of tanh: (1 + tanh(x)) / 2 = sigmoid(2 x)."""
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = d < SIZE
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    gate = tl.load(gate_up + row * row_stride + d, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * row_stride + SIZE + d, mask=inside, other=0.0).to(tl.float32)
    z = gate
    if GELU:
        z = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    value = gate / (1.0 + tl.exp(-z)) * up
    tl.store(out + row * SIZE + d, value.to(out.dtype.element_ty), mask=inside)


def silu_mul(gate_up: Tensor) -> Tensor:
    return _gated(gate_up, gelu=False)


def gelu_tanh_mul(gate_up: Tensor) -> Tensor:
    return _gated(gate_up, gelu=True)


def _gated(gate_up: Tensor, *, gelu: bool) -> Tensor:
    size = gate_up.shape[-1] // 2
    rows = _rows(gate_up)
    out = torch.empty((*gate_up.shape[:-1], size), dtype=gate_up.dtype, device=gate_up.device)
    if rows.shape[0]:
        block = min(2048, triton.next_power_of_2(size))
        pdl = launches_early(gate_up.device)
        with _on(gate_up):
            _gated_kernel[(rows.shape[0], triton.cdiv(size, block))](
                rows, out, rows.stride(0), SIZE=size, BLOCK=block, GELU=gelu, PDL=pdl,
                num_warps=min(8, max(1, block // 256)), **launch_options(pdl),
            )  # fmt: skip
    return out


@triton.jit
def _gated_backward_kernel(
    dy, gate_up, out, dy_stride, row_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr,
    GELU: tl.constexpr, OF_GATE: tl.constexpr, OF_UP: tl.constexpr,
):  # fmt: skip
    """With s = sigmoid(z): dy * up * s * (1 + gate * (1 - s) * dz / dgate), and dy * gate * s."""
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = d < SIZE
    grad = tl.load(dy + row * dy_stride + d, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_up + row * row_stride + d, mask=inside, other=0.0).to(tl.float32)
    z = gate
    slope = tl.full([BLOCK], 1.0, tl.float32)
    if GELU:
        z = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        slope = 1.5957691216057308 * (1.0 + 0.134145 * gate * gate)
    s = 1.0 / (1.0 + tl.exp(-z))
    # 1 - s from its own exponential: near s = 1 the difference would have no digits left.
    rest = 1.0 / (1.0 + tl.exp(z))
    if OF_GATE:
        up = tl.load(gate_up + row * row_stride + SIZE + d, mask=inside, other=0.0).to(tl.float32)
        # Where s or 1 - s vanishes, gate and slope may be too large for a product: 0, not NaN.
        bend = tl.where((s == 0.0) | (rest == 0.0), 0.0, gate * rest * slope)
        of_gate = grad * up * s * (1.0 + bend)
        tl.store(out + row * 2 * SIZE + d, of_gate.to(out.dtype.element_ty), mask=inside)
    if OF_UP:
        of_up = (grad * gate * s).to(out.dtype.element_ty)
        tl.store(out + row * 2 * SIZE + SIZE + d, of_up, mask=inside)


def silu_mul_backward(dy: Tensor, gate_up: Tensor, *, fused: bool = True) -> Tensor:
    return _gated_backward(dy, gate_up, fused, gelu=False)


def gelu_tanh_mul_backward(dy: Tensor, gate_up: Tensor, *, fused: bool = True) -> Tensor:
    return _gated_backward(dy, gate_up, fused, gelu=True)


def _gated_backward(dy: Tensor, gate_up: Tensor, fused: bool, *, gelu: bool) -> Tensor:
    """fused: both gradients in one pass."""
    size = gate_up.shape[-1] // 2
    grads, rows = _rows(dy), _rows(gate_up)
    out = torch.empty(gate_up.shape, dtype=gate_up.dtype, device=gate_up.device)
    if rows.shape[0]:
        block = min(2048, triton.next_power_of_2(size))
        with _on(gate_up):
            for of_gate, of_up in [(True, True)] if fused else [(True, False), (False, True)]:
                _gated_backward_kernel[(rows.shape[0], triton.cdiv(size, block))](
                    grads, rows, out, grads.stride(0), rows.stride(0), SIZE=size, BLOCK=block,
                    GELU=gelu, OF_GATE=of_gate, OF_UP=of_up,
                    num_warps=min(8, max(1, block // 256)),
                )  # fmt: skip
    return out
