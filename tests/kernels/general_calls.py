"""A good call of every general operation, small, and what may be done to its tensors."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from billfish.kernels import general


class Call(NamedTuple):
    """function(**arguments). gradients: names of tensors that it has derivatives by. contiguous:
    it takes no other tensors. written: names of tensors that it changes."""

    function: Callable[..., Any]
    arguments: dict[str, Any]
    gradients: tuple[str, ...] = ()
    contiguous: bool = False
    written: tuple[str, ...] = ()

    def __call__(self, **changed: Any) -> list[Tensor]:
        out = self.function(**{**self.arguments, **changed})
        return [] if out is None else [out] if isinstance(out, Tensor) else list(out)

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {name: v for name, v in self.arguments.items() if isinstance(v, Tensor)}


def calls(device: torch.device | str = "cpu") -> dict[str, Call]:
    """By the operation's name, with what is particular behind a space."""
    rng = torch.Generator().manual_seed(0)

    def r(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng).to(device)

    def i(most: int, *shape: int) -> Tensor:
        return torch.randint(0, most, shape, generator=rng).to(device)

    def p(*shape: int) -> Tensor:
        return (torch.rand(*shape, generator=rng) + 0.1).to(device)

    g = general
    terms = {"spot": p(3), "strike": p(3), "rate": r(3) / 9, "volatility": p(3), "maturity": p(3)}
    market = {name: terms[name] for name in ("spot", "rate", "volatility", "maturity")}
    offsets = torch.tensor([0, 2, 2, 9], device=device)
    both = {"gate_up": r(6, 8)}
    norms = ("x", "weight")
    return {
        "rms_norm": Call(g.rms_norm, {"x": r(6, 8), "weight": r(8), "eps": 1e-5}, norms),
        "rms_norm residual": Call(
            g.rms_norm, {"x": r(6, 8), "weight": r(8), "eps": 1e-5, "residual": r(6, 8)},
            (*norms, "residual"),
        ),
        "layer_norm": Call(
            g.layer_norm, {"x": r(6, 8), "weight": r(8), "bias": r(8)}, (*norms, "bias")
        ),
        "softmax": Call(g.softmax, {"x": r(6, 8)}, ("x",)),
        "softmax columns": Call(g.softmax, {"x": r(6, 8), "dim": 0}, ("x",)),
        "rotary_embedding": Call(
            g.rotary_embedding,
            {"query": r(5, 4, 8), "key": r(5, 2, 8), "positions": i(9, 5), "cos_sin": r(9, 8)},
            ("query", "key"),
        ),
        "silu_mul": Call(g.silu_mul, both, ("gate_up",)),
        "gelu_tanh_mul": Call(g.gelu_tanh_mul, both, ("gate_up",)),
        "cross_entropy": Call(
            g.cross_entropy, {"logits": r(6, 8), "target": i(8, 6)}, ("logits",)
        ),
        "linear_cross_entropy": Call(
            g.linear_cross_entropy, {"x": r(6, 8), "weight": r(5, 8), "target": i(5, 6)}, norms
        ),
        "adamw_step": Call(
            g.adamw_step,
            {"param": r(6), "grad": r(6), "exp_avg": r(6), "exp_avg_sq": p(6), "step": 1},
            ("param", "grad", "exp_avg", "exp_avg_sq"),  # which it does not follow
            contiguous=True, written=("param", "exp_avg", "exp_avg_sq"),
        ),
        "sample": Call(
            g.sample,
            {"logits": r(6, 8), "temperature": p(6), "top_k": i(8, 6), "top_p": p(6) / 1.1,
             "min_p": p(6) / 2, "seed": i(99, 6), "position": i(99, 6)},
        ),
        "reduce": Call(g.reduce, {"x": r(6, 8)}),
        "reduce rows": Call(g.reduce, {"x": r(6, 8), "dim": 1, "op": "max"}),
        "segment_reduce": Call(g.segment_reduce, {"x": r(9), "offsets": offsets}),
        "scan": Call(g.scan, {"x": i(99, 6, 8)}),
        "scan columns": Call(g.scan, {"x": i(99, 6, 8), "dim": 0, "exclusive": True}),
        "histogram": Call(g.histogram, {"x": i(9, 20), "bins": 7}),
        "histogram floats": Call(g.histogram, {"x": r(20), "bins": 7, "low": -1.0, "high": 1.0}),
        "sort": Call(g.sort, {"keys": i(5, 6, 8), "values": r(6, 8)}),
        "compact": Call(g.compact, {"x": r(9), "keep": r(9) > 0}),
        "transpose": Call(g.transpose, {"x": r(6, 8)}),
        "elementwise": Call(
            lambda **k: g.elementwise("silu(x) * y + 0.5 * z", **k),
            {"x": r(6, 8), "y": r(6, 8), "z": r(8)},
        ),
        "heat_equation": Call(g.heat_equation, {"x": r(4, 5, 6), "rate": 0.1, "steps": 3}),
        "nbody_acceleration": Call(g.nbody_acceleration, {"position": r(6, 3), "mass": p(6)}),
        "leapfrog_step": Call(
            g.leapfrog_step, {"position": r(6, 3), "velocity": r(6, 3), "mass": p(6), "dt": 0.1}
        ),
        "option_price": Call(g.option_price, {**terms, "paths": 20}),
        "market_paths": Call(g.market_paths, {**market, "paths": 10, "steps": 2}),
        "black_scholes": Call(g.black_scholes, terms),
        "spmv": Call(
            g.spmv, {"values": r(9), "columns": i(5, 9), "offsets": offsets, "x": r(5)}
        ),
        "matmul": Call(
            g.matmul, {"a": r(6, 8), "b": r(8, 4), "bias": r(4), "residual": r(6, 4)}
        ),
        "convolve2d": Call(g.convolve2d, {"x": r(2, 9, 8), "kernel": r(3, 5)}),
        "separable_convolve2d": Call(
            g.separable_convolve2d, {"x": r(2, 9, 8), "column": r(3), "row": r(5)}
        ),
        "bilateral": Call(g.bilateral, {"x": r(2, 9, 8), "sigma_space": 1.0, "sigma_range": 1.0}),
        "sobel": Call(g.sobel, {"x": r(2, 9, 8)}),
        "fft": Call(g.fft, {"x": torch.complex(r(2, 12), r(2, 12))}),
        "ifft": Call(g.ifft, {"x": torch.complex(r(2, 12), r(2, 12))}),
        "rfft": Call(g.rfft, {"x": r(2, 12)}),
        "irfft": Call(g.irfft, {"x": torch.complex(r(2, 7), r(2, 7))}),
        "fir": Call(g.fir, {"x": r(2, 12), "taps": r(4), "state": r(2, 3)}),
    }  # fmt: skip


