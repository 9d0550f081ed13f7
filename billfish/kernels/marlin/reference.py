"""What W4A16 matrix multiplication means. Works in any floating-point dtype; tests use float64."""

import torch
from torch import Tensor


def group_of_column(
    k: int, group_size: int, g_idx: Tensor | None, device: torch.device | str
) -> Tensor:
    """Group of each column, int64 [K]: `g_idx` (act-order) or k // group_size."""
    if g_idx is not None:
        return g_idx.long()
    columns = torch.arange(k, device=device)
    return torch.zeros_like(columns) if group_size == -1 else columns // group_size


def dequantize(
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    offsets: Tensor | None,
    g_idx: Tensor | None,
    group_size: int,
    dtype: torch.dtype,
) -> Tensor:
    """W [N, K] in `dtype` from codes [N, K] uint8 and scales, zeros or offsets [N, G].

    W = scales * codes + offsets, or scales * (codes - zeros), where zeros None stands for 8.
    """
    group = group_of_column(codes.shape[1], group_size, g_idx, codes.device)
    scale = scales.to(dtype)[:, group]
    if offsets is not None:
        return scale * codes.to(dtype) + offsets.to(dtype)[:, group]
    zero = 8 if zeros is None else zeros.to(dtype)[:, group]
    return scale * (codes.to(dtype) - zero)


def w4a16_matmul(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    silu_mul: bool = False,
) -> Tensor:
    """x [..., K] times the dequantized weight [N, K], plus bias [N], and then the epilogues.

    silu_mul: the rows are those of gate and then of up; y = silu(gate) * up [..., N / 2]. residual
    is added last.
    """
    y = x.to(weight.dtype) @ weight.T
    y = y if bias is None else y + bias.to(weight.dtype)
    if silu_mul:
        gate, up = y.chunk(2, dim=-1)
        y = gate * torch.sigmoid(gate) * up
    return y if residual is None else y + residual.to(weight.dtype)
