"""The Triton kernels of paged attention, run in Triton's interpreter against float64.

Run by test_paged_attention_triton.py in a process of its own: a process either interprets Triton
kernels or compiles them. By hand: TRITON_INTERPRET=1 pytest tests/kernels/paged_attention_triton.py
"""

import itertools
import math
import random
from dataclasses import dataclass

import pytest
import torch

from billfish.kernels.paged_attention import (
    block_copy,
    cache_write,
    decode,
    prefill,
    reference,
)
from billfish.kernels.paged_attention.metadata import AttentionMetadata
from billfish.kernels.paged_attention.planner import AttentionPlan, Scoring
from billfish.kernels.paged_attention.prefill_combine import combine
from billfish.kernels.paged_attention.prefill_items import ENTRY, INFO, list_items, sharers

HUGE = 2**30


@dataclass
class Case:
    """A batch whose unused memory is poison: NaN and Inf in slots, -1 or huge ids in tables."""

    query: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    metadata: AttentionMetadata

    def expected(self, **options) -> tuple[torch.Tensor, torch.Tensor]:
        # The reference reads visible keys only, so poison cannot reach it.
        return reference.attend(
            self.query.double(), self.k_cache, self.v_cache, self.metadata, **options
        )


def make_case(
    seq_lens, query_lens, *, heads=4, kv_heads=2, head_dim=64, block_size=16, dtype=torch.float16,
    seed=0, scale=1.0, extra_tokens=0,
):  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-n // block_size) for n in seq_lens]
    num_blocks = sum(counts) + 3
    ids = torch.randperm(num_blocks, generator=generator).tolist()
    width = max(counts, default=0) + 2
    table, shape = [], (num_blocks, block_size, kv_heads, head_dim)
    k_cache, v_cache = torch.full(shape, math.nan), torch.full(shape, math.inf)
    for row, (n, count) in enumerate(zip(seq_lens, counts, strict=True)):
        used = [ids.pop() for _ in range(count)]
        table.append(used + [-1 if row % 2 else HUGE] * (width - count))
        slots = torch.arange(n)
        blocks = torch.tensor(used, dtype=torch.int64)[slots // block_size]
        for cache in (k_cache, v_cache):
            values = torch.randn(n, kv_heads, head_dim, generator=generator) * scale
            cache[blocks, slots % block_size] = values
    query = torch.randn(sum(query_lens) + extra_tokens, heads, head_dim, generator=generator)
    return Case(
        (query * scale).to(dtype),
        k_cache.to(dtype),
        v_cache.to(dtype),
        AttentionMetadata.build(table, seq_lens, query_lens, block_size),
    )


def run(case, *, programs=12, max_decode_len=None, **options):
    """Both kernels as the GPU runs them: short requests decoded, the rest prefilled."""
    heads, head_dim = case.query.shape[1:]
    scoring = Scoring(**{"scale": head_dim**-0.5, **options})
    metadata = case.metadata
    decoded = metadata.max_query_len if max_decode_len is None else max_decode_len
    out = torch.full(case.query.shape, math.nan, dtype=case.query.dtype)
    lse = torch.full(out.shape[:2], math.nan)
    step = (
        case.query, case.k_cache, case.v_cache, metadata.block_table, metadata.seq_lens,
        metadata.query_start, out, scoring,
    )  # fmt: skip
    if decoded:
        plan = AttentionPlan.allocate(
            max_requests=metadata.seq_lens.shape[0] + 1, num_heads=heads,
            num_kv_heads=case.k_cache.shape[2], head_dim=head_dim, max_query_len=decoded,
            sliding_window=scoring.sliding_window, num_programs=programs, device="cpu",
        )  # fmt: skip
        plan.split(metadata.seq_lens, metadata.query_start)
        decode.decode(*step, plan.workspace, max_query_len=decoded, lse=lse)
        assert not plan.workspace.arrivals.any()
    if decoded < metadata.max_query_len:
        prefill.prefill(*step, decoded_len=decoded, lse=lse)
    return out, lse


def check(case, outs, tolerance=2e-3, **options):
    (out, lse), (expected, expected_lse) = outs, case.expected(**options)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-4)
    error = (out.double() - expected).abs()
    assert (error <= tolerance * (1 + expected.abs())).all(), error.max()


@pytest.mark.parametrize("programs", [2, 6, 14, 64])
@pytest.mark.parametrize(
    "seq_lens",
    [[0], [1], [15, 16, 17], [63, 64, 65, 0, 127, 128, 129], [300, 2, 2, 2, 2, 2, 2, 2, 1]],
)
def test_decode(seq_lens, programs):
    case = make_case(seq_lens, [1] * len(seq_lens))
    check(case, run(case, programs=programs))


