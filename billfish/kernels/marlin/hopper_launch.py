"""Launching the Hopper kernel.

Triton's launcher binds and specializes arguments anew at every call, which takes longer than most
of these products. So all that a call shares with earlier ones is kept: the plan of a shape, and the
compiled kernel, which is launched directly.
"""

from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from billfish.kernels.gluon_compat import DirectLaunch
from billfish.kernels.marlin.configs import HopperConfig
from billfish.kernels.marlin.hopper_gemm import w4a16_hopper
from billfish.kernels.marlin.hopper_plan import Plan, plan
from billfish.kernels.marlin.packing import CODE_WORDS, UNIT_K
from billfish.kernels.marlin.workspace import processor_count, zeroed_counters

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


class _Launcher:
    """A compiled kernel, and what its launches share: the tensor maps of weights and activations.

    A tensor map holds an address, a shape and strides, so one that fits stays valid whatever tensor
    lives at that address.
    """

    _KEPT = 4096

    def __init__(self, kernel: Any, plan: Plan) -> None:
        self._launch = DirectLaunch(kernel)
        self._constants = tuple(plan.constants.values())
        self._weights: dict[Any, list[Any]] = {}
        self._activations: dict[Any, list[Any]] = {}

    def __call__(self, p: Plan, x: Tensor, units: Tensor, memory: tuple[Tensor, ...]) -> None:
        address = units.data_ptr()
        weights = self._weights.get((address, p.units))
        if weights is None:
            weights = self._weight_maps(p, address)
        key = (x.data_ptr(), x.shape, x.stride(0))
        activations = self._activations.get(key)
        if activations is None:
            if len(self._activations) >= self._KEPT:
                self._activations.clear()
            activations = self._launch.tensor_map(2, key[0], list(x.shape), [key[2], 1])
            self._activations[key] = activations
        self._launch(
            p.division.blocks, [*weights, *activations, *memory, *p.numbers, *self._constants]
        )

    def _weight_maps(self, p: Plan, address: int) -> list[Any]:
        if len(self._weights) >= self._KEPT:
            self._weights.clear()
        (codes, _), (meta, _) = p.weight_shapes
        maps = self._launch.tensor_map(0, address, codes, p.weight_strides)
        maps += self._launch.tensor_map(1, address + 4 * CODE_WORDS, meta, p.weight_strides)
        self._weights[address, p.units] = maps
        return maps


_launchers: dict[tuple[Any, ...], _Launcher] = {}


def launch(
    x: Tensor,
    units: Tensor,
    n: int,
    bias: Tensor | None,
    zero_point: str,
    config: HopperConfig | None = None,
) -> Tensor:
    """Y [M, n] = X [M, K] W^T + bias on the current stream. x: as `descriptors` wants it."""
    device = x.device
    shape: Any = tuple(units.shape)
    p = plan(
        x.shape[0], n, shape, zero_point, x.dtype, bias is not None, processor_count(device), config
    )
    y = torch.empty((p.m, n), dtype=x.dtype, device=device)
    partial, counters = y, units  # never touched where no tile is divided
    if p.partial_size:
        partial = torch.empty(p.partial_size, dtype=torch.float32, device=device)
        counters = zeroed_counters(device, p.counter_count)
    memory = (y, y if bias is None else bias, partial, counters)
    key = (p.kernel_key, memory[1].data_ptr() % 16, device.index)
    launcher = _launchers.get(key)
    if launcher is not None:
        launcher(p, x, units, memory)
    else:
        arguments = (*descriptors(p, x, units), *memory, *p.numbers)
        kernel = w4a16_hopper[(p.division.blocks,)](*arguments, **p.constants, **p.options)
        _launchers[key] = _Launcher(kernel, p)
    return y
