"""How a Fourier transform reads and writes its points, for `fft_gpu.py`: complex values, reals, or
half of a spectrum; each times a value of a table where there is one."""

import triton
import triton.language as tl

from billfish.kernels.general._fft_triton import multiply


@triton.jit
def _unpack(word):
    """(re, im) of complex64 values read as integers of 64 bits."""
    re = word.to(tl.int32).to(tl.float32, bitcast=True)
    return re, (word >> 32).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def look_up(table, i, WIDE: tl.constexpr):
    """Value i of a table of complex64 or, WIDE, complex128 values."""
    if WIDE:
        return tl.load(table + 2 * i), tl.load(table + 2 * i + 1)
    else:
        return _unpack(tl.load(table + i))


@triton.jit
def read(
    x, position, there, n, limit, before,
    KIND: tl.constexpr, WIDE: tl.constexpr, SWAP: tl.constexpr, BEFORE: tl.constexpr,
):  # fmt: skip
    """(re, im) of points below n of the input, of which limit are there; the others are 0.

    KIND: complex; real; or half, the first n / 2 + 1 of a spectrum whose others are their mirror.
    """
    inside = there & (position < n)
    place = position
    if KIND == "half":
        mirrored = position > n // 2
        place = tl.where(mirrored, n - position, position)
    inside &= place < limit
    if KIND == "real":
        re = tl.load(x + place, mask=inside, other=0.0).to(tl.float64 if WIDE else tl.float32)
        im = tl.zeros_like(re)
    elif WIDE:
        re = tl.load(x + 2 * place, mask=inside, other=0.0)
        im = tl.load(x + 2 * place + 1, mask=inside, other=0.0)
    else:
        re, im = _unpack(tl.load(x + place, mask=inside, other=0))
    if KIND == "half":
        im = tl.where(mirrored, -im, im)
    if SWAP:
        re, im = im, re
    if BEFORE:
        b_re, b_im = look_up(before, tl.where(inside, position, 0), WIDE)
        re, im = multiply(re, im, b_re, b_im)
    return re, im


@triton.jit
def write(
    out, position, there, re, im, n, after,
    SCALE: tl.constexpr, KIND: tl.constexpr, WIDE: tl.constexpr, SWAP: tl.constexpr,
    AFTER: tl.constexpr,
):  # fmt: skip
    """The first n points; KIND half: the first n / 2 + 1."""
    inside = there & (position < (n // 2 + 1 if KIND == "half" else n))
    if AFTER:
        a_re, a_im = look_up(after, tl.where(inside, position, 0), WIDE)
        re, im = multiply(re, im, a_re, a_im)
    if SWAP:
        re, im = im, re
    re, im = re * SCALE, im * SCALE
    if KIND == "real":
        tl.store(out + position, re, mask=inside)
    elif WIDE:
        tl.store(out + 2 * position, re, mask=inside)
        tl.store(out + 2 * position + 1, im, mask=inside)
    else:
        low = re.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
        high = im.to(tl.int32, bitcast=True).to(tl.int64) << 32
        tl.store(out + position, low | high, mask=inside)
