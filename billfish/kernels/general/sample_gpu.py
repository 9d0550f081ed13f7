"""Chooses tokens from logits on an NVIDIA GPU: no sort of a vocabulary, no word to the host.

One kernel reads each row once, in parts, and leaves the largest logit of every few neighbours;
another takes a row each and chooses.

What it computes is defined by `sample.py`, and by `billfish.worker.sampler` for the engine: the
largest logit where the temperature is 0, else the distribution function inverted at a number drawn
from (seed, position). Probabilities are in float64, as there.

Top-k and top-p keep the largest probabilities down to some logit, the lowest token ids first among
equals. Nearly always that logit lies among the largest thousand or two, and these are few to look
through: where k groups of neighbours have a largest logit of at least t, at least k tokens do, and
none of them is in another group. So t comes from the groups' largest, by bisection; the tokens from
t on are gathered, in their order, and all that follows looks at them alone, in registers. What
top-p needs of the others is their weight alone, which the first kernel has added up by parts; and
where nothing is cut, a part is chosen by these sums, and a token of the part.

Where that does not do, for too many tokens are kept or equal, the whole row is looked through.

Bisection goes over the bit patterns of floats, which order as integers: how many tokens, or how
much probability, lie above the middle says which half holds the border. Logits that come from a
bfloat16 product have 16 bits that matter, so 16 rounds find it exactly.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from billfish.kernels._library import launches_early
from billfish.kernels.general._sample_triton import (
    _choose,
    _choose_among,
    _choose_by_parts,
    _gather,
    _load,
    _lowest,
    _or,
    _ordered,
    _part_masses,
    _step,
    _threshold,
    _uniform,
    _weight,
)
from billfish.kernels.general.gpu import _on, _rows, launch_options
from billfish.kernels.general.sample import NO_TOKEN, by_sort

__all__ = ["NO_TOKEN", "draw_tokens", "sample"]

BLOCK = 4096

GROUPS = 8192
"""Groups of neighbours of which a row's largest logits are kept, at most."""

HITS = 2048
"""Groups that are looked into, at most."""

CANDIDATES = (512, 4096)
"""Tokens that are chosen from without another look at the row: few as a rule, at most so many."""


@triton.jit
def _limited(top_k, size):
    return (top_k > 0) & (top_k < size)


