"""Finite impulse response filters of signals: y[i] = sum of taps[k] x[i - k].

As many products a sample as taps, on two values each: what a naive kernel waits for is its reads.
Here a thread computes 8 neighbouring samples; 4 values that it reads at once serve all of them, and
the taps come as scalars.

From 512 taps on, transforms take less: overlap-save (Stockham, 1966) cuts the signal into blocks
that overlap by the taps, and multiplies spectra, by the operation `fft`.

The technique's switch: `fir_gpu.fir(..., reuse=False)`: a sample a thread, each value read for each
product.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from billfish.kernels._library import bad_argument, check_no_grad, register
from billfish.kernels.general._arguments import check_device, check_same_device, dimension
from billfish.kernels.general.fft import irfft, rfft

DIRECT = 512
"""Taps from which transforms are used."""
MOST = 1 << 20

_TYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def fir_reference(x: Tensor, taps: Tensor, state: Tensor | None = None) -> Tensor:
    """Along the last dimension, in x's dtype, tap by tap."""
    before = taps.shape[0] - 1
    past = x.new_zeros(*x.shape[:-1], before) if state is None else state
    whole = torch.cat((past, x), -1)
    out = torch.zeros_like(x)
    for k in range(taps.shape[0]):
        out += taps[k] * whole[..., before - k : before - k + x.shape[-1]]
    return out


def _cpu(x: Tensor, taps: Tensor, state: Tensor) -> Tensor:
    if not x.numel():
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    whole = torch.cat((state.to(taps.dtype), x.to(taps.dtype)), 1)
    out: Tensor = torch.nn.functional.conv1d(whole[:, None], taps.flip(0)[None, None])
    return out[:, 0].to(x.dtype).contiguous()


def _fake(x: Tensor, taps: Tensor, state: Tensor) -> Tensor:
    return x.new_empty(x.shape)


_fir: Callable[..., Tensor] = register(
    "fir(Tensor x, Tensor taps, Tensor state) -> Tensor",
    fake=_fake,
    cpu=_cpu,
    gpu="billfish.kernels.general.fir_gpu",
)


def _overlap_save(x: Tensor, taps: Tensor, state: Tensor) -> Tensor:
    """By transforms of at least four times the taps."""
    count = taps.shape[0]
    size = max(4096, 1 << (4 * count - 1).bit_length())
    step = size - count + 1
    blocks = -(-x.shape[1] // step)
    whole = torch.cat((state, x), 1).to(taps.dtype)
    whole = torch.nn.functional.pad(whole, (0, blocks * step + count - 1 - whole.shape[1]))
    spectrum = rfft(whole.unfold(1, size, step), size) * rfft(taps, size)
    out = irfft(spectrum, size)[..., count - 1 :]
    return out.reshape(x.shape[0], -1)[:, : x.shape[1]].to(x.dtype).contiguous()


def fir(
    x: Tensor, taps: Tensor, state: Tensor | None = None, dim: int = -1
) -> tuple[Tensor, Tensor]:
    """(x filtered along dim, the state after it): a stream is filtered piece by piece.

    x: float64, float32, bfloat16 or float16, any shape but a scalar, any strides (a dimension that
    is not the last is copied); taps: floats [m], m in 1..2^20, of the newest sample first; state:
    the m - 1 samples before x, the oldest first, in place of dim; zeros if not given. Returns x's
    shape and dtype, contiguous, computed in float32 (float64 of float64) and rounded once; and the
    last m - 1 samples that were seen, in x's dtype, to go on with. scipy.signal.lfilter(taps, 1, x)
    has the same result; its zi holds sums where this holds samples.

    512 taps and more are applied by overlap-save with `fft`: an error then is relative to the
    largest of a block, not to the sample's own, and a NaN or infinity spreads over its block.

    Deterministic.

    Raises KernelArgumentError: dtype, device, shape or dim is wrong, or an input requires a
    gradient.
    """
    for name, tensor in (("x", x), ("taps", taps), ("state", x if state is None else state)):
        if not isinstance(tensor, Tensor):
            raise bad_argument(name, type(tensor).__name__, "a tensor")
        if tensor.dtype not in _TYPES:
            raise bad_argument(name, tensor.dtype, "floats")
        check_device(name, tensor)
        check_no_grad(name, tensor)
        check_same_device(name, tensor, "x", x)
    dim = dimension(dim, x)
    if taps.dim() != 1 or not 1 <= taps.shape[0] <= MOST:
        raise bad_argument("taps", tuple(taps.shape), f"[m], m in 1..{MOST}")
    before = taps.shape[0] - 1
    shape = (*x.shape[:dim], before, *x.shape[dim + 1 :])
    past = x.new_zeros(shape) if state is None else state
    if past.shape != shape or past.dtype != x.dtype:
        raise bad_argument("state", f"{past.dtype} {tuple(past.shape)}", f"{x.dtype} {shape}")
    moved, past = x.movedim(dim, -1), past.movedim(dim, -1)
    rows = moved.reshape(moved.shape[:-1].numel(), moved.shape[-1]).contiguous()
    past = past.reshape(rows.shape[0], before).contiguous()
    weights = taps.to(torch.float64 if x.dtype == torch.float64 else torch.float32).contiguous()
    run = _overlap_save if taps.shape[0] >= DIRECT and rows.numel() else _fir
    out = run(rows, weights, past).view(moved.shape).movedim(-1, dim)
    after = torch.cat((past, rows[:, max(0, rows.shape[1] - before) :]), 1)
    after = after[:, after.shape[1] - before :].view(*moved.shape[:-1], before).movedim(-1, dim)
    return out.contiguous(), after.contiguous()
