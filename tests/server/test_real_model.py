"""The whole way: HTTP, the engine in a process of its own, real and small random models."""

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import httpx
import openai
import pytest

from billfish import LLM, RequestOutput, SamplingParams
from billfish.config import CacheConfig, EngineConfig, SchedulerConfig
from billfish.server.engine_client import EngineClient
from billfish.server.load_tokenizer import load_tokenizer
from billfish.server.messages import Launch
from billfish.server.supervisor import EngineSupervisor
from tests.server.clients import run_client
from tests.server.conftest import openai_client
from tests.server.live import LiveServer, live

CACHE = CacheConfig(num_blocks=512)


def serve(path: Path) -> AbstractContextManager[LiveServer]:
    """float32, so that it gives the very tokens of the offline API."""
    scheduler = SchedulerConfig(max_num_seqs=16)
    config = EngineConfig(model=str(path), dtype="float32", cache=CACHE, scheduler=scheduler)

    def engine() -> EngineClient:
        launch = Launch(config=config, seed=0)
        return EngineClient(EngineSupervisor(launch), lambda: load_tokenizer(str(path)))

    return live(engine, model_names=("served", "alias"))


@contextmanager
def ready(path: Path) -> Iterator[LiveServer]:
    with serve(path) as running:
        running.call(running.engine.wait_ready)
        yield running


@pytest.fixture(scope="module")
def server(tiny_path: Path) -> Iterator[LiveServer]:
    with ready(tiny_path) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai_client(server) as client:
        yield client


@pytest.fixture(scope="module")
def demo(model_path: Path) -> Iterator[openai.OpenAI]:
    """A client of a server of the demo model."""
    with ready(model_path) as running, openai_client(running) as client:
        yield client


@pytest.fixture(scope="module")
def llm(model_path: Path) -> LLM:
    return LLM(str(model_path), dtype="float32", cache=CACHE, seed=0)


QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


def ask(client: openai.OpenAI, **options: object):
    defaults = {"model": "served", "messages": QUESTION, "max_tokens": 12, "temperature": 0}
    return client.chat.completions.create(**{**defaults, **options})


def test_the_answer_of_the_offline_api(demo, llm):
    params = SamplingParams(max_tokens=12, temperature=0.0)
    expected = llm.chat(QUESTION, params)[0]
    answer = ask(demo)
    assert answer.choices[0].message.content == expected.text
    assert answer.usage.completion_tokens == len(expected.token_ids)
    assert answer.usage.prompt_tokens == len(expected.prompt_token_ids)
    streamed = "".join(c.choices[0].delta.content or "" for c in ask(demo, stream=True))
    assert streamed == expected.text
    assert ask(demo, model="alias").choices[0].message.content == expected.text


TEXTS = [
    "The capital of France is Paris, and that of Norway is Oslo.",
    "def add(a, b):\n    return a + b\n",
    "Ünïcödé 🐟 fish.",
]


@pytest.fixture(scope="module")
def scored(llm) -> list[RequestOutput]:
    """TEXTS with the offline log-probabilities of their tokens."""
    return llm.generate(TEXTS, SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1))


@pytest.mark.parametrize("max_tokens", [0, 1])
@pytest.mark.parametrize("as_ids", [False, True])
def test_log_likelihoods_of_the_offline_api(demo, scored, as_ids, max_tokens):
    """What lm-eval's local-completions asks for: several prompts in one request, each echoed with
    the log-probabilities of its tokens, and at most one token more."""
    prompts = [list(each.prompt_token_ids) for each in scored] if as_ids else TEXTS
    answer = demo.completions.create(
        model="served", prompt=prompts, max_tokens=max_tokens, logprobs=1, echo=True,
        temperature=0, seed=1234,
    )  # fmt: skip
    assert answer.usage.completion_tokens == max_tokens * len(TEXTS)
    for choice, output in zip(answer.choices, scored, strict=True):
        known = [each and each.logprob for each in output.prompt_logprobs]
        found = choice.logprobs.token_logprobs
        assert len(choice.logprobs.tokens) == len(found) == len(known) + max_tokens
        assert found[0] is None
        assert found[1 : len(known)] == pytest.approx(known[1:], abs=1e-4)
        best = [each and each.top[0][1] for each in output.prompt_logprobs]
        tops = [top and max(top.values()) for top in choice.logprobs.top_logprobs]
        assert tops[1 : len(known)] == pytest.approx(best[1:], abs=1e-4)


