"""What the arguments of paged attention must be: each check raises KernelArgumentError."""

import math

import torch
from torch import Tensor

from billfish.kernels._library import bad_argument, check_activation, check_like, check_no_grad
from billfish.kernels.paged_attention.metadata import AttentionMetadata


def check_new(
    key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
) -> None:
    check_caches(key, "key", k_cache, v_cache)
    if value.shape != key.shape:
        raise bad_argument("value", tuple(value.shape), f"the shape of key, {tuple(key.shape)}")
    check_like("value", value, "key", key)
    check_no_grad("key", key)
    check_no_grad("value", value)
    if key.dim() != 3 or key.shape[1:] != k_cache.shape[2:]:
        raise bad_argument("key", tuple(key.shape), f"[T, *{tuple(k_cache.shape[2:])}]")
    if key.stride(2) != 1 or value.stride(2) != 1:
        raise bad_argument(
            "key and value", f"strides {key.stride()}", "a contiguous last dimension"
        )
    check_indices("slot_mapping", slot_mapping, torch.int64, key.shape[0], key.device)


def check_pair(names: str, one: Tensor | None, other: Tensor | None) -> None:
    if (one is None) != (other is None):
        raise bad_argument(names, "one", "both or neither")


def scale_of(scale: float | None, head_dim: int) -> float:
    if scale is None:
        return head_dim**-0.5
    if not -math.inf < scale < math.inf:
        raise bad_argument("scale", scale, "a finite number")
    return float(scale)  # an integer would be compiled into a GPU's kernels


def check_angles(cos_sin: Tensor, head_dim: int, device: torch.device) -> None:
    rotary_dim = cos_sin.shape[1] if cos_sin.dim() == 2 else 0
    if (
        cos_sin.dtype != torch.float32
        or not 0 < rotary_dim <= head_dim
        or rotary_dim % 2
        or cos_sin.device != device
        or cos_sin.stride(1) != 1
    ):
        got = f"{cos_sin.dtype} {tuple(cos_sin.shape)} on {cos_sin.device}"
        raise bad_argument(
            "cos_sin", got, f"float32 [max_pos, an even number up to {head_dim}] on {device}"
        )


def check_caches(new: Tensor, name: str, k_cache: Tensor, v_cache: Tensor) -> None:
    check_activation(name, new)
    if k_cache.dim() != 4 or 0 in k_cache.shape:
        expected = "non-empty [num_blocks, block_size, HKV, D]"
        raise bad_argument("k_cache", tuple(k_cache.shape), expected)
    if v_cache.shape != k_cache.shape:
        expected = f"the shape of k_cache, {tuple(k_cache.shape)}"
        raise bad_argument("v_cache", tuple(v_cache.shape), expected)
    check_like("k_cache", k_cache, name, new)
    check_like("v_cache", v_cache, name, new)
    if k_cache.stride(3) != 1 or v_cache.stride(3) != 1:
        raise bad_argument(
            "k_cache and v_cache", f"strides {k_cache.stride()} and {v_cache.stride()}",
            "a contiguous last dimension",
        )  # fmt: skip


def check_kv_cache(name: str, cache: Tensor) -> None:
    check_activation(name, cache)
    if cache.dim() != 6 or cache.shape[1] != 2:
        expected = "[num_layers, 2, num_blocks, block_size, HKV, D]"
        raise bad_argument(name, tuple(cache.shape), expected)


def check_indices(
    name: str, indices: Tensor, dtype: torch.dtype, length: int | None, device: torch.device
) -> None:
    if (
        indices.dtype != dtype
        or indices.dim() != 1
        or (length is not None and indices.shape[0] != length)
        or indices.device != device
    ):
        got = f"{indices.dtype} {tuple(indices.shape)} on {indices.device}"
        raise bad_argument(name, got, f"{dtype} [{'P' if length is None else length}] on {device}")


def check_metadata(metadata: AttentionMetadata, query: Tensor) -> None:
    table, requests = metadata.block_table, metadata.seq_lens.shape[0]
    if table.dtype != torch.int32 or table.dim() != 2 or table.shape[0] != requests:
        got = f"{table.dtype} {tuple(table.shape)}"
        raise bad_argument("metadata.block_table", got, f"int32 [{requests}, max_blocks]")
    device = query.device
    if table.device != device:
        raise bad_argument("metadata.block_table", table.device, f"the device of query, {device}")
    check_indices("metadata.seq_lens", metadata.seq_lens, torch.int32, requests, device)
    check_indices("metadata.query_start", metadata.query_start, torch.int32, requests + 1, device)
    if metadata.slot_mapping.shape[0] != query.shape[0]:
        expected = f"{metadata.slot_mapping.shape[0]} tokens, as the metadata"
        raise bad_argument("query", tuple(query.shape), expected)
