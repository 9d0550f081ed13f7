"""Tables of tuned configurations of the Hopper kernel, one JSON file a GPU, in `tuned/`.

`billfish bench tune` writes them. A row holds a weight [n, k], a number of tokens m, and the fields
of the configuration that was faster there than the one by rules, with both times. It serves every
weight of that shape, and every number of tokens above the next smaller of `ROWS` up to m. What has
no row goes by rules.

Rows that say `timed: layer` are no work of that command, which times products alone, and which
leaves them: their times are those of the four products of a layer in a row, in trials
(`benchmarks/gemm_variants.json`), at 32 tokens with the norms between them.
"""

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

from billfish.kernels.marlin.packing import UNIT_K, UNIT_N

ROWS = (1, 8, 16, 32, 64, 128, 256, 384, 512, 640, 1024, 2048, 4096)
"""Numbers of tokens that are tuned for."""


def table_path(gpu: str) -> Path:
    """Where the table of the GPU that CUDA calls `gpu` is, if there is one."""
    name = re.sub("[^a-z0-9]+", "_", gpu.lower()).strip("_")
    return Path(__file__).parent / "tuned" / f"{name}.json"


@cache
def _table(gpu: str) -> dict[tuple[int, int, int], dict[str, Any]]:
    path = table_path(gpu)
    if not path.exists():
        return {}
    return {
        (-(-row["n"] // UNIT_N), -(-row["k"] // UNIT_K), row["m"]): row["config"]
        for row in json.loads(path.read_text())["rows"]
    }


def lookup(gpu: str, m: int, units: tuple[int, ...]) -> dict[str, Any] | None:
    """The fields of the configuration for m tokens and units of shape (blocks, steps, words)."""
    table = _table(gpu)
    if not table or m > ROWS[-1]:
        return None
    return table.get((units[0], units[1], next(rows for rows in ROWS if m <= rows)))
