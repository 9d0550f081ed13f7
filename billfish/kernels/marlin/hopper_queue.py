"""The circular queue of the Hopper kernel: shared memory between the producer and the consumers.

Two barriers a stage: `full` counts the bytes that arrive, `empty` the consumers that are done.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from billfish.kernels.gluon_compat import aggregate, next_stage


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
    def advance(self, stage, phase):
        return next_stage(stage, phase, self.STAGES)

    @gluon.jit
    def before(self, stage):
        """The stage before this one."""
        # Computed, not carried along a loop: a variable that begins as another name of one that the
        # loop carries (before = stage) is taken for a constant by Triton 3.6.
        return gl.where(stage == 0, self.STAGES - 1, stage - 1)
