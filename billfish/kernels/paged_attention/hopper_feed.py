"""What feeds the Hopper prefill kernel: the scheduler warp, the producer warps and their queues."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from billfish.kernels.gluon_compat import aggregate
from billfish.kernels.paged_attention.planner import PREFILL_ROWS

ROWS = gl.constexpr(PREFILL_ROWS)  # packed query rows of an item
HALF = gl.constexpr(PREFILL_ROWS // 2)  # of them, those of one warpgroup
TILE = gl.constexpr(128)  # keys
FIELDS = gl.constexpr(32)  # of an item's record; 8 are used
READERS = gl.constexpr(4)  # partitions that read a record


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
def make_ring(
    DTYPE: gl.constexpr, SHAPE: gl.constexpr, LAYOUT: gl.constexpr, READERS: gl.constexpr
):
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
    order: gl.tensor
    draws: gl.tensor
    num_requests: gl.tensor
    num_tokens: gl.tensor
    decoded_len: gl.tensor
    window: gl.tensor
    table_stride: gl.tensor
    SETS: gl.constexpr  # head sets: KV heads, or query heads where a group is not packed
    PACK: gl.constexpr  # query heads packed as rows of an item
    GROUP: gl.constexpr
    BLOCK_SIZE: gl.constexpr
    HAS_WINDOW: gl.constexpr

    @gluon.jit
    def find(self, index):
        """The request that a row block belongs to, see `planner.order_rows`: (request, place of
        the block in it, first new token, last + 1, KV length), in one trip to memory.
        """
        CHUNK: gl.constexpr = 128
        lane = gl.arange(0, CHUNK, layout=gl.BlockedLayout([4], [32], [1], [0]))
        owner = index * 0
        begin = index * 0
        start = index * 0
        end = index * 0
        kv_len = index * 0
        for first in range(0, self.num_requests + 1, CHUNK):
            r = first + lane
            real = r < self.num_requests
            any_real = r <= self.num_requests
            begins = gl.load(self.order + r, mask=any_real, other=0)
            starts = gl.load(self.query_start + r, mask=any_real, other=self.num_tokens)
            ends = gl.load(self.query_start + r + 1, mask=real, other=self.num_tokens)
            lens = gl.load(self.seq_lens + r, mask=real, other=0)
            blocks = self.blocks(r, ends - starts)
            it = (begins <= index) & (index < begins + blocks)  # true for one request
            owner += gl.sum(gl.where(it, r, 0), 0)
            begin += gl.sum(gl.where(it, begins, 0), 0)
            start += gl.sum(gl.where(it, starts, 0), 0)
            end += gl.sum(gl.where(it, ends, 0), 0)
            kv_len += gl.sum(gl.where(it, lens, 0), 0)
        return owner, index - begin, start, end, kv_len

    @gluon.jit
    def blocks(self, r, query_len):
        """Row blocks of a request; none if the decode kernel has it."""
        blocks = (query_len * self.PACK + ROWS - 1) // ROWS
        return gl.where((r < self.num_requests) & (query_len <= self.decoded_len), 0, blocks)

    @gluon.jit
    def record(self, item):
        """The fields of an item as a vector. The last rows of a request see most keys: they go
        first, as do the requests with most KV.
        """
        TOKENS: gl.constexpr = ROWS // self.PACK
        r, place, start, end, kv_len = self.find(item // self.SETS)
        row_block = (end - start + TOKENS - 1) // TOKENS - 1 - place
        tokens = gl.minimum(end - start - row_block * TOKENS, TOKENS)
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
        return record


@gluon.jit
def schedule(batch, records, PDL: gl.constexpr):
    """Draw items and pass on their records; an empty record ends."""
    if PDL:
        gdc_launch_dependents()
    stage = 0
    phase = 1
    item = gl.program_id(0)
    items = gl.load(batch.order + batch.num_requests + 1) * batch.SETS
    while item < items:
        record = batch.record(item)
        mbarrier.wait(records.empty.index(stage), phase)
        records.buffer.index(stage).store(record)
        mbarrier.arrive(records.full.index(stage))
        stage, phase = records.advance(stage, phase)
        if PDL:
            gdc_wait()  # the kernel ahead may draw from the same counter
        drawn = gl.atomic_add(batch.draws, 1, sem="relaxed")
        item = gl.num_programs(0) + drawn
        if drawn == items - 1:
            gl.store(batch.draws, 0)  # each program draws until it gets none: this was the last
    mbarrier.wait(records.empty.index(stage), phase)
    lane = gl.arange(0, FIELDS, layout=gl.BlockedLayout([1], [32], [1], [0]))
    records.buffer.index(stage).store(lane * 0)
    mbarrier.arrive(records.full.index(stage))


@gluon.jit
def read_record(records, stage, phase, WARPS: gl.constexpr):
    """The next record, as a vector that every warp holds whole."""
    records.wait_full(stage, phase)
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    record = records.buffer.index(stage).load(LAYOUT)
    records.release(stage)
    return record


@gluon.jit
def field(record, INDEX: gl.constexpr):
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
def produce(
    batch, records, ring, desc, q_ring, q_desc,
    D: gl.constexpr, WITH_Q: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
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
    record = read_record(records, slot, slot_phase, 1)
    slot, slot_phase = records.advance(slot, slot_phase)
    if PDL:
        gdc_wait()
    while field(record, 1) > 0:
        first = field(record, 3)
        end = field(record, 4)
        head0 = field(record, 2) * batch.PACK
        if WITH_Q:
            mbarrier.wait(q_ring.empty.index(0), q_phase)
            q_phase = q_phase ^ 1
            _fetch_queries(q_ring, q_desc, field(record, 0), head0, batch.PACK, D)
        table = batch.block_table + field(record, 6).to(gl.int64) * batch.table_stride
        low = first * 0
        if batch.HAS_WINDOW:
            low = gl.maximum(field(record, 5) + 1 - batch.window, 0) // BOX
        high = (field(record, 7) + BOX - 1) // BOX
        for i in range(end - first):
            box = (end - 1 - i) * BOXES + lane
            here = (box >= low) & (box < high) & (lane < BOXES)
            block = gl.load(table + box // PER_BLOCK, mask=here, other=0)
            rows = gl.where(here, (block * PER_BLOCK + box % PER_BLOCK) * BOX, nowhere)
            mbarrier.wait(ring.empty.index(stage), phase)
            _fetch_tile(ring, stage, desc, rows, head0 // batch.GROUP * D, D)
            stage, phase = ring.advance(stage, phase)
        record = read_record(records, slot, slot_phase, 1)
        slot, slot_phase = records.advance(slot, slot_phase)
