"""Control tokens in the text, where a request asks for them, and tool calls that begin with one."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from billfish.server.fake_engine import EOS, SPOKEN, FakeEngine, byte_tokenizer
from billfish.server.schema import ChatRequest
from billfish.server.tools import ToolFormat, constraint, find_format
from billfish.worker.grammar import GrammarCompiler
from tests.e2e import tiny_gguf
from tests.server.conftest import chat
from tests.server.live import LiveServer, live
from tests.server.test_real_model import NUMBERS, TOOLS, check_arguments, ready
from tests.server.test_streams_and_wholes import MARK, both, echo, message

INTEGER = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}


def tools(strict: bool | None = None) -> list[dict]:
    return [
        {"type": "function", "function": {"name": name, "parameters": INTEGER, "strict": strict}}
        for name in ("f", "g")
    ]


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live(lambda: FakeEngine(echo), tool_call_parser="mistral") as running:
        yield running


@pytest.fixture(scope="module")
def http(server: LiveServer) -> httpx.Client:
    return server.http


def complete(http: httpx.Client, text: str, **options: object) -> dict:
    body = {"model": "fake", "prompt": MARK + text, "max_tokens": 99, **options}
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


class TestText:
    def test_they_are_left_out_unless_asked_for(self, http):
        text = "one [ARGS]two🐟[TOOL_CALLS]"
        assert complete(http, text)["text"] == "one two🐟"
        assert complete(http, text, skip_special_tokens=True)["text"] == "one two🐟"
        assert complete(http, text, skip_special_tokens=False)["text"] == text

    def test_stop_strings_find_them_where_they_show(self, http):
        text = "one [ARGS]two"
        assert complete(http, text, skip_special_tokens=False, stop="[ARGS]")["text"] == "one "
        assert complete(http, text, stop="[ARGS]")["text"] == "one two"

    @pytest.mark.parametrize("skip", [True, False])
    def test_offsets_are_those_of_the_text(self, http, skip):
        found = complete(http, "é[ARGS]x", logprobs=0, echo=True, skip_special_tokens=skip)
        places = dict(
            zip(found["logprobs"]["text_offset"], found["logprobs"]["tokens"], strict=True)
        )
        assert found["text"][max(places) :] in ("x", "")  # the end token has no text
        for place, token in places.items():
            if token == "x":
                assert found["text"][place] == "x"

    def test_a_prompt_of_token_ids_is_told_with_them(self, http):
        ids = [*b"a", EOS, *b"b"]
        for skip, text in ((True, "ab"), (False, "a<|im_end|>b")):
            body = {"model": "fake", "prompt": ids, "max_tokens": 0, "echo": True, "logprobs": 0}
            answer = http.post("/v1/completions", json={**body, "skip_special_tokens": skip})
            (choice,) = answer.json()["choices"]
            assert choice["text"] == text
            assert choice["logprobs"]["text_offset"][-1] == text.index("b")


LISTED = '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {"a": 2}}]'
BY_NAME = '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{"a": 2}'
PIECES = [LISTED, BY_NAME, "[ARGS]", "[TOOL_CALLS]", "a", "🐟", "[", "{"]


class TestCalls:
    @pytest.mark.parametrize("lead", ["", "Let me see. "])
    @pytest.mark.parametrize("text", [LISTED, BY_NAME])
    @pytest.mark.parametrize("skip", [None, False])
    def test_streamed_and_whole(self, http, text, lead, skip):
        asked = {"tools": tools(), "skip_special_tokens": skip}
        whole, chunks = both(http, chat(MARK + lead + text, **asked))
        (choice,) = whole["choices"]
        calls = [each["function"] for each in choice["message"]["tool_calls"]]
        assert [(each["name"], json.loads(each["arguments"])) for each in calls] == [
            ("f", {"a": 1}), ("g", {"a": 2}),
        ]  # fmt: skip
        assert choice["message"]["content"] == (lead.strip() or None)
        assert choice["finish_reason"] == "tool_calls"
        assert all(len(call["id"]) == 9 for call in choice["message"]["tool_calls"])
        streamed = message(chunks)
        assert (streamed["content"] or "") == lead.strip()
        assert [(each["name"], each["arguments"]) for each in streamed["tool_calls"]] == [
            (each["name"], each["arguments"]) for each in calls
        ]

    @given(st.lists(st.sampled_from(PIECES), max_size=5), st.integers(1, 200))
    @settings(derandomize=True, max_examples=30, deadline=None)
    def test_whatever_is_written(self, http, parts, most):
        whole, chunks = both(http, chat(MARK + "".join(parts), tools=tools(), max_tokens=most))
        (choice,) = whole["choices"]
        streamed = message(chunks)
        assert (streamed["content"] or "") == (choice["message"]["content"] or "")
        assert [(each["name"], each["arguments"]) for each in streamed.get("tool_calls", ())] == [
            (each["function"]["name"], each["function"]["arguments"])
            for each in choice["message"].get("tool_calls", ())
        ]

    def test_without_tools_the_mark_does_not_show(self, http):
        for more in ({}, {"tools": tools(), "tool_choice": "none"}):
            whole, _ = both(http, chat(MARK + "Hm. " + BY_NAME, **more))
            assert whole["choices"][0]["message"]["content"] == 'Hm. f{"a": 1}g{"a": 2}'


HERMES = (
    '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n'
    '<tool_call>\n{"name": "g", "arguments": {"a": 2}}\n</tool_call>'
)
CALLS = {
    ("tools [TOOL_CALLS]", ()): LISTED,
    ("tools [TOOL_CALLS]", ("[TOOL_CALLS]",)): LISTED,
    ("tools [TOOL_CALLS] [ARGS]", ()): BY_NAME,
    ("tools [TOOL_CALLS] [ARGS]", SPOKEN): BY_NAME,
    ("tools ipython", ()): '{"name": "f", "parameters": {"a": 1}}; '
    '{"name": "g", "parameters": {"a": 2}}',
    ("tools <tool_call>", ()): HERMES,
    ("tools <tool_call>", ("<tool_call>", "</tool_call>")): HERMES,
}


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(byte_tokenizer())


@pytest.fixture(params=CALLS, ids=lambda case: f"{case[0]}-{len(case[1])}")
def form(request) -> tuple[ToolFormat, str]:
    template, control = request.param
    ids = (byte_tokenizer().vocabulary.control[name] for name in SPOKEN)
    found = find_format(template, control=dict(zip(control, ids, strict=False)))
    assert found is not None
    assert set(found.control) == set(control)
    return found, CALLS[request.param]


def spell(form: ToolFormat, text: str) -> list[int]:
    """The tokens of `text`, its marks as the format has them."""
    parts = re.split("|".join(f"({re.escape(mark)})" for mark in form.control), text)
    parts = parts if form.control else [text]
    return [
        token
        for part in filter(None, parts)
        for token in ([form.control[part]] if part in form.control else part.encode())
    ]


class TestGrammars:
    """What the model is held to, in every format that can be enforced."""

    def holds(self, compiler, form, text, answer=None, strict=None, **options) -> bool:
        body = ChatRequest.model_validate(chat(tools=tools(strict), **options))
        grammar = constraint(body, form, answer)
        assert grammar is not None
        state = compiler.start(grammar, (EOS,), spell(form, text))
        return state.failure is None and state.matcher.is_accepting()

    def test_required(self, compiler, form):
        form, text = form
        for options in ({"tool_choice": "required"}, {"tool_choice": "required", "strict": True}):
            assert self.holds(compiler, form, text, **options)
            assert not self.holds(compiler, form, "Hello", **options)
            assert not self.holds(compiler, form, f"Hello {text}", **options)
            assert not self.holds(compiler, form, text.replace("2", "null"), **options)
            assert not self.holds(compiler, form, text.replace("g", "h"), **options)
        single = {"tool_choice": "required", "parallel_tool_calls": False}
        assert not self.holds(compiler, form, text, **single)

    def test_named(self, compiler, form):
        form, text = form
        named = {"tool_choice": {"type": "function", "function": {"name": "f"}}}
        first = {"mistral": r"\[TOOL_CALLS\] \[.*?\}\}", "llama3_json": r".*?\}\}",
                 "hermes": r".*?</tool_call>"}[form.name]  # fmt: skip
        first = r"\[TOOL_CALLS\]f.*?\}" if form.by_name else first
        one = re.match(first, text, re.DOTALL).group()
        one += "]" if form.name == "mistral" and not form.by_name else ""
        assert self.holds(compiler, form, one, **named)
        assert not self.holds(compiler, form, text, **named)

    def test_strict_functions_leave_the_choice_free(self, compiler, form):
        form, text = form
        assert self.holds(compiler, form, text, strict=True)
        assert self.holds(compiler, form, "Hello [you]\n", strict=True)
        assert self.holds(compiler, form, "", strict=True)
        assert not self.holds(compiler, form, text.replace("1", "null"), strict=True)
        if form.name != "llama3_json":  # there a call is the whole answer
            assert self.holds(compiler, form, f"Hello [you]\n{text}", strict=True)

    def test_calls_or_an_answer_of_a_form(self, compiler, form):
        form, text = form
        assert self.holds(compiler, form, text, answer=INTEGER)
        assert self.holds(compiler, form, '{"a": 5}', answer=INTEGER)
        assert not self.holds(compiler, form, "Hello", answer=INTEGER)


@pytest.fixture(scope="module", params=["listed", "by name"])
def real(request, tmp_path_factory) -> Iterator[httpx.Client]:
    """A model of random weights whose vocabulary has the marks as control tokens."""
    path: Path = tmp_path_factory.mktemp("mistral") / "tiny.gguf"
    marks = "[TOOL_CALLS]" if request.param == "listed" else "[TOOL_CALLS][ARGS]"
    template = f"{{% if tools %}}{marks}{{% endif %}}" + tiny_gguf.TEMPLATE
    tiny_gguf.write(path, template=template, more_control=SPOKEN)
    with ready(path) as running:
        yield running.http


class TestTheWholeWay:
    def body(self, **options: object) -> dict:
        return chat(tools=TOOLS, temperature=0, max_tokens=200, **options) | {"model": "served"}

    def test_required(self, real):
        whole, chunks = both(real, self.body(tool_choice="required", parallel_tool_calls=False))
        (choice,) = whole["choices"]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] is None
        (call,) = choice["message"]["tool_calls"]
        check_arguments(**call["function"])
        (streamed,) = message(chunks)["tool_calls"]
        assert (streamed["name"], streamed["arguments"]) == tuple(call["function"].values())

    def test_named(self, real):
        named = {"type": "function", "function": {"name": "add"}}
        whole, chunks = both(real, self.body(tool_choice=named))
        (call,) = whole["choices"][0]["message"]["tool_calls"]
        assert call["function"]["name"] == "add"
        assert set(json.loads(call["function"]["arguments"])) == set(NUMBERS["required"])
        (streamed,) = message(chunks)["tool_calls"]
        assert streamed["arguments"] == call["function"]["arguments"]

    def test_strict(self, real):
        strict = [{**t, "function": {**t["function"], "strict": True}} for t in TOOLS]
        body = {**self.body(), "tools": strict, "max_tokens": 12}
        assert real.post("/v1/chat/completions", json=body).status_code == 200
