"""Tokens drawn from logits on the CPU: against the definition, and against distributions."""

import random

import pytest
import torch
from torch.library import opcheck

from billfish.errors import KernelArgumentError
from billfish.kernels import general
from billfish.kernels.general.sample import uniform
from billfish.worker import sampler


def logits_of(rows, size, dtype=torch.float32, seed=0):
    drawn = torch.randn(rows, size, generator=torch.Generator().manual_seed(seed))
    return ((3 * drawn * 8).round() / 8).to(dtype)  # with equals among them


def options_of(rows, seed):
    rng = random.Random(seed)
    columns = [
        (rng.choice((0.0, 0.3, 1.0, 3.0)), rng.choice((0, 1, 5, 10_000)),
         rng.choice((1.0, 0.95, 0.5, 0.05)), rng.choice((0.0, 0.02, 0.5)))
        for _ in range(rows)
    ]  # fmt: skip
    return columns


def test_numbers_are_those_of_the_engine():
    seeds = [0, 1, -1, 2**63 - 1, -(2**63), 12345]
    positions = [0, 1, 7, 2**31, 5, 2**40]
    got = uniform(torch.tensor(seeds), torch.tensor(positions)).tolist()
    assert got == [sampler.uniform(s, p) for s, p in zip(seeds, positions, strict=True)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1, 7, 300])
def test_the_same_tokens_as_the_definition(size, dtype):
    rows = 40
    logits = logits_of(rows, size, dtype)
    options = options_of(rows, size)
    seeds, positions = torch.arange(rows) * 31 - 99, torch.arange(rows) % 5
    temperature, top_k, top_p, min_p = (torch.tensor(column) for column in zip(*options))  # noqa: B905
    got = general.sample(
        logits, temperature.double(), top_k, top_p.double(), min_p.double(), seed=seeds,
        position=positions,
    )  # fmt: skip
    numbers = uniform(seeds, positions).tolist()
    want = [
        general.sample_reference(row.double(), *option, number)
        for row, option, number in zip(logits, options, numbers, strict=True)
    ]
    assert got.dtype == torch.int64
    assert got.tolist() == want
    alone = [
        general.sample(logits[i : i + 1], *options[i], seed=int(seeds[i]),
                       position=int(positions[i])).item()
        for i in range(0, rows, 7)
    ]  # fmt: skip
    assert alone == want[::7]


def chosen(logits, count=20_000, **options):
    rows = logits.expand(count, -1)
    return general.sample(rows, seed=7, **options).bincount(minlength=len(logits)) / count


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0.4, 0.3, 0.15, 0.1, 0.05]),
        ({"temperature": 0.5}, [0.5614, 0.3158, 0.0789, 0.0351, 0.0088]),
        ({"top_k": 2}, [4 / 7, 3 / 7, 0, 0, 0]),
        ({"top_p": 0.71}, [8 / 17, 6 / 17, 3 / 17, 0, 0]),
        ({"top_p": 0.69}, [4 / 7, 3 / 7, 0, 0, 0]),
        ({"min_p": 0.3}, [8 / 17, 6 / 17, 3 / 17, 0, 0]),
        ({"top_k": 3, "top_p": 0.5}, [4 / 7, 3 / 7, 0, 0, 0]),
        ({"temperature": 0}, [1, 0, 0, 0, 0]),
        ({"top_k": 1}, [1, 0, 0, 0, 0]),
    ],
)
def test_distributions(options, expected):
    """Shares of 20,000 rows, within five standard deviations."""
    logits = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05]).log()
    for share, p in zip(chosen(logits, **options).tolist(), expected, strict=True):
        assert abs(share - p) <= 5 * (p * (1 - p) / 20_000) ** 0.5 + 1e-4 * (p > 0)


def test_rows_seeds_and_positions_are_independent():
    logits = torch.zeros(1, 1000)
    rows = general.sample(logits.expand(500, -1), seed=3)
    assert rows.unique().numel() > 350
    assert torch.equal(rows, general.sample(logits.expand(500, -1), seed=3))
    places = torch.cat([general.sample(logits, seed=3, position=p) for p in range(300)])
    assert places.unique().numel() > 230
    # One seed for all is a seed a row.
    assert torch.equal(rows, general.sample(logits.expand(500, -1), seed=torch.arange(3, 503)))


def test_rows_that_are_no_numbers():
    x = logits_of(5, 9)
    x[0, 3], x[1], x[2, 4], x[3, :8] = torch.nan, -torch.inf, torch.inf, -torch.inf
    for temperature in (0.0, 1.0):
        got = general.sample(x, temperature, seed=1).tolist()
        assert got[:4] == [-1, -1, -1, 8]
        assert got[4] >= 0
    assert general.sample(logits_of(0, 5), seed=1).shape == (0,)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -1.0}, {"temperature": float("nan")}, {"top_k": -1}, {"top_k": 1.5},
        {"top_p": 0.0}, {"top_p": 1.1}, {"min_p": 2.0}, {"seed": 0.5}, {"seed": 2**64},
        {"temperature": torch.ones(2)}, {"temperature": torch.tensor([1.0, -1.0, 1.0])},
        {"top_k": torch.ones(3)}, {"position": True}, {"temperature": "hot"},
    ],
    ids=str,
)  # fmt: skip
def test_bad_options(options):
    with pytest.raises(KernelArgumentError):
        general.sample(logits_of(3, 5), **({"seed": 1} | options))


def test_bad_logits():
    for logits in (torch.zeros(5), torch.zeros(3, 0), torch.zeros(2, 3).long(),
                   torch.zeros(2, 3).requires_grad_()):  # fmt: skip
        with pytest.raises(KernelArgumentError):
            general.sample(logits, seed=1)


def test_the_operation_as_torch_sees_it():
    numbers = torch.tensor([[1.0, 0.9, 0.0, 1.0]]).double().expand(3, -1).contiguous()
    integers = torch.tensor([[1, 4], [2, 0], [3, 1]])
    opcheck(
        torch.ops.billfish.draw_tokens.default,
        (logits_of(3, 9), numbers, integers, torch.arange(3), False),
    )
