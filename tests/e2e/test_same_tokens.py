"""However a request is served, its tokens are the same. float32, greedy and seeded."""

import pytest

from billfish import LLM, SamplingParams
from tests.e2e.prompts import PROMPTS

GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
SEEDED = [
    SamplingParams(max_tokens=24, temperature=0.9, top_p=0.9, top_k=50, seed=i, ignore_eos=True)
    for i in range(16)
]


ALONE = (0, 3, 4, 7, 12, 15)
"""Prompts that are served alone too: the shortest, the longest, code, other alphabets."""


@pytest.fixture(scope="module")
def alone(llm: LLM) -> dict[int, tuple[int, ...]]:
    return {i: llm.generate(PROMPTS[i], GREEDY)[0].token_ids for i in ALONE}


@pytest.fixture(scope="module")
def together(llm: LLM) -> list[tuple[int, ...]]:
    """All in one batch: the first test compares it with those alone, the others with it."""
    return [output.token_ids for output in llm.generate(list(PROMPTS[:16]), GREEDY)]


def test_in_a_batch_of_16(
    alone: dict[int, tuple[int, ...]], together: list[tuple[int, ...]]
) -> None:
    assert {i: together[i] for i in ALONE} == alone
    assert len(set(together)) == 16


def test_seeded_in_a_batch_of_16(llm: LLM) -> None:
    outputs = [output.token_ids for output in llm.generate(list(PROMPTS[:16]), SEEDED)]
    alone = {i: llm.generate(PROMPTS[i], SEEDED[i])[0].token_ids for i in ALONE}
    assert {i: outputs[i] for i in ALONE} == alone
    # The seeds matter: another one gives another text.
    other = SamplingParams(max_tokens=24, temperature=0.9, seed=99, ignore_eos=True)
    assert llm.generate(PROMPTS[0], other)[0].token_ids != outputs[0]


@pytest.mark.parametrize(("chunk", "block_size"), [(1, 16), (5, 1), (16, 7), (33, 64)])
def test_chunked_at_any_size(
    make_llm, together: list[tuple[int, ...]], chunk: int, block_size: int
) -> None:
    llm = make_llm(
        num_blocks=4096 // block_size, block_size=block_size, max_num_batched_tokens=chunk
    )
    prompts = [PROMPTS[i] for i in (3, 7, 15)] if chunk == 1 else list(PROMPTS[:16])
    expected = [together[PROMPTS.index(prompt)] for prompt in prompts]
    assert [output.token_ids for output in llm.generate(prompts, GREEDY)] == expected


def test_preempted(make_llm, together: list[tuple[int, ...]]) -> None:
    llm = make_llm(num_blocks=24, block_size=4, max_num_batched_tokens=64)
    outputs = llm.generate(list(PROMPTS[:10]), GREEDY)
    assert [output.token_ids for output in outputs] == together[:10]
    assert llm.stats().preemptions >= 3
    assert llm.stats().blocks_in_use == 0


def test_streamed(llm: LLM, together: list[tuple[int, ...]]) -> None:
    tokens: dict[int, list[int]] = {i: [] for i in range(16)}
    text = dict.fromkeys(range(16), "")
    last = {}
    for index, output in llm.stream(list(PROMPTS[:16]), GREEDY):
        tokens[index] += output.new_token_ids
        text[index] += output.delta
        last[index] = output
    assert [tuple(tokens[i]) for i in range(16)] == together
    assert all(last[i].finished and last[i].text == text[i] for i in range(16))


def test_joined_late_and_left_early(llm: LLM, alone: dict[int, tuple[int, ...]]) -> None:
    """Streams that start and are closed at other times do not change each other."""
    first = llm.stream(PROMPTS[0], GREEDY)
    for _ in range(5):
        next(first)
    second = llm.stream(list(PROMPTS[1:4]), GREEDY)
    next(second)
    third = llm.stream(PROMPTS[4], GREEDY)
    next(third)
    second.close()
    *_, (_, last) = third
    assert last.token_ids == alone[4]
    *_, (_, last) = first
    assert last.token_ids == alone[0]
    assert llm.stats().blocks_in_use == 0
    assert not llm.engine.has_unfinished
