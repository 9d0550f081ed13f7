"""Chooses tokens from logits on an NVIDIA GPU: no sort, no word to the host.

One kernel finds the largest logits, in parts; another takes a row each and chooses.

What it computes is defined by `sample.py`, and by `billfish.worker.sampler` for the engine: the
largest logit where the temperature is 0, else the distribution function inverted at a number drawn
from (seed, position). Probabilities are in float64, as there.

Top-k and top-p keep the largest probabilities down to some logit, the lowest token ids first among
equals. That logit is found by bisection over the bit patterns of floats, which order as integers:
how many tokens, or how much probability, lie above the middle says which half holds it. Logits that
come from a bfloat16 product have 16 bits that matter, so 16 rounds find it exactly.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from billfish.kernels.general.gpu import _on, _rows, launch_options, overlaps
from billfish.kernels.general.sample import NO_TOKEN, by_sort

__all__ = ["NO_TOKEN", "draw_tokens", "sample"]

BLOCK = 4096


@triton.jit
def _load(logits, start, size, BLOCK: tl.constexpr):
    """(token ids, whether they are any, logits in float32; those that are none minus infinity)."""
    token = start + tl.arange(0, BLOCK)
    inside = token < size
    value = tl.load(logits + token, mask=inside, other=float("-inf")).to(tl.float32)
    return token, inside, value


@triton.jit
def _ordered(value):
    """Bit patterns of float32 as int64 in 0..2^32 - 1 that order as the numbers do; -0 is 0."""
    bits = value.to(tl.int32, bitcast=True).to(tl.int64)
    bits = tl.where(bits == -2147483648, 0, bits)
    return tl.where(bits < 0, -2147483648 - bits, bits) + 2147483648


@triton.jit
def _largest_kernel(
    logits, best, where, bits, logits_stride, size,
    PARTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (i, p): of part p of row i, the largest logit, +inf if any is NaN; its lowest token
    id; all bits of all patterns."""
    i, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token, inside, value = _load(logits + i * logits_stride, part * BLOCK, size, BLOCK)
    value = tl.where(value != value, float("inf"), value)
    most = tl.max(value, 0)
    place = i * PARTS + part
    tl.store(best + place, most)
    tl.store(where + place, tl.min(tl.where(inside & (value == most), token, 2147483647), 0))
    tl.store(bits + place, tl.reduce(tl.where(inside, _ordered(value), 0), 0, _or))


@triton.jit
def _largest(best, where, bits, PARTS: tl.constexpr, SPACE: tl.constexpr):
    """What `_largest_kernel` found, of the whole row."""
    part = tl.arange(0, SPACE)
    there = part < PARTS
    value = tl.load(best + part, mask=there, other=float("-inf"))
    token = tl.load(where + part, mask=there, other=2147483647)
    pattern = tl.load(bits + part, mask=there, other=0)
    most = tl.max(value, 0)
    return most, tl.min(tl.where(value == most, token, 2147483647), 0), tl.reduce(pattern, 0, _or)


@triton.jit
def _or(a, b):
    return a | b


