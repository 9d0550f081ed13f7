"""Stream compaction on a GPU, in Gluon; see `compact.py`.

A thread reads 4 neighbours at once, and what is kept changes hands in shared memory, so that
neighbours go to memory side by side: an access of a warp is whole lines both ways. Left to itself
the compiler would exchange values once more, for it cannot know where they go.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def compact_kernel(
    x, keep, out, count, state, ticket, n, WIDE: gl.constexpr, PTX: gl.constexpr,
    CONSTRAINTS: gl.constexpr, ITEMS: gl.constexpr, BLOCK: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """x, out: integers of a value's bits. WIDE: of 64 bits. PTX: `_ptx_look_back.gather`."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([4], [32], [num_warps], [0])
    tile = gl.atomic_add(ticket, 1, sem="relaxed").to(gl.int32)
    begin = tile.to(gl.int64) * BLOCK
    left = (n - begin).to(gl.int32)
    d = gl.arange(0, BLOCK, layout=LAYOUT)
    x += begin
    keep += begin
    if left >= BLOCK:
        flag = gl.load(keep + d)
        value = gl.load(x + d)
    else:
        flag = gl.load(keep + d, mask=d < left, other=0)
        value = gl.load(x + d, mask=d < left, other=0)
    zero = gl.zeros_like(d)
    state += tile
    if WIDE:
        low, high, to = gl.inline_asm_elementwise(
            PTX, CONSTRAINTS,
            (flag, value.to(gl.int32), (value >> 32).to(gl.int32), zero + tile, zero + left,
             zero + state, zero + count),
            dtype=(gl.int32, gl.int32, gl.int32), is_pure=False, pack=ITEMS,
        )  # fmt: skip
        moved = (high.to(gl.int64) << 32) | (low.to(gl.int64) & 0xFFFFFFFF)
    else:
        moved, to = gl.inline_asm_elementwise(
            PTX, CONSTRAINTS,
            (flag, value.to(gl.int32), zero + tile, zero + left, zero + state, zero + count),
            dtype=(gl.int32, gl.int32), is_pure=False, pack=ITEMS,
        )  # fmt: skip
    gl.store(out + to, moved.to(out.dtype.element_ty), mask=to >= 0)
