"""Attention over a KV cache kept in blocks (Kwon et al., 2023, arXiv:2309.06180).

One tensor holds the cache of all layers: kv_cache [num_layers, 2, num_blocks, block_size,
num_kv_heads, head_dim]. A layer sees k_cache = kv_cache[l, 0] and v_cache = kv_cache[l, 1].

    metadata = AttentionMetadata.build(block_table, seq_lens, query_lens, block_size)
    write_kv(key, value, k_cache, v_cache, metadata.slot_mapping)
    out = attend(query, k_cache, v_cache, metadata)
"""

import math
from collections.abc import Callable
from typing import Any, Literal, overload

import torch
from torch import Tensor

from billfish.kernels._library import (
    bad_argument,
    check_like,
    check_no_grad,
    is_plain_cpu,
    register,
)
from billfish.kernels.paged_attention import cpu, cpu_decode
from billfish.kernels.paged_attention._arguments import (
    check_angles,
    check_caches,
    check_indices,
    check_kv_cache,
    check_metadata,
    check_new,
    check_pair,
    scale_of,
)
from billfish.kernels.paged_attention.metadata import FARTHEST, AttentionMetadata

__all__ = [
    "AttentionMetadata",
    "attend",
    "copy_blocks",
    "rotate_and_write",
    "swap_blocks",
    "write_and_attend",
    "write_kv",
]


def _fake_attend(query: Tensor, *arguments: object) -> Tensor:
    return query.new_empty(query.shape)


def _fake_nothing(*arguments: object) -> None:
    return None


def _cpu_attend(*arguments: Any) -> Tensor:
    *step, _plan, _planned_len, lse = arguments
    return cpu.attend(*step, lse=lse)


_GPU = "billfish.kernels.paged_attention.gpu"

_write_kv = register(
    "write_kv(Tensor key, Tensor value, Tensor(a!) k_cache, Tensor(b!) v_cache, "
    "Tensor slot_mapping) -> ()",
    fake=_fake_nothing,
    cpu=cpu.write_kv,
    gpu=_GPU,
)
_rotate_and_write: Callable[..., Tensor] = register(
    "rotate_and_write(Tensor query, Tensor key, Tensor value, Tensor(a!) k_cache, "
    "Tensor(b!) v_cache, Tensor slot_mapping, Tensor? positions, Tensor? cos_sin, "
    "Tensor? q_norm, Tensor? k_norm, float eps) -> Tensor",
    fake=_fake_attend,
    cpu=cpu.rotate_and_write,
    gpu=_GPU,
)
_attend: Callable[..., Tensor] = register(
    "attend(Tensor query, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor seq_lens, "
    "Tensor query_start, SymInt max_query_len, SymInt max_seq_len, float scale, "
    "int? sliding_window, float? soft_cap, Tensor? sinks, Tensor(a!)[] plan, SymInt planned_len, "
    "Tensor(b!)? lse) -> Tensor",
    fake=_fake_attend,
    cpu=_cpu_attend,
    gpu=_GPU,
)
_copy_blocks = register(
    "copy_blocks(Tensor(a!) kv_cache, Tensor src, Tensor dst) -> ()",
    fake=_fake_nothing,
    cpu=cpu.copy_blocks,
    gpu=_GPU,
)
_swap_blocks = register(
    "swap_blocks(Tensor src_cache, Tensor(a!) dst_cache, Tensor src_blocks, Tensor dst_blocks) "
    "-> ()",
    fake=_fake_nothing,
    cpu=cpu.swap_blocks,
    gpu=_GPU,
)


def write_kv(
    key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
) -> None:
    """Write the keys and values of T tokens to their slots, in place.

    key, value: [T, HKV, D], last dimension contiguous (views of a merged QKV too). k_cache,
    v_cache: [num_blocks, block_size, HKV, D] of the same dtype, float32, bfloat16 or float16, last
    dimension contiguous. slot_mapping: int64 [T], block * block_size + offset, each slot at most
    once; a token with a negative slot, -1 by convention, is skipped. There is no derivative.

    Raises KernelArgumentError: dtype, device, shape or stride is wrong; on a CPU also a slot
    outside the cache.
    """
    check_new(key, value, k_cache, v_cache, slot_mapping)
    _write_kv(key, value, k_cache, v_cache, slot_mapping)


