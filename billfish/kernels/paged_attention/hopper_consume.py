"""What the two warpgroups of the Hopper prefill kernel do: 64 rows each over the tiles of an item.

Following FlashAttention-3 (Shah et al., 2024), a warpgroup starts the product Q K^T of the next
tile before it finishes P V of this one, so that its softmax runs under the tensor cores. Tiles go
from the diagonal backwards.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from billfish.kernels.gluon_compat import aggregate, barrier
from billfish.kernels.paged_attention.hopper_feed import (
    BEGIN_TILE,
    END_TILE,
    FIRST_TOKEN,
    HALF,
    HEAD_SET,
    KV_LEN,
    PART,
    PARTS,
    POSITION,
    SLOT,
    TILE,
    TOKENS,
    field,
    read_record,
)
from billfish.kernels.paged_attention.tile import LOG2E, NO_SCORE


@aggregate
class Scores:
    """What becomes of the products of a warpgroup's rows, and who sees what."""

    position: gl.tensor  # [HALF]
    scale: gl.tensor  # to log2 units
    soft_cap: gl.tensor
    window: gl.tensor
    S: gl.constexpr
    HAS_CAP: gl.constexpr
    HAS_WINDOW: gl.constexpr

    @gluon.jit
    def cap(self, s):
        """Products, or capped logits over `scale`, so that s * scale is in log2 units."""
        if self.HAS_CAP:
            e = gl.exp2(s * (2.0 * self.scale / self.soft_cap))
            return (1.0 - 2.0 / (1.0 + e)) * (self.soft_cap * LOG2E / self.scale)
        else:
            return s

    @gluon.jit
    def mask(self, s, tile):
        key = tile * TILE + gl.arange(0, TILE, layout=gl.SliceLayout(0, self.S))
        key = gl.expand_dims(key, 0)
        position = gl.expand_dims(self.position, 1)
        seen = key <= position
        if self.HAS_WINDOW:
            seen = seen & (position - key < self.window)
        return gl.where(seen, s, float("-inf"))


