"""Option prices by Monte Carlo on a GPU, in Triton; see `monte_carlo.py`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from billfish.kernels.general.gpu import _on
from billfish.kernels.general.monte_carlo import _finish
from billfish.kernels.general.reduce_gpu import reduce

PROGRAMS = 4096
"""Programs a contract's paths are shared by, at most; not by device, for the order of sums."""


@triton.jit
def _flipped(value, turned):
    """value times -1 where bit 1 of `turned` is set: by its sign bit, not by a choice of two.

    For choices by two bits of a number ptxas moves the bits to predicates at once; that of CUDA
    12.8 was seen to use one of another number's.
    """
    sign = (turned & 2) << 30
    return (value.to(tl.int32, bitcast=True) ^ sign).to(tl.float32, bitcast=True)


@triton.jit
def _pair(first, second):
    """Two normal numbers of two random words; see `monte_carlo._normals`."""
    u = first.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10
    v = second.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10
    radius = tl.sqrt(-2.0 * tl.log(u))
    # The angle in turns: its quarter is exact, and two short polynomials do the rest.
    quarter = tl.floor(v * 4.0 + 0.5)
    rest = (v * 4.0 - quarter) * 1.5707963267948966
    square = rest * rest
    cosine = (((2.48015873015873e-05 * square - 0.001388888888888889) * square
               + 0.041666666666666664) * square - 0.5) * square + 1.0  # fmt: skip
    sine = (((2.7557319223985893e-06 * square - 0.0001984126984126984) * square
             + 0.008333333333333333) * square - 0.16666666666666666) * square + 1.0  # fmt: skip
    sine = sine * rest
    turned = quarter.to(tl.int32)
    swap = (turned & 1) == 1
    x = radius * tl.where(swap, sine, cosine)
    y = radius * tl.where(swap, cosine, sine)
    return _flipped(x, turned + 1), _flipped(y, turned)


@triton.jit
def _normals(seed, number, block, KIND: tl.constexpr):
    """Four normal numbers for each counter (number, of 64 bits; block; KIND)."""
    low = (number & 0xFFFFFFFF).to(tl.uint32)
    high = (number >> 32).to(tl.uint32)
    third = tl.full(number.shape, 0, tl.uint32) + block.to(tl.uint32)
    a, b, c, d = tl.philox(seed, low, high, third, tl.full(number.shape, KIND, tl.uint32))
    first, second = _pair(a, b)
    third, fourth = _pair(c, d)
    return first, second, third, fourth


@triton.jit
def _gain(settled, strike, there, CALL: tl.constexpr):
    gain = settled - strike if CALL else strike - settled
    return tl.where(there, tl.maximum(gain, 0.0), 0.0).to(tl.float64)


