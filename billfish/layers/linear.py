"""Linear layers: INT4 weights through the Marlin family, or dense ones."""

import torch
from torch import Tensor, nn

from billfish.kernels import marlin


class QuantLinear(nn.Module):
    """y = x W^T + b with W in INT4: x [..., k] and y [..., n] of the weight's activation dtype."""

    def __init__(self, weight: marlin.PackedWeight, bias: Tensor | None = None) -> None:
        super().__init__()
        self.weight = weight
        self.bias = None if bias is None else nn.Buffer(bias)

    def forward(self, x: Tensor) -> Tensor:
        return marlin.w4a16_matmul(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        w = self.weight
        return f"in={w.k}, out={w.n}, int4, group={w.group_size}, dtype={w.dtype}"


class Linear(nn.Module):
    """y = x W^T + b with a dense W [n, k]."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.weight = nn.Buffer(weight)
        self.bias = None if bias is None else nn.Buffer(bias)

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        n, k = self.weight.shape
        return f"in={k}, out={n}, dtype={self.weight.dtype}"


class MergedLinear(nn.Module):
    """Several linear layers of one input, their outputs side by side.

    For parts that cannot be one product, such as an INT4 query beside a dense value projection.
    """

    def __init__(self, parts: list[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([part(x) for part in self.parts], dim=-1)
