"""Paged attention on the CPU against the float64 reference, in caches full of NaN elsewhere."""

import random

import pytest
import torch

from billfish.errors import KernelArgumentError
from billfish.kernels import paged_attention as pa
from billfish.kernels.paged_attention import cpu, reference

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2.5e-3}
NAN = float("nan")


class Case:
    """Sequences written to shuffled blocks of one layer of a cache; everything else is NaN."""

    def __init__(
        self, seq_lens, query_lens, *, dtype=torch.float32, block_size=16, heads=6, kv_heads=2,
        head_dim=16, table_tail=(), seed=0, strided=False,
    ):  # fmt: skip
        rng = torch.Generator().manual_seed(seed)
        counts = [-(-length // block_size) for length in seq_lens]
        ids = list(range(sum(counts) + 3))
        random.Random(seed).shuffle(ids)
        tables = [[ids.pop() for _ in range(count)] for count in counts]
        self.tables = [[*row, *table_tail] for row in tables]
        shape = (2, 2, sum(counts) + 3, block_size, kv_heads, head_dim)
        if strided:  # block and slot strides cannot be merged
            base = torch.full((*shape[:3], block_size + 1, *shape[4:]), NAN, dtype=dtype)
            self.kv_cache = base[:, :, :, :block_size]
        else:
            self.kv_cache = torch.full(shape, NAN, dtype=dtype)
        self.k_cache, self.v_cache = self.kv_cache[1]
        every = pa.AttentionMetadata.build(tables, seq_lens, seq_lens, block_size)
        key = torch.randn(sum(seq_lens), kv_heads, head_dim, generator=rng).to(dtype)
        value = torch.randn(sum(seq_lens), kv_heads, head_dim, generator=rng).to(dtype)
        pa.write_kv(key, value, self.k_cache, self.v_cache, every.slot_mapping)
        self.query = torch.randn(sum(query_lens), heads, head_dim, generator=rng).to(dtype)
        self.metadata = pa.AttentionMetadata.build(self.tables, seq_lens, query_lens, block_size)

    def attend(self, **options):
        return pa.attend(self.query, self.k_cache, self.v_cache, self.metadata, **options)

    def exact(self, **options):
        caches = (self.k_cache.double(), self.v_cache.double())
        return reference.attend(self.query.double(), *caches, self.metadata, **options)

    def check(self, **options):
        before = (self.query.clone(), self.kv_cache.clone())
        out = self.attend(**options)
        assert out.is_contiguous()
        assert out.dtype == self.query.dtype
        expected, expected_lse = self.exact(**options)
        error = (out.double() - expected).abs().max().item()
        assert error <= TOLERANCE[out.dtype]  # NaN fails too
        same, lse = self.attend(**options, return_lse=True)
        assert torch.equal(same, out)
        torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-5)
        assert torch.equal(self.query, before[0])
        assert torch.equal(self.kv_cache.nan_to_num(7), before[1].nan_to_num(7))
        return out


SINKS = torch.tensor([0.5, -2.0, 3.0, 0.0, 1.0, float("-inf")])
OPTIONS = (
    {},
    {"scale": 0.4},
    {"sliding_window": 1},
    {"sliding_window": 37},
    {"soft_cap": 0.7},
    {"sinks": SINKS},
    {"sliding_window": 20, "soft_cap": 2.0, "sinks": SINKS, "scale": 1.5},
)
BATCHES = {
    "decode": ([1, 15, 16, 17, 64, 65, 200], [1] * 7),
    "one": ([77], [1]),
    "long": ([513, 3], [1, 1]),
    "prefill": ([1, 16, 40, 70], [1, 16, 40, 70]),
    "chunks": ([40, 70, 33], [8, 64, 2]),
    "mixed": ([50, 3, 0, 33, 90, 17], [1, 3, 1, 20, 1, 0]),
}


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_attend(dtype, batch, options):
    Case(*BATCHES[batch], dtype=dtype).check(**options)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_long_sequences_and_many_tiles(options, monkeypatch):
    monkeypatch.setattr(cpu, "LONG", 60)
    monkeypatch.setattr(cpu, "_QUERY_TILE", 16)
    Case([100, 59, 61, 90, 75], [1, 1, 1, 50, 75]).check(**options)


def test_scores_are_bounded(monkeypatch):
    monkeypatch.setattr(cpu, "_SCORES", 1)
    Case([20], [9]).check()


@pytest.mark.parametrize("block_size", [1, 7, 32])
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (8, 1), (9, 3)])
def test_block_sizes_and_head_groups(block_size, heads, kv_heads):
    Case([1, 33, 50, 20], [1, 1, 20, 20], block_size=block_size, heads=heads,
         kv_heads=kv_heads, head_dim=24).check()  # fmt: skip


