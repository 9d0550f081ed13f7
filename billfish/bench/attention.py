"""Times paged attention against peers, in one process on one GPU.

    python -m billfish.bench.attention --out benchmarks/attention.json [--peers DIR]
    python -m billfish.bench.attention --ablation --out benchmarks/ablation_attention.json

All implementations of a case are captured in CUDA graphs and replayed in turns, so that they meet
the same clock and power state. Each call of a graph uses its own part of the cache, enough of them
to miss the L2. What an engine does once a step (plans, schedules) is outside the timing. `fa3` is
FlashAttention-3 as the vllm 0.23.0 wheel carries it (_vllm_fa3_C.abi3.so, in DIR, plain or .xz);
`contiguous` is cuDNN's attention over keys and values without blocks: a bound, not a peer.
"""

import argparse
import datetime
import json
import lzma
import platform
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from billfish.bench.block_movement import movement
from billfish.bench.turns import Call, time_in_turns
from billfish.kernels.paged_attention import (
    AttentionMetadata,
    attend,
    decode,
    prefill,
)
from billfish.kernels.paged_attention.planner import DecodePlan, Scoring

HEAD_DIM = 128
DTYPE = torch.bfloat16
COLD_BYTES = 260_000_000  # four times the L2 of an H200


@dataclass(frozen=True)
class Case:
    """One batch shape: lengths in tokens of each request."""

    mode: str
    name: str
    heads_q: int
    heads_kv: int
    seq_lens: tuple[int, ...]
    query_lens: tuple[int, ...]
    block_size: int = 16

    @property
    def kv_bytes(self) -> int:
        return sum(self.seq_lens) * self.heads_kv * HEAD_DIM * 2 * DTYPE.itemsize

    @property
    def flops(self) -> int:
        """Of the two products, over the keys that each query sees."""
        pairs = zip(self.query_lens, self.seq_lens, strict=True)
        seen = sum(n * total - n * (n - 1) // 2 for n, total in pairs)
        return 4 * HEAD_DIM * self.heads_q * seen

    @property
    def uniform(self) -> bool:
        """Equal lengths, all tokens new or one each: what attention without blocks takes."""
        new, total = self.query_lens[0], self.seq_lens[0]
        same = len(set(self.query_lens)) == len(set(self.seq_lens)) == 1
        return same and new in (1, total)


def cases(heads: tuple[int, int]) -> list[Case]:
    """Decode, ragged, prefill and chunked prefill for (query heads, KV heads)."""

    def one(mode: str, name: str, seq_lens: list[int], query_lens: list[int]) -> Case:
        return Case(mode, name, *heads, tuple(seq_lens), tuple(query_lens))

    draw = random.Random(0)
    uniform = [draw.randint(1, 8192) for _ in range(128)]
    lognormal = [min(16384, 1 + int(draw.lognormvariate(6.9, 0.9))) for _ in range(256)]
    long_one = [32768] + [512] * 63
    decodes = [(n, b) for n in (1024, 4096, 16384) for b in (1, 8, 32, 128)]
    chunks = [(512, 8192), (2048, 8192)]
    short = [8192, 5000, 4099, 777, 130] * 8
    return [
        *(one("decode", f"{n} x {b}", [n] * b, [1] * b) for n, b in decodes),
        one("ragged", "128 x U(1..8192)", uniform, [1] * 128),
        one("ragged", "256 lognormal", lognormal, [1] * 256),
        one("ragged", "1 x 32768 + 63 x 512", long_one, [1] * 64),
        *(one("prefill", str(n), [n], [n]) for n in (2048, 8192, 32768)),
        one("prefill", "4 x 4096", [4096] * 4, [4096] * 4),
        *(one("chunk", f"{new} over {old}", [old + new], [new]) for new, old in chunks),
        one("chunk", "40 x (1..64 new)", short, [1 + 13 * i % 64 for i in range(40)]),
    ]


@dataclass
class Batch:
    """A case on the GPU; `parts` are disjoint parts of one cache, to rotate through."""

    case: Case
    query: Tensor
    caches: Tensor  # [2, blocks, block_size, heads_kv, HEAD_DIM]
    parts: list[AttentionMetadata]


def make_batch(case: Case) -> Batch:
    counts = [-(-n // case.block_size) for n in case.seq_lens]
    copies = min(40, max(1, -(-COLD_BYTES // case.kv_bytes)))
    ids = torch.randperm(copies * sum(counts)).tolist()
    shape = (2, len(ids), case.block_size, case.heads_kv, HEAD_DIM)
    caches = torch.empty(shape, dtype=DTYPE, device="cuda").normal_()
    parts = []
    for _ in range(copies):
        table = [[ids.pop() for _ in range(count)] for count in counts]
        lens = list(case.seq_lens), list(case.query_lens)
        parts.append(AttentionMetadata.build(table, *lens, case.block_size, device="cuda"))
    query = torch.randn(sum(case.query_lens), case.heads_q, HEAD_DIM, device="cuda").to(DTYPE)
    return Batch(case, query, caches, parts)


def plan_of(batch: Batch, **options: Any) -> DecodePlan:
    case = batch.case
    longest, group = max(case.query_lens), case.heads_q // case.heads_kv
    return DecodePlan.allocate(
        max_requests=len(case.seq_lens), num_heads=case.heads_q, num_kv_heads=case.heads_kv,
        head_dim=HEAD_DIM, max_query_len=longest if longest <= 16 else max(1, 16 // group),
        block_size=case.block_size, **options,
    )  # fmt: skip


def ours(batch: Batch) -> list[Call]:
    plan, (k, v) = plan_of(batch), batch.caches
    return [partial(attend, batch.query, k, v, plan.update(part)) for part in batch.parts]


def portable(batch: Batch) -> list[Call]:
    """The Triton kernels, which run on any GPU from sm_80 on."""
    sms = torch.cuda.get_device_properties("cuda").multi_processor_count
    plan, (k, v) = plan_of(batch, num_programs=2 * sms), batch.caches
    plan.update(batch.parts[0])
    limit = plan.max_query_len

    def call(m: AttentionMetadata) -> Tensor:
        out = torch.empty_like(batch.query)
        tables = (m.block_table, m.seq_lens, m.query_start)
        scoring = Scoring(HEAD_DIM**-0.5)
        if min(batch.case.query_lens) <= limit:
            decode.decode(
                batch.query, k, v, *tables, out, scoring, plan.workspace, max_query_len=limit
            )
        if max(batch.case.query_lens) > limit:
            prefill.prefill(batch.query, k, v, *tables, out, scoring, decoded_len=limit)
        return out

    return [partial(call, part) for part in batch.parts]


def gathered(case: Case, m: AttentionMetadata, cache: Tensor) -> Tensor:
    """Contiguous [R, heads, length, HEAD_DIM] keys or values of equally long sequences."""
    used = m.block_table[:, : -(-case.seq_lens[0] // case.block_size)].long()
    return cache[used].flatten(1, 2)[:, : case.seq_lens[0]].transpose(1, 2)


def _cudnn(case: Case, query: Tensor, k: Tensor, v: Tensor) -> Tensor:
    new = case.query_lens[0]
    x = query.unflatten(0, (-1, new)).transpose(1, 2)
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        y = scaled_dot_product_attention(x, k, v, is_causal=new > 1, enable_gqa=True)
    return y.transpose(1, 2).flatten(0, 1)


def contiguous(batch: Batch) -> list[Call]:
    case = batch.case
    if not case.uniform:
        return []
    caches = [[gathered(case, m, c).contiguous() for c in batch.caches] for m in batch.parts]
    return [partial(_cudnn, case, batch.query, k, v) for k, v in caches]


def gather_then_attend(batch: Batch) -> list[Call]:
    """What fused block reading saves: copy the blocks together, then attend."""
    case = batch.case

    def call(m: AttentionMetadata) -> Tensor:
        k, v = (gathered(case, m, c) for c in batch.caches)
        return _cudnn(case, batch.query, k, v)

    return [partial(call, part) for part in batch.parts] if case.uniform else []


def load_fa3(folder: str) -> None:
    """Load FlashAttention-3's operators from a folder that holds the library, plain or .xz."""
    path = next(Path(folder).rglob("_vllm_fa3_C.abi3.so*"))
    if path.suffix == ".xz":
        plain = Path(tempfile.mkdtemp(), path.stem)
        plain.write_bytes(lzma.decompress(path.read_bytes()))
        path = plain
    torch.ops.load_library(str(path))


def fa3(batch: Batch) -> list[Call]:
    case, op = batch.case, torch.ops._vllm_fa3_C
    most_new, most = max(case.query_lens), max(case.seq_lens)

    def call(m: AttentionMetadata, schedule: Tensor | None) -> Tensor:
        # Positions as in the library's schema: causal, no window, no soft cap.
        out: Tensor = op.fwd(
            batch.query, *batch.caches, *[None] * 4, m.query_start, None, None, None, m.seq_lens,
            most_new, most, m.block_table, *[None] * 8, HEAD_DIM**-0.5, True, -1, -1, 0.0, True,
            schedule, 0, None, 0, None, 1, 0, None,
        )[0]  # fmt: skip
        return out

    def schedule_of(m: AttentionMetadata) -> Tensor | None:
        if most_new > 1:
            return None
        schedule: Tensor = op.get_scheduler_metadata(
            len(case.seq_lens), 1, most, case.heads_q, case.heads_kv, HEAD_DIM, HEAD_DIM, DTYPE,
            m.seq_lens, m.query_start, None, None, None, None, case.block_size, 0, True, -1, -1,
            False, 0, None, 0,
        )  # fmt: skip
        return schedule

    return [partial(call, part, schedule_of(part)) for part in batch.parts]


def reference(batch: Batch, request: int) -> tuple[Tensor, slice]:
    """float64 output of the last (up to 64) new tokens of a request, and which they are."""
    case, m = batch.case, batch.parts[0]
    total, group = case.seq_lens[request], case.heads_q // case.heads_kv
    end = sum(case.query_lens[: request + 1])
    new = min(64, case.query_lens[request])
    key = torch.arange(total, device="cuda")
    block = m.block_table[request, key // case.block_size].long()
    k, v = (cache[block, key % case.block_size].double() for cache in batch.caches)
    q = batch.query[end - new : end].double().unflatten(1, (case.heads_kv, group))
    scores = torch.einsum("qhgd,nhd->hgqn", q, k) * HEAD_DIM**-0.5
    position = total - new + torch.arange(new, device="cuda")
    scores = scores.masked_fill(key > position[:, None], -torch.inf)
    out = torch.einsum("hgqn,nhd->qhgd", scores.softmax(-1), v).flatten(1, 2)
    return out, slice(end - new, end)


def relative_error(batch: Batch, out: Any) -> float:
    """Largest ||out - ref|| / ||ref|| over a sample of requests."""
    lens = batch.case.seq_lens
    worst = 0.0
    for request in {0, len(lens) - 1, lens.index(max(lens)), lens.index(min(lens))}:
        expected, rows = reference(batch, request)
        error = (out[rows].double() - expected).norm() / expected.norm()
        worst = max(worst, float(error))
    return worst


def run_case(case: Case, makers: dict[str, Callable[[Batch], list[Call]]]) -> list[dict[str, Any]]:
    batch = make_batch(case)
    impls = {name: make(batch) for name, make in makers.items()}
    errors = {name: relative_error(batch, calls[0]()) for name, calls in impls.items() if calls}
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
                "tflops": round(case.flops / us / 1e6, 1), "rel_err": float(f"{errors[name]:.1e}"),
            }
        )  # fmt: skip
    return rows


def ablation(heads: tuple[int, int]) -> list[dict[str, Any]]:
    """What each technique of decode is worth: the kernel with it and without."""
    rows = []
    chosen = {"1024 x 1", "1024 x 32", "16384 x 1", "4096 x 128", "1 x 32768 + 63 x 512"}
    for case in (c for c in cases(heads) if c.name in chosen):
        batch = make_batch(case)
        plan, whole = plan_of(batch), plan_of(batch, batch_invariant=True)
        for each in (plan, whole):
            each.update(batch.parts[0])
        impls = {
            "all": kernel_calls(batch, plan, overlap=True),
            "split-KV": kernel_calls(batch, whole, overlap=True),
            "programmatic dependent launch": kernel_calls(batch, plan, overlap=False),
            "GQA packing": unpacked(batch),
            "fused block read": gather_then_attend(batch),
            "Hopper kernel": portable(batch),
        }
        for name, (us, _) in time_in_turns(impls).items():
            rows.append(
                {"family": "paged_attention", "kernel": "hopper_decode", "technique": name,
                 "setting": "on" if name == "all" else "off", "case": case.name,
                 "us": round(us, 2), "bytes": case.kv_bytes}
            )  # fmt: skip
    return rows


def kernel_calls(batch: Batch, plan: DecodePlan, overlap: bool) -> list[Call]:
    from billfish.kernels.paged_attention import hopper_decode

    k, v = batch.caches

    def call(m: AttentionMetadata) -> None:
        hopper_decode.decode(
            batch.query, k, v, m.block_table, m.seq_lens, m.query_start,
            torch.empty_like(batch.query), Scoring(HEAD_DIM**-0.5), plan.workspace,
            max_query_len=1, overlap=overlap,
        )  # fmt: skip

    return [partial(call, part) for part in batch.parts]


def unpacked(batch: Batch) -> list[Call]:
    """Every query head reads K and V for itself: one launch for each head of a group."""
    case, (k, v) = batch.case, batch.caches
    group = case.heads_q // case.heads_kv
    plan = plan_of(replace(batch, case=replace(case, heads_q=case.heads_kv)))
    queries = [q.contiguous() for q in batch.query.unflatten(1, (-1, group)).unbind(2)]

    def call(m: AttentionMetadata) -> None:
        for query in queries:
            attend(query, k, v, m)

    return [partial(call, plan.update(part)) for part in batch.parts]


def environment(arguments: list[str]) -> dict[str, Any]:
    git = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True)
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True, check=True)
    return {
        "device": torch.cuda.get_device_name(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": git.stdout.strip() if git.returncode == 0 else None,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "driver": driver.stdout.splitlines()[0],
        },
        "command": "python -m billfish.bench.attention " + " ".join(arguments),
    }


def main(arguments: list[str]) -> None:
    cli = argparse.ArgumentParser(description=__doc__)
    cli.add_argument("--out", required=True, help="JSON file to write")
    cli.add_argument("--peers", help="folder with the FlashAttention-3 library")
    cli.add_argument("--heads", default="32/8,64/8,32/32", help="query/KV heads, comma-separated")
    cli.add_argument("--modes", default="decode,ragged,prefill,chunk,move")
    cli.add_argument("--ablation", action="store_true", help="time techniques, not peers")
    options = cli.parse_args(arguments)
    heads = [tuple(map(int, pair.split("/"))) for pair in options.heads.split(",")]
    makers: dict[str, Callable[[Batch], list[Call]]] = {
        "billfish": ours,
        "portable": portable,
        "contiguous": contiguous,
    }
    if options.peers:
        load_fa3(options.peers)
        makers["fa3"] = fa3
    result = {**environment(arguments), "rows": []}

    def keep(rows: list[dict[str, Any]]) -> None:
        for row in rows:
            print("  ".join(f"{value}" for value in row.values()), flush=True)
        result["rows"] += rows
        Path(options.out).write_text(json.dumps(result, indent=1) + "\n")

    for pair in heads:
        if options.ablation:
            keep(ablation((pair[0], pair[1])))
            continue
        for case in cases((pair[0], pair[1])):
            if case.mode in options.modes.split(","):
                keep(run_case(case, makers))
                torch.cuda.empty_cache()
    if "move" in options.modes.split(",") and not options.ablation:
        keep(movement())


if __name__ == "__main__":
    main(sys.argv[1:])