@triton.jit
def _mix(z):
    """The finaliser of SplitMix64; see `billfish.worker.sampler.uniform`."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def _uniform(seed, position):
    golden = tl.full((), 0x9E3779B97F4A7C15, tl.uint64)
    state = _mix(seed.to(tl.uint64, bitcast=True) + golden)
    mixed = _mix(state + position.to(tl.uint64) * golden)
    return (mixed >> 11).to(tl.int64).to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def _weigh(logits, weights, size, most, temperature, min_p, BLOCK: tl.constexpr):
    """Write the probability of each token over that of the likeliest, 0 where min_p cuts it; their
    sum."""
    total = tl.zeros([BLOCK], tl.float64)
    for start in range(0, size, BLOCK):
        token, inside, value = _load(logits, start, size, BLOCK)
        # Shifted before the division: a tiny temperature must not make inf - inf of it.
        weight = tl.exp((value - most).to(tl.float64) / temperature)
        weight = tl.where(weight < min_p, 0.0, weight)
        tl.store(weights + token, weight, mask=inside)
        total += weight
    return tl.sum(total, 0)


@triton.jit
def _above(logits, weights, size, border, BLOCK: tl.constexpr):
    """(how many tokens have larger patterns than border, their weight)."""
    count = tl.zeros([BLOCK], tl.int32)
    mass = tl.zeros([BLOCK], tl.float64)
    for start in range(0, size, BLOCK):
        token, inside, value = _load(logits, start, size, BLOCK)
        above = inside & (_ordered(value) > border)
        count += above.to(tl.int32)
        mass += tl.load(weights + token, mask=above, other=0.0)
    return tl.sum(count, 0), tl.sum(mass, 0)


@triton.jit
def _border(
    logits, weights, size, most, step, top_k, wanted, BY_MASS: tl.constexpr, BLOCK: tl.constexpr
):
    """(the smallest border above which lie fewer than top_k tokens, or less than the mass wanted;
    the tokens and the mass above it). Borders are multiples of step, as all patterns are.
    """
    low = tl.full((), -1, tl.int64)  # in steps; too much is above it
    high = _ordered(most) // step  # nothing is above it
    count = tl.zeros((), tl.int32)
    mass = tl.zeros((), tl.float64)
    while high - low > 1:
        middle = (high + low) // 2
        more, heavier = _above(logits, weights, size, middle * step, BLOCK)
        fits = heavier < wanted if BY_MASS else more < top_k
        count = tl.where(fits, more, count)
        mass = tl.where(fits, heavier, mass)
        high = tl.where(fits, middle, high)
        low = tl.where(fits, low, middle)
    return high * step, count, mass


@triton.jit
def _draw(logits, weights, size, border, ties, target, BLOCK: tl.constexpr):
    """The first token at which the running weight of what is kept passes the target.

    Kept are tokens with larger patterns than border, and of those equal to it the first `ties`.
    """
    token_id = tl.full((), -1, tl.int32)
    last = tl.full((), -1, tl.int32)
    before = tl.zeros((), tl.float64)
    equal_before = tl.zeros((), tl.int32)
    for start in range(0, size, BLOCK):
        if token_id < 0:
            token, inside, value = _load(logits, start, size, BLOCK)
            pattern = _ordered(value)
            equal = (inside & (pattern == border)).to(tl.int32)
            rank = equal_before + tl.cumsum(equal, 0) - equal
            kept = (inside & (pattern > border)) | ((equal > 0) & (rank < ties))
            weight = tl.load(weights + token, mask=kept, other=0.0)
            running = before + tl.cumsum(weight, 0)
            passed = kept & (weight > 0.0) & (running > target)
            found = tl.min(tl.where(passed, token, 2147483647), 0)
            token_id = tl.where(found < 2147483647, found, token_id)
            last = tl.maximum(last, tl.max(tl.where(kept & (weight > 0.0), token, -1), 0))
            before += tl.sum(weight, 0)
            equal_before += tl.sum(equal, 0)
    # Sums are rounded: where the target is the whole of it, the last token that counts is it.
    return tl.where(token_id < 0, last, token_id)


@triton.jit
def _kept_mass(logits, weights, size, border, ties, BLOCK: tl.constexpr):
    mass = tl.zeros((), tl.float64)
    equal_before = tl.zeros((), tl.int32)
    for start in range(0, size, BLOCK):
        token, inside, value = _load(logits, start, size, BLOCK)
        pattern = _ordered(value)
        equal = (inside & (pattern == border)).to(tl.int32)
        rank = equal_before + tl.cumsum(equal, 0) - equal
        kept = (inside & (pattern > border)) | ((equal > 0) & (rank < ties))
        mass += tl.sum(tl.load(weights + token, mask=kept, other=0.0), 0)
        equal_before += tl.sum(equal, 0)
    return mass


@triton.jit
def _tie_weight(logits, weights, size, border, BLOCK: tl.constexpr):
    """The weight of a token whose pattern is border."""
    weight = tl.zeros([BLOCK], tl.float64)
    for start in range(0, size, BLOCK):
        token, inside, value = _load(logits, start, size, BLOCK)
        equal = inside & (_ordered(value) == border)
        weight = tl.maximum(weight, tl.load(weights + token, mask=equal, other=0.0))
    return tl.max(weight, 0)


@triton.jit
def _sample_kernel(
    logits, best, where, bits, rows, positions, numbers, integers, weights, token_table, out,
    logits_stride, weights_stride, table_stride, table_size, size,
    PARTS: tl.constexpr, SPACE: tl.constexpr, GREEDY: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """best, where, bits: [S, PARTS], of `_largest_kernel`. GREEDY: all temperatures are 0.

    numbers float64 [rows, 4]: temperature, top_p, min_p, -. integers int64 [rows, 2]: seed, top_k
    (0: all). The token goes to out and, at its position, to the table.
    """
    i = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + i).to(tl.int64)
    position = tl.load(positions + i).to(tl.int64)
    logits += i * logits_stride
    weights += i * weights_stride
    temperature = tl.load(numbers + 4 * row)
    top_p = tl.load(numbers + 4 * row + 1)
    min_p = tl.load(numbers + 4 * row + 2)
    seed = tl.load(integers + 2 * row)
    top_k = tl.load(integers + 2 * row + 1)

    if PDL:
        gdc_wait()
    most, token, bits = _largest(
        best + i * PARTS, where + i * PARTS, bits + i * PARTS, PARTS, SPACE
    )
    finite = (most < float("inf")) & (most > float("-inf"))
    if not GREEDY and finite & (temperature > 0.0):
        total = _weigh(logits, weights, size, most, temperature, min_p, BLOCK)
        tl.debug_barrier()  # weights are read by other threads than wrote them
        step = tl.where((bits & 0xFFFF) == 0, 65536, tl.where((bits & 0x1FFF) == 0, 8192, 1))
        step = step.to(tl.int64)
        border = tl.full((), -1, tl.int64)
        ties = tl.full((), 0, tl.int32)
        if (top_k > 0) & (top_k < size):
            border, count, mass = _border(
                logits, weights, size, most, step, top_k, 0.0, False, BLOCK
            )
            ties = (top_k - count).to(tl.int32)
            total = _kept_mass(logits, weights, size, border, ties, BLOCK)
        if top_p < 1.0:
            wanted = top_p * total
            by_mass, count, mass = _border(
                logits, weights, size, most, step, top_k, wanted, True, BLOCK
            )
            if by_mass >= border:
                each = _tie_weight(logits, weights, size, by_mass, BLOCK)
                # Those for which mass + (how many equals come before) * each < wanted.
                room = tl.where(each > 0.0, (wanted - mass) / tl.where(each > 0.0, each, 1.0), 1.0)
                more = tl.minimum(tl.ceil(room), 1e9).to(tl.int32)
                ties = tl.where(by_mass == border, tl.minimum(ties, more), more)
                border = by_mass
            total = _kept_mass(logits, weights, size, border, ties, BLOCK)
        target = _uniform(seed, position) * total
        token = _draw(logits, weights, size, border, ties, target, BLOCK)
    tl.store(out + i, tl.where(finite, token, -1))
    # A table holds tokens only: where there is none, what is computed next means nothing.
    if position < table_size:
        tl.store(token_table + row * table_stride + position, tl.where(finite, token, 0))


def sample(
    logits: Tensor,
    rows: Tensor,
    positions: Tensor,
    numbers: Tensor,
    integers: Tensor,
    token_table: Tensor,
    out: Tensor,
    *,
    greedy: bool,
    overlap: bool = True,
) -> None:
    """Token ids of S rows of logits [S, V] into out int32 [S], and into token_table at [row, p].

    rows, positions: int32 [S], the place of each in the tables, and where its token goes. numbers:
    float64 [R, 4], integers: int64 [R, 2]; see `_sample_kernel`. token_table: int32 [R, length];
    a position past its end is not written. greedy: all temperatures are 0, so no memory is taken
    for weights. NO_TOKEN where the logits are not numbers, or all minus infinity. overlap: the
    kernels may start while what ran before ends, which must have written nothing but the logits.
    """
    count, size = logits.shape
    device = logits.device
    shape = (0, 0) if greedy else (count, size)
    weights = torch.empty(shape, dtype=torch.float64, device=device)
    parts = triton.cdiv(size, BLOCK)
    best = torch.empty(count, parts, dtype=torch.float32, device=device)
    where = torch.empty(count, parts, dtype=torch.int32, device=device)
    bits = torch.empty(count, parts, dtype=torch.int64, device=device)
    pdl = overlap and overlaps(device)
    _largest_kernel[(count, parts)](
        logits, best, where, bits, logits.stride(0), size, PARTS=parts, BLOCK=BLOCK, PDL=pdl,
        num_warps=8, **launch_options(pdl),
    )  # fmt: skip
    _sample_kernel[(count,)](
        logits, best, where, bits, rows, positions, numbers, integers, weights, token_table, out,
        logits.stride(0), size, token_table.stride(0), token_table.shape[1], size,
        PARTS=parts, SPACE=triton.next_power_of_2(parts), GREEDY=greedy, BLOCK=BLOCK, PDL=pdl,
        num_warps=1 if greedy else 8, **launch_options(pdl),
    )  # fmt: skip


def draw_tokens(
    logits: Tensor, numbers: Tensor, integers: Tensor, positions: Tensor, greedy: bool,
    *, bisect: bool = True,
) -> Tensor:  # fmt: skip
    """Token ids int64 [N] of logits [N, V]; see `sample.py`.

    numbers: float64 [N, 4], temperature, top_p, min_p, -; integers: int64 [N, 2], seed, top_k;
    positions: int64 [N]. bisect: as above; else by a sort. greedy: all temperatures are 0.
    """
    if not bisect:
        return by_sort(logits, numbers, integers, positions)
    out = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    if logits.shape[0]:
        rows = torch.arange(logits.shape[0], dtype=torch.int32, device=logits.device)
        no_table = torch.empty(logits.shape[0], 0, dtype=torch.int32, device=logits.device)
        with _on(logits):
            sample(
                _rows(logits), rows, positions.contiguous(), numbers, integers, no_table, out,
                greedy=greedy, overlap=False,
            )  # fmt: skip
    return out
