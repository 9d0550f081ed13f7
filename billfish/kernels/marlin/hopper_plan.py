"""The plan of a product for the Hopper kernel: all that does not depend on addresses."""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch

from billfish.errors import KernelArgumentError
from billfish.kernels.marlin import dequant
from billfish.kernels.marlin.configs import Gpu, HopperConfig, hopper_config
from billfish.kernels.marlin.packing import CODE_WORDS, META_WORDS, UNIT_N

_REGISTERS = 65536  # 32-bit registers of a multiprocessor
_SHARED_MEMORY = 233472  # bytes of a multiprocessor, compute capability 9.0
_LEAD = 2  # steps that the owner of a tile computes beyond its helpers', who leave their sums
_MAX_REGISTERS = 168  # a thread at launch; consumers take more from the producer's share


@dataclass(frozen=True, slots=True)
class Division:
    """How `hopper_schedule.Schedule` divides the tiles among `blocks` thread blocks.

    tiles_n, tiles_m: tiles along the rows of W and along the tokens; steps: of 128 columns, of one
    tile. The first `whole` tiles are dealt out whole. Of the steps of the rest every block gets
    `share`, the first `extra` blocks one more. Of equal parts (`HopperConfig.parts`) none is whole,
    and a tile's steps are a multiple of `share`. With `HopperConfig.owned`, the first blocks each
    compute the first `own` steps of a tile of the rest, and only the steps after those are divided,
    among the other blocks.
    """

    blocks: int
    steps: int
    tiles_n: int
    tiles_m: int
    whole: int
    share: int
    extra: int
    own: int = 0

    @property
    def divided(self) -> int:
        """Tiles whose steps are divided."""
        return self.tiles_n * self.tiles_m - self.whole


