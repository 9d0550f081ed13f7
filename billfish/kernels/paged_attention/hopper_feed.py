"""What feeds the Hopper prefill kernel: the scheduler warp, the producer warps and their queues."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from billfish.kernels.gluon_compat import aggregate, next_stage
from billfish.kernels.paged_attention import prefill_items

ROWS = gl.constexpr(prefill_items.ROWS)  # packed query rows of an item
HALF = gl.constexpr(prefill_items.ROWS // 2)  # of them, those of one warpgroup
TILE = gl.constexpr(prefill_items.KEYS)  # keys
ENTRY = gl.constexpr(prefill_items.ENTRY)
READERS = gl.constexpr(4)  # partitions that read a record

FIELDS = gl.constexpr(32)  # of an item's record, of which these are used
FIRST_TOKEN = gl.constexpr(0)  # of its rows, among the new tokens of the step
TOKENS = gl.constexpr(1)  # of its rows; 0 says that there are no more items
HEAD_SET = gl.constexpr(2)
BEGIN_TILE = gl.constexpr(3)  # of keys
END_TILE = gl.constexpr(4)
POSITION = gl.constexpr(5)  # of the first row in its sequence
REQUEST = gl.constexpr(6)  # whose row of the block table it is
KV_LEN = gl.constexpr(7)
PARTS = gl.constexpr(8)  # among which the keys of these rows are shared out
SLOT = gl.constexpr(9)  # of the partial result
PART = gl.constexpr(10)  # which of them it is


@aggregate
class Ring:
    """A circular queue in shared memory."""

    buffer: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    STAGES: gl.constexpr

    @gluon.jit
    def advance(self, stage, phase):
        return next_stage(stage, phase, self.STAGES)

    @gluon.jit
    def wait_full(self, stage, phase):
        mbarrier.wait(self.full.index(stage), phase)

    @gluon.jit
    def release(self, stage):
        mbarrier.arrive(self.empty.index(stage))


@aggregate
class Slots:
    """Two slots by turns, each with the queries of an item until its output takes their place. The
    queries of the next item arrive in the other slot meanwhile.

    A warpgroup gives a slot back during the item after, when its output has left.
    """

    ring: Ring

    @gluon.jit
    def half(self, turn, c):
        """Rows of warpgroup c."""
        return self.ring.buffer.index((turn & 1) * 2 + c)

    @gluon.jit
    def wait_full(self, turn):
        mbarrier.wait(self.ring.full.index(turn & 1), (turn >> 1) & 1)

    @gluon.jit
    def release_other(self, turn):
        """Give back the slot of the item before: in turn 0 that is one nobody has used."""
        mbarrier.arrive(self.ring.empty.index((turn & 1) ^ 1))

    @gluon.jit
    def wait_empty(self, turn):
        mbarrier.wait(self.ring.empty.index(turn & 1), (((turn + 1) >> 1) & 1) ^ 1)


@gluon.jit
def make_ring(
    DTYPE: gl.constexpr, SHAPE: gl.constexpr, LAYOUT: gl.constexpr, STAGES: gl.constexpr,
    READERS: gl.constexpr,
):  # fmt: skip
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
    items: gl.tensor
    draws: gl.tensor
    num_requests: gl.tensor
    num_tokens: gl.tensor
    decoded_len: gl.tensor
    window: gl.tensor
    table_stride: gl.tensor
    section: gl.tensor  # head sets whose items are drawn together
    SETS: gl.constexpr  # head sets: KV heads, or query heads where a group is not packed
    PACK: gl.constexpr  # query heads packed as rows of an item
    GROUP: gl.constexpr
    BLOCK_SIZE: gl.constexpr
    HAS_WINDOW: gl.constexpr

    @gluon.jit
    def find(self, index):
        """The request that a row block or part of one belongs to, see `prefill_items.list_items`:
        (request, place in it, first new token, last + 1, KV length, parts of each block, slots
        before), in one trip to memory.
        """
        CHUNK: gl.constexpr = 128
        lane = gl.arange(0, CHUNK, layout=gl.BlockedLayout([4], [32], [1], [0]))
        owner = index * 0
        begin = index * 0
        start = index * 0
        end = index * 0
        kv_len = index * 0
        parts = index * 0
        slots = index * 0
        for first in range(0, self.num_requests + 1, CHUNK):
            r = first + lane
            real = r < self.num_requests
            any_real = r <= self.num_requests
            begins = gl.load(self.items + ENTRY * r, mask=any_real, other=0)
            each = gl.load(self.items + ENTRY * r + 1, mask=any_real, other=0)
            before = gl.load(self.items + ENTRY * r + 2, mask=any_real, other=0)
            starts = gl.load(self.query_start + r, mask=any_real, other=self.num_tokens)
            ends = gl.load(self.query_start + r + 1, mask=real, other=self.num_tokens)
            lens = gl.load(self.seq_lens + r, mask=real, other=0)
            count = self.blocks(r, ends - starts) * each
            it = (begins <= index) & (index < begins + count)  # true for one request
            owner += gl.sum(gl.where(it, r, 0), 0)
            begin += gl.sum(gl.where(it, begins, 0), 0)
            start += gl.sum(gl.where(it, starts, 0), 0)
            end += gl.sum(gl.where(it, ends, 0), 0)
            kv_len += gl.sum(gl.where(it, lens, 0), 0)
            parts += gl.sum(gl.where(it, each, 0), 0)
            slots += gl.sum(gl.where(it, before, 0), 0)
        return owner, index - begin, start, end, kv_len, parts, slots

    @gluon.jit
    def blocks(self, r, query_len):
        """Row blocks of a request; none if the decode kernel has it."""
        blocks = (query_len * self.PACK + ROWS - 1) // ROWS
        return gl.where((r < self.num_requests) & (query_len <= self.decoded_len), 0, blocks)

    @gluon.jit
    def count(self):
        """How many row blocks there are, each as often as it has parts."""
        return gl.load(self.items + ENTRY * (self.num_requests + 1))

    @gluon.jit
    def split(self, item):
        """(row block or part of one, head set) of an item. A section of head sets is done with
        before the next begins, so that its keys and values stay in the L2.
        """
        blocks = self.count()
        section = item // (blocks * self.section)
        width = gl.minimum(self.section, self.SETS - section * self.section)
        rest = item - section * blocks * self.section
        return rest // width, section * self.section + rest % width

    @gluon.jit
    def record(self, item):
        """The fields of an item as a vector, from FIRST_TOKEN on. The last rows of a request see
        most keys: they go first, as do the requests with most KV.
        """
        SPAN: gl.constexpr = ROWS // self.PACK  # tokens of an item, at most
        index, head_set = self.split(item)
        r, place, start, end, kv_len, parts, slots = self.find(index)
        block = place // parts
        part = place % parts
        row_block = (end - start + SPAN - 1) // SPAN - 1 - block
        tokens = gl.minimum(end - start - row_block * SPAN, SPAN)
        position = kv_len - (end - start) + row_block * SPAN
        first_tile = position * 0
        if self.HAS_WINDOW:
            first_tile = gl.maximum(position + 1 - self.window, 0) // TILE
        tiles = gl.maximum((position + tokens + TILE - 1) // TILE - first_tile, 1)
        begin_tile = first_tile + part * tiles // parts
        end_tile = first_tile + (part + 1) * tiles // parts
        request = gl.minimum(r, self.num_requests - 1)
        first_token = start + row_block * SPAN
        slot = slots + (block * self.SETS + head_set) * parts + part
        fields = (
            first_token, tokens, head_set, begin_tile, end_tile, position, request, kv_len, parts,
            slot, part,
        )  # fmt: skip
        lane = gl.arange(0, FIELDS, layout=gl.BlockedLayout([1], [32], [1], [0]))
        record = lane * 0
        for i in gl.static_range(len(fields)):
            record = gl.where(lane == i, fields[i], record)
        return record


@gluon.jit
def schedule(batch, records, PDL: gl.constexpr):
    """Draw items and pass on their records; an empty record ends.

    The next item is drawn when both warpgroups have begun with this one. Drawn ahead, the items
    would be dealt out in turn, long ones to programs that have a long one already.
    """
    if PDL:
        gdc_launch_dependents()
    phase = 0
    item = gl.program_id(0)
    items = batch.count() * batch.SETS
    while item < items:
        records.buffer.index(0).store(batch.record(item))
        mbarrier.arrive(records.full.index(0))
        mbarrier.wait(records.empty.index(0), phase)
        phase = phase ^ 1
        if PDL:
            gdc_wait()  # the kernel ahead may draw from the same counter
        drawn = gl.atomic_add(batch.draws, 1, sem="relaxed")
        item = gl.num_programs(0) + drawn
        if drawn == items - 1:
            gl.store(batch.draws, 0)  # each program draws until it gets none: this was the last
    if PDL:
        # Also where there was nothing to do: the kernel behind waits for the end of this one, which
        # then has to be after the end of the one ahead.
        gdc_wait()
    lane = gl.arange(0, FIELDS, layout=gl.BlockedLayout([1], [32], [1], [0]))
    records.buffer.index(0).store(lane * 0)
    mbarrier.arrive(records.full.index(0))


@gluon.jit
def read_record(records, phase, WARPS: gl.constexpr):
    """The next record, as a vector that every warp holds whole."""
    records.wait_full(0, phase)
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    record = records.buffer.index(0).load(LAYOUT)
    records.release(0)
    return record


@gluon.jit
def field(record, INDEX: gl.constexpr):
    lane = gl.arange(0, FIELDS, layout=record.type.layout)
    return gl.sum(gl.where(lane == INDEX, record, 0), 0)


@gluon.jit
def _fetch_queries(slots, turn, desc, token, head0, PACK: gl.constexpr, D: gl.constexpr):
    slots.wait_empty(turn)
    bar = slots.ring.full.index(turn & 1)
    mbarrier.expect(bar, ROWS * D * desc.dtype.primitive_bitwidth // 8)
    for c in gl.static_range(2):
        target = slots.half(turn, c)._reinterpret(desc.dtype, [HALF // PACK, PACK, D], desc.layout)
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
def _box_rows(table, tile, low, high, nowhere, BOX: gl.constexpr, PER_BLOCK: gl.constexpr):
    """Rows of the cache where the boxes of a tile begin, in the lanes of the warp; boxes outside
    [low, high) lie past the cache.
    """
    lane = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [1], [0]))
    box = tile * (TILE // BOX) + lane
    here = (box >= low) & (box < high) & (lane < TILE // BOX)
    block = gl.load(table + box // PER_BLOCK, mask=here, other=0)
    return gl.where(here, (block * PER_BLOCK + box % PER_BLOCK) * BOX, nowhere)


@gluon.jit
def produce(
    batch, records, ring, desc, slots, q_desc,
    D: gl.constexpr, WITH_Q: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Fetch the tiles of K, with the queries before them, or those of V."""
    BOX: gl.constexpr = desc.block_shape[0]
    PER_BLOCK: gl.constexpr = batch.BLOCK_SIZE // BOX
    nowhere = desc.shape[0]  # past the cache: TMA fills with zeros and reads nothing
    stage = 0
    phase = 1
    turn = 0
    record_phase = 0
    record = read_record(records, record_phase, 1)
    while field(record, TOKENS) > 0:
        first = field(record, BEGIN_TILE)
        end = field(record, END_TILE)
        head0 = field(record, HEAD_SET) * batch.PACK
        table = batch.block_table + field(record, REQUEST).to(gl.int64) * batch.table_stride
        low = first * 0
        if batch.HAS_WINDOW:
            low = gl.maximum(field(record, POSITION) + 1 - batch.window, 0) // BOX
        high = (field(record, KV_LEN) + BOX - 1) // BOX
        rows = _box_rows(table, end - 1, low, high, nowhere, BOX, PER_BLOCK)
        if PDL:
            # What was read so far was complete before the kernel ahead of this one began.
            gdc_wait()
        if WITH_Q:
            _fetch_queries(slots, turn, q_desc, field(record, FIRST_TOKEN), head0, batch.PACK, D)
        for i in range(end - first):
            ahead = _box_rows(table, end - 2 - i, low, high, nowhere, BOX, PER_BLOCK)
            mbarrier.wait(ring.empty.index(stage), phase)
            _fetch_tile(ring, stage, desc, rows, head0 // batch.GROUP * D, D)
            rows = ahead
            stage, phase = ring.advance(stage, phase)
        turn += 1
        record_phase = record_phase ^ 1
        record = read_record(records, record_phase, 1)
