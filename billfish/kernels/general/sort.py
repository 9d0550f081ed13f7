"""Radix sort of keys, and of keys with values that go along.

Keys are sorted by 8 bits at a time, from the least significant on (LSD), each pass stable: after
the last, all bits are in order. A pass moves every key to where its digit begins, plus how many
keys with that digit come before it. Its time is that of memory, and what decides is how often a
pass reads: counting digits by tile, adding the counts up and moving keys are three launches that
read twice. Here (Adinets & Merrill, 2022, arXiv:2206.01784: Onesweep) one launch first counts the
digits of all passes, and each pass is one more: a tile of keys counts its digits and learns by
decoupled look-back (`_triton.py`) what the tiles before it count, for all 256 digits at once. Rows
of one tile need neither.

Within a tile each warp has a stretch of its own and goes through it 32 keys at a time. The 8 bits
of their digits make 8 words of 32 votes; the votes that agree with a key's own bits are its equals
among the 32, those of lower lanes its rank, and the first of them adds their number to the digit's
counter in shared memory. When all are counted, keys are put in the order of their digits there, so
that those of one digit, which go to one stretch of memory, are written side by side. Triton has no
word for counters and moves by address in shared memory: `_ptx.py` has them.

Bits of keys are moved as they are, and only compared in another form: integers with their sign
turned; floats as integers that order as the numbers do, minus zero as zero, NaN as the greatest.

The technique's switch: `sort_gpu.sort(..., one_sweep=False)`: three launches a pass. Keys of 32
bits or less without values, and fewer than some millions, are sorted so: waiting for the tiles
before takes longer than reading such keys twice.
"""

from collections.abc import Callable
from typing import overload

import torch
from torch import Tensor

from billfish.kernels._library import bad_argument, check_no_grad, check_tensors, register
from billfish.kernels.general._arguments import BITS, check_numbers, check_same_device, dimension

_GPU = "billfish.kernels.general.sort_gpu"
_HALF = (torch.bfloat16, torch.float16)


def sort_reference(
    keys: Tensor, values: Tensor | None = None, descending: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """Along the last dimension: the place of a key is how many are less, or equal and before it."""
    a, b = keys.unsqueeze(-1), keys.unsqueeze(-2)  # of the key placed, and of any other
    if descending:
        less = (b > a) | (b.isnan() & ~a.isnan()) if keys.is_floating_point() else b > a
    else:
        less = (b < a) | (a.isnan() & ~b.isnan()) if keys.is_floating_point() else b < a
    equal = (a == b) | (a.isnan() & b.isnan()) if keys.is_floating_point() else a == b
    before = torch.ones(keys.shape[-1:] * 2, dtype=torch.bool, device=keys.device).tril(-1)
    source = (less | (equal & before)).sum(-1).argsort(-1)
    moved = _gathered(keys, source)
    if values is None:
        return moved
    return moved, _gathered(values, source)


def _places(keys: Tensor, descending: bool) -> tuple[Tensor, Tensor]:
    moved, places = torch.sort(keys, dim=-1, descending=descending, stable=True)
    if keys.dtype in _HALF:
        moved = _gathered(keys, places)
    return moved.contiguous(), places


def _cpu(keys: Tensor, descending: bool) -> Tensor:
    return _places(keys, descending)[0]


def _pairs_cpu(keys: Tensor, values: Tensor, descending: bool) -> tuple[Tensor, Tensor]:
    moved, places = _places(keys, descending)
    return moved, _gathered(values, places).contiguous()


def _gathered(x: Tensor, places: Tensor) -> Tensor:
    """Bits as they are: sorting or gathering half floats, torch changes those of NaN."""
    return x.view(BITS[x.dtype.itemsize]).gather(-1, places).view(x.dtype)


def _fake(keys: Tensor, descending: bool) -> Tensor:
    return keys.new_empty(keys.shape)


def _pairs_fake(keys: Tensor, values: Tensor, descending: bool) -> tuple[Tensor, Tensor]:
    return keys.new_empty(keys.shape), values.new_empty(values.shape)


_sort: Callable[..., Tensor] = register(
    "sort(Tensor keys, bool descending) -> Tensor", fake=_fake, cpu=_cpu, gpu=_GPU
)
_sort_pairs: Callable[..., tuple[Tensor, Tensor]] = register(
    "sort_pairs(Tensor keys, Tensor values, bool descending) -> (Tensor, Tensor)",
    fake=_pairs_fake,
    cpu=_pairs_cpu,
    gpu=_GPU,
)


@overload
def sort(keys: Tensor, values: None = None, dim: int = -1, descending: bool = False) -> Tensor: ...
@overload
def sort(
    keys: Tensor, values: Tensor, dim: int = -1, descending: bool = False
) -> tuple[Tensor, Tensor]: ...
def sort(
    keys: Tensor, values: Tensor | None = None, dim: int = -1, descending: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """keys in order along dim; with values, (keys in order, values in the order of their keys).

    keys: floats (64, 32, bf16, fp16) or integers (8 to 64 bits), any shape but a scalar, any
    strides; less than 2^31 along dim. values: the shape of keys, elements of 1, 2, 4 or 8 bytes of
    any dtype. Returns new, contiguous tensors.

    Stable, also when descending: equal keys stay in their order. -0.0 equals 0.0, and NaN equals
    NaN and is greater than all numbers, so that it comes last, or first when descending; as in
    torch. The bits of keys are kept.

    Deterministic.

    Raises KernelArgumentError: dtype, device, shape or dim is wrong, or keys or values require a
    gradient.
    """
    check_numbers("keys", keys)
    keys = keys.resolve_neg()
    dim = dimension(dim, keys)
    if keys.shape[dim] >= 2**31:
        raise bad_argument("keys", tuple(keys.shape), "less than 2^31 along dim")
    if values is None:
        return _turned(_sort(_rows(keys, dim), bool(descending)), keys, dim)
    check_tensors(values=values)
    if values.shape != keys.shape or values.dtype.itemsize not in (1, 2, 4, 8):
        got = f"{values.dtype} {tuple(values.shape)}"
        raise bad_argument("values", got, f"1, 2, 4 or 8 bytes each, {tuple(keys.shape)}")
    check_same_device("values", values, "keys", keys)
    check_no_grad("values", values)
    values = values.resolve_conj().resolve_neg()
    moved = _sort_pairs(_rows(keys, dim), _rows(values, dim), bool(descending))
    return _turned(moved[0], keys, dim), _turned(moved[1], keys, dim)


def _rows(x: Tensor, dim: int) -> Tensor:
    moved = x.movedim(dim, -1)
    return moved.reshape(moved.shape[:-1].numel(), moved.shape[-1])


def _turned(rows: Tensor, like: Tensor, dim: int) -> Tensor:
    return rows.view(like.movedim(dim, -1).shape).movedim(-1, dim).contiguous()
