"""How linear layers are made of a checkpoint's tensors, whatever file those are in."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from billfish.errors import CheckpointError, KernelArgumentError
from billfish.kernels import marlin
from billfish.layers.linear import Linear, MergedLinear, QuantLinear
from billfish.quantization.int4 import Int4Groups

Progress = Callable[[int, int], None]
"""Called with (tensors loaded, tensors in all)."""


class WeightSource(ABC):
    """The weights of a checkpoint under Hugging Face names; see `billfish.models.decoder.Weights`.

    dtype: of activations. device: where the model will be.
    """

    def __init__(
        self,
        path: str,
        dtype: torch.dtype,
        device: torch.device,
        num_tensors: int,
        progress: Progress | None,
    ) -> None:
        self.path, self.dtype, self.device = path, dtype, device
        self._num_tensors, self._progress = num_tensors, progress
        self._loaded = 0

    @abstractmethod
    def dense(self, name: str) -> Tensor:
        """The values of a tensor, finite, in any floating-point dtype, on the CPU."""

    @abstractmethod
    def int4_groups(self, name: str) -> Int4Groups | None:
        """The weight of the linear layer `name`, where it is in INT4."""

    @abstractmethod
    def has_bias(self, name: str) -> bool:
        """Whether the linear layer `name` has a bias."""

    @abstractmethod
    def stored_name(self, name: str) -> str:
        """What the file calls a tensor, for messages."""

    def tensor(self, name: str) -> Tensor:
        return self.dense(name).to(self.device, self.dtype)

    def norm(self, name: str) -> Tensor:
        return self.tensor(name)

    def linear(self, *names: str, gated: bool = False) -> nn.Module:
        parts = [self.int4_groups(name) for name in names]
        groups = [part for part in parts if part is not None]
        if not groups:
            return Linear(self._joined([f"{name}.weight" for name in names]), self._bias(names))
        if len(groups) == len(names) and all(_same_form(groups[0], part) for part in groups[1:]):
            silu_mul = gated and self.device.type == "cuda"  # on a CPU it gains nothing
            return QuantLinear(self._packed(names, groups, silu_mul), self._bias(names))
        # Some files keep a part of a merged layer in more bits than the rest, or in another order
        # of columns: each stays as it is.
        return MergedLinear([self.linear(name) for name in names])

    def _bias(self, names: Sequence[str]) -> Tensor | None:
        biases = [f"{name}.bias" for name in names if self.has_bias(name)]
        return self._joined(biases) if biases else None

    def _joined(self, names: Sequence[str]) -> Tensor:
        """Tensors one below the other, converted one at a time."""
        if len(names) == 1:
            return self.tensor(names[0])
        return torch.cat([self.tensor(name) for name in names])

    def _packed(
        self, names: Sequence[str], parts: Sequence[Int4Groups], silu_mul: bool
    ) -> marlin.PackedWeight:
        """INT4 weights one below the other."""

        def merged(field: str) -> Tensor | None:
            tensors = [getattr(part, field) for part in parts]
            if tensors[0] is None:
                return None
            return (tensors[0] if len(tensors) == 1 else torch.cat(tensors)).to(self.device)

        codes, scales = merged("codes"), merged("scales")
        assert codes is not None
        assert scales is not None
        with self._naming(*names):
            return marlin.pack(
                codes,
                scales,
                zeros=merged("zeros"),
                offsets=merged("offsets"),
                group_size=parts[0].group_size,
                dtype=self.dtype,
                silu_mul=silu_mul,
            )

    @contextmanager
    def _naming(self, *names: str) -> Iterator[None]:
        """Says which tensors hold what cannot be a weight, such as a scale that is no number."""
        try:
            yield
        except KernelArgumentError as error:
            tensors = ", ".join(self.stored_name(f"{name}.weight") for name in names)
            raise CheckpointError(self.path, str(error), tensor=tensors) from error

    def advance(self, count: int) -> None:
        self._loaded += count
        if self._progress:
            self._progress(self._loaded, self._num_tensors)


def _same_form(one: Int4Groups, other: Int4Groups) -> bool:
    """Whether two weights of as many columns can be one below the other."""
    fields = ("zeros", "offsets")
    alike = all((getattr(one, f) is None) == (getattr(other, f) is None) for f in fields)
    return alike and one.group_size == other.group_size
