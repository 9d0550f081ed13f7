"""What each technique of the Hopper kernel is worth: `billfish bench gemm --ablation`."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from billfish.bench.gemm_cases import packed_copies, this_gpu, time_configs, units_of, weight_bytes
from billfish.kernels.marlin.configs import HopperConfig, hopper_config
from billfish.kernels.marlin.hopper_plan import max_stages

TECHNIQUES: dict[str, dict[str, Any]] = {
    "stream_k": {"stream_k": False},
    "equal parts": {"parts": 0},
    "owners of tiles": {"owned": False},
    "early launch": {"pdl": False},
    "double buffering": {"overlap": False, "carry": False},
    "carried products": {"carry": False},
    "deep queue": {"stages": 2},
    "scale on sums": {"sum_scale": False},
    "weights leave L2 first": {"stream_weights": False},
    "X leaves L2 last": {"keep_x": False},
    "grouped raster": {"group_m": 1},
    "several blocks a multiprocessor": {"blocks_per_sm": 1, "grid_per_sm": 1},
}
"""What turns each technique off."""

ABLATED = ((4096, 4096), (57344, 8192), (28672, 4096))
"""(N, K) of the products in which techniques are switched off."""
DEPTHS = (1, 2, 4, 8)
"""Stages of the queue that are timed, where shared memory has room: 1 loads nothing ahead."""


def techniques_off(n: int, k: int, m: int) -> dict[str, HopperConfig]:
    """The configuration of a case, and with each technique that it uses switched off."""
    chosen = hopper_config(m, units_of(n, k), this_gpu())
    settings = {"all on": chosen}
    for name, off in TECHNIQUES.items():
        changed = replace(chosen, **off)
        one_block = name == "grouped raster" and m <= chosen.tile_m
        if changed != chosen and not one_block:
            settings[name] = changed
    for depth in DEPTHS:
        if depth <= max_stages(chosen, 1):
            # A product carried into the next stage holds its own: it takes two of them.
            carry = chosen.carry and depth > 1
            settings[f"queue depth {depth}"] = replace(chosen, stages=depth, carry=carry)
    return settings


def ablation(shape: tuple[int, int], rows: Sequence[int], read_rate: float) -> list[dict[str, Any]]:
    """Each technique that the configurations of these cases use, switched off in turn."""
    n, k = shape
    weights = packed_copies(n, k)
    return [row for m in rows for row in _ablation(weights, n, k, m, read_rate)]


def _ablation(
    weights: list[Tensor], n: int, k: int, m: int, read_rate: float
) -> list[dict[str, Any]]:
    moved = weight_bytes("billfish", n, k, 128) + 2 * m * (n + k)
    return [
        {
            "family": "marlin", "kernel": "hopper_gemm", "technique": name,
            "setting": "on" if name == "all on" else "off", "case": f"{n}x{k} M={m}",
            "us": round(us, 2), "bytes": moved, "floor_us": round(moved / read_rate, 2),
        }
        for name, (us, _) in time_configs(weights, n, m, techniques_off(n, k, m)).items()
    ]  # fmt: skip
