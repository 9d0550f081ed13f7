"""W4A16 on a CPU: torch's int4 operation where it is fast, else dequantize and multiply.

Both layouts keep the codes column by column, two rows of the weight in a byte, in blocks of B rows:
codes[b, k, j] holds row b * B + j in its low nibble and row b * B + B / 2 + j in its high one.
Rows are the contiguous dimension, so scales broadcast over whole vectors. Rows are padded to whole
blocks.

    int4pack  torch's own packing, flat, B = 64 with AVX-512; then [G, N', 2], scale and shift, as
              the operation wants them.
    nibble    codes [blocks, K, B / 2] with B as large as the cache likes; then scale [G, N'] and,
              unless symmetric, shift [G, N'].

W = scale * (code - 8) + shift.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import pad, silu

from billfish.kernels._library import bad_argument

if TYPE_CHECKING:
    from billfish.kernels.marlin.weight import PackedWeight

INT4_MAX_ROWS = 64
"""Rows of x up to which torch's int4 operation beats dequantizing first.

Both cost the same time a weight whatever the shape, so one number is enough: the operation's time
grows with every row, and dequantizing costs the same for all.
"""

_INT4_GROUPS = (128, 64, 32)
_RUN_ELEMENTS = 1 << 21
"""Weights dequantized at once: enough for the calls to cost little, few enough to reuse memory."""


@lru_cache(maxsize=1)
def int4_block_rows() -> int:
    """Rows in a block of torch's int4 packing on this CPU, 0 if it is of another kind.

    Learned from a packed pattern, because it depends on the vector unit.
    """
    rows = torch.arange(256, device="cpu")
    digits = [
        torch.ops.aten._convert_weight_to_int4pack_for_cpu(
            (rows >> shift & 15).int().view(-1, 1).expand(256, 2).contiguous(), 1
        ).flatten()
        for shift in (0, 4)
    ]
    low = (digits[0] & 15).int() + 16 * (digits[1] & 15).int()
    high = (digits[0] >> 4).int() + 16 * (digits[1] >> 4).int()
    block = 2 * int(high[0])
    if block == 0 or 256 % block:
        return 0
    expected = rows.view(-1, 1, 2, block // 2).expand(-1, 2, -1, -1)
    same = torch.equal(low, expected[:, :, 0].flatten().int()) and torch.equal(
        high, expected[:, :, 1].flatten().int()
    )
    return block if same else 0


def pack(
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    offsets: Tensor | None,
    *,
    group_size: int,
    dtype: torch.dtype,
    g_idx: Tensor | None,
    silu_mul: bool,
) -> dict[str, Any]:
    """The fields of a PackedWeight that belong to the layout.

    codes are in stored order; g_idx is given where that order does not make groups contiguous.
    Rows stay in their order with `silu_mul` too.
    """
    n, k = codes.shape
    group = _int4_group(k, group_size)
    int4 = dtype == torch.bfloat16 and g_idx is None and group and int4_block_rows()
    block = int4_block_rows() if int4 else _nibble_block_rows(n, k)
    rows = -(-n // block) * block
    shift = _shift(scales.float(), zeros, None if offsets is None else offsets.float())
    scale = _parameter(scales, rows, dtype)
    shift = None if shift is None else _parameter(shift, rows, dtype)
    if shift is not None and not bool(shift.isfinite().all()):
        raise bad_argument(
            "offsets", f"an offset or zero point that leaves {dtype}", "finite shifts"
        )
    codes = pad(codes, (0, 0, 0, rows - n))
    if int4:
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.int(), 1)
        pairs = torch.stack((scale, torch.zeros_like(scale) if shift is None else shift), -1)
        if group_size == -1:
            pairs = pairs.repeat_interleave(k // group, 0)
        return {"layout": "int4pack", "tensors": (packed, pairs), "zeros": zeros}
    low, high = codes.view(-1, block, k).transpose(1, 2).contiguous().chunk(2, dim=2)
    packed = low | (high << 4)
    tensors = (packed, scale) if shift is None else (packed, scale, shift)
    return {"layout": "nibble", "tensors": tensors, "zeros": zeros}


def _int4_group(k: int, group_size: int) -> int:
    """Group size with which torch's int4 operation takes K columns, 0 if there is none."""
    groups = _INT4_GROUPS if group_size == -1 else (group_size,)
    return next((g for g in groups if g in _INT4_GROUPS and k % g == 0), 0)


