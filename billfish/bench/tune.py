"""Finds the fastest configurations of the W4A16 kernel on this GPU and writes its table.

    billfish bench tune [--shapes 4096x4096,...] [--rows 1,8,...] [--out FILE]

Every configuration that might do well is timed as in `billfish bench gemm`, beside the one by
rules; a row is kept where the fastest beats that one by more than --gain. Rows that the table has
for other shapes and numbers of tokens stay, with the commit that they are of, and so do those that
were timed in a layer (`timed: layer`): nothing is timed for these; to have them tuned, remove them.
Without --out the table is the one that the installed package reads (kernels/marlin/tuned/), so the
next process uses it. Shapes are tuned with fp16 and groups of 128 and serve every dtype and kind of
weight.
"""

import argparse
import itertools
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from billfish.bench import record
from billfish.bench.gemm_cases import (
    SHAPES,
    packed_copies,
    parse_numbers,
    parse_shapes,
    time_configs,
)
from billfish.bench.gemm_compile import Form, compile_all
from billfish.errors import ConfigError
from billfish.kernels.marlin import tuning
from billfish.kernels.marlin.configs import Gpu, HopperConfig, Product, hopper_config

_SAME = 2e-3  # results of two configurations differ by rounding, in the norm


def candidates(m: int) -> list[HopperConfig]:
    """Configurations worth timing for m tokens: those of the rules for any size, and neighbours."""
    if m <= 32:
        tile_m = next(t for t in (8, 16, 32) if m <= t)
        forms = [
            HopperConfig(rows=128, consumers=1, tile_m=tile_m, stages=5, blocks_per_sm=3),
            HopperConfig(rows=64, consumers=2, tile_m=tile_m, stages=6, blocks_per_sm=2),
            HopperConfig(rows=64, consumers=1, tile_m=tile_m, stages=8, blocks_per_sm=4),
            HopperConfig(rows=128, consumers=2, tile_m=tile_m, stages=7),
        ]
        if tile_m == 16:
            forms[2] = replace(forms[2], stages=6)
        elif tile_m == 32:
            forms = [replace(forms[1], stages=5), replace(forms[2], stages=4), forms[3]]
        return [
            changed
            for form in forms
            for changed in (
                *(replace(form, parts=parts) for parts in (2, 4, 8)),
                *(
                    replace(form, grid_per_sm=grid, sharing_cost=cost)
                    for grid in range(1, form.blocks_per_sm + 1)
                    for cost in (form.sharing_cost, 0)
                ),
            )
        ]
    large = {"sum_scale": False}
    forms = [
        HopperConfig(rows=64, consumers=4, tile_m=64, stages=5),
        HopperConfig(rows=64, consumers=4, tile_m=64, stages=5, **large),
        HopperConfig(rows=128, consumers=2, tile_m=64, stages=5),
        HopperConfig(rows=64, consumers=2, tile_m=64, stages=4, carry=True, **large),
    ]
    if m > 64:
        form = HopperConfig(rows=64, consumers=2, tile_m=128, stages=4, carry=True, **large)
        forms += [form] if m > 256 else [form, replace(form, carry=False)]
        forms.append(HopperConfig(rows=128, consumers=2, tile_m=128, stages=4, **large))
    if m > 128:
        forms = [form for form in forms if form.tile_m > 64 or m <= 256]
        forms.append(HopperConfig(rows=64, consumers=2, tile_m=256, stages=3, **large))
    if m <= 256:
        others: list[dict[str, Any]] = [{"stream_k": False}, {"sharing_cost": 2}, {"owned": True}]
        others += [{"parts": parts} for parts in (2, 3, 4)]
        return forms + [replace(form, **other) for other in others for form in forms]
    return [replace(form, owned=True, sharing_cost=8) for form in forms] + [
        replace(form, group_m=group, keep_x=keep)
        for form in forms
        for group in (8, 16)
        for keep in (True, False)
    ]


