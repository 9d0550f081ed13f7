"""Times writing, copying and swapping KV blocks, each beside a plain copy of as many bytes."""

import time
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from billfish.bench.turns import Call, time_in_turns
from billfish.kernels.paged_attention import copy_blocks, rotate_and_write, swap_blocks, write_kv

LAYERS, BLOCKS, HOST_BLOCKS = 16, 2048, 256
SHAPE = (16, 8, 128)  # a block: tokens, KV heads, head dim
QUERY_HEADS = 32
COPY_SETS = 8
SWAP_LEAD_CYCLES = 1_000_000  # half a millisecond: longer than the host takes to queue a swap

Times = dict[str, tuple[float, float]]


def make_caches() -> Tensor:
    """[layers, key or value, blocks, tokens, KV heads, head dim] in bfloat16."""
    return torch.zeros(LAYERS, 2, BLOCKS, *SHAPE, dtype=torch.bfloat16, device="cuda")


def movement() -> list[dict[str, Any]]:
    """Rows of attention_movement.json: write, rotate and write, copy and swap; `batch` is tokens or
    blocks.
    """
    caches = make_caches()
    block = caches[:, :, 0].nbytes
    token = SHAPE[2] * caches.itemsize
    rows = []
    for tokens in (1, 16, 64, 256, 2048, 16384):
        rows += _rows("write", tokens, 4 * 8 * tokens * token, write_times(caches, tokens))
        moved = 2 * (QUERY_HEADS + 16) * tokens * token
        rows += _rows("rotate and write", tokens, moved, rotate_times(caches, tokens))
    for pairs in (1, 4, 16, 64, 256):
        rows += _rows("copy", pairs, 2 * pairs * block, copy_times(caches, pairs))
        rows += _rows("swap", pairs, pairs * block, swap_times(caches, pairs))
        rows += host_rows(caches, pairs)
    return rows


def _rows(mode: str, size: int, nbytes: int, times: Times) -> list[dict[str, Any]]:
    return [
        {"mode": mode, "batch": size, "impl": impl, "us": round(us, 2), "spread": round(spread, 3),
         "gbps": round(nbytes / us / 1e3, 1)}
        for impl, (us, spread) in times.items()
    ]  # fmt: skip


def _slots(tokens: int) -> Tensor:
    return torch.randperm(BLOCKS * SHAPE[0], device="cuda")[:tokens]


def write_times(caches: Tensor, tokens: int) -> Times:
    """Writing the keys and values of new tokens into their slots."""
    key, value = torch.randn(2, tokens, *SHAPE[1:], device="cuda").to(caches.dtype)
    slots = _slots(tokens)
    source = torch.stack((key, value))
    target = torch.empty_like(source)
    return time_in_turns(
        {
            "billfish": [partial(write_kv, key, value, k, v, slots) for k, v in caches],
            "plain": [partial(target.copy_, source)],
        }
    )


def rotate_times(caches: Tensor, tokens: int) -> Times:
    """QK-norm, rotary embedding and write of a merged QKV: fused, and as torch operations."""
    heads = [QUERY_HEADS, SHAPE[1], SHAPE[1]]
    qkv = torch.randn(tokens, sum(heads), SHAPE[2], device="cuda").to(caches.dtype)
    query, key, value = qkv.split(heads, dim=1)
    slots, positions = _slots(tokens), torch.randint(8192, (tokens,), device="cuda")
    cos_sin = torch.randn(8192, SHAPE[2], device="cuda")
    norms = torch.rand(2, SHAPE[2], device="cuda").to(caches.dtype)
    target = torch.empty_like(qkv)

    def fused(k_cache: Tensor, v_cache: Tensor) -> Tensor:
        return rotate_and_write(
            query, key, value, k_cache, v_cache, slots, positions=positions, cos_sin=cos_sin,
            q_norm=norms[0], k_norm=norms[1],
        )  # fmt: skip

    def turned(x: Tensor, weight: Tensor) -> Tensor:
        low, high = rms_norm(x, x.shape[-1:], weight, 1e-6).float().chunk(2, dim=-1)
        cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)
        return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(x.dtype)

    def separate(k_cache: Tensor, v_cache: Tensor) -> Tensor:
        write_kv(turned(key, norms[1]), value, k_cache, v_cache, slots)
        return turned(query, norms[0])

    return time_in_turns(
        {
            "billfish": [partial(fused, *cache) for cache in caches],
            "separate": [partial(separate, *cache) for cache in caches],
            "plain": [partial(target.copy_, qkv)],
        }
    )


def copy_times(caches: Tensor, pairs: int) -> Times:
    """Each call copies other blocks, as steps do."""
    ids = [torch.randperm(BLOCKS, device="cuda") for _ in range(COPY_SETS)]
    sets = [(each[:pairs].contiguous(), each[pairs : 2 * pairs].contiguous()) for each in ids]
    flat = torch.empty(
        COPY_SETS, 2, pairs * caches[:, :, 0].nbytes, dtype=torch.uint8, device="cuda"
    )
    # A cache that begins 4 bytes past a boundary is copied 4 bytes a thread and instruction.
    narrow = torch.empty(caches.numel() + 2, dtype=caches.dtype, device="cuda")[2:].view_as(caches)

    def one_by_one(each: list[tuple[int, int]]) -> None:
        for s, d in each:
            caches[:, :, d].copy_(caches[:, :, s])

    lists = [list(zip(src.tolist(), dst.tolist(), strict=True)) for src, dst in sets]
    return time_in_turns(
        {
            "billfish": [partial(copy_blocks, caches, src, dst) for src, dst in sets],
            "one by one": [partial(one_by_one, each) for each in lists],
            "4 bytes a thread": [partial(copy_blocks, narrow, src, dst) for src, dst in sets],
            "plain": [partial(part[0].copy_, part[1]) for part in flat],
        }
    )


def _swaps(caches: Tensor, pairs: int) -> dict[str, list[Call]]:
    """To and from pinned host memory; not in a graph, as its block ids are on the host."""
    host = torch.zeros(LAYERS, 2, HOST_BLOCKS, *SHAPE, dtype=caches.dtype, pin_memory=True)
    gpu, cpu = torch.randperm(BLOCKS)[:pairs], torch.randperm(HOST_BLOCKS)[:pairs]
    count = caches[:, :, 0].numel() * pairs
    flat, pinned = caches.view(-1)[:count], host.view(-1)[:count]
    return {
        "billfish out": [partial(swap_blocks, caches, host, gpu, cpu)],
        "billfish in": [partial(swap_blocks, host, caches, cpu, gpu)],
        "plain out": [partial(pinned.copy_, flat, non_blocking=True)],
        "plain in": [partial(flat.copy_, pinned, non_blocking=True)],
    }


def swap_times(caches: Tensor, pairs: int) -> Times:
    """Blocks to host memory and back."""
    return time_in_turns(_swaps(caches, pairs), graphs=False, ahead_cycles=SWAP_LEAD_CYCLES)


def host_rows(caches: Tensor, pairs: int) -> list[dict[str, Any]]:
    """How long the host is busy with queueing a swap."""
    rows = []
    for impl, (call,) in _swaps(caches, pairs).items():
        times = []
        for _ in range(9):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            call()
            times.append((time.perf_counter() - begin) * 1e6)
        us, spread = median(times[1:]), (max(times[1:]) - min(times[1:])) / median(times[1:])
        rows.append({"mode": "swap, host", "batch": pairs, "impl": impl, "us": round(us, 2),
                     "spread": round(spread, 3)})  # fmt: skip
    return rows
