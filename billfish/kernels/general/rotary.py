"""Rotary position embedding (Su et al., 2021, arXiv:2104.09864), halves rotated as in GPT-NeoX, and
its derivative: the same rotation backwards.

The technique's switch: `rotary_gpu.rotary_embedding(..., fused=False)` turns query and key in a
launch each.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from billfish.kernels._library import (
    bad_argument,
    check_activation,
    check_dense,
    check_like,
    check_no_grad,
    check_tensors,
    differentiate,
    register,
)

_GPU = "billfish.kernels.general.rotary_gpu"


def rotary_embedding_reference(
    query: Tensor, key: Tensor, positions: Tensor, cos_sin: Tensor
) -> tuple[Tensor, Tensor]:
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)

    def rotate(x: Tensor) -> Tensor:
        half = cos.shape[-1]
        first, second, rest = x.tensor_split((half, 2 * half), dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)

    return rotate(query), rotate(key)


def rotate_both(
    query: Tensor, key: Tensor, positions: Tensor, cos_sin: Tensor
) -> tuple[Tensor, Tensor]:
    query, key = turned(query, key, angles_of(positions, cos_sin))
    return query.contiguous(), key.contiguous()


def turned(query: Tensor, key: Tensor, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Both, by angles of `angles_of`; perhaps as views of one new tensor."""
    heads = query.shape[1]
    if _adjacent(query, key):  # views of a merged QKV: both at once
        both = query.as_strided((len(query), heads + key.shape[1], query.shape[2]), query.stride())
        both = rotate(both, angles).to(query.dtype)
        return both[:, :heads], both[:, heads:]
    return rotate(query, angles).to(query.dtype), rotate(key, angles).to(key.dtype)


def angles_of(positions: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and signed sine of every dimension, float32 [T, 1, rotary_dim]: see `rotate`."""
    try:
        rows = cos_sin.index_select(0, positions)
    except (IndexError, RuntimeError) as error:  # RuntimeError: an empty table
        got = f"{int(positions.min())} to {int(positions.max())}"
        raise bad_argument("positions", got, f"0 to {cos_sin.shape[0] - 1}") from error
    cos, sin = rows.unsqueeze(1).chunk(2, dim=-1)
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotate(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """x [T, H, D] turned, in float32: x * cos + (x, its halves exchanged) * (-sin, sin)."""
    cos, sin = angles
    rotary_dim = cos.shape[-1]
    turned, rest = x[..., :rotary_dim].float(), x[..., rotary_dim:]
    turned = torch.addcmul(turned * cos, turned.roll(rotary_dim // 2, dims=-1), sin)
    return turned if rest.shape[-1] == 0 else torch.cat((turned, rest.float()), dim=-1)


def _adjacent(query: Tensor, key: Tensor) -> bool:
    """Whether the key's heads lie right behind the query's, in rows of the same length."""
    end = query.storage_offset() + query.shape[1] * query.stride(1)
    return (
        key.storage_offset() == end
        and query.stride() == key.stride()
        and query.untyped_storage().data_ptr() == key.untyped_storage().data_ptr()
    )


def _fake(query: Tensor, key: Tensor, positions: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape)


def _backward_cpu(
    dquery: Tensor, dkey: Tensor, positions: Tensor, cos_sin: Tensor
) -> tuple[Tensor, Tensor]:
    cos, sin = angles_of(positions, cos_sin)
    dq, dk = (rotate(dy, (cos, -sin)).to(dy.dtype).contiguous() for dy in (dquery, dkey))
    return dq, dk


_rotary_embedding: Callable[..., tuple[Tensor, Tensor]] = register(
    "rotary_embedding(Tensor query, Tensor key, Tensor positions, Tensor cos_sin) "
    "-> (Tensor, Tensor)",
    fake=_fake,
    cpu=rotate_both,
    gpu=_GPU,
)
_rotary_embedding_backward: Callable[..., tuple[Tensor, Tensor]] = register(
    "rotary_embedding_backward(Tensor dquery, Tensor dkey, Tensor positions, Tensor cos_sin) "
    "-> (Tensor, Tensor)",
    fake=_fake,
    cpu=_backward_cpu,
    gpu=_GPU,
)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[2:])


def _backward(ctx: Any, dquery: Tensor, dkey: Tensor) -> tuple[Tensor | None, ...]:
    return *_rotary_embedding_backward(dquery, dkey, *ctx.saved_tensors), None, None


differentiate("rotary_embedding", _save, _backward)


def rotary_embedding(
    query: Tensor, key: Tensor, positions: Tensor, cos_sin: Tensor
) -> tuple[Tensor, Tensor]:
    """Rotate the first rotary_dim dimensions of every head by the angles of its token's position.

    query: [T, H, D], key: [T, HKV, D], float32, bfloat16 or float16, any strides (views of a merged
    QKV too). positions: int64 [T]. cos_sin: float32 [max_pos, rotary_dim], cosines in the first
    half, sines in the second; rotary_dim even, at most D. Dimension i is paired with
    i + rotary_dim / 2. Computed in float32, rounded once. Returns new, contiguous (query, key).
    Differentiable once, but not by cos_sin. Deterministic, forward and backward.

    Raises KernelArgumentError: dtype, device or shape is wrong, cos_sin requires a gradient; on a
    CPU also a position outside the table, which on a GPU gives NaN.
    """
    check_activation("query", query)
    if query.dim() != 3:
        raise bad_argument("query", tuple(query.shape), "[T, H, D]")
    check_tensors(key=key, positions=positions, cos_sin=cos_sin)
    tokens, _, head_dim = query.shape
    if key.dim() != 3 or key.shape[0] != tokens or key.shape[2] != head_dim:
        raise bad_argument("key", tuple(key.shape), f"[{tokens}, HKV, {head_dim}]")
    check_like("key", key, "query", query)
    if positions.dtype != torch.int64 or positions.shape != (tokens,):
        got = f"{positions.dtype} {tuple(positions.shape)}"
        raise bad_argument("positions", got, f"int64 [{tokens}]")
    if cos_sin.dtype != torch.float32 or cos_sin.dim() != 2:
        got = f"{cos_sin.dtype} {tuple(cos_sin.shape)}"
        raise bad_argument("cos_sin", got, "float32 [max_pos, rotary_dim]")
    check_no_grad("cos_sin", cos_sin)
    check_dense("positions", positions)
    check_dense("cos_sin", cos_sin)
    rotary_dim = cos_sin.shape[1]
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise bad_argument("cos_sin", tuple(cos_sin.shape), f"rotary_dim even, 2 to {head_dim}")
    if positions.device != query.device or cos_sin.device != query.device:
        got = f"{positions.device} and {cos_sin.device}"
        raise bad_argument("positions and cos_sin", got, f"the device of query, {query.device}")
    return _rotary_embedding(query, key, positions, cos_sin)