def divide(config: HopperConfig, m: int, n_units: int, steps: int, processors: int) -> Division:
    """Divide the tiles of an [m, 64 n_units] output among the blocks that the GPU runs at once.

    Raises KernelArgumentError: more steps in all than the kernel's 32-bit numbers count.
    """
    tiles_n = -(-n_units * UNIT_N // config.tile_n)
    tiles_m = -(-m // config.tile_m)
    tiles = tiles_n * tiles_m
    slots = processors * config.grid_per_sm
    if tiles * steps >= 1 << 31:
        size = f"{m} x {64 * n_units} x {128 * steps}"
        raise KernelArgumentError(f"a product of {size} is too large for one call: split the rows")
    if config.stream_k and config.parts and not config.owned and steps % config.parts == 0:
        parts = config.parts
        return Division(tiles * parts, steps, tiles_n, tiles_m, 0, steps // parts, 0)
    if not config.shares(tiles, steps, slots):
        return Division(min(slots, tiles), steps, tiles_n, tiles_m, tiles, 0, 0)
    if config.owned:
        return _owned(slots, steps, tiles_n, tiles_m)
    blocks = min(slots, tiles * steps)
    whole = tiles // blocks * blocks
    share, extra = divmod((tiles - whole) * steps, blocks)
    return Division(blocks, steps, tiles_n, tiles_m, whole, share, extra)


def _owned(slots: int, steps: int, tiles_n: int, tiles_m: int) -> Division:
    """Full waves of whole tiles, then tiles with an owner each; all other blocks are helpers."""
    tiles = tiles_n * tiles_m
    whole = tiles // slots * slots
    owners, helpers = tiles - whole, slots - (tiles - whole)
    own = -(-(owners * steps + helpers * _LEAD) // slots)
    own = max(1, min(own, steps - 1))
    rest = owners * (steps - own)
    helpers = helpers if whole else min(helpers, rest)
    return Division(
        owners + helpers, steps, tiles_n, tiles_m, whole, *divmod(rest, helpers), own
    )  # fmt: skip


def _mode(has_zeros: bool, zero_point: str, sum_scale: bool) -> str:
    if sum_scale:
        return "zero" if has_zeros else "code"
    return {"symmetric": "scale", "integer": "scale_zero", "offset": "scale_offset"}[zero_point]


@dataclass(frozen=True)
class Plan:
    """All about a product that does not depend on addresses: X [m, K] times units.

    units: the shape of the units, (blocks, steps, words). outputs, zero_point, silu_mul: see
    configs.Product.
    """

    m: int
    outputs: int
    units: tuple[int, ...]
    zero_point: str
    dtype: torch.dtype
    has_bias: bool
    has_residual: bool
    silu_mul: bool
    processors: int
    config: HopperConfig

    @cached_property
    def division(self) -> Division:
        return divide(self.config, self.m, self.units[0], self.units[1], self.processors)

    @cached_property
    def meta_rows(self) -> int:
        """Scales and zeros a row of a unit."""
        return (self.units[2] - CODE_WORDS) // META_WORDS

    @cached_property
    def groups(self) -> int:
        return self.meta_rows // (1 if self.zero_point == "symmetric" else 2)

    @cached_property
    def partial_size(self) -> int:
        """Elements of the workspace of partial sums: two slots a block, of which owners use one."""
        d, size = self.division, self.config.tile_n * self.config.tile_m
        slots = d.blocks + (d.divided if self.config.owned else d.blocks)
        return slots * size if d.divided else 0

    @cached_property
    def counter_count(self) -> int:
        return self.division.divided * self.config.consumers

    @cached_property
    def numbers(self) -> tuple[int, ...]:
        """The kernel's integer arguments."""
        d = self.division
        return (
            self.m, self.outputs, d.steps, d.tiles_n, d.tiles_m, d.whole, d.share, d.extra, d.own,
        )  # fmt: skip

    @cached_property
    def constants(self) -> dict[str, Any]:
        """The kernel's constexpr arguments, in order."""
        config = self.config
        has_zeros = self.zero_point != "symmetric"
        sum_scale = config.sum_scale and self.groups == 1 and self.zero_point != "offset"
        mode = _mode(has_zeros, self.zero_point, sum_scale)
        producer, consumer, _ = register_budget(config)
        return {
            "ROWS": config.rows,
            "CONSUMERS": config.consumers,
            "TILE_M": config.tile_m,
            "STAGES": min(config.stages, max_stages(config, self.meta_rows)),
            "GROUPS": self.groups,
            "ZEROS": has_zeros,
            "SUM_SCALE": sum_scale,
            "OVERLAP": config.overlap,
            "CARRY": config.carry and not sum_scale,
            "PDL": config.pdl,
            "GROUP_M": 0 if self.division.tiles_m == 1 else config.group_m,
            "OWNED": config.owned,
            "HAS_BIAS": self.has_bias,
            "HAS_RESIDUAL": self.has_residual,
            "SILU_MUL": self.silu_mul,
            "STREAM_WEIGHTS": config.stream_weights,
            "KEEP_X": config.keep_x,
            "TOGETHER": config.together,
            "ASM": dequant.assembly("bf16" if self.dtype == torch.bfloat16 else "f16", mode),
            "REGS": dequant.constraints(mode),
            "PRODUCER_REGS": producer,
            "CONSUMER_REGS": consumer,
        }

    @cached_property
    def cache_hints(self) -> dict[int, str]:
        """L2 policies, for `gluon_compat.tma_cache_hints`: units have 4 dimensions, X has 2."""
        hints = {4: "evict_first"} if self.config.stream_weights else {}
        return hints | ({2: "evict_last"} if self.config.keep_x else {})

    @cached_property
    def options(self) -> dict[str, Any]:
        """What the compiler takes."""
        at_launch = register_budget(self.config)[2]
        return {"num_warps": 4, "maxnreg": at_launch, "launch_pdl": self.config.pdl}

    @cached_property
    def kernel_key(self) -> tuple[Any, ...]:
        """Plans with this in common run the same kernel (Triton specializes on `outputs`)."""
        return self.outputs, *self.constants.values(), self.dtype, self.config.blocks_per_sm

    @cached_property
    def weight_shapes(self) -> tuple[tuple[list[int], list[int]], tuple[list[int], list[int]]]:
        """Shapes of the codes and of the scales and zeros, each with the block one stage takes."""
        blocks, steps, _ = self.units
        taken = self.config.tile_n // UNIT_N
        return (
            ([blocks, steps, 32, 32], [taken, 1, 32, 32]),
            ([blocks, steps, self.meta_rows, 32], [taken, 1, self.meta_rows, 32]),
        )

    @cached_property
    def weight_strides(self) -> list[int]:
        return [self.units[1] * self.units[2], self.units[2], 32, 1]


@lru_cache(maxsize=4096)
def plan(
    m: int,
    units: tuple[int, ...],
    dtype: torch.dtype,
    gpu: Gpu,
    outputs: int,
    zero_point: str = "symmetric",
    epilogue: tuple[bool, bool, bool] = (False, False, False),
    batch_invariant: bool = False,
    config: HopperConfig | None = None,
) -> Plan:
    """The plan of a product, with the configuration for its shape unless one is given.

    epilogue: whether it has a bias and a residual, and whether it is silu(gate) * up.
    """
    config = config or hopper_config(m, units, gpu, batch_invariant)
    return Plan(m, outputs, units, zero_point, dtype, *epilogue, gpu.processors, config)


def max_stages(config: HopperConfig, meta_rows: int) -> int:
    """Stages that fit in shared memory beside the staging area of the output (2 KiB a consumer)."""
    # A block reserves 1 KiB of the multiprocessor's memory for itself.
    memory = _SHARED_MEMORY // config.blocks_per_sm - 1024 - 2048 * config.consumers - 512
    return memory // config.stage_bytes(meta_rows)


def register_budget(config: HopperConfig) -> tuple[int, int, int]:
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
