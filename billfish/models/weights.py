"""How linear layers are made of a checkpoint's tensors, whatever file those are in."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from billfish.errors import CheckpointError, KernelArgumentError
from billfish.kernels import marlin
from billfish.layers.linear import Linear, MergedLinear, QuantLinear
from billfish.quantization.int4 import Int4Groups, merge, round_to_nearest

Progress = Callable[[int, int], None]
"""Called with (tensors loaded, tensors in all)."""

GROUP_SIZE = 128
"""Columns of a group where weights are rounded while they are loaded."""
_ROUNDED_AT_ONCE = 1 << 19  # elements, each of which takes some 40 bytes for a moment


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """dtype: of activations. device: where the model will be. quantize: "int4" rounds the linear
    layers that are dense in the file, but for the head; None keeps them. progress: called with
    (tensors loaded, tensors in all)."""

    dtype: torch.dtype
    device: torch.device | str = "cpu"
    quantize: str | None = None
    progress: Progress | None = None


class WeightSource(ABC):
    """The weights of a checkpoint under Hugging Face names; see `billfish.models.decoder.Weights`.

    num_int4_layers: of those loaded so far, which are INT4. rounding_errors: of the layers that
    were rounded here, the norm of the difference over the norm of the weight.
    """

    def __init__(self, path: str, options: LoadOptions, num_tensors: int) -> None:
        self.path, self.options = path, options
        self.dtype, self.device = options.dtype, torch.device(options.device)
        self.num_int4_layers = 0
        self.rounding_errors: dict[str, float] = {}
        self._num_tensors, self._num_loaded = num_tensors, 0

    @abstractmethod
    def dense(self, name: str) -> Tensor:
        """The values of a tensor, finite, in any floating-point dtype, on the CPU."""

    @abstractmethod
    def int4_groups(self, name: str) -> Int4Groups | None:
        """The weight of the linear layer `name`, where the file has it in INT4."""

    @abstractmethod
    def has_bias(self, name: str) -> bool:
        """Whether the linear layer `name` has a bias."""

    @abstractmethod
    def stored_name(self, name: str) -> str:
        """What the file calls a tensor, for messages."""

    @abstractmethod
    def release(self, name: str) -> None:
        """Called when a tensor has been read for the last time."""

    def tensor(self, name: str) -> Tensor:
        values = self.dense(name).to(self.device, self.dtype)
        self._done(name)
        return values

    def norm(self, name: str) -> Tensor:
        return self.tensor(name)

    def linear(self, *names: str, gated: bool = False) -> nn.Module:
        if len({self.has_bias(name) for name in names}) > 1:
            return MergedLinear([self.linear(name) for name in names])
        parts = [self._int4(name) for name in names]
        groups = [part for part in parts if part is not None]
        if not groups:
            return Linear(self._joined([f"{name}.weight" for name in names]), self._bias(names))
        merged = merge(groups) if len(groups) == len(names) else None
        if merged is not None:
            silu_mul = gated and self.device.type == "cuda"
            return self._quant_linear(names, merged, silu_mul)  # on a CPU it gains nothing
        # Some files keep a part of a merged layer in more bits than the rest, or in another order
        # of columns: each stays as it is.
        return MergedLinear(
            [
                self._quant_linear([name], part) if part is not None else self.linear(name)
                for name, part in zip(names, parts, strict=True)
            ]
        )

    def _int4(self, name: str) -> Int4Groups | None:
        stored = self.int4_groups(name)
        if stored is not None or self.options.quantize is None or name == "lm_head":
            return stored
        weight = self.dense(f"{name}.weight")
        with self._naming(name):
            groups, self.rounding_errors[name] = _rounded(weight)
        self._done(f"{name}.weight")
        return groups

    def _quant_linear(
        self, names: Sequence[str], weight: Int4Groups, silu_mul: bool = False
    ) -> QuantLinear:
        self.num_int4_layers += len(names)
        return QuantLinear(self._packed(names, weight, silu_mul), self._bias(names))

    def _bias(self, names: Sequence[str]) -> Tensor | None:
        biases = [f"{name}.bias" for name in names if self.has_bias(name)]
        return self._joined(biases) if biases else None

    def _joined(self, names: Sequence[str]) -> Tensor:
        """Tensors one below the other."""
        tensors = [self.tensor(name) for name in names]
        return tensors[0] if len(tensors) == 1 else torch.cat(tensors)

    def _packed(
        self, names: Sequence[str], weight: Int4Groups, silu_mul: bool
    ) -> marlin.PackedWeight:
        """An INT4 weight, moved to the device before it is packed there."""

        def here(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.to(self.device)

        with self._naming(*names):
            return marlin.pack(
                weight.codes.to(self.device),
                weight.scales.to(self.device),
                zeros=here(weight.zeros),
                offsets=here(weight.offsets),
                g_idx=here(weight.g_idx),
                group_size=weight.group_size,
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

    def _done(self, name: str) -> None:
        self.release(name)
        self._num_loaded += 1
        if self.options.progress:
            self.options.progress(self._num_loaded, self._num_tensors)


def _rounded(weight: Tensor) -> tuple[Int4Groups, float]:
    """The nearest INT4 weights, a few rows at a time, and their error."""
    rows = max(1, _ROUNDED_AT_ONCE // weight.shape[1])
    parts, lost, whole = [], 0.0, 0.0
    for values in weight.split(rows):
        part = round_to_nearest(values, GROUP_SIZE)
        lost += float((part.dequantize() - values).square().sum(dtype=torch.float64))
        whole += float(values.float().square().sum(dtype=torch.float64))
        parts.append(part)
    codes, scales = (torch.cat([getattr(p, field) for p in parts]) for field in ("codes", "scales"))
    error = (lost / whole) ** 0.5 if whole else 0.0
    return Int4Groups(codes, scales, None, None, GROUP_SIZE), error
