"""Sampling options through the whole path: text, model, sampler, text."""

import json
import random
from dataclasses import replace
from pathlib import Path

import gguf
import pytest

from billfish import LLM, SamplingParams
from billfish.config import CacheConfig, SchedulerConfig
from billfish.errors import CheckpointError, InvalidRequestError
from tests.e2e import tiny_gguf
from tests.e2e.prompts import PROMPTS
from tests.e2e.test_against_oracle import oracle_logits
from tests.e2e.tiny_gguf import VOCAB


@pytest.fixture(scope="module")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gguf.write(tmp_path_factory.mktemp("sampling") / "tiny.gguf")


def load(path: Path, num_blocks: int = 256, block_size: int = 16, **scheduler: int) -> LLM:
    cache = CacheConfig(num_blocks=num_blocks, block_size=block_size)
    return LLM(
        str(path), dtype="float32", cache=cache, scheduler=SchedulerConfig(**scheduler), seed=0
    )


@pytest.fixture(scope="module")
def tiny(tiny_path: Path) -> LLM:
    return load(tiny_path)


def mixed_params(rng: random.Random, vocab: int, seed: int, max_tokens: int) -> SamplingParams:
    """Each option on or off."""

    def maybe(value, otherwise):
        return value if rng.random() < 0.4 else otherwise

    return SamplingParams(
        max_tokens=max_tokens, seed=seed,
        temperature=rng.choice([0.0, 0.7, 1.0, 1.5]),
        top_p=maybe(rng.uniform(0.3, 1.0), 1.0),
        top_k=maybe(rng.randint(1, 50), 0),
        min_p=maybe(rng.uniform(0.01, 0.3), 0.0),
        presence_penalty=maybe(rng.uniform(-1, 2), 0.0),
        frequency_penalty=maybe(rng.uniform(-1, 2), 0.0),
        repetition_penalty=maybe(rng.uniform(0.8, 1.5), 1.0),
        logit_bias=maybe({rng.randrange(vocab): rng.uniform(-9, 9) for _ in range(4)}, {}),
        allowed_token_ids=maybe(rng.sample(range(3, vocab), 100), None),
        bad_words=maybe(["e", "th", " a"], ()),
        min_tokens=maybe(rng.randint(1, max_tokens), 0),
        logprobs=maybe(rng.randint(0, 5), None),
        prompt_logprobs=maybe(rng.randint(0, 5), None),
        stop=maybe("a", ()), include_stop_str_in_output=maybe(True, False),
    )  # fmt: skip


def everything(outputs) -> list[tuple]:
    return [(o.token_ids, o.text, o.finish_reason, o.stop_reason) for o in outputs]


def assert_close(ours, theirs) -> None:
    """The same tokens with nearly the same log-probabilities: rounding differs with the batch."""
    for a, b in zip(ours, theirs, strict=True):
        for mine, other in ((a.logprobs, b.logprobs), (a.prompt_logprobs, b.prompt_logprobs)):
            assert (mine is None) == (other is None)
            for x, y in zip(mine or (), other or (), strict=True):
                assert (x is None) == (y is None)
                if x is not None:
                    assert x.token_id == y.token_id
                    assert x.logprob == pytest.approx(y.logprob, abs=1e-4)
                    assert len(x.top) == len(y.top)


class TestAnyMixInAnyBatch:
    """A seeded request gives the same, whatever shares its batch and however it is scheduled."""

    def requests(self, count: int, vocab: int, max_tokens: int):
        rng = random.Random(5)
        prompts = [PROMPTS[i % len(PROMPTS)][:40] for i in range(count)]
        return prompts, [mixed_params(rng, vocab, i, max_tokens) for i in range(count)]

    def test_tiny(self, tiny: LLM, tiny_path: Path) -> None:
        prompts, params = self.requests(24, VOCAB, 20)
        alone = [tiny.generate(p, s)[0] for p, s in zip(prompts, params, strict=True)]
        assert len({output.finish_reason for output in alone}) == 2
        together = tiny.generate(prompts, params)
        assert everything(together) == everything(alone)
        assert_close(together, alone)
        cramped = load(tiny_path, num_blocks=32, block_size=2, max_num_batched_tokens=16)
        squeezed = cramped.generate(prompts, params)
        assert cramped.stats().preemptions > 0
        assert everything(squeezed) == everything(alone)
        assert_close(squeezed, alone)

    def test_real_model(self, llm: LLM) -> None:
        prompts, params = self.requests(5, llm.tokenizer.vocab_size, 6)
        alone = [llm.generate(p, s)[0] for p, s in zip(prompts, params, strict=True)]
        together = llm.generate(prompts, params)
        assert everything(together) == everything(alone)
        assert_close(together, alone)


