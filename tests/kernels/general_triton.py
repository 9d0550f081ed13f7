"""The general kernels for a GPU, run in Triton's interpreter against what defines them.

Run by test_general_triton.py in a process of its own: a process either interprets Triton kernels or
compiles them. By hand: TRITON_INTERPRET=1 pytest tests/kernels/general_triton.py
"""

import random

import pytest
import torch

from billfish.kernels.general import (
    gelu_tanh_mul_reference,
    gpu,
    rms_norm_reference,
    sample_gpu,
    sample_reference,
    silu_mul_reference,
)
from billfish.kernels.general.sample import uniform
from billfish.sampling_params import SamplingParams
from billfish.worker import step_inputs, step_inputs_gpu
from billfish.worker.sampler import NO_TOKEN, sample
from billfish.worker.step_inputs import Header


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3}[got.dtype]
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("shape", [(3, 64), (1, 576), (2, 5, 200)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rms_norm(shape, dtype):
    x, residual = torch.randn(2, *shape, dtype=dtype)
    weight = torch.randn(shape[-1], dtype=dtype)
    close(gpu.rms_norm(x, weight, 1e-5), rms_norm_reference(x.double(), weight.double(), 1e-5))
    out, total = gpu.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    close(out, rms_norm_reference(total.double(), weight.double(), 1e-5))


def test_rms_norm_of_views():
    x = torch.randn(6, 100)[::2, 10:74]
    weight = torch.randn(64)
    close(gpu.rms_norm(x, weight, 1e-6), rms_norm_reference(x.double(), weight.double(), 1e-6))
    assert gpu.rms_norm(x[:0], weight, 1e-6).shape == (0, 64)


@pytest.mark.parametrize("shape", [(3, 128), (1, 2, 3, 34), (2, 9000)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_gated_activations(shape, dtype):
    x = 4 * torch.randn(shape, dtype=dtype)
    close(gpu.silu_mul(x), silu_mul_reference(x.double()))
    close(gpu.gelu_tanh_mul(x), gelu_tanh_mul_reference(x.double()))


def chosen(logits, params, seeds, positions, table_length=64):
    """What the kernel chooses; rows are permuted in its tables, and the table of tokens checked."""
    count = len(params)
    order = torch.randperm(count)
    numbers = torch.zeros(count, 4, dtype=torch.float64)
    integers = torch.zeros(count, 2, dtype=torch.int64)
    for i, p in enumerate(params):
        numbers[order[i]] = torch.tensor([p.temperature, p.top_p, p.min_p, 0.0]).double()
        numbers[order[i], 1] = p.top_p
        numbers[order[i], 0] = p.temperature
        numbers[order[i], 2] = p.min_p
        seed = seeds[i] % 2**64
        integers[order[i]] = torch.tensor([seed - 2**64 if seed >= 2**63 else seed, p.top_k])
    table = torch.full((count, table_length), 99, dtype=torch.int32)
    out = torch.empty(count, dtype=torch.int32)
    sample_gpu.sample(
        logits, order.int(), torch.tensor(positions, dtype=torch.int32), numbers, integers, table,
        out, greedy=all(p.greedy for p in params),
    )  # fmt: skip
    for i, token in enumerate(out.tolist()):
        row = table[order[i]]
        if positions[i] < table_length:
            assert row[positions[i]] == max(token, 0)
        assert (row == 99).sum() >= table_length - 1
    return out.tolist()


def draw_params(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        temperature=rng.choice((0.0, 0.3, 1.0, 1.0, 3.0)),
        top_p=rng.choice((1.0, 0.95, 0.5, 0.05)),
        top_k=rng.choice((0, 0, 1, 5, 50, 10_000)),
        min_p=rng.choice((0.0, 0.0, 0.02, 0.5)),
    )


def draw_rows(size, dtype, count):
    rng = random.Random(size)
    logits = (3 * torch.randn(count, size)).to(dtype)
    params = [draw_params(rng) for _ in range(count)]
    seeds = [rng.randrange(-(2**63), 2**64) for _ in range(count)]
    return logits, params, seeds, [rng.randrange(64) for _ in range(count)]


@pytest.mark.parametrize(
    ("size", "dtype", "count"),
    [(300, torch.float32, 8), (301, torch.float16, 8), (5000, torch.float16, 3)],
)
def test_same_tokens_as_the_definition(monkeypatch, size, dtype, count):
    monkeypatch.setattr(sample_gpu, "BLOCK", 512 if size < 512 else 4096)
    logits, params, seeds, positions = draw_rows(size, dtype, count)
    want = sample(logits.float(), params, seeds, positions)
    assert chosen(logits, params, seeds, positions) == want


@pytest.mark.parametrize(
    ("hits", "candidates", "dtype"),
    [(32, (8, 64), torch.float32), (8, (8, 16), torch.float16)],
)
def test_more_tokens_than_are_looked_at_first(monkeypatch, hits, candidates, dtype):
    """Some rows need few of the groups, some several rounds over more of them, some the whole."""
    monkeypatch.setattr(sample_gpu, "BLOCK", 128)
    monkeypatch.setattr(sample_gpu, "HITS", hits)
    monkeypatch.setattr(sample_gpu, "CANDIDATES", candidates)
    logits, params, seeds, positions = draw_rows(301, dtype, 16)
    cuts = ((0, 1.0), (4, 1.0), (4, 0.7), (0, 0.3), (0, 0.95), (20, 0.9), (90, 0.9), (90, 1.0))
    for i, (top_k, top_p) in enumerate(cuts):
        params[i] = SamplingParams(top_k=top_k, top_p=top_p, temperature=0.5 + i / 4)
        params[i + 8] = SamplingParams(top_k=top_k, top_p=top_p, min_p=0.05)
    want = sample(logits.float(), params, seeds, positions)
    assert chosen(logits, params, seeds, positions) == want


def test_equal_logits(monkeypatch):
    """Whole runs of equals at the border of what is kept: the lowest token ids are kept."""
    monkeypatch.setattr(sample_gpu, "BLOCK", 512)
    rng = random.Random(1)
    count = 8
    logits = torch.randint(-2, 3, (count, 300)).half()
    params = [
        SamplingParams(top_k=rng.choice((0, 3, 40, 170)), top_p=rng.choice((1.0, 0.6, 0.11)))
        for _ in range(count)
    ]
    seeds, positions = list(range(count)), [7] * count
    want = sample(logits.float(), params, seeds, positions)
    assert chosen(logits, params, seeds, positions) == want
    greedy = [SamplingParams(temperature=0.0)] * count
    assert chosen(logits, greedy, seeds, positions) == logits.argmax(-1).tolist()
    monkeypatch.setattr(sample_gpu, "HITS", 8)  # more groups than that have a largest logit
    assert chosen(logits, params, seeds, positions) == want


def test_logits_that_are_no_numbers(monkeypatch):
    monkeypatch.setattr(sample_gpu, "BLOCK", 512)
    logits = torch.randn(6, 300).half()
    logits[0, 7] = torch.nan
    logits[1, 299] = torch.inf
    logits[2] = -torch.inf
    logits[3, :299] = -torch.inf  # one is left
    for params in (SamplingParams(temperature=0.0), SamplingParams(top_p=0.9, top_k=4)):
        got = chosen(logits, [params] * 6, [3] * 6, [5] * 6)
        assert got[:4] == [NO_TOKEN, NO_TOKEN, NO_TOKEN, 299]
        assert min(got[4:]) >= 0


def test_at_the_end_of_the_context():
    """The last token of all has no place in the table."""
    greedy = [SamplingParams(temperature=0.0)] * 2
    assert chosen(torch.eye(4)[:2].contiguous(), greedy, [0, 0], [64, 63]) == [0, 1]


def test_extreme_temperatures():
    logits = (torch.randn(2, 300) * 10).half()
    params = [SamplingParams(temperature=1e-6), SamplingParams(temperature=100.0, top_p=0.999)]
    want = sample(logits.float(), params, [1, 2], [3, 4])
    assert chosen(logits, params, [1, 2], [3, 4]) == want


@pytest.mark.parametrize("bisect", [True, False])
def test_draw_tokens(bisect):
    rng = random.Random(3)
    logits = (3 * torch.randn(8, 2 * 300)).half()[:, ::2]
    columns = [draw_params(rng) for _ in range(8)]
    numbers = torch.tensor([[p.temperature, p.top_p, p.min_p, 0.0] for p in columns]).double()
    integers = torch.tensor([[rng.randrange(2**60), p.top_k] for p in columns])
    positions = torch.arange(8)
    drawn = uniform(integers[:, 0], positions).tolist()
    want = [
        sample_reference(row.double(), *numbers[i, :1].tolist(), int(integers[i, 1]),
                         *numbers[i, 1:3].tolist(), drawn[i])
        for i, row in enumerate(logits)
    ]  # fmt: skip
    got = sample_gpu.draw_tokens(logits, numbers, integers, positions, False, bisect=bisect)
    assert got.tolist() == want
    numbers[:, 0] = 0
    got = sample_gpu.draw_tokens(logits, numbers, integers, positions, True, bisect=bisect)
    assert got.tolist() == logits.argmax(1).tolist()
    none = sample_gpu.draw_tokens(logits[:0], numbers[:0], integers[:0], positions[:0], False)
    assert none.shape == (0,)


@pytest.mark.parametrize("one_each", [True, False])
def test_step_inputs(one_each):
    """The kernel that makes the inputs of a step, against their definition."""
    rng = random.Random(int(one_each))
    requests, length, block_size = 5, 400, 4
    blocks = length // block_size
    tables = torch.randint(1, 1000, (8, length), dtype=torch.int32)
    block_table = torch.randint(1, 90, (8, blocks), dtype=torch.int32)
    seq_lens = [rng.randint(150, length) for _ in range(requests - 1)] + [0]
    query_lens = [1 if one_each else rng.randint(1, 140) for _ in range(requests)]
    starts = [sum(query_lens[:i]) for i in range(requests + 1)]
    header = Header(8, torch.device("cpu"))
    header.send({
        "rows": rng.sample(range(8), requests), "seq_lens": seq_lens, "query_start": starts,
        "found": [rng.choice((0, seq_len, seq_len - 7)) for seq_len in seq_lens],
        "new_blocks": [rng.choice((-1, 500 + i)) for i in range(requests)] if one_each else [],
    })  # fmt: skip
    results = []
    for make in (step_inputs.make, step_inputs_gpu.make):
        out = step_inputs.allocate(starts[-1], requests, blocks, torch.device("cpu"))
        table = block_table.clone()
        start = torch.tensor(starts, dtype=torch.int32)
        make(header, start, tables, table, block_size, out, max(query_lens))
        used = [out.block_table[i, : -(-n // block_size)] for i, n in enumerate(seq_lens)]
        results.append((out.token_ids, out.positions, out.slots, table, torch.cat(used)))
    for want, got in zip(*results, strict=True):
        assert torch.equal(want, got)
