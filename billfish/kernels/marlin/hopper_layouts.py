"""Register layouts of the Hopper kernel: which thread holds which packed word."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def _bits(count):
    return [1 << i for i in range(count.bit_length() - 1)]


@gluon.constexpr_function
def code_layout(units):
    """Codes of `units` units [units, 1, 32, 32]: lane 4 r + c of warp w loads words [w, r, c, 0:4].

    That is 16 bytes a thread and 512 consecutive bytes a warp, free of bank conflicts.
    """
    registers = [[0, 0, 0, 1], [0, 0, 0, 2], [0, 0, 16, 0]]
    registers += [[b, 0, 0, 0] for b in _bits(units)]
    lanes = [[0, 0, 0, 4], [0, 0, 0, 8], [0, 0, 0, 16], [0, 0, 1, 0], [0, 0, 2, 0]]
    warps = [[0, 0, 4, 0], [0, 0, 8, 0]]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [units, 1, 32, 32])


@gluon.constexpr_function
def meta_layout(units, groups):
    """Scales or zeros [units, 1, groups, 32]: lane 4 r + c of warp w holds word [w, r]."""
    registers = [[0, 0, b, 0] for b in _bits(groups)] + [[b, 0, 0, 0] for b in _bits(units)]
    lanes = [[0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 1], [0, 0, 0, 2], [0, 0, 0, 4]]
    warps = [[0, 0, 0, 8], [0, 0, 0, 16]]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [units, 1, groups, 32])


@gluon.constexpr_function
def output_layout(rows):
    """Outputs [rows, tokens]: a thread stores 16 bytes of consecutive outputs of one token."""
    lanes = rows // 8
    return gl.BlockedLayout([8, 1], [lanes, 32 // lanes], [1, 4], [0, 1])


@gluon.constexpr_function
def queue_shape(stages, block_shape):
    """The shape of a queue in shared memory whose stages each take one block of a descriptor."""
    return [stages, *block_shape]
