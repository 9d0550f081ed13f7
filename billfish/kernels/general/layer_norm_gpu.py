"""Layer norm, and derivatives of it and of RMSNorm, on a GPU, in Triton; see `layer_norm.py`."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from billfish.kernels._library import launches_early
from billfish.kernels.general.gpu import WIDEST, _on, _rows, launch_options
from billfish.kernels.general.layer_norm import norm_backward_reference

PROGRAMS = 264
"""Programs that share the rows, at most, each with a sum of the weights' gradient: the same on all
GPUs, two for each multiprocessor of an H200."""


AHEAD = 32768
"""Bytes of a row, at most, of which two go to shared memory while a third is added up."""


@triton.jit
def _layer_norm_kernel(
    x, weight, bias, out, x_stride, eps, BIAS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    inside = d < D
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    value = tl.load(x + row * x_stride + d, mask=inside, other=0.0).to(tl.float32)
    # The variance of what is centred: mean(x^2) - mean^2 would cancel.
    centred = tl.where(inside, value - tl.sum(value, 0) / D, 0.0)
    inverse = 1.0 / tl.sqrt(tl.sum(centred * centred, 0) / D + eps)
    result = centred * inverse * tl.load(weight + d, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        result += tl.load(bias + d, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * D + d, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _both(a, b, c, d):
    return a + c, b + d


@triton.jit
def _norm_gradient(
    value, grad, scale, inside, dx, of_weight, of_bias, eps, CENTRE: tl.constexpr,
    INPUT: tl.constexpr, WEIGHTS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """A row's gradient, written to dx, and what it adds to the weights'."""
    g = grad * scale
    mean_g = 0.0
    # Two sums at a time: threads meet for each.
    if CENTRE:
        mean, mean_g = tl.reduce((value, g), 0, _both)
        mean_g /= D
        value = tl.where(inside, value - mean / D, 0.0)
    squares, products = tl.reduce((value * value, g * value), 0, _both)
    inverse = 1.0 / tl.sqrt(squares / D + eps)
    unit = value * inverse
    if INPUT:
        result = (g - mean_g - unit * (products * inverse / D)) * inverse
        tl.store(dx, result.to(dx.dtype.element_ty), mask=inside)
    if WEIGHTS:
        of_weight += grad * unit
        if CENTRE:
            of_bias += grad
    return of_weight, of_bias


@triton.jit
def _norm_backward_kernel(
    dy, x, weight, dx, dw, db, rows, dy_stride, x_stride, eps,
    CENTRE: tl.constexpr, INPUT: tl.constexpr, WEIGHTS: tl.constexpr, D: tl.constexpr,
    BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program p: rows p, p + programs, ... from the end. dw, db: float32 [programs, D].

    So no program has two rows more than another, and what the kernels before have read or written
    last, which is still in the L2 cache, is read first.

    STAGES: rows in shared memory or on their way there; 1: the next in registers.
    """
    program = tl.program_id(0).to(tl.int64)
    programs = tl.num_programs(0)
    d = tl.arange(0, BLOCK)
    inside = d < D
    scale = tl.load(weight + d, mask=inside, other=0.0).to(tl.float32)
    of_weight = tl.zeros([BLOCK], tl.float32)
    of_bias = tl.zeros([BLOCK], tl.float32)
    if STAGES > 1:
        for nth in tl.range(program, rows, programs, num_stages=STAGES):
            row = rows - 1 - nth
            value = tl.load(x + row * x_stride + d, mask=inside, other=0.0).to(tl.float32)
            grad = tl.load(dy + row * dy_stride + d, mask=inside, other=0.0).to(tl.float32)
            of_weight, of_bias = _norm_gradient(
                value, grad, scale, inside, dx + row * D + d, of_weight, of_bias, eps, CENTRE,
                INPUT, WEIGHTS, D,
            )  # fmt: skip
    else:
        begin = rows - 1 - program
        next_value = tl.load(x + begin * x_stride + d, mask=inside, other=0.0)
        next_grad = tl.load(dy + begin * dy_stride + d, mask=inside, other=0.0)
        for nth in range(program, rows, programs):
            row = rows - 1 - nth
            value, grad = next_value.to(tl.float32), next_grad.to(tl.float32)
            # The next row is on its way while this one is added up.
            following = row - programs
            more = inside & (following >= 0)
            next_value = tl.load(x + following * x_stride + d, mask=more, other=0.0)
            next_grad = tl.load(dy + following * dy_stride + d, mask=more, other=0.0)
            of_weight, of_bias = _norm_gradient(
                value, grad, scale, inside, dx + row * D + d, of_weight, of_bias, eps, CENTRE,
                INPUT, WEIGHTS, D,
            )  # fmt: skip
    if WEIGHTS:
        tl.store(dw + program * D + d, of_weight, mask=inside)
        if CENTRE:
            tl.store(db + program * D + d, of_bias, mask=inside)


