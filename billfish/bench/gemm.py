"""Times W4A16 matrix products against peers, in one process on one GPU.

    billfish bench gemm --out benchmarks/gemm.json [--peers DIR]
    billfish bench gemm --formats --out benchmarks/gemm_formats.json [--peers DIR]
    billfish bench gemm --ablation --out benchmarks/ablation_gemm.json
    billfish bench gemm --chain --out benchmarks/gemm_chain.json

All implementations of a case are captured in CUDA graphs and replayed in turns, so that they meet
the same clock and power state. Each call of a graph has its own copy of the weights, enough of them
to miss the L2 cache; activations are warm. A time contains the gap between two kernels of a graph,
a little under 1 us on an H200. Packing and compilation are outside: kernels are compiled first, in
several processes. Results are checked against the float64 product; one that is off is marked and
not timed.
"""

import argparse
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from billfish.bench import record
from billfish.bench.gemm_ablation import ABLATED, ablation, techniques_off
from billfish.bench.gemm_cases import (
    AHEAD_CYCLES,
    COLD_BYTES,
    SHAPES,
    parse_numbers,
    parse_shapes,
    random_weights,
    read_rate,
    this_gpu,
    units_of,
    weight_bytes,
)
from billfish.bench.gemm_chain import chain, chain_forms
from billfish.bench.gemm_compile import Form, compile_all, first_calls
from billfish.bench.gemm_peers import PEER_VERSIONS, Maker, Matmul, makers, unpacked
from billfish.bench.turns import Call, elapsed_us, time_in_turns
from billfish.kernels import marlin
from billfish.kernels.marlin import reference
from billfish.kernels.marlin.configs import (
    Product,
    TritonConfig,
    hopper_config,
    triton_config,
)
from billfish.nn import QuantLinear

ROWS = (1, 8, 16, 32, 64, 128, 256, 1024, 4096)
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1e-2}


def billfish(codes: Tensor, scales: Tensor, group_size: int) -> Matmul:
    weight = marlin.pack(codes, scales, group_size=group_size, dtype=scales.dtype)
    return lambda x: marlin.w4a16_matmul(x, weight)


def portable(codes: Tensor, scales: Tensor, group_size: int) -> Matmul:
    """The Triton kernel, where the Hopper kernel would run."""
    from billfish.kernels.marlin import triton_gemm

    units = marlin.pack(codes, scales, group_size=group_size, dtype=scales.dtype).tensors[0]

    def product(x: Tensor) -> Tensor:
        config = triton_config(x.shape[0], units.shape, this_gpu())
        return triton_gemm.launch(x, units, Product(codes.shape[0]), config)

    return product


OURS: dict[str, Maker] = {"billfish": billfish, "portable": portable}


def relative_errors(
    results: Mapping[str, Tensor], x: Tensor, codes: Tensor, scales: Tensor, group_size: int
) -> dict[str, float]:
    """||y - exact|| / ||exact|| of each result, a block of outputs at a time."""
    off, total = dict.fromkeys(results, 0.0), 0.0
    for rows in torch.arange(codes.shape[0], device=codes.device).split(4096):
        weight = reference.dequantize(
            codes[rows], scales[rows], None, None, None, group_size, torch.float64
        )
        exact = x.double() @ weight.t()
        total += float(exact.square().sum())
        for name, y in results.items():
            off[name] += float((y[:, rows].double() - exact).square().sum())
    return {name: (part / total) ** 0.5 for name, part in off.items()}