@pytest.mark.parametrize("group", [1, 3, 5, 7, 8, 16, 64])
def test_decode_any_group(group):
    case = make_case([70, 3, 129], [1, 1, 1], heads=2 * group, kv_heads=2, head_dim=64)
    check(case, run(case))


@pytest.mark.parametrize("head_dim", [64, 80, 96, 112, 128, 192, 256])
def test_head_dims(head_dim):
    case = make_case([70, 33], [1, 2], head_dim=head_dim, heads=2)
    check(case, run(case))
    check(case, run(case, max_decode_len=0))


@pytest.mark.parametrize("block_size", [1, 3, 16, 100, 256])
def test_block_sizes(block_size):
    case = make_case([131, 40], [1, 3], block_size=block_size)
    check(case, run(case))
    check(case, run(case, max_decode_len=1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("query_lens", [[2, 3, 4, 1], [4, 0, 2, 0]])
def test_decode_few_tokens(dtype, query_lens):
    case = make_case([65, 64, 17, 1], query_lens, dtype=dtype)
    check(case, run(case), tolerance=2e-3 if dtype == torch.float16 else 1e-5)


@pytest.mark.parametrize("max_decode_len", [0, 1, 2])
def test_mixed_batch(max_decode_len):
    seq_lens, query_lens = [150, 65, 40, 0, 64, 130], [80, 1, 2, 1, 64, 0]
    case = make_case(seq_lens, query_lens, heads=6, extra_tokens=3)
    out = run(case, max_decode_len=max_decode_len)
    check(case, out)
    assert not out[0][-3:].any()


@pytest.mark.parametrize("max_decode_len", [0, 9])
def test_queries_before_the_first_key(max_decode_len):
    """More new tokens than the sequence has, as where a batch is padded: the first see nothing."""
    case = make_case([5, 3, 17], [9, 40, 17])
    outs = run(case, max_decode_len=max_decode_len)
    check(case, outs)
    assert not outs[0][:4].any()


@pytest.mark.parametrize("max_decode_len", [0, 4])
def test_blocks_before_the_window_are_never_read(max_decode_len):
    """They may have been given away: their ids are -1, what they held is poison."""
    lens, queries, window, block_size = [150, 90], [1, 4], 33, 7
    case = make_case(lens, queries, block_size=block_size)
    for row, (n, new) in enumerate(zip(lens, queries, strict=True)):
        gone = max(n - new + 1 - window, 0) // block_size
        blocks = case.metadata.block_table[row, :gone].long()
        case.k_cache[blocks], case.v_cache[blocks] = math.nan, math.inf
        case.metadata.block_table[row, :gone] = -1
    outs = run(case, max_decode_len=max_decode_len, sliding_window=window)
    check(case, outs, sliding_window=window)


@pytest.mark.parametrize("max_decode_len", [0, 4])
@pytest.mark.parametrize("scale", [-0.2, 0.0])
def test_scales_that_are_not_positive(scale, max_decode_len):
    case = make_case([70, 33], [1, 2])
    check(case, run(case, max_decode_len=max_decode_len, scale=scale), scale=scale)


@pytest.mark.parametrize("max_decode_len", [0, 4])
def test_heads_outermost(max_decode_len):
    """Queries and caches whose heads are far apart, as in a transposed view."""
    case = make_case([70, 33, 9], [1, 4, 3])
    case.query = case.query.transpose(0, 1).contiguous().transpose(0, 1)
    for name in ("k_cache", "v_cache"):
        by_head = getattr(case, name).permute(2, 0, 1, 3).contiguous()
        setattr(case, name, by_head.permute(1, 2, 0, 3))
    check(case, run(case, max_decode_len=max_decode_len))


OPTIONS = [
    {"sliding_window": 1},
    {"sliding_window": 17},
    {"sliding_window": 64},
    {"sliding_window": 1000},
    {"soft_cap": 0.05},
    {"soft_cap": 30.0, "sliding_window": 40},
    {"sinks": torch.tensor([0.3, -2.0, 9.0, -math.inf])},
    {"sinks": torch.tensor([1.0, 0.0, 2.0, 3.0]), "sliding_window": 20, "scale": 0.7},
]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("max_decode_len", [0, 2])
def test_options(options, max_decode_len):
    case = make_case([131, 90, 2, 0], [1, 2, 2, 1])
    check(case, run(case, max_decode_len=max_decode_len, **options), **options)


@pytest.mark.parametrize("max_decode_len", [0, 1])
def test_huge_logits(max_decode_len):
    """Logits of +-1e4, where an unguarded exponential would overflow."""
    case = make_case([100, 64], [1, 1], scale=60.0, dtype=torch.float32)
    check(case, run(case, max_decode_len=max_decode_len), tolerance=1e-3)


def test_same_bits_whatever_finishes_last():
    case = make_case([300, 120], [1, 1])
    first = run(case)
    assert all(map(torch.equal, first, run(case)))


@pytest.mark.parametrize(
    ("num_requests", "extra_tokens", "programs"),
    [(0, 0, 132), (0, 9, 132), (1, 0, 132), (40, 0, 132), (40, 9, 0), (300, 9, 132)],
)
def test_prefill_items(num_requests, extra_tokens, programs):
    """Against a sort: most KV first, equals by number, decoded requests without blocks; no more
    parts in all than programs, and none of fewer tiles than pay off.
    """
    draw = random.Random(num_requests)
    query_lens = [draw.choice([0, 1, 3, 9, 50, 200]) for _ in range(num_requests)]
    seq_lens = [draw.choice([n, n + 100, 7000]) for n in query_lens]
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    tokens = int(starts[-1]) + extra_tokens
    items = torch.full((num_requests + 3, ENTRY), -7, dtype=torch.int32)
    list_items(torch.tensor(seq_lens, dtype=torch.int32), starts, tokens, 4, 32, 4, items, programs)
    blocks = [-(-n * 4 // 128) if n > 4 else 0 for n in query_lens] + [-(-extra_tokens * 4 // 128)]
    parts = items[: num_requests + 1, 1].tolist()
    total = slots = 0
    for r in sorted(range(num_requests + 1), key=lambda r: -[*seq_lens, -1][r]):
        assert items[r, 0] == total
        assert items[r, 2] == slots
        total += blocks[r] * parts[r]
        slots += blocks[r] * parts[r] * 8 if parts[r] > 1 else 0
        assert parts[r] == 1 or seq_lens[r] // 128 + 1 >= 6 * parts[r]
    assert items[num_requests + 1 :, :2].tolist() == [[total, slots], [-7, -7]]
    assert slots <= programs
    assert programs or set(parts) == {1}


def test_a_plan_lists_prefill_beside_decode():
    """In one launch, to the same result as each alone."""
    case = make_case([700, 30, 64, 5, 900], [40, 1, 64, 1, 300], heads=8, kv_heads=2, head_dim=64)
    plan, alone = (
        AttentionPlan.allocate(
            max_requests=9, num_heads=8, num_kv_heads=2, head_dim=64, num_programs=24, device="cpu"
        )
        for _ in range(2)
    )  # fmt: skip
    plan.workspace.items.fill_(-7)
    plan.update(case.metadata)
    alone.split(case.metadata.seq_lens, case.metadata.query_start)
    items = torch.full_like(plan.workspace.items, -7)
    list_items(case.metadata.seq_lens, case.metadata.query_start, 406, 1, 8, 4, items, 0)
    assert torch.equal(plan.workspace.items, items)
    assert items[5, 0] == 14
    for name in ("borders", "parts"):
        used = slice(5) if name == "parts" else slice(None)
        ours, theirs = (getattr(each.workspace, name)[used] for each in (plan, alone))
        assert torch.equal(ours[:, :5], theirs[:, :5])


@pytest.mark.parametrize("with_sinks", [False, True])
def test_prefill_combine(with_sinks):
    """Three items in five slots, one of them whole; the rest of the slots holds NaN."""
    generator = torch.Generator().manual_seed(0)
    pack, heads, head_dim = 4, 8, 16
    scores = torch.randn(128, 300, generator=generator) * 5
    values = torch.randn(300, head_dim, generator=generator)
    acc, sums = torch.full((9, 128, head_dim), math.nan), torch.full((9, 2, 128), math.nan)
    info = torch.full((9, INFO), -1, dtype=torch.int32)
    sinks = torch.linspace(-1, 3, heads) if with_sinks else None
    out, lse = torch.full((40, heads, head_dim), math.nan), torch.full((40, heads), math.nan)
    expected, expected_lse = out.clone(), lse.clone()
    slot = 0
    for first_token, tokens, head0, bounds in (
        (3, 32, 4, [0, 100, 101, 300]), (1, 2, 0, [0, 300]), (20, 7, 0, [0, 40, 80, 120, 160, 300])
    ):  # fmt: skip
        rows = tokens * pack
        for i, (begin, end) in enumerate(itertools.pairwise(bounds)):
            part = scores[:rows, begin:end]
            top = part.amax(1)
            weights = (part - top[:, None]).exp2()
            acc[slot, :rows] = weights @ values[begin:end]
            sums[slot, :, :rows] = torch.stack((top, weights.sum(1)))
            info[slot] = torch.tensor([first_token, tokens, head0, len(bounds) - 1, i])
            slot += 1
        where = (slice(first_token, first_token + tokens), slice(head0, head0 + pack))
        logits = scores[:rows].double() * math.log(2)
        if sinks is not None:
            extra = sinks[head0 : head0 + pack].double().repeat(tokens)[:, None]
            logits = torch.cat((logits, extra), 1)
        weights = logits.softmax(1)[:, :300]
        expected_lse[where] = logits.logsumexp(1).view(tokens, pack).float()
        expected[where] = (weights @ values.double()).view(tokens, pack, head_dim).float()
    items = torch.zeros(3, ENTRY, dtype=torch.int32)
    items[2, 1] = slot
    combine(items, acc, sums, info, sinks, out, lse, 1, pack)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=1e-5, equal_nan=True)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize(
    ("num_tokens", "num_requests", "max_seq_len", "expected"),
    [
        (64, 1, 8256, 132),
        (3 * 64, 3, 8256, 132),
        (64 + 40, 65, 8192, 132),  # 64 decode beside one with 40 new tokens
        (512, 1, 8704, 0),  # 128 items: as many as fit
        (2048, 1, 2048, 0),
        (64, 1, 1024, 0),  # too few keys to pay off
        (1300, 40, 8192, 0),
        (0, 0, 0, 0),
    ],
)
def test_when_keys_are_shared_out(num_tokens, num_requests, max_seq_len, expected):
    assert sharers(132, num_tokens, num_requests, max_seq_len, 4, 8, 4) == expected
    assert sharers(0, num_tokens, num_requests, max_seq_len, 4, 8, 4) == 0


def test_few_queries_over_much_kv_are_shared_out():
    """One item a KV head for 132 multiprocessors: 16 parts each, or as many as have 6 tiles."""
    for kv_len, expected in ((32768, 16), (8192, 10), (700, 1)):
        items = torch.zeros(3, ENTRY, dtype=torch.int32)
        starts = torch.tensor([0, 20], dtype=torch.int32)
        lens = torch.tensor([kv_len], dtype=torch.int32)
        list_items(lens, starts, 20, 4, 32, 4, items, 132)
        assert items[0, 1] == expected


@pytest.mark.parametrize("head_dim", [64, 80])
@pytest.mark.parametrize("block_size", [1, 16, 48])
def test_write(head_dim, block_size):
    generator = torch.Generator().manual_seed(1)
    qkv = torch.randn(9, 3 * 2, head_dim, generator=generator).half()
    key, value = qkv[:, 2:4], qkv[:, 4:]
    slots = torch.tensor([-1, 5, 40, 2, -1, 47, 0, 17, -1])
    caches = [torch.full((48, block_size, 2, head_dim), math.nan).half() for _ in range(4)]
    cache_write.write(key, value, caches[0], caches[1], slots)
    reference.write_kv(key, value, caches[2], caches[3], slots)
    assert torch.equal(caches[0].view(torch.int16), caches[2].view(torch.int16))
    assert torch.equal(caches[1].view(torch.int16), caches[3].view(torch.int16))


def test_heads_too_far_apart_for_32_bits_are_written_one_by_one(monkeypatch):
    """A program's heads are counted in 32 bits. Caches of 5 GB, of which nothing is touched."""
    launched = []

    class Kernel:
        def __getitem__(self, grid):
            return lambda *arguments, **constants: launched.append((grid, constants["SPAN"]))

    monkeypatch.setattr(cache_write, "_write_kernel", Kernel())
    new, slots = torch.zeros(2, 9, 4, 64).half(), torch.arange(9)
    for stride in (2**29 - 64, 2**29):
        cache = torch.zeros(64).half().as_strided((1, 16, 4, 64), (0, 0, 0, 1))
        far = torch.empty(4, stride // 64, 64, dtype=torch.float16, device="meta")
        far = far.permute(1, 0, 2).unsqueeze(0)[:, :16]
        cache_write.write(*new, far, cache, slots)
        cache_write.write(*new, cache, far, slots)
    assert [span for _, span in launched] == [4, 4, 1, 1]
    assert [grid[1] for grid, _ in launched] == [2, 2, 8, 8]


def rotated(x, positions, cos_sin, weight, eps):
    """Norm, then NeoX half-split rotation, in float64."""
    x = x.double()
    if weight is not None:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.double()
    if cos_sin is None:
        return x
    half = cos_sin.shape[1] // 2
    cos, sin = cos_sin[positions].double().unsqueeze(1).split(half, dim=-1)
    low, high, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((low * cos - high * sin, high * cos + low * sin, rest), dim=-1)


@pytest.mark.parametrize("rotary_dim", [0, 32, 80])
@pytest.mark.parametrize("norm", [False, True])
def test_rotate_and_write(rotary_dim, norm):
    generator = torch.Generator().manual_seed(2)
    head_dim, tokens = 80, 7
    qkv = torch.randn(tokens, 8, head_dim, generator=generator).half()
    query, key, value = qkv[:, :4], qkv[:, 4:6], qkv[:, 6:]
    slots = torch.tensor([3, -1, 30, 31, 0, 7, -1])
    positions = torch.tensor([5, 0, 3, 19, 2, 2, 8])
    cos_sin = torch.rand(20, rotary_dim, generator=generator) if rotary_dim else None
    weights = torch.rand(2, head_dim, generator=generator) if norm else (None, None)
    caches = torch.full((2, 2, 16, 2, head_dim), math.nan).half()
    out = cache_write.rotate_and_write(
        query, key, value, caches[0], caches[1], slots, positions=positions, cos_sin=cos_sin,
        q_norm=weights[0], k_norm=weights[1], eps=1e-5,
    )  # fmt: skip
    expected = rotated(query, positions, cos_sin, weights[0], 1e-5)
    torch.testing.assert_close(out.double(), expected, rtol=1e-3, atol=1e-4)
    new_key = rotated(key, positions, cos_sin, weights[1], 1e-5)
    kept = slots >= 0
    got = caches.flatten(1, 2)[:, slots[kept]]
    torch.testing.assert_close(got[0].double(), new_key[kept], rtol=1e-3, atol=1e-4)
    assert torch.equal(got[1], value[kept])
    assert int(caches.isnan().sum()) == caches[:, 0].numel() * 2 - 2 * int(kept.sum()) * 160


@pytest.mark.parametrize(
    ("src", "dst"),
    [([3], [3]), ([1, 2, 3], [2, 3, 4]), ([1, 2], [2, 1]), ([0, 0, 0], [5, 6, 7]), ([], [])],
)
def test_copy_reads_before_it_writes(src, dst):
    cache = torch.randn(2, 2, 8, 3, 2, 24, generator=torch.Generator().manual_seed(3)).half()
    src, dst = torch.tensor(src, dtype=torch.int64), torch.tensor(dst, dtype=torch.int64)
    expected = cache.clone()
    reference.copy_blocks(expected, src, dst)
    block_copy.copy(cache, src, dst)
    assert torch.equal(cache, expected)


@pytest.mark.parametrize(("head_dim", "offset"), [(5, 0), (8, 1)])
def test_copy_of_blocks_that_are_not_of_whole_words(head_dim, offset):
    shape = (2, 2, 9, 3, 1, head_dim)
    flat = torch.randn(math.prod(shape) + 1, generator=torch.Generator().manual_seed(5)).half()
    cache = flat[offset : offset + math.prod(shape)].view(shape)
    assert not block_copy.has_words(cache)
    src, dst = torch.tensor([1, 2, 8]), torch.tensor([2, 1, 0])
    expected = cache.clone()
    reference.copy_blocks(expected, src, dst)
    block_copy.copy(cache, src, dst)
    assert torch.equal(cache, expected)


def test_copy_between_caches():
    generator = torch.Generator().manual_seed(4)
    source = torch.randn(2, 2, 8, 3, 2, 24, generator=generator).half()
    target = torch.zeros(2, 2, 11, 3, 2, 24).half()
    src, dst = torch.tensor([7, 0, 3, 1, 2]), torch.tensor([10, 1, 0, 5, 9])
    words = block_copy.as_words(source), block_copy.as_words(target)
    block_copy.launch_copy(*words, src, dst, 4)
    assert torch.equal(target[:, :, dst], source[:, :, src])
    assert int(target.any(dim=(-1)).any(-1).any(-1).sum()) == 2 * 2 * 5
