"""Tokens drawn from logits: temperature, top-k, top-p and min-p.

The textbook sorts a vocabulary to find the k likeliest tokens, or those that make up a share p of
the probability, and reads or writes it a dozen times. Here (`sample_gpu.py`) the logit down to
which tokens are kept is found by bisection over the bit patterns of floats, which order as integers
do: each round only counts, and tokens keep their places. A row is read once, and the rounds look at
a thousand or two of its tokens that the kept ones are nearly always among. One number decides,
drawn from a seed and a position alone: neither the other rows of a batch nor the machine change
what a row gets.

The technique's switch: `sample_gpu.draw_tokens(..., bisect=False)` sorts.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from billfish.kernels._library import (
    bad_argument,
    check_activation,
    check_dense,
    check_no_grad,
    register,
)
from billfish.kernels.general._arguments import FLOATS, INTEGERS
from billfish.kernels.general.sort import sort

NO_TOKEN = -1

_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_FACTORS = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)


def uniform(seed: Tensor, position: Tensor) -> Tensor:
    """Float64 in [0, 1) of int64 seeds and positions: 53 bits of the finaliser of SplitMix64
    (Steele, Lea & Flood, OOPSLA 2014) over a counter, applied twice, so that neighbours have
    nothing in common. int64 wraps as the 64 bits without a sign do.
    """
    mixed = _mix(_mix(seed + _GOLDEN) + position * _GOLDEN)
    return _shifted(mixed, 11).double() * 2.0**-53


def _mix(z: Tensor) -> Tensor:
    z = (z ^ _shifted(z, 30)) * _FACTORS[0]
    z = (z ^ _shifted(z, 27)) * _FACTORS[1]
    return z ^ _shifted(z, 31)


def _shifted(z: Tensor, by: int) -> Tensor:
    """Zeros move in, not the sign."""
    return (z >> by) & (2 ** (64 - by) - 1)


def sample_reference(
    logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float, number: float
) -> int:
    """The token of one row of logits in float64, for a number in [0, 1)."""
    if not math.isfinite(float(logits.max())):
        return NO_TOKEN
    if temperature == 0:
        return int(logits.argmax())
    weights = ((logits - logits.max()) / temperature).exp().tolist()
    order = sorted(range(len(weights)), key=lambda token: (-logits[token].item(), token))
    kept = order[: top_k or None]
    weights = [w if w >= min_p else 0.0 for w in weights]
    total = sum(weights[token] for token in kept)
    before, nucleus = 0.0, []
    for token in kept:
        if before < top_p * total:
            nucleus.append(token)
        before += weights[token]
    target = number * sum(weights[token] for token in nucleus)
    running, last = 0.0, NO_TOKEN
    for token in sorted(nucleus):
        running += weights[token]
        if weights[token] > 0:
            last = token
            if running > target:
                break
    return last


def by_sort(logits: Tensor, numbers: Tensor, integers: Tensor, positions: Tensor) -> Tensor:
    """All rows at once, with a sort of the vocabulary; arguments as those of `draw_tokens`."""
    temperature, top_p, min_p = numbers[:, :3].unsqueeze(-1).unbind(1)
    most = logits.amax(-1, keepdim=True)
    greedy = temperature == 0
    # Shifted before the division: a tiny temperature must not make inf - inf of it.
    scaled = (logits.double() - most.double()) / torch.where(greedy, 1.0, temperature)
    weights = scaled.exp()
    weights = torch.where(weights < min_p, 0.0, weights)
    token = torch.arange(logits.shape[1], device=logits.device).expand(logits.shape)
    order = sort(logits, token, descending=True)[1]
    ranked = weights.gather(1, order)
    top_k = torch.where(integers[:, 1:] > 0, integers[:, 1:], logits.shape[1])
    ranked = torch.where(token >= top_k, 0.0, ranked)
    before = ranked.cumsum(1) - ranked
    total = ranked.sum(1, keepdim=True)
    ranked = torch.where((before >= top_p * total) & (top_p < 1), 0.0, ranked)
    kept = torch.zeros_like(weights).scatter_(1, order, ranked)
    running = kept.cumsum(1)
    target = uniform(integers[:, 0], positions).unsqueeze(1) * running[:, -1:]
    passed = (running > target) & (kept > 0)
    last = torch.where(kept > 0, token, NO_TOKEN).amax(1)
    drawn = torch.where(passed.any(1), passed.int().argmax(1), last)
    chosen = torch.where(greedy.squeeze(1), logits.argmax(1), drawn)
    return torch.where(most.squeeze(1).isfinite(), chosen, NO_TOKEN)


def _cpu(
    logits: Tensor, numbers: Tensor, integers: Tensor, positions: Tensor, greedy: bool
) -> Tensor:
    if greedy:
        most, token = logits.max(1)
        return torch.where(most.isfinite(), token, NO_TOKEN)
    return by_sort(logits, numbers, integers, positions)


def _fake(
    logits: Tensor, numbers: Tensor, integers: Tensor, positions: Tensor, greedy: bool
) -> Tensor:
    return logits.new_empty((logits.shape[0],), dtype=torch.int64)


_draw_tokens: Callable[..., Tensor] = register(
    "draw_tokens(Tensor logits, Tensor numbers, Tensor integers, Tensor positions, bool greedy)"
    " -> Tensor",
    fake=_fake,
    cpu=_cpu,
    gpu="billfish.kernels.general.sample_gpu",
)


def sample(
    logits: Tensor,
    temperature: float | Tensor = 1.0,
    top_k: int | Tensor = 0,
    top_p: float | Tensor = 1.0,
    min_p: float | Tensor = 0.0,
    *,
    seed: int | Tensor,
    position: int | Tensor = 0,
) -> Tensor:
    """Token ids int64 [N], one drawn from each row of logits [N, V]; -1 where a row holds NaN or
    +inf, or nothing but -inf.

    logits: float32, bfloat16 or float16, V >= 1. Each of the others is one number for all rows, or
    a tensor [N] on the device of logits: temperature >= 0 (0: the largest logit, the lowest id of
    equals), top_k >= 0 tokens that are kept (0: all), top_p in (0, 1], the share of what top_k
    keeps that the likeliest are kept for, the token that passes it included, min_p in [0, 1], the
    least probability over that of the likeliest (Nguyen et al., 2024, arXiv:2407.01082). Equal
    logits are kept by their ids, the lowest first.

    seed, position: 64-bit integers. A row's token depends on its logits and options and these two
    alone; one seed for all is seed + i for row i. Count position up for each token of a sequence.
    Probabilities are in float64.

    Deterministic: the same seed and position give the same token on every machine, but where two
    ways to add probabilities in float64 differ just at the number drawn.

    Raises KernelArgumentError: dtype, device or shape is wrong, a number out of range (a tensor's
    on a GPU is not looked at), or logits require a gradient.
    """
    check_activation("logits", logits)
    if logits.dim() != 2 or not logits.shape[1]:
        raise bad_argument("logits", tuple(logits.shape), "[N, V]")
    check_no_grad("logits", logits)
    greedy = isinstance(temperature, (int, float)) and temperature == 0
    floats = [
        _column("temperature", temperature, logits, torch.float64, 0.0, 1e300),
        _column("top_p", top_p, logits, torch.float64, 1e-300, 1.0),
        _column("min_p", min_p, logits, torch.float64, 0.0, 1.0),
    ]
    seeds = _column("seed", seed, logits, torch.int64)
    if isinstance(seed, int):
        seeds = seeds + torch.arange(len(seeds), device=seeds.device)
    integers = torch.stack((seeds, _column("top_k", top_k, logits, torch.int64, 0)), 1)
    positions = _column("position", position, logits, torch.int64)
    numbers = torch.stack((*floats, floats[0]), 1)
    return _draw_tokens(logits, numbers, integers, positions, greedy)


def _column(
    name: str, value: float | Tensor, logits: Tensor, dtype: torch.dtype,
    least: float | None = None, most: float | None = None,
) -> Tensor:  # fmt: skip
    """An option of each row."""
    rows = logits.shape[0]
    expected = "a number" if least is None else f"{least:g} or more"
    expected += "" if most is None else f", {most:g} or less"
    if isinstance(value, Tensor):
        check_no_grad(name, value)
        check_dense(name, value)
        wrong = value.dtype not in (FLOATS + INTEGERS if dtype == torch.float64 else INTEGERS)
        if value.shape != (rows,) or value.device != logits.device or wrong:
            got = f"{value.dtype} {tuple(value.shape)} on {value.device}"
            raise bad_argument(name, got, f"{dtype} [{rows}] on {logits.device}")
        if value.is_cpu and not torch.compiler.is_compiling() and least is not None:
            inside = (value >= least) & (value <= (math.inf if most is None else most))
            if not bool(inside.all()):
                raise bad_argument(name, value[~inside][0].item(), expected)
        return value.to(dtype)
    kinds = int if dtype == torch.int64 else (int, float)
    if not isinstance(value, kinds) or isinstance(value, bool):
        raise bad_argument(name, repr(value), expected)
    if least is not None and not least <= value <= (math.inf if most is None else most):
        raise bad_argument(name, value, expected)
    if dtype == torch.int64 and not -(2**63) <= value < 2**64:
        raise bad_argument(name, value, "64 bits")
    if value >= 2**63 and dtype == torch.int64:
        value -= 2**64
    return torch.full((rows,), value, dtype=dtype, device=logits.device)