def tune(
    shape: tuple[int, int], rows: Sequence[int], gpu: Gpu, gain: float
) -> list[dict[str, Any]]:
    """The rows of the table for one weight."""
    from billfish.kernels.marlin import hopper_launch

    n, k = shape
    weights = packed_copies(n, k)
    untuned = Gpu("", gpu.processors)
    found = []
    for m in rows:
        default = hopper_config(m, weights[0].shape, untuned)
        x = torch.randn(m, k, device="cuda").half()
        expected = hopper_launch.launch(x, weights[0], Product(n), default).float()
        trials = {"by rule": default}
        for config in candidates(m):
            y = hopper_launch.launch(x, weights[0], Product(n), config).float()
            if config != default and float((y - expected).norm() / expected.norm()) < _SAME:
                trials[str(len(trials))] = config
        times = {name: us for name, (us, _) in time_configs(weights, n, m, trials).items()}
        best = min(times, key=lambda name: times[name])
        won = times["by rule"] / times[best] - 1
        print(
            f"{n}x{k} M={m}: {times['by rule']:.2f} us by rule, best {times[best]:.2f}", flush=True
        )
        for name, us in sorted(times.items(), key=lambda item: item[1])[:4]:
            print("   ", round(us, 2), _changed(trials[name]), flush=True)
        if won > gain:
            found.append({
                "n": n, "k": k, "m": m, "us": round(times[best], 2),
                "us_by_rule": round(times["by rule"], 2), "config": _changed(trials[best]),
            })  # fmt: skip
    return found


def _changed(config: HopperConfig) -> dict[str, Any]:
    """The fields of a configuration that are not the defaults."""
    plain = asdict(HopperConfig(rows=0, consumers=0, tile_m=0, stages=0))
    return {name: value for name, value in asdict(config).items() if value != plain[name]}


def main(arguments: list[str]) -> None:
    cli = argparse.ArgumentParser(
        prog="billfish bench tune",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    cli.add_argument("--shapes", type=parse_shapes, default=list(SHAPES), help="as 4096x4096,...")
    cli.add_argument("--rows", type=parse_numbers, default=list(tuning.ROWS), help="of tokens")
    cli.add_argument("--gain", type=float, default=0.02, help="what a row must win to be kept")
    cli.add_argument("--out", help="JSON file to write; by default the table of this GPU")
    cli.add_argument("--jobs", type=int, default=8, help="processes that compile")
    options = cli.parse_args(arguments)
    rows = options.rows
    if not set(rows) <= set(tuning.ROWS):
        raise ConfigError(f"--rows: got {rows}, expected some of {tuning.ROWS}")
    if torch.cuda.get_device_capability() != (9, 0):
        raise ConfigError("bench tune tunes the Hopper kernel, which this GPU does not run")
    from billfish.kernels.marlin.workspace import gpu_of

    gpu = gpu_of(torch.device("cuda", torch.cuda.current_device()))
    out = Path(options.out) if options.out else tuning.table_path(gpu.name)
    out.parent.mkdir(exist_ok=True)
    old = json.loads(out.read_text()) if out.exists() else {"commit": None, "rows": []}
    left = {(row["n"], row["k"], row["m"]) for row in old["rows"] if row.get("timed") == "layer"}
    wanted = {(n, k, m) for n, k in options.shapes for m in rows}
    tuned = wanted - left
    for n, k, m in sorted(wanted & left):
        print(f"{n}x{k} M={m}: left as it is, timed in a layer", flush=True)
    compiled = sorted({m for _, _, m in tuned})
    compile_all((Form(config, m) for m in compiled for config in candidates(m)), options.jobs)
    found = [
        tune(shape, tokens, gpu, options.gain)
        for shape in dict.fromkeys(options.shapes)
        if (tokens := [m for m in rows if (*shape, m) in tuned])
    ]
    kept = [
        {"commit": old["commit"], **row}
        for row in old["rows"]
        if (row["n"], row["k"], row["m"]) not in tuned
    ]
    table = sorted(
        [*kept, *itertools.chain(*found)], key=lambda row: (row["n"], row["k"], row["m"])
    )
    head = record.environment("billfish bench tune " + " ".join(arguments))
    record.write(str(out), head, table)
    print(f"wrote {out}")


if __name__ == "__main__":
    main(sys.argv[1:])
