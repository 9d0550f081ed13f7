"""The circular queue of the Hopper kernel: shared memory between the producer and the consumers.

Two barriers a stage: `full` counts the bytes that arrive, `empty` the consumers that are done.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from billfish.kernels.gluon_compat import aggregate

# Brings $3 bytes at address $1 into the L2 cache, where $2 is not 0. Gluon has no such operation.
_PREFETCH = gl.constexpr(
    "{ .reg .pred live; setp.ne.u32 live, $2, 0; mov.u32 $0, 0; "
    "@live cp.async.bulk.prefetch.L2.global [$1], $3; }"
)


@aggregate
class Queue:
    """The circular queue between the producer warp and the consumers, and what feeds it."""

    code_desc: tma.tensor_descriptor
    meta_desc: tma.tensor_descriptor
    x_desc: tma.tensor_descriptor
    codes: gl.shared_memory_descriptor
    meta: gl.shared_memory_descriptor
    x: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    known: gl.shared_memory_descriptor
    units: gl.tensor
    STAGES: gl.constexpr

    @gluon.jit
    def load_weights(self, stage, block, step):
        """Start loading the units of one stage; the stage is full when X has arrived too."""
        bar = self.full.index(stage)
        nbytes: gl.constexpr = (
            self.code_desc.block_type.nbytes
            + self.meta_desc.block_type.nbytes
            + self.x_desc.block_type.nbytes
        )
        mbarrier.expect(bar, nbytes)
        units: gl.constexpr = self.code_desc.block_shape[0]
        at = [block * units, step, 0, 0]
        tma.async_copy_global_to_shared(self.code_desc, at, bar, self.codes.index(stage))
        tma.async_copy_global_to_shared(self.meta_desc, at, bar, self.meta.index(stage))

    @gluon.jit
    def load_x(self, stage, tile_m, step):
        at = [tile_m * self.x_desc.block_shape[0], step * self.x_desc.block_shape[1]]
        bar = self.full.index(stage)
        tma.async_copy_global_to_shared(self.x_desc, at, bar, self.x.index(stage))

    @gluon.jit
    def prefetch(self, work):
        """Bring what follows the stages of the queue into the L2 cache: 32 units, one a lane."""
        TAKEN: gl.constexpr = self.code_desc.block_shape[0]
        STAGE: gl.constexpr = self.code_desc.block_type.nbytes + self.meta_desc.block_type.nbytes
        BYTES: gl.constexpr = STAGE // TAKEN  # of a unit
        lane = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [1], [0]))
        ahead = self.STAGES + lane // TAKEN
        tile, first = work.first()
        step = first + ahead
        over = step // work.steps
        _, block = work.place(tile)
        row = (block + over) * TAKEN + lane % TAKEN
        live = (ahead < work.count()) & (row < self.code_desc.shape[0])
        # After a tile comes the next one only where they are divided and all lie in one row.
        live &= (over == 0) | ((tile >= work.whole) & (work.tiles_m == 1))
        at = (row * work.steps + step - over * work.steps).to(gl.int64) * (BYTES // 4)
        gl.inline_asm_elementwise(
            _PREFETCH,
            "=r,l,r,r",
            [(self.units + at).to(gl.int64, bitcast=True), live.to(gl.int32), lane * 0 + BYTES],
            dtype=gl.int32,
            is_pure=False,
            pack=1,
        )

    @gluon.jit
    def fetch_x_map(self):
        """Have the copy engine know the tensor map of X: load a tile outside, which is no read."""
        bar = self.known.index(0)
        mbarrier.expect(bar, self.x_desc.block_type.nbytes)
        nowhere = [self.x_desc.shape[0], 0]
        tma.async_copy_global_to_shared(self.x_desc, nowhere, bar, self.x.index(0))
        mbarrier.wait(bar, 0)

    @gluon.jit
    def advance(self, stage, phase):
        stage += 1
        wrapped = stage == self.STAGES
        return gl.where(wrapped, 0, stage), gl.where(wrapped, phase ^ 1, phase)

    @gluon.jit
    def before(self, stage):
        """The stage before this one."""
        # Computed, not carried along a loop: a variable that begins as another name of one that the
        # loop carries (before = stage) is taken for a constant by Triton 3.6.
        return gl.where(stage == 0, self.STAGES - 1, stage - 1)
