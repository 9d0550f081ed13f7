"""W4A16 on an NVIDIA GPU: packs weights into units, checks the device, picks a kernel and a tiling.

Layouts are named after what a unit holds and how columns are ordered:

    units-symmetric, units-integer, units-offset      stored order as it is, or permuted by `perm`
    sliced-symmetric, sliced-integer, sliced-offset   groups of unequal size (a slice of an
              act-order matrix): each is padded to slices of 16 columns; `perm` [K'] says which
              column of X a stored column takes, K (one past the last) for padding

Rows of a weight for silu(gate) * up are stored eight of the gate and eight of up by turns: a thread
whose fragment holds row r of 16 holds row r + 8 too, so it has both factors of an output.
"""

import warnings
from collections.abc import Callable, Hashable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from billfish.errors import KernelArgumentError
from billfish.kernels._library import bad_argument
from billfish.kernels.marlin.configs import Product, triton_config
from billfish.kernels.marlin.packing import pack_units, unpack_units
from billfish.kernels.marlin.workspace import gpu_of

if TYPE_CHECKING:
    from billfish.kernels.marlin.weight import PackedWeight

_SLICE = 16
MAX_ROWS = 1 << 20
"""Rows of x in one call."""


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
    """
    if dtype == torch.float32:
        raise bad_argument("dtype", dtype, "bfloat16 or float16 on a GPU")
    zero_point = "integer" if zeros is not None else "offset" if offsets is not None else None
    zeros = offsets if zeros is None else zeros
    if silu_mul:
        codes, scales = interleave(codes), interleave(scales)
        zeros = None if zeros is None else interleave(zeros)
    fields: dict[str, Any] = {}
    kind = "units"
    if g_idx is not None:
        kind = "sliced"
        fields["perm"], group = _slices(g_idx, scales.shape[1])
        codes = torch.nn.functional.pad(codes, (0, 1)).index_select(1, fields["perm"])
        scales = scales.index_select(1, group)
        zeros = None if zeros is None else zeros.index_select(1, group)
        group_size = _SLICE
    fields["layout"] = f"{kind}-{zero_point or 'symmetric'}"
    fields["tensors"] = (pack_units(codes, scales, zeros, group_size, dtype),)
    return fields


def interleave(rows: Tensor) -> Tensor:
    """Rows of gate and then of up [2 I, ...] by turns, eight of each, I padded with zeros."""
    parts = rows.view(2, -1, rows.shape[1])
    parts = torch.nn.functional.pad(parts, (0, 0, 0, -parts.shape[1] % 8))
    return parts.view(2, -1, 8, rows.shape[1]).transpose(0, 1).reshape(-1, rows.shape[1])


def part(rows: Tensor, n: int) -> Tensor:
    """The inverse of `interleave`, [n, ...]."""
    parts = rows.view(-1, 2, 8, rows.shape[1]).transpose(0, 1).reshape(2, -1, rows.shape[1])
    return parts[:, : n // 2].reshape(n, -1)


def _slices(g_idx: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """(perm [K'], group of each slice [K' / 16]) for columns of groups g_idx [K].

    Every group gets at least one slice, so that its scale is kept.
    """
    in_order, columns = g_idx.long().sort(stable=True)
    counts = torch.bincount(in_order, minlength=groups)
    slices = (-(-counts // _SLICE)).clamp(min=1)
    first = _SLICE * (slices.cumsum(0) - slices)
    rank = torch.arange(len(columns), device=g_idx.device) - (counts.cumsum(0) - counts)[in_order]
    perm = torch.full((_SLICE * int(slices.sum()),), len(columns), device=g_idx.device)
    perm[first[in_order] + rank] = columns
    group = torch.arange(groups, device=g_idx.device).repeat_interleave(slices)
    return perm, group


def unpack(weight: "PackedWeight") -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """See PackedWeight.unpack."""
    kind, _, zero_point = weight.layout.partition("-")
    sliced = kind == "sliced"
    k = weight.k if weight.perm is None else weight.perm.numel()
    group_size = _SLICE if sliced else weight.group_size
    has_zeros = zero_point != "symmetric"
    n = weight.n if not weight.silu_mul else 2 * (-(-weight.n // 16) * 8)
    stored, scales, zeros = unpack_units(
        weight.tensors[0], n, k, group_size, has_zeros, weight.dtype
    )
    if weight.silu_mul:
        stored, scales = part(stored, weight.n), part(scales, weight.n)
        zeros = None if zeros is None else part(zeros, weight.n)
    codes = stored
    if weight.perm is not None:
        live = weight.perm < weight.k
        codes = stored.new_empty(weight.n, weight.k)
        codes.index_copy_(1, weight.perm[live], stored[:, live])
    if sliced:
        assert weight.g_idx is not None
        # The slices of a group are neighbours: take the first of each.
        _, group = _slices(weight.g_idx, _group_count(weight))
        starts = torch.searchsorted(group, torch.arange(_group_count(weight), device=group.device))
        scales = scales[:, starts]
        zeros = None if zeros is None else zeros[:, starts]
    if zero_point == "integer":
        assert zeros is not None
        return codes, scales, zeros.to(torch.uint8), None
    return codes, scales, None, zeros


def _group_count(weight: "PackedWeight") -> int:
    """Groups that a sliced weight was packed with."""
    assert weight.g_idx is not None
    assert weight.perm is not None
    slices = weight.perm.numel() // _SLICE
    groups = int(weight.g_idx.max()) + 1
    used = int((-(-torch.bincount(weight.g_idx, minlength=groups) // _SLICE)).clamp(min=1).sum())
    return groups + slices - used  # each group past the last one that has columns took one slice


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
    """The operation on a CUDA device. Everything about the weight is in `weight[0]`, the units."""
    index, units = x.get_device(), weight[0]
    if index != torch._C._cuda_getDevice():
        with torch.cuda.device(index):
            return w4a16_matmul(
                x, outputs, weight, layout, group_size, g_idx, perm, bias, residual, silu_mul,
                batch_invariant,
            )  # fmt: skip
    bias = None if bias is None else bias.contiguous()
    residual = None if residual is None else residual.contiguous()
    key = (
        x.data_ptr(), x.shape, x.stride(), x.dtype, index, units.data_ptr(), x.shape[-1], x.dtype,
        outputs, layout, group_size, perm is None, silu_mul, batch_invariant, bias is None,
        residual is None,
    )  # fmt: skip
    ready = _launches.get(key)
    if ready is not None:
        return ready(x, units, bias, residual)
    if x.numel() > MAX_ROWS * x.shape[-1]:
        raise bad_argument("x", tuple(x.shape), f"at most {MAX_ROWS} rows")
    rows = x.reshape(-1, x.shape[-1])
    if perm is not None:
        if layout.startswith("sliced"):
            rows = torch.nn.functional.pad(rows, (0, 1))
        rows = rows.index_select(1, perm)
    shape = (*x.shape[:-1], outputs)
    if rows.shape[0] == 0:
        return x.new_empty(shape)
    product = Product(outputs, layout.partition("-")[2], bias, residual, silu_mul)
    hopper = _hopper_kernel(x.device)
    # Of a single output Triton makes a constant, which the Hopper kernel cannot hold.
    if hopper is None or outputs == 1:
        return _by_portable_kernel(rows, units, product, batch_invariant).view(shape)
    rows = aligned_rows(rows)
    p = hopper.plan_of(rows, units, product, None, batch_invariant)
    launch = hopper.Launch(p, rows, units, shape)
    if rows.data_ptr() == x.data_ptr():  # no copy, which lives elsewhere the next time
        if len(_launches) >= _KEPT:
            _launches.clear()
        _launches[key] = launch
    return launch(rows, units, bias, residual)


_launches: dict[tuple[Any, ...], Callable[..., Tensor]] = {}
"""What is ready of earlier calls, by all that it depends on. The units of a weight are not enough:
another may come to lie where one was."""
_KEPT = 1 << 14  # about 3 KB each: prompts of every length make one for each weight


def launch_of(
    x: Tensor, weight: "PackedWeight", batch_invariant: bool
) -> Callable[..., Tensor] | None:
    """What an earlier call without bias and residual left for x in this place and this weight.

    None where there was none, or for a device that is not the current one.
    """
    index = x.get_device()
    if index != torch._C._cuda_getDevice():
        return None
    key = (  # as in w4a16_matmul, which leaves it
        x.data_ptr(), x.shape, x.stride(), x.dtype, index, weight.tensors[0].data_ptr(), weight.k,
        weight.dtype, weight.outputs, weight.layout, weight.group_size, weight.perm is None,
        weight.silu_mul, batch_invariant, True, True,
    )  # fmt: skip
    return _launches.get(key)


def _by_portable_kernel(
    x: Tensor, units: Tensor, product: Product, batch_invariant: bool
) -> Tensor:
    from billfish.kernels.marlin import triton_gemm

    tiling = triton_config(x.shape[0], units.shape, gpu_of(x.device), batch_invariant)
    x = x if x.stride(1) == 1 else x.contiguous()
    return triton_gemm.launch(x, units, product, tiling)


def kernel_key(
    weight: "PackedWeight", rows: int, *, bias: bool, residual: bool, batch_invariant: bool
) -> Hashable:
    """Products of x [rows, K] that have this in common run one kernel."""
    units, device = weight.tensors[0].shape, weight.device
    zero_point = weight.layout.partition("-")[2]
    epilogue = (bias, residual, weight.silu_mul)
    # Triton compiles for a number of outputs that is a multiple of 16, or not.
    shared = (weight.outputs % 16 == 0, weight.dtype, zero_point, *epilogue)
    if _hopper_kernel(device) is None or weight.outputs == 1:
        tiling = triton_config(rows, units, gpu_of(device), batch_invariant)
        return (*shared, weight.group_size, tiling)
    from billfish.kernels.marlin.hopper_plan import plan

    p = plan(
        rows, units, weight.dtype, gpu_of(device), weight.outputs, zero_point, epilogue,
        batch_invariant,
    )  # fmt: skip
    return (*shared, *p.kernel_key[1:])


@cache
def _hopper_kernel(device: torch.device) -> Any:
    """The module hopper_launch, None where the device or the installed Triton has no such kernel.

    Raises KernelArgumentError below compute capability 8.0.
    """
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        name = torch.cuda.get_device_name(device)
        raise KernelArgumentError(
            f"W4A16 matrix products need a GPU of compute capability 8.0 or newer; {name} has "
            f"{capability[0]}.{capability[1]}"
        )
    if capability != (9, 0):
        return None
    from billfish.kernels.gluon_compat import TRITON_VERSION, gluon_supported

    if not gluon_supported():
        version = ".".join(map(str, TRITON_VERSION))
        warnings.warn(
            f"Triton {version} is not one that the Hopper kernels support: the portable kernels "
            "run instead, slower",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    from billfish.kernels.marlin import hopper_launch

    return hopper_launch


def aligned_rows(x: Tensor) -> Tensor:
    """x [M, K], copied if need be so that TMA can read it: unit stride, rows on 16 bytes."""
    m, k = x.shape
    itemsize = x.element_size()
    row, column = x.stride()
    if column == 1 and row >= k and row * itemsize % 16 == 0 and x.data_ptr() % 16 == 0:
        return x
    padded = x.new_empty(m, -(-k * itemsize // 16) * 16 // itemsize)[:, :k]
    return padded.copy_(x)
