"""The Python API over a small random model: arguments of every kind, and what must be refused."""

import signal
from dataclasses import replace

import pytest

from billfish import LLM, SamplingParams
from billfish.config import CacheConfig, SchedulerConfig
from billfish.errors import CapacityError, ConfigError, InvalidRequestError
from tests.e2e import tiny_gguf

SHORT = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
CHAT = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_gguf.write(tmp_path_factory.mktemp("api") / "tiny.gguf"))


@pytest.fixture(scope="module")
def llm(path: str) -> LLM:
    return LLM(path, dtype="float32", cache=CacheConfig(num_blocks=16))


def test_one_or_many_texts_or_token_ids(llm: LLM) -> None:
    ids = llm.tokenizer.encode("Hello")
    (expected,) = llm.generate("Hello", SHORT)
    assert [o.token_ids for o in llm.generate(ids, SHORT)] == [expected.token_ids]
    many = llm.generate(["Hello", ids, tuple(ids)], SHORT)
    assert [o.token_ids for o in many] == [expected.token_ids] * 3
    assert llm.generate([], SHORT) == []


def test_one_or_many_conversations(llm: LLM) -> None:
    (one,) = llm.chat(CHAT, SHORT)
    assert one.prompt_token_ids == tuple(llm.tokenizer.encode_chat(CHAT))
    assert [o.text for o in llm.chat([CHAT, CHAT], SHORT)] == [one.text] * 2
    assert [o.text for _, o in llm.stream_chat(CHAT, SHORT) if o.finished] == [one.text]


def test_params_one_for_all_or_one_each(llm: LLM) -> None:
    each = [SamplingParams(max_tokens=n, temperature=0, ignore_eos=True) for n in (1, 3)]
    assert [o.metrics.num_output_tokens for o in llm.generate(["a", "b"], each)] == [1, 3]
    with pytest.raises(InvalidRequestError, match="got 2 for 1 prompts"):
        llm.generate(["a"], each)


@pytest.mark.parametrize(
    ("prompts", "parameter"),
    [
        (None, "prompts"), (5, "prompts"), ({"a": 1}, "prompts"), (b"bytes", "prompts"),
        ("", "prompt_token_ids"), ([""], "prompt_token_ids"), ([[]], "prompt_token_ids"),
        ([None], "prompt_token_ids"), ([1, "a"], "prompt_token_ids"),
        ([[1, -1]], "prompt_token_ids"), ([tiny_gguf.VOCAB], "prompt_token_ids"),
        ([[1.0]], "prompt_token_ids"),
        ([[True]], "prompt_token_ids"), ("a\ud800", "text"),
    ],
)  # fmt: skip
def test_bad_prompts_are_refused_by_name(llm: LLM, prompts: object, parameter: str) -> None:
    with pytest.raises(InvalidRequestError) as error:
        llm.generate(prompts, SHORT)
    assert error.value.parameter == parameter
    assert not llm.engine.has_unfinished


@pytest.mark.parametrize(
    "conversations",
    [
        None, 5, [5], [[5]], [{"role": "user"}], [{"role": "user", "content": 5}],
        [{"role": "pirate", "content": "Arr"}], [{"content": "x"}],
    ],
)  # fmt: skip
def test_bad_conversations_are_refused(llm: LLM, conversations: object) -> None:
    with pytest.raises(InvalidRequestError):
        llm.chat(conversations, SHORT)
    assert not llm.engine.has_unfinished


def test_one_bad_request_stops_all_before_any_starts(llm: LLM) -> None:
    steps = llm.stats().steps
    with pytest.raises(InvalidRequestError):
        llm.generate(["good", "good too", [-1]], SHORT)
    with pytest.raises(CapacityError, match="max_model_len is 257"):
        llm.generate(["good", [5] * 300], SHORT)
    with pytest.raises(InvalidRequestError):
        llm.generate(["good"], 5)
    stats = llm.stats()
    assert (stats.running, stats.waiting, stats.blocks_in_use, stats.steps) == (0, 0, 0, steps)
    assert llm.generate("good", SHORT)[0].finish_reason == "length"


def test_a_stream_that_is_dropped_gives_its_blocks_back(llm: LLM) -> None:
    stream = llm.stream(["a", "b"], SamplingParams(max_tokens=100, ignore_eos=True))
    next(stream)
    assert llm.stats().blocks_in_use > 0
    del stream
    assert llm.stats().blocks_in_use == 0
    assert not llm.engine.has_unfinished


def test_a_failed_step_fails_its_stream_and_the_next_works(llm: LLM) -> None:
    expected = llm.generate("Hello", SHORT)[0].token_ids
    forward = llm.executor.model.forward
    first = llm.stream("first", SamplingParams(max_tokens=50, ignore_eos=True))
    next(first)
    llm.executor.model.forward = lambda *_: 1 / 0
    with pytest.raises(ZeroDivisionError):
        llm.generate("second", SHORT)
    llm.executor.model.forward = forward
    # The other stream learns that its request failed with that step.
    ((_, last),) = first
    assert last.finish_reason == "error"
    assert llm.generate("Hello", SHORT)[0].token_ids == expected
    assert llm.stats().blocks_in_use == 0
    assert not llm.executor.batch.rows


def test_progress_counts_requests_and_tensors(path: str) -> None:
    loaded: list[tuple[int, int]] = []
    llm = LLM(path, cache=CacheConfig(num_blocks=16), progress=lambda *c: loaded.append(c))
    assert loaded[-1][0] == loaded[-1][1] == len(tiny_gguf.tensor_shapes(tied=True))
    assert loaded == sorted(loaded)
    counts: list[tuple[int, int]] = []
    llm.generate(["a", "b", "c"], SHORT, progress=lambda *c: counts.append(c))
    assert counts == [(1, 3), (2, 3), (3, 3)]
    counts.clear()
    llm.generate(["a", "b"], [replace(SHORT, n=2), SHORT], progress=lambda *c: counts.append(c))
    assert counts == [(1, 3), (2, 3), (3, 3)]