def rotate_and_write(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    positions: Tensor | None = None,
    cos_sin: Tensor | None = None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """Normalize and rotate query and key, write key and value to the cache: one launch on a GPU.

    query: [T, H, D], and the arguments of `write_kv`. positions int64 [T] and cos_sin float32
    [max_pos, rotary_dim] (cosines, then sines), both or neither, rotate the first rotary_dim
    dimensions, dimension i paired with i + rotary_dim / 2. q_norm, k_norm: [D], floating point,
    both or neither, weights of an RMS norm over D before that (as in Qwen3). Computed in float32
    and rounded once, where separate steps round after each. A token with slot -1 is not written,
    but its query is returned too: a new, contiguous [T, H, D].

    Raises KernelArgumentError: dtype, device, shape or stride is wrong; on a CPU also a slot or a
    position outside the cache or the table.
    """
    check_new(key, value, k_cache, v_cache, slot_mapping)
    tokens, _, head_dim = key.shape
    if query.dim() != 3 or (query.shape[0], query.shape[2]) != (tokens, head_dim):
        raise bad_argument("query", tuple(query.shape), f"[{tokens}, H, {head_dim}]")
    check_like("query", query, "key", key)
    check_no_grad("query", query)
    if query.stride(2) != 1:
        raise bad_argument("query", f"strides {query.stride()}", "a contiguous last dimension")
    check_pair("positions and cos_sin", positions, cos_sin)
    check_pair("q_norm and k_norm", q_norm, k_norm)
    if positions is not None and cos_sin is not None:
        check_indices("positions", positions, torch.int64, tokens, key.device)
        check_angles(cos_sin, head_dim, key.device)
    for name, weight in (("q_norm", q_norm), ("k_norm", k_norm)):
        if weight is not None and (
            weight.shape != (head_dim,)
            or not weight.is_floating_point()
            or weight.device != key.device
            or weight.stride(0) != 1
        ):
            got = f"{weight.dtype} {tuple(weight.shape)} on {weight.device}"
            raise bad_argument(name, got, f"floating point [{head_dim}] on {key.device}")
    return _rotate_and_write(
        query, key, value, k_cache, v_cache, slot_mapping, positions, cos_sin, q_norm, k_norm,
        float(eps),
    )  # fmt: skip


@overload
def attend(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    metadata: AttentionMetadata,
    *,
    scale: float | None = ...,
    sliding_window: int | None = ...,
    soft_cap: float | None = ...,
    sinks: Tensor | None = ...,
    return_lse: Literal[False] = ...,
) -> Tensor: ...


@overload
def attend(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    metadata: AttentionMetadata,
    *,
    scale: float | None = ...,
    sliding_window: int | None = ...,
    soft_cap: float | None = ...,
    sinks: Tensor | None = ...,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def attend(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    metadata: AttentionMetadata,
    *,
    scale: float | None = None,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Causal attention of new tokens over the cached keys and values of their sequences.

    query: [T, H, D], last dimension contiguous; the tokens of each request are the last ones of its
    sequence, and their own keys are in the cache already. H is a multiple of HKV (grouped queries).
    k_cache, v_cache: as for `write_kv`. scale: of the logits, by default 1 / sqrt(D).
    sliding_window: key j is visible to query i where i - j < sliding_window, at least 1. soft_cap:
    logits become soft_cap * tanh(logit / soft_cap), above 0. sinks: float32 or query's dtype [H],
    one more logit a head in the denominator of the softmax. Softmax is in float32. A query that
    sees no key gives 0. Returns a contiguous [T, H, D]. There is no derivative.

    return_lse: return (that, float32 [T, H]), the natural logarithms of the denominators: by them,
    attention over parts of a context can be merged. A query that sees no key, or belongs to no
    request, has -inf there, or its sink.

    On a GPU: float16 or bfloat16, D of 64, 80, 96, 112, 128, 192 or 256, blocks of at most 256
    tokens, compute capability 8.0 or newer.

    Raises KernelArgumentError: dtype, device, shape, stride or value is wrong; on a CPU also a
    block id outside the cache where a query would read it.
    """
    check_caches(query, "query", k_cache, v_cache)
    heads, head_dim = query.shape[1:] if query.dim() == 3 else (0, 0)
    kv_heads = k_cache.shape[2]
    if head_dim != k_cache.shape[3] or heads == 0 or heads % kv_heads:
        raise bad_argument(
            "query", tuple(query.shape), f"[T, a multiple of {kv_heads}, {k_cache.shape[3]}]"
        )
    if query.stride(2) != 1:
        raise bad_argument("query", f"strides {query.stride()}", "a contiguous last dimension")
    check_metadata(metadata, query)
    if sliding_window is not None and (type(sliding_window) is not int or sliding_window < 1):
        raise bad_argument("sliding_window", sliding_window, "an integer of at least 1")
    if soft_cap is not None and not 0 < soft_cap < math.inf:
        raise bad_argument("soft_cap", soft_cap, "finite and above 0")
    scale = scale_of(scale, head_dim)
    check_no_grad("query", query)
    if sinks is not None and (
        sinks.shape != (heads,)
        or sinks.dtype not in (torch.float32, query.dtype)
        or sinks.device != query.device
    ):
        got = f"{sinks.dtype} {tuple(sinks.shape)} on {sinks.device}"
        raise bad_argument("sinks", got, f"float32 or {query.dtype} [{heads}] on {query.device}")
    workspace: list[Tensor] = []
    planned_len = 0
    plan = next((p for p in metadata.plans if p.fits(query, k_cache, sliding_window)), None)
    if plan:
        workspace, planned_len = list(plan.workspace), plan.max_query_len
    if sliding_window is not None:
        sliding_window = min(sliding_window, FARTHEST)
    soft_cap = None if soft_cap is None else float(soft_cap)
    lse = query.new_empty(query.shape[:2], dtype=torch.float32) if return_lse else None
    out = _attend(
        query, k_cache, v_cache, metadata.block_table, metadata.seq_lens, metadata.query_start,
        metadata.max_query_len, metadata.max_seq_len, scale, sliding_window,
        soft_cap, sinks, workspace, planned_len, lse,
    )  # fmt: skip
    return out if lse is None else (out, lse)


def write_and_attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    metadata: AttentionMetadata,
    *,
    positions: Tensor | None = None,
    cos_sin: Tensor | None = None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    scale: float | None = None,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """`rotate_and_write`, then `attend`: a layer's attention. See both for arguments and errors.

    In inference on a CPU, layers that share a metadata and have no options but a scale and angles
    prepare a step that only decodes once. positions, cos_sin and the tensors of that metadata must
    then not change while it is used.
    """
    plain = q_norm is None and k_norm is None and soft_cap is None and sinks is None
    in_sight = sliding_window is None or sliding_window >= metadata.max_seq_len
    if plain and in_sight and metadata.max_query_len == 1 and is_plain_cpu(query):
        step = metadata.decode_step(k_cache)
        if step is not None and cpu_decode.fits(query, key, value, k_cache, v_cache, step):
            scale = scale_of(scale, query.shape[2])
            angles = _angles(step, positions, cos_sin, key)
            return cpu_decode.write_and_attend(
                query, key, value, k_cache, v_cache, step, angles, scale
            )
    query = rotate_and_write(
        query, key, value, k_cache, v_cache, metadata.slot_mapping,
        positions=positions, cos_sin=cos_sin, q_norm=q_norm, k_norm=k_norm, eps=eps,
    )  # fmt: skip
    return attend(
        query, k_cache, v_cache, metadata,
        scale=scale, sliding_window=sliding_window, soft_cap=soft_cap, sinks=sinks,
    )  # fmt: skip


def copy_blocks(kv_cache: Tensor, src: Tensor, dst: Tensor) -> None:
    """Copy block src[i] to block dst[i], for keys and values of all layers at once, in place.

    kv_cache: [num_layers, 2, num_blocks, block_size, HKV, D]. src, dst: int64 [P] on its device,
    dst without repeats. All sources are read before any destination is written, so chains and
    exchanges are well defined.

    Raises KernelArgumentError: dtype, device or shape is wrong; on a CPU also a block id outside
    the cache.
    """
    check_kv_cache("kv_cache", kv_cache)
    check_indices("src", src, torch.int64, None, kv_cache.device)
    check_indices("dst", dst, torch.int64, src.shape[0], kv_cache.device)
    _copy_blocks(kv_cache, src, dst)


def swap_blocks(
    src_cache: Tensor, dst_cache: Tensor, src_blocks: Tensor, dst_blocks: Tensor
) -> None:
    """Copy blocks of all layers from one cache to another, as from a GPU to pinned host memory.

    src_cache, dst_cache: [num_layers, 2, num_blocks, block_size, HKV, D], different tensors whose
    num_blocks and device may differ. src_blocks, dst_blocks: int64 [P] on the CPU, dst_blocks
    without repeats.

    Raises KernelArgumentError: dtype, device or shape is wrong, or a block id is outside a cache.
    """
    check_kv_cache("src_cache", src_cache)
    check_kv_cache("dst_cache", dst_cache)
    if src_cache.dtype != dst_cache.dtype:
        raise bad_argument("dst_cache", dst_cache.dtype, f"that of src_cache, {src_cache.dtype}")
    source, target = list(src_cache.shape), list(dst_cache.shape)
    if source[:2] + source[3:] != target[:2] + target[3:]:
        raise bad_argument("dst_cache", target, f"{source} but for the number of blocks")
    cpu_device = torch.device("cpu")
    check_indices("src_blocks", src_blocks, torch.int64, None, cpu_device)
    check_indices("dst_blocks", dst_blocks, torch.int64, src_blocks.shape[0], cpu_device)
    # What calls an operation goes by its first tensor; between two devices torch has to choose.
    one_device = src_cache.device == dst_cache.device
    swap = _swap_blocks if one_device else torch.ops.billfish.swap_blocks.default
    swap(src_cache, dst_cache, src_blocks, dst_blocks)


def _angles(
    step: cpu_decode.DecodeStep, positions: Tensor | None, cos_sin: Tensor | None, key: Tensor
) -> cpu_decode.Angles | None:
    """Of the step's tokens, checked and looked up by the first layer that asks."""
    check_pair("positions and cos_sin", positions, cos_sin)
    if positions is None or cos_sin is None:
        return None
    angles = step.known_angles(positions, cos_sin)
    if angles is None:
        check_indices("positions", positions, torch.int64, key.shape[0], key.device)
        check_angles(cos_sin, key.shape[2], key.device)
        angles = step.look_up(positions, cos_sin)
    return angles