def build(
    shape: tuple[int, int], weights: tuple[Tensor, Tensor], group_size: int, peers: dict[str, Maker]
) -> dict[str, list[Matmul]]:
    """The products of each implementation, each over its own copy of the weights."""
    products: dict[str, list[Matmul]] = {}
    for name, maker in {**OURS, **peers}.items():
        count = min(40, -(-COLD_BYTES // weight_bytes(name, *shape, group_size)))
        try:
            products[name] = [maker(*weights, group_size) for _ in range(count)]
        except Exception as error:
            print(f"{name} {shape}: {type(error).__name__}: {str(error)[:200]}", flush=True)
    return products


def run_case(
    products: dict[str, list[Matmul]], weights: tuple[Tensor, Tensor], m: int, group_size: int
) -> list[dict[str, Any]]:
    """Rows of the result for one M: every product checked, the right ones timed in turns."""
    codes, scales = weights
    (n, k), dtype = codes.shape, scales.dtype
    x = torch.randn(m, k, device="cuda").to(dtype)
    results: dict[str, Tensor] = {}
    for name, copies in products.items():
        try:
            results[name] = copies[0](x)
        except Exception as problem:
            print(f"{name} {n}x{k} M={m}: {type(problem).__name__}: {str(problem)[:200]}")
    errors = relative_errors(results, x, codes, scales, group_size)
    del results
    calls: dict[str, list[Call]] = {
        name: [partial(product, x) for product in products[name]]
        for name, error in errors.items()
        if error < TOLERANCE[dtype]
    }
    times = time_in_turns(calls)
    rows = []
    for name, error in errors.items():
        row: dict[str, Any] = {
            "n": n, "k": k, "m": m, "dtype": str(dtype).removeprefix("torch."),
            "group_size": group_size, "impl": name, "rel_err": round(error, 6),
        }  # fmt: skip
        if name in times:
            us, spread = times[name]
            moved = weight_bytes(name, n, k, group_size) + 2 * m * (n + k)
            row |= {"us": round(us, 2), "spread": round(spread, 3), "gbps": round(moved / us / 1e3)}
        rows.append(row)
    return rows


def host_cost(m: int = 1, calls: int = 100) -> dict[str, float]:
    """Microseconds of host time of a call of the public operation in inference, without a graph.

    Beside it that of a layer, and what calls of torch cost this host: they say how fast it is.
    """
    codes, scales = random_weights(4096, 4096, 128, torch.float16)
    weight = marlin.pack(codes, scales, group_size=128, dtype=torch.float16)
    x = torch.randn(m, 4096, device="cuda").half()
    dense = torch.empty(4096, 4096, dtype=torch.float16, device="cuda")

    timed: dict[str, Call] = {
        "host_us": partial(marlin.w4a16_matmul, x, weight),
        "host_us_quant_linear": partial(QuantLinear(weight), x),
        "host_us_torch_matmul": partial(torch.matmul, x, dense),
        "host_us_torch_empty": partial(torch.empty, (m, 4096), device="cuda"),
    }
    best = dict.fromkeys(timed, float("inf"))
    with torch.no_grad():
        for _ in range(20):  # in turns, so that a busy moment of the host is one for all
            for name, call in timed.items():
                torch.cuda.synchronize()
                begin = time.perf_counter()
                for _ in range(calls):
                    call()
                best[name] = min(best[name], (time.perf_counter() - begin) / calls * 1e6)
    torch.cuda.synchronize()
    return {"m": m, **{name: round(us, 1) for name, us in best.items()}}


def pack_rate() -> float:
    """Codes a second that are packed on this GPU, of the largest weight; the best of a few."""
    weights = random_weights(*SHAPES[-1], 128, torch.float16)
    pack = partial(marlin.pack, *weights, group_size=128, dtype=torch.float16)
    return weights[0].numel() / min(elapsed_us(pack, AHEAD_CYCLES) for _ in range(4)) * 1e6


class Run(NamedTuple):
    """Products of one kind of weight and activation, beside peers."""

    dtype: torch.dtype
    group_size: int
    shapes: Sequence[tuple[int, int]]
    rows: Sequence[int]


def time_products(run: Run, folder: Path | None, until: float) -> Iterator[list[dict[str, Any]]]:
    """Rows of the result, a shape at a time. until: no shape is begun after (time.monotonic())."""
    dtype, group_size, shapes, rows = run
    peers = makers(folder, rows)
    for shape in shapes:
        if time.monotonic() > until:
            print(f"out of time before {shape[0]}x{shape[1]}")
            return
        weights = random_weights(*shape, group_size, dtype)
        products = build(shape, weights, group_size, peers)
        found = [row for m in rows for row in run_case(products, weights, m, group_size)]
        del products, weights
        torch.cuda.empty_cache()
        yield found


def compile_products(run: Run, folder: Path | None, jobs: int) -> None:
    """Compile what `time_products` will run, ours and that of peers."""
    dtype, group_size, shapes, rows = run
    gpu = this_gpu()
    cases = [(shape, m, units_of(*shape, group_size)) for shape in shapes for m in rows]
    forms = [Form(hopper_config(m, units, gpu), m, dtype, group_size) for _, m, units in cases]
    calls = [] if folder is None else [("humming", shape, rows) for shape in shapes]
    if folder is not None and dtype == torch.float16:  # in the wheel as PTX, the same for any shape
        calls += [("marlin", shape, rows) for shape in sorted({shapes[0], shapes[-1]})]
    portable: dict[TritonConfig, tuple[str, tuple[int, int], Sequence[int]]] = {}
    for shape, m, units in cases:
        portable.setdefault(triton_config(m, units, gpu), ("portable", shape, [m]))
    compile_all(
        forms if torch.cuda.get_device_capability() == (9, 0) else [], jobs,
        [
            *(partial(first_calls, *call, dtype, group_size, folder) for call in calls),
            *(partial(first_calls, *call, dtype, group_size, None) for call in portable.values()),
        ],
    )  # fmt: skip


FORMATS = (
    Run(torch.bfloat16, 128, SHAPES, (1, 16, 64, 256, 4096)),
    Run(torch.float16, 32, SHAPES[1:3], (1, 16, 64, 256, 4096)),
)
"""Other kinds of weights and activations."""


def parser() -> argparse.ArgumentParser:
    cli = argparse.ArgumentParser(
        prog="billfish bench gemm",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    cli.add_argument("--out", required=True, help="JSON file to write")
    cli.add_argument("--peers", type=Path, help="folder with the wheels and libraries of peers")
    what = cli.add_mutually_exclusive_group()
    what.add_argument("--formats", action="store_true", help="bfloat16, and groups of 32")
    what.add_argument("--ablation", action="store_true", help="time techniques, not peers")
    what.add_argument("--chain", action="store_true", help="time the products of a layer in a row")
    cli.add_argument("--rows", type=parse_numbers, help="values of M")
    cli.add_argument("--shapes", type=parse_shapes, help="as 4096x4096,...: N x K")
    cli.add_argument("--dtype", choices=sorted(DTYPES), help="of the activations; else fp16")
    cli.add_argument("--group-size", type=int, help="else 128")
    cli.add_argument("--jobs", type=int, default=8, help="processes that compile")
    cli.add_argument("--compile-only", action="store_true", help="compile, and time nothing")
    cli.add_argument("--time-limit", type=float, default=540, help="start no shape after (s)")
    return cli


def parsed(arguments: list[str]) -> argparse.Namespace:
    """The options; what would have no effect ends the program."""
    cli = parser()
    options = cli.parse_args(arguments)
    fixed = {"--dtype": options.dtype, "--group-size": options.group_size}
    if options.chain:
        fixed["--shapes"] = options.shapes
    if options.chain or options.ablation:
        fixed["--peers"] = options.peers
    given = [name for name, value in fixed.items() if value is not None]
    if given and (options.formats or options.ablation or options.chain):
        cli.error(f"{given[0]} has no effect here")
    return options


def main(arguments: list[str]) -> None:
    options = parsed(arguments)
    began = time.monotonic()
    head = record.environment("billfish bench gemm " + " ".join(arguments))
    head["versions"] |= PEER_VERSIONS if options.peers else {}
    kept: list[dict[str, Any]] = []

    def keep(found: list[dict[str, Any]]) -> None:
        print_rows(found)
        kept.extend(found)
        record.write(options.out, head, kept)

    shapes, rows = options.shapes, options.rows
    if options.chain:
        rows = rows or (1, 16)
        compile_all((form for m in rows for form in chain_forms(m)), options.jobs)
    elif options.ablation:
        rows, shapes = rows or (1, 16, 64, 256), shapes or ABLATED
        cases = [(n, k, m) for n, k in shapes for m in rows]
        forms = (
            Form(config, case[2]) for case in cases for config in techniques_off(*case).values()
        )
        compile_all(forms, options.jobs)
    else:
        own = Run(DTYPES[options.dtype or "fp16"], options.group_size or 128, SHAPES, ROWS)
        runs = [
            run._replace(shapes=shapes or run.shapes, rows=rows or run.rows)
            for run in (FORMATS if options.formats else (own,))
        ]
        folder = unpacked(options.peers) if options.peers else None
        for run in runs:
            compile_products(run, folder, options.jobs)
    print(f"compiled after {time.monotonic() - began:.0f} s", flush=True)
    if options.compile_only:
        return
    head["host"] = host_cost()
    rate = read_rate()
    head["read_gbps"] = round(rate / 1e3)
    head["packed_gcodes_s"] = round(pack_rate() / 1e9, 1)
    print(head["host"], head["read_gbps"], head["packed_gcodes_s"], flush=True)
    if options.chain:
        for m in rows:
            keep(chain(m, rate))
    elif options.ablation:
        for shape in shapes:
            keep(ablation(shape, rows, rate))
    else:
        for run in runs:
            for found in time_products(run, folder, began + options.time_limit):
                keep(found)


def print_rows(rows: list[dict[str, Any]]) -> None:
    """One line a case: microseconds of everything timed in it."""
    lines: dict[Any, list[str]] = {}
    for row in rows:
        case = row.get("case") or f"{row['n']}x{row['k']} M={row['m']} {row['dtype']}"
        name = row.get("technique") or row["impl"]
        lines.setdefault(case, []).append(f"{name} {row.get('us', 'wrong')}")
    for case, entries in lines.items():
        print(case, " | ".join(entries), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