@triton.jit
def _weights_kernel(
    dw, db, out_w, out_b, programs, D: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    CENTRE: tl.constexpr,
):  # fmt: skip
    """Program (c, 0 or 1): WIDTH columns of the sums of dw or db, one run of rows after another.

    Without CENTRE there is no db: its sums are 0.
    """
    c = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)[None, :]
    source, out = dw, out_w
    if tl.program_id(1) == 1:
        source, out = db, out_b
    total = tl.zeros([ROWS, WIDTH], tl.float32)
    for start in range(0, programs, ROWS):
        r = start + tl.arange(0, ROWS)[:, None]
        total += tl.load(source + r * D + c, mask=(r < programs) & (c < D), other=0.0)
    column = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    tl.store(out + column, tl.sum(total, 0).to(out.dtype.element_ty), mask=column < D)
    if not CENTRE:
        nothing = tl.zeros([WIDTH], out_b.dtype.element_ty)
        tl.store(out_b + column, nothing, mask=column < D)


def _warps(block: int) -> int:
    return min(16, max(1, block // 512))


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    rows, size = _rows(x), x.shape[-1]
    if size > WIDEST:
        return torch.nn.functional.layer_norm(x, weight.shape, weight, bias, eps).contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if rows.shape[0]:
        block = triton.next_power_of_2(size)
        pdl = launches_early(x.device)
        with _on(x):
            _layer_norm_kernel[(rows.shape[0],)](
                rows, weight.contiguous(), weight if bias is None else bias.contiguous(), out,
                rows.stride(0), eps, BIAS=bias is not None, D=size, BLOCK=block, PDL=pdl,
                num_warps=_warps(block), **launch_options(pdl),
            )  # fmt: skip
    return out


def norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, eps: float, centre: bool, *, fused: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """dy, x: [rows, D]. centre: of layer norm; else of RMSNorm, and the bias's gradient is 0."""
    rows, size = x.shape
    if size > WIDEST:
        wide = norm_backward_reference(dy.float(), x.float(), weight.float(), eps, centre)
        dx, dw, db = (part.to(x.dtype) for part in wide)
        return dx, dw, db if centre else torch.zeros_like(dw)
    grads, values = _rows(dy), _rows(x)
    dx = torch.empty(rows, size, dtype=x.dtype, device=x.device)
    stages = 3 if size * (dy.itemsize + x.itemsize) <= AHEAD else 1
    programs = min(rows, PROGRAMS)
    dw = torch.empty(programs, size, dtype=torch.float32, device=x.device)
    db = torch.empty_like(dw) if centre else dw
    new = torch.empty if rows else torch.zeros
    total_w = new(size, dtype=weight.dtype, device=x.device)
    total_b = new(size, dtype=weight.dtype, device=x.device)
    block = triton.next_power_of_2(size)
    # Threads meet twice or more for each row: fewer of them where rows wait in shared memory.
    warps = _warps(block) if stages == 1 else max(min(4, _warps(block)), block // 1024)
    if rows:
        with _on(x):
            for of_x, of_weights in [(True, True)] if fused else [(True, False), (False, True)]:
                _norm_backward_kernel[(programs,)](
                    grads, values, weight.contiguous(), dx, dw, db, rows, grads.stride(0),
                    values.stride(0), eps, CENTRE=centre, INPUT=of_x, WEIGHTS=of_weights,
                    D=size, BLOCK=block, STAGES=stages, num_warps=warps,
                )  # fmt: skip
            _weights_kernel[(triton.cdiv(size, 16), 1 + centre)](
                dw, db, total_w, total_b, programs, D=size, ROWS=256, WIDTH=16, CENTRE=centre,
                num_warps=4,
            )  # fmt: skip
    return dx, total_w, total_b
