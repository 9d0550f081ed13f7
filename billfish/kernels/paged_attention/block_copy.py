"""Fused block copy: all copies of a step, over all layers, in one launch.

The copy has snapshot semantics: every source is read before any destination is written, so that
chains (1 to 2, 2 to 3) and swaps (1 to 2, 2 to 1) need no order. A program owns the same slice of
every block, in one layer and of K or V: it reads that slice of all sources into registers, waits
for its own threads, then writes. No program touches another's slice, so none has to wait for
another.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from billfish.kernels._library import launches_early

PAIRS_IN_REGISTERS = 512
"""More pairs than this go through a buffer in device memory."""

_WORDS_A_THREAD = 32  # of 4 bytes, in registers


@triton.jit(do_not_specialize=["num_pairs"])
def _copy_kernel(
    source, target, source_ids, target_ids, num_pairs, words,
    source_layer_stride, source_kv_stride, source_block_stride,
    target_layer_stride, target_kv_stride, target_block_stride,
    PAIRS: tl.constexpr, SLICE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program a (slice of a block, first pair, layer and K or V); strides in 4-byte words."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    pair = tl.program_id(1) * PAIRS + tl.arange(0, PAIRS)
    word = tl.program_id(0) * SLICE + tl.arange(0, SLICE)
    layer = (tl.program_id(2) // 2).to(tl.int64)
    kv = (tl.program_id(2) % 2).to(tl.int64)
    source += layer * source_layer_stride + kv * source_kv_stride
    target += layer * target_layer_stride + kv * target_kv_stride
    from_block = tl.load(source_ids + pair, mask=pair < num_pairs, other=0)
    to_block = tl.load(target_ids + pair, mask=pair < num_pairs, other=0)
    mask = (pair < num_pairs)[:, None] & (word < words)[None, :]
    value = tl.load(
        source + (from_block * source_block_stride)[:, None] + word[None, :], mask=mask, other=0
    )
    tl.debug_barrier()  # every thread of the program has read before one of them writes
    tl.store(target + (to_block * target_block_stride)[:, None] + word[None, :], value, mask=mask)


def has_words(cache: Tensor) -> bool:
    """Whether `as_words` can view a cache: blocks contiguous inside, on 4 bytes, of whole words."""
    block, size = cache[0, 0, 0], cache.element_size()
    where = (cache.data_ptr(), block.nbytes, *(stride * size for stride in cache.stride()[:3]))
    return block.is_contiguous() and all(number % 4 == 0 for number in where)


def as_words(cache: Tensor) -> Tensor:
    """[layers, 2, blocks, 4-byte words] view of a cache for which `has_words` holds."""
    return cache.flatten(3).view(torch.int32)


def launch_copy(
    source: Tensor, target: Tensor, source_ids: Tensor, target_ids: Tensor, pairs: int
) -> None:
    """Copy blocks between two caches of words, `pairs` of them in the registers of a program."""
    num_pairs = source_ids.shape[0]
    layers, _, _, words = source.shape
    # Many programs where there are few pairs; long runs of memory where there are many.
    tile = 2048 if pairs <= 16 else 8192 if pairs <= 128 else 16384
    width = min(tile // pairs, 1024)
    num_warps = min(max(pairs * width // (32 * _WORDS_A_THREAD), 4), 16)
    early = launches_early(source_ids.device)
    grid = (triton.cdiv(words, width), triton.cdiv(num_pairs, pairs), 2 * layers)
    _copy_kernel[grid](
        source, target, source_ids, target_ids, num_pairs, words,
        *source.stride()[:3], *target.stride()[:3],
        PAIRS=pairs, SLICE=width, PDL=early, launch_pdl=early, num_warps=num_warps,
    )  # fmt: skip


def copy(kv_cache: Tensor, src: Tensor, dst: Tensor) -> None:
    """`copy_blocks` on the GPU: kv_cache [L, 2, NB, BS, HKV, D]; src, dst int64 [P], on its device.

    Destinations must differ from each other. Arguments already validated.
    """
    num_pairs = src.shape[0]
    if num_pairs == 0 or kv_cache.numel() == 0:
        return
    if num_pairs > PAIRS_IN_REGISTERS or not has_words(kv_cache):
        kv_cache[:, :, dst] = kv_cache[:, :, src]
        return
    words = as_words(kv_cache)
    launch_copy(words, words, src, dst, triton.next_power_of_2(num_pairs))