@triton.jit
def _largest_kernel(
    logits, best, where, bits, tops, sums, rows, numbers, integers, logits_stride, size,
    PARTS: tl.constexpr, GREEDY: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (i, p): of part p of row i, the largest logit, +inf if any is NaN; its lowest token
    id; and unless GREEDY, all bits of all logits, the largest of each GROUP of neighbours, and
    where it may be of use the weight over that of the part's likeliest."""
    i, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if PDL:
        gdc_launch_dependents()
    if not GREEDY:
        row = tl.load(rows + i).to(tl.int64)
        temperature = tl.load(numbers + 4 * row)
        min_p = tl.load(numbers + 4 * row + 2)
        top_k = tl.load(integers + 2 * row + 1)
    if PDL:
        gdc_wait()
    token, inside, value = _load(logits + i * logits_stride, part * BLOCK, size, BLOCK)
    value = tl.where(value != value, float("inf"), value)
    most = tl.max(value, 0)
    place = i * PARTS + part
    tl.store(best + place, most)
    tl.store(where + place, tl.min(tl.where(inside & (value == most), token, 2147483647), 0))
    if not GREEDY:
        kind: tl.constexpr = logits.dtype.element_ty
        if kind == tl.float32:
            pattern = tl.where(inside, value.to(tl.int32, bitcast=True), 0)
            tl.store(bits + place, tl.reduce(pattern, 0, _or))
        else:
            tl.store(bits + place, 0x10000 if kind == tl.bfloat16 else 0x2000)
        few: tl.constexpr = BLOCK // GROUP
        largest = tl.max(tl.reshape(value, [few, GROUP]), 1)
        tl.store(tops + place * few + tl.arange(0, few), largest)
        if (temperature > 0.0) & (min_p == 0.0) & (not _limited(top_k, size)):
            weight = tl.where(inside, _weight(value, most, temperature, 0.0), 0.0)
            tl.store(sums + place, tl.sum(weight, 0))


@triton.jit
def _sample_kernel(
    logits, best, where, bits, tops, sums, groups, tokens, values, weights, rows, positions,
    numbers, integers, token_table, out, logits_stride, weights_stride, table_stride, table_size,
    size, PARTS: tl.constexpr, SPACE: tl.constexpr, GREEDY: tl.constexpr, GROUP: tl.constexpr,
    GROUPS: tl.constexpr, GROUPS_SPACE: tl.constexpr, HITS: tl.constexpr, FEW: tl.constexpr,
    MOST: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """best, where, bits, sums [S, PARTS], tops [S, GROUPS]: of `_largest_kernel`. groups [S, HITS],
    tokens and values [S, MOST]: space. GREEDY: all temperatures are 0.

    numbers float64 [rows, 4]: temperature, top_p, min_p, -. integers int64 [rows, 2]: seed, top_k
    (0: all). The token goes to out and, at its position, to the table.
    """
    i = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + i).to(tl.int64)
    position = tl.load(positions + i).to(tl.int64)
    logits += i * logits_stride
    weights += i * weights_stride
    best += i * PARTS
    sums += i * PARTS
    temperature = tl.load(numbers + 4 * row)
    top_p = tl.load(numbers + 4 * row + 1)
    min_p = tl.load(numbers + 4 * row + 2)
    seed = tl.load(integers + 2 * row)
    top_k = tl.load(integers + 2 * row + 1)

    if PDL:
        gdc_wait()
    part = tl.arange(0, SPACE)
    value = tl.load(best + part, mask=part < PARTS, other=float("-inf"))
    place = tl.load(where + i * PARTS + part, mask=part < PARTS, other=2147483647)
    most = tl.max(value, 0)
    token = tl.min(tl.where(value == most, place, 2147483647), 0)
    finite = (most < float("inf")) & (most > float("-inf"))
    if not GREEDY and finite & (temperature > 0.0):
        pattern = tl.load(bits + i * PARTS + part, mask=part < PARTS, other=0)
        pattern = tl.reduce(pattern, 0, _or)
        number = _uniform(seed, position)
        limited = _limited(top_k, size)
        if (not limited) & (top_p >= 1.0) & (min_p == 0.0):
            token = _choose_by_parts(
                logits, size, best, sums, most, temperature, number, PARTS, SPACE, BLOCK
            )
        else:
            chosen, right = _choose_near(
                logits, size, best, sums, tops + i * GROUPS, groups + i * HITS, tokens + i * MOST,
                values + i * MOST, most, pattern, temperature, min_p, top_k, limited, top_p,
                number, PARTS, SPACE, GROUP, GROUPS, GROUPS_SPACE, HITS, FEW, MOST, BLOCK,
            )  # fmt: skip
            if right:
                token = chosen
            else:
                token = _choose(
                    logits, weights, size, most, pattern, temperature, min_p, top_k, top_p,
                    number, BLOCK,
                )  # fmt: skip
    tl.store(out + i, tl.where(finite, token, -1))
    # A table holds tokens only: where there is none, what is computed next means nothing.
    if position < table_size:
        tl.store(token_table + row * table_stride + position, tl.where(finite, token, 0))


@triton.jit
def _choose_near(
    logits, size, best, sums, tops, groups, tokens, values, most, bits, temperature, min_p, top_k,
    limited, top_p, number, PARTS: tl.constexpr, SPACE: tl.constexpr, GROUP: tl.constexpr,
    GROUPS: tl.constexpr, GROUPS_SPACE: tl.constexpr, HITS: tl.constexpr, FEW: tl.constexpr,
    MOST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """(the token, whether it is right), by looking at likely tokens only."""
    group = tl.arange(0, GROUPS_SPACE)
    top = tl.load(tops + group, mask=group < GROUPS, other=float("-inf"))
    top = _ordered(top)
    step = _step(bits)
    lowest = _lowest(most, temperature, min_p)
    by_count = limited & (top_k <= HITS)
    enough = tl.where(by_count, top_k, HITS - HITS // 4).to(tl.int32)
    limit = tl.where(by_count, tl.minimum(enough + enough // 4 + 8, HITS), HITS)
    low, hits = _threshold(top, most, lowest, enough, limit, step)
    whole = low == lowest
    rest = tl.full((), -1.0, tl.float64)
    if (not limited) & (min_p == 0.0):
        rest = tl.sum(_part_masses(best, sums, most, temperature, PARTS, SPACE), 0)
    chosen = tl.full((), -1, tl.int32)
    right = (hits <= HITS) & (whole | by_count | (rest >= 0.0))
    if right:
        hit = (top >= low).to(tl.int32)
        tl.store(groups + tl.cumsum(hit, 0) - 1, group, mask=hit > 0)
        tl.debug_barrier()  # what follows is read by other threads than wrote it
        count = _gather(logits, size, low, groups, hits, tokens, values, GROUP, MOST, BLOCK)
        tl.debug_barrier()
        if count <= FEW:
            chosen, right = _choose_among(
                tokens, values, count, whole, rest, low, step, most, temperature, min_p, top_k,
                limited, top_p, number, FEW,
            )  # fmt: skip
        elif count <= MOST:
            chosen, right = _choose_among(
                tokens, values, count, whole, rest, low, step, most, temperature, min_p, top_k,
                limited, top_p, number, MOST,
            )  # fmt: skip
        else:
            right = count <= MOST
    return chosen, right


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
    parts = triton.cdiv(size, BLOCK)
    group = 8
    while parts * BLOCK // group > GROUPS:
        group *= 2
    groups = parts * BLOCK // group
    few, most = CANDIDATES

    def space(width: int, dtype: torch.dtype, *, always: bool = False) -> Tensor:
        shape = (count, width) if always or not greedy else (0, 0)
        return torch.empty(shape, dtype=dtype, device=logits.device)

    best = space(parts, torch.float32, always=True)
    where = space(parts, torch.int32, always=True)
    bits, tops = space(parts, torch.int32), space(groups, torch.float32)
    sums, weights = space(parts, torch.float64), space(size, torch.float64)
    hits, tokens = space(HITS, torch.int32), space(most, torch.int32)
    values = space(most, torch.float32)
    pdl = overlap and launches_early(logits.device)
    _largest_kernel[(count, parts)](
        logits, best, where, bits, tops, sums, rows, numbers, integers, logits.stride(0), size,
        PARTS=parts, GREEDY=greedy, GROUP=group, BLOCK=BLOCK, PDL=pdl,
        num_warps=8, **launch_options(pdl),
    )  # fmt: skip
    _sample_kernel[(count,)](
        logits, best, where, bits, tops, sums, hits, tokens, values, weights, rows, positions,
        numbers, integers, token_table, out, logits.stride(0), size, token_table.stride(0),
        token_table.shape[1], size, PARTS=parts, SPACE=triton.next_power_of_2(parts),
        GREEDY=greedy, GROUP=group, GROUPS=groups, GROUPS_SPACE=triton.next_power_of_2(groups),
        HITS=HITS, FEW=few, MOST=most, BLOCK=BLOCK, PDL=pdl,
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
