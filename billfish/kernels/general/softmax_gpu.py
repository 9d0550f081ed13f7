"""Softmax and its derivative on a GPU, in Triton; see `softmax.py`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from billfish.kernels.general.gpu import _on, _rows

_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}

_WORDS = {
    torch.float32: (-0x800000, None),
    torch.bfloat16: (-0x7F0080, "cvt.rn.bf16x2.f32 $0, $2, $1;"),
    torch.float16: (-0x3FF0400, "cvt.rn.f16x2.f32 $0, $2, $1;"),
}

RESIDENT = 16384
"""Values of a row that registers hold."""


@triton.jit
def _some(x, start, n, DEEP: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK values from start on as [DEEP, BLOCK / DEEP], minus infinity behind the n-th."""
    WIDTH: tl.constexpr = BLOCK // DEEP
    d = start + tl.arange(0, DEEP)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    return tl.load(x + d, mask=d < n, other=float("-inf"))


@triton.jit
def log_sum(x, n, ONLINE: tl.constexpr, BLOCK: tl.constexpr):
    """(the maximum of n values, the sum of exp(value - maximum)), in one read; without ONLINE in
    two, the first for the maximum.

    A thread keeps a maximum and a sum of its own, and rescales the sum once for several values: an
    exponential for each value and another to rescale would take longer than to read it.
    """
    DEEP: tl.constexpr = 4 if BLOCK >= 4096 else 1
    most = tl.full([BLOCK // DEEP], float("-inf"), tl.float32)
    if not ONLINE:
        for start in range(0, n, BLOCK):
            most = tl.maximum(most, tl.max(_some(x, start, n, DEEP, BLOCK).to(tl.float32), 0))
        most = tl.full([BLOCK // DEEP], 0.0, tl.float32) + tl.max(most, 0)
    total = tl.zeros([BLOCK // DEEP], tl.float32)
    coming = _some(x, 0, n, DEEP, BLOCK)
    for start in range(0, n, BLOCK):
        value = coming.to(tl.float32)
        # The next are on their way while these are added.
        coming = _some(x, start + BLOCK, n, DEEP, BLOCK)
        more = tl.maximum(most, tl.max(value, 0))
        # Of minus infinities only: there is nothing to add, nor to rescale.
        shift = tl.where(more > float("-inf"), more, 0.0)
        # A maximum passes NaN by, its exponential is in the sum.
        total = total * tl.exp(most - shift) + tl.sum(tl.exp(value - shift[None, :]), 0)
        most = more
    largest = tl.max(most, 0)
    shift = tl.where(largest > float("-inf"), largest, 0.0)
    return largest, tl.sum(total * tl.exp(most - shift), 0)


@triton.jit
def _softmax_kernel(x, out, n, x_stride, RESIDENT: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    x += row * x_stride
    out += row * n
    if RESIDENT:
        d = tl.arange(0, BLOCK)
        value = tl.load(x + d, mask=d < n, other=float("-inf")).to(tl.float32)
        power = tl.exp(value - tl.max(value, 0))
        tl.store(out + d, (power / tl.sum(power, 0)).to(out.dtype.element_ty), mask=d < n)
    else:
        most, total = log_sum(x, n, True, BLOCK)
        scale = 1.0 / total
        for start in range(0, n, BLOCK):
            d = start + tl.arange(0, BLOCK)
            value = tl.load(x + d, mask=d < n, other=0.0).to(tl.float32)
            result = tl.exp(value - most) * scale
            tl.store(out + d, result.to(out.dtype.element_ty), mask=d < n)


@triton.jit
def _wide(words, DTYPE: tl.constexpr):
    """The values of words in float32, those of 16 bits two a word; of others (the values, them)."""
    if tl.bfloat16 == DTYPE:
        first = (words << 16).to(tl.float32, bitcast=True)
        return first, (words & -65536).to(tl.float32, bitcast=True)
    elif tl.float16 == DTYPE:
        first = words.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        return first, (words >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        value = words.to(tl.float32, bitcast=True)
        return value, value


@triton.jit
def _power(value, shift, ASM: tl.constexpr):
    """e^value / 2^shift, 0 where that is no normal number."""
    exponent = tl.fma(value, 1.4426950408889634, -shift)
    if ASM:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [exponent], dtype=tl.float32, is_pure=True,
            pack=1,
        )  # fmt: skip
    else:
        return tl.exp2(exponent)


@triton.jit
def _packed(first, second, PACK: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """A word of two results of 16 bits."""
    if ASM:
        return tl.inline_asm_elementwise(
            PACK, "=r,f,f", [first, second], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        low = first.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32)
        return (low & 0xFFFF) | (second.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32) << 16)


@triton.jit
def _again(kept, CHUNKS: tl.constexpr, ASM: tl.constexpr):
    """The same words, of which the compiler does not know it: it would keep what they were turned
    into, twice as many registers, for the next time."""
    same = ()
    for c in tl.static_range(CHUNKS):
        word = kept[c]
        if ASM:
            word = tl.inline_asm_elementwise(
                "mov.b32 $0, $1;", "=r,r", [word], dtype=tl.int32, is_pure=False, pack=1
            )
        same = same + (word,)  # type: ignore[assignment]  # noqa: RUF005
    return same


@triton.jit
def _words(x, part, c, size, n, NOTHING: tl.constexpr, BLOCK: tl.constexpr):
    """The c-th BLOCK words of a part of a row, which begins at x."""
    mine = tl.minimum(n - part * size, size) * 4
    d = c * BLOCK + tl.arange(0, BLOCK)
    return tl.load(
        x + part * size * 4 + d, mask=d < mine, other=NOTHING, eviction_policy="evict_first"
    )


@triton.jit
def _part(x, part, size, n, NOTHING: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr):
    words = ()
    for c in tl.static_range(CHUNKS):
        more = _words(x, part, c, size, n, NOTHING, BLOCK)
        words = words + (more,)  # type: ignore[assignment]  # noqa: RUF005
    return words


@triton.jit
def _larger(largest, words, DTYPE: tl.constexpr):
    first, second = _wide(words, DTYPE)
    return tl.maximum(largest, tl.maximum(first, second))


@triton.jit
def _exponent(largest):
    """(The largest of all, as a power of 2; the same, but 0 for minus infinity: where there is
    nothing else, there is nothing to rescale.)"""
    most = tl.max(largest, 0) * 1.4426950408889634
    return most, tl.where(most > float("-inf"), most, 0.0)


@triton.jit
def _more(powers, words, shift, PACK: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr):
    first, second = _wide(words, DTYPE)
    powers += _power(first, shift, ASM)
    if PACK is not None:
        powers += _power(second, shift, ASM)
    return powers


@triton.jit
def _told(most, powers):
    """A part's maximum and sum in a word."""
    total = tl.sum(powers, 0)
    return (most.to(tl.int32, bitcast=True).to(tl.int64) << 32) | (
        total.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    )


@triton.jit
def _of_kept(
    words, PACK: tl.constexpr, DTYPE: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    for c in tl.static_range(CHUNKS):
        largest = _larger(largest, words[c], DTYPE)
    most, shift = _exponent(largest)
    words = _again(words, CHUNKS, ASM)
    powers = tl.zeros([BLOCK], tl.float32)
    for c in tl.static_range(CHUNKS):
        powers = _more(powers, words[c], shift, PACK, DTYPE, ASM)
    return _told(most, powers)


@triton.jit
def _of_missing(
    x, part, size, n, NOTHING: tl.constexpr, PACK: tl.constexpr, DTYPE: tl.constexpr,
    CHUNKS: tl.constexpr, BLOCK: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """As `_of_kept`, to the bit, in two reads: there are no registers for another part."""
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    for c in range(CHUNKS):
        largest = _larger(largest, _words(x, part, c, size, n, NOTHING, BLOCK), DTYPE)
    most, shift = _exponent(largest)
    powers = tl.zeros([BLOCK], tl.float32)
    for c in range(CHUNKS):
        words = _words(x, part, c, size, n, NOTHING, BLOCK)
        powers = _more(powers, words, shift, PACK, DTYPE, ASM)
    return _told(most, powers)


@triton.jit
def _missing(words):
    return tl.min(tl.where(words == 0, 0, 1), 0) == 0


@triton.jit
def _of_others(state, patience, PARTS: tl.constexpr):
    """What all parts have told; 0 of those that have not, when patience is at its end."""
    p = tl.arange(0, PARTS)
    others = tl.full([PARTS], 0, tl.int64)
    waiting = True
    while waiting:
        # Atomics, for what one thread reads is then handed to all.
        others = tl.atomic_add(state + p, tl.full([PARTS], 0, tl.int64), sem="relaxed")
        patience -= 1
        waiting = (patience > 0) & _missing(others)
    return others


@triton.jit
def _of_row(others):
    """(the exponent of the row's largest value, 0 if that is minus infinity; the row's sum)."""
    mosts = (others >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    totals = others.to(tl.int32).to(tl.float32, bitcast=True)
    most = tl.max(mosts, 0)
    shift = tl.where(most > float("-inf"), most, 0.0)
    return shift, tl.sum(totals * tl.exp2(mosts - shift), 0)


@triton.jit(do_not_specialize=["patience"])
def _shared_softmax_kernel(
    x, out, state, ticket, n, x_stride, out_stride, size, patience, PARTS: tl.constexpr,
    DTYPE: tl.constexpr, NOTHING: tl.constexpr, PACK: tl.constexpr, CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """A row of 4 n words is shared by PARTS programs, each of which keeps 4 size of them in
    registers; strides are counted in 4 words too. NOTHING: a word of minus infinity; PACK: the
    instruction that makes a word of two results, of values of 16 bits.

    state: int64 [rows, PARTS], 0: the maximum and the sum of each part, as soon as they are known.
    No such word is 0: where the maximum is 0, the sum is 1 at least.

    *It ends*, whatever else the GPU runs. Unlike tiles that look back (`_triton.py`), parts wait
    for parts behind them too, whose programs may not have begun: kernels on several streams could
    fill the GPU with programs that wait, and leave no room for those they wait for. So a program
    looks at the state `patience` times, far longer than parts under way take, and then computes
    what is missing itself: a function of x, which nobody changes. No program needs another one. (A
    cooperative launch promises that all programs run at once, but takes no more than fit.)
    """
    # In the order in which programs run, so that the parts of a row run at once as a rule.
    turn = tl.atomic_add(ticket, 1, sem="relaxed")
    row = (turn // PARTS).to(tl.int64)
    part = turn % PARTS
    x += row * x_stride * 4
    out += (row * out_stride + part * size) * 4
    state += row * PARTS
    kept = _part(x, part, size, n, NOTHING, CHUNKS, BLOCK)
    word = _of_kept(kept, PACK, DTYPE, CHUNKS, BLOCK, ASM)
    # Relaxed: the word is all that is told.
    tl.atomic_xchg(state + part, word, sem="relaxed")
    others = _of_others(state, patience, PARTS)
    if _missing(others):
        p = tl.arange(0, PARTS)
        for other in range(PARTS):
            if tl.max(tl.where(p == other, tl.where(others == 0, 1, 0), 0), 0) == 1:
                found = _of_missing(x, other, size, n, NOTHING, PACK, DTYPE, CHUNKS, BLOCK, ASM)
                tl.atomic_xchg(state + other, found, sem="relaxed")
                others = tl.where(p == other, found, others)
        # Read again, for registers that would hold two parts are a program less at a time.
        kept = _part(x, part, size, n, NOTHING, CHUNKS, BLOCK)
    shift, total = _of_row(others)
    kept = _again(kept, CHUNKS, ASM)
    if PACK is not None:
        # The sum divides in the exponent.
        shift += tl.log2(total)
    scale = 1.0 / total
    mine = tl.minimum(n - part * size, size) * 4
    d = tl.arange(0, BLOCK)
    for c in tl.static_range(CHUNKS):
        first, second = _wide(kept[c], DTYPE)
        if PACK is not None:
            result = _packed(
                _power(first, shift, ASM), _power(second, shift, ASM), PACK, DTYPE, ASM
            )
        else:
            result = (_power(first, shift, ASM) * scale).to(tl.int32, bitcast=True)
        tl.store(out + c * BLOCK + d, result, mask=c * BLOCK + d < mine)


@triton.jit
def _softmax_backward_kernel(
    dy, y, dx, n, dy_stride, y_stride, RESIDENT: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    dy += row * dy_stride
    y += row * y_stride
    dx += row * n
    if RESIDENT:
        d = tl.arange(0, BLOCK)
        grad = tl.load(dy + d, mask=d < n, other=0.0).to(tl.float32)
        value = tl.load(y + d, mask=d < n, other=0.0).to(tl.float32)
        result = value * (grad - tl.sum(grad * value, 0))
        tl.store(dx + d, result.to(dx.dtype.element_ty), mask=d < n)
    else:
        total = tl.zeros([BLOCK], tl.float32)
        for start in range(0, n, BLOCK):
            d = start + tl.arange(0, BLOCK)
            grad = tl.load(dy + d, mask=d < n, other=0.0).to(tl.float32)
            total += grad * tl.load(y + d, mask=d < n, other=0.0).to(tl.float32)
        dot = tl.sum(total, 0)
        for start in range(0, n, BLOCK):
            d = start + tl.arange(0, BLOCK)
            grad = tl.load(dy + d, mask=d < n, other=0.0).to(tl.float32)
            value = tl.load(y + d, mask=d < n, other=0.0).to(tl.float32)
            tl.store(dx + d, (value * (grad - dot)).to(dx.dtype.element_ty), mask=d < n)


def softmax(x: Tensor, *, resident: bool = True, block: int | None = None) -> Tensor:
    """x: [rows, n]."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        rows, n = _rows(x), x.shape[1]
        if resident and n > RESIDENT and shares(rows):
            _shared_softmax(rows, out)
            return out
        resident = resident and n <= RESIDENT
        # A long row takes all threads of a multiprocessor: so few are under way that the L2 cache
        # holds them until they are read again. Unaligned ones would not find enough registers.
        most = (65536 if n % 16 == 0 else 32768) // x.dtype.itemsize
        block = block or min(RESIDENT if resident else most, triton.next_power_of_2(n))
        with _on(x):
            _softmax_kernel[(rows.shape[0],)](
                rows, out, n, rows.stride(0), RESIDENT=resident, BLOCK=block,
                num_warps=_warps(block) if resident else sum_warps(block, x),
            )  # fmt: skip
    return out


_SHARE = {2: (16384, 512, 4), 4: (32768, 2048, 8)}
"""By the size of a value: bytes of a long row that a program keeps, words of it that it takes at a
time, and its warps: as many programs as a multiprocessor's registers hold."""

REGISTERS = 64
"""Of a thread that shares a row: none are spilled, and more programs run than without a limit."""


PATIENCE = 256
"""How often a program looks for the other parts of its row, a microsecond or so each time, before
it reads those that are missing itself."""


def shares(rows: Tensor) -> bool:
    """Whether programs share rows: all of a row should run at once, which so many do if each second
    multiprocessor runs one; and they read 16 bytes at a time."""
    if triton.knobs.runtime.interpret or not rows.is_cuda:
        return False
    apart = rows.stride(0) * rows.itemsize
    if apart % 16 or rows.data_ptr() % 16 or rows.shape[1] * rows.itemsize % 16:
        return False
    most = torch.cuda.get_device_properties(rows.device).multi_processor_count // 2
    parts = 2 ** (min(64, most).bit_length() - 1)
    return rows.shape[1] * rows.itemsize <= _SHARE[rows.itemsize][0] * parts


def _shared_softmax(rows: Tensor, out: Tensor, *, patience: int = PATIENCE) -> None:
    most, chunk, warps = _SHARE[rows.itemsize]
    x, y = rows.view(torch.int32), out.view(torch.int32)
    n = x.shape[1] // 4
    parts = triton.next_power_of_2(triton.cdiv(16 * n, most))
    size = triton.cdiv(n, parts)
    nothing, pack = _WORDS[rows.dtype]
    state = torch.zeros(rows.shape[0] * parts + 1, dtype=torch.int64, device=rows.device)
    compiled = not triton.knobs.runtime.interpret
    limit = {"maxnreg": REGISTERS} if compiled else {}
    with _on(rows):
        _shared_softmax_kernel[(rows.shape[0] * parts,)](
            x, y, state, state[-1:], n, x.stride(0) // 4, y.stride(0) // 4, size, patience,
            PARTS=parts, DTYPE=_TYPES[rows.dtype], NOTHING=nothing, PACK=pack,
            CHUNKS=triton.cdiv(4 * size, chunk), BLOCK=chunk,
            ASM=compiled, num_warps=warps, **limit,
        )  # fmt: skip


def softmax_backward(
    dy: Tensor, y: Tensor, *, resident: bool = True, block: int | None = None
) -> Tensor:
    """dy, y: [rows, n]."""
    out = torch.empty(y.shape, dtype=y.dtype, device=y.device)
    if y.numel():
        grads, rows, n = _rows(dy), _rows(y), y.shape[1]
        resident = resident and n <= RESIDENT
        block = block or (triton.next_power_of_2(n) if resident else 4096)
        with _on(y):
            _softmax_backward_kernel[(rows.shape[0],)](
                grads, rows, out, n, grads.stride(0), rows.stride(0), RESIDENT=resident,
                BLOCK=block, num_warps=_warps(block),
            )  # fmt: skip
    return out


def _warps(block: int) -> int:
    return min(16, max(1, block // 512))


def sum_warps(block: int, x: Tensor) -> int:
    """Warps for `log_sum`: each thread has 4 times 16 bytes of a block. With more, the 4 would be
    on several threads, which would wait for each other in every turn."""
    return max(1, block * x.dtype.itemsize // 2048)
