"""Times W4A16 matrix products against peers, in one process on one GPU.

    billfish bench gemm --out benchmarks/gemm.json [--peers DIR]
    billfish bench gemm --ablation --out benchmarks/ablation_gemm.json
    billfish bench gemm --chain --rows 1,16 --out benchmarks/gemm_chain.json

All implementations of a case are captured in CUDA graphs and replayed in turns, so that they meet
the same clock and power state. Each call of a graph has its own copy of the weights, enough of them
to miss the L2 cache; activations are warm. A time contains the gap between two kernels of a graph,
a little under 1 us on an H200. Packing and compilation are outside. Results are checked against the
float64 product; one that is off is marked and not timed.
"""

import argparse
import multiprocessing
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from billfish.bench import record
from billfish.bench.gemm_peers import PEER_VERSIONS, Maker, Matmul, makers
from billfish.bench.turns import Call, elapsed_us, time_in_turns
from billfish.kernels import marlin
from billfish.kernels.marlin import reference
from billfish.kernels.marlin.configs import HopperConfig, Product, hopper_config
from billfish.kernels.marlin.hopper_plan import max_stages
from billfish.kernels.marlin.packing import unit_words

SHAPES = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (8192, 28672), (57344, 8192))
"""(N, K) of the projections of Llama 3 8B, and the two large ones of 70B."""
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1e-2}
COLD_BYTES = 260_000_000  # four times the L2 of an H200


