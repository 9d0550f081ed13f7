"""RMSNorm, alone or fused with the addition of the residual stream."""

from typing import overload

from torch import Tensor, nn

from billfish.kernels import general


class RMSNorm(nn.Module):
    """x / rms(x) * weight. With a residual, the sum x + residual is normalised and returned too."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight = nn.Buffer(weight)
        self.eps = eps

    @overload
    def forward(self, x: Tensor) -> Tensor: ...
    @overload
    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]: ...
    def forward(self, x: Tensor, residual: Tensor | None = None):
        return general.rms_norm(x, self.weight, self.eps, residual)