def test_default_settings_at_a_real_length():
    Case([600, 513, 512, 300], [1, 1, 1, 290]).check()


@pytest.mark.parametrize("tail", [(-1,), (-1, -(2**31)), (2**31 - 1, 10**6)])
def test_tail_of_the_block_table_is_never_read(tail):
    plain = Case(*BATCHES["mixed"])
    assert torch.equal(Case(*BATCHES["mixed"], table_tail=tail * 4).check(), plain.attend())


def test_blocks_before_the_window_are_never_read():
    case = Case([50, 60], [1, 5])
    case.metadata.block_table[:, :2] = -1
    assert not case.check(sliding_window=10).isnan().any()


@pytest.mark.parametrize("batch", BATCHES)
def test_windows_and_factors_of_any_size_and_type(batch):
    case = Case(*BATCHES[batch])
    assert torch.equal(case.attend(sliding_window=2**80), case.attend())
    options = {"scale": 1, "soft_cap": 1}
    assert torch.equal(case.attend(**options), case.attend(scale=1.0, soft_cap=1.0))


def test_strided_caches():
    options = {"strided": True, "block_size": 4}
    strided = Case(*BATCHES["mixed"], **options).check()
    assert torch.equal(strided, Case(*BATCHES["mixed"], block_size=4).attend())


def test_query_may_be_a_view_of_a_merged_tensor():
    for batch in BATCHES.values():
        case = Case(*batch)
        plain = case.attend()
        tokens = case.query.shape[0]
        merged = torch.full((tokens, 10 * 16), NAN)
        merged[:, :96] = case.query.view(tokens, 96)
        case.query = merged[:, :96].view(tokens, 6, 16)
        assert torch.equal(case.attend(), plain)


def test_a_request_computes_the_same_alone_and_in_a_batch():
    """Bit for bit in float32: shapes follow from the request alone."""
    seq_lens = [5, 40, 33, 90, 17, 600, 45, 48]
    query_lens = [1, 1, 20, 1, 17, 1, 1, 1]
    for options in ({}, {"sliding_window": 30}):
        case = Case(seq_lens, query_lens)
        together = case.attend(**options).split(query_lens)
        queries = case.query.split(query_lens)
        for i, (seq_len, query_len) in enumerate(zip(seq_lens, query_lens, strict=True)):
            case.query = queries[i]
            case.metadata = pa.AttentionMetadata.build([case.tables[i]], [seq_len], [query_len], 16)
            assert torch.equal(case.attend(**options), together[i])


def test_chunked_prefill_gives_what_a_whole_prefill_gives():
    case = Case([70], [70])
    whole = case.attend()
    query = case.query
    for start, stop in ((0, 32), (32, 33), (33, 70)):
        case.query = query[start:stop]
        case.metadata = pa.AttentionMetadata.build(case.tables, [stop], [stop - start], 16)
        torch.testing.assert_close(case.attend(), whole[start:stop], atol=1e-6, rtol=0)


def test_shared_and_repeated_blocks():
    case = Case([64, 64, 48], [1, 10, 1])
    first = case.tables[0]
    tables = [first, [*first[:2], *case.tables[1][2:]], [first[1]] * 3]
    case.metadata = pa.AttentionMetadata.build(tables, [64, 64, 48], [1, 10, 1], 16)
    case.check()


