"""The kernel of `read_ahead`."""

import triton
import triton.language as tl
from torch import Tensor

CHUNK = 4096  # bytes
_PROGRAMS = 128
_THREADS = 64


@triton.jit(do_not_specialize=["chunks", "share", "taken"])
def _read_ahead_kernel(start, chunks, share, taken, THREADS: tl.constexpr):
    """Program p: the first `taken` of chunks p * share, ..., each of 4096 bytes."""
    first = tl.program_id(0) * share
    for begin in range(0, taken, THREADS):
        chunk = first + tl.minimum(begin + tl.arange(0, THREADS), taken - 1)
        # Past the end the last one is asked for again, which costs nothing.
        at = start + tl.minimum(chunk, chunks - 1).to(tl.int64) * 1024
        tl.inline_asm_elementwise(
            "cp.async.bulk.prefetch.L2.global [$1], 4096; mov.u32 $0, 0;", "=r,l", [at],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


def read(weights: Tensor, most: int) -> None:
    """Have the weights, int32 and contiguous, read into the L2 cache: up to `most` bytes of them,
    in equal parts from where each multiprocessor will begin."""
    chunks = weights.nbytes // CHUNK
    if not chunks:
        return
    share = triton.cdiv(chunks, _PROGRAMS)
    taken = max(1, min(share, most // (_PROGRAMS * CHUNK)))
    _read_ahead_kernel[(_PROGRAMS,)](weights, chunks, share, taken, THREADS=_THREADS, num_warps=2)
