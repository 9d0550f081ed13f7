"""Prefill for Hopper (sm_90a) in Gluon: the work of `prefill`, warp-specialized.

Programs stay on their multiprocessor. A scheduler warp draws items (128 packed query rows of a
request and set of heads) from a counter, the longest of a request first, and hands them to the
others through shared memory. Two producer warps fetch K and V, a TMA box a block, into a
circular queue each; two warpgroups attend 64 rows each with wgmma. Following FlashAttention-3
(Shah et al., 2024), a warpgroup starts the product Q K^T of the next tile before it finishes P V of
this one, so that its softmax runs under the tensor cores. Tiles go from the diagonal backwards.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from billfish.kernels.gluon_compat import aggregate, barrier
from billfish.kernels.paged_attention.planner import Scoring
from billfish.kernels.paged_attention.tile import LOG2E, NO_SCORE

ROWS = gl.constexpr(128)  # packed query rows of an item
HALF = gl.constexpr(64)  # of them, those of one warpgroup
TILE = gl.constexpr(128)  # keys
FIELDS = gl.constexpr(32)  # of an item's record; 8 are used
K_STAGES, V_STAGES = 3, 2
READERS = gl.constexpr(4)  # partitions that read a record
CONSUMER_REGISTERS, OTHER_REGISTERS = 232, 40


@aggregate
class Ring:
    """A circular queue in shared memory."""

    buffer: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    STAGES: gl.constexpr

    @gluon.jit
    def advance(self, stage, phase):
        stage += 1
        wrapped = stage == self.STAGES
        return gl.where(wrapped, 0, stage), gl.where(wrapped, phase ^ 1, phase)

    @gluon.jit
    def wait_full(self, stage, phase):
        mbarrier.wait(self.full.index(stage), phase)

    @gluon.jit
    def release(self, stage):
        mbarrier.arrive(self.empty.index(stage))


@gluon.jit
def _ring(DTYPE: gl.constexpr, SHAPE: gl.constexpr, LAYOUT: gl.constexpr, READERS: gl.constexpr):
    STAGES: gl.constexpr = SHAPE[0]
    ring = Ring(
        gl.allocate_shared_memory(DTYPE, SHAPE, LAYOUT),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout()),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout()),
        STAGES,
    )
    for i in gl.static_range(STAGES):
        mbarrier.init(ring.full.index(i), count=1)
        mbarrier.init(ring.empty.index(i), count=READERS)
    return ring


@aggregate
class Batch:
    """The step's requests, and what a query sees."""

    block_table: gl.tensor
    seq_lens: gl.tensor
    query_start: gl.tensor
    draws: gl.tensor
    num_requests: gl.tensor
    num_tokens: gl.tensor
    decoded_len: gl.tensor
    window: gl.tensor
    table_stride: gl.tensor
    items: gl.tensor
    SETS: gl.constexpr  # head sets: KV heads, or query heads where a group is not packed
    PACK: gl.constexpr  # query heads packed as rows of an item
    GROUP: gl.constexpr
    BLOCK_SIZE: gl.constexpr
    HAS_WINDOW: gl.constexpr

    @gluon.jit
    def find(self, index):
        """The request of an index along the batch, see `prefill._find_request`: (request, how far
        the index lies in it, first new token, last + 1, KV length), in one trip to memory.
        """
        CHUNK: gl.constexpr = 128
        lane = gl.arange(0, CHUNK, layout=gl.BlockedLayout([4], [32], [1], [0]))
        owner = index * 0 - 1
        begin = index * 0
        start = index * 0
        end = index * 0
        kv_len = index * 0
        for first in range(0, self.num_requests + 1, CHUNK):
            r = first + lane
            real = r < self.num_requests
            starts = gl.load(self.query_start + r, mask=r <= self.num_requests, other=0)
            ends = gl.load(self.query_start + r + 1, mask=real, other=self.num_tokens)
            lens = gl.load(self.seq_lens + r, mask=real, other=0)
            begins = starts * self.PACK // ROWS + r
            before = (begins <= index) & (r <= self.num_requests)
            count = gl.sum(before.to(gl.int32), 0)
            owner += count
            # All but the KV lengths grow with r.
            begin = gl.maximum(begin, gl.max(gl.where(before, begins, 0), 0))
            start = gl.maximum(start, gl.max(gl.where(before, starts, 0), 0))
            end = gl.maximum(end, gl.max(gl.where(before, ends, 0), 0))
            its = gl.sum(gl.where(lane == count - 1, lens, 0), 0)
            kv_len = gl.where(count > 0, its, kv_len)
        return owner, index - begin, start, end, kv_len

    @gluon.jit
    def record(self, item):
        """The fields of an item as a vector; field 1, its number of tokens, is 0 if it is empty.

        The last rows of a request see most keys: they go first.
        """
        TOKENS: gl.constexpr = ROWS // self.PACK
        r, place, start, end, kv_len = self.find(item // self.SETS)
        row_block = (end - start + TOKENS - 1) // TOKENS - 1 - place
        short = (r < self.num_requests) & (end - start <= self.decoded_len)
        tokens = gl.minimum(end - start - row_block * TOKENS, TOKENS)
        tokens = gl.where((row_block < 0) | short, 0, tokens)
        position = kv_len - (end - start) + row_block * TOKENS
        first_tile = position * 0
        if self.HAS_WINDOW:
            first_tile = gl.maximum(position + 1 - self.window, 0) // TILE
        end_tile = gl.maximum((position + tokens + TILE - 1) // TILE, first_tile + 1)
        row = gl.minimum(r, self.num_requests - 1)
        first_token = start + row_block * TOKENS
        fields = (first_token, tokens, item % self.SETS, first_tile, end_tile, position, row)
        lane = gl.arange(0, FIELDS, layout=gl.BlockedLayout([1], [32], [1], [0]))
        record = gl.where(lane == 7, kv_len, 0)
        for i in gl.static_range(7):
            record = gl.where(lane == i, fields[i], record)
        return record, tokens


@gluon.jit
def _schedule(batch, records):
    """Draw items and pass on their records; an empty record ends."""
    stage = 0
    phase = 1
    item = gl.program_id(0)
    while item < batch.items:
        record, tokens = batch.record(item)
        if tokens > 0:
            mbarrier.wait(records.empty.index(stage), phase)
            records.buffer.index(stage).store(record)
            mbarrier.arrive(records.full.index(stage))
            stage, phase = records.advance(stage, phase)
        drawn = gl.atomic_add(batch.draws, 1, sem="relaxed")
        item = gl.num_programs(0) + drawn
        if drawn == batch.items - 1:
            gl.store(batch.draws, 0)  # each program draws until it gets none: this was the last
    mbarrier.wait(records.empty.index(stage), phase)
    lane = gl.arange(0, FIELDS, layout=gl.BlockedLayout([1], [32], [1], [0]))
    records.buffer.index(stage).store(lane * 0)
    mbarrier.arrive(records.full.index(stage))


@gluon.jit
def _read(records, stage, phase, WARPS: gl.constexpr):
    """The next record, as a vector that every warp holds whole."""
    records.wait_full(stage, phase)
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    record = records.buffer.index(stage).load(LAYOUT)
    records.release(stage)
    return record


@gluon.jit
def _field(record, INDEX: gl.constexpr):
    lane = gl.arange(0, FIELDS, layout=record.type.layout)
    return gl.sum(gl.where(lane == INDEX, record, 0), 0)


@gluon.jit
def _fetch_queries(q_ring, desc, token, head0, PACK: gl.constexpr, D: gl.constexpr):
    bar = q_ring.full.index(0)
    mbarrier.expect(bar, ROWS * D * desc.dtype.primitive_bitwidth // 8)
    for c in gl.static_range(2):
        target = q_ring.buffer.index(c)._reinterpret(
            desc.dtype, [HALF // PACK, PACK, D], desc.layout
        )
        at = [token + c * (HALF // PACK), head0, 0]
        tma.async_copy_global_to_shared(desc, at, bar, target)


@gluon.jit
def _fetch_tile(ring, stage, desc, rows, column, D: gl.constexpr):
    """One box [BOX, 64] for each block and 64 columns: pieces of one swizzled [TILE, D] tile."""
    BOX: gl.constexpr = desc.block_shape[0]
    BOXES: gl.constexpr = TILE // BOX
    COLUMNS: gl.constexpr = D // 64
    lane = gl.arange(0, 32, layout=rows.type.layout)
    bar = ring.full.index(stage)
    mbarrier.expect(bar, TILE * D * desc.dtype.primitive_bitwidth // 8)
    boxes = ring.buffer._reinterpret(
        desc.dtype, [ring.STAGES * COLUMNS * BOXES, BOX, 64], desc.layout
    )
    for b in gl.static_range(BOXES):
        row = gl.sum(gl.where(lane == b, rows, 0), 0)
        for half in gl.static_range(COLUMNS):
            target = boxes.index((stage * COLUMNS + half) * BOXES + b)
            tma.async_copy_global_to_shared(desc, [row, column + half * 64], bar, target)


@gluon.jit
def _produce(batch, records, ring, desc, q_ring, q_desc, D: gl.constexpr, WITH_Q: gl.constexpr):
    """Fetch the tiles of K, with the queries before them, or those of V."""
    BOX: gl.constexpr = desc.block_shape[0]
    BOXES: gl.constexpr = TILE // BOX
    PER_BLOCK: gl.constexpr = batch.BLOCK_SIZE // BOX
    lane = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [1], [0]))
    nowhere = desc.shape[0]  # past the cache: TMA fills with zeros and reads nothing
    stage = 0
    phase = 1
    q_phase = 1
    slot = 0
    slot_phase = 0
    record = _read(records, slot, slot_phase, 1)
    slot, slot_phase = records.advance(slot, slot_phase)
    while _field(record, 1) > 0:
        first = _field(record, 3)
        end = _field(record, 4)
        head0 = _field(record, 2) * batch.PACK
        if WITH_Q:
            mbarrier.wait(q_ring.empty.index(0), q_phase)
            q_phase = q_phase ^ 1
            _fetch_queries(q_ring, q_desc, _field(record, 0), head0, batch.PACK, D)
        table = batch.block_table + _field(record, 6).to(gl.int64) * batch.table_stride
        low = first * 0
        if batch.HAS_WINDOW:
            low = gl.maximum(_field(record, 5) + 1 - batch.window, 0) // BOX
        high = (_field(record, 7) + BOX - 1) // BOX
        for i in range(end - first):
            box = (end - 1 - i) * BOXES + lane
            here = (box >= low) & (box < high) & (lane < BOXES)
            block = gl.load(table + box // PER_BLOCK, mask=here, other=0)
            rows = gl.where(here, (block * PER_BLOCK + box % PER_BLOCK) * BOX, nowhere)
            mbarrier.wait(ring.empty.index(stage), phase)
            _fetch_tile(ring, stage, desc, rows, head0 // batch.GROUP * D, D)
            stage, phase = ring.advance(stage, phase)
        record = _read(records, slot, slot_phase, 1)
        slot, slot_phase = records.advance(slot, slot_phase)


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


@aggregate
class Output:
    out: gl.tensor
    desc: tma.tensor_descriptor
    buffer: gl.shared_memory_descriptor
    sinks: gl.tensor
    HEADS: gl.constexpr
    HAS_SINKS: gl.constexpr

    @gluon.jit
    def normalize(self, o, top, total, head0, PACK: gl.constexpr):
        """Divide by the row sums; a sink joins the denominator here."""
        ROW: gl.constexpr = gl.SliceLayout(1, o.type.layout)
        total = gl.convert_layout(gl.sum(total, axis=1), ROW)
        if self.HAS_SINKS:
            head = head0 + gl.arange(0, HALF, layout=ROW) % PACK
            sink = gl.load(self.sinks + head).to(gl.float32) * LOG2E
            top = gl.convert_layout(top, ROW)
            new_top = gl.maximum(top, sink)
            decay = gl.exp2(top - new_top)
            total = total * decay + gl.exp2(sink - new_top)
            o = o * gl.expand_dims(decay, 1)
        return o * gl.expand_dims(1.0 / gl.where(total > 0.0, total, 1.0), 1)

    @gluon.jit
    def store(self, o, c: gl.constexpr, token, tokens, head0, PACK: gl.constexpr):
        """Rows of warpgroup c; `tokens` are those of the item that exist."""
        D: gl.constexpr = o.shape[1]
        SHARE: gl.constexpr = HALF // PACK
        tma.store_wait(0)
        buffer = self.buffer.index(c)
        buffer.store(o.to(self.desc.dtype))
        if tokens >= (c + 1) * SHARE:
            fence_async_shared()
            packed = buffer._reinterpret(self.desc.dtype, [SHARE, PACK, D], self.desc.layout)
            at = [token + c * SHARE, head0, 0]
            tma.async_copy_shared_to_global(self.desc, at, packed)
        else:
            LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
            row = c * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, LAYOUT))
            d = gl.arange(0, D, layout=gl.SliceLayout(0, LAYOUT))
            offset = ((token + row // PACK).to(gl.int64) * self.HEADS + head0 + row % PACK) * D
            where = self.out + gl.expand_dims(offset, 1) + gl.expand_dims(d, 0)
            live = gl.expand_dims(row < tokens * PACK, 1) & (gl.expand_dims(d, 0) >= 0)
            gl.store(where, buffer.load(LAYOUT), mask=live)


@gluon.jit
def _consume(
    c: gl.constexpr, batch, records, k, v, q_ring, output, scale, soft_cap,
    S: gl.constexpr, ACC: gl.constexpr, HAS_CAP: gl.constexpr,
):  # fmt: skip
    """Warpgroup c attends rows c * HALF .. of every item."""
    ROW: gl.constexpr = gl.SliceLayout(1, S)
    A: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=ACC, k_width=2)
    DTYPE: gl.constexpr = k.buffer.dtype
    D: gl.constexpr = v.buffer.shape[2]
    q = q_ring.buffer.index(c)
    k_stage = 0
    k_phase = 0
    v_stage = 0
    v_phase = 0
    q_phase = 0
    slot = 0
    slot_phase = 0
    record = _read(records, slot, slot_phase, 4)
    slot, slot_phase = records.advance(slot, slot_phase)
    while _field(record, 1) > 0:
        first = _field(record, 3)
        end = _field(record, 4)
        position = _field(record, 5)
        kv_len = _field(record, 7)
        row = c * HALF + gl.arange(0, HALF, layout=ROW)
        scores = Scores(
            position + row // batch.PACK, scale, soft_cap, batch.window, S, HAS_CAP,
            batch.HAS_WINDOW,
        )  # fmt: skip
        mbarrier.wait(q_ring.full.index(0), q_phase)
        q_phase = q_phase ^ 1
        k.wait_full(k_stage, k_phase)
        zeros = gl.zeros([HALF, TILE], gl.float32, S)
        s = warpgroup_mma(
            q, k.buffer.index(k_stage).permute([1, 0]), zeros, use_acc=False, is_async=True
        )
        s = warpgroup_mma_wait(0, deps=[s])
        k.release(k_stage)
        k_stage, k_phase = k.advance(k_stage, k_phase)
        s = scores.mask(scores.cap(s), end - 1)
        top = gl.maximum(gl.max(s, axis=1) * scale, NO_SCORE)
        e = gl.exp2(s * scale - gl.expand_dims(top, 1))
        total = _partial_sums(e)
        p = gl.convert_layout(e.to(DTYPE), A)
        o = gl.zeros([HALF, D], gl.float32, ACC)
        decay = gl.full([HALF], 1.0, gl.float32, ROW)
        if (kv_len < end * TILE) & (kv_len % batch.BLOCK_SIZE != 0):
            _clear_tail(v, v_stage, v_phase, kv_len - (end - 1) * TILE, D)
        mbarrier.wait(k.full.index(k_stage), k_phase, pred=end - first > 1)
        # Besides the first, one more tile may reach beyond the first row; a window masks all.
        masked = ((end - first > 1) & ((end - 1) * TILE - 1 > position)).to(gl.int32)
        if batch.HAS_WINDOW:
            masked = end - first - 1
        for i in range(masked):
            o, p, top, total, decay, k_stage, k_phase, v_stage, v_phase = _step(
                q, o, p, top, total, decay, k_stage, k_phase, v_stage, v_phase,
                i + 2 < end - first, end - 2 - i, k, v, scores, True, ACC, A,
            )  # fmt: skip
        if not batch.HAS_WINDOW:
            for i in range(masked + 1, end - first):
                o, p, top, total, decay, k_stage, k_phase, v_stage, v_phase = _step(
                    q, o, p, top, total, decay, k_stage, k_phase, v_stage, v_phase,
                    i + 1 < end - first, 0, k, v, scores, False, ACC, A,
                )  # fmt: skip
        q_ring.release(0)
        o = o * gl.expand_dims(gl.convert_layout(decay, gl.SliceLayout(1, ACC)), 1)
        v.wait_full(v_stage, v_phase)
        o = warpgroup_mma(p, v.buffer.index(v_stage), o, is_async=True)
        o, p = warpgroup_mma_wait(0, deps=[o, p])
        v.release(v_stage)
        v_stage, v_phase = v.advance(v_stage, v_phase)
        head0 = _field(record, 2) * batch.PACK
        o = output.normalize(o, top, total, head0, batch.PACK)
        output.store(o, c, _field(record, 0), _field(record, 1), head0, batch.PACK)
        record = _read(records, slot, slot_phase, 4)
        slot, slot_phase = records.advance(slot, slot_phase)
    tma.store_wait(0)


_COUNTS = ["num_requests", "num_tokens", "decoded_len", "window", "table_stride", "items"]


@gluon.jit(do_not_specialize=_COUNTS)
def _prefill_kernel(
    q_desc, k_desc, v_desc, out_desc, out, block_table, seq_lens, query_start, sinks, draws,
    num_requests, num_tokens, decoded_len, window, table_stride, items, scale, soft_cap,
    HEADS: gl.constexpr, GROUP: gl.constexpr, PACK: gl.constexpr, D: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, K_STAGES: gl.constexpr, V_STAGES: gl.constexpr,
    HAS_CAP: gl.constexpr, HAS_WINDOW: gl.constexpr, HAS_SINKS: gl.constexpr,
    CONSUMER_REGS: gl.constexpr, OTHER_REGS: gl.constexpr,
):  # fmt: skip
    S: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 16]
    )
    ACC: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16]
    )
    DTYPE: gl.constexpr = k_desc.dtype
    SWIZZLED: gl.constexpr = k_desc.layout
    batch = Batch(
        block_table, seq_lens, query_start, draws, num_requests, num_tokens, decoded_len, window,
        table_stride, items, HEADS // PACK, PACK, GROUP, BLOCK_SIZE, HAS_WINDOW,
    )  # fmt: skip
    k = _ring(DTYPE, [K_STAGES, TILE, D], SWIZZLED, 2)
    v = _ring(DTYPE, [V_STAGES, TILE, D], SWIZZLED, 2)
    halves = gl.allocate_shared_memory(DTYPE, [2, HALF, D], SWIZZLED)
    q_full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full.index(0), count=1)
    mbarrier.init(q_empty.index(0), count=2)
    q_ring = Ring(halves, q_full, q_empty, 1)
    records = _ring(gl.int32, [2, FIELDS], gl.SwizzledSharedLayout(1, 1, 1, [0]), READERS)
    buffer = gl.allocate_shared_memory(DTYPE, [2, HALF, D], SWIZZLED)
    output = Output(out, out_desc, buffer, sinks, HEADS, HAS_SINKS)
    gl.warp_specialize(
        [
            (_consume, (0, batch, records, k, v, q_ring, output, scale, soft_cap, S, ACC, HAS_CAP)),
            (_consume, (1, batch, records, k, v, q_ring, output, scale, soft_cap, S, ACC, HAS_CAP)),
            (_produce, (batch, records, k, k_desc, q_ring, q_desc, D, True)),
            (_produce, (batch, records, v, v_desc, q_ring, q_desc, D, False)),
            (_schedule, (batch, records)),
        ],
        [4, 1, 1, 1],
        [CONSUMER_REGS, OTHER_REGS, OTHER_REGS, OTHER_REGS],
    )


def supports(query: Tensor, k_cache: Tensor, v_cache: Tensor, scoring: Scoring) -> bool:
    """Whether this kernel covers the arguments: head dim 64 or 128; blocks of 8, 16, 32, 64 or a
    multiple of 128 tokens, one after the other in memory; heads next to each other in the query.
    """
    _, block_size, num_kv_heads, head_dim = k_cache.shape
    row = num_kv_heads * head_dim
    return (
        head_dim in (64, 128)
        and (block_size in (8, 16, 32, 64) or block_size % 128 == 0)
        and scoring.scale > 0
        and query.stride(1) == head_dim
        and query.stride(0) % 8 == 0
        and query.data_ptr() % 16 == 0
        and all(
            cache.stride() == (block_size * row, row, head_dim, 1) and cache.data_ptr() % 16 == 0
            for cache in (k_cache, v_cache)
        )
    )


def prefill(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start: Tensor,
    out: Tensor,
    scoring: Scoring,
    *,
    decoded_len: int,
    draws: Tensor | None = None,
    num_programs: int | None = None,
) -> None:
    """As `prefill.prefill`, for what `supports` covers.

    draws: int32 [1] holding 0, the counter of drawn items; it is 0 again afterwards.
    """
    num_blocks, block_size, num_kv_heads, head_dim = k_cache.shape
    num_tokens, num_heads, _ = query.shape
    group = num_heads // num_kv_heads
    pack = group if group & (group - 1) == 0 and group <= HALF.value else 1
    row_blocks = num_tokens * pack // ROWS.value + seq_lens.shape[0] + 1
    items = row_blocks * (num_heads // pack)
    if draws is None:
        draws = torch.zeros(1, dtype=torch.int32, device=query.device)
    if num_programs is None:
        num_programs = torch.cuda.get_device_properties(query.device).multi_processor_count
    box = min(block_size, TILE.value)
    row = num_kv_heads * head_dim
    k_desc, v_desc = (
        TensorDescriptor(
            cache, [num_blocks * block_size, row], [row, 1], [box, 64],
            gl.NVMMASharedLayout(128, 16, 2),
        )
        for cache in (k_cache, v_cache)
    )  # fmt: skip
    q_desc, out_desc = (
        TensorDescriptor(
            rows, [num_tokens, num_heads, head_dim], [rows.stride(0), head_dim, 1],
            [HALF.value // pack, pack, head_dim], gl.NVMMASharedLayout(128, 16, 3),
        )
        for rows in (query, out)
    )  # fmt: skip
    _prefill_kernel[(min(num_programs, items),)](
        q_desc, k_desc, v_desc, out_desc, out, block_table, seq_lens, query_start,
        query if scoring.sinks is None else scoring.sinks,
        draws,
        seq_lens.shape[0], num_tokens, decoded_len, scoring.sliding_window or 0,
        block_table.stride(0), items, scoring.scale * LOG2E.value, scoring.soft_cap or 0.0,
        HEADS=num_heads, GROUP=group, PACK=pack, D=head_dim, BLOCK_SIZE=block_size,
        K_STAGES=K_STAGES, V_STAGES=V_STAGES, HAS_CAP=scoring.soft_cap is not None,
        HAS_WINDOW=scoring.sliding_window is not None, HAS_SINKS=scoring.sinks is not None,
        CONSUMER_REGS=CONSUMER_REGISTERS, OTHER_REGS=OTHER_REGISTERS, num_warps=4, maxnreg=168,
    )  # fmt: skip
