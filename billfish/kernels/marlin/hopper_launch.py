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
_ADDRESSES, _NUMBERS = 23, 28


class _Launcher:
    """What the launches of a plan share: the kernel, and arguments that are ready for the driver.

    The arguments are kept by the addresses of weights and activations. A tensor map holds an
    address, a shape and strides, so one that fits stays valid whatever tensor lives there.
    """

    def __init__(self, p: Plan, kernel: Any, prepared: PreparedLaunch) -> None:
        self._plan = p
        self._kernel = kernel
        self._prepared = prepared
        self._blocks = p.division.blocks

    def __call__(self, x: Tensor, units: Tensor, addresses: tuple[int, ...], stream: int) -> None:
        key = (self, units.data_ptr(), x.data_ptr(), x.shape[1], x.stride(0))
        ready = _ready.get(key)
        if ready is None:
            if len(_ready) >= _KEPT:
                _ready.clear()
            ready = _ready[key] = self._prepare(x, units)
        self._prepared(self._blocks, stream, ready, _ADDRESSES, addresses)

    def _prepare(self, x: Tensor, units: Tensor) -> tuple[Chunk, Chunk]:
        """The arguments before the addresses, and those after them."""
        (codes, _), (meta, _) = self._plan.weight_shapes
        address, strides = units.data_ptr(), self._plan.weight_strides
        maps = [
            (address, codes, strides),
            (address + 4 * CODE_WORDS, meta, strides),
            (x.data_ptr(), list(x.shape), [x.stride(0), 1]),
        ]
        before: list[int | bytes] = []
        for index, (start, shape, steps) in enumerate(maps):
            before += [tensor_map(self._kernel, index, start, shape, steps), *shape, *steps]
        chunk = self._prepared.chunk
        return chunk(0, before), chunk(_NUMBERS, self._plan.numbers)


_ready: dict[Any, tuple[Chunk, Chunk]] = {}
"""By launcher, addresses and strides. Of all launchers together, because prompts of every length
make one each."""
_KEPT = 1 << 15  # about 1 KB each

_prepared: dict[tuple[Any, ...], PreparedLaunch | None] = {}
"""By kernel and device; None where Triton has to launch the kernel."""


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
    epilogue = (bias is not None, residual is not None, silu_mul)
    p = plan(
        x.shape[0], units.shape, x.dtype, gpu_of(device), outputs, zero_point, epilogue,
        batch_invariant, config,
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
        launcher(x, units, addresses, torch._C._cuda_getCurrentRawStream(device.index))
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
    index = x.device.index
    key = (p.kernel_key, index)
    if key not in _prepared:
        try:
            _prepared[key] = PreparedLaunch(kernel, FIELDS)
        except CannotPrepare:
            _prepared[key] = None
    prepared = _prepared[key]
    p.launchers[index] = None if prepared is None else _Launcher(p, kernel, prepared)
