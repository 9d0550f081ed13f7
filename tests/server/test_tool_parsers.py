"""Tool calls are found in text however it is cut, and nothing of it is lost."""

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from billfish.server import call_parser
from billfish.server.call_parser import Arguments, CallStart, Text
from billfish.server.tool_parsers import PARSERS

NAMES = ("f", "get_weather")


def parse(name: str, pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    """Text and calls (name, arguments), after checking that events come in order."""
    parser = PARSERS[name](NAMES)
    events = [event for piece in pieces for event in parser.feed(piece)] + parser.finish()
    text, calls = "", []
    for event in events:
        match event:
            case Text(part):
                text += part
            case CallStart(index, function):
                assert index == len(calls)
                calls.append([function, ""])
            case Arguments(index, part):
                assert index == len(calls) - 1
                calls[index][1] += part
    assert parser.num_calls == len(calls)
    return text, [(function, arguments) for function, arguments in calls]


W = '{"city": "Oslo \\"}]\\u00e9 {", "days": [1, {"x": null}]}'
FOUND = [
    ("hermes", 'Let me see.\n<tool_call>\n{"name": "f", "arguments": ' + W + "}\n</tool_call>",
     "Let me see.", [("f", W)]),
    ("hermes", '<tool_call>{"arguments": {}, "name": "f"}</tool_call>\n<tool_call>{"name":'
     '"get_weather","arguments":{"a":1}}</tool_call>', "",
     [("f", "{}"), ("get_weather", '{"a":1}')]),
    ("hermes", '<tool_call>{"name": "unknown"}</tool_call> Done.', " Done.", [("unknown", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"b\\"}"}</tool_call>', "",
     [("f", '{"a": "b"}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "id": [1], "arguments": {"a"', "", [("f", '{"a"')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}}', "", [("f", '{"a": 1}')]),
    ("hermes", "if a <tool and b < c: <<tool_call", "if a <tool and b < c: <<tool_call", []),
    ("hermes", "<tool_call>{not json}</tool_call>", "<tool_call>{not json}</tool_call>", []),
    ("hermes", '<tool_call>{"name": 5}</tool_call>', '<tool_call>{"name": 5}</tool_call>', []),
    ("hermes", '<tool_call>{"name": "f"', '<tool_call>{"name": "f"', []),
    ("hermes", "", "", []),
    ("hermes", " a \n\n", " a \n\n", []),
    ("llama3_json", '{"name": "f", "parameters": ' + W + "}", "", [("f", W)]),
    ("llama3_json", '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "get_weather", '
     '"parameters": {"a": 1}}', "", [("f", "{}"), ("get_weather", '{"a": 1}')]),
    ("llama3_json", '{"name": "nobody", "parameters": {}}',
     '{"name": "nobody", "parameters": {}}', []),
    ("llama3_json", '{"name": "f"}', '{"name": "f"}', []),
    ("llama3_json", '{"answer": [1, 2]} ', '{"answer": [1, 2]} ', []),
    ("llama3_json", 'Call {"name": "f", "parameters": {}}',
     'Call {"name": "f", "parameters": {}}', []),
    ("llama3_json", "<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
    ("mistral", 'Hm. [TOOL_CALLS] [{"name": "f", "arguments": ' + W + "}]", "Hm.", [("f", W)]),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {}}, {"name": "get_weather", '
     '"arguments": {"a": 1}, "id": "123456789"}]', "", [("f", "{}"), ("get_weather", '{"a": 1}')]),
    ("mistral", "[TOOL_CALLS]f[ARGS]" + W + '[TOOL_CALLS]get_weather{"a": 1}', "",
     [("f", W), ("get_weather", '{"a": 1}')]),
    ("mistral", "a[0] = [TOOL", "a[0] = [TOOL", []),
    ("mistral", "[TOOL_CALLS] nothing\n", "[TOOL_CALLS] nothing\n", []),
    ("mistral", "[TOOL_CALLS][5]", "[TOOL_CALLS][5]", []),
    ("pythonic", "[f(city=\"Oslo ')]\", n=[1, {'x': None}], ok=True), get_weather()]", "",
     [("f", '{"city": "Oslo \')]", "n": [1, {"x": null}], "ok": true}'), ("get_weather", "{}")]),
    ("pythonic", "[1, 2]", "[1, 2]", []),
    ("pythonic", "[nobody()]", "[nobody()]", []),
    ("pythonic", "[f(open('x'))]", "[f(open('x'))]", []),
    ("pythonic", "[f(a=open('x'))]", "[f(a=open('x'))]", []),
    ("pythonic", "I think [f()]", "I think [f()]", []),
]  # fmt: skip


def cuts(text: str, places: list[int]) -> list[str]:
    edges = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[a:b] for a, b in pairwise(edges)]


@pytest.mark.parametrize(("name", "text", "expected", "calls"), FOUND, ids=lambda v: str(v)[:40])
def test_what_is_found(name, text, expected, calls):
    assert parse(name, [text]) == (expected, calls)
    assert parse(name, list(text)) == (expected, calls)


@given(st.sampled_from(FOUND), st.lists(st.integers(0, 10**6), max_size=12))
@settings(max_examples=200)
def test_any_chunking_finds_the_same(case, places):
    name, text, expected, calls = case
    assert parse(name, cuts(text, places)) == (expected, calls)


PIECES = st.sampled_from(
    ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", '{"name": "f"',
     '"name"', '"arguments": {', '"parameters": ', ": ", "{", "}", "[", "]", '"', "\\", ",", ";",
     " ", "\n", "f", "get_weather", "(", ")", "a=1", "'", "<", "null", "5", "🐟"]
)  # fmt: skip


@given(
    st.sampled_from(sorted(PARSERS)),
    st.lists(PIECES, max_size=20).map("".join),
    st.lists(st.integers(0, 10**6), max_size=8),
)
@settings(max_examples=600)
def test_any_text_at_all(name, text, places):
    """Whatever a model writes: no error, the same by any chunking, and what is no call is kept."""
    whole = parse(name, [text])
    assert parse(name, cuts(text, places)) == whole
    assert parse(name, list(text)) == whole
    if not whole[1]:
        assert whole[0] == text


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


@given(
    st.dictionaries(st.text(), JSON, max_size=4),
    st.sampled_from(["hermes", "llama3_json", "mistral", "mistral-new"]),
    st.booleans(),
    st.lists(st.integers(0, 10**6), max_size=10),
)
@settings(max_examples=200)
def test_no_argument_is_lost(arguments, form, ascii_only, places):
    """Arguments of any JSON come through as they were written, character by character."""
    written = json.dumps(arguments, ensure_ascii=ascii_only)
    text = {
        "hermes": f'<tool_call>\n{{"name": "f", "arguments": {written}}}\n</tool_call>',
        "llama3_json": f'{{"name": "f", "parameters": {written}}}',
        "mistral": f'[TOOL_CALLS][{{"name": "f", "arguments": {written}}}]',
        "mistral-new": f"[TOOL_CALLS]f[ARGS]{written}",
    }[form]
    assert parse(form.removesuffix("-new"), cuts(text, places)) == ("", [("f", written)])


@pytest.mark.parametrize("name", ["hermes", "llama3_json", "mistral", "pythonic"])
def test_what_may_be_a_call_is_not_held_back_for_ever(name, monkeypatch):
    monkeypatch.setattr(call_parser, "MAX_CALL_LENGTH", 100)
    opening = {
        "hermes": '<tool_call>{"x": "',
        "llama3_json": '{"x": "',
        "mistral": '[TOOL_CALLS][{"x": "',
        "pythonic": '[f(a="',
    }[name]
    parser = PARSERS[name](NAMES)
    text = opening + "x" * 200
    held = parser.feed(text[:80])
    assert held == []
    assert parser.feed(text[80:]) == [Text(text)]


@pytest.mark.parametrize("name", ["hermes", "llama3_json", "mistral"])
@pytest.mark.parametrize("step", [1, 1000, 10**6])
def test_a_name_that_is_nested_without_end_is_no_call(name, step):
    """Nesting is deeper than Python's own reader of JSON goes."""
    opening = {"hermes": "<tool_call>", "llama3_json": "", "mistral": "[TOOL_CALLS]["}[name]
    text = opening + '{"name": ' + "[" * 20_000 + "]" * 20_000 + "}"
    assert parse(name, cuts(text, list(range(0, len(text), step)))) == (text, [])
