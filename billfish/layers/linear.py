"""Linear layers: INT4 weights through the Marlin family, or dense ones."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from billfish.errors import KernelArgumentError
from billfish.kernels import marlin
from billfish.quantization.int4 import round_to_nearest


class QuantLinear(nn.Module):
    """y = x W^T + b with W in INT4: x [..., k] and y [..., n] of the weight's activation dtype.

    A drop-in for `torch.nn.Linear` in inference: made from one by `from_linear`, moved and cast by
    `to` (a weight has one form for each kind of device and dtype, and is packed anew), saved and
    loaded by `state_dict`. It has no derivative.

    With a weight packed with `silu_mul` it is the gated part of an MLP: y = silu(gate) * up
    [..., n / 2]. batch_invariant: see `marlin.w4a16_matmul`; it may be set at any time.
    """

    def __init__(
        self,
        weight: marlin.PackedWeight,
        bias: Tensor | None = None,
        *,
        batch_invariant: bool = False,
    ) -> None:
        super().__init__()
        self.weight = weight
        self.batch_invariant = batch_invariant
        self.bias = None if bias is None else nn.Buffer(bias)

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, *, group_size: int = 128, symmetric: bool = True
    ) -> "QuantLinear":
        """Rounds the weight of a dense layer to INT4; see `round_to_nearest` for what is lost.

        Raises KernelArgumentError for a weight that is not finite, and for a dtype or group size
        that `marlin.pack` does not take.
        """
        dense = linear.weight.detach()
        groups = round_to_nearest(dense, group_size, symmetric=symmetric)
        weight = marlin.pack(
            groups.codes, groups.scales, offsets=groups.offsets, group_size=group_size,
            dtype=dense.dtype,
        )  # fmt: skip
        return cls(weight, None if linear.bias is None else linear.bias.detach().clone())

    @property
    def in_features(self) -> int:
        return self.weight.k

    @property
    def out_features(self) -> int:
        return self.weight.outputs

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """y [..., n], plus residual [..., n] where one is given."""
        return marlin.w4a16_matmul(
            x, self.weight, self.bias, residual=residual, batch_invariant=self.batch_invariant
        )

    def get_extra_state(self) -> dict[str, Any]:
        """The weight in a form that belongs to no device: what `marlin.pack` takes."""
        weight = self.weight
        codes, scales, zeros, offsets = weight.unpack()
        return {
            "codes": codes, "scales": scales, "zeros": zeros, "offsets": offsets,
            "g_idx": weight.g_idx, "group_size": weight.group_size, "dtype": weight.dtype,
            "silu_mul": weight.silu_mul,
        }  # fmt: skip

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Packs a saved weight for this layer's device and dtype, which stay, as those of a dense
        layer do. KernelArgumentError: it is none, or has not this layer's shape."""
        if not isinstance(state, dict) or not state.keys() >= _STATE:
            raise KernelArgumentError(f"saved weight: got none, expected {sorted(_STATE)}")
        weight = self.weight
        shape, expected = tuple(getattr(state["codes"], "shape", ())), (weight.n, weight.k)
        if shape != expected:
            raise KernelArgumentError(f"saved weight: got {shape}, expected {expected}")
        kept = {name: state[name] for name in _STATE}
        self.weight = _packed_on(weight.device, **{**kept, "dtype": weight.dtype})

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "QuantLinear":
        # What fn does to a tensor of this dtype here is what it asks of the weight.
        old = self.weight
        probe = fn(torch.empty(0, dtype=old.dtype, device=old.device))
        weight = old  # packed before anything changes: a layer that cannot follow stays whole
        if probe.dtype != old.dtype:
            state = {**self.get_extra_state(), "dtype": probe.dtype}
            weight = _packed_on(probe.device, **state)
        elif probe.device != old.device:
            weight = old.to(probe.device)
        super()._apply(fn, recurse)
        self.weight = weight
        return self

    def extra_repr(self) -> str:
        w = self.weight
        gated = ", silu_mul" if w.silu_mul else ""
        return f"in={w.k}, out={w.outputs}, int4, group={w.group_size}, dtype={w.dtype}{gated}"


_STATE = {
    "codes", "scales", "zeros", "offsets", "g_idx", "group_size", "dtype", "silu_mul",
}  # fmt: skip
"""What `QuantLinear.get_extra_state` tells."""


def _packed_on(device: torch.device, **state: Any) -> marlin.PackedWeight:
    moved: dict[str, Any] = {
        name: value.to(device) if isinstance(value, Tensor) else value
        for name, value in state.items()
    }
    return marlin.pack(moved.pop("codes"), moved.pop("scales"), **moved)


