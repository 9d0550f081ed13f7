"""What requests ask of their logits, against definitions written out in float64, and transformers'.

The definitions here go token by token and request by request, from all tokens each time.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from billfish.engine.plan import Admission, StepPlan
from billfish.errors import CapacityError
from billfish.sampling_params import SamplingParams
from billfish.worker.input_batch import InputBatch
from billfish.worker.logits_processor import LogitsProcessor
from billfish.worker.sampler import NO_TOKEN, probabilities, sample

VOCAB, SEATS = 40, 8
FIXED = settings(derandomize=True, deadline=None, max_examples=60)


def admission(
    name: str, params: SamplingParams, tokens=(1, 2, 3), num_prompt=3, stop_ids=(), bad=(), seed=0
) -> Admission:
    return Admission(name, tuple(tokens), num_prompt, params, seed, frozenset(stop_ids), bad)


class Bench:
    """An InputBatch and a LogitsProcessor, as the model runner has them."""

    def __init__(self, *admissions: Admission, vocab: int = VOCAB) -> None:
        self.batch = InputBatch(SEATS, 64, 16)
        self.processor = LogitsProcessor(SEATS, vocab)
        self.plan(admitted=admissions)

    def plan(self, *, admitted=(), released=()) -> None:
        self.batch.apply(StepPlan(0, released=tuple(released), admitted=tuple(admitted)))

    def apply(self, logits: torch.Tensor, names) -> torch.Tensor:
        rows = [self.batch.rows[name] for name in names]
        return self.processor.apply(logits, rows, self.batch.token_ids)


def processed(logits: torch.Tensor, *admissions: Admission) -> torch.Tensor:
    bench = Bench(*admissions, vocab=logits.shape[-1])
    return bench.apply(logits, [each.request_id for each in admissions])


def random_logits(count: int, seed: int = 0, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(count, vocab, generator=torch.Generator().manual_seed(seed)) * 4


def defined(logits, params: SamplingParams, prompt, generated, stop_ids, bad) -> np.ndarray:
    """All options by their definitions, in the order that the module states."""
    out = logits.double().numpy().copy()
    for token in range(len(out)):
        forbidden = params.allowed_token_ids is not None and token not in params.allowed_token_ids
        for *before, last in bad:
            follows = list(generated[len(generated) - len(before) :]) == before
            forbidden |= last == token and len(before) <= len(generated) and follows
        forbidden |= len(generated) < params.min_tokens and token in stop_ids
        if forbidden:
            out[token] = -np.inf
        out[token] += params.logit_bias.get(token, 0.0)
        if token in prompt or token in generated:
            penalty = params.repetition_penalty
            out[token] = out[token] / penalty if out[token] > 0 else out[token] * penalty
        count = list(generated).count(token)
        out[token] -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
    return out


ids = st.integers(0, VOCAB - 1)


@st.composite
def requests(draw) -> Admission:
    """One with any mix of options, part of them off."""

    def maybe(strategy, otherwise):
        return draw(st.one_of(st.just(otherwise), strategy))

    params = SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.3, 1.0, 2.5])),
        top_p=maybe(st.floats(0.05, 1.0), 1.0),
        top_k=maybe(st.integers(1, 10), 0),
        min_p=maybe(st.floats(0.01, 1.0), 0.0),
        presence_penalty=maybe(st.floats(-2, 2), 0.0),
        frequency_penalty=maybe(st.floats(-2, 2), 0.0),
        repetition_penalty=maybe(st.floats(0.5, 2), 1.0),
        logit_bias=maybe(st.dictionaries(ids, st.floats(-100, 100), max_size=5), {}),
        allowed_token_ids=maybe(st.lists(ids, min_size=8, max_size=20).map(tuple), None),
        min_tokens=maybe(st.integers(1, 6), 0),
    )
    prompt = draw(st.lists(ids, min_size=1, max_size=6))
    generated = draw(st.lists(ids, max_size=8))
    bad = maybe(st.lists(st.lists(ids, min_size=1, max_size=2).map(tuple), max_size=3), [])
    if generated and draw(st.booleans()):
        bad = [*bad, (generated[-1], draw(ids))]  # one that is about to be completed
    return admission(
        "",
        params,
        prompt + generated,
        len(prompt),
        draw(st.lists(ids, max_size=3)),
        tuple(bad),
        seed=draw(st.integers(0, 99)),
    )


def named(admissions: list[Admission]) -> list[Admission]:
    return [replace(each, request_id=str(i)) for i, each in enumerate(admissions)]


@FIXED
@given(st.lists(requests(), min_size=1, max_size=SEATS), st.integers(0, 2**31))
def test_any_mix_of_options_follows_the_definitions(admissions, seed: int) -> None:
    admissions = named(admissions)
    logits = random_logits(len(admissions), seed)
    result = processed(logits, *admissions)
    for i, each in enumerate(admissions):
        tokens, split = each.token_ids, each.num_prompt_tokens
        expected = defined(
            logits[i], each.sampling, tokens[:split], tokens[split:], each.stop_ids,
            each.bad_word_ids,
        )  # fmt: skip
        np.testing.assert_allclose(result[i].numpy(), expected, rtol=1e-5, atol=1e-5)


@FIXED
@given(st.lists(requests(), min_size=2, max_size=SEATS), st.integers(0, 2**31), st.randoms())
def test_batch_mates_change_not_one_bit(admissions, seed: int, random) -> None:
    admissions = named(admissions)
    logits = random_logits(len(admissions), seed)
    order = list(range(len(admissions)))
    random.shuffle(order)
    together = processed(logits[order], *[admissions[i] for i in order])
    tokens = choose(together, [admissions[i] for i in order])
    for place, i in enumerate(order):
        alone = processed(logits[i : i + 1], admissions[i])
        assert torch.equal(together[place], alone[0])
        assert [tokens[place]] == choose(alone, [admissions[i]])


def choose(logits: torch.Tensor, admissions: list[Admission]) -> list[int]:
    return sample(
        logits,
        [each.sampling for each in admissions],
        [each.seed for each in admissions],
        [len(each.token_ids) for each in admissions],
    )


def test_counts_follow_the_tokens_step_by_step() -> None:
    """New tokens are counted as they come, also when a row changes hands or comes back."""
    params = SamplingParams(frequency_penalty=1.5, presence_penalty=-0.5, repetition_penalty=1.3)
    prompts = {"a": [5, 6, 5], "b": [7]}
    generated: dict[str, list[int]] = {"a": [], "b": [], "c": []}
    bench = Bench(admission("a", params, prompts["a"], 3), admission("b", params, prompts["b"], 1))

    def check(names: list[str], seed: int) -> None:
        logits = random_logits(len(names), seed)
        result = bench.apply(logits, names)
        for i, name in enumerate(names):
            expected = defined(logits[i], params, prompts[name], generated[name], (), ())
            np.testing.assert_allclose(result[i].numpy(), expected, rtol=1e-5, atol=1e-5)
            token = (seed * 7 + i) % 9
            generated[name].append(token)
            bench.batch.append(name, token)

    for step in range(4):
        check(["a", "b"], step)
    check(["b"], 4)  # a rests
    check(["b", "a"], 5)
    bench.plan(released=["a"])
    prompts["c"] = [1]
    bench.plan(admitted=[admission("c", params, [1], 1)])  # takes a's row
    check(["c", "b"], 6)
    tokens = prompts["a"] + generated["a"]
    bench.plan(released=["c"], admitted=[admission("a", params, tokens, 3)])  # and a comes back
    check(["b", "a"], 7)


def test_a_fork_counts_for_itself() -> None:
    params = SamplingParams(frequency_penalty=1.0)
    bench = Bench(admission("a", params, [5, 6], 2))
    logits = random_logits(1)
    bench.apply(logits, ["a"])
    bench.batch.append("a", 9)
    bench.apply(logits, ["a"])
    source = bench.batch.rows["a"]
    assert source.rules is not None
    fork = replace(source, index=3, rules=source.rules.fork())
    bench.batch.token_ids[3] = bench.batch.token_ids[source.index]
    bench.batch.rows["b"] = fork
    bench.batch.append("b", 7)
    bench.batch.append("a", 8)
    both = bench.apply(logits.expand(2, -1), ["a", "b"])
    for row, generated in zip(both, ([9, 8], [9, 7]), strict=True):
        expected = defined(logits[0], params, [5, 6], generated, (), ())
        np.testing.assert_allclose(row.numpy(), expected, rtol=1e-5, atol=1e-5)


def test_counting_costs_the_new_tokens_only(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []
    index_put_ = torch.Tensor.index_put_

    def spy(table, pairs, values, accumulate=False):
        counted.append(len(values))
        return index_put_(table, pairs, values, accumulate)

    monkeypatch.setattr(torch.Tensor, "index_put_", spy)
    params = SamplingParams(presence_penalty=1.0)
    bench = Bench(admission("a", params, range(30), 20))
    bench.apply(random_logits(1), ["a"])
    for _ in range(3):
        bench.batch.append("a", 4)
    bench.apply(random_logits(1), ["a"])
    assert counted == [10, 3]


def test_who_asks_for_nothing_gets_the_same_tensor() -> None:
    logits = random_logits(2)
    plain = SamplingParams(temperature=0.5, top_p=0.9, stop="x", stop_token_ids=[1])
    assert processed(logits, admission("a", plain), admission("b", plain, stop_ids=[1])) is logits


def test_inputs_are_left_alone() -> None:
    logits = random_logits(1)
    before = logits.clone()
    processed(logits, admission("a", SamplingParams(logit_bias={3: 5.0}, allowed_token_ids=[3])))
    assert torch.equal(logits, before)


def test_bias_cannot_bring_back_what_is_banned() -> None:
    params = SamplingParams(
        temperature=0, logit_bias={4: 100, 9: 100}, allowed_token_ids=[4, 5], min_tokens=1,
        presence_penalty=-2.0,
    )  # fmt: skip
    each = admission("a", params, stop_ids=[4])
    assert choose(processed(random_logits(1), each), [each]) == [5]


def test_nothing_left_gives_no_token_and_harms_no_other() -> None:
    params = SamplingParams(allowed_token_ids=[4])
    stuck = admission("a", params, [1, 4], 1, bad=((4, 4),))
    free = admission("b", SamplingParams(allowed_token_ids=[4]))
    logits = random_logits(2)
    assert choose(processed(logits, stuck, free), [stuck, free]) == [NO_TOKEN, 4]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_bans_do_not_hide_logits_that_are_not_numbers(bad: float) -> None:
    logits = random_logits(2)
    logits[0, 7] = bad
    each = [admission(name, SamplingParams(allowed_token_ids=[4])) for name in "ab"]
    assert choose(processed(logits, *each), each) == [NO_TOKEN, 4]


class TestTransformers:
    """The same processors of transformers, over random logits and sequences."""

    VOCAB = 200

    def sequences(self) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(3)
        tokens = torch.randint(0, self.VOCAB, (4, 24), generator=generator)
        tokens[:, 12:18] = tokens[:, :6]
        return tokens, random_logits(4, seed=5, vocab=self.VOCAB)

    def ours(self, logits, tokens, params, num_prompt=10, **options) -> torch.Tensor:
        each = [
            admission(str(i), params, row, num_prompt, **options)
            for i, row in enumerate(tokens.tolist())
        ]
        return processed(logits, *each)

    @pytest.mark.parametrize("penalty", [0.6, 1.2, 5.0])
    def test_repetition_penalty(self, penalty: float) -> None:
        from transformers import RepetitionPenaltyLogitsProcessor

        tokens, logits = self.sequences()
        expected = RepetitionPenaltyLogitsProcessor(penalty)(tokens, logits.clone())
        ours = self.ours(logits, tokens, SamplingParams(repetition_penalty=penalty))
        assert torch.equal(ours, expected)

    @pytest.mark.parametrize("min_tokens", [5, 14, 15, 20])
    def test_min_tokens(self, min_tokens: int) -> None:
        from transformers import MinNewTokensLengthLogitsProcessor

        tokens, logits = self.sequences()
        oracle = MinNewTokensLengthLogitsProcessor(10, min_tokens, [3, 8], device="cpu")
        params = SamplingParams(min_tokens=min_tokens)
        ours = self.ours(logits, tokens, params, stop_ids=[3, 8])
        assert torch.equal(ours, oracle(tokens, logits.clone()))

    def test_bad_words(self) -> None:
        from transformers import NoBadWordsLogitsProcessor

        tokens, logits = self.sequences()
        bad = [[7], [int(tokens[0, -1]), 9], [*tokens[1, -2:].tolist(), 11], [1, 2, 3]]
        expected = NoBadWordsLogitsProcessor(bad)(tokens, logits.clone())
        ours = self.ours(logits, tokens, SamplingParams(), bad=tuple(map(tuple, bad)))
        assert torch.equal(ours, expected)
        assert int((ours == -torch.inf).sum()) == 4 + 1 + 1

    @pytest.mark.parametrize(
        ("options", "warper"),
        [
            ({"min_p": 0.05}, ("MinPLogitsWarper", 0.05)),
            ({"min_p": 0.5}, ("MinPLogitsWarper", 0.5)),
            ({"top_p": 0.3}, ("TopPLogitsWarper", 0.3)),
            ({"top_p": 0.95}, ("TopPLogitsWarper", 0.95)),
            ({"top_k": 1}, ("TopKLogitsWarper", 1)),
            ({"top_k": 17}, ("TopKLogitsWarper", 17)),
            ({"top_k": 10**6}, ("TopKLogitsWarper", 10**6)),
        ],
    )
    def test_tails(self, options: dict, warper: tuple[str, float]) -> None:
        import transformers

        tokens, logits = self.sequences()
        name, value = warper
        expected = getattr(transformers, name)(value)(tokens, logits.double()).softmax(-1)
        ours = probabilities(logits, [SamplingParams(**options)] * 4)
        torch.testing.assert_close(ours / ours.sum(-1, keepdim=True), expected)


def test_more_counts_than_the_machine_has_memory_for_are_refused_with_numbers() -> None:
    with pytest.raises(CapacityError, match=r"can take \d+ bytes and \d+ are available"):
        LogitsProcessor(2**16, 2**26)
