"""Chains of element-wise operations and their inputs, for tests on CPUs, in the interpreter, on
GPUs."""

from collections.abc import Callable

import torch
from torch import Tensor


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def whole(*shape: int, dtype: torch.dtype = torch.int64, seed: int = 0) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    return torch.randint(0 if dtype == torch.uint8 else -9, 9, shape, generator=rng).to(dtype)


def rows() -> dict[str, Tensor]:
    """A matrix, a row, a column."""
    return {"x": draw(5, 7), "y": draw(7, seed=1), "z": draw(5, 1, seed=2)}


def _only(*names: str) -> Callable[[], dict[str, Tensor]]:
    return lambda: {name: rows()[name] for name in names}


CHAINS: dict[str, Callable[[], dict[str, Tensor]]] = {
    "silu(x) * y + 0.5 * z": rows,
    "x": _only("x"),
    "y * z": _only("y", "z"),
    "x * 2 + x / 3 - 1": lambda: {"x": draw(6, 8, 4)[::2, 1:6].transpose(0, 2)},
    "where(x > y, x, -1)": _only("x", "y"),
    "where(x <= 0, 1.0, 0.0)": _only("x"),
    "maximum(x, 0) - minimum(y, x) ** 3": _only("x", "y"),
    "maximum(x, y)": lambda: {
        "x": torch.tensor([1.0, torch.nan, 2.0]), "y": torch.tensor([torch.nan, 1.0, 3.0])},
    "relu(x) + minimum(x, 1)": lambda: {"x": torch.tensor([-1.0, 2.0, torch.nan])},
    "tanh(x) + erf(x) + gelu(x) + sigmoid(x)": _only("x"),
    "tanh(x)": lambda: {"x": torch.tensor([-200.0, -0.1, -1e-4, 0.0, 1e-30, 0.099, 3.0, 90.0])},
    "sqrt(abs(x)) * rsqrt(x * x + 1) / log(exp(x) + 2) + sin(x) * cos(y)": _only("x", "y"),
    "-x ** 2 + floor(x) * ceil(y) + exp2(x) - log2(abs(y)) + x ** 0.5 * 0": lambda: {
        "x": draw(4).abs(), "y": draw(4, seed=1)},
    "i * 2 + 1": lambda: {"i": whole(3, 5)},
    "i / 2 + abs(j)": lambda: {"i": whole(3, 5), "j": whole(5, dtype=torch.int16, seed=1)},
    "i * 2.5": lambda: {"i": whole(3, dtype=torch.int8)},
    "i + 200": lambda: {"i": torch.arange(90, dtype=torch.uint8)},
    "i * 3000000000": lambda: {"i": whole(3, 5)},
    "i * 1 + x * 1.0": lambda: {"i": whole(3), "x": draw(3).double()},
    "~b & (x < 0) | (i == 2)": lambda: {"b": draw(5, 7) > 0, "x": draw(5, 7, seed=1),
                                        "i": whole(7)},
    "b * x": lambda: {"b": draw(5) > 0, "x": draw(5)},
    "h * 2 + 1": lambda: {"h": draw(7, 5).half().t()},
    "h * s": lambda: {"h": draw(7).half(), "s": torch.tensor(2.5, dtype=torch.float64)},
    "h + x": lambda: {"h": draw(7).half(), "x": draw(7, seed=1)},
    "d * 3 / 7 + tanh(d)": lambda: {"d": draw(9).double()},
    "d == 0.1": lambda: {"d": torch.tensor([0.1, 0.2], dtype=torch.float64)},
    "2 * 3 * s + (1 - 4) / 2": lambda: {"s": torch.tensor(3.0)},
    "e + 1": lambda: {"e": draw(0, 4)},
}  # fmt: skip
