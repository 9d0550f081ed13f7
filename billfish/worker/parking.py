"""The weights of a model, put away in host memory and brought back."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from billfish.errors import CapacityError
from billfish.kernels.marlin import PackedWeight
from billfish.layers.linear import QuantLinear
from billfish.worker.host_copies import pinned
from billfish.worker.memory import available_memory, gib


@dataclass(frozen=True)
class ParkedWeights:
    """Where every tensor of a model was, and what it held.

    tensors: in host memory, each once, however many layers share it. restore: puts tensors, given
    in the same order, back into the model.
    """

    device: torch.device
    tensors: list[Tensor]
    restore: Callable[[list[Tensor]], None]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def empty(self) -> None:
        """Take the tensors out of the model."""
        self.restore([torch.empty(0, dtype=t.dtype, device=self.device) for t in self.tensors])


def park(model: nn.Module, device: torch.device) -> ParkedWeights:
    """Copy the model's tensors to host memory, and take them out of the model.

    CapacityError, and the model is left as it was, where the host has not the memory.
    """
    known: dict[tuple[int, torch.Size], int] = {}
    kept: list[Tensor] = []

    def number(tensor: Tensor) -> int:
        """Which of the tensors it is. Tied layers share the memory of one."""
        key = (tensor.data_ptr(), tensor.shape)
        if key not in known:
            known[key] = len(kept)
            kept.append(tensor)
        return known[key]

    buffers = [
        (module, name, number(tensor))
        for module in model.modules()
        for name, tensor in module._buffers.items()
        if tensor is not None
    ]
    packed = [
        (module, *_numbered(module.weight, number))
        for module in model.modules()
        if isinstance(module, QuantLinear)
    ]

    def restore(tensors: list[Tensor]) -> None:
        for module, name, index in buffers:
            module._buffers[name] = tensors[index]
        for layer, units, others in packed:
            rest: Any = {name: tensors[index] for name, index in others.items()}
            layer.weight = replace(
                layer.weight, tensors=tuple(tensors[index] for index in units), **rest
            )

    asked, there = sum(tensor.nbytes for tensor in kept), available_memory()
    if asked > there:
        raise CapacityError(
            f"the weights take {gib(asked)} of host memory while the engine sleeps, and "
            f"{gib(there)} are available"
        )
    host = []
    for tensor in kept:
        copy = pinned(tuple(tensor.shape), tensor.dtype, device)
        host.append(copy.copy_(tensor))
    parked = ParkedWeights(device, host, restore)
    parked.empty()
    return parked


def unpark(parked: ParkedWeights) -> None:
    """Bring the tensors back to the device."""
    parked.restore(
        [tensor.to(parked.device, non_blocking=True, copy=True) for tensor in parked.tensors]
    )


def _numbered(
    weight: PackedWeight, number: Callable[[Tensor], int]
) -> tuple[list[int], dict[str, int]]:
    others = {name: getattr(weight, name) for name in ("zeros", "g_idx", "perm")}
    return (
        [number(tensor) for tensor in weight.tensors],
        {name: number(tensor) for name, tensor in others.items() if tensor is not None},
    )
