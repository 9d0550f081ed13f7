"""What gated activations share: how one is registered with its derivative, and its argument."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from billfish.kernels._library import bad_argument, check_activation, differentiate, register

_GPU = "billfish.kernels.general.gpu"


def gated(
    name: str, cpu: Callable[[Tensor], Tensor], backward: Callable[[Tensor, Tensor], Tensor]
) -> Callable[[Tensor], Tensor]:
    """billfish::<name> and billfish::<name>_backward, whose kernels for a GPU are in `gpu.py`;
    returns the operation gate_up [..., 2 * I] -> [..., I], which checks its argument.

    backward: (dy [..., I], gate_up) -> the gradient of gate_up, in float32.
    """
    forward = register(f"{name}(Tensor gate_up) -> Tensor", fake=_fake, cpu=cpu, gpu=_GPU)
    gradient = register(
        f"{name}_backward(Tensor dy, Tensor gate_up) -> Tensor",
        fake=_backward_fake,
        cpu=lambda dy, gate_up: backward(dy.float(), gate_up.float()).to(gate_up.dtype),
        gpu=_GPU,
    )
    differentiate(name, _save, lambda ctx, dy: gradient(dy, *ctx.saved_tensors))

    def call(gate_up: Tensor) -> Tensor:
        check_activation("gate_up", gate_up)
        if gate_up.dim() == 0 or gate_up.shape[-1] % 2 or gate_up.shape[-1] == 0:
            raise bad_argument("gate_up", tuple(gate_up.shape), "[..., 2 * I]")
        y: Tensor = forward(gate_up)
        return y

    return call


def _fake(gate_up: Tensor) -> Tensor:
    return gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2))


def _backward_fake(dy: Tensor, gate_up: Tensor) -> Tensor:
    return gate_up.new_empty(gate_up.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)
