"""How the GEMM kernels are tiled, and which tiling a problem gets."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class HopperConfig:
    """One compiled form of the Hopper kernel; hopper_gemm explains the techniques.

    rows: rows of W a warpgroup computes, 64 or 128. consumers: warpgroups that compute, 1, 2 or 4.
    tile_m: tokens of a tile, 8 to 256. stages: depth of the queue. blocks_per_sm: thread blocks
    for which a multiprocessor has room. grid_per_sm: how many of them are launched; the room left
    over is for the blocks of the next kernel, which fill their queues early (pdl). group_m: token
    blocks of a raster group, where M > tile_m.
    """

    rows: int
    consumers: int
    tile_m: int
    stages: int
    blocks_per_sm: int = 1
    grid_per_sm: int = 1
    sum_scale: bool = True
    overlap: bool = True
    stream_k: bool = True
    pdl: bool = True
    group_m: int = 8

    @property
    def tile_n(self) -> int:
        """Rows of W of a tile."""
        return self.rows * self.consumers

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