def _nibble_block_rows(n: int, k: int) -> int:
    blocks = max(1, round(n * k / _RUN_ELEMENTS))
    return -(-n // (2 * blocks)) * 2


def _shift(scales: Tensor, zeros: Tensor | None, offsets: Tensor | None) -> Tensor | None:
    """What the zero point adds to scale * (code - 8), float32, unrounded."""
    if offsets is not None:
        return offsets + 8 * scales
    return None if zeros is None else scales * (8 - zeros.float())


def _parameter(values: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
    """[N, G] as [G, rows] in dtype."""
    return pad(values, (0, 0, 0, rows - values.shape[0])).to(dtype).T.contiguous()


def _blocks(codes: Tensor, k: int, layout: str) -> Tensor:
    """Codes as [blocks, K, B / 2]."""
    return codes.view(-1, k, int4_block_rows() // 2) if layout == "int4pack" else codes


def unpack(weight: "PackedWeight") -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """See PackedWeight.unpack."""
    n = weight.n
    blocks = _blocks(weight.tensors[0], weight.k, weight.layout)
    stored = torch.cat((blocks & 15, blocks >> 4), dim=2).transpose(1, 2).reshape(-1, weight.k)
    codes = stored[:n].contiguous()
    if weight.perm is not None:
        codes = torch.empty_like(codes).index_copy_(1, weight.perm, codes)
    scale, shift = _scale_and_shift(weight.tensors, weight.layout)
    if weight.group_size == -1 and weight.g_idx is None:
        scale, shift = scale[:1], None if shift is None else shift[:1]
    offsets = None
    if weight.zero_point == "offset":
        assert shift is not None
        offsets = (shift.float() - 8 * scale.float()).T[:n].contiguous()
    return codes, scale.T[:n].contiguous(), weight.zeros, offsets


def _scale_and_shift(tensors: Sequence[Tensor], layout: str) -> tuple[Tensor, Tensor | None]:
    """Both [G, N']."""
    if layout == "nibble":
        return tensors[1], tensors[2] if len(tensors) > 2 else None
    scale, shift = tensors[1].unbind(-1)
    return scale.contiguous(), shift.contiguous()


def _dequantize(
    blocks: Tensor, scale: Tensor, shift: Tensor | None, group_size: int, g_idx: Tensor | None
) -> Tensor:
    """W.T [K, b * B] in the dtype of scale, from blocks [b, K, B / 2], scale and shift [G, b * B].

    K-major so that every pass but the first runs over long contiguous rows.
    """
    b, k, half = blocks.shape
    codes = torch.cat((blocks & 15, blocks >> 4), dim=2).view(torch.int8).sub_(8)
    weight = torch.empty((k, b, 2 * half), dtype=scale.dtype, device="cpu")
    weight = weight.copy_(codes.transpose(0, 1)).view(k, -1)
    if g_idx is not None:
        _scale_(weight, scale[g_idx], None if shift is None else shift[g_idx])
        return weight
    whole = k // group_size * group_size
    groups = whole // group_size
    for columns, first, last in ((weight[:whole], 0, groups), (weight[whole:], groups, None)):
        if len(columns):
            grouped = columns.view(-1, min(group_size, len(columns)), columns.shape[1])
            shifts = None if shift is None else shift[first:last].unsqueeze(1)
            _scale_(grouped, scale[first:last].unsqueeze(1), shifts)
    return weight


def _scale_(weight: Tensor, scale: Tensor, shift: Tensor | None) -> None:
    if shift is None:
        weight.mul_(scale)
    else:
        torch.addcmul(shift, weight, scale, out=weight)


def _int4_is_faster(rows: int) -> bool:
    return rows <= INT4_MAX_ROWS


def w4a16_matmul(
    x: Tensor,
    outputs: int,
    weight: Sequence[Tensor],
    layout: str,
    group_size: int,
    g_idx: Tensor | None,
    perm: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    silu_mul: bool,
    batch_invariant: bool,
) -> Tensor:
    """The operation on CPU layouts."""
    k = x.shape[-1]
    rows = x.reshape(-1, k)
    if perm is not None:
        rows, g_idx = rows.index_select(1, perm), None
    if layout == "int4pack":
        group_size = k // weight[1].shape[0]
    elif group_size == -1:
        group_size = k
    if layout == "int4pack" and (batch_invariant or _int4_is_faster(rows.shape[0])):
        y: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
            rows.contiguous(), weight[0], group_size, weight[1]
        )
    else:
        scale, shift = _scale_and_shift(weight, layout)
        y = _dequantize_and_multiply(
            rows, _blocks(weight[0], k, layout), scale, shift, group_size, g_idx, batch_invariant
        )
    n = 2 * outputs if silu_mul else outputs
    y = y if y.shape[1] == n else y[:, :n].contiguous()
    if bias is not None:
        y += bias
    if silu_mul:
        y = _silu_mul(y)
    if residual is not None:
        y += residual.reshape(-1, outputs)
    return y.view(*x.shape[:-1], outputs)


def _silu_mul(y: Tensor) -> Tensor:
    """silu(gate) * up of y [M, gate and up], in float32."""
    gate, up = y.chunk(2, dim=1)
    wide = gate.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    return silu(wide, inplace=True).mul_(up).to(y.dtype)


def _dequantize_and_multiply(
    x: Tensor, blocks: Tensor, scale: Tensor, shift: Tensor | None, group_size: int,
    g_idx: Tensor | None, batch_invariant: bool,
) -> Tensor:  # fmt: skip
    """x [M, K] times the weight, a run of blocks at a time. float16 is computed in float32:

    torch converts to and multiplies in float16 many times slower. A matrix product of torch rounds
    in an order that depends on its shape, so with `batch_invariant` every row is one of its own.
    """
    dtype = x.dtype
    if dtype == torch.float16:
        x, scale, shift = x.float(), scale.float(), None if shift is None else shift.float()
    count, k, half = blocks.shape
    run = max(1, _RUN_ELEMENTS // (2 * half * k))
    out = torch.empty((x.shape[0], scale.shape[1]), dtype=x.dtype, device="cpu")
    # One address: the order may depend on it too.
    alone = torch.empty((1, k), dtype=x.dtype, device="cpu")
    for first in range(0, count, run):
        here = slice(first * 2 * half, (first + run) * 2 * half)
        weight = _dequantize(
            blocks[first : first + run], scale[:, here],
            None if shift is None else shift[:, here], group_size, g_idx,
        )  # fmt: skip
        if batch_invariant:
            for row, row_out in zip(x, out[:, here], strict=True):
                torch.mm(alone.copy_(row), weight, out=row_out[None])
        else:
            torch.mm(x, weight, out=out[:, here])
    return out.to(dtype)