def test_refused_requests_change_nobodys_bits(tiny: LLM) -> None:
    """The same batch, step for step, with and without refused requests in between."""
    bad = [
        ({"stop_token_ids": [VOCAB]}, "stop_token_ids"),
        ({"logit_bias": {VOCAB: 1.0}}, "logit_bias"),
        ({"allowed_token_ids": [VOCAB]}, "allowed_token_ids"),
        ({"allowed_token_ids": list(range(1025))}, "allowed_token_ids"),
        ({"logit_bias": {0: float("nan")}}, "logit_bias"),
        ({"bad_words": ["\ud800"]}, "bad_words"),
        ({"min_tokens": 600, "max_tokens": None}, "min_tokens"),
    ]
    good = [
        SamplingParams(max_tokens=16, seed=i, logprobs=20, prompt_logprobs=20, min_p=0.01 * i)
        for i in range(3)
    ]

    def run(disturb: bool):
        last = {}
        for step, (index, output) in enumerate(tiny.stream(list(PROMPTS[:3]), good)):
            last[index] = output
            if disturb:
                options, name = bad[step % len(bad)]
                with pytest.raises(InvalidRequestError) as error:
                    tiny.generate("x", SamplingParams(**options))
                assert error.value.parameter == name
        return [(o.token_ids, o.logprobs, o.prompt_logprobs) for _, o in sorted(last.items())]

    assert run(disturb=True) == run(disturb=False)


class TestBadWords:
    def test_are_not_generated(self, llm: LLM) -> None:
        greedy = SamplingParams(max_tokens=8, temperature=0)
        plain = llm.generate(PROMPTS[0], greedy)[0].text
        assert "Paris" in plain
        banned = SamplingParams(max_tokens=8, temperature=0, bad_words=["Paris", "the city"])
        text = llm.generate(PROMPTS[0], banned)[0].text
        assert "Paris" not in text
        assert "the city" not in text

    def test_the_neighbour_still_says_them(self, llm: LLM) -> None:
        greedy = SamplingParams(max_tokens=8, temperature=0)
        banned = SamplingParams(max_tokens=8, temperature=0, bad_words=["Paris"])
        first, second = llm.generate([PROMPTS[0]] * 2, [banned, greedy])
        assert ("Paris" in first.text, "Paris" in second.text) == (False, True)

    def test_spellings(self, llm: LLM) -> None:
        tokenizer = llm.tokenizer
        for word in ("Paris", " Paris", "photosynthesis", "<|im_end|>"):
            texts = {tokenizer.decode(ids) for ids in tokenizer.spellings(word)}
            assert texts == {word.strip(), " " + word.strip()}
            assert all(set(ids).isdisjoint((0, 1, 2)) for ids in tokenizer.spellings(word))

    def test_a_word_without_tokens_is_refused(self, llm: LLM) -> None:
        # SmolLM2's vocabulary lacks this character; a ban that bans nothing would be a lie.
        assert llm.tokenizer.encode("\x14") == []
        with pytest.raises(InvalidRequestError) as error:
            llm.generate("x", SamplingParams(bad_words=["\x14"]))
        assert error.value.parameter == "bad_words"


def test_min_tokens_keeps_the_end_away(tiny: LLM) -> None:
    plain = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    path = tiny.generate("Hello", plain)[0].token_ids
    stop = path[4]
    first = path.index(stop)
    ended = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True, stop_token_ids=[stop])
    assert tiny.generate("Hello", ended)[0].token_ids == path[: first + 1]
    longer = replace(ended, min_tokens=first + 3)
    tokens = tiny.generate("Hello", longer)[0].token_ids
    assert tokens[:first] == path[:first]
    assert len(tokens) >= first + 3
    assert stop not in tokens[: first + 3]