@pytest.mark.parametrize(("batch_size", "num_concurrent"), [(4, 1), (1, 2)])
def test_lm_eval_finds_the_log_likelihoods_of_the_offline_api(
    demo, llm, scored, batch_size, num_concurrent
):
    """lm-eval itself, at places all over the texts."""
    pairs, expected = [], []
    for output in scored:
        ids, known = list(output.prompt_token_ids), output.prompt_logprobs
        for cut in (1, len(ids) // 2, len(ids) - 1):
            pairs.append((ids[:cut], ids[cut:]))
            each = [logprobs for logprobs in known[cut:] if logprobs is not None]
            expected.append((sum(e.logprob for e in each), all(e.rank == 1 for e in each)))
    answer = run_client(
        "lm_eval", str(demo.base_url).removesuffix("/v1/"), model="served", pairs=pairs,
        batch_size=batch_size, num_concurrent=num_concurrent,
    )  # fmt: skip
    found = answer["found"]
    assert [total for total, _ in found] == pytest.approx([e for e, _ in expected], abs=1e-3)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    assert {greedy for _, greedy in expected} == {True, False}


def test_a_continuation_and_its_log_probabilities(demo):
    """max_tokens 1: one more than the prompt, which comes last."""
    answer = demo.completions.create(
        model="served", prompt="The capital of France is", max_tokens=1, logprobs=2, echo=True,
        temperature=0,
    )  # fmt: skip
    choice = answer.choices[0]
    assert choice.text == "The capital of France is Paris"
    assert choice.logprobs.tokens[-1] == " Paris"
    assert choice.logprobs.text_offset[-1] == len("The capital of France is")
    assert all(-9999.0 <= p <= 0.0 for p in choice.logprobs.token_logprobs[1:])


def test_seeds(client):
    options = {"temperature": 1.0, "seed": 5, "n": 3, "max_tokens": 12}
    first, second = (
        [choice.message.content for choice in ask(client, **options).choices] for _ in range(2)
    )
    assert first == second
    assert len(set(first)) == 3
    assert ask(client, **options | {"n": 1}).choices[0].message.content == first[0]
    assert ask(client, **options | {"seed": 6}).choices[0].message.content not in first


def test_options_that_change_the_text(demo):
    assert "Paris" in ask(demo, max_tokens=10).choices[0].message.content
    tokens = demo.post("/../tokenize", body={"prompt": " Paris"}, cast_to=httpx.Response).json()
    bias = {str(token): -100 for token in tokens["tokens"]}
    assert " Paris" not in ask(demo, max_tokens=10, logit_bias=bias).choices[0].message.content
    words = {"bad_words": ["Paris"]}
    banned = ask(demo, max_tokens=10, extra_body=words).choices[0].message.content
    assert "Paris" not in banned


SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "size": {"enum": ["small", "large"]},
    },
    "required": ["city", "size"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("stream", [False, True])
def test_json_of_a_schema(client, stream):
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA}}
    answer = ask(client, response_format=form, max_tokens=200, stream=stream)
    if stream:
        text = "".join(chunk.choices[0].delta.content or "" for chunk in answer)
    else:
        text = answer.choices[0].message.content
    value = json.loads(text)
    assert set(value) == {"city", "size"}
    assert value["size"] in ("small", "large")


def test_other_forms(client):
    choice = ask(client, extra_body={"structured_outputs": {"choice": ["yes", "no"]}})
    assert choice.choices[0].message.content in ("yes", "no")
    regex = ask(client, extra_body={"structured_outputs": {"regex": "[0-9]{3}-[a-c]{2}"}})
    head, _, tail = regex.choices[0].message.content.partition("-")
    assert len(head) == 3
    assert head.isdigit()
    assert set(tail) <= set("abc")
    lark = {"structured_outputs": {"grammar": 'start: "<" /[a-z]{1,5}/ ">"'}}
    text = ask(client, extra_body=lark).choices[0].message.content
    assert text[0] + text[-1] == "<>"
    loose = ask(client, response_format={"type": "json_object"}, max_tokens=40)
    if loose.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(loose.choices[0].message.content), dict)


WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 10}, "unit": {"enum": ["C", "F"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
NUMBERS = {
    "type": "object",
    "properties": {"a": {"$ref": "#/$defs/n"}, "b": {"$ref": "#/$defs/n"}},
    "required": ["a", "b"],
    "additionalProperties": False,
    "$defs": {"n": {"type": "integer", "minimum": 0, "maximum": 99}},
}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "add", "parameters": NUMBERS}},
]


def check_arguments(name: str, arguments: str) -> None:
    value = json.loads(arguments)
    assert set(value) == ({"city", "unit"} if name == "get_weather" else {"a", "b"})


def test_a_tool_that_is_required(client):
    answer = ask(client, tools=TOOLS, tool_choice="required", parallel_tool_calls=False,
                 max_tokens=200)  # fmt: skip
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    (call,) = choice.message.tool_calls
    check_arguments(call.function.name, call.function.arguments)


@pytest.mark.parametrize("stream", [False, True])
def test_calls_that_are_cut_off_leave_no_text(client, stream):
    """However far the answer has come when it reaches its length."""
    options = {"tools": TOOLS, "tool_choice": "required", "stream": stream}
    for most in (1, 13, 30, 70):
        answer = ask(client, max_tokens=most, **options)
        if stream:
            text = "".join(chunk.choices[0].delta.content or "" for chunk in answer)
        else:
            text = answer.choices[0].message.content or ""
        assert text == ""


def test_a_tool_that_is_named_streamed(client):
    named = {"type": "function", "function": {"name": "add"}}
    chunks = list(ask(client, tools=TOOLS, tool_choice=named, max_tokens=200, stream=True))
    parts = [p for c in chunks for p in c.choices[0].delta.tool_calls or ()]
    assert parts[0].function.name == "add"
    check_arguments("add", "".join(part.function.arguments for part in parts))
    assert len(parts) > 5  # they come as they are written
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_tools_that_are_strict_leave_the_choice_free(client):
    strict = [{"type": "function", "function": {**t["function"], "strict": True}} for t in TOOLS]
    choice = ask(client, tools=strict, max_tokens=16).choices[0]
    assert choice.message.content or choice.message.tool_calls


BAD_FORMS = [
    ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a{1000}{1000}{1000}"}}, "structured_outputs"),
    ({"structured_outputs": {"grammar": "start: nobody"}}, "structured_outputs"),
    ({"structured_outputs": {"json": {"type": "nonsense"}}}, "structured_outputs"),
    ({"response_format": {"type": "json_schema", "json_schema": {
        "name": "x", "schema": {"$ref": "http://127.0.0.1/x"}}}}, "response_format"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {
        "properties": {"a": {"type": "x"}}, "required": ["a"]}}}], "tool_choice": "required"},
     "tools"),
]  # fmt: skip


def test_grammars_bad_after_good(server, client):
    """vllm #17623, #43920, #52011: they are refused by name, and nobody else notices."""
    baseline = ask(client).choices[0].message.content
    for change, param in BAD_FORMS:
        with pytest.raises(openai.BadRequestError) as error:
            ask(client, extra_body=change)
        assert error.value.body["param"] == param
    empty = ask(client, extra_body={"structured_outputs": {"json": {}}}, max_tokens=10)
    assert empty.choices[0].message.content
    assert ask(client).choices[0].message.content == baseline
    assert server.http.get("/health").json()["restarts"] == 0


def test_a_hit_in_the_prefix_cache_is_told_and_changes_nothing(client):
    text = "Here is a long story about a fish who learned to read. " * 2
    options = {"messages": [{"role": "user", "content": text}], "max_tokens": 8}
    first, second = ask(client, **options), ask(client, **options)
    assert second.usage.prompt_tokens_details.cached_tokens > 32
    assert first.choices[0].message.content == second.choices[0].message.content


def test_everything_comes_back(server):
    server.wait_idle()
    metrics = server.http.get("/metrics").text
    assert 'billfish:kv_cache_usage_perc{model_name="served"} 0.0' in metrics
    assert "billfish:prefix_cache_hits_total" in metrics
