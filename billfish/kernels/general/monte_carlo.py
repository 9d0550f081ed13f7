"""Option prices by Monte Carlo: the example of randomness in parallel, and of a fused pipeline.

A price is the mean payoff over random paths of the market. A generator with a state would tie the
numbers to who draws them when; one with a counter (Philox 4x32-10, Salmon et al., "Parallel random
numbers: as easy as 1, 2, 3", SC11) computes them from (seed, path, step), so that the same path is
walked whatever the shape of the launch, on a CPU as on a GPU.

A path lives in registers: its numbers are drawn, turned into normals (Box & Muller), added up,
paid out and summed without a byte written to memory. Sums are float64, in an order that only the
number of paths decides: the same bits each time.

The technique's switch: `monte_carlo_gpu.option_price(..., fused=False)` writes all paths first and
reads them again.
"""

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from billfish.kernels._library import bad_argument, check_no_grad, register
from billfish.kernels.general._arguments import check_device

KINDS = ("european", "asian", "geometric_asian")
_WORD = 0xFFFFFFFF
_TURN = (1.0, -1 / 2, 1 / 24, -1 / 720, 1 / 40320)  # cosine, in powers of the square
_RISE = (1.0, -1 / 6, 1 / 120, -1 / 5040, 1 / 362880)  # sine over its argument


def philox(seed: int, counter: tuple[Tensor, ...]) -> list[Tensor]:
    """Four words of 32 bits for each counter of four (int64 tensors), by Philox 4x32-10."""
    a, b, c, d = counter
    key = [seed & _WORD, (seed >> 32) & _WORD]
    for _ in range(10):
        # Products wrap in int64: both halves are right all the same.
        first, second = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = (
            ((second >> 32) & _WORD) ^ b ^ key[0], second & _WORD,
            ((first >> 32) & _WORD) ^ d ^ key[1], first & _WORD,
        )  # fmt: skip
        key = [(key[0] + 0x9E3779B9) & _WORD, (key[1] + 0xBB67AE85) & _WORD]
    return [a, b, c, d]


def _normals(seed: int, counter: tuple[Tensor, ...], dtype: torch.dtype) -> list[Tensor]:
    """Four normal numbers for each counter: of two uniform ones, a radius and an angle in turns.

    A word w stands for (w + 1/2) / 2^32, so that no logarithm is of 0.
    """
    u = [word.to(dtype) * 2.0**-32 + 2.0**-33 for word in philox(seed, counter)]
    normals = []
    for i in (0, 2):
        radius = torch.sqrt(-2.0 * torch.log(u[i]))
        quarter = torch.floor(u[i + 1] * 4.0 + 0.5)
        rest = (u[i + 1] * 4.0 - quarter) * (math.pi / 2)  # of a quarter turn, to either side
        square = rest * rest
        cosine, sine = (
            (((p[4] * square + p[3]) * square + p[2]) * square + p[1]) * square + p[0]
            for p in (_TURN, _RISE)
        )
        sine = sine * rest
        if dtype == torch.float64:
            cosine, sine = torch.cos(rest), torch.sin(rest)
        turned = quarter.long() & 3
        swap = (turned & 1) == 1
        normals += [
            radius * torch.where(swap, sine, cosine) * torch.where((turned + 1) & 2 > 0, -1.0, 1.0),
            radius * torch.where(swap, cosine, sine) * torch.where(turned >= 2, -1.0, 1.0),
        ]
    return [n.to(dtype) for n in normals]