def spread(tensor: Tensor) -> Tensor:
    """The same numbers, neither at the beginning of their memory nor side by side."""
    wide = tensor.new_zeros((*tensor.shape[:-1], 2 * tensor.shape[-1] + 3))
    view = wide[..., 3 : 3 + 2 * tensor.shape[-1] : 2]
    return view.copy_(tensor)


def turned(tensor: Tensor) -> Tensor:
    """The same numbers, columns after one another."""
    return tensor.mT.contiguous().mT if tensor.dim() > 1 else tensor


def offset(tensor: Tensor) -> Tensor:
    """The same numbers, one behind an element that belongs to somebody else."""
    memory = tensor.new_zeros(tensor.numel() + 1)
    memory[1:] = tensor.flatten()
    return memory[1:].view(tensor.shape)


VIEWS = {"spread": spread, "turned": turned, "offset": offset}

EMPTY = {
    "rms_norm": {"x": (0, 8)}, "layer_norm": {"x": (0, 8)}, "softmax": {"x": (0, 8)},
    "silu_mul": {"gate_up": (0, 8)}, "gelu_tanh_mul": {"gate_up": (0, 8)},
    "rotary_embedding": {"query": (0, 4, 8), "key": (0, 2, 8), "positions": (0,)},
    "cross_entropy": {"logits": (0, 8), "target": (0,)},
    "linear_cross_entropy": {"x": (0, 8), "target": (0,)},
    "adamw_step": dict.fromkeys(("param", "grad", "exp_avg", "exp_avg_sq"), (0,)),
    "sample": {"logits": (0, 8), **dict.fromkeys(
        ("temperature", "top_k", "top_p", "min_p", "seed", "position"), (0,))},
    "reduce": {"x": (0,)}, "reduce rows": {"x": (6, 0)}, "scan": {"x": (6, 0)},
    "segment_reduce": {"x": (0,), "offsets": (4,)}, "histogram": {"x": (0,)},
    "histogram floats": {"x": (0,)}, "sort": {"keys": (6, 0), "values": (6, 0)},
    "compact": {"x": (0,), "keep": (0,)}, "transpose": {"x": (0, 8)},
    "elementwise": {"x": (0, 8), "y": (0, 8)}, "heat_equation": {"x": (4, 0, 6)},
    "nbody_acceleration": {"position": (0, 3), "mass": (0,)},
    "option_price": dict.fromkeys(("spot", "strike", "rate", "volatility", "maturity"), (0,)),
    "spmv": {"values": (0,), "columns": (0,), "offsets": (1,)},
    "matmul": {"a": (0, 8), "residual": (0, 4)}, "convolve2d": {"x": (2, 0, 8)},
    "separable_convolve2d": {"x": (0, 9, 8)}, "bilateral": {"x": (2, 9, 0)},
    "sobel": {"x": (0, 9, 8)}, "fft": {"x": (0, 12)}, "rfft": {"x": (0, 12)},
    "irfft": {"x": (0, 7)}, "fir": {"x": (0, 12), "state": (0, 3)},
}  # fmt: skip
"""Shapes of tensors with which a call has nothing to do, or little."""


def of_nothing(name: str, device: torch.device | str = "cpu") -> list[Tensor]:
    call = calls(device)[name]
    return call(**{a: call.arguments[a].new_zeros(shape) for a, shape in EMPTY[name].items()})
