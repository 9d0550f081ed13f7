"""Small Fourier transforms in registers, and the exchange between two of them, for `fft_gpu.py`.

Complex values are pairs (re, im). A butterfly of radix R works on tuples of R tensors of one shape:
each thread holds all R values of its butterflies, so that a transform of R points moves nothing.
"""

# ruff: noqa: RUF005 (Triton knows no starred tuples)
# mypy: disable-error-code="assignment"

import math

import triton
import triton.language as tl


@triton.constexpr_function
def cosine(turn: int, of: int) -> float:
    """cos(2 pi turn / of), exact where it is 0, 1/2 or 1."""
    exact = {0: 1.0, of / 4: 0.0, of / 2: -1.0, 3 * of / 4: 0.0}
    return exact.get(turn % of, math.cos(2 * math.pi * (turn % of) / of))


@triton.constexpr_function
def sine(turn: int, of: int) -> float:
    exact = {0: 0.0, of / 4: 1.0, of / 2: 0.0, 3 * of / 4: -1.0}
    return exact.get(turn % of, math.sin(2 * math.pi * (turn % of) / of))


@triton.constexpr_function
def slots(radix: int) -> int:
    """The next power of two: tensors have no other sizes."""
    return 1 << (radix - 1).bit_length()


@triton.constexpr_function
def log2(power: int) -> int:
    return power.bit_length() - 1


@triton.jit
def multiply(a_re, a_im, b_re, b_im):
    return a_re * b_re - a_im * b_im, a_re * b_im + a_im * b_re


@triton.jit
def _dft2(re, im):
    return (re[0] + re[1], re[0] - re[1]), (im[0] + im[1], im[0] - im[1])


@triton.jit
def _dft4(re, im):
    even_re, even_im = _dft2((re[0], re[2]), (im[0], im[2]))
    odd_re, odd_im = _dft2((re[1], re[3]), (im[1], im[3]))
    # The second odd value times -i.
    return (
        (even_re[0] + odd_re[0], even_re[1] + odd_im[1],
         even_re[0] - odd_re[0], even_re[1] - odd_im[1]),
        (even_im[0] + odd_im[0], even_im[1] - odd_re[1],
         even_im[0] - odd_im[0], even_im[1] + odd_re[1]),
    )  # fmt: skip


@triton.jit
def _dft8(re, im):
    even_re, even_im = _dft4((re[0], re[2], re[4], re[6]), (im[0], im[2], im[4], im[6]))
    odd_re, odd_im = _dft4((re[1], re[3], re[5], re[7]), (im[1], im[3], im[5], im[7]))
    HALF: tl.constexpr = cosine(1, 8)
    one_re, one_im = (odd_re[1] + odd_im[1]) * HALF, (odd_im[1] - odd_re[1]) * HALF
    three_re, three_im = (odd_im[3] - odd_re[3]) * HALF, -(odd_re[3] + odd_im[3]) * HALF
    return (
        (even_re[0] + odd_re[0], even_re[1] + one_re,
         even_re[2] + odd_im[2], even_re[3] + three_re,
         even_re[0] - odd_re[0], even_re[1] - one_re,
         even_re[2] - odd_im[2], even_re[3] - three_re),
        (even_im[0] + odd_im[0], even_im[1] + one_im,
         even_im[2] - odd_re[2], even_im[3] + three_im,
         even_im[0] - odd_im[0], even_im[1] - one_im,
         even_im[2] + odd_re[2], even_im[3] - three_im),
    )  # fmt: skip


@triton.jit
def _dft_product(re, im, P: tl.constexpr, Q: tl.constexpr):
    """P of the Q that lie P apart, then Q of those P, turned by constants."""
    rows_re, rows_im = (), ()
    for p in tl.static_range(P):
        part_re, part_im = (), ()
        for q in tl.static_range(Q):
            part_re, part_im = part_re + (re[p + P * q],), part_im + (im[p + P * q],)
        part_re, part_im = dft(part_re, part_im, Q)
        for k in tl.static_range(Q):
            a, b = part_re[k], part_im[k]
            if p * k == 0:
                rows_re, rows_im = rows_re + (a,), rows_im + (b,)
            else:
                rows_re = rows_re + (a * cosine(p * k, P * Q) + b * sine(p * k, P * Q),)
                rows_im = rows_im + (b * cosine(p * k, P * Q) - a * sine(p * k, P * Q),)
    out_re, out_im = (), ()
    for k in tl.static_range(Q):
        part_re, part_im = (), ()
        for p in tl.static_range(P):
            part_re, part_im = part_re + (rows_re[p * Q + k],), part_im + (rows_im[p * Q + k],)
        part_re, part_im = dft(part_re, part_im, P)
        out_re, out_im = out_re + part_re, out_im + part_im
    # Value k + Q p is at P k + p.
    re, im = (), ()
    for p in tl.static_range(P):
        for k in tl.static_range(Q):
            re, im = re + (out_re[P * k + p],), im + (out_im[P * k + p],)
    return re, im


