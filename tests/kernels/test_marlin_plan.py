"""How the Hopper kernel's work is divided, and what its configurations claim: no GPU needed."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from billfish.errors import KernelArgumentError
from billfish.kernels.marlin import hopper_plan
from billfish.kernels.marlin.configs import HopperConfig, hopper_config, triton_config
from billfish.kernels.marlin.packing import unit_words

PROCESSORS = 132
quick = settings(max_examples=200, deadline=None, derandomize=True)

configurations = st.builds(
    HopperConfig,
    rows=st.sampled_from([64, 128]),
    consumers=st.sampled_from([1, 2, 4]),
    tile_m=st.sampled_from([8, 16, 32, 64, 128, 256]),
    stages=st.just(4),
    blocks_per_sm=st.integers(1, 3),
    grid_per_sm=st.integers(1, 3),
    stream_k=st.booleans(),
)


def block_steps(division, pid):
    """(tile, step) pairs of one block, in order: what hopper_schedule.Schedule walks through."""
    steps = division.steps
    for tile in range(pid, division.whole, division.blocks):
        yield from ((tile, step) for step in range(steps))
    start = pid * division.share + min(pid, division.extra)
    stop = (pid + 1) * division.share + min(pid + 1, division.extra)
    for flat in range(start, stop):
        yield division.whole + flat // steps, flat % steps


@quick
@given(configurations, st.integers(1, 2000), st.integers(1, 60), st.integers(1, 40))
def test_every_step_is_computed_once(config, m, n_units, steps):
    division = hopper_plan.divide(config, m, n_units, steps, 8)
    assert 1 <= division.blocks <= 8 * config.grid_per_sm
    assert division.tiles_n * config.tile_n >= n_units * 64
    assert division.tiles_m * config.tile_m >= m
    seen = [pair for pid in range(division.blocks) for pair in block_steps(division, pid)]
    tiles = division.tiles_n * division.tiles_m
    assert sorted(seen) == [(tile, step) for tile in range(tiles) for step in range(steps)]


@quick
@given(configurations, st.integers(1, 2000), st.integers(1, 60), st.integers(1, 40))
def test_blocks_get_equal_shares(config, m, n_units, steps):
    """With Stream-K, blocks differ by one step in the divided part and by nothing before it."""
    division = hopper_plan.divide(config, m, n_units, steps, 8)
    counts = [sum(1 for _ in block_steps(division, pid)) for pid in range(division.blocks)]
    if division.divided:
        assert max(counts) - min(counts) <= 1
    else:
        assert max(counts) - min(counts) <= steps


def test_sharing_is_for_blocks_that_would_idle():
    config = HopperConfig(rows=64, consumers=2, tile_m=16, stages=4)
    assert hopper_plan.divide(config, 1, 2 * 132, 64, 132).divided == 0  # one tile a block
    assert hopper_plan.divide(config, 1, 2 * 40, 64, 132).divided == 40  # 92 blocks would idle
    assert hopper_plan.divide(config, 1, 2 * 125, 64, 132).divided == 0  # 7 blocks idle: cheaper
    off = HopperConfig(rows=64, consumers=2, tile_m=16, stages=4, stream_k=False)
    assert hopper_plan.divide(off, 1, 2 * 40, 64, 132).divided == 0


def test_more_steps_than_numbers_is_refused():
    config = HopperConfig(rows=64, consumers=2, tile_m=256, stages=3)
    largest = hopper_plan.divide(config, 1 << 20, 152064 // 64, 160, 132)
    assert largest.tiles_m * largest.tiles_n * largest.steps < 2**31
    with pytest.raises(KernelArgumentError, match="too large"):
        hopper_plan.divide(config, 1 << 20, 152064 // 64, 512, 132)


SHAPES = [(64, 16), (576, 1408), (4096, 4096), (4096, 14336), (28672, 4096), (57344, 8192)]


def make_plan(config):
    units = (64, 32, unit_words(128, False))
    return hopper_plan.plan(9, units, torch.float16, PROCESSORS, 4096, config=config)


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("zero_point", ["symmetric", "integer", "offset"])
@pytest.mark.parametrize("group_size", [16, 32, 64, 128, -1])
def test_plans_fit_the_multiprocessor(group_size, zero_point, batch_invariant):
    for m in (1, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 256, 257, 4096):
        for n, k in SHAPES:
            units = (-(-n // 64), -(-k // 128), unit_words(group_size, zero_point != "symmetric"))
            plan = hopper_plan.plan(
                m, units, torch.float16, PROCESSORS, n, zero_point, batch_invariant=batch_invariant
            )
            config, constants = plan.config, plan.constants
            memory = constants["STAGES"] * config.stage_bytes(plan.meta_rows)
            assert constants["STAGES"] >= 2
            assert config.blocks_per_sm * (memory + 1024) <= 228 * 1024
            assert constants["SUM_SCALE"] <= (plan.groups == 1 and zero_point != "offset")
            assert config.tile_m >= min(m, 128)
            assert config.grid_per_sm <= config.blocks_per_sm
            producer, consumer, at_launch = hopper_plan.register_budget(config)
            warps = 4 * config.consumers + 4
            assert at_launch * warps * 32 * config.blocks_per_sm <= 65536
            assert 4 * (producer + config.consumers * consumer) <= at_launch * warps


def test_workspace_is_sized_by_the_division():
    plan = make_plan(HopperConfig(rows=64, consumers=2, tile_m=16, stages=4))
    assert plan.division.divided == 32
    assert plan.counter_count == 32 * 2
    assert plan.partial_size == 2 * plan.division.blocks * 128 * 16
    plan = make_plan(HopperConfig(rows=64, consumers=2, tile_m=16, stages=4, stream_k=False))
    assert plan.partial_size == plan.counter_count == 0


@pytest.mark.parametrize("shape", SHAPES)
def test_batch_invariant_plans_add_up_in_one_order(shape):
    """The order is that of the steps of a tile, with the scale on fragments, for every m."""
    units = (-(-shape[0] // 64), -(-shape[1] // 128), unit_words(128, False))
    for m in (1, 8, 9, 33, 64, 65, 129, 300, 5000):
        config = hopper_config(m, units, PROCESSORS, True)
        division = hopper_plan.divide(config, m, *units[:2], PROCESSORS)
        assert division.divided == 0
        assert not config.sum_scale
        assert config.tile_m >= min(m, 128)
        assert triton_config(m, torch.empty(units, device="meta"), PROCESSORS, True).split == 1


def test_heuristics_cover_every_size():
    for m in range(1, 600):
        config = hopper_config(m, (64, 32, 1056), PROCESSORS)
        assert config.tile_m in (8, 16, 32, 64, 128, 256)
        tiling = triton_config(m, torch.empty(64, 32, 1056, device="meta"), PROCESSORS)
        assert tiling.tile_m >= min(m, 64)
        assert tiling.split <= 32
