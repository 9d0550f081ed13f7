"""Launching the Hopper kernel.

Triton's launcher binds and specializes arguments anew at every call, which takes longer than most
of these products. So all that a call shares with earlier ones is kept: the plan of a shape, and the
compiled kernel, which is launched directly.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from billfish.kernels.cuda_driver import MAP_BYTES, CannotPrepare, Chunk, PreparedLaunch
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


FIELDS = (*(MAP_BYTES, 4, 4, 4, 4, 8, 8, 8, 8) * 2, MAP_BYTES, 4, 4, 8, 8, *(8,) * 5, *(4,) * 8)
"""Sizes of the kernel's parameters: three tensor maps, each with its shape and strides, addresses
(the first is number _ADDRESSES) and numbers."""
_META, _X, _ADDRESSES, _NUMBERS = 9, 18, 23, 28


class _Launcher:
    """A compiled kernel, and what its launches share: the tensor maps of weights and activations.

    A tensor map holds an address, a shape and strides, so one that fits stays valid whatever tensor
    lives at that address.
    """

    _KEPT = 4096

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._launch = PreparedLaunch(kernel, FIELDS)
        self._weights: dict[Any, tuple[Chunk, Chunk]] = {}
        self._activations: dict[Any, Chunk] = {}
        self._numbers: dict[Any, Chunk] = {}

    def __call__(self, p: Plan, x: Tensor, units: Tensor, addresses: tuple[int, ...]) -> None:
        address = units.data_ptr()
        weights = self._weights.get((address, p.units)) or self._weight_maps(p, address)
        key = (x.data_ptr(), p.m, x.stride(0))
        activations = self._activations.get(key) or self._x_map(key, x)
        numbers = self._numbers.get(p.numbers) or self._keep(
            self._numbers, p.numbers, self._launch.chunk(_NUMBERS, p.numbers)
        )
        stream = torch._C._cuda_getCurrentRawStream(x.device.index)
        self._launch(
            p.division.blocks, stream, (*weights, activations, numbers), _ADDRESSES, addresses
        )

    def _keep(self, where: dict[Any, Any], key: Any, value: Any) -> Any:
        if len(where) >= self._KEPT:
            where.clear()
        where[key] = value
        return value

    def _map(self, index: int, field: int, address: int, shape: Any, strides: Any) -> Chunk:
        encoded = tensor_map(self._kernel, index, address, shape, strides)
        return self._launch.chunk(field, [encoded, *shape, *strides])

    def _weight_maps(self, p: Plan, address: int) -> Any:
        (codes, _), (meta, _) = p.weight_shapes
        maps = (
            self._map(0, 0, address, codes, p.weight_strides),
            self._map(1, _META, address + 4 * CODE_WORDS, meta, p.weight_strides),
        )
        return self._keep(self._weights, (address, p.units), maps)

    def _x_map(self, key: Any, x: Tensor) -> Any:
        chunk = self._map(2, _X, key[0], list(x.shape), [key[2], 1])
        return self._keep(self._activations, key, chunk)


_launchers: dict[tuple[Any, ...], _Launcher | None] = {}
"""By kernel and device; None where the kernel has to be launched by Triton."""


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
    device = x.device
    outputs, zero_point, bias, residual, silu_mul = product
    p = plan(
        x.shape[0], units.shape, x.dtype, gpu_of(device), outputs, zero_point,
        epilogue=(bias is not None, residual is not None, silu_mul),
        batch_invariant=batch_invariant, config=config,
    )  # fmt: skip
    y = torch.empty((p.m, outputs), dtype=x.dtype, device=device)
    # Never touched where no tile is divided, but of one dtype: the kernel is the same.
    partial, counters = _no_sums(device), units
    if p.partial_size:
        partial, counters = workspace(device, p.partial_size, p.counter_count)
    bias = y if bias is None else _aligned(bias)
    residual = y if residual is None else _aligned(residual)
    launcher = p.launchers.get(device.index)
    if launcher is None or launch_is_watched():
        _launch_by_triton(p, x, units, (y, bias, residual, partial, counters))
    else:
        addresses = (
            y.data_ptr(), bias.data_ptr(), residual.data_ptr(), partial.data_ptr(),
            counters.data_ptr(),
        )  # fmt: skip
        launcher(p, x, units, addresses)
    return y


@cache
def _no_sums(device: torch.device) -> Tensor:
    return torch.empty(4, dtype=torch.float32, device=device)


def _aligned(added: Tensor) -> Tensor:
    """A bias or a residual where a kernel may read 16 bytes at once."""
    return added if added.data_ptr() % 16 == 0 else added.clone()


def _launch_by_triton(p: Plan, x: Tensor, units: Tensor, memory: tuple[Tensor, ...]) -> None:
    arguments = (*descriptors(p, x, units), *memory, *p.numbers)
    with tma_cache_hints(w4a16_hopper.__name__, p.cache_hints):
        kernel = w4a16_hopper[(p.division.blocks,)](*arguments, **p.constants, **p.options)
    key = (p.kernel_key, x.device.index)
    if key not in _launchers:
        try:
            _launchers[key] = _Launcher(kernel)
        except CannotPrepare:
            _launchers[key] = None
    p.launchers[x.device.index] = _launchers[key]
