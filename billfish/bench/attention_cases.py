"""The batches that attention is timed on, and what is right for them."""

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from billfish.kernels.paged_attention import AttentionMetadata
from billfish.kernels.paged_attention.planner import AttentionPlan

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
    decodes = [(n, b) for n in (1024, 4096, 16384) for b in (1, 8, 32, 128, 256)]
    chunks = [(64, 8192), (512, 8192), (2048, 8192)]
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
        one("mixed", "64 x 4096 + 512 over 8192", [4096] * 64 + [8704], [1] * 64 + [512]),
    ]


@dataclass
class Batch:
    """A case on the GPU; `parts` are disjoint parts of one cache, to rotate through."""

    case: Case
    query: Tensor
    caches: Tensor  # [2, blocks, block_size, heads_kv, HEAD_DIM]
    parts: list[AttentionMetadata]


def make_batch(case: Case) -> Batch:
    """Random keys, values and queries; blocks in random order, in copies that miss the L2 cache."""
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


def plan_of(batch: Batch, **options: Any) -> AttentionPlan:
    """A plan for this batch, as the engine has it: one new token is decoded, more where no request
    has more than 16."""
    case = batch.case
    longest = max(case.query_lens)
    return AttentionPlan.allocate(
        max_requests=len(case.seq_lens), num_heads=case.heads_q, num_kv_heads=case.heads_kv,
        head_dim=HEAD_DIM, max_query_len=longest if longest <= 16 else 1,
        block_size=case.block_size, **options,
    )  # fmt: skip


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
