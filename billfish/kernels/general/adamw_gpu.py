"""The step of AdamW on a GPU, in Triton; see `adamw.py`."""

import triton
import triton.language as tl
from torch import Tensor

from billfish.kernels.general.gpu import _on


@triton.jit
def _adamw_kernel(
    param, grad, exp_avg, exp_avg_sq, n, rate, decay, beta1, beta2, rest1, rest2, unbias, eps,
    FIRST: tl.constexpr, SECOND: tl.constexpr, PARAM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """rate: lr / (1 - beta1^step); unbias: 1 / (1 - beta2^step); rest: 1 - beta."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    g = tl.load(grad + i, mask=inside, other=0.0).to(tl.float32)
    first = tl.load(exp_avg + i, mask=inside, other=0.0)
    second = tl.load(exp_avg_sq + i, mask=inside, other=0.0)
    if FIRST:
        first = beta1 * first + rest1 * g
        tl.store(exp_avg + i, first, mask=inside)
    if SECOND:
        second = beta2 * second + rest2 * g * g
        tl.store(exp_avg_sq + i, second, mask=inside)
    if PARAM:
        value = tl.load(param + i, mask=inside, other=0.0).to(tl.float32)
        value = value * decay - rate * first / (tl.sqrt(second * unbias) + eps)
        tl.store(param + i, value.to(param.dtype.element_ty), mask=inside)


def adamw_step(
    param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, step: int, lr: float,
    beta1: float, beta2: float, eps: float, weight_decay: float,
    *, fused: bool = True, block: int = 1024,
) -> None:  # fmt: skip
    n = param.numel()
    if not n:
        return
    # Of Python's floats, in double: 1 - beta in float32 would lose half of its digits.
    numbers = (
        lr / (1 - beta1**step), 1 - lr * weight_decay, beta1, beta2, 1 - beta1, 1 - beta2,
        1 / (1 - beta2**step), float(eps),
    )  # fmt: skip
    all_in_one = [(True, True, True)]
    apart = [(True, False, False), (False, True, False), (False, False, True)]
    with _on(param):
        for first, second, last in all_in_one if fused else apart:
            _adamw_kernel[(triton.cdiv(n, block),)](
                param, grad, exp_avg, exp_avg_sq, n, *numbers, FIRST=first, SECOND=second,
                PARAM=last, BLOCK=block, num_warps=4,
            )  # fmt: skip
