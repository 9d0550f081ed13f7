"""Reads weights into the L2 cache ahead of the product that needs them.

In a small step the kernels between two products leave memory idle: they wait for each other more
than for bytes. A small kernel beside them, in a branch of the step's graph, has the next weights
brought closer meanwhile (PTX ISA, "cp.async.bulk.prefetch"). It computes nothing, so it changes no
result.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from billfish.layers.linear import QuantLinear
from billfish.models.decoder import CausalLM


class Wish(NamedTuple):
    """beside: the kernels of a layer that run meanwhile, "attention", "o", "gate_up" or "down".
    product: whose weights are read, "o", "gate_up", "down" or "qkv", which is that of the next
    layer. most: bytes of them: what is read must stay in the cache until it is needed."""

    beside: str
    product: str
    most: int


WISHES: tuple[tuple[int, tuple[Wish, ...]], ...] = ()
"""What is read in steps of up to so many requests. In larger steps than the last entry's, products
keep memory busy themselves. Long contexts drive out of the cache what is read beside attention."""


def reads_ahead(device: torch.device) -> bool:
    """Whether a device has the instruction: compute capability 9.0 and up."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


class ReadAhead:
    """Follows the layers of a model: while a graph of a step is captured within `active`, reading
    is captured beside what the layers launch. Weights are looked up there and then, so the model
    may move them before it is captured anew.
    """

    def __init__(self, model: CausalLM, device: torch.device, wishes: Sequence[Wish]) -> None:
        self._stream = torch.cuda.Stream(device)
        self._active = self._begun = False
        layers: list[Any] = list(model.layers)
        for layer, following in zip(layers, [*layers[1:], None], strict=True):
            products = {
                "o": layer.attention.o_proj,
                "gate_up": layer.mlp.gate_up_proj,
                "down": layer.mlp.down_proj,
            }
            if following is not None:
                products["qkv"] = following.attention.qkv_proj
            for beside in dict.fromkeys(wish.beside for wish in wishes):
                targets = [
                    (products[product], most)
                    for place, product, most in wishes
                    if place == beside and isinstance(products.get(product), QuantLinear)
                ]
                read = partial(self._read, targets)
                # Reading begins when what was launched before has ended.
                if not targets:
                    continue
                if beside == "attention":
                    layer.attention.qkv_proj.register_forward_hook(read)
                else:
                    products[beside].register_forward_pre_hook(read)

    def _read(self, targets: Sequence[tuple[QuantLinear, int]], *_: object) -> None:
        if not self._active:
            return
        from billfish.worker import read_ahead_gpu

        self._begun = True
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for layer, most in targets:
                read_ahead_gpu.read(layer.weight.tensors[0], most)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Read ahead within, if a graph is being captured: launched one by one, the kernels would
        wait for each other."""
        self._active = torch.cuda.is_current_stream_capturing()
        self._begun = False
        try:
            yield
        finally:
            self._active = False
            if self._begun:
                torch.cuda.current_stream().wait_stream(self._stream)


def load(model: nn.Module) -> None:
    """Launch the kernel once: in a capture nothing can be compiled or loaded."""
    from billfish.worker import read_ahead_gpu

    for module in model.modules():
        if isinstance(module, QuantLinear):
            read_ahead_gpu.read(module.weight.tensors[0], 0)
            return