def test_settings_that_cannot_be(path: str) -> None:
    with pytest.raises(ConfigError, match="more than the model's context of 512"):
        LLM(path, scheduler=SchedulerConfig(max_model_len=513))
    with pytest.raises(CapacityError, match="would fit"):
        LLM(path, cache=CacheConfig(num_blocks=2**31 - 2))
    with pytest.raises(CapacityError, match="would fit"):
        LLM(path, cache=CacheConfig(num_blocks=16, swap_blocks=2**31 - 2))
    with pytest.raises(CapacityError, match="give at least"):
        LLM(path, cache=CacheConfig(memory_bytes=1000))


def test_importing_a_kernel_brings_in_no_engine() -> None:
    import subprocess
    import sys

    code = (
        "import sys; from billfish.kernels import marlin, paged_attention, general; "
        "bad = [m for m in sys.modules if m.startswith(('billfish.engine', 'billfish.worker', "
        "'billfish.llm', 'billfish.tokenizer', 'tokenizers', 'jinja2.sandbox', 'transformers'))]; "
        "assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_stream_is_cancelled_between_steps_even_before_its_first_output(path: str) -> None:
    scheduler = SchedulerConfig(max_num_batched_tokens=8)
    llm = LLM(path, cache=CacheConfig(num_blocks=32), scheduler=scheduler)
    answers = iter([False, False, True])
    prompt = [5] * 200  # 25 steps of prefill
    assert list(llm.stream([prompt], SHORT, cancelled=lambda: next(answers))) == []
    stats = llm.stats()
    assert stats.steps <= 3
    assert stats.blocks_in_use == 0


def test_an_interrupt_waits_for_the_end_of_the_step(path: str) -> None:
    """Raised in the middle of a step it would leave engine and worker at odds; it must not be."""
    llm = LLM(path, dtype="float32", cache=CacheConfig(num_blocks=16))
    expected = llm.generate("Hello", SHORT)[0].token_ids
    forward = llm.executor.model.forward
    finished = []

    def interrupted(*arguments):
        signal.raise_signal(signal.SIGINT)
        out = forward(*arguments)
        finished.append(True)
        return out

    llm.executor.model.forward = interrupted
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["first", "second"], SHORT)
    assert finished == [True]
    llm.executor.model.forward = forward
    assert not llm.engine.has_unfinished
    assert not llm.executor.batch.rows
    assert llm.generate("Hello", SHORT)[0].token_ids == expected


def test_a_stream_dropped_while_another_steps_loses_no_output_of_others(llm: LLM) -> None:
    expected = llm.generate("first", SHORT)[0].token_ids
    first, second = llm.stream("first", SHORT), llm.stream("second", SHORT)
    next(second)
    execute = llm.executor.execute

    def execute_and_drop(plan):
        result = execute(plan)
        second.close()
        return result

    llm.executor.execute = execute_and_drop
    try:
        tokens = [t for _, output in first for t in output.new_token_ids]
    finally:
        del llm.executor.execute
    assert tuple(tokens) == expected
    assert llm.stats().blocks_in_use == 0


def test_samples_follow_each_other(llm: LLM) -> None:
    params = SamplingParams(n=3, max_tokens=5, seed=4, ignore_eos=True)
    outputs = llm.generate(["a", "b"], params, cache_salt="mine")
    assert [(llm.tokenizer.decode(o.prompt_token_ids), o.index) for o in outputs] == [
        (text, index) for text in "ab" for index in range(3)
    ]
    last = {}
    for prompt, output in llm.stream(["a", "b"], params, cancelled=lambda: False):
        last[prompt, output.index] = output
    assert [o.token_ids for _, o in sorted(last.items())] == [o.token_ids for o in outputs]
    (_, *others) = llm.chat(CHAT, params)
    assert [o.index for o in others] == [1, 2]


@pytest.mark.parametrize("when", [1, 4])
def test_a_cancelled_stream_ends_all_its_samples(path: str, when: int) -> None:
    llm = LLM(path, dtype="float32", cache=CacheConfig(num_blocks=16))
    params = SamplingParams(n=4, max_tokens=50, ignore_eos=True)
    asked: list[int] = []

    def cancelled() -> bool:
        asked.append(1)
        return len(asked) > when

    outputs = list(llm.stream(["a", "b"], params, cancelled=cancelled))
    assert len(outputs) == 8 * when
    assert not llm.engine.has_unfinished
    assert not llm.executor.batch.rows
    stats = llm.stats()
    assert (stats.blocks_in_use, stats.finished) == (0, {"abort": 8})


def test_which_prompt_is_wrong_is_said(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match=r"^prompt 2: prompt_token_ids"):
        llm.generate(["a", "b", [10**7]], SHORT)
    with pytest.raises(InvalidRequestError, match=r"^prompt 0: cache_salt"):
        llm.generate(["a", "b"], SHORT, cache_salt="")
    with pytest.raises(InvalidRequestError, match=r"^prompt 1: params"):
        llm.generate(["a", "b"], [SHORT, 5], progress=lambda *_: None)
    assert not llm.engine.has_unfinished


@pytest.mark.parametrize("model", [None, 3, b"x"])
def test_a_model_is_a_path_or_a_name(model: object) -> None:
    with pytest.raises(ConfigError, match="model"):
        LLM(model)
