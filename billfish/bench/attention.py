"""Times paged attention against peers, in one process on one GPU.

    billfish bench attention --out benchmarks/attention.json [--peers DIR]
    billfish bench attention --ablation --out benchmarks/ablation_attention.json

All implementations of a case are captured in CUDA graphs and replayed in turns, so that they meet
the same clock and power state. Each call of a graph uses its own part of the cache, enough of them
to miss the L2. What an engine does once a step (plans, schedules) is outside the timing; `planned`
is ours with it. `portable` is our Triton kernels; `contiguous` is cuDNN's attention over keys and
values without blocks, a bound and not a peer. The peers are those of `attention_peers`, in DIR.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from billfish.bench import record
from billfish.bench.attention_ablation import ablation, portable
from billfish.bench.attention_cases import (
    HEAD_DIM,
    Batch,
    Case,
    cases,
    make_batch,
    plan_of,
    relative_error,
)
from billfish.bench.attention_peers import contiguous, peers_in
from billfish.bench.block_movement import movement
from billfish.bench.turns import Call, time_in_turns
from billfish.kernels.paged_attention import AttentionMetadata, attend

MODES = ("decode", "ragged", "prefill", "chunk", "mixed", "move")


def ours(batch: Batch) -> list[Call]:
    """`attend` over each copy of the batch; planning is outside."""
    plan, (k, v) = plan_of(batch), batch.caches
    return [partial(attend, batch.query, k, v, plan.update(part)) for part in batch.parts]


def planned(batch: Batch) -> list[Call]:
    """Prefill with the planning of the step in every call."""
    if max(batch.case.query_lens) == 1:
        return []
    plan, (k, v) = plan_of(batch), batch.caches

    def call(m: AttentionMetadata) -> Tensor:
        return attend(batch.query, k, v, plan.update(m))

    return [partial(call, part) for part in batch.parts]


def two_calls(batch: Batch) -> list[Call]:
    """A mixed step as two: its decoding requests, then the others."""
    lens, (k, v) = batch.case.query_lens, batch.caches
    decoding = lens.count(1)
    if batch.case.mode != "mixed":
        return []
    few = replace(batch.case, query_lens=lens[:decoding], seq_lens=batch.case.seq_lens[:decoding])
    plans = plan_of(replace(batch, case=few)), plan_of(batch)

    def steps(m: AttentionMetadata) -> Iterator[partial[Tensor]]:
        for plan, rows in zip(plans, (slice(decoding), slice(decoding, None)), strict=True):
            part = AttentionMetadata(
                m.block_table[rows], m.seq_lens[rows],
                m.query_start[rows.start or 0 : rows.stop and rows.stop + 1] - (rows.start or 0),
                m.slot_mapping[rows], max(lens[rows]), max(batch.case.seq_lens[rows]),
            )  # fmt: skip
            yield partial(attend, batch.query[rows], k, v, plan.update(part))

    def call(both: list[partial[Tensor]]) -> None:
        for step in both:
            step()

    return [partial(call, list(steps(part))) for part in batch.parts]


def run_case(case: Case, makers: dict[str, Callable[[Batch], list[Call]]]) -> list[dict[str, Any]]:
    """Rows of attention.json of a batch shape. makers: make the calls of each implementation."""
    batch = make_batch(case)
    impls = {name: make(batch) for name, make in makers.items()}
    outs = {name: calls[0]() for name, calls in impls.items() if calls}
    errors = {n: relative_error(batch, out) for n, out in outs.items() if isinstance(out, Tensor)}
    rows = []
    for name, (us, spread) in time_in_turns(impls).items():
        rows.append(
            {
                "mode": case.mode, "case": case.name, "heads_q": case.heads_q,
                "heads_kv": case.heads_kv, "head_dim": HEAD_DIM, "block_size": case.block_size,
                "batch": len(case.seq_lens), "context": max(case.seq_lens),
                "q_len": max(case.query_lens), "kv_dtype": "bf16", "impl": name,
                "us": round(us, 2), "spread": round(spread, 3),
                "gbps": round(case.kv_bytes / us / 1e3, 1),
                "tflops": round(case.flops / us / 1e6, 1),
                "rel_err": float(f"{errors[name]:.1e}") if name in errors else None,
            }
        )  # fmt: skip
    return rows


def _heads(text: str) -> list[tuple[int, int]]:
    pairs = [tuple(map(int, pair.split("/"))) for pair in text.split(",")]
    found = [(pair[0], pair[1]) for pair in pairs if len(pair) == 2]
    if len(found) < len(pairs) or any(min(q, kv) < 1 or q % kv for q, kv in found):
        raise ValueError(text)
    return found


def main(arguments: list[str]) -> None:
    cli = argparse.ArgumentParser(
        prog="billfish bench attention",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    cli.add_argument("--out", required=True, help="JSON file to write")
    cli.add_argument("--peers", help="folder with the peers' libraries")
    cli.add_argument(
        "--heads", type=_heads, default="32/8,64/8,32/32", help="query/KV heads, comma-separated"
    )
    cli.add_argument("--modes", default=",".join(MODES), help="kinds of cases, not of --ablation")
    cli.add_argument("--only", default="", help="cases whose names hold this")
    cli.add_argument("--most-gb", type=float, default=40, help="leave out larger KV")
    cli.add_argument("--ablation", action="store_true", help="time techniques, not peers")
    options = cli.parse_args(arguments)
    modes = options.modes.split(",")
    if not set(modes) <= set(MODES):
        cli.error(f"--modes: got {options.modes}, expected some of {','.join(MODES)}")
    if options.ablation:
        given = {"--peers": options.peers, "--only": options.only}
        for name in (name for name, value in given.items() if value):
            cli.error(f"{name} has no effect with --ablation")
    wanted = [
        case
        for pair in options.heads
        for case in cases(pair)
        if case.mode in modes and options.only in case.name
        and case.kv_bytes <= options.most_gb * 1e9
    ]  # fmt: skip
    if not (wanted or options.ablation or "move" in modes):
        cli.error("no case is left: see --modes, --only and --most-gb")
    makers: dict[str, Callable[[Batch], list[Call]]] = {
        "billfish": ours,
        "planned": planned,
        "two calls": two_calls,
        "portable": portable,
        "contiguous": contiguous,
    }
    if options.peers:
        makers |= peers_in(options.peers)
    command = "billfish bench attention " + " ".join(arguments)
    head = record.environment(command)
    kept: list[dict[str, Any]] = []

    def keep(rows: list[dict[str, Any]]) -> None:
        for row in rows:
            print("  ".join(f"{value}" for value in row.values()), flush=True)
        kept.extend(rows)
        record.write(options.out, head, kept)

    if options.ablation:
        for pair in options.heads:
            keep(ablation(pair))
        return
    for case in wanted:
        keep(run_case(case, makers))
        torch.cuda.empty_cache()
    if "move" in modes:
        keep(movement())


if __name__ == "__main__":
    main(sys.argv[1:])
