"""INT4 weights, packed once for the device and the activation dtype that will multiply them."""

import importlib
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from billfish.kernels._library import DTYPES, bad_argument, check_dense
from billfish.kernels.marlin import cpu, reference

GROUP_SIZES = (16, 32, 64, 128, -1)


@dataclass(frozen=True, eq=False, kw_only=True)
class PackedWeight:
    """An INT4 matrix [n, k] in the form `layout` of one device. Made by `pack`.

    layout, tensors: what the product reads, as the kernels of that device lay it out.
    group_size is -1 where one group spans the column. dtype is that of activations; scales and
    offsets are stored in it. zero_point ("symmetric", "integer" or "offset") says which of zeros
    and offsets `pack` was given; zeros are kept apart where the layout does not hold them. g_idx
    int32 [k] is the group of each column where act-order gives one, perm int64 the order in which
    the columns are stored where that is not 0..k-1. silu_mul: see `pack`.
    """

    n: int
    k: int
    group_size: int
    dtype: torch.dtype
    zero_point: str
    silu_mul: bool
    layout: str
    tensors: tuple[Tensor, ...]
    zeros: Tensor | None = None
    g_idx: Tensor | None = None
    perm: Tensor | None = None

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """No function of torch takes one. Modules that read the weight of a linear layer beside
        its `forward`, as torch's TransformerEncoderLayer does, ask for this and then do without."""
        return NotImplemented

    @property
    def outputs(self) -> int:
        """Columns of a product: n, or n / 2 of a weight packed with `silu_mul`."""
        return self.n // 2 if self.silu_mul else self.n

    @property
    def device(self) -> torch.device:
        return self.tensors[0].device

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        parts = (*self.tensors, self.zeros, self.g_idx, self.perm)
        return sum(t.nbytes for t in parts if t is not None)

    def to(self, device: torch.device | str) -> "PackedWeight":
        """The same weight on `device`, packed anew if that kind of device has another layout."""
        device = torch.device(device)
        if device == self.device:
            return self
        if device.type == self.device.type:
            moved = tuple(t.to(device) for t in self.tensors)
            rest = {name: getattr(self, name) for name in ("zeros", "g_idx", "perm")}
            rest = {name: None if t is None else t.to(device) for name, t in rest.items()}
            return replace(self, tensors=moved, **rest)
        codes, scales, zeros, offsets = (None if t is None else t.to(device) for t in self.unpack())
        assert codes is not None
        assert scales is not None
        return pack(
            codes, scales, zeros=zeros, offsets=offsets,
            g_idx=None if self.g_idx is None else self.g_idx.to(device),
            group_size=self.group_size, dtype=self.dtype, silu_mul=self.silu_mul,
        )  # fmt: skip

    def unpack(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """(codes uint8 [n, k], scales [n, G], zeros uint8 [n, G] or None, offsets or None).

        Codes and zeros are bit for bit those that were packed, in the original order; scales
        are those given, rounded to dtype; offsets are as multiplied (see `pack`).
        """
        result: tuple[Tensor, Tensor, Tensor | None, Tensor | None]
        result = _layouts(self.device).unpack(self)
        return result

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """W [n, k] in `dtype` (by default that of activations), computed in at least float32."""
        dtype = dtype or self.dtype
        compute = torch.float64 if dtype == torch.float64 else torch.float32
        codes, scales, zeros, offsets = self.unpack()
        weight = reference.dequantize(
            codes, scales, zeros, offsets, self.g_idx, self.group_size, compute
        )
        return weight.to(dtype)


def pack(
    codes: Tensor,
    scales: Tensor,
    *,
    zeros: Tensor | None = None,
    offsets: Tensor | None = None,
    g_idx: Tensor | None = None,
    group_size: int,
    dtype: torch.dtype,
    silu_mul: bool = False,
) -> PackedWeight:
    """Pack an INT4 matrix for the device its codes are on.

        W[n, k] = scales[n, g] * (codes[n, k] - zeros[n, g])    zeros None: 8 (symmetric)
        W[n, k] = scales[n, g] * codes[n, k] + offsets[n, g]    (GGUF minimum, HQQ -s*z)

    with g = k // group_size, or g_idx[k] (act-order).

    codes: uint8 [N, K], values 0..15. scales: floating point [N, G], G = ceil(K / group_size),
    or with g_idx any G above its largest value. zeros: uint8 [N, G], values 0..15. offsets:
    floating point [N, G]. g_idx: integers [K]. group_size: 16, 32, 64, 128, or -1 for the whole
    column; the last group may be short. dtype: float32, bfloat16 or float16, of activations.
    silu_mul: the rows are those of a gate and then as many of an up projection, and a product with
    the weight is silu(gate) * up; a GPU stores the rows of both side by side for it.

    Scales are rounded to dtype: a relative error of at most 2^-8 in bfloat16, 2^-11 in float16
    (values under 6.1e-5 lose more). On a CPU the zero point, of either kind, becomes a shift
    W = scale * (code - 8) + shift, computed in float32 from the unrounded parameters and rounded
    once to dtype, with the same relative error.

    Raises KernelArgumentError: a wrong shape, dtype, device or value; a scale, an offset or a
    shift that is not finite in dtype.
    """
    check_dense("codes", codes)
    check_dense("scales", scales)
    for name, tensor in {"zeros": zeros, "offsets": offsets, "g_idx": g_idx}.items():
        if tensor is not None:
            check_dense(name, tensor)
    _check_pack(codes, scales, zeros, offsets, group_size, dtype)
    if silu_mul and codes.shape[0] % 2:
        raise bad_argument("codes", tuple(codes.shape), "as many rows of gate as of up: [2 I, K]")
    n, k = codes.shape
    groups = scales.shape[1]
    if g_idx is not None:
        _check_g_idx(g_idx, k, groups, codes.device)
    elif groups != _num_groups(k, group_size):
        raise bad_argument(
            "scales", tuple(scales.shape), f"[N, ceil(K / group_size)] = [{n}, "
            f"{_num_groups(k, group_size)}]"
        )  # fmt: skip
    g_idx, perm = _act_order(g_idx, k, group_size, groups)
    if perm is not None:
        codes = codes.index_select(1, perm)
    zero_point = (
        "offset" if offsets is not None else "integer" if zeros is not None else "symmetric"
    )
    layout = _layouts(codes.device).pack(
        codes, scales, zeros, offsets,
        group_size=group_size, dtype=dtype, g_idx=g_idx if perm is None else None,
        silu_mul=silu_mul,
    )  # fmt: skip
    own = {"g_idx": g_idx, "perm": perm, **layout}
    return PackedWeight(
        n=n, k=k, group_size=group_size, dtype=dtype, zero_point=zero_point, silu_mul=silu_mul,
        **own,
    )  # fmt: skip


def _layouts(device: torch.device) -> Any:
    """The module that packs and unpacks for this kind of device; that of GPUs needs triton."""
    if device.type == "cpu":
        return cpu
    return importlib.import_module("billfish.kernels.marlin.gpu")


def _num_groups(k: int, group_size: int) -> int:
    return 1 if group_size == -1 else -(-k // group_size)


def _act_order(
    g_idx: Tensor | None, k: int, group_size: int, groups: int
) -> tuple[Tensor | None, Tensor | None]:
    """(g_idx, perm): the order that makes groups contiguous, None if it is 0..k-1.

    perm stays None where the groups are not of equal size, as in a slice of an act-order matrix:
    then columns keep their order and are scaled one by one.
    """
    if g_idx is None:
        return None, None
    plain = reference.group_of_column(k, group_size, None, g_idx.device)
    if groups == _num_groups(k, group_size):
        if torch.equal(g_idx.long(), plain):
            return None, None
        ordered, perm = g_idx.long().sort(stable=True)
        if torch.equal(ordered, plain):
            return g_idx.int(), perm
    return g_idx.int(), None


def _check_pack(
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    offsets: Tensor | None,
    group_size: int,
    dtype: torch.dtype,
) -> None:
    if dtype not in DTYPES:
        raise bad_argument("dtype", dtype, "float32, bfloat16 or float16")
    if type(group_size) is not int or group_size not in GROUP_SIZES:
        raise bad_argument("group_size", group_size, f"one of {GROUP_SIZES}")
    if codes.dtype != torch.uint8 or codes.dim() != 2 or 0 in codes.shape:
        raise bad_argument("codes", f"{codes.dtype} {tuple(codes.shape)}", "non-empty uint8 [N, K]")
    if not (codes.is_cpu or codes.is_cuda):
        raise bad_argument("codes.device", codes.device, "cpu or cuda")
    if int(codes.max()) > 15:
        raise bad_argument("codes", f"a code of {int(codes.max())}", "codes 0 to 15")
    if scales.dim() != 2 or scales.shape[0] != codes.shape[0] or scales.shape[1] == 0:
        raise bad_argument("scales", tuple(scales.shape), f"[{codes.shape[0]}, G]")
    if zeros is not None and offsets is not None:
        raise bad_argument("zeros and offsets", "both", "at most one of them")
    for name, parameter in (("scales", scales), ("zeros", zeros), ("offsets", offsets)):
        if parameter is None:
            continue
        if parameter.shape != scales.shape:
            raise bad_argument(name, tuple(parameter.shape), f"{tuple(scales.shape)} as scales")
        if parameter.device != codes.device:
            raise bad_argument(name, parameter.device, f"the device of codes, {codes.device}")
        if name != "zeros":
            _check_finite(name, parameter, dtype)
    if zeros is not None and (zeros.dtype != torch.uint8 or int(zeros.max()) > 15):
        raise bad_argument("zeros", f"{zeros.dtype} up to {zeros.max().item()}", "uint8 0 to 15")


def _check_finite(name: str, parameter: Tensor, dtype: torch.dtype) -> None:
    if not parameter.is_floating_point():
        raise bad_argument(name, parameter.dtype, "a floating-point dtype")
    if not bool(parameter.to(dtype).isfinite().all()):
        largest = parameter.abs().max().item()
        raise bad_argument(
            name, f"magnitudes up to {largest}", f"values that are finite in {dtype}"
        )


def _check_g_idx(g_idx: Tensor, k: int, groups: int, device: torch.device) -> None:
    if g_idx.dtype not in (torch.int32, torch.int64) or g_idx.shape != (k,):
        raise bad_argument("g_idx", f"{g_idx.dtype} {tuple(g_idx.shape)}", f"int32 or int64 [{k}]")
    if g_idx.device != device:
        raise bad_argument("g_idx", g_idx.device, f"the device of codes, {device}")
    low, high = int(g_idx.min()), int(g_idx.max())
    if low < 0 or high >= groups:
        raise bad_argument("g_idx", f"groups {low} to {high}", f"groups 0 to {groups - 1}")
