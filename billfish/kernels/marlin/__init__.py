"""Marlin: FP16/BF16 activations times INT4 weights (W4A16).

weight = marlin.pack(codes, scales, group_size=128, dtype=torch.bfloat16)
y = marlin.w4a16_matmul(x, weight)
"""

from collections.abc import Callable

from torch import Tensor

from billfish.kernels._library import bad_argument, check_no_grad, register
from billfish.kernels.marlin import cpu
from billfish.kernels.marlin.weight import GROUP_SIZES, PackedWeight, pack

__all__ = ["GROUP_SIZES", "PackedWeight", "pack", "w4a16_matmul"]


def _fake(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    offsets: Tensor | None,
    g_idx: Tensor | None,
    perm: Tensor | None,
    bias: Tensor | None,
    n: int,
    group_size: int,
    layout: str,
) -> Tensor:
    return x.new_empty((*x.shape[:-1], n))


_w4a16_matmul: Callable[..., Tensor] = register(
    "w4a16_matmul(Tensor x, Tensor codes, Tensor scales, Tensor? zeros, Tensor? offsets, "
    "Tensor? g_idx, Tensor? perm, Tensor? bias, int n, int group_size, str layout) -> Tensor",
    fake=_fake,
    cpu=cpu.w4a16_matmul,
    gpu="billfish.kernels.marlin.gpu",
)


def w4a16_matmul(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """y = x @ W.T + bias, with the INT4 weight dequantized on the way.

    x: [..., K] in weight.dtype, any strides, any number of rows including none. bias: [N] in the
    same dtype. Returns a contiguous [..., N] in the same dtype; sums are in float32.

    Raises KernelArgumentError: dtype, device or shape of x or bias does not fit the weight.
    The kernels on a GPU follow Marlin (Frantar et al., 2024, arXiv:2408.11743).
    """
    if x.dtype != weight.dtype:
        raise bad_argument("x", x.dtype, f"the weight's activation dtype, {weight.dtype}")
    check_no_grad("x", x)
    if x.dim() == 0 or x.shape[-1] != weight.k:
        raise bad_argument("x", tuple(x.shape), f"[..., {weight.k}]")
    codes = weight.codes
    if x.device != codes.device:
        raise bad_argument("x", x.device, f"the weight's device, {codes.device}")
    if bias is not None and (
        bias.shape != (weight.n,) or bias.dtype != x.dtype or bias.device != x.device
    ):
        got = f"{bias.dtype} {tuple(bias.shape)} on {bias.device}"
        raise bad_argument("bias", got, f"{x.dtype} [{weight.n}] on {x.device}")
    return _w4a16_matmul(
        x, codes, weight.scales, weight.zeros, weight.offsets, weight.g_idx, weight.perm, bias,
        weight.n, weight.group_size, weight.layout,
    )  # fmt: skip
