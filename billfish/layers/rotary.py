"""Rotary position embedding (RoFormer, arXiv:2104.09864): the table of angles, made once."""

import torch
from torch import Tensor

from billfish.config import ModelConfig


def rotary_table(config: ModelConfig, max_len: int, factors: Tensor | None = None) -> Tensor:
    """Cosines, then sines, of every position: float32 [max_len, rotary_dim].

    factors, [rotary_dim / 2], divide the frequencies one by one (Llama 3.1's long-context scaling,
    as GGUF stores it).
    """
    # float64 until the end: at position 8191 a float32 angle is already off by 5e-4.
    exponents = torch.arange(0, config.rotary_dim, 2, dtype=torch.float64) / config.rotary_dim
    frequencies = config.rope_theta**-exponents / config.rope_scaling
    if factors is not None:
        frequencies = frequencies / factors.to(torch.float64)
    angles = torch.outer(torch.arange(max_len, dtype=torch.float64), frequencies)
    return torch.cat([angles.cos(), angles.sin()], dim=-1).to(torch.float32)
