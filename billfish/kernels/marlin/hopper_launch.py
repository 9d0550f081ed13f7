"""Launching the Hopper kernel.

Triton's launcher binds and specializes arguments anew at every call, which takes longer than most
of these products. So all that a call shares with earlier ones on the same memory is kept, in a
`Launch`: the plan, the compiled kernel, which is launched directly, and its encoded arguments.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import mul
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from billfish.kernels.cuda_driver import MAP_BYTES, CannotPrepare, DirectKernel, PreparedLaunch
from billfish.kernels.gluon_compat import launch_is_watched, tensor_map, tma_cache_hints
from billfish.kernels.marlin.configs import HopperConfig, Product
from billfish.kernels.marlin.hopper_gemm import w4a16_hopper
from billfish.kernels.marlin.hopper_plan import Plan, plan
from billfish.kernels.marlin.packing import CODE_WORDS, UNIT_K
from billfish.kernels.marlin.workspace import gpu_of, workspace

# How TMA lays out a stage in shared memory.
_CODE_SMEM = gl.NVMMASharedLayout(128, 32, 4)
_META_SMEM = gl.NVMMASharedLayout(0, 32, 4)
_X_SMEM = gl.NVMMASharedLayout(128, 16, 2)


def descriptors(plan: Plan, x: Tensor, units: Tensor) -> tuple[TensorDescriptor, ...]:
    """TMA descriptors of the codes, the scales and zeros, and X [M, K].

    x: unit stride along K, rows and base aligned to 16 bytes.
    """
    (codes, codes_block), (meta, meta_block) = plan.weight_shapes
    x_block = [plan.config.tile_m, UNIT_K]
    after_codes = units.view(-1)[CODE_WORDS:]
    return (
        TensorDescriptor(units, codes, plan.weight_strides, codes_block, _CODE_SMEM),
        TensorDescriptor(after_codes, meta, plan.weight_strides, meta_block, _META_SMEM),
        TensorDescriptor(x, list(x.shape), list(x.stride()), x_block, _X_SMEM),
    )


_DESCRIPTORS = (*(MAP_BYTES, 4, 4, 4, 4, 8, 8, 8, 8) * 2, MAP_BYTES, 4, 4, 8, 8)
_ADDRESSES, _NUMBERS = 5, 9
FIELDS = (*_DESCRIPTORS, *(8,) * _ADDRESSES, *(4,) * _NUMBERS)
"""Sizes of the kernel's parameters: three tensor maps, each with its shape and strides, then
addresses and numbers."""

# What torch's own compiler generates calls of: torch.empty takes twice as long, most of it for
# keywords and dispatch.
_empty: Callable[..., Tensor] = getattr(
    torch._C._dynamo.guards, "_empty_strided_cuda", torch.empty_strided
)

_kernels: dict[tuple[Any, ...], DirectKernel | None] = {}
"""By `Plan.kernel_key` and device, once compiled; None where Triton has to launch the kernel."""


class Launch:
    """A product of certain memory, ready to be launched: each call computes Y [..., outputs] anew.

    A tensor map holds an address, a shape and strides, so one that fits stays valid whatever tensor
    lives there: no tensor is kept, and those of a call may be others at the same places.

    x [M, K], units: as `descriptors` wants them. shape: that of Y.
    """

    def __init__(self, p: Plan, x: Tensor, units: Tensor, shape: Sequence[int]) -> None:
        self._plan = p
        self._device, self._dtype, self._shape = x.device, x.dtype, tuple(shape)
        self._strides = tuple(accumulate(self._shape[:0:-1], mul, initial=1))[::-1]
        self._workspace = p.partial_size, p.counter_count
        self._prepared = self._prepare(x, units)

    def __call__(
        self, x: Tensor, units: Tensor, bias: Tensor | None, residual: Tensor | None
    ) -> Tensor:
        """Y, on the current stream; the current device is that of x."""
        y = _empty(self._shape, self._strides, self._dtype)
        bias = None if bias is None else _aligned(bias)
        residual = None if residual is None else _aligned(residual)
        prepared = self._prepared
        if prepared is None or launch_is_watched():
            self._launch_by_triton(x, units, y, bias, residual)
            return y
        at = y.data_ptr()
        sums, counters = at, at  # where they are not touched
        if self._workspace[0]:
            memory = workspace(self._device, *self._workspace)
            sums, counters = memory.addresses
        prepared(
            torch._C._cuda_getCurrentRawStream(self._device.index), at,
            at if bias is None else bias.data_ptr(),
            at if residual is None else residual.data_ptr(), sums, counters,
        )  # fmt: skip
        return y

    def _launch_by_triton(
        self, x: Tensor, units: Tensor, y: Tensor, bias: Tensor | None, residual: Tensor | None
    ) -> None:
        """Also compiles the kernel, so that the next launch needs no Triton."""
        p = self._plan
        if x.dim() != 2:  # a view would forget the stride of a single row, which TMA asks for
            x = x.view(-1, x.shape[-1])
        # Where no tile is divided they are not touched, but of one dtype: the kernel is the same.
        sums, counters = units.view(torch.float32), units
        if self._workspace[0]:
            memory = workspace(self._device, *self._workspace)
            sums, counters = memory.sums, memory.counters
        bias, residual = y if bias is None else bias, y if residual is None else residual
        arguments = (*descriptors(p, x, units), y, bias, residual, sums, counters, *p.numbers)
        with tma_cache_hints(w4a16_hopper.__name__, p.cache_hints):
            kernel = w4a16_hopper[(p.division.blocks,)](*arguments, **p.constants, **p.options)
        key = p.kernel_key, self._device.index
        if key not in _kernels:
            try:
                _kernels[key] = DirectKernel(kernel, FIELDS)
            except CannotPrepare:
                _kernels[key] = None
        if self._prepared is None:
            self._prepared = self._prepare(x, units)

    def _prepare(self, x: Tensor, units: Tensor) -> PreparedLaunch | None:
        """The arguments as the driver takes them, once Triton has compiled the kernel."""
        p = self._plan
        direct = _kernels.get((p.kernel_key, self._device.index))
        if direct is None:
            return None
        (codes, _), (meta, _) = p.weight_shapes
        address, strides = units.data_ptr(), p.weight_strides
        maps = [
            (address, codes, strides),
            (address + 4 * CODE_WORDS, meta, strides),
            (x.data_ptr(), list(x.shape), [x.stride(0), 1]),
        ]
        arguments: list[int | bytes] = []
        for index, (start, shape, steps) in enumerate(maps):
            encoded = tensor_map(direct.kernel, index, start, shape, steps)
            arguments += [encoded, *shape, *steps]
        arguments += [*[0] * _ADDRESSES, *p.numbers]
        return PreparedLaunch(direct, p.division.blocks, arguments, len(_DESCRIPTORS), _ADDRESSES)


def launch(
    x: Tensor,
    units: Tensor,
    product: Product,
    config: HopperConfig | None = None,
    *,
    batch_invariant: bool = False,
) -> Tensor:
    """Y [M, outputs] of X [M, K] on the current stream. x: as `descriptors` wants it.

    config: instead of that which is chosen for the shape.
    """
    p = plan_of(x, units, product, config, batch_invariant)
    ready = Launch(p, x, units, (p.m, p.outputs))
    return ready(x, units, product.bias, product.residual)


def plan_of(
    x: Tensor, units: Tensor, product: Product, config: HopperConfig | None, batch_invariant: bool
) -> Plan:
    """The plan of a product of these tensors."""
    outputs, zero_point, bias, residual, silu_mul = product
    return plan(
        x.shape[0], units.shape, x.dtype, gpu_of(x.device), outputs, zero_point,
        (bias is not None, residual is not None, silu_mul), batch_invariant, config,
    )  # fmt: skip


def _aligned(added: Tensor) -> Tensor:
    """A bias or a residual where a kernel may read 16 bytes at once."""
    return added if added.data_ptr() % 16 == 0 else added.clone()
