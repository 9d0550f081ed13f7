"""Discrete Fourier transforms of rows, complex and real, of any length.

A transform of n points done radix by radix (Cooley and Tukey, 1965, in Stockham's order, which
needs no bit reversal; Govindaraju et al., 2008, for GPUs) is log n passes over the data. Here a
row stays in registers: a thread holds the points of some butterflies of radix 2 to 25, a whole
small transform that moves nothing, and between two passes the values change threads through shared
memory. One read, one write, one launch, up to 16384 points. More are split in two or three
(Bailey's four-step, 1990): transforms of columns, turned by roots of unity, then of rows,
whose result is written transposed.

The real transform of an even size is a complex one of half of it, of pairs, which is then unfolded:
point p and its mirror n / 2 - p make both points of the result. That is one more exchange, in which
threads give each other their mirrors (Sorensen et al., 1987).

A size whose prime factors are 2, 3, 5 and 7 is done by itself; another (and the few that no split
fits, as 3^16) as a convolution of at least twice its length (Bluestein, 1970).

The techniques' switches: `fft_gpu.fft(..., fused=False)`, a launch a pass, through memory;
`folded=False`, a real transform as a complex one of its size.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from billfish.kernels._library import bad_argument, check_no_grad, register
from billfish.kernels.general._arguments import check_device, dimension

MOST = 2**26
"""Points of a row."""

_REALS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_COMPLEX = (torch.complex64, torch.complex128)


@dataclass(frozen=True)
class Form:
    """inverse: exp(+2 pi i ...). half_in, half_out: that side is n / 2 + 1 values of a spectrum
    whose others are their mirror, and the other side is real."""

    inverse: bool
    half_in: bool = False
    half_out: bool = False

    def points(self, n: int) -> int:
        return n // 2 + 1 if self.half_out else n

    def result(self, dtype: torch.dtype) -> torch.dtype:
        return dtype.to_real() if self.half_in else dtype


FORMS = {
    "fft": Form(False), "ifft": Form(True), "rfft": Form(False, half_out=True),
    "irfft": Form(True, half_in=True),
}  # fmt: skip


def complex_type(dtype: torch.dtype) -> torch.dtype:
    """What a transform of values of dtype is computed in."""
    wide = dtype in (torch.float64, torch.complex128)
    return torch.complex128 if wide else torch.complex64


def fft_reference(x: Tensor, n: int, kind: str = "fft", scale: float = 1.0) -> Tensor:
    """Of the last dimension: the sum that defines it, in complex128."""
    form = FORMS[kind]
    given = n // 2 + 1 if form.half_in else n
    values = torch.zeros(*x.shape[:-1], n, dtype=torch.complex128)
    count = min(given, x.shape[-1])
    values[..., :count] = x[..., :count]
    if form.half_in:
        rest = torch.arange(given, n)
        values[..., given:] = values[..., n - rest].conj()
        alone = [0, n // 2] if n % 2 == 0 else [0]
        values[..., alone] = values[..., alone].real.to(values.dtype)
    i = torch.arange(n)
    sign = 1 if form.inverse else -1
    angle = (i[:, None] * i % n).double() * (sign * 2 * math.pi / n)
    out = scale * (values @ torch.polar(torch.ones_like(angle), angle))
    return out.real if form.half_in else out[..., : form.points(n)]


def _cpu(x: Tensor, n: int, kind: str, scale: float) -> Tensor:
    form = FORMS[kind]
    wide = x if x.is_complex() else x.to(complex_type(x.dtype).to_real())
    if not x.shape[0]:
        return wide.new_empty((0, form.points(n)), dtype=form.result(complex_type(x.dtype)))
    if not x.shape[1]:
        wide = wide.new_zeros((x.shape[0], 1))
    # Torch's own scales, then ours where it is another.
    out: Tensor = getattr(torch.fft, kind)(wide, n, norm="forward" if form.inverse else "backward")
    return out.contiguous() if scale == 1.0 else out * scale


def _fake(x: Tensor, n: int, kind: str, scale: float) -> Tensor:
    form = FORMS[kind]
    dtype = form.result(complex_type(x.dtype))
    return x.new_empty((x.shape[0], form.points(n)), dtype=dtype)


_fft: Callable[..., Tensor] = register(
    "fft(Tensor x, int n, str kind, float scale) -> Tensor",
    fake=_fake,
    cpu=_cpu,
    gpu="billfish.kernels.general.fft_gpu",
)


def fft(x: Tensor, n: int | None = None, dim: int = -1, norm: str = "backward") -> Tensor:
    """The discrete Fourier transform along dim: y[k] = sum of x[j] exp(-2 pi i j k / n).

    x: complex64, complex128, or real: float64, float32, bfloat16 or float16 (in float32 inside);
    any shape but a scalar, any strides (a dimension that is not the last is copied). n: points, x's
    own if not given; x is cut or filled with zeros to them. norm: "backward" (no factor), "ortho"
    (1 / sqrt(n)) or "forward" (1 / n), as in torch.fft. Returns complex64, or complex128 of 64-bit
    values, x's shape but n along dim, contiguous.

    Error against a transform in float64, as the norm of the difference over the norm of the result:
    below 1e-6 (float32) and 1e-14 (float64); of sizes with a prime factor above 7, 4e-6 and 1e-13.
    Roots of unity are computed in float64.

    Deterministic. The first call of a size makes its tables, which are kept: it cannot be captured
    in a CUDA graph.

    Raises KernelArgumentError: dtype, device, dim or norm is wrong, n is not in 1..2^26, x requires
    a gradient, or a first call is captured.
    """
    return _along(x, n, dim, norm, "fft")


def ifft(x: Tensor, n: int | None = None, dim: int = -1, norm: str = "backward") -> Tensor:
    """The inverse of fft: y[j] = 1/n sum of x[k] exp(2 pi i j k / n), "backward".

    norm: "backward" (1 / n), "ortho" or "forward" (no factor). All else as `fft`.
    """
    return _along(x, n, dim, norm, "ifft")


def rfft(x: Tensor, n: int | None = None, dim: int = -1, norm: str = "backward") -> Tensor:
    """fft of real x, without the half that mirrors the other: n / 2 + 1 values along dim.

    x: float64, float32, bfloat16 or float16. All else as `fft`.
    """
    return _along(x, n, dim, norm, "rfft")


def irfft(x: Tensor, n: int | None = None, dim: int = -1, norm: str = "backward") -> Tensor:
    """The inverse of rfft: real values of a spectrum's first n / 2 + 1.

    n: points of the result, 2 (x's - 1) if not given: an odd number has to be said. The imaginary
    parts of the first value, and for even n of the last, count as 0. Returns float32, or float64 of
    64-bit values. All else as `ifft`.
    """
    return _along(x, n, dim, norm, "irfft")


def _along(x: Tensor, n: int | None, dim: int, norm: str, kind: str) -> Tensor:
    real = kind == "rfft"
    if not isinstance(x, Tensor):
        raise bad_argument("x", type(x).__name__, "a tensor")
    if x.dtype not in _REALS + (() if real else _COMPLEX):
        raise bad_argument("x", x.dtype, "real floats" if real else "complex values or floats")
    check_device("x", x)
    check_no_grad("x", x)
    dim = dimension(dim, x)
    given = x.shape[dim]
    form = FORMS[kind]
    points = n if n is not None else 2 * (given - 1) if form.half_in else given
    if not isinstance(points, int) or isinstance(points, bool) or not 1 <= points <= MOST:
        raise bad_argument("n", points, f"1 to {MOST} points")
    powers = {"backward": 1.0 if form.inverse else 0.0, "ortho": 0.5,
              "forward": 0.0 if form.inverse else 1.0}  # fmt: skip
    if not isinstance(norm, str) or norm not in powers:
        raise bad_argument("norm", repr(norm), " or ".join(powers))
    moved = x.movedim(dim, -1)
    rows = moved.reshape(moved.shape[:-1].numel(), given)
    out = _fft(rows, points, kind, points ** -powers[norm])
    return out.view(*moved.shape[:-1], out.shape[1]).movedim(-1, dim).contiguous()
