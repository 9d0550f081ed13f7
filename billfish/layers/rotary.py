"""Rotary position embedding (RoFormer, arXiv:2104.09864): the table of angles, made once."""

import math

import torch
from torch import Tensor

from billfish.config import RopeConfig


def rotary_table(rope: RopeConfig, rotary_dim: int, max_len: int) -> Tensor:
    """Cosines, then sines, of every position: float32 [max_len, rotary_dim].

    max_len: the longest sequence served, in tokens.
    """
    # float64 until the end: at position 8191 a float32 angle is already off by 5e-4.
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim
    plain = rope.theta**-exponents
    if rope.scaling == "linear":
        divisors = rope.long_divisors if max_len > rope.original_context else rope.short_divisors
        kept = torch.zeros_like(plain)
        if divisors:
            plain = plain / torch.tensor(divisors, dtype=torch.float64)
    elif rope.scaling == "llama3":
        turns = rope.original_context * plain / (2 * math.pi)
        kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    else:
        kept = 1 - _yarn_ramp(rope, rotary_dim)
    kept = kept.clamp(0, 1)
    frequencies = plain * kept + plain / rope.factor * (1 - kept)
    angles = torch.outer(torch.arange(max_len, dtype=torch.float64), frequencies)
    return (torch.cat([angles.cos(), angles.sin()], dim=-1) * rope.attention_factor).float()


def _yarn_ramp(rope: RopeConfig, rotary_dim: int) -> Tensor:
    """From 0 to 1 between the pairs that make beta_fast and beta_slow turns: section 3.2 of the
    paper, over the number of the pair, with bounds and rounding as transformers has them."""

    def pair_of(turns: float) -> float:
        period = rope.original_context / (turns * 2 * math.pi)
        return rotary_dim * math.log(period) / (2 * math.log(rope.theta))

    low, high = pair_of(rope.beta_fast), pair_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    if low == high:
        high += 0.001  # a step
    return (torch.arange(rotary_dim // 2, dtype=torch.float64) - low) / (high - low)
