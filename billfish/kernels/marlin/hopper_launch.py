"""Launching the Hopper kernel.

Triton's launcher binds and specializes arguments anew at every call, which takes longer than most
of these products. So all that a call shares with earlier ones is kept: the plan of a shape, and the
compiled kernel, which is launched directly.
"""

from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

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


class _Address:
    """Stands for a tensor of which only the address is asked."""

    __slots__ = ("_address",)

    def __init__(self, address: int) -> None:
        self._address = address

    def data_ptr(self) -> int:
        return self._address


class _Descriptor:
    """What Triton's launcher reads of a TensorDescriptor, without the checks of making one."""

    __slots__ = ("base", "padding", "round_f32_to_tf32", "shape", "strides")

    def __init__(self, base: Any, shape: Any, strides: Any) -> None:
        self.base = base
        self.shape = shape
        self.strides = strides
        self.padding = "zero"
        self.round_f32_to_tf32 = False


_compiled: dict[tuple[Any, ...], Any] = {}


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
    kernel = _compiled.get(key)
    if kernel is None:
        grid = (p.division.blocks,)
        arguments = (*descriptors(p, x, units), *memory, *p.numbers)
        _compiled[key] = w4a16_hopper[grid](*arguments, **p.constants, **p.options)
        return y
    address = units.data_ptr()
    (codes, _), (meta, _) = p.weight_shapes
    arguments = (
        _Descriptor(_Address(address), codes, p.weight_strides),
        _Descriptor(_Address(address + 4 * CODE_WORDS), meta, p.weight_strides),
        _Descriptor(x, x.shape, x.stride()),
        *memory, *p.numbers, *p.constants.values(),
    )  # fmt: skip
    _run(kernel, p.division.blocks, arguments)
    return y


def _run(kernel: Any, blocks: int, arguments: tuple[Any, ...]) -> None:
    """Launch a compiled kernel on the current stream, as Triton's JITFunction.run ends."""
    stream = torch._C._cuda_getCurrentRawStream(torch.cuda.current_device())
    hooks = knobs.runtime
    kernel.run(
        blocks, 1, 1, stream, kernel.function, kernel.packed_metadata,
        kernel.launch_metadata((blocks,), stream, *arguments),
        hooks.launch_enter_hook, hooks.launch_exit_hook, *arguments,
    )  # fmt: skip
