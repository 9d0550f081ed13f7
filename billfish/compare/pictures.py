"""What a comparison draws that is counted and not timed: blocks, memory, the queue, shares of work.

All of it is done by the code that serves: the block pool, the engine, the kernel's configuration
and its division of tiles. It needs no GPU and comes out the same on every machine.
"""

import random
from collections.abc import Iterable
from functools import cache
from itertools import pairwise
from typing import Any

from billfish.compare.links import resolve_all
from billfish.config import SchedulerConfig
from billfish.engine import Engine
from billfish.engine.block_pool import BlockPool
from billfish.engine.plan import StepPlan, StepResult
from billfish.sampling_params import SamplingParams

Json = dict[str, Any]


def pictures(names: Iterable[str]) -> Json:
    names = set(names)
    found: Json = {}
    if "marlin" in names:
        found |= {"queue": queue(), "stream_k": stream_k()}
    if "paged_attention" in names:
        found |= {"blocks": block_tables(), "memory": memory()}
    return found


def block_tables() -> Json:
    """Three requests and a fork in a pool of blocks: who holds what, after a few steps."""
    block_size, pool = 4, BlockPool(24, 4)
    tokens = {"A": 0, "B": 0, "C": 0}
    tables: dict[str, list[int]] = {name: [] for name in tokens}

    def write(name: str, count: int) -> None:
        tokens[name] += count
        tables[name] += pool.allocate(pool.blocks_for(tokens[name]) - len(tables[name]))

    for name, prompt in (("A", 9), ("B", 6), ("C", 3)):
        write(name, prompt)
    for count in (3, 4, 2):  # requests grow in turns, so their blocks lie between each other
        for name in "ABC":
            write(name, count)
    # C ends; what it computed stays cached, to be found by others or given away when needed.
    for block in tables["C"][: tokens["C"] // block_size]:
        pool.keep(block)
    pool.free(tables.pop("C"))
    # A second sample of A shares all its blocks; the first token it writes copies the last of them.
    tables["A'"], tokens["A'"] = list(tables["A"]), tokens["A"]
    pool.share(tables["A'"])
    (copy,) = pool.allocate(1)
    source = tables["A'"][-1]
    pool.free([source])
    tables["A'"][-1] = copy
    write("A'", 1)
    write("B", 3)
    pool.check(tables.values())
    cached = set(pool._cached)
    state = ["null"] + [
        "used" if pool.ref_counts[b] else "cached" if b in cached else "free"
        for b in range(1, pool.num_blocks + 1)
    ]
    return {
        "block_size": block_size,
        "num_blocks": pool.num_blocks,
        "copied": [source, copy],
        "requests": [
            {"name": name, "tokens": tokens[name], "table": table}
            for name, table in sorted(tables.items())
        ],
        "state": state,
        "references": list(pool.ref_counts),
        "code": resolve_all(
            (
                "billfish.engine.block_pool:BlockPool.allocate",
                "billfish.engine.block_pool:BlockPool.share",
                "billfish.engine.block_manager:BlockManager.extend",
            )
        ),
    }


class _NoModel:
    """An executor that computes nothing: every sequence that is due gets a token."""

    def execute(self, plan: StepPlan) -> StepResult:
        return StepResult(plan.step, {work.request_id: 1 for work in plan.work if work.samples})


REQUESTS, SLOTS, LONGEST = 96, 16384, 2048
_PROMPT, _OUTPUT = (5.0, 0.8), (4.8, 0.7)  # mean and deviation of the logarithms of lengths


def memory() -> Json:
    """The engine serves the same requests from one KV memory with blocks, and with room set aside
    for the longest possible request, as a contiguous cache has to.
    """
    draw = random.Random(0)

    def length(of: tuple[float, float], most: int) -> int:
        return max(1, min(most, int(draw.lognormvariate(*of))))

    lengths = tuple((length(_PROMPT, 1024), length(_OUTPUT, 1024)) for _ in range(REQUESTS))
    paged, whole = dict(_served(lengths, None)), dict(_served(lengths, LONGEST))
    return {
        "requests": REQUESTS,
        "slots": SLOTS,
        "reserve_tokens": LONGEST,
        "prompt_tokens": sum(prompt for prompt, _ in lengths),
        "output_tokens": sum(output for _, output in lengths),
        "paged": paged,
        "contiguous": whole,
        "ratio": round(whole["steps"] / paged["steps"], 2),
        "running_ratio": round(paged["running"] / whole["running"], 2),
        "code": resolve_all(
            (
                "billfish.engine.scheduler:Scheduler._tokens_soon",
                "billfish.engine.block_manager:BlockManager",
            )
        ),
    }


@cache
def _served(lengths: tuple[tuple[int, int], ...], reserve: int | None) -> Json:
    """Steps; requests that run at once and percent of the memory that holds tokens, on average
    over the steps in which requests still wait.
    """
    engine = Engine(
        _NoModel(), num_blocks=SLOTS // 16, block_size=16, vocab_size=8, max_model_len=LONGEST,
        eos_token_ids=(), token_bytes=lambda token: b"x", prefix_caching=False, seed=0,
        scheduler=SchedulerConfig(max_num_batched_tokens=2048, reserve_tokens=reserve),
    )  # fmt: skip
    for number, (prompt, output) in enumerate(lengths):
        params = SamplingParams(max_tokens=output, ignore_eos=True, temperature=0.0)
        engine.add_request(str(number), [1] * prompt, params)
    shares, running = [], []
    while engine.has_unfinished:
        engine.step()
        now = engine.stats()
        if now.waiting:
            shares.append(now.kv_slots_used / SLOTS)
            running.append(now.running)
    return {
        "steps": engine.stats().steps,
        "running": round(sum(running) / max(1, len(running)), 1),
        "used_percent": round(100 * sum(shares) / max(1, len(shares)), 1),
    }


H200 = ("NVIDIA H200", 132)


def queue() -> Json:
    """The schedule of one warpgroup of the W4A16 kernel over its first stages, in stages' time.

    The configuration is the kernel's own for this product on an H200. The order of events is what
    the kernel's barriers enforce; how long each takes is assumed, and said in `assumed`.
    """
    from billfish.kernels.marlin.configs import Gpu, hopper_config
    from billfish.kernels.marlin.hopper_plan import max_stages
    from billfish.kernels.marlin.packing import unit_words

    n, k, m = 4096, 4096, 64
    config = hopper_config(m, (n // 64, k // 128, unit_words(128, False)), Gpu(*H200))
    depth = min(config.stages, max_stages(config, 1))
    assumed = {"load": 5, "between loads": 2, "dequantize": 1, "multiply": 1}
    return {
        "product": {"n": n, "k": k, "m": m},
        "gpu": H200[0],
        "stages": depth,
        "consumers": config.consumers,
        "stage_bytes": config.stage_bytes(1),
        "in_flight_bytes": depth * config.stage_bytes(1),
        "assumed": assumed,
        "with": _timeline(depth, True, assumed),
        "without": _timeline(1, False, assumed),
        "code": resolve_all(
            (
                "billfish.kernels.marlin.hopper_gemm:_produce",
                "billfish.kernels.marlin.hopper_gemm:_sum",
                "billfish.kernels.marlin.configs:hopper_config",
            )
        ),
    }


def _timeline(depth: int, overlap: bool, assumed: dict[str, int], steps: int = 9) -> Json:
    """Events (lane, step, stage, start, end) of a ring of `depth` stages."""
    load, apart = assumed["load"], assumed["between loads"]
    dequantize, multiply = assumed["dequantize"], assumed["multiply"]
    events: list[Json] = []

    def add(lane: str, step: int, start: float, end: float) -> float:
        events.append(
            {"lane": lane, "step": step, "stage": step % depth, "start": start, "end": end}
        )
        return end

    emptied: list[float] = []
    loaded = computed = tensor_free = 0.0
    for step in range(steps):
        free = emptied[step - depth] if step >= depth else 0.0
        begin = max(free, loaded)
        loaded = begin + apart
        full = add("load", step, begin, begin + load)
        first = add("dequantize", step, max(full, computed), max(full, computed) + dequantize)
        product = add("multiply", step, max(first, tensor_free), max(first, tensor_free) + multiply)
        second = first if overlap else product
        second = add("dequantize", step, second, second + dequantize)
        tensor_free = max(second, product)
        tensor_free = add("multiply", step, tensor_free, tensor_free + multiply)
        computed = tensor_free
        emptied.append(tensor_free)
    return {"depth": depth, "overlap": overlap, "events": events, "end": tensor_free}


def stream_k() -> Json:
    """Steps of each thread block of a product whose tiles do not divide evenly, and whose tile each
    is; divided by Stream-K, and by whole tiles.
    """
    from dataclasses import replace

    from billfish.kernels.marlin.configs import Gpu, hopper_config
    from billfish.kernels.marlin.hopper_plan import divide
    from billfish.kernels.marlin.packing import unit_words

    n, k, m = 4096, 4096, 16
    units = (n // 64, k // 128, unit_words(128, False))
    config = hopper_config(m, units, Gpu(*H200))
    found: Json = {"product": {"n": n, "k": k, "m": m}, "gpu": H200[0]}
    for name, on in (("with", True), ("without", False)):
        d = divide(replace(config, stream_k=on), m, units[0], units[1], H200[1])
        starts = [p * d.share + min(p, d.extra) for p in range(d.blocks + 1)]
        blocks = []
        for pid, (start, end) in enumerate(pairwise(starts)):
            parts = [[tile, d.steps] for tile in range(pid, d.whole, d.blocks)]
            while start < end:
                stop = min(end, (start // d.steps + 1) * d.steps)
                parts.append([d.whole + start // d.steps, stop - start])
                start = stop
            blocks.append(parts)
        longest = max(sum(steps for _, steps in parts) for parts in blocks)
        total = d.tiles_n * d.tiles_m * d.steps
        slots = H200[1] * config.blocks_per_sm
        found[name] = {
            "tiles": d.tiles_n * d.tiles_m, "steps": d.steps, "blocks": blocks, "slots": slots,
            "longest": longest, "busy_percent": round(100 * total / (longest * slots), 1),
        }  # fmt: skip
    found["code"] = resolve_all(
        (
            "billfish.kernels.marlin.hopper_plan:divide",
            "billfish.kernels.marlin.hopper_schedule:Schedule.start",
        )
    )
    return found
