"""What the kernels of `sample_gpu.py` do with a row of logits: all of it, or its few candidates."""

import triton
import triton.language as tl


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
def _weight(value, most, temperature, min_p):
    """Probabilities over that of the likeliest, 0 where min_p cuts them."""
    # Shifted before the division: a tiny temperature must not make inf - inf of it.
    weight = tl.exp((value.to(tl.float64) - most.to(tl.float64)) / temperature)
    return tl.where(weight < min_p, 0.0, weight)


@triton.jit
def _weigh(logits, weights, size, most, temperature, min_p, BLOCK: tl.constexpr):
    """Write the probability of each token over that of the likeliest, 0 where min_p cuts it; their
    sum."""
    total = tl.zeros([BLOCK], tl.float64)
    for start in range(0, size, BLOCK):
        token, inside, value = _load(logits, start, size, BLOCK)
        weight = _weight(value, most, temperature, min_p)
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
def _choose(
    logits, weights, size, most, bits, temperature, min_p, top_k, top_p, number,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The token, by looking through the whole row for each round. weights: float64 [size]."""
    total = _weigh(logits, weights, size, most, temperature, min_p, BLOCK)
    tl.debug_barrier()  # weights are read by other threads than wrote them
    step = _step(bits)
    border = tl.full((), -1, tl.int64)
    ties = tl.full((), 0, tl.int32)
    if (top_k > 0) & (top_k < size):
        border, count, mass = _border(logits, weights, size, most, step, top_k, 0.0, False, BLOCK)
        ties = (top_k - count).to(tl.int32)
        total = _kept_mass(logits, weights, size, border, ties, BLOCK)
    if top_p < 1.0:
        wanted = top_p * total
        by_mass, count, mass = _border(
            logits, weights, size, most, step, top_k, wanted, True, BLOCK
        )
        if by_mass >= border:
            each = _tie_weight(logits, weights, size, by_mass, BLOCK)
            more = _ties(each, wanted - mass)
            ties = tl.where(by_mass == border, tl.minimum(ties, more), more)
            border = by_mass
        total = _kept_mass(logits, weights, size, border, ties, BLOCK)
    return _draw(logits, weights, size, border, ties, number * total, BLOCK)


@triton.jit
def _step(bits):
    """What all patterns are multiples of, whose bits together are `bits`."""
    step = tl.where((bits & 0xFFFF) == 0, 65536, tl.where((bits & 0x1FFF) == 0, 8192, 1))
    return step.to(tl.int64)


@triton.jit
def _ties(each, room):
    """How many equals of weight `each` are kept: those before which there is room left."""
    many = tl.where(each > 0.0, room / tl.where(each > 0.0, each, 1.0), 1.0)
    return tl.minimum(tl.ceil(many), 1e9).to(tl.int32)


@triton.jit
def _first_past(token, weight, before, target):
    """The first token at which the running weight passes the target; the last that weighs anything
    where sums are rounded so that none does, -1 where none weighs. Weights in the tokens' order."""
    passed = (weight > 0.0) & (before + tl.cumsum(weight, 0) > target)
    found = tl.min(tl.where(passed, token, 2147483647), 0)
    last = tl.max(tl.where(weight > 0.0, token, -1), 0)
    return tl.where(found < 2147483647, found, last)


@triton.jit
def _choose_by_parts(
    logits, size, best, sums, most, temperature, number,
    PARTS: tl.constexpr, SPACE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The token where nothing is cut. sums: the weight of each part over that of its likeliest."""
    part = tl.arange(0, SPACE)
    mass = _part_masses(best, sums, most, temperature, PARTS, SPACE)
    target = number * tl.sum(mass, 0)
    chosen = _first_past(part, mass, 0.0, target)
    before = tl.sum(tl.where(part < chosen, mass, 0.0), 0)
    token, inside, value = _load(logits, chosen * BLOCK, size, BLOCK)
    weight = tl.where(inside, _weight(value, most, temperature, 0.0), 0.0)
    return _first_past(token, weight, before, target)


@triton.jit
def _part_masses(best, sums, most, temperature, PARTS: tl.constexpr, SPACE: tl.constexpr):
    """The weight of each part over that of the row's likeliest token."""
    part = tl.arange(0, SPACE)
    value = tl.load(best + part, mask=part < PARTS, other=float("-inf"))
    mass = tl.load(sums + part, mask=part < PARTS, other=0.0)
    return tl.where(value > float("-inf"), mass * _weight(value, most, temperature, 0.0), 0.0)


@triton.jit
def _lowest(most, temperature, min_p):
    """Patterns below this belong to tokens that weigh nothing."""
    # exp(-746) is 0; the rest is slack for what is rounded here and there.
    reach = tl.maximum(tl.log(min_p), -746.0) - 1e-9
    pattern = _ordered((most.to(tl.float64) + temperature * reach).to(tl.float32)) - 1
    return tl.maximum(pattern, 8388609)  # above minus infinity


@triton.jit
def _threshold(top, most, low, enough, limit, step):
    """(a pattern that the largest of at least `enough` groups reach, or `low`; how many do).

    top: patterns of the groups' largest. It does not have to be the highest such pattern: the
    search ends where no more than limit groups reach it.
    """
    hits = tl.sum((top >= low).to(tl.int32), 0)
    high = _ordered(most) + 1
    while (hits > limit) & (high - low > step):
        middle = (low + high) // 2
        more = tl.sum((top >= middle).to(tl.int32), 0)
        low = tl.where(more >= enough, middle, low)
        hits = tl.where(more >= enough, more, hits)
        high = tl.where(more >= enough, high, middle)
    return low, hits


@triton.jit
def _gather(
    logits, size, low, groups, hits, tokens, values,
    GROUP: tl.constexpr, MOST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the tokens of `hits` groups whose patterns are low or more, and their logits, in their
    order; how many they are, of which the first MOST are written."""
    count = tl.zeros((), tl.int32)
    for start in range(0, hits * GROUP, BLOCK):
        i = start + tl.arange(0, BLOCK)
        group = tl.load(groups + i // GROUP, mask=i // GROUP < hits, other=0)
        token = group * GROUP + i % GROUP
        inside = (i // GROUP < hits) & (token < size)
        value = tl.load(logits + token, mask=inside, other=float("-inf")).to(tl.float32)
        near = inside & (_ordered(value) >= low)
        place = count + tl.cumsum(near.to(tl.int32), 0) - 1
        tl.store(tokens + place, token, mask=near & (place < MOST))
        tl.store(values + place, value, mask=near & (place < MOST))
        count += tl.sum(near.to(tl.int32), 0)
    return count


@triton.jit
def _choose_among(
    tokens, values, count, whole, rest, low, step, most, temperature, min_p, top_k, limited, top_p,
    number, TILE: tl.constexpr,
):  # fmt: skip
    """(the token, whether it is right): of all tokens whose patterns are low or more.

    whole: the others weigh nothing. rest: the weight of all tokens, where neither `whole` nor top_k
    says that it is here; below 0 where it is not known.
    """
    slot = tl.arange(0, TILE)
    token = tl.load(tokens + slot, mask=slot < count, other=0)
    value = tl.load(values + slot, mask=slot < count, other=float("-inf"))
    weight = tl.where(slot < count, _weight(value, most, temperature, min_p), 0.0)
    # Those that are not there have patterns below all borders.
    pattern = tl.where(slot < count, _ordered(value), -2)
    bottom = low // step - 1
    border = tl.full((), -1, tl.int64)
    ties = tl.full((), 0, tl.int32)
    if limited:
        below, above = bottom, _ordered(most) // step
        fewer = tl.zeros((), tl.int32)
        while above - below > 1:
            middle = (above + below) // 2
            found = tl.sum((pattern > middle * step).to(tl.int32), 0)
            fits = found < top_k
            fewer = tl.where(fits, found, fewer)
            above = tl.where(fits, middle, above)
            below = tl.where(fits, below, middle)
        border = above * step
        ties = (top_k - fewer).to(tl.int32)
        weight = _kept(pattern, weight, border, ties)
    here = tl.sum(weight, 0)
    total = tl.where(limited | whole, here, rest)
    right = total >= 0.0
    if top_p < 1.0:
        wanted = top_p * total
        right = right & (here >= wanted)
        below, above = bottom, _ordered(most) // step
        mass = tl.zeros((), tl.float64)
        while above - below > 1:
            middle = (above + below) // 2
            heavier = tl.sum(tl.where(pattern > middle * step, weight, 0.0), 0)
            fits = heavier < wanted
            mass = tl.where(fits, heavier, mass)
            above = tl.where(fits, middle, above)
            below = tl.where(fits, below, middle)
        by_mass = above * step
        if by_mass >= border:
            each = tl.max(tl.where(pattern == by_mass, weight, 0.0), 0)
            more = _ties(each, wanted - mass)
            ties = tl.where(by_mass == border, tl.minimum(ties, more), more)
            border = by_mass
        weight = _kept(pattern, weight, border, ties)
    else:
        right = right & (limited | whole)
    chosen = _first_past(token, weight, 0.0, number * tl.sum(weight, 0))
    return chosen, right


@triton.jit
def _kept(pattern, weight, border, ties):
    """Weights of larger patterns than border, and of those equal to it the first `ties`; else 0."""
    equal = (pattern == border).to(tl.int32)
    rank = tl.cumsum(equal, 0) - equal
    return tl.where((pattern > border) | ((equal > 0) & (rank < ties)), weight, 0.0)