def random_weights(n: int, k: int, group_size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8, device="cuda")
    scales = torch.rand(n, -(-k // group_size), device="cuda") * 0.01 + 0.002
    return codes, scales.to(dtype)


def billfish(codes: Tensor, scales: Tensor, group_size: int) -> Matmul:
    weight = marlin.pack(codes, scales, group_size=group_size, dtype=scales.dtype)
    return lambda x: marlin.w4a16_matmul(x, weight)


def portable(codes: Tensor, scales: Tensor, group_size: int) -> Matmul:
    """The Triton kernel, where the Hopper kernel would run."""
    from billfish.kernels.marlin import triton_gemm
    from billfish.kernels.marlin.configs import triton_config
    from billfish.kernels.marlin.workspace import gpu_of

    units = marlin.pack(codes, scales, group_size=group_size, dtype=scales.dtype).tensors[0]

    def product(x: Tensor) -> Tensor:
        config = triton_config(x.shape[0], units.shape, gpu_of(units.device))
        return triton_gemm.launch(x, units, Product(codes.shape[0]), config)

    return product


def relative_error(y: Tensor, x: Tensor, codes: Tensor, scales: Tensor, group_size: int) -> float:
    """||y - exact|| / ||exact||, a block of outputs at a time."""
    off = total = 0.0
    for rows in torch.arange(codes.shape[0], device=codes.device).split(4096):
        weight = reference.dequantize(
            codes[rows], scales[rows], None, None, None, group_size, torch.float64
        )
        exact = x.double() @ weight.t()
        off += float((y[:, rows].double() - exact).square().sum())
        total += float(exact.square().sum())
    return (off / total) ** 0.5


def weight_bytes(name: str, n: int, k: int, group_size: int) -> int:
    return 2 * n * k if name == "cublas" else n * k // 2 + 2 * n * (k // group_size)


def build(
    shape: tuple[int, int], weights: tuple[Tensor, Tensor], group_size: int, peers: dict[str, Maker]
) -> dict[str, list[Matmul]]:
    """The products of each implementation, each over its own copy of the weights."""
    products: dict[str, list[Matmul]] = {}
    for name, maker in {"billfish": billfish, "portable": portable, **peers}.items():
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
    errors: dict[str, float] = {}
    for name, copies in products.items():
        try:
            errors[name] = relative_error(copies[0](x), x, codes, scales, group_size)
        except Exception as problem:
            print(f"{name} {n}x{k} M={m}: {type(problem).__name__}: {str(problem)[:200]}")
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


TECHNIQUES: dict[str, dict[str, Any]] = {
    "stream_k": {"stream_k": False},
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

DEPTHS = (1, 2, 4, 8)
"""Stages of the queue that are timed, where shared memory has room: 1 loads nothing ahead."""


def packed_copies(n: int, k: int) -> list[Tensor]:
    """The units of one random fp16 weight, groups of 128, in copies that miss the L2 cache."""
    codes, scales = random_weights(n, k, 128, torch.float16)
    copies = min(40, -(-COLD_BYTES // weight_bytes("billfish", n, k, 128)))
    return [
        marlin.pack(codes, scales, group_size=128, dtype=torch.float16).tensors[0]
        for _ in range(copies)
    ]


def time_configs(
    weights: list[Tensor], n: int, m: int, configs: Mapping[str, HopperConfig]
) -> dict[str, tuple[float, float]]:
    """(microseconds, spread) of the Hopper kernel for m tokens in several configurations."""
    from billfish.kernels.marlin import hopper_launch

    x = torch.randn(m, 128 * weights[0].shape[1], device="cuda").half()
    calls: dict[str, list[Call]] = {
        name: [partial(hopper_launch.launch, x, units, Product(n), config) for units in weights]
        for name, config in configs.items()
    }
    return time_in_turns(calls)


def compile_all(cases: Sequence[tuple[HopperConfig, int]], jobs: int) -> None:
    """Compile the kernels in processes of their own; they leave them in Triton's cache on disk."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        list(pool.map(_compile, cases))


def _compile(case: tuple[HopperConfig, int]) -> None:
    from billfish.kernels.marlin import hopper_launch

    config, m = case
    units = torch.zeros(8, 4, 1056, dtype=torch.int32, device="cuda")
    x = torch.zeros(m, 512, dtype=torch.float16, device="cuda")
    hopper_launch.launch(x, units, Product(512), config)
    torch.cuda.synchronize()


def techniques_off(n: int, k: int, m: int) -> dict[str, HopperConfig]:
    """The configuration of a case, and with each technique that it uses switched off."""
    from billfish.kernels.marlin.workspace import gpu_of

    units = (-(-n // 64), -(-k // 128), unit_words(128, False))
    chosen = hopper_config(m, units, gpu_of(torch.device("cuda", torch.cuda.current_device())))
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


LAYER = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
"""(N, K) of the four products of a Llama 3 8B layer, in the order in which they run."""


def chain(m: int, read_rate: float, layers: int = 8) -> list[dict[str, Any]]:
    """The four products of a layer, each on the columns of the one before, in one CUDA graph.

    `early launch` on and off, and with the epilogues that a model uses: residuals, and silu(gate) *
    up in the third. floor_us: their bytes at the rate of reading cold memory.
    """
    from billfish.kernels.marlin import hopper_launch
    from billfish.kernels.marlin.workspace import gpu_of

    rows = []
    made: dict[bool, list[marlin.PackedWeight]] = {False: [], True: []}
    for _ in range(layers):
        for n, k in LAYER:
            codes, scales = random_weights(n, k, 128, torch.float16)
            for gated, weights in made.items():
                both = gated and n == 28672
                weights.append(
                    marlin.pack(codes, scales / 64, group_size=128, dtype=torch.half, silu_mul=both)
                )
    x = torch.randn(m, 4096, device="cuda").half()
    gpu = gpu_of(x.device)

    def run(gated: bool, pdl: bool) -> Tensor:
        y = x
        for index, weight in enumerate(made[gated]):
            units = weight.tensors[0]
            config = replace(hopper_config(m, units.shape, gpu), pdl=pdl)
            residual = x if gated and index % 4 in (1, 3) else None
            product = Product(weight.outputs, residual=residual, silu_mul=weight.silu_mul)
            y = hopper_launch.launch(y[:, : weight.k], units, product, config)
        return y

    ways = {
        f"{name}, early launch {'on' if pdl else 'off'}": [partial(run, gated, pdl)]
        for gated, name in ((False, "products"), (True, "products with epilogues"))
        for pdl in (True, False)
    }
    moved = sum(weight_bytes("billfish", n, k, 128) + 2 * m * (n + k) for n, k in LAYER)
    for name, (us, spread) in time_in_turns(ways).items():
        rows.append({
            "case": f"chain M={m}", "m": m, "dtype": "float16", "group_size": 128,
            "technique": name, "impl": "billfish", "us": round(us / layers, 2),
            "spread": round(spread, 3), "bytes": moved, "floor_us": round(moved / read_rate, 2),
        })  # fmt: skip
    return rows


def read_rate() -> float:
    """Bytes a microsecond at which memory is read: the sum of 2 GiB, the best of a few."""
    data = torch.ones(1 << 29, dtype=torch.float32, device="cuda")
    best = min(elapsed_us(data.sum) for _ in range(8))
    return data.nbytes / best


def host_cost(m: int = 1, calls: int = 100) -> dict[str, float]:
    """Microseconds of host time of a call of the public operation in inference, without a graph.

    Beside it, what calls of torch cost this host: they say how fast it is.
    """
    codes, scales = random_weights(4096, 4096, 128, torch.float16)
    product = billfish(codes, scales, 128)
    x = torch.randn(m, 4096, device="cuda").half()
    dense = torch.empty(4096, 4096, dtype=torch.float16, device="cuda")

    @torch.no_grad()
    def host_us(call: Call) -> float:
        best = float("inf")
        for _ in range(10):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(calls):
                call()
            best = min(best, (time.perf_counter() - begin) / calls * 1e6)
        torch.cuda.synchronize()
        return round(best, 1)

    return {
        "m": m,
        "host_us": host_us(partial(product, x)),
        "host_us_torch_matmul": host_us(partial(torch.matmul, x, dense)),
        "host_us_torch_empty": host_us(partial(torch.empty, (m, 4096), device="cuda")),
    }


def main(arguments: list[str]) -> None:
    cli = argparse.ArgumentParser(
        prog="billfish bench gemm",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    cli.add_argument("--out", required=True, help="JSON file to write")
    cli.add_argument("--peers", help="folder with the wheels and libraries of peers")
    cli.add_argument("--rows", default="1,8,16,32,64,128,256,1024,4096", help="values of M")
    cli.add_argument("--dtype", default="fp16", choices=sorted(DTYPES))
    cli.add_argument("--group-size", type=int, default=128)
    cli.add_argument("--shapes", default=",".join(f"{n}x{k}" for n, k in SHAPES))
    cli.add_argument("--ablation", action="store_true", help="time techniques, not peers")
    cli.add_argument("--chain", action="store_true", help="time the products of a layer in a row")
    cli.add_argument("--jobs", type=int, default=8, help="processes that compile")
    cli.add_argument("--time-limit", type=float, default=540, help="start no shape after (s)")
    options = cli.parse_args(arguments)
    rows = [int(m) for m in options.rows.split(",")]
    shapes = [tuple(map(int, shape.split("x"))) for shape in options.shapes.split(",")]
    head = record.environment("billfish bench gemm " + " ".join(arguments))
    head["versions"] |= PEER_VERSIONS if options.peers else {}
    kept: list[dict[str, Any]] = []
    began = time.monotonic()
    peers = {} if options.ablation or options.chain else makers(options.peers, rows)
    head["host"] = host_cost()
    rate = read_rate()
    head["read_gbps"] = round(rate / 1e3)
    print(head["host"], head["read_gbps"], flush=True)
    if options.chain:
        kept = [row for m in rows for row in chain(m, rate)]
        print_rows(kept)
        record.write(options.out, head, kept)
        return
    if options.ablation:
        cases = [(c, m) for n, k in shapes for m in rows for c in techniques_off(n, k, m).values()]
        compile_all(list(dict.fromkeys(cases)), options.jobs)
    for n, k in shapes:
        if time.monotonic() - began > options.time_limit:
            print(f"out of time before {n}x{k}")
            break
        if options.ablation:
            found = ablation((n, k), rows, rate)
        else:
            group_size = options.group_size
            weights = random_weights(n, k, group_size, DTYPES[options.dtype])
            products = build((n, k), weights, group_size, peers)
            found = [row for m in rows for row in run_case(products, weights, m, group_size)]
            del products
        torch.cuda.empty_cache()
        print_rows(found)
        kept += found
        record.write(options.out, head, kept)


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
