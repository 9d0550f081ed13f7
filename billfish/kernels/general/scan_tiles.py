"""The single-pass scan of long rows of 64-bit sums on a GPU, in Gluon; see `_triton.py`.

Memory is read and written 16 bytes a thread, neighbours by neighbouring threads; a scan is cheapest
where each thread has one run of neighbours. Left to itself, the compiler scans values as they were
read, with a scan across the warp for every 16 bytes, which are only two such values. Here values
change hands in shared memory, before and after, within a warp, and the warp scans once.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from billfish.kernels.general._triton import add, combine, larger, smaller


@gluon.constexpr_function
def _warps_apart(block, width, warps):
    """Each warp has a stretch of its own, and reads it `width` values a thread at a time."""

    def bits(begin, end):
        return [[1 << b] for b in range(begin.bit_length() - 1, end.bit_length() - 1)]

    return gl.DistributedLinearLayout(
        bits(1, width) + bits(32 * width, block // warps), bits(width, 32 * width),
        bits(block // warps, block), [], [block],
    )  # fmt: skip


@gluon.jit
def _fold(values, OP: gl.constexpr):
    if OP == "sum":
        return gl.reduce(values, 0, add)
    elif OP == "max":
        return gl.reduce(values, 0, larger)
    else:
        return gl.reduce(values, 0, smaller)


@gluon.jit
def _running(values, OP: gl.constexpr):
    if OP == "sum":
        return gl.associative_scan(values, 0, add)
    elif OP == "max":
        return gl.associative_scan(values, 0, larger)
    else:
        return gl.associative_scan(values, 0, smaller)


@gluon.jit
def _publish(state, tile, value, STATUS: gl.constexpr):
    """As `_triton.publish`, of 64 bits."""
    status = gl.to_tensor(STATUS).to(gl.int64) << 32
    bits = value.to(gl.int64, bitcast=True)
    gl.atomic_xchg(state + 2 * tile, status | (bits & 0xFFFFFFFF), sem="relaxed")
    gl.atomic_xchg(state + 2 * tile + 1, status | ((bits >> 32) & 0xFFFFFFFF), sem="relaxed")


@gluon.jit
def scan_kernel(
    x, out, state, ticket, n, tiles, x_row, EMPTY: gl.constexpr, DTYPE: gl.constexpr,
    OP: gl.constexpr, EXCLUSIVE: gl.constexpr, BACK: gl.constexpr, CONSTRAINTS: gl.constexpr,
    BLOCK: gl.constexpr, WIDTH: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Tile t is the (t % tiles)-th of row t // tiles. WIDTH: neighbours that a thread reads."""
    READ: gl.constexpr = _warps_apart(BLOCK, WIDTH, num_warps)
    RUN: gl.constexpr = gl.BlockedLayout([BLOCK // (32 * num_warps)], [32], [num_warps], [0])
    tile = gl.atomic_add(ticket, 1, sem="relaxed")
    row = (tile // tiles).to(gl.int64)
    nth = tile % tiles
    begin = nth.to(gl.int64) * BLOCK
    d = gl.arange(0, BLOCK, layout=READ)
    inside = d < n - begin
    value = gl.load(x + row * x_row + begin + d, mask=inside, other=0).to(DTYPE)
    value = gl.where(inside, value, gl.full([BLOCK], EMPTY, DTYPE, layout=READ))
    run = gl.convert_layout(value, RUN)
    # Before the tile is scanned: others wait for this.
    total = _fold(run, OP)
    if nth > 0:
        _publish(state, tile, total, 1)
    scanned = _running(run, OP)
    if nth > 0:
        bits = gl.inline_asm_elementwise(
            BACK, CONSTRAINTS, [state + (tile - 1) * 2, nth], dtype=gl.int64, is_pure=False, pack=1
        )
        prefix = bits.to(DTYPE, bitcast=True)
        _publish(state, tile, combine(prefix, total, OP), 2)
        scanned = combine(prefix, scanned, OP)
    else:
        _publish(state, tile, total, 2)
    result = gl.convert_layout(scanned.to(out.dtype.element_ty), READ)
    out += row * n + begin
    if EXCLUSIVE:
        # Each writes its neighbour's result: what comes before the next element is what ends here.
        gl.store(out + d + 1, result, mask=d + 1 < n - begin)
        if nth == 0:
            gl.store(out, gl.to_tensor(EMPTY).to(out.dtype.element_ty))
    else:
        gl.store(out + d, result, mask=inside)