@triton.jit
def _dft_odd(re, im, R: tl.constexpr):
    """Sums and differences of values r and R - r: the sums meet cosines only, and so on."""
    HALF: tl.constexpr = R // 2
    sum_re, sum_im, diff_re, diff_im = (), (), (), ()
    first_re, first_im = re[0], im[0]
    for r in tl.static_range(1, HALF + 1):
        sum_re, sum_im = sum_re + (re[r] + re[R - r],), sum_im + (im[r] + im[R - r],)
        diff_re, diff_im = diff_re + (re[r] - re[R - r],), diff_im + (im[r] - im[R - r],)
        first_re += re[r] + re[R - r]
        first_im += im[r] + im[R - r]
    low_re, low_im, high_re, high_im = (first_re,), (first_im,), (), ()
    for k in tl.static_range(1, HALF + 1):
        a, b = re[0], im[0]
        c, d = re[0] * 0.0, im[0] * 0.0
        for r in tl.static_range(1, HALF + 1):
            a += sum_re[r - 1] * cosine(k * r, R)
            b += sum_im[r - 1] * cosine(k * r, R)
            c += diff_im[r - 1] * sine(k * r, R)
            d += diff_re[r - 1] * sine(k * r, R)
        low_re, low_im = low_re + (a + c,), low_im + (b - d,)
        high_re, high_im = (a - c,) + high_re, (b + d,) + high_im
    return low_re + high_re, low_im + high_im