def test_queries_that_see_nothing_give_zero():
    case = Case([0, 2, 20], [1, 4, 1])
    out = case.check()
    assert bool((out[:3] == 0).all())
    assert bool((out[3:] != 0).any(dim=-1).all())
    assert bool((Case([0, 0], [1, 3]).check(sinks=SINKS) == 0).all())


def test_no_requests_and_tokens_past_the_last_request():
    case = Case([20], [2])
    assert pa.AttentionMetadata.build([], [], [], 16).max_seq_len == 0
    empty = pa.AttentionMetadata.build([], [], [], 16)
    assert pa.attend(case.query[:0], case.k_cache, case.v_cache, empty).shape == (0, 6, 16)


def test_large_scores_stay_finite_under_a_soft_cap():
    case = Case([30, 30], [1, 30])
    case.query *= 1e25
    case.k_cache *= 1e25
    assert bool(case.attend(soft_cap=30.0).isfinite().all())


def test_metadata():
    table = [[4, 2], [7], [], [1, 3, 5]]
    built = pa.AttentionMetadata.build(table, [6, 2, 0, 9], [3, 2, 1, 1], 4)
    assert built.block_table.tolist() == [[4, 2, -1], [7, -1, -1], [-1, -1, -1], [1, 3, 5]]
    assert built.seq_lens.tolist() == [6, 2, 0, 9]
    assert built.query_start.tolist() == [0, 3, 5, 6, 7]
    assert built.slot_mapping.tolist() == [19, 8, 9, 28, 29, -1, 20]
    assert (built.max_query_len, built.max_seq_len) == (3, 9)
    dtypes = [t.dtype for t in (built.block_table, built.seq_lens, built.query_start)]
    assert dtypes == [torch.int32] * 3
    assert built.slot_mapping.dtype == torch.int64
    tensors = (built.block_table, built.seq_lens, torch.tensor([3, 2, 1, 1]))
    again = pa.AttentionMetadata.build(*tensors, 4)
    assert torch.equal(again.slot_mapping, built.slot_mapping)


def test_slots_past_32_bits():
    built = pa.AttentionMetadata.build([[2**30]], [5], [1], 256)
    assert built.slot_mapping.tolist() == [2**38 + 4]


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("block_size", ([[1]], [1], [1], 0)),
        ("one row a request", ([[1]], [1, 2], [1], 4)),
        ("one row a request", ([[1], [2]], [1], [1], 4)),
        ("negative length", ([[1]], [-1], [1], 4)),
        ("negative length", ([[1]], [1], [-1], 4)),
        ("seq_lens", ([[1]], [5], [1], 4)),
        ("seq_lens", ([[1]], torch.tensor([1.0]), [1], 4)),
        ("query_lens", ([[1]], [1], torch.tensor([[1]]), 4)),
        ("block_table", (torch.tensor([1]), [1], [1], 4)),
        ("block_table", (torch.tensor([[2**32 + 1]]), [1], [1], 4)),
        ("block_table", ([[2**40]], [1], [1], 4)),
        ("block_table", (torch.tensor([[1.5]]), [1], [1], 4)),
        (r"block_table\[1\]", ([[1], [-1]], [1, 1], [1, 1], 4)),
    ],
)
def test_metadata_refuses(name, arguments):
    with pytest.raises(KernelArgumentError, match=name):
        pa.AttentionMetadata.build(*arguments)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("strided", [False, True])
