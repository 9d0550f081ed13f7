"""Paged attention on a GPU, element by element against float64.

All unused memory is poison: NaN and Inf in the slots past a sequence and in never-written blocks,
-1 and huge ids past the used part of a block table, NaN in outputs and workspaces.
"""

import dataclasses
import math

import pytest
import torch

from billfish.errors import KernelArgumentError
from billfish.kernels.paged_attention import (
    AttentionMetadata,
    attend,
    copy_blocks,
    reference,
    rotate_and_write,
    swap_blocks,
    write_kv,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.fixture(autouse=True)
def _inference():
    """As models run: plain tensors then go past torch's dispatcher to the implementation."""
    with torch.no_grad():
        yield


HUGE = 2**30
UNIT_ROUNDOFF = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


@dataclasses.dataclass
class Case:
    query: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    metadata: AttentionMetadata


def make_case(
    seq_lens, query_lens, *, heads=8, kv_heads=2, head_dim=128, block_size=16,
    dtype=torch.bfloat16, seed=0, logits=1.0, extra_tokens=0,
):  # fmt: skip
    """logits: standard deviation of the scaled scores."""
    generator = torch.Generator("cuda").manual_seed(seed)
    counts = [-(-n // block_size) for n in seq_lens]
    num_blocks = sum(counts) + 3
    ids = torch.randperm(num_blocks, generator=generator, device="cuda").tolist()
    shape = (num_blocks, block_size, kv_heads, head_dim)
    width = max(counts, default=0) + 2
    table, used = [], []
    for row, count in enumerate(counts):
        mine = [ids.pop() for _ in range(count)]
        used += mine
        table.append(mine + [-1 if row % 2 else HUGE] * (width - count))
    k_cache = torch.full(shape, math.nan, device="cuda", dtype=dtype)
    v_cache = torch.full(shape, math.inf, device="cuda", dtype=dtype)
    for cache, scale in ((k_cache, logits**0.5), (v_cache, 1.0)):
        values = torch.randn(len(used), *shape[1:], generator=generator, device="cuda") * scale
        cache[torch.tensor(used, device="cuda", dtype=torch.int64)] = values.to(dtype)
    for row, n in enumerate(seq_lens):
        if n % block_size:
            k_cache[table[row][n // block_size], n % block_size :] = math.nan
            v_cache[table[row][n // block_size], n % block_size :] = math.inf
    tokens = sum(query_lens) + extra_tokens
    query = torch.randn(tokens, heads, head_dim, generator=generator, device="cuda")
    metadata = AttentionMetadata.build(table, seq_lens, query_lens, block_size, device="cuda")
    if extra_tokens:
        padding = torch.full((extra_tokens,), -1, device="cuda")
        slots = torch.cat((metadata.slot_mapping, padding))
        metadata = dataclasses.replace(metadata, slot_mapping=slots)
    return Case((query * logits**0.5).to(dtype), k_cache, v_cache, metadata)


def exact(case, scale=None, sliding_window=None, soft_cap=None, sinks=None):
    """(output, its tolerance, log-sum-exp) in float64. The tolerance counts the rounding of the
    weights and of the output to the dtype, and float32 arithmetic on the scores.
    """
    _, heads, head_dim = case.query.shape
    block_size, kv_heads = case.k_cache.shape[1:3]
    scale = head_dim**-0.5 if scale is None else scale
    out = torch.zeros(case.query.shape, dtype=torch.float64, device="cuda")
    bound = torch.zeros_like(out)
    lse = torch.full(out.shape[:2], -math.inf, dtype=torch.float64, device="cuda")
    if sinks is not None:
        lse[:] = sinks
    starts = case.metadata.query_start.tolist()
    unit = UNIT_ROUNDOFF[case.query.dtype]
    for r, n in enumerate(case.metadata.seq_lens.tolist()):
        length = starts[r + 1] - starts[r]
        if n == 0 or length == 0:
            continue
        key = torch.arange(n, device="cuda")
        block = case.metadata.block_table[r, key // block_size].long()
        k = case.k_cache[block, key % block_size].double()
        v = case.v_cache[block, key % block_size].double()
        for a in range(starts[r], starts[r + 1], 512):
            b = min(a + 512, starts[r + 1])
            q = case.query[a:b].double().view(b - a, kv_heads, heads // kv_heads, head_dim)
            scores = torch.einsum("qhgd,nhd->hgqn", q, k) * scale
            if soft_cap is not None:
                scores = soft_cap * torch.tanh(scores / soft_cap)
            position = n - starts[r + 1] + torch.arange(a, b, device="cuda")
            seen = key <= position[:, None]
            if sliding_window is not None:
                seen &= position[:, None] - key < min(sliding_window, 2**40)
            scores = scores.masked_fill(~seen, -math.inf)
            largest = scores.masked_fill(~seen, 0).abs().amax(-1)
            extra = torch.full((*scores.shape[:-1], 1), -math.inf, device="cuda").double()
            if sinks is not None:
                extra[:] = sinks.double().view(kv_heads, -1, 1, 1)
            logits = torch.cat((scores, extra), -1)
            lse[a:b] = logits.logsumexp(-1).permute(2, 0, 1).flatten(1)
            weights = logits.softmax(-1).nan_to_num(0)[..., :-1]
            out[a:b] = torch.einsum("hgqn,nhd->qhgd", weights, v).reshape(b - a, heads, head_dim)
            size = torch.einsum("hgqn,nhd->qhgd", weights, v.abs())
            relative = (2 * unit + 2.0**-20 * (1 + largest)).permute(2, 0, 1).unsqueeze(-1)
            bound[a:b] = (size * relative).reshape(b - a, heads, head_dim)
    return out, bound + unit * out.abs() + 1e-6, lse


@pytest.fixture(params=["best", "portable"])
def kernels(request, monkeypatch):
    """Run a test with the kernels that this GPU gets, and with the portable ones."""
    from billfish.kernels.paged_attention import gpu, planner

    if request.param == "portable":
        if not planner.is_hopper(torch.device("cuda")):
            pytest.skip("the best kernels for this GPU are the portable ones")
        for module in (gpu, planner):
            monkeypatch.setattr(module, "is_hopper", lambda device: False)


both = pytest.mark.usefixtures("kernels")


def check(case, out=None, **options):
    if out is None:
        out = attend(case.query, case.k_cache, case.v_cache, case.metadata, **options)
    expected, bound, _ = exact(case, **options)
    excess = (out.double() - expected).abs() - bound
    assert out.isfinite().all()
    assert (excess <= 0).all(), f"{int((excess > 0).sum())} elements, worst by {excess.max()}"


def planned(case, **options):
    """The case with a plan; its workspace full of NaN."""
    from billfish.kernels.paged_attention.planner import AttentionPlan

    _, heads, head_dim = case.query.shape
    options.setdefault("max_requests", case.metadata.seq_lens.shape[0])
    plan = AttentionPlan.allocate(
        num_heads=heads, num_kv_heads=case.k_cache.shape[2], head_dim=head_dim, **options
    )
    for name in ("acc", "sums", "split_acc", "split_sums"):
        getattr(plan.workspace, name).fill_(math.nan)
    return plan, dataclasses.replace(case, metadata=plan.update(case.metadata))


EDGES = [0, 1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 257, 1023, 1024, 1025, 4097]


@both
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "seq_lens",
    [
        *([n] for n in (0, 1, 64, 65, 2047, 2048, 2049)),
        EDGES,
        [33000, 1, 1, 1, 500, 0, 0, 64],
        [5] * 300,
        [1 + 37 * i % 1500 for i in range(1024)],
        [8191, 3, 700],
        [32768] + [512] * 63,
    ],
    ids=lambda lens: f"{len(lens)}x{max(lens)}",
)
def test_decode(seq_lens, dtype):
    check(make_case(seq_lens, [1] * len(seq_lens), dtype=dtype))


@both
@pytest.mark.parametrize("others", [0, 63])
def test_decode_131072(others):
    check(make_case([131072] + [1] * others, [1] * (others + 1), heads=4, kv_heads=1))


@both
@pytest.mark.parametrize("kv_heads", [1, 8, 32])
def test_decode_llama_heads(kv_heads):
    check(make_case([1000, 3000, 17], [1, 1, 1], heads=32, kv_heads=kv_heads))


MIXED = ([70, 300, 129, 1, 0, 1030, 2100], [1, 200, 3, 1, 1, 1, 17])


@both
@pytest.mark.parametrize("group", [1, 2, 3, 5, 6, 7, 8, 16, 64])
def test_groups(group):
    check(make_case(*MIXED, heads=2 * group, kv_heads=2))


@both
@pytest.mark.parametrize("head_dim", [64, 80, 96, 112, 128, 192, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_head_dims(head_dim, dtype):
    check(make_case(*MIXED, head_dim=head_dim, dtype=dtype))


@both
@pytest.mark.parametrize("block_size", [1, 3, 8, 32, 64, 100, 256])
def test_block_sizes(block_size):
    check(make_case(*MIXED, block_size=block_size))


@both
@pytest.mark.parametrize("group", [1, 4, 8])
@pytest.mark.parametrize("most", [2, 4, 16])
def test_few_tokens(most, group):
    """Speculative decoding: up to 16 new tokens a request, all in the decode kernel."""
    lens = [most, most + 1, 64, 65, 1000, 5000]
    query_lens = [1 + (3 * i) % most for i in range(5)] + [most]
    check(make_case(lens, query_lens, heads=2 * group))


@both
@pytest.mark.parametrize(
    ("seq_lens", "query_lens"),
    [
        ([1], [1]),
        ([17], [17]),
        ([128, 129, 127, 600], [128, 129, 127, 600]),
        ([2048], [2048]),
        ([8192], [8192]),
        ([2560, 3000], [512, 129]),
        ([700, 5, 64, 0, 64, 900], [700, 5, 0, 30, 64, 1]),
        ([8200], [2]),
        ([5] * 200, [5] * 200),
        ([1 + 37 * i % 400 for i in range(150)], [1 + 37 * i % 400 for i in range(150)]),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_prefill(seq_lens, query_lens, dtype):
    check(make_case(seq_lens, query_lens, dtype=dtype))


@both
@pytest.mark.parametrize("group", [1, 4, 8])
def test_programs_that_prefill_many_items(group):
    """One after the other: of one tile and more, whole and split in the middle of a tile, and some
    whose second half of rows is empty.
    """
    seq_lens = [1 + 53 * i % 300 for i in range(120)]
    query_lens = [max(1, n - 41 * (i % 3)) for i, n in enumerate(seq_lens)]
    case = make_case(seq_lens, query_lens, heads=32, kv_heads=32 // group)
    check(case)
    check(planned(case, max_query_len=1)[1])


OPTIONS = [
    {"sliding_window": 1},
    {"sliding_window": 15},
    {"sliding_window": 17},
    {"sliding_window": 512},
    {"sliding_window": 100000},
    {"sliding_window": 2**80},
    {"soft_cap": 30.0},
    {"soft_cap": 1, "scale": 1},
    {"soft_cap": 0.01},
    {"soft_cap": 50.0, "sliding_window": 1000},
    {"sinks": True},
    {"sinks": True, "sliding_window": 128, "scale": 0.3},
]


@both
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options(options):
    if "sinks" in options:
        sinks = torch.tensor([0.0, 3.0, -5.0, 20.0, -math.inf, 1.0, 2.0, 50.0], device="cuda")
        options = {**options, "sinks": sinks}
    check(make_case(*MIXED), **options)
    check(make_case([9000, 5, 0, 64], [1, 1, 1, 1]), **options)


@both
def test_sinks_of_the_dtype_of_queries():
    sinks = torch.linspace(-2, 9, 8, device="cuda").bfloat16()
    check(make_case(*MIXED), sinks=sinks)


@both
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_huge_logits(dtype):
    case = make_case(*MIXED, dtype=dtype, logits=3000.0)
    check(case)
    check(case, soft_cap=20.0)  # |logit| / cap far above 100


@both
@pytest.mark.parametrize("options", [{}, {"soft_cap": 20.0, "sinks": True}], ids=str)
@pytest.mark.parametrize(
    ("seq_lens", "query_lens"), [MIXED, ([33000, 5, 0], [1, 1, 1]), ([9001], [40])]
)
def test_log_sum_exp(seq_lens, query_lens, options):
    """Beside the same output; of a query that sees no key, or of no request, -inf or its sink."""
    if "sinks" in options:
        options = {**options, "sinks": torch.linspace(-2, 2, 8, device="cuda")}
    case = make_case(seq_lens, query_lens, extra_tokens=3)
    for each in (case, planned(case)[1]):
        arguments = (each.query, each.k_cache, each.v_cache, each.metadata)
        out, lse = attend(*arguments, **options, return_lse=True)
        assert torch.equal(out, attend(*arguments, **options))
        torch.testing.assert_close(lse.double(), exact(case, **options)[2], rtol=1e-5, atol=1e-4)


@both
def test_tokens_of_no_request_get_zeros():
    for lens, queries in (
        MIXED, ([70, 9], [1, 1]), ([300, 300], [200, 200]), ([40, 9], [0, 0]), ([], [])
    ):  # fmt: skip
        case = make_case(lens, queries, extra_tokens=5)
        out = attend(case.query, case.k_cache, case.v_cache, case.metadata)
        check(case, out)
        assert not out[-5:].any()


@both
def test_shared_and_repeated_blocks():
    case = make_case([320, 320, 320, 100], [1, 40, 1, 1])
    table = case.metadata.block_table
    table[1, :20] = table[0, :20].flip(0)
    table[2, :20] = table[0, 3]
    table[3, 0] = table[0, 1]
    check(case)


@both
def test_queries_before_the_first_key():
    """More new tokens than the sequence has, as where a batch is padded: the first see nothing."""
    for lens, queries in (
        ([5, 40, 3, 17, 600], [9, 100, 200, 17, 601]), ([5, 0, 3, 70], [9, 2, 16, 1])
    ):  # fmt: skip
        case = make_case(lens, queries)
        check(case)
        check(case, sliding_window=7, sinks=torch.zeros(8, device="cuda"))
        out = attend(case.query, case.k_cache, case.v_cache, case.metadata)
        assert not out[: queries[0] - lens[0]].any()


@both
@pytest.mark.parametrize("heads", [71, 128])
def test_multi_query_of_any_ratio(heads):
    check(make_case(*MIXED, heads=heads, kv_heads=1))
    check(make_case([300, 5000], [4, 1], heads=heads, kv_heads=1, head_dim=64))


@both
@pytest.mark.parametrize("scale", [-0.2, 0.0, 1e-30, 5.0])
def test_any_scale(scale):
    case = make_case(*MIXED)
    check(case, scale=scale)
    check(case, scale=scale, soft_cap=3.0)


@both
@pytest.mark.parametrize("block_size", [1, 16, 48, 128])
@pytest.mark.parametrize("window", [1, 16, 100])
def test_blocks_before_the_window_are_never_read(window, block_size):
    """They may have been given away: their ids are -1, what they held is poison."""
    lens, queries = [9000, 200, 700, 1100, 64], [1, 1, 3, 500, 64]
    case = make_case(lens, queries, block_size=block_size)
    for row, (n, new) in enumerate(zip(lens, queries, strict=True)):
        gone = max(n - new + 1 - window, 0) // block_size
        blocks = case.metadata.block_table[row, :gone].long()
        case.k_cache[blocks], case.v_cache[blocks] = math.nan, math.inf
        case.metadata.block_table[row, :gone] = -1 if row % 2 else HUGE
    out = attend(
        case.query, case.k_cache, case.v_cache, case.metadata, sliding_window=window
    )  # fmt: skip
    case.metadata.block_table.clamp_(0, case.k_cache.shape[0] - 1)  # for the float64 result
    case.k_cache.nan_to_num_(0), case.v_cache.nan_to_num_(0, 0, 0)
    check(case, out, sliding_window=window)


@both
def test_queries_and_caches_of_any_strides():
    """Rows of an odd width, heads outermost, one query for all tokens; caches by head."""
    tokens = sum(MIXED[1])
    case = make_case(*MIXED)
    wide = torch.empty(tokens, 8 * 128 + 8, device="cuda", dtype=case.query.dtype)
    odd = torch.empty(tokens * 8 * 128 + 1, device="cuda", dtype=case.query.dtype)
    by_head = torch.empty(8, tokens, 128, device="cuda", dtype=case.query.dtype)
    for query in (
        wide[:, : 8 * 128].view(tokens, 8, 128), odd[1:].view(tokens, 8, 128),
        by_head.transpose(0, 1),
    ):  # fmt: skip
        query.copy_(case.query)
        check(dataclasses.replace(case, query=query))
    same = dataclasses.replace(case, query=case.query[:1].expand(tokens, 8, 128))
    check(same)
    caches = [
        c.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3) for c in (case.k_cache, case.v_cache)
    ]
    check(Case(case.query, *caches, case.metadata))
    rows = case.metadata.block_table.repeat_interleave(2, 1)[:, ::2]
    check(dataclasses.replace(case, metadata=dataclasses.replace(case.metadata, block_table=rows)))


@both
def test_queries_beyond_32_bits():
    """2^20 new tokens of 16 heads: more than 2^31 elements of queries and of output."""
    requests, length, heads = 1025, 1024, 16
    shape = (requests * length, heads, 128)
    generator = torch.Generator("cuda").manual_seed(0)
    query = torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_(generator=generator)
    caches = torch.empty(2, requests * 64, 16, 1, 128, dtype=torch.bfloat16, device="cuda")
    caches.normal_(generator=generator)
    table = torch.randperm(requests * 64).view(requests, 64)
    lens = [length] * requests
    metadata = AttentionMetadata.build(table, lens, lens, 16, device="cuda")
    out = attend(query, *caches, metadata)
    for few in (slice(0, 1), slice(1022, 1025)):
        some = lens[few]
        part = AttentionMetadata.build(table[few], some, some, 16, device="cuda")
        rows = slice(few.start * length, few.stop * length)
        check(Case(query[rows], *caches, part), out[rows])


def test_strided_query_and_caches():
    case = make_case(*MIXED)
    wide = torch.randn(case.query.shape[0], 12, 128, device="cuda").to(torch.bfloat16)
    wide[:, :8] = case.query
    caches = torch.stack((case.k_cache, case.v_cache), dim=1)
    check(Case(wide[:, :8], caches[:, 0], caches[:, 1], case.metadata))


@both
def test_same_bits_every_time():
    case = make_case([32768, 9000, 1, 700, 64] + [300] * 30, [1] * 35, heads=32, kv_heads=8)
    _, case = planned(case)
    first = attend(case.query, case.k_cache, case.v_cache, case.metadata)
    for _ in range(50):
        again = attend(case.query, case.k_cache, case.v_cache, case.metadata)
        assert torch.equal(first, again)
    check(case, first)


@both
@pytest.mark.parametrize("programs", [1, 7, 100, 264, 1000])
def test_plans(programs):
    plan, case = planned(make_case(EDGES, [1] * len(EDGES)), num_programs=programs)
    check(case)
    check(case)
    assert not plan.workspace.arrivals.any()
    assert plan.nbytes == sum(t.numel() * t.element_size() for t in plan.workspace)


@pytest.mark.parametrize("longest", [1, 4])
def test_plans_of_mixed_batches(longest):
    """Decode, prefill and tokens of no request; once with as many tokens as if all were long."""
    for seq_lens, query_lens, extra in ((*MIXED, 3), ([300, 9], [20, 1], 19), ([300], [200], 0)):
        case = make_case(seq_lens, query_lens, extra_tokens=extra)
        check(case)
        plan, case = planned(case, max_query_len=longest)
        for _ in range(3):
            check(case)
        assert not plan.workspace.draws.any()


@both
@pytest.mark.sanitize
def test_sample_of_all_kernels():
    """Every kernel once, on little work."""
    case = make_case([70, 300, 1, 0, 2100], [1, 200, 1, 1, 17])
    for each in (case, planned(case)[1], planned(case, max_query_len=2, batch_invariant=True)[1]):
        check(each)
        check(each, sliding_window=100, soft_cap=20.0, sinks=torch.zeros(8, device="cuda"))
    cache = torch.stack((case.k_cache, case.v_cache))[None]
    tokens = torch.randn(9, 12, 128, device="cuda").bfloat16()
    query, key, value = tokens.split((8, 2, 2), dim=1)
    slots = torch.arange(16, 25, device="cuda")
    write_kv(key, value, *cache[0], slots)
    positions, norm = slots - 16, torch.ones(128, device="cuda")
    out = rotate_and_write(
        query, key, value, *cache[0], slots, positions=positions,
        cos_sin=torch.randn(9, 64, device="cuda"), q_norm=norm, k_norm=norm,
    )  # fmt: skip
    assert out.isfinite().all()
    moved = torch.arange(3, device="cuda")
    copy_blocks(cache, moved, moved + 1)
    host = torch.zeros(cache.shape, dtype=cache.dtype, pin_memory=True)
    swap_blocks(cache, host, moved.cpu(), moved.cpu() + 2)
    torch.cuda.synchronize()
    words = cache.view(torch.int16).cpu()
    assert torch.equal(host.view(torch.int16)[:, :, 2:5], words[:, :, :3])


@both
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    ("seq_lens", "query_lens"),
    [
        ([8192], [40]),
        ([9001], [5]),
        ([33000, 300, 5000], [33, 70, 17]),
        ([33000, 4000, 1, 64], [100, 1, 1, 64]),
        ([4000] * 7, [9, 20, 31, 32, 33, 64, 65]),
    ],
)
def test_few_new_tokens_over_much_kv(seq_lens, query_lens, head_dim):
    """What the Hopper prefill kernel shares out; the same bits every time."""
    for group in (4, 3):
        case = make_case(seq_lens, query_lens, heads=2 * group, head_dim=head_dim)
        plan, case = planned(case)
        first = attend(case.query, case.k_cache, case.v_cache, case.metadata)
        check(case, first)
        for _ in range(10):
            again = attend(case.query, case.k_cache, case.v_cache, case.metadata)
            assert torch.equal(first, again)
        sinks = torch.linspace(-2, 2, 2 * group, device="cuda")
        check(case, soft_cap=20.0, sinks=sinks)
        assert not plan.workspace.draws.any()


def test_plan_of_another_window_is_not_used():
    for window in (100, 2**80):
        _, case = planned(make_case([500, 900], [1, 1]), sliding_window=window)
        check(case)
        check(case, sliding_window=window)
        assert case.metadata.plans[0].fits(case.query, case.k_cache, window)


@both
def test_plan_updated_while_in_flight():
    first = make_case([5000, 3000, 64], [1, 1, 1])
    plan, first = planned(first)
    second = make_case([1, 9000, 77], [1, 1, 1], seed=1)
    outs = [attend(first.query, first.k_cache, first.v_cache, first.metadata)]
    second.metadata = plan.update(second.metadata)
    outs.append(attend(second.query, second.k_cache, second.v_cache, second.metadata))
    check(first, outs[0])
    check(second, outs[1])


def test_plan_is_too_small():
    plan, _ = planned(make_case([5], [1]))
    with pytest.raises(KernelArgumentError, match="expected at most 1"):
        plan.update(make_case([5, 5], [1, 1]).metadata)


def transplant(case, request, length, query_rows, donor):
    """Make a request of `case` hold the sequence and the queries of the only request of donor."""
    count = -(-length // 16)
    to = case.metadata.block_table[request, :count].long()
    source = donor.metadata.block_table[0, :count].long()
    case.k_cache[to], case.v_cache[to] = donor.k_cache[source], donor.v_cache[source]
    case.query[query_rows] = donor.query


@both
@pytest.mark.parametrize("new", [1, 2, 40])
def test_batch_invariant(new):
    """The same bits alone and beside others, decoding or not, shorter and longer."""
    alone = make_case([3000], [new], heads=32, kv_heads=8)
    others = [([700, 3000, 9000, 1], [1, new, 1, 1]), ([5000, 3000, 64], [300, new, 64])]
    outs = []
    for lens, queries in others:
        crowd = make_case(lens, queries, heads=32, kv_heads=8)
        rows = slice(queries[0], queries[0] + new)
        transplant(crowd, 1, 3000, rows, alone)
        _, crowd = planned(crowd, batch_invariant=True, max_query_len=2)
        out = attend(crowd.query, crowd.k_cache, crowd.v_cache, crowd.metadata)
        check(crowd, out)
        outs.append(out[rows])
    _, alone = planned(alone, batch_invariant=True, max_query_len=2)
    one = attend(alone.query, alone.k_cache, alone.v_cache, alone.metadata)
    assert all(torch.equal(one, many) for many in outs)


@both
def test_batch_invariant_in_chunks():
    """A prompt gives the same bits whole and in chunks."""
    whole = make_case([1000], [1000], heads=32, kv_heads=8)
    _, planned_whole = planned(whole, batch_invariant=True)
    expected = attend(whole.query, whole.k_cache, whole.v_cache, planned_whole.metadata)
    done = 0
    for chunk in (16, 100, 384, 500):
        table = whole.metadata.block_table.cpu()
        metadata = AttentionMetadata.build(table, [done + chunk], [chunk], 16, device="cuda")
        query = whole.query[done : done + chunk]
        _, part = planned(dataclasses.replace(whole, query=query, metadata=metadata),
                          batch_invariant=True)  # fmt: skip
        out = attend(query, whole.k_cache, whole.v_cache, part.metadata)
        assert torch.equal(out, expected[done : done + chunk])
        done += chunk


@both
@pytest.mark.parametrize("with_plan", [True, False])
def test_graph_captured_at_the_maximum(with_plan):
    """Captured with eight requests, replayed with fewer (seq_len 0 pads) and with none."""
    case = make_case([3000] * 8, [1] * 8)
    plan, _ = planned(case)

    def step():
        metadata = plan.update(case.metadata) if with_plan else case.metadata
        return attend(case.query, case.k_cache, case.v_cache, metadata)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for lens in ([3000] * 8, [1, 64, 65, 2999, 0, 0, 0, 0], [0] * 8, [17, 0, 3000] + [0] * 5):
        case.metadata.seq_lens.copy_(torch.tensor(lens, dtype=torch.int32))
        out.fill_(math.nan)
        graph.replay()
        check(case, out)
    starts = torch.tensor([0, 1, 2, 3, 3, 3, 3, 3, 3], dtype=torch.int32)
    case.metadata.query_start.copy_(starts)
    case.metadata.seq_lens.copy_(torch.tensor([5, 9, 700] + [0] * 5, dtype=torch.int32))
    out.fill_(math.nan)
    graph.replay()
    check(case, out)
    assert not out[3:].any()


@both
def test_graph_of_mixed_steps():
    """Captured at 64 tokens of 8 requests; replayed with other mixes, fewer tokens, and none."""
    case = make_case([3000] * 8, [8] * 8)
    plan, _ = planned(case, max_query_len=2)
    metadata = dataclasses.replace(case.metadata, max_query_len=64)

    def step():
        return attend(case.query, case.k_cache, case.v_cache, plan.update(metadata))

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for lens, queries in (
        ([3000] * 8, [8] * 8), ([700, 40, 3000, 9], [1, 40, 2, 9]), ([64], [64]), ([], []),
        ([2999, 17], [40, 1]),
    ):  # fmt: skip
        padding = [0] * (8 - len(lens))
        starts = torch.tensor([0, *queries, *padding]).cumsum(0)
        metadata.query_start.copy_(starts)
        metadata.seq_lens.copy_(torch.tensor([*lens, *padding]))
        out.fill_(math.nan)
        graph.replay()
        check(case, out)
        assert not out[sum(queries) :].any()


@both
def test_caches_beyond_32_bits():
    """High blocks hold the data; blocks whose addresses are equal modulo 2^32 hold NaN."""
    shape = (1, 2, 262144 + 64, 16, 8, 128)  # K and V have more than 2^32 elements each
    kv_cache = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
    for low in (0, 131072):
        kv_cache[:, :, low : low + 64] = math.nan
    k_cache, v_cache = kv_cache[0]
    high = torch.arange(262144, 262144 + 60, device="cuda")
    lens, queries = [300, 40, 128], [1, 30, 128]
    table = torch.full((3, 20), -1, dtype=torch.int32)
    table[0, :19], table[1, :3], table[2, :8] = high[:19], high[20:23], high[30:38]
    metadata = AttentionMetadata.build(table, lens, queries, 16, device="cuda")
    past = torch.tensor(
        [
            int(table[row, i // 16]) * 16 + i % 16
            for row, (n, q) in enumerate(zip(lens, queries, strict=True))
            for i in range(n - q)
        ]
    )
    for slots in (past.cuda(), metadata.slot_mapping):
        key, value = torch.randn(2, len(slots), 8, 128, device="cuda").to(torch.bfloat16)
        write_kv(key, value, k_cache, v_cache, slots)
    case = Case(torch.randn(159, 32, 128, device="cuda").bfloat16(), k_cache, v_cache, metadata)
    check(case)
    copy_blocks(kv_cache, high[:38], high[:38].roll(1))
    case.metadata.block_table[:] = table.cuda()
    for row, count in enumerate((19, 3, 8)):
        moved = case.metadata.block_table[row, :count]
        where = {int(a): int(b) for a, b in zip(high[:38], high[:38].roll(1), strict=True)}
        moved.copy_(torch.tensor([where[int(b)] for b in moved], dtype=torch.int32))
    check(case)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 112, 128, 192, 256])
@pytest.mark.parametrize("tokens", [1, 7, 300, 5000])
def test_write(head_dim, tokens):
    qkv = torch.randn(tokens, 12, head_dim, device="cuda").bfloat16()
    qkv[0, 4] = math.nan
    key, value = qkv[:, 4:8], qkv[:, 8:]
    slots = torch.randperm(16 * 400, device="cuda")[:tokens]
    slots[::3] = -1
    caches = torch.full((4, 400, 16, 4, head_dim), math.nan, device="cuda").bfloat16()
    write_kv(key, value, caches[0], caches[1], slots)
    kept = slots >= 0
    caches[2].view(-1, 4, head_dim)[slots[kept]] = key[kept]
    caches[3].view(-1, 4, head_dim)[slots[kept]] = value[kept]
    bits = caches.view(torch.int16)
    assert torch.equal(bits[:2], bits[2:])


def test_write_by_head_beyond_32_bits():
    """Caches with heads outermost, so far apart that three of them pass 2^31 elements."""
    blocks, heads = 2 * 352256, 4
    memory = torch.empty(heads, blocks, 16, 64, dtype=torch.bfloat16, device="cuda")
    caches = memory.permute(1, 2, 0, 3)
    k_cache, v_cache = caches[: blocks // 2], caches[blocks // 2 :]
    assert 2**31 / 3 < k_cache.stride(2) < 2**31
    query, key, value = torch.randn(3, 9, heads, 64, device="cuda").bfloat16()
    first, last = torch.arange(5), 16 * blocks // 2 - 1 - torch.arange(4)
    slots = torch.cat((first, last)).cuda()
    for write in (write_kv, lambda *step: rotate_and_write(query, *step)):
        for cache in (k_cache, v_cache):
            cache[0], cache[-1] = 0, 0
        write(key, value, k_cache, v_cache, slots)
        for cache, new in ((k_cache, key), (v_cache, value)):
            assert torch.equal(cache[slots // 16, slots % 16], new)


def rotated(x, positions, cos_sin, weight, eps):
    """RMS norm, then NeoX half-split rotation, in float64."""
    x = x.double()
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.double()
    half = cos_sin.shape[1] // 2
    cos, sin = cos_sin[positions].double().unsqueeze(1).split(half, dim=-1)
    low, high, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((low * cos - high * sin, high * cos + low * sin, rest), dim=-1)


WRITES = [
    *((8, 4, d, 64) for d in (64, 80, 128)),
    *((8, 4, d, d) for d in (80, 96, 112, 128, 192, 256)),
    *((heads, kv_heads, 128, 128) for heads, kv_heads in ((7, 1), (6, 2), (71, 1), (16, 16))),
]


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "rotary_dim"), WRITES)
@pytest.mark.parametrize("tokens", [1, 300, 3000])
def test_fused_rotary_norm_and_write(heads, kv_heads, head_dim, rotary_dim, tokens):
    qkv = torch.randn(tokens, heads + 2 * kv_heads, head_dim, device="cuda").bfloat16()
    query, key, value = qkv.split((heads, kv_heads, kv_heads), dim=1)
    slots = torch.randperm(16 * 400, device="cuda")[:tokens]
    slots[1::3] = -1
    positions = torch.randint(4096, (tokens,), device="cuda")
    cos_sin = torch.randn(4096, rotary_dim, device="cuda")
    weights = torch.rand(2, head_dim, device="cuda").bfloat16()
    caches = torch.full((2, 400, 16, kv_heads, head_dim), math.nan, device="cuda").bfloat16()
    out = rotate_and_write(
        query, key, value, *caches, slots, positions=positions, cos_sin=cos_sin,
        q_norm=weights[0], k_norm=weights[1],
    )  # fmt: skip
    expected = rotated(query, positions, cos_sin, weights[0], 1e-6)
    torch.testing.assert_close(out.double(), expected, rtol=2**-8, atol=5e-5)
    kept = slots >= 0
    got = caches.flatten(1, 2)[:, slots[kept]]
    expected = rotated(key, positions, cos_sin, weights[1], 1e-6)
    torch.testing.assert_close(got[0].double(), expected[kept], rtol=2**-8, atol=5e-5)
    assert torch.equal(got[1], value[kept])
    assert int(caches[0].isnan().sum()) == caches[0].numel() - got[0].numel()


@pytest.mark.parametrize("pairs", [1, 2, 5, 64, 300, 512, 513, 700])
def test_copy_is_a_snapshot(pairs):
    """Rotations of all blocks, as one chain that closes: the hardest order there is."""
    cache = torch.randn(3, 2, 800, 16, 2, 80, device="cuda").bfloat16()
    for seed in range(10):
        generator = torch.Generator("cuda").manual_seed(seed)
        src = torch.randperm(800, generator=generator, device="cuda")[:pairs]
        for dst in (src.roll(1), src.flip(0)):
            expected = cache.clone()
            reference.copy_blocks(expected, src, dst)
            copy_blocks(cache, src, dst)
            assert torch.equal(cache, expected)


def test_copy_fan_out_and_self():
    cache = torch.randn(2, 2, 40, 16, 8, 128, device="cuda").bfloat16()
    src = torch.tensor([3, 3, 3, 3, 9, 7], device="cuda")
    dst = torch.tensor([3, 10, 11, 12, 9, 13], device="cuda")
    expected = cache.clone()
    reference.copy_blocks(expected, src, dst)
    copy_blocks(cache, src, dst)
    assert torch.equal(cache, expected)
    copy_blocks(cache, src[:0], dst[:0])
    assert torch.equal(cache, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_copy_and_swap_of_odd_blocks(dtype):
    """Blocks of half a word more, of half a word apart, that begin in one, or with a gap inside."""
    sizes = ((1, 1, 5, 0), (3, 1, 8, 1), (3, 2, 8, 0))
    for block_size, heads, head_dim, offset in sizes:
        shape = (2, 2, 9, block_size, heads, head_dim)
        flat = torch.randn(math.prod(shape) + 1, device="cuda").to(dtype)
        cache = flat[offset : offset + math.prod(shape)].view(shape)
        gap = torch.randn(*shape[:3], block_size + 1, heads, head_dim, device="cuda").to(dtype)
        for each in (cache, gap[:, :, :, :block_size]):
            expected = each.clone()
            src, dst = torch.tensor([1, 2, 8]), torch.tensor([2, 1, 0])
            reference.copy_blocks(expected, src.cuda(), dst.cuda())
            copy_blocks(each, src.cuda(), dst.cuda())
            assert torch.equal(each, expected)
            host = torch.zeros(shape, dtype=dtype, pin_memory=True)
            swap_blocks(each, host, src, dst)
            torch.cuda.synchronize()
            assert torch.equal(host[:, :, dst], expected.cpu()[:, :, src])
            swap_blocks(host, each, dst, src)
            assert torch.equal(each, expected)
            nothing = each[:0]
            copy_blocks(nothing, src.cuda(), dst.cuda())
            swap_blocks(nothing, host[:0], src, dst)


def test_copy_in_a_graph():
    """Captured with some pairs, replayed with others."""
    cache = torch.randn(2, 2, 40, 16, 2, 64, device="cuda").bfloat16()
    src, dst = torch.arange(5, device="cuda"), torch.arange(5, device="cuda") + 1
    copy_blocks(cache, src, dst)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        copy_blocks(cache, src, dst)
    for seed in range(3):
        order = torch.randperm(40, generator=torch.Generator().manual_seed(seed)).cuda()
        src.copy_(order[:5])
        dst.copy_(order[2:7])
        expected = cache.clone()
        reference.copy_blocks(expected, src, dst)
        graph.replay()
        assert torch.equal(cache, expected)


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("pinned", [True, False])
def test_swap_round_trip_from_another_stream(pinned, gradients):
    """Out, the block reused at once, and back: bit-exact, in order of the stream."""
    torch.set_grad_enabled(gradients)  # until the end of the test: see _inference
    cache = torch.randn(4, 2, 200, 16, 8, 64, device="cuda").bfloat16()
    host = torch.zeros(4, 2, 90, 16, 8, 64, dtype=torch.bfloat16, pin_memory=pinned)
    before = cache.clone()
    gpu, cpu = torch.randperm(200)[:70], torch.randperm(90)[:70]
    fresh = torch.randperm(200)[:70]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        swap_blocks(cache, host, gpu, cpu)
        cache[:, :, gpu.cuda()] = math.nan
        swap_blocks(host, cache, cpu, fresh)
        done = torch.cuda.Event()
        done.record()
    torch.cuda.current_stream().wait_event(done)
    assert torch.equal(cache[:, :, fresh.cuda()], before[:, :, gpu.cuda()])
    done.synchronize()
    assert torch.equal(host[:, :, cpu], before.cpu()[:, :, gpu])


def test_refusals():
    for options in ({"head_dim": 72}, {"block_size": 257}):
        case = make_case([5], [1], **options)
        with pytest.raises(KernelArgumentError, match="on a GPU"):
            attend(case.query, case.k_cache, case.v_cache, case.metadata)
    case = make_case([5], [1])
    caches = case.k_cache.float(), case.v_cache.float()
    with pytest.raises(KernelArgumentError, match="float16 or bfloat16"):
        attend(case.query.float(), *caches, case.metadata)
    cache = torch.zeros(1, 2, 4, 16, 2, 64, device="cuda").half()
    with pytest.raises(KernelArgumentError, match="src_blocks"):
        swap_blocks(cache, cache.cpu(), torch.tensor([4]), torch.tensor([0]))


def test_wrong_devices_dtypes_and_shapes():
    """Each is told before any work: caches and output are as they were, and the next call runs."""
    case = make_case([5, 40], [1, 2])
    step = (case.query, case.k_cache, case.v_cache)
    m = case.metadata
    before = case.k_cache.clone(), case.v_cache.clone()
    bad_metadata = [
        ("block_table", {"block_table": m.block_table.cpu()}),
        ("block_table", {"block_table": m.block_table.long()}),
        ("block_table", {"block_table": m.block_table[:1]}),
        ("seq_lens", {"seq_lens": m.seq_lens.cpu()}),
        ("seq_lens", {"seq_lens": m.seq_lens.long()}),
        ("query_start", {"query_start": m.query_start[:2]}),
        ("query", {"slot_mapping": m.slot_mapping[:2]}),
    ]
    for name, change in bad_metadata:
        with pytest.raises(KernelArgumentError, match=name):
            attend(*step, dataclasses.replace(m, **change))
    for name, bad in (
        ("k_cache", (step[0], step[1].cpu(), step[2])),
        ("v_cache", (step[0], step[1], step[2].half())),
        ("k_cache", (step[0].cpu(), *step[1:])),
        ("k_cache", (step[0].half(), *step[1:])),
        ("query", (step[0][:, :3], *step[1:])),
        ("query", (step[0][..., :64], *step[1:])),
        ("v_cache", (*step[:2], step[2][:-1])),
    ):  # fmt: skip
        with pytest.raises(KernelArgumentError, match=name):
            attend(*bad, m)
    for name, options in (
        ("sliding_window", {"sliding_window": 0}), ("soft_cap", {"soft_cap": -1.0}),
        ("scale", {"scale": math.nan}), ("sinks", {"sinks": torch.zeros(8)}),
        ("sinks", {"sinks": torch.zeros(7, device="cuda")}),
    ):  # fmt: skip
        with pytest.raises(KernelArgumentError, match=name):
            attend(*step, m, **options)
    new = torch.zeros(3, 2, 128, device="cuda").bfloat16()
    for name, bad in (
        ("key", (new.half(), new.half(), *step[1:], m.slot_mapping)),
        ("value", (new, new[:, :1], *step[1:], m.slot_mapping)),
        ("slot_mapping", (new, new, *step[1:], m.slot_mapping.int())),
        ("slot_mapping", (new, new, *step[1:], m.slot_mapping.cpu())),
    ):  # fmt: skip
        with pytest.raises(KernelArgumentError, match=name):
            write_kv(*bad)
    cache, ids = torch.zeros(1, 2, 4, 16, 2, 64, device="cuda").half(), torch.tensor([1])
    with pytest.raises(KernelArgumentError, match="src"):
        copy_blocks(cache, ids, ids.cuda())
    with pytest.raises(KernelArgumentError, match="src_blocks"):
        swap_blocks(cache, cache.cpu(), ids.cuda(), ids)
    with pytest.raises(KernelArgumentError, match="dst_cache"):
        swap_blocks(cache, cache.cpu().bfloat16(), ids, ids)
    for cache, old in zip(step[1:], before, strict=True):
        assert torch.equal(cache.view(torch.int16), old.view(torch.int16))
    check(case)
