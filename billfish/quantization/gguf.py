"""The block formats of GGUF tensors, read as INT4 codes or as float32.

Every row is a whole number of blocks. d, m and dmin are float16, little-endian, exact in float32;
q is unsigned unless stated. Source: the structures of ggml-common.h and the dequantize_row_*
functions of ggml-quants.c (ggml).

    type   values  bytes  layout                                        value
    Q4_0     32     18    d, nibbles[16]                                d * (q - 8)
    Q4_1     32     20    d, m, nibbles[16]                             d * q + m
    Q8_0     32     34    d, int8[32]                                   d * q
    Q4_K    256    144    d, dmin, scales[12], nibbles[128]             d * sc * q - dmin * mn
    Q6_K    256    210    low[128], high[64], int8 sc[16], d            d * sc * (q - 32)

Nibbles of Q4_0 and Q4_1: the low halves of the 16 bytes are values 0..15, the high halves 16..31.
Q4_K: 32 bytes of nibbles hold 64 values in the same manner. Each 32 values have a 6-bit scale sc
and a 6-bit minimum mn. Of scales[12], bytes 0..3 hold sc 0..3, bytes 4..7 hold mn 0..3 in their low
six bits; bytes 8..11 hold the low four bits of sc 4..7 (low nibble) and mn 4..7 (high nibble),
whose upper two bits are the top two of bytes 0..3 and of bytes 4..7.
Q6_K: each half of 128 values takes 64 bytes of `low` and 32 of `high`. Their low nibbles are the
low four bits of values 0..63, their high nibbles those of 64..127; bit pair p of high[l] holds the
upper two bits of value 32 p + l. Each 16 values have a scale.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from billfish.checkpoint.ggml import READABLE_TYPES, GGMLType
from billfish.errors import KernelArgumentError
from billfish.quantization.int4 import Int4Groups

SUPPORTED_TYPES = READABLE_TYPES
INT4_TYPES = frozenset({GGMLType.Q4_0, GGMLType.Q4_1, GGMLType.Q4_K})
_GROUP_SIZE = 32  # of all three


def int4_groups(raw: np.ndarray | Tensor, type: GGMLType, shape: Sequence[int]) -> Int4Groups:
    """The codes, scales and offsets of a Q4_0, Q4_1 or Q4_K matrix, exact.

    raw: uint8, the tensor's bytes (read-only arrays too). shape: [N, K].

    Raises KernelArgumentError for another type, for a shape or a number of bytes that does not
    match it, and for scales or offsets that are not finite: those can only be damage.
    """
    if type not in INT4_TYPES:
        raise KernelArgumentError(f"type must be one of {_names(INT4_TYPES)}, got {type!r}")
    if len(shape) != 2:
        raise KernelArgumentError(f"an INT4 weight must be a matrix, got shape {list(shape)}")
    rows, columns = shape
    blocks = _blocks(raw, type, shape)
    scales, offsets, nibbles = _SPLIT[type](blocks)
    scales = scales.view(rows, -1)
    offsets = offsets if offsets is None else offsets.view(rows, -1)
    for name, tensor in (("scales", scales), ("offsets", offsets)):
        if tensor is not None and not torch.isfinite(tensor).all():
            raise KernelArgumentError(f"the {name} of this {type.name} tensor are not all finite")
    return Int4Groups(_codes(nibbles).view(rows, columns), scales, None, offsets, _GROUP_SIZE)


def dequantize(raw: np.ndarray | Tensor, type: GGMLType, shape: Sequence[int]) -> Tensor:
    """The values of a tensor: float32 of the shape given, on the CPU.

    Equal to the definition bit for bit: every product is exact in float32, and where a minimum is
    added that sum is rounded once. What is not finite in the file stays so.

    Raises KernelArgumentError for a type outside SUPPORTED_TYPES and for a shape or a number of
    bytes that does not match it.
    """
    if type not in SUPPORTED_TYPES:
        raise KernelArgumentError(f"type must be one of {_names(SUPPORTED_TYPES)}, got {type!r}")
    blocks = _blocks(raw, type, shape)
    if type in _FLOATS:
        values = blocks.view(_FLOATS[type]).to(torch.float32)
    elif type in INT4_TYPES:
        scales, offsets, nibbles = _SPLIT[type](blocks)
        values = _codes(nibbles).view(-1, _GROUP_SIZE).to(torch.float32)
        if offsets is None:
            values -= 8
        values *= scales.view(-1, 1)
        if offsets is not None:
            values += offsets.view(-1, 1)
    else:
        values = _q8_0(blocks) if type == GGMLType.Q8_0 else _q6_k(blocks)
    return values.view(tuple(shape))


_FLOATS = {
    GGMLType.F32: torch.float32,
    GGMLType.F16: torch.float16,
    GGMLType.BF16: torch.bfloat16,
}


def _names(types: frozenset[GGMLType]) -> str:
    return ", ".join(type.name for type in sorted(types))


def _blocks(raw: np.ndarray | Tensor, type: GGMLType, shape: Sequence[int]) -> Tensor:
    """A copy of the bytes as uint8 [blocks, bytes of a block], once all is known to fit."""
    dtype = torch.uint8 if isinstance(raw, Tensor) else np.uint8
    if raw.dtype != dtype:
        raise KernelArgumentError(f"raw must be uint8, got {raw.dtype}")
    columns = shape[-1] if len(shape) else 1
    if any(size < 1 for size in shape) or columns % type.block_size:
        raise KernelArgumentError(
            f"shape {list(shape)} must be positive, with rows of a multiple of {type.block_size} "
            f"for {type.name}"
        )
    count = math.prod(shape) // type.block_size
    nbytes = math.prod(raw.shape)
    if nbytes != count * type.block_bytes:
        raise KernelArgumentError(
            f"{type.name} of shape {list(shape)} takes {count * type.block_bytes} bytes, got "
            f"{nbytes}"
        )
    # A copy, because torch cannot share memory that is read-only, nor view bytes at an odd address
    # as wider types.
    if isinstance(raw, Tensor):
        copy = raw.to("cpu", copy=True, memory_format=torch.contiguous_format)
    else:
        copy = torch.from_numpy(np.array(raw, order="C"))
    return copy.view(count, type.block_bytes)


def _halves(blocks: Tensor, start: int, count: int = 1) -> Tensor:
    """`count` float16 at byte `start` of every block, as float32 [blocks, count]."""
    field = blocks[:, start : start + 2 * count].contiguous()
    return field.view(torch.float16).to(torch.float32)


def _codes(nibbles: Tensor) -> Tensor:
    """uint8 [M, B] -> [M, 2, B]: low nibbles, then high nibbles."""
    codes = nibbles.new_empty(nibbles.shape[0], 2, nibbles.shape[1])
    torch.bitwise_and(nibbles, 15, out=codes[:, 0])
    torch.bitwise_right_shift(nibbles, 4, out=codes[:, 1])
    return codes


# Each gives scales and offsets, float32 with one element a group, and the bytes of nibbles, one row
# for every 32 or 64 values.
_Split = tuple[Tensor, Tensor | None, Tensor]


def _split_q4_0(blocks: Tensor) -> _Split:
    return _halves(blocks, 0), None, blocks[:, 2:]


def _split_q4_1(blocks: Tensor) -> _Split:
    both = _halves(blocks, 0, 2)
    return both[:, 0].contiguous(), both[:, 1].contiguous(), blocks[:, 4:]


def _split_q4_k(blocks: Tensor) -> _Split:
    d = _halves(blocks, 0, 2)
    first, second, rest = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat([first & 63, (rest & 15) | (first >> 6 << 4)], dim=1)
    minima = torch.cat([second & 63, (rest >> 4) | (second >> 6 << 4)], dim=1)
    # 11 significant bits of a float16 times 6: both products are exact.
    return scales * d[:, :1], minima * -d[:, 1:], blocks[:, 16:].reshape(-1, 32)


_SPLIT = {
    GGMLType.Q4_0: _split_q4_0,
    GGMLType.Q4_1: _split_q4_1,
    GGMLType.Q4_K: _split_q4_k,
}


def _q8_0(blocks: Tensor) -> Tensor:
    values = blocks[:, 2:].view(torch.int8).to(torch.float32)
    values *= _halves(blocks, 0)
    return values


def _q6_k(blocks: Tensor) -> Tensor:
    low = blocks[:, :128].view(-1, 2, 64)
    high = blocks[:, 128:192].view(-1, 2, 32)
    scales = blocks[:, 192:208].view(torch.int8) * _halves(blocks, 208)
    codes = low.new_empty(blocks.shape[0], 2, 4, 32)
    codes.view(-1, 2, 2, 64)[:, :, 0] = low & 15
    codes.view(-1, 2, 2, 64)[:, :, 1] = low >> 4
    for pair in range(4):
        codes[:, :, pair] |= (high >> (2 * pair) & 3) << 4
    # At most 11 + 7 + 5 significant bits (powers of two aside): exact in float32.
    values = codes.view(-1, 16, 16).to(torch.float32)
    values -= 32
    values *= scales[:, :, None]
    return values
