"""Swap: KV blocks to and from host memory, all blocks over all layers in one launch.

Pinned host memory is mapped into the address space of the GPU, so one kernel copies between the
scattered blocks of both sides, with no staging buffer and no call a block. It is queued on the
current stream like any kernel: the blocks may be reused by later work of that stream, and other
streams (or the host) order themselves after it with an event.
"""

import torch
from torch import Tensor

from billfish.kernels.paged_attention.block_copy import as_words, has_words, launch_copy

_PAIRS = 4


def swap(src_cache: Tensor, dst_cache: Tensor, src_blocks: Tensor, dst_blocks: Tensor) -> None:
    """`swap_blocks` where one cache is on a GPU and the other in host memory or on a GPU.

    Block ids int64 [P] on the CPU. With host memory that is not pinned, or blocks that are not of
    whole words, the copy is staged and waits for the device. Arguments already validated.
    """
    if src_blocks.shape[0] == 0 or src_cache.numel() == 0:
        return
    caches = (src_cache, dst_cache)
    device = next(cache.device for cache in caches if cache.is_cuda)
    mapped = all(cache.device == device or cache.is_pinned() for cache in caches)
    if mapped and all(map(has_words, caches)):
        with torch.cuda.device(device):
            ids = _on_device(src_blocks, dst_blocks, device)
            launch_copy(as_words(src_cache), as_words(dst_cache), ids[0], ids[1], _PAIRS)
    else:
        staged = src_cache[:, :, src_blocks.to(src_cache.device)].to(dst_cache.device)
        dst_cache[:, :, dst_blocks.to(dst_cache.device)] = staged


def _on_device(src_blocks: Tensor, dst_blocks: Tensor, device: torch.device) -> Tensor:
    """Both [2, P], on their way: from pinned memory, so that the host does not wait."""
    ids = torch.empty(2, src_blocks.shape[0], dtype=torch.int64, device="cpu", pin_memory=True)
    ids[0], ids[1] = src_blocks, dst_blocks
    return ids.to(device, non_blocking=True)