@triton.jit
def dft(re, im, R: tl.constexpr):
    """Value k is the sum of values r times exp(-2 pi i k r / R)."""
    if R == 1:
        return re, im
    elif R == 2:
        return _dft2(re, im)
    elif R == 4:
        return _dft4(re, im)
    elif R == 8:
        return _dft8(re, im)
    elif R == 16:
        return _dft_product(re, im, 4, 4)
    elif R % 4 == 0:
        return _dft_product(re, im, 4, R // 4)
    elif R % 2 == 0:
        return _dft_product(re, im, 2, R // 2)
    elif R % 3 == 0 and R > 3:
        return _dft_product(re, im, 3, R // 3)
    elif R == 25:
        return _dft_product(re, im, 5, 5)
    else:
        return _dft_odd(re, im, R)


@triton.constexpr_function
def bits(radix: int) -> list[int]:
    """The shape of a digit's slots: a dimension a bit, so that tensors are joined in pairs."""
    return [2] * (radix - 1).bit_length()


@triton.jit
def _together(parts, R: tl.constexpr):
    """R tensors of one shape as one that has slots(R) values a dimension more each, bit by bit: a
    thread keeps what it has. Slots without a value hold another's."""
    if R == 1:
        return parts[0]
    else:
        HALF: tl.constexpr = slots(R) // 2
        even, odd = (), ()
        for r in tl.static_range(HALF):
            even = even + (parts[min(2 * r, R - 1)],)
            odd = odd + (parts[min(2 * r + 1, R - 1)],)
        return tl.join(_together(even, HALF), _together(odd, HALF))


@triton.jit
def _apart(whole, R: tl.constexpr):
    """The inverse of _together, without what fills its slots."""
    if R == 1:
        return (whole,)
    else:
        HALF: tl.constexpr = slots(R) // 2
        even, odd = tl.split(whole)
        a, b = _apart(even, HALF), _apart(odd, HALF)
        parts = ()
        for r in tl.static_range(R):
            parts = parts + (a[r // 2] if r % 2 == 0 else b[r // 2],)
        return parts


@triton.jit
def _moved(parts, S: tl.constexpr, DONE: tl.constexpr, R: tl.constexpr, NEXT: tl.constexpr):
    ROWS: tl.constexpr = parts[0].shape[0]
    SIDE: tl.constexpr = parts[0].shape[2]
    whole = _together(parts, R).reshape(ROWS, S // DONE // slots(R), DONE, SIDE, slots(R))
    whole = whole.permute(0, 1, 4, 2, 3).reshape(ROWS, slots(NEXT), S // slots(NEXT), SIDE)
    whole = whole.permute(0, 2, 3, 1)
    return _apart(whole.reshape([ROWS, S // slots(NEXT), SIDE] + bits(NEXT)), NEXT)


@triton.jit
def exchange(re, im, S: tl.constexpr, DONE: tl.constexpr, R: tl.constexpr, NEXT: tl.constexpr):
    """What butterflies of radix R gave, as what those of radix NEXT take (Stockham's order).

    Butterfly j = a DONE + b has value r of the transform's slot (a R + r) DONE + b, and the
    next take slots r S / NEXT + j.
    """
    return _moved(re, S, DONE, R, NEXT), _moved(im, S, DONE, R, NEXT)


@triton.jit
def digits(slot, RADICES: tl.constexpr, FIRST: tl.constexpr, UP: tl.constexpr, COUNT: tl.constexpr):
    """(the number that a slot's digits make, whether it is one). COUNT digits from FIRST, the
    fastest, on: up or down the radices."""
    number = slot * 0
    there = slot >= 0
    if COUNT > 0:
        R: tl.constexpr = RADICES[FIRST]
        digit = slot % slots(R)
        rest, valid = digits(slot // slots(R), RADICES, FIRST + (1 if UP else -1), UP, COUNT - 1)
        number = rest * R + digit
        there = valid & (digit < R)
    return number, there


@triton.jit
def slot_of(number, RADICES: tl.constexpr, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """The inverse of `digits` up the radices: the slot of a number."""
    if COUNT == 0:
        return number * 0
    else:
        R: tl.constexpr = RADICES[FIRST]
        return number % R + slots(R) * slot_of(number // R, RADICES, FIRST + 1, COUNT - 1)


@triton.jit
def _as_line(parts, R: tl.constexpr):
    """Tensors [rows, K, 1] as one of slots [rows, R, K], in one dimension: in more, Triton would
    change the arrangement of threads so that what is gathered is within a warp, at any cost."""
    ROWS: tl.constexpr = parts[0].shape[0]
    K: tl.constexpr = parts[0].shape[1]
    whole = _together(parts, R).reshape(ROWS, K, slots(R)).permute(0, 2, 1)
    return whole.reshape(ROWS * K * slots(R))


@triton.jit
def _from_line(line, ROWS: tl.constexpr, K: tl.constexpr, R: tl.constexpr):
    whole = line.reshape(ROWS, slots(R), K).permute(0, 2, 1)
    return _apart(whole.reshape([ROWS, K, 1] + bits(R)), R)


@triton.jit
def mirrored(re, im, k, zero, N: tl.constexpr, RADICES: tl.constexpr, COUNT: tl.constexpr):
    """Of a transform's points, as the last pass left them, point N - p, or 0, in place of p.

    k: [1, K, 1], the points of value 0. zero: of which the compiler does not know, so that places
    are in the same threads as the values that are put there: it follows values, not numbers.
    """
    R: tl.constexpr = RADICES[COUNT - 1]
    ROWS: tl.constexpr = re[0].shape[0]
    K: tl.constexpr = re[0].shape[1]
    BITS: tl.constexpr = tl.int64 if re[0].dtype.primitive_bitwidth == 64 else tl.int32
    k = k % (N // R)
    there = slot_of((N // R - k) % (N // R), RADICES, 0, COUNT - 1)
    there += tl.arange(0, ROWS)[:, None, None] * (K * slots(R))
    places = ()
    for r in tl.static_range(R):
        place = tl.where(k == 0, (R - r) % R * K, (R - 1 - r) * K) + there
        places = places + (place + (re[r].to(BITS, bitcast=True) & zero).to(tl.int32),)
    place = _as_line(places, R)
    m_re = tl.gather(_as_line(re, R), place, 0)
    m_im = tl.gather(_as_line(im, R), place, 0)
    return _from_line(m_re, ROWS, K, R), _from_line(m_im, ROWS, K, R)
