"""How often each bin occurs: the example of contended atomics.

Counting straight into memory takes an atomic a value, and where many values fall into one bin (a
skewed input) they queue at one address. Here a program counts a run of values into bins of its own,
in shared memory, and adds those to the result once: the queue at a bin is as long as there are
programs, not values. (`_ptx.py`: Triton's own histogram does not count by address, it compares.)

More bins than a program can hold are cut into spans: programs that run at once read the same
values, and each counts those of its span, in 16 bits a bin.

The technique's switch: `histogram_gpu.histogram(..., private=False)` counts straight into memory,
which is also what is done with few values, or far too many bins.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from billfish.kernels._library import bad_argument, number, register
from billfish.kernels.general._arguments import FLOATS, check_numbers


def bins_of(x: Tensor, bins: int, low: float, scale: float) -> Tensor:
    """The bin of each value, as integers that lie outside of 0..bins - 1 where there is none."""
    if x.dtype not in FLOATS:
        return x.long()
    wide = x.float()
    at = (wide - low) * scale
    # In order but the very last bin, which holds its upper end too. NaN compares false.
    at = torch.where((at >= 0) & (at < bins), at, torch.where(at == bins, bins - 1, -1))
    return at.long()


def histogram_reference(
    x: Tensor, bins: int, low: float | None = None, high: float | None = None
) -> Tensor:
    """Value by value."""
    out = torch.zeros(bins, dtype=torch.int64)
    scale = 1.0 if low is None or high is None else bins / (high - low)
    for bin in bins_of(x.flatten(), bins, low or 0.0, scale).tolist():
        if 0 <= bin < bins:
            out[bin] += 1
    return out


def _cpu(x: Tensor, bins: int, low: float, scale: float) -> Tensor:
    place = bins_of(x, bins, low, scale)
    place = place[(place >= 0) & (place < bins)]
    return torch.bincount(place, minlength=bins)


def _fake(x: Tensor, bins: int, low: float, scale: float) -> Tensor:
    return x.new_empty((bins,), dtype=torch.int64)


_histogram: Callable[..., Tensor] = register(
    "histogram(Tensor x, int bins, float low, float scale) -> Tensor",
    fake=_fake,
    cpu=_cpu,
    gpu="billfish.kernels.general.histogram_gpu",
)


def histogram(x: Tensor, bins: int, low: float | None = None, high: float | None = None) -> Tensor:
    """int64 [bins]: how many values of x fall into each bin.

    Integers (8 to 64 bits) name their bin themselves, and low and high are not given. Floats take
    both: bin i holds low + i * w <= value < low + (i + 1) * w, where w = (high - low) / bins, the
    last bin high too; the bin is computed in float32, (value - low) * (bins / (high - low)). Values
    in no bin, NaN among them, are not counted. x: any shape (one that is not contiguous is copied).

    Deterministic.

    Raises KernelArgumentError: bins is not in 1..2^24, a range is missing, empty, infinite or given
    for integers, dtype or device is wrong, or x requires a gradient.
    """
    check_numbers("x", x)
    if not isinstance(bins, int) or isinstance(bins, bool) or not 1 <= bins <= 2**24:
        raise bad_argument("bins", bins, "1 to 2^24")
    if x.dtype not in FLOATS:
        if low is not None or high is not None:
            raise bad_argument("low and high", (low, high), "none for integers")
        return _histogram(x.reshape(-1), bins, 0.0, 1.0)
    low, high = (None if end is None else number("low and high", end) for end in (low, high))
    if low is None or high is None or not low < high or not math.isfinite(bins / (high - low)):
        raise bad_argument("low and high", (low, high), "finite numbers, low < high")
    if not math.isfinite(high - low):
        raise bad_argument("low and high", (low, high), "finite numbers")
    return _histogram(x.reshape(-1), bins, low, bins / (high - low))