def _walk(
    contract: Tensor, path: Tensor, steps: int, seed: int, dtype: torch.dtype
) -> list[Tensor]:
    """How much the logarithm of a price has grown after each step of the paths numbered."""
    _, _, rate, volatility, maturity, dividend = contract.tolist()
    dt = maturity / steps
    drift = (rate - dividend - 0.5 * volatility * volatility) * dt
    scale = volatility * math.sqrt(dt)
    if dtype == torch.float32:
        drift, scale = torch.tensor([drift, scale], dtype=dtype).tolist()
    nothing = torch.zeros_like(path)
    if steps == 1:  # four paths share a counter
        group = path // 4
        words = _normals(seed, (group & _WORD, group >> 32, nothing, nothing + 1), dtype)
        normal = torch.stack(words).gather(0, (path % 4)[None])[0]
        return [drift + scale * normal]
    growth, after = torch.zeros(len(path), dtype=dtype), []
    for step in range(steps):
        if step % 4 == 0:
            counter = (path & _WORD, path >> 32, nothing + step // 4, nothing)
            words = _normals(seed, counter, dtype)
        growth = growth + (drift + scale * words[step % 4])
        after.append(growth)
    return after


def _payoff(growth: list[Tensor], spot: float, strike: float, kind: str, call: bool) -> Tensor:
    if kind == "european":
        settled = spot * growth[-1].exp()
    elif kind == "asian":
        settled = spot * (torch.stack(growth).exp_().sum(0) / len(growth))
    else:
        settled = spot * torch.exp(torch.stack(growth).sum(0) / len(growth))
    return torch.clamp(settled - strike if call else strike - settled, min=0.0)


def _finish(contracts: Tensor, sums: Tensor, paths: int) -> Tensor:
    """[n, 2], price and standard error, from the sums of payoffs and of their squares [n, 2]."""
    discount = torch.exp(-contracts[:, 2] * contracts[:, 4])
    mean = sums[:, 0] / paths
    variance = (sums[:, 1] / paths - mean * mean).clamp_(min=0.0) / max(paths - 1, 1)
    return torch.stack((discount * mean, discount * variance.sqrt()), 1)


def _pieces(paths: int) -> Iterator[Tensor]:
    """The numbers of all paths, some at a time: together they may not fit into memory."""
    for first in range(0, paths, 1 << 16):
        yield torch.arange(first, min(paths, first + (1 << 16)))


def _sums(
    contracts: Tensor, paths: int, steps: int, kind: str, call: bool, seed: int, dtype: torch.dtype
) -> Tensor:
    sums = torch.zeros(len(contracts), 2, dtype=torch.float64)
    for i, contract in enumerate(contracts):
        for path in _pieces(paths):
            growth = _walk(contract, path, steps, seed, dtype)
            spot, strike = contract[:2].tolist()
            paid = _payoff(growth, spot, strike, kind, call).double()
            sums[i] += torch.stack((paid.sum(), paid.square().sum()))
    return sums


def option_price_reference(
    contracts: Tensor, paths: int, steps: int, kind: str, call: bool, seed: int
) -> Tensor:
    """The same paths in float64. contracts: see `option_price`."""
    sums = _sums(contracts, paths, steps, kind, call, seed, torch.float64)
    return _finish(contracts, sums, paths)


def _cpu(contracts: Tensor, paths: int, steps: int, kind: str, call: bool, seed: int) -> Tensor:
    sums = _sums(contracts, paths, steps, kind, call, seed, torch.float32)
    return _finish(contracts, sums, paths)


def _fake(contracts: Tensor, paths: int, steps: int, kind: str, call: bool, seed: int) -> Tensor:
    return contracts.new_empty((contracts.shape[0], 2))


_option_price: Callable[..., Tensor] = register(
    "option_price(Tensor contracts, int paths, int steps, str kind, bool call, int seed) -> Tensor",
    fake=_fake,
    cpu=_cpu,
    gpu="billfish.kernels.general.monte_carlo_gpu",
)


def _paths_cpu(contracts: Tensor, paths: int, steps: int, seed: int) -> Tensor:
    out = torch.empty(len(contracts), steps, paths)
    for i, contract in enumerate(contracts):
        for path in _pieces(paths):
            for step, growth in enumerate(_walk(contract, path, steps, seed, torch.float32)):
                out[i, step, path] = float(contract[0]) * growth.exp()
    return out


def _paths_fake(contracts: Tensor, paths: int, steps: int, seed: int) -> Tensor:
    return contracts.new_empty((contracts.shape[0], steps, paths), dtype=torch.float32)


_market_paths: Callable[..., Tensor] = register(
    "market_paths(Tensor contracts, int paths, int steps, int seed) -> Tensor",
    fake=_paths_fake,
    cpu=_paths_cpu,
    gpu="billfish.kernels.general.monte_carlo_gpu",
)

Number = float | Tensor


def _contracts(device: torch.device | str | None, **terms: Number) -> tuple[Tensor, torch.Size]:
    """float64 [n, 6], and the shape that the terms have together. Numbers out of range are told
    where that takes no waiting for a GPU."""
    tensors = [t for t in terms.values() if isinstance(t, Tensor)]
    where = torch.device(device) if device else tensors[0].device if tensors else None
    wide = []
    for name, term in terms.items():
        if isinstance(term, Tensor):
            check_device(name, term)
            check_no_grad(name, term)
            if term.is_complex():
                raise bad_argument(name, term.dtype, "real numbers")
        try:
            value = torch.as_tensor(term, dtype=torch.float64)
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:
            raise bad_argument(name, term, "a number or a tensor") from error
        if value.is_cpu and not torch.compiler.is_compiling():
            least = {"spot": 0.0, "strike": 0.0, "volatility": 0.0, "maturity": 0.0}.get(name)
            good = value.isfinite() & (value >= (-math.inf if least is None else least))
            if not bool(good.all()):
                expected = "finite" if least is None else "finite, 0 or more"
                raise bad_argument(name, term, expected)
        wide.append(value.to(where))
    try:
        together = torch.broadcast_tensors(*wide)
    except RuntimeError as error:
        shapes = ", ".join(f"{n} {tuple(t.shape)}" for n, t in zip(terms, wide, strict=True))
        raise bad_argument("the contract's terms", shapes, "shapes that broadcast") from error
    return torch.stack([t.reshape(-1) for t in together], 1).contiguous(), together[0].shape


def _check_counts(paths: int, steps: int, seed: int) -> None:
    for name, value, least, most in (
        ("paths", paths, 1, 2**40), ("steps", steps, 1, 2**30), ("seed", seed, 0, 2**63 - 1),
    ):  # fmt: skip
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise bad_argument(name, value, f"{least} to {most}")


def option_price(
    spot: Number, strike: Number, rate: Number, volatility: Number, maturity: Number, *,
    paths: int, steps: int = 1, kind: str = "european", call: bool = True,
    dividend: Number = 0.0, seed: int = 0, device: torch.device | str | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(price, standard error) of options on a market that follows geometric Brownian motion.

    log S grows by (rate - dividend - volatility^2 / 2) dt + volatility sqrt(dt) N(0, 1) a step of
    dt = maturity / steps, without error of discretization. kind: "european" settles at the last
    price, "asian" at the mean of the prices after each of the steps, "geometric_asian" at their
    geometric mean. call: else a put. spot, strike: in money; rate, dividend: a year, continuously
    compounded; volatility: a root year; maturity: in years. Each a number or a tensor, which
    broadcast; contracts of a call are priced on the same random numbers. device: where (default:
    that of the tensors, else the CPU). paths: 1 to 2^40; seed: 0 to 2^63 - 1.

    Returns float64 of the terms' common shape. The standard error is that of the mean of the
    discounted payoffs. Paths are computed in float32 (a relative error of some 1e-6, which counts
    from 10^10 paths on), sums in float64.

    Deterministic: the same bits from run to run on one kind of device; the random words are the
    same on all, so that results differ by rounding only.

    Raises KernelArgumentError: a count or the kind is wrong, terms do not broadcast, require a
    gradient, or (numbers, and tensors on a CPU) are not finite or negative where they may not be.
    """
    _check_counts(paths, steps, seed)
    if not isinstance(call, bool):
        raise bad_argument("call", repr(call), "True, or False for a put")
    if kind not in KINDS:
        raise bad_argument("kind", repr(kind), " or ".join(KINDS))
    contracts, shape = _contracts(
        device, spot=spot, strike=strike, rate=rate, volatility=volatility, maturity=maturity,
        dividend=dividend,
    )  # fmt: skip
    both = _option_price(contracts, paths, steps, kind, call, seed)
    return both[:, 0].view(shape), both[:, 1].view(shape)


def market_paths(
    spot: Number, rate: Number, volatility: Number, maturity: Number, *, paths: int,
    steps: int = 1, dividend: Number = 0.0, seed: int = 0,
    device: torch.device | str | None = None,
) -> Tensor:  # fmt: skip
    """The paths that `option_price` walks: float32 [..., steps, paths], terms' shape in front.

    Deterministic, and raises KernelArgumentError, as `option_price` does.
    """
    _check_counts(paths, steps, seed)
    contracts, shape = _contracts(
        device, spot=spot, strike=0.0, rate=rate, volatility=volatility, maturity=maturity,
        dividend=dividend,
    )  # fmt: skip
    return _market_paths(contracts, paths, steps, seed).view(*shape, steps, paths)


def black_scholes(
    spot: Number, strike: Number, rate: Number, volatility: Number, maturity: Number,
    call: bool = True, dividend: Number = 0.0,
) -> Tensor:  # fmt: skip
    """The European option's price in closed form, float64 (Black & Scholes, 1973; with a continuous
    dividend, Merton, 1973). Terms as of `option_price`; volatility, maturity and strike above 0.

    Deterministic. Raises KernelArgumentError: as `option_price`, of its terms.
    """
    contracts, shape = _contracts(
        None, spot=spot, strike=strike, rate=rate, volatility=volatility, maturity=maturity,
        dividend=dividend,
    )  # fmt: skip
    s, k, r, v, t, q = (term.view(shape) for term in contracts.unbind(1))
    spread = v * t.sqrt()
    d1 = (torch.log(s / k) + (r - q + v * v / 2) * t) / spread
    sign = 1.0 if call else -1.0
    ndtr = torch.special.ndtr
    held = s * torch.exp(-q * t) * ndtr(sign * d1)
    return sign * (held - k * torch.exp(-r * t) * ndtr(sign * (d1 - spread)))
