"""Into which passes a Fourier transform of a size is cut, and its tables of roots of unity.

Roots are computed in float64 from angles reduced as integers, and rounded once.
"""

import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from billfish.kernels._library import kept_table

RADICES = (2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 15, 16, 25)
LIMIT = {torch.complex64: 16384, torch.complex128: 8192}
"""Slots of a row that a program's registers and shared memory hold, by dtype."""
COLUMNS = 8
"""Neighbouring columns of a split transform that a program takes: 64 bytes of each row."""


def slots(radix: int) -> int:
    """Tensors have sizes of powers of two, so a digit of radix 5 takes 8 slots."""
    return 1 << (radix - 1).bit_length()


def smooth(n: int) -> bool:
    """Whether n has no prime factor above 7."""
    for prime in (2, 3, 5, 7):
        while n % prime == 0:
            n //= prime
    return n == 1


@cache
def radices(n: int) -> tuple[int, ...]:
    """The passes of a transform of n points, the largest at both ends.

    What costs: slots, for those without a point are computed all the same; and passes, for each
    goes through shared memory.
    """
    best = math.inf
    found: tuple[int, ...] = (n,)
    for some in _products(n, len(RADICES) - 1):
        cost = math.prod(map(slots, some)) * (4 + len(some))
        if cost < best or (cost == best and max(some) < max(found)):
            best, found = cost, some
    if len(found) < 3:
        return found
    first, last, *rest = found
    return (first, *rest, last)


@cache
def _products(n: int, most: int) -> tuple[tuple[int, ...], ...]:
    """The ways to write n as a product of RADICES[: most + 1], each falling."""
    if n == 1:
        return ((),)
    return tuple(
        (RADICES[i], *rest)
        for i in range(most, -1, -1)
        if n % RADICES[i] == 0
        for rest in _products(n // RADICES[i], i)
    )


def size(n: int) -> int:
    """The slots of a transform of n points."""
    return math.prod(map(slots, radices(n)))


def fits(n: int, limit: int, columns: int = 1) -> bool:
    """Whether a program holds as many transforms of n points: in its registers and shared memory,
    of limit slots, and in threads, of which each has one butterfly of the widest pass."""
    passes = radices(n)
    total = math.prod(map(slots, passes)) * columns
    return total <= limit and total // max(map(slots, passes)) <= 1024


@cache
def split(n: int, limit: int) -> tuple[int, ...]:
    """n as a product of one, two or three sizes that one launch transforms each; empty: it is not.

    limit: slots that a program holds. One size has them alone, several share them among columns.
    """
    if not smooth(n):
        return ()
    if n == 1 or fits(n, limit):
        return (n,)
    sizes = [d for d in _divisors(n) if fits(d, limit, COLUMNS)]
    pairs = [(d, n // d) for d in sizes if n // d in sizes]
    if pairs:
        return min(pairs, key=lambda p: (size(p[0]) * size(p[1]), max(p), p))
    triples = [
        (a, b, n // (a * b))
        for a in sizes
        for b in sizes
        if n % (a * b) == 0 and n // (a * b) in sizes
    ]
    return min(triples, key=lambda t: (math.prod(map(size, t)), max(t), t), default=())


def _divisors(n: int) -> list[int]:
    low = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return sorted({*low, *(n // d for d in low)})[1:]


def convolution_size(n: int) -> int:
    """The points that Bluestein's convolution takes for n: a power of two of 2 n - 1 at least."""
    return 1 << (2 * n - 2).bit_length()


def roots(exponents: Tensor, of: int, dtype: torch.dtype) -> Tensor:
    """exp(-2 pi i e / of), on the CPU."""
    angle = (exponents % of).double() * (-2 * math.pi / of)
    return torch.polar(torch.ones_like(angle), angle).to(dtype)


@dataclass(frozen=True)
class Table:
    """roots: for each pass but the first, exp(-2 pi i p b / (done R)) for p = 1, 2, 4, .. below the
    radix R and each slot b of the passes done."""

    radices: tuple[int, ...]
    slots: int
    roots: Tensor


def _range(*shape: int) -> Tensor:
    return torch.arange(math.prod(shape), dtype=torch.int64, device="cpu")


def _roots(passes: tuple[int, ...], padded: bool, dtype: torch.dtype) -> Tensor:
    done, count, parts = _range(1), 1, []
    for i, radix in enumerate(passes):
        if i:
            powers = 2 ** _range((radix - 1).bit_length())
            parts.append(roots((powers[:, None] * done).flatten(), count * radix, dtype))
        digit = _range(slots(radix) if padded else radix)
        done = (done + count * digit[:, None]).flatten()
        count *= radix
    return torch.cat(parts) if parts else roots(_range(1), 1, dtype)


@cache
def table(n: int, dtype: torch.dtype, device: torch.device) -> Table:
    passes = radices(n) if n > 1 else (1,)
    values = kept_table(_roots(passes, True, dtype), device)
    return Table(passes, math.prod(map(slots, passes)), values)


@cache
def unpadded(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The roots of a table without slots that have no point."""
    return kept_table(_roots(radices(n) if n > 1 else (1,), False, dtype), device)


@cache
def unfolding(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """exp(-2 pi i e / n) for e below n / 2 over the last radix: the rest of n / 2 are these, turned
    by constants."""
    passes = radices(n // 2) if n > 2 else (1,)
    return kept_table(roots(_range(n // 2 // passes[-1]), n, dtype), device)


FINE = 1024


@cache
def turns(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """exp(-2 pi i e / n) for e below FINE, then for its multiples: the product of two is any."""
    coarse = _range(-(-n // FINE)) * FINE
    return kept_table(roots(torch.cat((_range(FINE), coarse)), n, dtype), device)


@cache
def chirp(n: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """(exp(-pi i j^2 / n), the transform of its inverse laid around 0), for Bluestein."""
    wide = torch.complex128
    values = roots(_range(n) ** 2, 2 * n, wide)
    m = convolution_size(n)
    around = torch.zeros(m, dtype=wide, device="cpu")
    around[:n] = values.conj()
    if n > 1:
        around[m - n + 1 :] = values[1:].conj().flip(0)
    spectrum = torch.fft.fft(around)
    return kept_table(values.to(dtype), device), kept_table(spectrum.to(dtype), device)
