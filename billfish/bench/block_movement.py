"""Times writing, copying and swapping KV blocks, each beside a plain copy of as many bytes."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from billfish.bench.turns import Call, time_in_turns
from billfish.kernels.paged_attention import copy_blocks, swap_blocks, write_kv

LAYERS, BLOCKS, HOST_BLOCKS = 16, 2048, 256
SHAPE = (16, 8, 128)  # a block: tokens, KV heads, head dim


def movement() -> list[dict[str, Any]]:
    """Rows of attention.json for the modes write, copy and swap; `batch` is tokens or blocks."""
    caches = torch.zeros(LAYERS, 2, BLOCKS, *SHAPE, dtype=torch.bfloat16, device="cuda")
    block = caches[:, :, 0].nbytes
    rows = []
    for tokens in (1, 64, 2048, 16384):
        rows += _rows("write", tokens, 4 * tokens * 8 * 128 * 2, write_times(caches, tokens))
    for pairs in (1, 16, 256):
        rows += _rows("copy", pairs, 2 * pairs * block, copy_times(caches, pairs))
        rows += _rows("swap", pairs, pairs * block, swap_times(caches, pairs))
    return rows


def _rows(
    mode: str, size: int, nbytes: int, times: dict[str, tuple[float, float]]
) -> list[dict[str, Any]]:
    return [
        {"mode": mode, "batch": size, "impl": impl, "us": round(us, 2), "spread": round(spread, 3),
         "gbps": round(nbytes / us / 1e3, 1)}
        for impl, (us, spread) in times.items()
    ]  # fmt: skip


def write_times(caches: Tensor, tokens: int) -> dict[str, tuple[float, float]]:
    key, value = torch.randn(2, tokens, *SHAPE[1:], device="cuda").to(caches.dtype)
    slots = torch.randperm(BLOCKS * SHAPE[0], device="cuda")[:tokens]
    source = torch.stack((key, value))
    target = torch.empty_like(source)
    return time_in_turns(
        {
            "billfish": [partial(write_kv, key, value, k, v, slots) for k, v in caches],
            "plain": [partial(target.copy_, source)],
        }
    )


def copy_times(caches: Tensor, pairs: int) -> dict[str, tuple[float, float]]:
    ids = torch.randperm(BLOCKS, device="cuda")
    src, dst = ids[:pairs].contiguous(), ids[pairs : 2 * pairs].contiguous()
    flat = torch.empty(2, pairs * caches[:, :, 0].nbytes, dtype=torch.uint8, device="cuda")
    each = list(zip(src.tolist(), dst.tolist(), strict=True))

    def one_by_one() -> None:
        for s, d in each:
            caches[:, :, d].copy_(caches[:, :, s])

    return time_in_turns(
        {
            "billfish": [partial(copy_blocks, caches, src, dst)],
            "one by one": [one_by_one],
            "plain": [partial(flat[0].copy_, flat[1])],
        }
    )


def swap_times(caches: Tensor, pairs: int) -> dict[str, tuple[float, float]]:
    """To and from pinned host memory; not in a graph, as its block ids are on the host."""
    host = torch.zeros(LAYERS, 2, HOST_BLOCKS, *SHAPE, dtype=caches.dtype, pin_memory=True)
    gpu, cpu = torch.randperm(BLOCKS)[:pairs], torch.randperm(HOST_BLOCKS)[:pairs]
    count = caches[:, :, 0].numel() * pairs
    flat, pinned = caches.view(-1)[:count], host.view(-1)[:count]
    calls: dict[str, list[Call]] = {
        "billfish out": [partial(swap_blocks, caches, host, gpu, cpu)],
        "billfish in": [partial(swap_blocks, host, caches, cpu, gpu)],
        "plain out": [partial(pinned.copy_, flat, non_blocking=True)],
        "plain in": [partial(flat.copy_, pinned, non_blocking=True)],
    }
    return time_in_turns(calls, graphs=False)