def quantize_(
    model: nn.Module,
    *,
    group_size: int = 128,
    symmetric: bool = True,
    only: Callable[[str, nn.Linear], bool] = lambda name, linear: True,
) -> nn.Module:
    """Replaces the `torch.nn.Linear` layers of any module by `QuantLinear`, in place.

    only: called with the full name and the layer; layers for which it is false stay dense, such as
    a head: `only=lambda name, _: name != "lm_head"`. A layer that stands in several places stays
    one layer. A layer whose weight is another module's too (tied) is replaced like any other, and
    the other keeps the dense weight. Returns the model.

    Raises KernelArgumentError, before anything is replaced, for a bare Linear (use
    `QuantLinear.from_linear`) and for what `QuantLinear.from_linear` refuses.
    """
    if isinstance(model, nn.Linear):
        raise KernelArgumentError("model: got a bare Linear, which cannot be replaced in place")
    places = [
        (name, layer)
        for name, layer in model.named_modules(remove_duplicate=False)
        if type(layer) is nn.Linear and only(name, layer)
    ]
    quantized = {
        layer: QuantLinear.from_linear(layer, group_size=group_size, symmetric=symmetric)
        for layer in dict.fromkeys(layer for _, layer in places)
    }
    for name, layer in places:
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, quantized[layer].train(layer.training))
    return model


class Linear(nn.Module):
    """y = x W^T + b with a dense W [n, k].

    batch_invariant: a row's result does not depend on how many other rows there are; it may be set
    at any time. Libraries choose how they add up by the shape of a product, so all are made alike:
    of ROWS rows, filled up with zeros.

    q8_0: the weight before it was rounded to its dtype, in GGUF's Q8_0, uint8; for those who can
    multiply with it. None where it was stored in another way.
    """

    ROWS = 128
    q8_0: Tensor | None = None

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.weight = nn.Buffer(weight)
        self.bias = None if bias is None else nn.Buffer(bias)
        self.batch_invariant = False

    def forward(self, x: Tensor) -> Tensor:
        if self.batch_invariant:
            return self._in_equal_parts(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)
        return torch.nn.functional.linear(x, self.weight, self.bias)

    def _in_equal_parts(self, rows: Tensor) -> Tensor:
        out = rows.new_empty(len(rows), self.weight.shape[0])
        for start in range(0, len(rows), self.ROWS):
            part = rows[start : start + self.ROWS]
            filled = torch.nn.functional.pad(part, (0, 0, 0, self.ROWS - len(part)))
            product = torch.nn.functional.linear(filled, self.weight, self.bias)
            out[start : start + self.ROWS] = product[: len(part)]
        return out

    def extra_repr(self) -> str:
        n, k = self.weight.shape
        return f"in={k}, out={n}, dtype={self.weight.dtype}"


class Int8Linear(nn.Module):
    """y = x W^T with W in 8 bits, as the sum of two INT4 products: code = 16 high + low.

    Codes are -136..119 and have a scale for each 128 columns. Made from a dense layer by
    `from_dense`.
    """

    def __init__(self, high: QuantLinear, low: QuantLinear) -> None:
        super().__init__()
        self.high, self.low = high, low

    @classmethod
    def from_dense(cls, weight: Tensor, group_size: int = 128) -> "Int8Linear":
        """weight: [n, k], finite; rounded to the nearest."""
        n, k = weight.shape
        groups = -(-k // group_size)
        padded = torch.nn.functional.pad(weight.float(), (0, groups * group_size - k))
        blocks = padded.view(n, groups, group_size)
        # Scales are rounded to the dtype first, so that codes make up for it.
        scales = (blocks.abs().amax(dim=-1) / 119).to(weight.dtype).clamp_min(1e-6)
        codes = (blocks / scales.float()[..., None]).round_().clamp_(-136, 119)
        high = ((codes + 8) / 16).floor_()
        low = codes - 16 * high

        def part(values: Tensor, scale: Tensor) -> QuantLinear:
            packed = marlin.pack(
                (values + 8).to(torch.uint8).view(n, -1)[:, :k].contiguous(), scale,
                group_size=group_size, dtype=weight.dtype,
            )  # fmt: skip
            return QuantLinear(packed)

        return cls(part(high, 16 * scales), part(low, scales))

    def forward(self, x: Tensor) -> Tensor:
        return self.low(x, self.high(x))


def quantized_head(head: nn.Module, kind: str) -> nn.Module:
    """A dense head in "int8" or "int4"; another kind of layer is kept."""
    if not isinstance(head, Linear) or head.bias is not None:
        return head
    if kind == "int8":
        return Int8Linear.from_dense(head.weight)
    groups = round_to_nearest(head.weight, 32, symmetric=True)
    return QuantLinear(
        marlin.pack(groups.codes, groups.scales, group_size=32, dtype=head.weight.dtype)
    )


class MergedLinear(nn.Module):
    """Several linear layers of one input, their outputs side by side.

    For parts that cannot be one product, such as an INT4 query beside a dense value projection.
    """

    def __init__(self, parts: list[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([part(x) for part in self.parts], dim=-1)
