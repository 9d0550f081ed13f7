"""What differs between the Triton releases that Billfish's Gluon kernels support.

Gluon is experimental and renames things from release to release. Kernels take the moving names
from here; on a release outside `SUPPORTED` the portable Triton kernels run instead.
"""

import triton

SUPPORTED = ((3, 6), (3, 7))
"""The (major, minor) Triton releases on which every Gluon kernel is compiled and checked."""

TRITON_VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])


def gluon_supported() -> bool:
    """Whether the Gluon kernels may run on the installed Triton."""
    return TRITON_VERSION in SUPPORTED


if gluon_supported():
    from triton.experimental.gluon import language as _gl

    # A barrier among the threads of one warp-specialized partition (or of the block outside one).
    barrier = _gl.barrier if hasattr(_gl, "barrier") else _gl.thread_barrier
