"""What feeds the Hopper decode kernel: the work of a program, its queue and the producer warp."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from billfish.kernels.gluon_compat import aggregate, next_stage
from billfish.kernels.paged_attention.hopper_rows import WARPS


@aggregate
class Queue:
    """Tiles of K and V in shared memory. A stage is full when all its bytes have arrived."""

    k_desc: tma.tensor_descriptor
    v_desc: tma.tensor_descriptor
    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    STAGES: gl.constexpr

    @gluon.jit
    def advance(self, stage, phase):
        return next_stage(stage, phase, self.STAGES)


@aggregate
class Work:
    """The part of a program: from (r, tile) to (last_r, last_tile), for one KV head."""

    block_table: gl.tensor
    seq_lens: gl.tensor
    query_start: gl.tensor
    num_requests: gl.tensor
    table_stride: gl.tensor
    max_query_len: gl.tensor
    window: gl.tensor
    head: gl.tensor
    r: gl.tensor
    tile: gl.tensor
    last_r: gl.tensor
    last_tile: gl.tensor
    kv_len: gl.tensor
    begin: gl.tensor
    end: gl.tensor
    TILE: gl.constexpr
    HAS_WINDOW: gl.constexpr

    @gluon.jit
    def unfinished(self, r, tile):
        return (r < self.last_r) | ((r == self.last_r) & (tile < self.last_tile))

    @gluon.jit
    def after(self, r):
        """KV length and last + 1 new token of the request after r, asked for ahead of time."""
        kv_len = gl.load(self.seq_lens + gl.minimum(r + 1, self.num_requests - 1))
        end = gl.load(self.query_start + gl.minimum(r + 2, self.num_requests))
        return kv_len, end

    @gluon.jit
    def first_key(self, kv_len, query_len):
        """The first key that any query of a request sees."""
        if self.HAS_WINDOW:
            return gl.maximum(kv_len - query_len + 1 - self.window, 0)
        else:
            return kv_len * 0

    @gluon.jit
    def tiles(self, kv_len, query_len):
        """As `planner.request_tiles`."""
        first = self.first_key(kv_len, query_len) // self.TILE
        tiles = gl.maximum((kv_len + self.TILE - 1) // self.TILE - first, 1)
        return gl.where((query_len > 0) & (query_len <= self.max_query_len), tiles, 0)

    @gluon.jit
    def stop(self, r, tiles):
        return gl.where(r < self.last_r, tiles, self.last_tile)


@gluon.jit
def _fetch_tile(queue, stage, phase, rows, first, column, TILE: gl.constexpr, D: gl.constexpr):
    """Ask for the boxes of a tile of K and V, whose rows are in lanes first, first + 1, ..."""
    BOX: gl.constexpr = queue.k_desc.block_shape[0]
    BOXES: gl.constexpr = TILE // BOX
    DTYPE: gl.constexpr = queue.k_desc.dtype
    lane = gl.arange(0, 32, layout=rows.type.layout)
    mbarrier.wait(queue.empty.index(stage), phase)
    bar = queue.full.index(stage)
    mbarrier.expect(bar, 2 * TILE * D * DTYPE.primitive_bitwidth // 8)
    k = queue.k.index(stage)._reinterpret(DTYPE, [BOXES, BOX, D], queue.k_desc.layout)
    v = queue.v.index(stage)._reinterpret(DTYPE, [BOXES, BOX, D], queue.v_desc.layout)
    for b in gl.static_range(BOXES):
        row = gl.sum(gl.where(lane == first + b, rows, 0), 0)
        tma.async_copy_global_to_shared(queue.k_desc, [row, column], bar, k.index(b))
        tma.async_copy_global_to_shared(queue.v_desc, [row, column], bar, v.index(b))


@gluon.jit
def produce(work, queue, BLOCK_SIZE: gl.constexpr, D: gl.constexpr, PDL: gl.constexpr):
    """The producer warp: fetch the tiles of the part's requests, one after the other."""
    BOX: gl.constexpr = queue.k_desc.block_shape[0]
    BOXES: gl.constexpr = work.TILE // BOX  # a tile
    PER_BLOCK: gl.constexpr = BLOCK_SIZE // BOX
    TILES: gl.constexpr = 32 // BOXES  # whose boxes the lanes of the warp hold
    lane = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [1], [0]))
    nowhere = queue.k_desc.shape[0]  # past the cache: TMA fills with zeros and reads nothing
    if PDL:
        gdc_launch_dependents()
    stage = 0
    phase = 1  # a fresh barrier counts as having completed the phase before
    r = work.r
    tile = work.tile
    kv_len = work.kv_len
    begin = work.begin
    end = work.end
    while work.unfinished(r, tile):
        next_len, next_end = work.after(r)
        stop = work.stop(r, work.tiles(kv_len, end - begin))
        if stop > tile:
            first_key = work.first_key(kv_len, end - begin)
            first = first_key // work.TILE
            table = work.block_table + r.to(gl.int64) * work.table_stride
            low = first_key // BOX
            high = (kv_len + BOX - 1) // BOX
            box = (first + tile) * BOXES + lane
            now = _box_rows(table, box, low, high, nowhere, PER_BLOCK, BOX)
            ahead = _box_rows(table, box + 32, low, high, nowhere, PER_BLOCK, BOX)
            if PDL:
                # What was read so far was complete before the kernel ahead of this one began.
                gdc_wait()
            used = 0
            for j in range(first + tile, first + stop):
                if used == TILES:
                    used = 0
                    now = ahead
                    box = (j + TILES) * BOXES + lane
                    ahead = _box_rows(table, box, low, high, nowhere, PER_BLOCK, BOX)
                _fetch_tile(queue, stage, phase, now, used * BOXES, work.head * D, work.TILE, D)
                used += 1
                stage, phase = queue.advance(stage, phase)
        r += 1
        tile = tile * 0
        kv_len = next_len
        begin = end
        end = next_end


@gluon.jit
def _box_rows(table, box, low, high, nowhere, PER_BLOCK: gl.constexpr, BOX: gl.constexpr):
    """Rows of the cache where boxes begin; boxes outside [low, high) lie past the cache."""
    here = (box >= low) & (box < high)
    block = gl.load(table + box // PER_BLOCK, mask=here, other=0)
    return gl.where(here, (block * PER_BLOCK + box % PER_BLOCK) * BOX, nowhere)


def stage_layouts(
    tile: int, box: int, head_dim: int
) -> tuple[gl.SharedLinearLayout, gl.SharedLinearLayout]:
    """How TMA boxes [box, head_dim] lie in a stage, seen as K^T [WARPS, head_dim, tile / WARPS] and
    as V [WARPS, tile / WARPS, head_dim].

    TMA writes a box as columns of 64 elements (128 bytes), swizzled: the 16-byte chunk of row i
    is XORed with i % 8. The bases are those of successive address bits, from 2 bytes up.
    """
    bases = [(0, d) for d in (1, 2, 4)] + [(0, d) for d in (8, 16, 32)]
    bases += [(row, chunk) for row, chunk in ((1, 8), (2, 16), (4, 32))]
    row = 8
    while row < box:
        bases.append((row, 0))
        row *= 2
    if head_dim == 128:
        bases.append((0, 64))
    while row < tile:
        bases.append((row, 0))
        row *= 2
    part = tile // WARPS.value
    k = [[row // part, d, row % part] for row, d in bases]
    v = [[row // part, row % part, d] for row, d in bases]
    return gl.SharedLinearLayout(k, [], 1024), gl.SharedLinearLayout(v, [], 1024)
