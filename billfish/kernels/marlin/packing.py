"""The packed form of INT4 weights: one copy that every GPU kernel and every batch size reads.

The weight matrix [N, K] is cut into units of 64 rows x 128 columns, stored row block by row block,
along K within one. A unit holds everything that its weights need, contiguously, in 32-bit words:

    1024 words of codes, then for each of its groups 32 words of scales
                         [and 32 words of zero points or offsets]

Codes are in the order in which a warpgroup's tensor-core fragments hold them, so a kernel loads 16
bytes a thread and never shuffles. For m64k16 fragments (PTX ISA, "wgmma.mma_async", register
fragments of matrix A) a thread of lane 4 r + c in warp w holds rows 16 w + r + {0, 8} and columns
2 c + {0, 1} + {0, 8} of each 16-column step:

    word  = [k64 (2)] [w (4)] [r (8)] [c (4)] [step of 16 columns (4)]
    nibble of the word = 4 * (column & 1) + 2 * (column >> 3 & 1) + (row >> 3 & 1)

A word of scales, zero points or offsets pairs row 16 w + r (low half) with row 16 w + r + 8, in the
activations' dtype. Zero points are integers there too: 0 to 15 are exact in both formats. Units are
independent of a kernel's tile: a tile of 64 i rows and 128 j columns takes i x j of them.

Rows past N and columns past K are padding: their scale is zero, so they add nothing. A whole-column
scale (group size -1) is stored in every unit: 3% more bytes, and no kernel treats it specially.
"""

import torch

UNIT_N = 64
"""Rows of a unit: the M of one wgmma instruction."""
UNIT_K = 128
"""Columns of a unit."""
CODE_WORDS = UNIT_N * UNIT_K // 8
META_WORDS = UNIT_N // 2
"""Words that one scale (or zero point, or offset) a row takes."""


def unit_groups(group_size: int) -> int:
    """Groups along K within one unit: 1 for groups of 128 and for whole columns."""
    return 1 if group_size in (-1, UNIT_K) else UNIT_K // group_size


def unit_words(group_size: int, has_zeros: bool) -> int:
    """32-bit words a unit takes; `has_zeros` counts zero points and offsets alike."""
    return CODE_WORDS + META_WORDS * unit_groups(group_size) * (2 if has_zeros else 1)


def stored_groups(units: torch.Tensor, has_zeros: bool) -> int:
    """Groups along K in a unit of a packed matrix."""
    return (units.shape[2] - CODE_WORDS) // (META_WORDS * (2 if has_zeros else 1))


