"""A step of AdamW (Loshchilov & Hutter, 2019, arXiv:1711.05101).

An element-wise chain: as torch operators, a dozen passes over parameter, gradient and both moments.
In one kernel each is read once and written once, seven transfers an element, which is its floor.

The technique's switch: `adamw_gpu.adamw_step(..., fused=False)` takes a launch for each of the two
moments and for the parameter.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from billfish.kernels._library import bad_argument, check_activation, check_like, register
from billfish.kernels.general._arguments import check_same_device


def adamw_reference(
    param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, step: int, lr: float,
    betas: tuple[float, float], eps: float, weight_decay: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """What parameter and moments become."""
    first = betas[0] * exp_avg + (1 - betas[0]) * grad
    second = betas[1] * exp_avg_sq + (1 - betas[1]) * grad * grad
    size = (second / (1 - betas[1] ** step)).sqrt() + eps
    return (
        param * (1 - lr * weight_decay) - lr * first / (1 - betas[0] ** step) / size,
        first,
        second,
    )


def _cpu(
    param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, step: int, lr: float,
    beta1: float, beta2: float, eps: float, weight_decay: float,
) -> None:  # fmt: skip
    options: dict[str, Any] = {
        "amsgrad": False, "lr": lr, "beta1": beta1, "beta2": beta2, "weight_decay": weight_decay,
        "eps": eps, "maximize": False,
    }  # fmt: skip
    same = param.dtype == exp_avg.dtype
    wide, of_wide = (param, grad) if same else (param.float(), grad.float())
    count = torch.tensor(float(step))
    torch._fused_adamw_([wide], [of_wide], [exp_avg], [exp_avg_sq], [], [count], **options)
    if not same:
        param.copy_(wide)


def _fake(*arguments: object) -> None:
    return None


_adamw_step: Callable[..., None] = register(
    "adamw_step(Tensor(a!) param, Tensor grad, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, int step,"
    " float lr, float beta1, float beta2, float eps, float weight_decay) -> ()",
    fake=_fake,
    cpu=_cpu,
    gpu="billfish.kernels.general.adamw_gpu",
)


@torch.no_grad()
def adamw_step(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: int,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
) -> None:
    """Update param and its moments in place; step counts from 1.

    param, grad: float32, bfloat16 or float16 of one shape; exp_avg, exp_avg_sq: the same shape,
    float32. All contiguous. In float32 inside; param is rounded once.

    Deterministic.

    Raises KernelArgumentError, with nothing changed: dtype, device or shape is wrong, a tensor is
    not contiguous, step is under 1, a rate negative or a beta outside of [0, 1).
    """
    check_activation("param", param)
    check_like("grad", grad, "param", param)
    for name, tensor in (("exp_avg", exp_avg), ("exp_avg_sq", exp_avg_sq)):
        check_same_device(name, tensor, "param", param)
        if tensor.dtype != torch.float32:
            raise bad_argument(name, tensor.dtype, "torch.float32")
    for name, tensor in (
        ("param", param), ("grad", grad), ("exp_avg", exp_avg), ("exp_avg_sq", exp_avg_sq),
    ):  # fmt: skip
        if tensor.shape != param.shape or not tensor.is_contiguous():
            got = f"{tuple(tensor.shape)}, strides {tensor.stride()}"
            raise bad_argument(name, got, f"contiguous {tuple(param.shape)}")
    if not isinstance(step, int) or step < 1:
        raise bad_argument("step", step, "1 or more")
    if not (lr >= 0 and eps >= 0 and weight_decay >= 0):
        raise bad_argument("lr, eps, weight_decay", (lr, eps, weight_decay), "none negative")
    if not all(0 <= beta < 1 for beta in betas):
        raise bad_argument("betas", betas, "two numbers in [0, 1)")
    _adamw_step(param, grad, exp_avg, exp_avg_sq, step, lr, *betas, eps, weight_decay)


class AdamW(torch.optim.Optimizer):
    """`adamw_step` as a torch optimizer; moments are float32 whatever the parameters are."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["step"] = 0
                    for name in ("exp_avg", "exp_avg_sq"):
                        state[name] = torch.zeros_like(param, dtype=torch.float32)
                state["step"] += 1
                adamw_step(
                    param, param.grad.contiguous(), state["exp_avg"], state["exp_avg_sq"],
                    state["step"], group["lr"], group["betas"], group["eps"],
                    group["weight_decay"],
                )  # fmt: skip
        return loss
