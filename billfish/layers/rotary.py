"""Rotary position embedding (RoFormer, arXiv:2104.09864), in the half-split form of GPT-NeoX."""

import torch
from torch import Tensor, nn

from billfish.config import ModelConfig
from billfish.kernels import general


class RotaryEmbedding(nn.Module):
    """Turns queries and keys by their positions, with a table of cosines and sines made once.

    The table is float32 [max_len, rotary_dim], cosines first. factors, [rotary_dim / 2], divide the
    frequencies one by one (Llama 3.1's long-context scaling, as GGUF stores it).
    """

    def __init__(self, config: ModelConfig, max_len: int, factors: Tensor | None = None) -> None:
        super().__init__()
        # float64 until the end: at position 8191 a float32 angle is already off by 5e-4.
        exponents = torch.arange(0, config.rotary_dim, 2, dtype=torch.float64) / config.rotary_dim
        frequencies = config.rope_theta**-exponents / config.rope_scaling
        if factors is not None:
            frequencies = frequencies / factors.to(torch.float64)
        angles = torch.outer(torch.arange(max_len, dtype=torch.float64), frequencies)
        table = torch.cat([angles.cos(), angles.sin()], dim=-1).to(torch.float32)
        self.cos_sin = nn.Buffer(table)

    def forward(self, positions: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        return general.rotary_embedding(query, key, positions, self.cos_sin)