def pack_units(
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    group_size: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Pack codes [N, K] (uint8, 0..15), scales [N, G] and zeros or offsets [N, G] into units.

    Returns int32 [ceil(N / 64), ceil(K / 128), unit_words], on the device of `codes`. Scales and
    zeros are rounded to `dtype` (float16 or bfloat16). Works a slab of row blocks at a time, so the
    scratch memory stays small beside the result.
    """
    n, k = codes.shape
    blocks, steps = -(-n // UNIT_N), -(-k // UNIT_K)
    meta = [scales] if zeros is None else [scales, zeros]
    words = unit_words(group_size, zeros is not None)
    units = torch.empty(blocks, steps, words, dtype=torch.int32, device=codes.device)
    slab = max(1, (1 << 25) // (UNIT_N * steps * UNIT_K))
    for start in range(0, blocks, slab):
        stop = min(start + slab, blocks)
        rows = slice(start * UNIT_N, stop * UNIT_N)
        units[start:stop, :, :CODE_WORDS] = _pack_codes(codes[rows], stop - start, steps)
        parts = [_pack_meta(m[rows], stop - start, steps, group_size, dtype) for m in meta]
        units[start:stop, :, CODE_WORDS:] = torch.cat(parts, dim=-1)
    return units


def unpack_units(
    units: torch.Tensor, n: int, k: int, group_size: int, has_zeros: bool, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The inverse of `pack_units`: codes uint8 [N, K], scales [N, G] and zeros [N, G] or None.

    Codes come back bit for bit; scales and zeros as they were after rounding to `dtype`.
    """
    blocks, steps, _ = units.shape
    codes = torch.empty(n, k, dtype=torch.uint8, device=units.device)
    slab = max(1, (1 << 25) // (UNIT_N * steps * UNIT_K))
    for start in range(0, blocks, slab):
        rows = slice(start * UNIT_N, min((start + slab) * UNIT_N, n))
        block_codes = _unpack_codes(units[start : start + slab, :, :CODE_WORDS])
        codes[rows] = block_codes[: rows.stop - rows.start, :k]
    groups = 1 if group_size == -1 else -(-k // group_size)
    width = META_WORDS * unit_groups(group_size)
    metas = units[:, :, CODE_WORDS:]
    scales = _unpack_meta(metas[..., :width], dtype)[:n, :groups]
    zeros = _unpack_meta(metas[..., width:], dtype)[:n, :groups] if has_zeros else None
    return codes, scales, zeros


def _pack_codes(codes: torch.Tensor, blocks: int, steps: int) -> torch.Tensor:
    """Codes [rows, K], short of blocks * 64 x steps * 128 or not -> int32 [blocks, steps, 1024]."""
    n, k = codes.shape
    pad = (0, steps * UNIT_K - k, 0, blocks * UNIT_N - n)
    v = torch.nn.functional.pad(codes, pad)
    #          block   w  r3 r  step   k64 k16 k3 c  k0
    v = v.view(blocks, 4, 2, 8, steps, 2, 4, 2, 4, 2)
    v = v.permute(0, 4, 5, 1, 3, 8, 6, 9, 7, 2)  # block step k64 w r c k16 | k0 k3 r3
    v = v.reshape(blocks, steps, CODE_WORDS, 4, 2)
    nibbles = v[..., 0] | (v[..., 1] << 4)  # little-endian: byte j of a word holds nibbles 2j, 2j+1
    return nibbles.contiguous().view(torch.int32).view(blocks, steps, CODE_WORDS)


def _unpack_codes(words: torch.Tensor) -> torch.Tensor:
    """int32 [blocks, steps, 1024] -> codes uint8 [blocks * 64, steps * 128]."""
    blocks, steps, _ = words.shape
    nibbles = words.contiguous().view(torch.uint8).view(blocks, steps, CODE_WORDS, 4, 1)
    v = torch.cat((nibbles & 15, nibbles >> 4), dim=-1)
    #          block   step   k64 w  r  c  k16 k0 k3 r3
    v = v.view(blocks, steps, 2, 4, 8, 4, 4, 2, 2, 2)
    v = v.permute(0, 3, 9, 4, 1, 2, 6, 8, 5, 7)
    return v.reshape(blocks * UNIT_N, steps * UNIT_K)


def _pack_meta(
    values: torch.Tensor, blocks: int, steps: int, group_size: int, dtype: torch.dtype
) -> torch.Tensor:
    """One value a row and group [rows, G] -> int32 [blocks, steps, groups of a unit * 32]."""
    groups = unit_groups(group_size)
    values = values.to(dtype)
    if group_size == -1:
        values = values[:, :1].expand(-1, steps)
    pad = (0, steps * groups - values.shape[1], 0, blocks * UNIT_N - values.shape[0])
    v = torch.nn.functional.pad(values, pad)
    v = v.view(blocks, 4, 2, 8, steps, groups)  # block w r3 r step group
    v = v.permute(0, 4, 5, 1, 3, 2).contiguous()  # block step group w r | r3
    return v.view(torch.int32).view(blocks, steps, groups * META_WORDS)


def _unpack_meta(words: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """int32 [blocks, steps, groups * 32] -> values [blocks * 64, steps * groups] of `dtype`."""
    blocks, steps, width = words.shape
    groups = width // META_WORDS
    v = words.contiguous().view(dtype).view(blocks, steps, groups, 4, 8, 2)
    return v.permute(0, 3, 5, 4, 1, 2).reshape(blocks * UNIT_N, steps * groups)
