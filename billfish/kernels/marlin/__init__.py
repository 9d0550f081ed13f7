"""Marlin: FP16/BF16 activations times INT4 weights (W4A16).

weight = marlin.pack(codes, scales, group_size=128, dtype=torch.bfloat16)
y = marlin.w4a16_matmul(x, weight)
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from billfish.kernels._library import (
    bad_argument,
    check_dense,
    check_no_grad,
    is_plain,
    register,
)
from billfish.kernels.marlin import cpu, gpu
from billfish.kernels.marlin.weight import GROUP_SIZES, PackedWeight, pack

__all__ = ["GROUP_SIZES", "PackedWeight", "pack", "w4a16_matmul"]


def _fake(x: Tensor, outputs: int, *_: Any) -> Tensor:
    return x.new_empty((*x.shape[:-1], outputs))


_w4a16_matmul: Callable[..., Tensor] = register(
    "w4a16_matmul(Tensor x, int outputs, Tensor[] weight, str layout, int group_size, "
    "Tensor? g_idx, Tensor? perm, Tensor? bias, Tensor? residual, bool silu_mul, "
    "bool batch_invariant) -> Tensor",
    fake=_fake,
    cpu=cpu.w4a16_matmul,
    gpu="billfish.kernels.marlin.gpu",
)


def w4a16_matmul(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    batch_invariant: bool = False,
) -> Tensor:
    """y = x @ W.T + bias + residual, with the INT4 weight dequantized on the way.

    With a weight packed with `silu_mul`, y = silu(gate) * up + residual, where gate and up are the
    halves of x @ W.T + bias. N below is weight.outputs.

    x: [..., K] in weight.dtype, any strides, any number of rows including none. bias: [weight.n],
    residual: [..., N], in the same dtype. Returns a contiguous [..., N] in the same dtype; sums and
    epilogues are in float32 on a GPU and rounded once; on a CPU each step is rounded.

    batch_invariant: a row's result does not depend, bit for bit, on how many other rows the call
    has. It costs time: see docs/w4a16.md.

    Raises KernelArgumentError: dtype, device or shape of x, bias or residual does not fit the
    weight. The kernels on a GPU follow Marlin (Frantar et al., 2024, arXiv:2408.11743).
    """
    check_dense("x", x)
    if not isinstance(weight, PackedWeight):
        raise bad_argument("weight", type(weight).__name__, "a PackedWeight, made by `pack`")
    if x.is_cuda and bias is None and residual is None and is_plain(x):
        again = gpu.launch_of(x, weight, batch_invariant)
        if again is not None:  # what is checked below was right then
            return again(x, weight.tensors[0], None, None)
    if x.dtype != weight.dtype:
        raise bad_argument("x", x.dtype, f"the weight's activation dtype, {weight.dtype}")
    check_no_grad("x", x)
    shape, tensors = x.shape, weight.tensors
    if not shape or shape[-1] != weight.k:
        raise bad_argument("x", tuple(shape), f"[..., {weight.k}]")
    if x.device != tensors[0].device:
        raise bad_argument("x", x.device, f"the weight's device, {weight.device}")
    if bias is not None:
        _check_added("bias", bias, (weight.n,), x)
    if residual is not None:
        _check_added("residual", residual, (*x.shape[:-1], weight.outputs), x)
    return _w4a16_matmul(
        x, weight.outputs, tensors, weight.layout, weight.group_size, weight.g_idx,
        weight.perm, bias, residual, weight.silu_mul, batch_invariant,
    )  # fmt: skip


def _check_added(name: str, added: Tensor, shape: tuple[int, ...], x: Tensor) -> None:
    check_dense(name, added)
    check_no_grad(name, added)
    if added.shape != shape or added.dtype != x.dtype or added.device != x.device:
        got = f"{added.dtype} {tuple(added.shape)} on {added.device}"
        raise bad_argument(name, got, f"{x.dtype} {list(shape)} on {x.device}")