def test_write_kv(dtype, strided):
    base = torch.arange(5 * 5 * 2 * 8, dtype=torch.float32).view(5, 5, 2, 8).to(dtype)
    k_cache = base[:, :4] if strided else base[:, :4].clone()
    v_cache = (-base)[:, :4]
    merged = torch.randn(4, 48, generator=torch.Generator().manual_seed(0)).to(dtype)
    key, value = merged[:, 16:32].view(4, 2, 8), merged[:, 32:].view(4, 2, 8)
    for slots in ([3, 19, 0, 7], [-1, 2, -1, 11], [-1] * 4, [18, 17, 16, -1]):
        expected = (k_cache.clone(), v_cache.clone())
        reference.write_kv(key, value, *expected, torch.tensor(slots))
        pa.write_kv(key, value, k_cache, v_cache, torch.tensor(slots))
        assert torch.equal(k_cache, expected[0])
        assert torch.equal(v_cache, expected[1])
    pa.write_kv(key[:0], value[:0], k_cache, v_cache, torch.tensor([], dtype=torch.int64))
    if strided:
        assert torch.equal(base[:, 4].float(), torch.arange(400.0).view(5, 5, 2, 8)[:, 4].to(dtype))


def numbered_cache(blocks, offset=0):
    shape = (3, 2, blocks, 4, 2, 8)
    return offset + torch.arange(3 * 2 * blocks * 64, dtype=torch.float32).view(shape)


@pytest.mark.parametrize(
    ("src", "dst"),
    [([], []), ([1], [4]), ([0, 1, 2], [1, 2, 3]), ([0, 1], [1, 0]), ([5, 5], [0, 1]), ([2], [2])],
)
def test_copy_blocks_reads_all_before_it_writes(src, dst):
    cache = numbered_cache(6)
    expected = cache.clone()
    for source, target in zip(src, dst, strict=True):
        expected[:, :, target] = cache[:, :, source]
    pa.copy_blocks(cache, torch.tensor(src).long(), torch.tensor(dst).long())
    assert torch.equal(cache, expected)


def test_swap_blocks():
    source, target = numbered_cache(6), numbered_cache(3, offset=10**4)
    expected = target.clone()
    expected[:, :, 2], expected[:, :, 0] = source[:, :, 5], source[:, :, 1]
    before = source.clone()
    pa.swap_blocks(source, target, torch.tensor([5, 1]), torch.tensor([2, 0]))
    assert torch.equal(target, expected)
    assert torch.equal(source, before)


@pytest.mark.parametrize(
    ("name", "function", "arguments"),
    [
        ("kv_cache", pa.copy_blocks, (torch.zeros(2, 4, 4, 2, 8), [0], [1])),
        ("kv_cache", pa.copy_blocks, (torch.zeros(1, 3, 2, 4, 2, 8), [0], [1])),
        ("kv_cache", pa.copy_blocks, (torch.zeros(1, 2, 2, 4, 2, 8).long(), [0], [1])),
        ("src", pa.copy_blocks, (numbered_cache(2), [2], [1])),
        ("dst", pa.copy_blocks, (numbered_cache(2), [0], [-1])),
        ("dst", pa.copy_blocks, (numbered_cache(2), [0], [1, 0])),
        ("src", pa.copy_blocks, (numbered_cache(2), [0.0], [1])),
        ("dst_cache", pa.swap_blocks, (numbered_cache(2), numbered_cache(2).half(), [0], [1])),
        ("dst_cache", pa.swap_blocks, (numbered_cache(2), numbered_cache(2)[:2], [0], [1])),
        ("src_blocks", pa.swap_blocks, (numbered_cache(2), numbered_cache(3), [2], [1])),
        ("dst_blocks", pa.swap_blocks, (numbered_cache(2), numbered_cache(3), [1], [3])),
        ("dst_blocks", pa.swap_blocks, (numbered_cache(2), numbered_cache(3), [1], [])),
    ],
)
def test_block_operations_refuse(name, function, arguments):
    *caches, src, dst = arguments
    before = caches[-1].clone()
    with pytest.raises(KernelArgumentError, match=name):
        function(*caches, torch.tensor(src), torch.tensor(dst))
    assert torch.equal(caches[-1], before)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("key", {"key": torch.zeros(2, 2, 8, dtype=torch.float64)}),
        ("key", {"key": torch.zeros(2, 3, 8)}),
        ("key", {"key": torch.zeros(2, 2, 16)[..., ::2]}),
        ("value", {"value": torch.zeros(3, 2, 8)}),
        ("value", {"value": torch.zeros(2, 2, 8).half()}),
        ("k_cache", {"k_cache": torch.zeros(3, 4, 2, 8).half()}),
        ("k_cache", {"k_cache": torch.zeros(12, 2, 8)}),
        ("k_cache", {"k_cache": torch.zeros(3, 4, 2, 8, device="meta")}),
        ("v_cache", {"v_cache": torch.zeros(3, 5, 2, 8)}),
        ("k_cache and v_cache", {"v_cache": torch.zeros(3, 4, 2, 16)[..., ::2]}),
        ("slot_mapping", {"slot_mapping": torch.tensor([0, 1], dtype=torch.int32)}),
        ("slot_mapping", {"slot_mapping": torch.tensor([0])}),
        ("slot_mapping", {"slot_mapping": torch.tensor([0, 12])}),
    ],
)
def test_write_kv_refuses(name, change):
    good = {
        "key": torch.ones(2, 2, 8), "value": torch.ones(2, 2, 8),
        "k_cache": torch.zeros(3, 4, 2, 8), "v_cache": torch.zeros(3, 4, 2, 8),
        "slot_mapping": torch.tensor([0, 1]),
    }  # fmt: skip
    arguments = {**good, **change}
    with pytest.raises(KernelArgumentError, match=name):
        pa.write_kv(**arguments)
    if arguments["k_cache"].device.type == "cpu":
        assert not arguments["k_cache"].any()


