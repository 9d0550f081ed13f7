"""What the GEMM kernels are asked for, how they are tiled, and which tiling a problem gets."""

from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor

from billfish.kernels.marlin import tuning


class Gpu(NamedTuple):
    """What a configuration depends on: the name that CUDA gives a GPU, and its multiprocessors."""

    name: str
    processors: int


class Product(NamedTuple):
    """What a kernel computes besides X [M, K] times units of `zero_point`: its epilogue.

    Y [M, outputs] = act(X W^T + bias) + residual. With `silu_mul`, act is silu(gate) * up of rows
    stored by turns (gpu.interleave), else nothing. bias: a value a row of W, in the order gate, up;
    residual: contiguous [M, outputs].
    """

    outputs: int
    zero_point: str = "symmetric"
    bias: Tensor | None = None
    residual: Tensor | None = None
    silu_mul: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class HopperConfig:
    """One compiled form of the Hopper kernel; hopper_gemm explains the techniques.

    rows: rows of W a warpgroup computes, 64 or 128. consumers: warpgroups that compute, 1, 2 or 4.
    tile_m: tokens of a tile, 8 to 256. stages: depth of the queue. blocks_per_sm: thread blocks
    for which a multiprocessor has room. grid_per_sm: how many of them are launched; the room left
    over is for the blocks of the next kernel, which fill their queues early (pdl). parts: how many
    blocks share each tile, where its steps can be divided by that; 0: Stream-K's shares, which may
    lie in two tiles. owned: instead of either, a shared tile belongs to a block, to which others
    add (hopper_schedule). sharing_cost: about how many steps adding up the sums of shared tiles
    takes; tiles stay whole where sharing would save less. carry: the last product of a stage runs
    on while the next stage is dequantized; only where the scale is applied to fragments. group_m:
    token blocks of a raster group, where M > tile_m. stream_weights, keep_x: weights leave the L2
    cache first, and X last.
    """

    rows: int
    consumers: int
    tile_m: int
    stages: int
    blocks_per_sm: int = 1
    grid_per_sm: int = 1
    parts: int = 0
    owned: bool = False
    sharing_cost: int = 10
    sum_scale: bool = True
    overlap: bool = True
    carry: bool = False
    stream_k: bool = True
    pdl: bool = True
    group_m: int = 8
    stream_weights: bool = True
    keep_x: bool = True

    @property
    def tile_n(self) -> int:
        """Rows of W of a tile."""
        return self.rows * self.consumers

    @property
    def together(self) -> int:
        """Sums of a tile's other parts that are loaded at a time, as many as registers hold."""
        size = self.rows * self.tile_m
        if self.parts >= 8 and size <= 1024:
            return 8
        return 4 if self.parts and size <= 2048 else 1

    def shares(self, tiles: int, steps: int, slots: int) -> bool:
        """Whether some of `tiles` are shared: `slots` blocks would idle for long if none were."""
        waves = -(-tiles // slots)
        idle = (waves - tiles / slots) * steps
        pays = idle > self.sharing_cost and idle > 0.05 * waves * steps
        return self.stream_k and steps > 1 and pays

    def stage_bytes(self, meta_rows: int) -> int:
        """Shared memory of one stage; `meta_rows`: scales and zeros a row of a unit."""
        return self.tile_n * (64 + 2 * meta_rows) + self.tile_m * 256


@dataclass(frozen=True, slots=True, kw_only=True)
class TritonConfig:
    """One compiled form of the portable kernel.

    rows: rows of W of a tile, a multiple of 64. tile_m: tokens of a tile. split: programs that
    share the columns of a tile. stages: depth of the software pipeline.
    """

    rows: int
    tile_m: int
    split: int
    stages: int


def hopper_config(
    m: int, units: tuple[int, ...], gpu: Gpu, batch_invariant: bool = False
) -> HopperConfig:
    """The configuration for m tokens and units of shape (blocks, steps, words).

    That of the GPU's table where it has this weight, else one by rules. With `batch_invariant`, one
    that adds the products of a row up in an order that does not depend on m: tiles are not shared,
    and the scale always goes to the fragments.
    """
    if batch_invariant:
        return _invariant(m, _by_rule(m, units, gpu.processors))
    tuned = tuning.lookup(gpu.name, m, units)
    return HopperConfig(**tuned) if tuned else _by_rule(m, units, gpu.processors)


def _invariant(m: int, config: HopperConfig) -> HopperConfig:
    if m > 32:
        return replace(
            config, rows=64, consumers=2, stages=min(config.stages, 4), stream_k=False,
            owned=False, sum_scale=False, carry=config.tile_m < 256,
        )  # fmt: skip
    return HopperConfig(
        rows=64, consumers=1, tile_m=config.tile_m, stages=6, blocks_per_sm=3, grid_per_sm=3,
        stream_k=False, sum_scale=False,
    )  # fmt: skip


def _by_rule(m: int, units: tuple[int, ...], processors: int) -> HopperConfig:
    """What was fastest on an H200 (132 multiprocessors).

    Below 64 tokens reading weights is the work, so the bytes a multiprocessor reads decide: small
    shares cannot hide the start and the end of a tile, so one block a multiprocessor runs and the
    next kernel's blocks move in beside it.
    """
    blocks, steps, _ = units
    megabytes = blocks * steps * 4096 / processors / 1e6
    if m <= 32:
        tile_m = next(t for t in (8, 16, 32) if m <= t)
        if megabytes > 1.2 and tile_m <= 16:
            return HopperConfig(
                rows=128, consumers=1, tile_m=tile_m, stages=5, blocks_per_sm=3, grid_per_sm=3
            )
        if megabytes > 0.8 and tile_m == 32:
            return HopperConfig(rows=128, consumers=2, tile_m=32, stages=7)
        return HopperConfig(
            rows=64, consumers=2, tile_m=tile_m, stages=5 if tile_m == 32 else 6, blocks_per_sm=2,
            grid_per_sm=1 if megabytes < 0.15 else 2,
        )  # fmt: skip
    if m <= 64:
        if megabytes > 0.3:
            return HopperConfig(rows=64, consumers=4, tile_m=64, stages=5, sum_scale=False)
        return HopperConfig(rows=64, consumers=2, tile_m=64, stages=4, sum_scale=False, carry=True)
    tiles = -(-blocks // 2) * -(-m // 256)
    waves = -(-tiles // processors)
    # Tokens are padded to tiles: where half a tile of 256 stays empty, of at most four, those of
    # 128 compute so much less that it outweighs what they take longer a token.
    half_empty = 1.12 * (-(-m // 128) * 128) < -(-m // 256) * 256
    if m > 128 and not half_empty and (tiles >= 0.8 * waves * processors or waves > 4):
        config = HopperConfig(rows=64, consumers=2, tile_m=256, stages=3, sum_scale=False)
        owned = replace(config, owned=True, sharing_cost=8)
    else:
        config = HopperConfig(
            rows=64, consumers=2, tile_m=128, stages=4, sum_scale=False, carry=megabytes < 0.8
        )
        owned = replace(config, owned=True)
    # Owners pay where all blocks have whole tiles, too: helpers then come well before them.
    tiles = -(-blocks // 2) * -(-m // config.tile_m)
    return owned if tiles > processors and owned.shares(tiles, steps, processors) else config


def triton_config(
    m: int, units: tuple[int, ...], gpu: Gpu, batch_invariant: bool = False
) -> TritonConfig:
    """The portable kernel's configuration for m tokens and units of shape (blocks, steps, words).

    With `batch_invariant` columns are not split: what is split depends on m.
    """
    blocks, steps, _ = units
    tile_m = next((t for t in (16, 32) if m <= t), 64)
    rows = 128 if blocks > gpu.processors else 64
    tiles = -(-blocks * 64 // rows) * -(-m // tile_m)
    split = 1
    while not batch_invariant and tiles * split < 2 * gpu.processors and split * 8 <= steps:
        split *= 2
    return TritonConfig(rows=rows, tile_m=tile_m, split=split, stages=4 if tile_m <= 32 else 3)