class TestLogprobs:
    @pytest.mark.parametrize("budget", [512, 7])
    def test_equal_the_oracles(self, make_llm, oracle, budget: int) -> None:
        """Of prompt and text, whatever penalties and bans do: they are the model's own."""
        llm = make_llm(max_num_batched_tokens=budget)
        prompts = [PROMPTS[1], PROMPTS[-1]]
        params = SamplingParams(
            max_tokens=8, seed=3, temperature=1.3, logprobs=5, prompt_logprobs=3,
            presence_penalty=1.0, logit_bias={11: 5.0}, allowed_token_ids=list(range(30, 1000)),
        )  # fmt: skip
        for prompt, output in zip(prompts, llm.generate(prompts, params), strict=True):
            prompt_ids = llm.tokenizer.encode(prompt)
            exact = oracle_logits(oracle, [*prompt_ids, *output.token_ids]).double().log_softmax(-1)
            assert output.prompt_logprobs is not None
            assert output.logprobs is not None
            assert output.prompt_logprobs[0] is None
            found = [*output.prompt_logprobs[1:], *output.logprobs]
            assert [each.token_id for each in found] == [*prompt_ids[1:], *output.token_ids]
            for position, each in enumerate(found):
                row = exact[position]
                assert each.logprob == pytest.approx(float(row[each.token_id]), abs=2e-3)
                # Ranks of unlikely tokens move by a few with the rounding.
                rank = 1 + int((row > row[each.token_id]).sum())
                assert abs(each.rank - rank) <= max(1, rank // 50)
                assert len(each.top) == (3 if position < len(prompt_ids) - 1 else 5)
                best = row.topk(len(each.top)).values.tolist()
                assert [value for _, value in each.top] == pytest.approx(best, abs=2e-3)

    def test_are_json_with_almost_everything_masked(self, tiny: LLM) -> None:
        params = SamplingParams(
            max_tokens=8, seed=1, allowed_token_ids=[5, 6], logprobs=20, min_p=1.0
        )
        (output,) = tiny.generate("abc", params)
        assert output.logprobs is not None
        text = json.dumps([(e.logprob, e.top) for e in output.logprobs], allow_nan=False)
        assert "Infinity" not in text
        assert set(output.token_ids) <= {5, 6}
        assert any(token not in (5, 6) for e in output.logprobs for token, _ in e.top)


class TestNothingLeft:
    def test_ends_the_request_with_its_reason_and_no_other(self, tiny: LLM) -> None:
        # "a" may be the first token and nothing may be the second.
        token = tiny.tokenizer.encode("a", add_special_tokens=False)
        stuck = SamplingParams(allowed_token_ids=token, bad_words=["aa"], max_tokens=4)
        fine = SamplingParams(max_tokens=4, seed=1, ignore_eos=True)
        first, second = tiny.generate(["x", "x"], [stuck, fine])
        assert (first.finish_reason, first.text) == ("error", "a")
        assert "leave no token" in str(first.stop_reason)
        assert second.finish_reason == "length"


def asks(**values):
    def write(writer: gguf.GGUFWriter) -> None:
        for name, value in values.items():
            add = writer.add_int32 if isinstance(value, int) else writer.add_float32
            add(f"general.sampling.{name}", value)

    return write


class TestCheckpointDefaults:
    def test_none_without_them(self, tiny: LLM) -> None:
        assert not tiny.checkpoint_defaults
        assert tiny.default_params == SamplingParams()

    def test_they_apply_unless_a_request_brings_its_own(self, tmp_path: Path, caplog) -> None:
        metadata = asks(temp=0.0, top_k=7, top_p=0.5, min_p=0.25, penalty_repeat=1.1)
        with caplog.at_level("INFO", logger="billfish"):
            llm = load(tiny_gguf.write(tmp_path / "a.gguf", metadata=metadata))
        expected = SamplingParams(temperature=0.0, top_k=7, top_p=0.5, min_p=0.25)
        assert llm.default_params == expected
        for words in ("temperature=0", "top_k=7", "top_p=0.5", "min_p=0.25", "penalty_repeat"):
            assert words in caplog.text
        greedy = llm.generate("Hello", SamplingParams(temperature=0.0))[0]
        assert llm.generate("Hello")[0].token_ids == greedy.token_ids
        hot = SamplingParams(temperature=5.0, seed=1)
        assert llm.generate("Hello", hot)[0].token_ids != greedy.token_ids

    def test_values_that_turn_an_option_off(self, tmp_path: Path) -> None:
        metadata = asks(temp=-1.0, top_k=-1, min_p=0.0)
        llm = load(tiny_gguf.write(tmp_path / "a.gguf", metadata=metadata))
        assert llm.default_params == SamplingParams(temperature=0.0)

    @pytest.mark.parametrize("wrong", [{"temp": 1e6}, {"top_p": 0.0}, {"min_p": float("nan")}])
    def test_wrong_ones_are_damage(self, tmp_path: Path, wrong: dict) -> None:
        path = tiny_gguf.write(tmp_path / "a.gguf", metadata=asks(**wrong))
        with pytest.raises(CheckpointError) as error:
            load(path)
        assert error.value.tensor == f"general.sampling.{next(iter(wrong))}"