@pytest.mark.parametrize(
    ("name", "query", "options"),
    [
        ("query", torch.zeros(2, 5, 16), {}),
        ("query", torch.zeros(2, 6, 8), {}),
        ("query", torch.zeros(3, 6, 16), {}),
        ("query", torch.zeros(2, 96), {}),
        ("query", torch.zeros(2, 6, 32)[..., ::2], {}),
        ("query", torch.zeros(2, 6, 16, dtype=torch.int32), {}),
        ("k_cache", torch.zeros(2, 6, 16).half(), {}),
        ("sliding_window", torch.zeros(2, 6, 16), {"sliding_window": 0}),
        ("soft_cap", torch.zeros(2, 6, 16), {"soft_cap": 0.0}),
        ("sliding_window", torch.zeros(2, 6, 16), {"sliding_window": 1.5}),
        ("soft_cap", torch.zeros(2, 6, 16), {"soft_cap": NAN}),
        ("soft_cap", torch.zeros(2, 6, 16), {"soft_cap": float("inf")}),
        ("scale", torch.zeros(2, 6, 16), {"scale": float("inf")}),
        ("scale", torch.zeros(2, 6, 16), {"scale": NAN}),
        ("query", torch.zeros(2, 6, 16, requires_grad=True), {}),
        ("sinks", torch.zeros(2, 6, 16), {"sinks": torch.zeros(5)}),
        ("sinks", torch.zeros(2, 6, 16), {"sinks": torch.zeros(6).double()}),
        ("sinks", torch.zeros(2, 6, 16), {"sinks": torch.zeros(6, device="meta")}),
    ],
)
def test_attend_refuses(name, query, options):
    case = Case([20], [2])
    case.query = query
    with pytest.raises(KernelArgumentError, match=name):
        case.attend(**options)


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("block", [-1, 99])
@pytest.mark.parametrize("lengths", [([20], [2]), ([20], [1]), ([600], [1])])
def test_a_used_block_outside_the_cache_is_refused(lengths, block, strided):
    case = Case(*lengths, strided=strided)
    case.tables[0][1] = block

    def build_and_attend():  # the first to see it
        case.metadata = pa.AttentionMetadata.build(case.tables, *lengths, 16)
        case.attend()

    with pytest.raises(KernelArgumentError, match="block_table"):
        build_and_attend()


def test_a_sequence_longer_than_its_block_table_is_refused():
    case = Case([20, 3], [1, 1])
    case.metadata.seq_lens[0] = 33
    with pytest.raises(KernelArgumentError, match="seq_lens"):
        case.attend()