@triton.jit
def _paths_kernel(
    contracts, walked, partial, paths, run, steps, seed, KIND: tl.constexpr, CALL: tl.constexpr,
    SINGLE: tl.constexpr, STAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (p, contract): paths p * run to (p + 1) * run - 1.

    STAGE: "walk" writes prices to walked [contracts, steps, paths], "pay" reads them and puts sums
    of payoffs and of their squares in partial [contracts, programs, 2], "both" does all at once.
    SINGLE: there is one step, and four paths in a row share a counter.
    """
    contract, begin = tl.program_id(1).to(tl.int64), tl.program_id(0).to(tl.int64) * run
    terms = contracts + 6 * contract
    rate, volatility, maturity = tl.load(terms + 2), tl.load(terms + 3), tl.load(terms + 4)
    dt = maturity / steps
    drift = (rate - tl.load(terms + 5) - 0.5 * volatility * volatility) * dt
    drift, scale = drift.to(tl.float32), (volatility * tl.sqrt(dt)).to(tl.float32)
    spot, strike = tl.load(terms).to(tl.float32), tl.load(terms + 1).to(tl.float32)
    walked += contract * steps * paths
    total, squares = tl.zeros([BLOCK], tl.float64), tl.zeros([BLOCK], tl.float64)
    for start in range(begin, tl.minimum(begin + run, paths), 4 * BLOCK if SINGLE else BLOCK):
        if SINGLE:
            path = start + 4 * tl.arange(0, BLOCK).to(tl.int64)
            if STAGE != "pay":
                words = _normals(seed, path >> 2, tl.full((), 0, tl.int32), 1)
            for k in tl.static_range(4):
                there = path + k < paths
                if STAGE == "pay":
                    price = tl.load(walked + path + k, mask=there, other=0)
                else:
                    price = spot * tl.exp(drift + scale * words[k])
                if STAGE == "walk":
                    tl.store(walked + path + k, price, mask=there)
                else:
                    gain = _gain(price, strike, there, CALL)
                    total += gain
                    squares += gain * gain
        else:
            path = start + tl.arange(0, BLOCK).to(tl.int64)
            there = path < paths
            growth, summed = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
            for first in range(0, steps, 4):
                if STAGE != "pay":
                    words = _normals(seed, path, tl.full((), first >> 2, tl.int32), 0)
                for k in tl.static_range(4):
                    step = tl.full((), first, tl.int64) + k
                    at = walked + step * paths + path
                    if STAGE == "pay":
                        price = tl.load(at, mask=there & (step < steps), other=1)
                        growth = tl.where(step < steps, tl.log(price / spot), growth)
                    else:
                        more = drift + scale * words[k]
                        growth = tl.where(step < steps, growth + more, growth)
                    if STAGE == "walk":
                        tl.store(at, spot * tl.exp(growth), mask=there & (step < steps))
                    elif KIND == "asian":
                        summed += tl.where(step < steps, tl.exp(growth), 0.0)
                    elif KIND == "geometric_asian":
                        summed += tl.where(step < steps, growth, 0.0)
            if STAGE != "walk":
                if KIND == "asian":
                    settled = spot * (summed / steps)
                elif KIND == "geometric_asian":
                    settled = spot * tl.exp(summed / steps)
                else:
                    settled = spot * tl.exp(growth)
                gain = _gain(settled, strike, there, CALL)
                total += gain
                squares += gain * gain
    if STAGE != "walk":
        sums = partial + (contract * tl.num_programs(0) + tl.program_id(0)) * 2
        tl.store(sums, tl.sum(total, 0))
        tl.store(sums + 1, tl.sum(squares, 0))


def _launch(
    contracts: Tensor, walked: Tensor, paths: int, steps: int, kind: str, call: bool, seed: int,
    stage: str, block: int,
) -> Tensor:  # fmt: skip
    """The sums of payoffs and of their squares, [contracts, 2]."""
    each = 4 * block if steps == 1 else block
    run = triton.cdiv(triton.cdiv(paths, PROGRAMS), each) * each
    programs, count = triton.cdiv(paths, run), contracts.shape[0]
    partial = torch.empty(count, programs, 2, dtype=torch.float64, device=contracts.device)
    with _on(contracts):
        for first in range(0, count, 65535):  # the most programs a grid has in its second dimension
            part = contracts[first : first + 65535]
            _paths_kernel[(programs, part.shape[0])](
                part, walked[first:], partial[first:], paths, run, steps, seed, KIND=kind,
                CALL=call, SINGLE=steps == 1, STAGE=stage, BLOCK=block,
            )  # fmt: skip
    return reduce(partial, "sum") if stage != "walk" else partial


def market_paths(
    contracts: Tensor, paths: int, steps: int, seed: int, *, block: int = 256
) -> Tensor:
    count = contracts.shape[0]
    out = torch.empty(count, steps, paths, dtype=torch.float32, device=contracts.device)
    if count:
        _launch(contracts, out, paths, steps, "european", True, seed, "walk", block)
    return out


def option_price(
    contracts: Tensor, paths: int, steps: int, kind: str, call: bool, seed: int, *,
    fused: bool = True, block: int = 256,
) -> Tensor:  # fmt: skip
    """contracts: float64 [n, 6]: spot, strike, rate, volatility, maturity, dividend."""
    if not contracts.shape[0]:
        return torch.empty(0, 2, dtype=torch.float64, device=contracts.device)
    if fused:
        walked, stage = torch.empty(len(contracts), 0, device=contracts.device), "both"
    else:
        walked, stage = market_paths(contracts, paths, steps, seed, block=block), "pay"
    sums = _launch(contracts, walked, paths, steps, kind, call, seed, stage, block)
    return _finish(contracts, sums, paths)
