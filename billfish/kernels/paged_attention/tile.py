"""Device code that the decode and prefill kernels share: one tile of keys and values.

A tile of scores has query rows and key columns. Query rows are packed: row i of a request and KV
head is query token i // GROUP and query head i % GROUP of that KV head, so that the heads of a
group share every byte of K and V that is read.

Scores are kept in units of log2, so that the softmax needs exp2 only. A row that sees no key keeps
the maximum NO_SCORE; its masked scores are -inf, so their weights are exactly 0.
"""

import triton
import triton.language as tl

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
NO_SCORE: tl.constexpr = tl.constexpr(-1.0e30)


@triton.jit
def load_tokens(
    cache, block, token, present, block_stride, token_stride,
    D: tl.constexpr, DP: tl.constexpr, BLOCK_SIZE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Rows of K or V for tokens of any shape S: [*S, DP], zeros where not present and beyond D.

    cache points to the KV head. Block ids are widened first: a cache may exceed 2^31 elements.
    """
    slot = (token % BLOCK_SIZE).to(tl.int64)
    offset = block.to(tl.int64) * block_stride + slot * token_stride
    d = tl.arange(0, DP)
    rows = cache + (tl.expand_dims(offset, -1) + d)
    if not MASKED and D == DP:
        return tl.load(rows)
    if not MASKED:
        present = token >= 0
    present = tl.expand_dims(present, -1)
    if D != DP:
        present = present & (d < D)
    return tl.load(rows, mask=present, other=0.0)


@triton.jit
def to_log2(scores, scale, soft_cap, HAS_CAP: tl.constexpr):
    """Scale the products, cap them with soft_cap * tanh(s / soft_cap), convert to log2 units.

    tanh(x) = 1 - 2 / (1 + e^2x) is +-1 in the limits, with no quotient of infinities.
    """
    if HAS_CAP:
        e = tl.exp2(scores * (2.0 * LOG2E * scale / soft_cap))
        return (soft_cap * LOG2E) * (1.0 - 2.0 / (1.0 + e))
    else:
        return scores * (scale * LOG2E)


@triton.jit
def visible(token, position, window, HAS_WINDOW: tl.constexpr):
    """Which keys each row sees: key token <= query position, and less than `window` before it."""
    token = tl.expand_dims(token, -2)
    position = tl.expand_dims(position, -1)
    if HAS_WINDOW:
        return (token <= position) & (position - token < window)
    else:
        return token <= position


@triton.jit
def softmax_step(scores, top, total, acc):
    """One step of the online softmax; returns weights and the rescaled top, total, acc."""
    new_top = tl.maximum(top, tl.max(scores, -1))
    weights = tl.exp2(scores - tl.expand_dims(new_top, -1))
    decay = tl.exp2(top - new_top)
    total = total * decay + tl.sum(weights, -1)
    return weights, new_top, total, acc * tl.expand_dims(decay, -1)


@triton.jit
def query_rows(first_row, num_rows, ROWS: tl.constexpr, GROUP: tl.constexpr):
    """Packed rows first_row..: (query token, head within the group, whether the row exists)."""
    row = first_row + tl.arange(0, ROWS)
    return row // GROUP, row % GROUP, row < num_rows


@triton.jit
def load_query(
    query, token, head, exists, token_stride, head_stride, D: tl.constexpr, DP: tl.constexpr
):
    """[rows, DP] query rows, zeros for rows that do not exist and beyond D."""
    d = tl.arange(0, DP)
    mask = exists[:, None] & (d < D)[None, :]
    offset = token.to(tl.int64) * token_stride + head * head_stride
    return tl.load(query + offset[:, None] + d[None, :], mask=mask, other=0.0)


@triton.jit
def store_output(
    out, lse, token, head, exists, top, total, acc, sinks, num_heads,
    D: tl.constexpr, DP: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_LSE: tl.constexpr,
):  # fmt: skip
    """Normalize and store rows of out [T, num_heads, D], and the logarithms of their denominators.
    A sink joins the denominator once, here.

    Rows without a visible key have total 0 and become 0, their logarithm -inf.
    """
    if HAS_SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2E
        new_top = tl.maximum(top, sink)
        decay = tl.exp2(top - new_top)
        total = total * decay + tl.exp2(sink - new_top)
        acc = acc * decay[:, None]
        top = new_top
    if HAS_LSE:
        row_lse = (top + tl.log2(total)) / LOG2E
        tl.store(lse + token.to(tl.int64) * num_heads + head, row_lse, mask=exists)
    acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    d = tl.arange(0, DP)
    mask = exists[:, None] & (d < D)[None, :]
    offset = (token.to(tl.int64) * num_heads + head) * D
    tl.store(out + offset[:, None] + d[None, :], acc.to(out.dtype.element_ty), mask=mask)


@triton.jit
def zero_rows(
    out, lse, first, step, query_start, num_requests, num_tokens, head0, sinks, num_heads,
    GROUP: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    HAS_SINKS: tl.constexpr, HAS_LSE: tl.constexpr,
):  # fmt: skip
    """Output of tokens that belong to no request, tokens first, first + step, ...: as of queries
    that see no key.
    """
    g = tl.arange(0, GP)
    d = tl.arange(0, DP)
    mask = (g < GROUP)[:, None] & (d < D)[None, :]
    zeros = tl.zeros([GP, DP], out.dtype.element_ty)
    empty = tl.full([GP], float("-inf"), tl.float32)
    if HAS_SINKS:
        empty = tl.load(sinks + head0 + g, mask=g < GROUP, other=0.0).to(tl.float32)
    token = (tl.load(query_start + num_requests) + first).to(tl.int64)
    while token < num_tokens:
        row = out + (token * num_heads + head0) * D
        tl.store(row + g[:, None] * D + d[None, :], zeros, mask=mask)
        if HAS_LSE:
            tl.store(lse + token * num_heads + head0 + g, empty, mask=g < GROUP)
        token += step
