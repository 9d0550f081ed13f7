"""The products of a layer in a row: `billfish bench gemm --chain`."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from billfish.bench.gemm_cases import random_weights, this_gpu, units_of, weight_bytes
from billfish.bench.gemm_compile import Form
from billfish.bench.turns import time_in_turns
from billfish.kernels import marlin
from billfish.kernels.marlin.configs import HopperConfig, Product, hopper_config

LAYER = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
"""(N, K) of the four products of a Llama 3 8B layer, in the order in which they run."""
GATED = 28672
"""N of the product that may end in silu(gate) * up."""


def chain_config(m: int, n: int, k: int, pdl: bool) -> HopperConfig:
    return replace(hopper_config(m, units_of(n, k), this_gpu()), pdl=pdl)


def chain_forms(m: int) -> list[Form]:
    """What `chain` runs."""
    return [
        Form(
            chain_config(m, n, k, pdl), m, residual=gated and index in (1, 3),
            silu_mul=gated and n == GATED,
        )
        for pdl in (True, False)
        for gated in (True, False)
        for index, (n, k) in enumerate(LAYER)
    ]  # fmt: skip


def chain(m: int, read_rate: float, layers: int = 8) -> list[dict[str, Any]]:
    """The four products of a layer, each on the columns of the one before, in one CUDA graph.

    `early launch` on and off; with room for the blocks of the next product, which then start early
    after each of the four; and with the epilogues that a model uses: residuals, and silu(gate) * up
    in the third. floor_us: their bytes at the rate of reading cold memory.
    """
    from billfish.kernels.marlin import hopper_launch

    rows = []
    made: dict[bool, list[marlin.PackedWeight]] = {False: [], True: []}
    for _ in range(layers):
        for n, k in LAYER:
            codes, scales = random_weights(n, k, 128, torch.float16)
            for gated, weights in made.items():
                both = gated and n == GATED
                weights.append(
                    marlin.pack(codes, scales / 64, group_size=128, dtype=torch.half, silu_mul=both)
                )
    x = torch.randn(m, 4096, device="cuda").half()

    def run(gated: bool, pdl: bool, room: bool = False) -> Tensor:
        y = x
        for index, weight in enumerate(made[gated]):
            units = weight.tensors[0]
            config = chain_config(m, weight.n, weight.k, pdl)
            config = replace(config, grid_per_sm=1) if room else config
            residual = x if gated and index % 4 in (1, 3) else None
            product = Product(weight.outputs, residual=residual, silu_mul=weight.silu_mul)
            y = hopper_launch.launch(y[:, : weight.k], units, product, config)
        return y

    ways = {
        f"{name}, early launch {'on' if pdl else 'off'}": [partial(run, gated, pdl)]
        for gated, name in ((False, "products"), (True, "products with epilogues"))
        for pdl in (True, False)
    }
    ways["products, early launch on, room for the next"] = [partial(run, False, True, True)]
    moved = sum(weight_bytes("billfish", n, k, 128) + 2 * m * (n + k) for n, k in LAYER)
    for name, (us, spread) in time_in_turns(ways).items():
        rows.append({
            "case": f"chain M={m}", "m": m, "dtype": "float16", "group_size": 128,
            "technique": name, "impl": "billfish", "us": round(us / layers, 2),
            "spread": round(spread, 3), "bytes": moved, "floor_us": round(moved / read_rate, 2),
        })  # fmt: skip
    return rows