@gluon.jit
def _partial_sums(e):
    """Row sums that stay in each thread: [HALF, 4], added up at the end of an item."""
    return gl.sum(gl.sum(e.reshape([HALF, TILE // 8, 4, 2]), axis=3), axis=1)


@gluon.jit
def _step(
    q, o, p, top, total, decay, k_stage, k_phase, v_stage, v_phase, more, tile, k, v, scores,
    MASK: gl.constexpr, ACC: gl.constexpr, A: gl.constexpr,
):  # fmt: skip
    """Q K^T and softmax of this tile, under P V of the tile before."""
    zeros = gl.zeros([HALF, TILE], gl.float32, scores.S)
    s = warpgroup_mma(
        q, k.buffer.index(k_stage).permute([1, 0]), zeros, use_acc=False, is_async=True
    )
    v.wait_full(v_stage, v_phase)
    o = o * gl.expand_dims(gl.convert_layout(decay, gl.SliceLayout(1, ACC)), 1)
    o = warpgroup_mma(p, v.buffer.index(v_stage), o, is_async=True)
    s = warpgroup_mma_wait(1, deps=[s])
    k.release(k_stage)
    k_stage, k_phase = k.advance(k_stage, k_phase)
    s = scores.cap(s)
    if MASK:
        s = scores.mask(s, tile)
    new_top = gl.maximum(top, gl.max(s, axis=1) * scores.scale)
    decay = gl.exp2(top - new_top)
    e = gl.exp2(s * scores.scale - gl.expand_dims(new_top, 1))
    SUMS: gl.constexpr = total.type.layout
    total = total * gl.expand_dims(gl.convert_layout(decay, gl.SliceLayout(1, SUMS)), 1)
    total += _partial_sums(e)
    new_p = gl.convert_layout(e.to(p.dtype), A)
    # This wait, for the next step, ends the basic block: without it the assembler moves the wait
    # for P V above the softmax, and nothing overlaps.
    mbarrier.wait(k.full.index(k_stage), k_phase, pred=more)
    o, p, new_p = warpgroup_mma_wait(0, deps=[o, p, new_p])
    v.release(v_stage)
    v_stage, v_phase = v.advance(v_stage, v_phase)
    return o, new_p, new_top, total, decay, k_stage, k_phase, v_stage, v_phase


@gluon.jit
def _first_step(q, k_stage, k_phase, tile, k, scores, DTYPE: gl.constexpr, A: gl.constexpr):
    """Q K^T and softmax of the first tile, the one on the diagonal."""
    k.wait_full(k_stage, k_phase)
    zeros = gl.zeros([HALF, TILE], gl.float32, scores.S)
    s = warpgroup_mma(
        q, k.buffer.index(k_stage).permute([1, 0]), zeros, use_acc=False, is_async=True
    )
    s = warpgroup_mma_wait(0, deps=[s])
    k.release(k_stage)
    k_stage, k_phase = k.advance(k_stage, k_phase)
    s = scores.mask(scores.cap(s), tile)
    # Where a row sees none of these keys, nothing may be subtracted from -inf but a number.
    top = gl.maximum(gl.max(s, axis=1) * scores.scale, NO_SCORE)
    e = gl.exp2(s * scores.scale - gl.expand_dims(top, 1))
    return gl.convert_layout(e.to(DTYPE), A), top, _partial_sums(e), k_stage, k_phase


@gluon.jit
def _last_product(o, p, decay, v_stage, v_phase, v, ACC: gl.constexpr):
    o = o * gl.expand_dims(gl.convert_layout(decay, gl.SliceLayout(1, ACC)), 1)
    v.wait_full(v_stage, v_phase)
    o = warpgroup_mma(p, v.buffer.index(v_stage), o, is_async=True)
    o, p = warpgroup_mma_wait(0, deps=[o, p])
    v.release(v_stage)
    v_stage, v_phase = v.advance(v_stage, v_phase)
    return o, v_stage, v_phase


@gluon.jit
def _clear_tail(v, stage, phase, kept, D: gl.constexpr):
    """Zero the rows of a tile of V from `kept` on: slots past the sequence, whatever they hold.

    Both warpgroups do it, each for itself, before they use the tile.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    v.wait_full(stage, phase)
    tile = v.buffer.index(stage).load(LAYOUT)
    row = gl.arange(0, TILE, layout=gl.SliceLayout(1, LAYOUT))
    tile = gl.where(gl.expand_dims(row < kept, 1), tile, 0.0)
    v.buffer.index(stage).store(tile)
    fence_async_shared()
    barrier()


@gluon.jit
def _attend_tiles(
    q, record, turn, slots, k, v, scores, k_stage, k_phase, v_stage, v_phase,
    BLOCK_SIZE: gl.constexpr, ACC: gl.constexpr,
):  # fmt: skip
    """The rows q [HALF, D] over the tiles of an item: (sum of weights times V [HALF, D], top and
    sum of the weights [HALF], and where the rings are).
    """
    A: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=ACC, k_width=2)
    first = field(record, BEGIN_TILE)
    end = field(record, END_TILE)
    position = field(record, POSITION)
    kv_len = field(record, KV_LEN)
    p, top, total, k_stage, k_phase = _first_step(
        q, k_stage, k_phase, end - 1, k, scores, k.buffer.dtype, A
    )
    tma.store_wait(0)
    slots.release_other(turn)
    D: gl.constexpr = v.buffer.shape[2]
    o = gl.zeros([HALF, D], gl.float32, ACC)
    decay = gl.full([HALF], 1.0, gl.float32, top.type.layout)
    if (kv_len < end * TILE) & (kv_len % BLOCK_SIZE != 0):
        _clear_tail(v, v_stage, v_phase, kv_len - (end - 1) * TILE, D)
    mbarrier.wait(k.full.index(k_stage), k_phase, pred=end - first > 1)
    # Besides the first, one more tile may reach beyond the first row; a window masks all.
    masked = ((end - first > 1) & ((end - 1) * TILE - 1 > position)).to(gl.int32)
    if scores.HAS_WINDOW:
        masked = end - first - 1
    for i in range(masked):
        o, p, top, total, decay, k_stage, k_phase, v_stage, v_phase = _step(
            q, o, p, top, total, decay, k_stage, k_phase, v_stage, v_phase,
            i + 2 < end - first, end - 2 - i, k, v, scores, True, ACC, A,
        )  # fmt: skip
    if not scores.HAS_WINDOW:
        for i in range(masked + 1, end - first):
            o, p, top, total, decay, k_stage, k_phase, v_stage, v_phase = _step(
                q, o, p, top, total, decay, k_stage, k_phase, v_stage, v_phase,
                i + 1 < end - first, 0, k, v, scores, False, ACC, A,
            )  # fmt: skip
    o, v_stage, v_phase = _last_product(o, p, decay, v_stage, v_phase, v, ACC)
    ROW: gl.constexpr = gl.SliceLayout(1, ACC)
    top = gl.convert_layout(top, ROW)
    total = gl.convert_layout(gl.sum(total, axis=1), ROW)
    return o, top, total, k_stage, k_phase, v_stage, v_phase


@gluon.jit
def _pass_tiles(tiles, k, v, k_stage, k_phase, v_stage, v_phase):
    """Give back the tiles of an item unused, each when it has come."""
    for _ in range(tiles):
        k.wait_full(k_stage, k_phase)
        k.release(k_stage)
        k_stage, k_phase = k.advance(k_stage, k_phase)
        v.wait_full(v_stage, v_phase)
        v.release(v_stage)
        v_stage, v_phase = v.advance(v_stage, v_phase)
    return k_stage, k_phase, v_stage, v_phase


@gluon.jit
def consume(
    c: gl.constexpr, batch, records, k, v, slots, output, scale, soft_cap,
    S: gl.constexpr, ACC: gl.constexpr, HAS_CAP: gl.constexpr,
):  # fmt: skip
    """Warpgroup c attends rows c * HALF .. of every item."""
    ROW: gl.constexpr = gl.SliceLayout(1, S)
    SHARE: gl.constexpr = HALF // batch.PACK  # tokens
    row = c * HALF + gl.arange(0, HALF, layout=ROW)
    k_stage = 0
    k_phase = 0
    v_stage = 0
    v_phase = 0
    turn = 0
    record_phase = 0
    record = read_record(records, record_phase, 4)
    while field(record, TOKENS) > 0:
        tokens = field(record, TOKENS) - c * SHARE
        slots.wait_full(turn)
        if tokens > 0:
            scores = Scores(
                field(record, POSITION) + row // batch.PACK, scale, soft_cap, batch.window,
                S, HAS_CAP, batch.HAS_WINDOW,
            )  # fmt: skip
            q = slots.half(turn, c)
            o, top, total, k_stage, k_phase, v_stage, v_phase = _attend_tiles(
                q, record, turn, slots, k, v, scores, k_stage, k_phase, v_stage, v_phase,
                batch.BLOCK_SIZE, ACC,
            )  # fmt: skip
            first_token = field(record, FIRST_TOKEN)
            head0 = field(record, HEAD_SET) * batch.PACK
            parts = field(record, PARTS)
            if parts == 1:
                token = first_token + c * SHARE
                o = output.normalize(o, top, total, token, tokens, head0)
                output.store(o, q, token, tokens, head0)
            else:
                output.partials.leave(
                    c, o, top, total, field(record, SLOT), first_token, tokens, head0, parts,
                    field(record, PART),
                )  # fmt: skip
        else:
            tma.store_wait(0)
            slots.release_other(turn)
            tiles = field(record, END_TILE) - field(record, BEGIN_TILE)
            k_stage, k_phase, v_stage, v_phase = _pass_tiles(
                tiles, k, v, k_stage, k_phase, v_stage, v_phase
            )
        turn += 1
        record_phase = record_phase ^ 1
        record = read_record(records, record_phase, 4)
    tma.store_wait(0)
