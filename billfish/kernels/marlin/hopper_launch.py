"""Launching the Hopper kernel: descriptors, division of the work, workspace."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from billfish.kernels.marlin import dequant
from billfish.kernels.marlin.configs import HopperConfig
from billfish.kernels.marlin.hopper_gemm import w4a16_hopper
from billfish.kernels.marlin.packing import CODE_WORDS, UNIT_K, UNIT_N, stored_groups
from billfish.kernels.marlin.workspace import processor_count, zeroed_counters

_REGISTERS = 65536  # 32-bit registers of a multiprocessor
_MAX_REGISTERS = 168  # a thread at launch; consumers take more from the producer's share


@dataclass(frozen=True, slots=True)
class Division:
    """How `hopper_schedule.Schedule` divides the tiles among `blocks` thread blocks."""

    blocks: int
    steps: int
    tiles_n: int
    tiles_m: int
    whole: int
    share: int
    extra: int

    @property
    def divided(self) -> int:
        """Tiles whose steps are divided."""
        return self.tiles_n * self.tiles_m - self.whole


def divide(config: HopperConfig, m: int, n_units: int, steps: int, processors: int) -> Division:
    """Divide the tiles of an [m, 64 n_units] output among the blocks that the GPU runs at once."""
    tiles_n = -(-n_units * UNIT_N // config.tile_n)
    tiles_m = -(-m // config.tile_m)
    tiles = tiles_n * tiles_m
    slots = processors * config.grid_per_sm
    waves = -(-tiles // slots)
    if not config.stream_k or tiles >= 0.8 * waves * slots:
        # Where the last wave is nearly full, adding up shared tiles would cost more than it gains.
        return Division(min(slots, tiles), steps, tiles_n, tiles_m, tiles, 0, 0)
    blocks = min(slots, tiles * steps)
    whole = tiles // blocks * blocks
    share, extra = divmod((tiles - whole) * steps, blocks)
    return Division(blocks, steps, tiles_n, tiles_m, whole, share, extra)


def _mode(has_zeros: bool, zero_point: str, sum_scale: bool) -> str:
    if sum_scale:
        return "zero" if has_zeros else "code"
    return {"symmetric": "scale", "integer": "scale_zero", "offset": "scale_offset"}[zero_point]


def descriptors(
    x: Tensor, units: Tensor, config: HopperConfig, meta_rows: int
) -> tuple[TensorDescriptor, TensorDescriptor, TensorDescriptor]:
    """TMA descriptors of the codes, the scales and zeros, and X [M, K].

    x: unit stride along K, rows and base aligned to 16 bytes.
    """
    blocks, steps, words = units.shape
    taken = config.tile_n // UNIT_N
    strides = [steps * words, words, 32, 1]
    code_desc = TensorDescriptor(
        units, [blocks, steps, 32, 32], strides, [taken, 1, 32, 32],
        gl.NVMMASharedLayout(128, 32, 4),
    )  # fmt: skip
    meta_desc = TensorDescriptor(
        units.view(-1)[CODE_WORDS:], [blocks, steps, meta_rows, 32], strides,
        [taken, 1, meta_rows, 32], gl.NVMMASharedLayout(0, 32, 4),
    )  # fmt: skip
    x_desc = TensorDescriptor(
        x,
        list(x.shape),
        list(x.stride()),
        [config.tile_m, UNIT_K],
        gl.NVMMASharedLayout(128, 16, 2),
    )
    return code_desc, meta_desc, x_desc


def arguments(
    x: Tensor,
    units: Tensor,
    y: Tensor,
    bias: Tensor | None,
    partial: Tensor,
    counters: Tensor,
    division: Division,
    config: HopperConfig,
    zero_point: str,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The kernel's positional and keyword arguments."""
    has_zeros = zero_point != "symmetric"
    groups = stored_groups(units, has_zeros)
    sum_scale = config.sum_scale and groups == 1 and zero_point != "offset"
    mode = _mode(has_zeros, zero_point, sum_scale)
    producer, consumer, at_launch = _register_budget(config)
    descs = descriptors(x, units, config, groups * (2 if has_zeros else 1))
    d = division
    positional = (
        *descs, y, y if bias is None else bias, partial, counters, *y.shape,
        d.steps, d.tiles_n, d.tiles_m, d.whole, d.share, d.extra,
    )  # fmt: skip
    keywords = {
        "ROWS": config.rows,
        "CONSUMERS": config.consumers,
        "TILE_M": config.tile_m,
        "STAGES": config.stages,
        "GROUPS": groups,
        "ZEROS": has_zeros,
        "SUM_SCALE": sum_scale,
        "OVERLAP": config.overlap,
        "CARRY": config.carry and not sum_scale,
        "PDL": config.pdl,
        "GROUP_M": 0 if d.tiles_m == 1 else config.group_m,
        "HAS_BIAS": bias is not None,
        "ASM": dequant.assembly("bf16" if x.dtype == torch.bfloat16 else "f16", mode),
        "REGS": dequant.constraints(mode),
        "PRODUCER_REGS": producer,
        "CONSUMER_REGS": consumer,
        "num_warps": 4,
        "maxnreg": at_launch,
        "launch_pdl": config.pdl,
    }
    return positional, keywords


def _register_budget(config: HopperConfig) -> tuple[int, int, int]:
    """Registers a thread of the producer, of consumers after the first, and of all at launch.

    The producer warp is padded to a warpgroup. What it gives up goes to the consumers. Where a
    product is carried from stage to stage by several consumers, the assembler holds all of them to
    the registers of the smallest partition, so the producer keeps as many as the product needs.
    """
    producer = 40
    if config.carry and config.consumers > 1:
        producer = config.rows // 64 * (config.tile_m // 2 + 32) + 16
    warps = 4 * config.consumers + 4
    at_launch = min(_REGISTERS // (32 * warps * config.blocks_per_sm) // 8 * 8, _MAX_REGISTERS)
    consumer = (at_launch * warps - 4 * producer) // (4 * config.consumers) // 8 * 8
    return producer, min(consumer, 232), at_launch


def launch(
    x: Tensor,
    units: Tensor,
    n: int,
    bias: Tensor | None,
    config: HopperConfig,
    zero_point: str,
) -> Tensor:
    """Y [M, n] = X [M, K] W^T + bias on the current stream. x: as `descriptors` wants it."""
    blocks, steps, _ = units.shape
    y = torch.empty(x.shape[0], n, dtype=x.dtype, device=x.device)
    division = divide(config, x.shape[0], blocks, steps, processor_count(x.device))
    partial, counters = y, units  # never touched where no tile is divided
    if division.divided:
        size = 2 * division.blocks * config.tile_n * config.tile_m
        partial = torch.empty(size, dtype=torch.float32, device=x.device)
        counters = zeroed_counters(x.device, division.divided * config.consumers)
    positional, keywords = arguments(
        x, units, y, bias, partial, counters, division, config, zero_point
    )
    w4a16_hopper[(division.blocks,)](*positional, **keywords)
    return y
