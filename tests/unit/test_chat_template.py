"""Chat templates: what they offer, what they may not do, and who may write control tokens."""

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from billfish.errors import CheckpointError, InvalidRequestError
from billfish.tokenizer import from_gguf
from billfish.tokenizer.chat_template import MAX_CONTENT, MAX_MESSAGES, ChatTemplate
from billfish.tokenizer.content_guard import ContentGuard
from billfish.tokenizer.sandbox import MAX_ITEMS
from tests.unit.tokenizer_samples import CONTROL, byte_level, sentencepiece, vocabulary

USER = [{"role": "user", "content": "Hi"}]
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def _render(source: str, messages=USER, prompt=True) -> str:
    template = ChatTemplate(source, "f.gguf", bos_token="<s>", eos_token="</s>")
    return template.render(messages, prompt)


OFFERED = [
    ("{{ bos_token }}{{ eos_token }}{{ add_generation_prompt }}", "<s></s>True"),
    ("  {% if true %}\nx\n  {% endif %}\ny", "x\ny"),  # trim_blocks and lstrip_blocks
    ("{{ messages | tojson }}", '[{"role": "user", "content": "Hi"}]'),
    ("{{ '<é>' | tojson }}{{ {'b': 1, 'a': [2]} | tojson(indent=2) }}",
     '"<é>"{\n  "b": 1,\n  "a": [\n    2\n  ]\n}'),
    ("{{ [1, 2] | tojson(separators=(',', ':')) }}{{ {'b':1,'a':2}|tojson(sort_keys=true) }}",
     '[1,2]{"a": 2, "b": 1}'),
    ("{% for i in range(5) %}{% if i == 1 %}{% continue %}{% endif %}{% if i == 3 %}{% break %}"
     "{% endif %}{{ i }}{% endfor %}", "02"),
    ("{% generation %}a{{ 1 + 1 }}{% endgeneration %}b", "a2b"),
    ("{% set ns = namespace(n=0) %}{% for i in [1, 2, 3] %}{% set ns.n = ns.n + i %}{% endfor %}"
     "{{ ns.n }}{{ ns }}", "6<namespace>"),
    ("{% macro m(x, y='d') %}[{{ x }}{{ y }}]{% endmacro %}{{ m(1) }}{{ m(2, y=3) }}",
     "[1d][23]"),
    ("{% for m in messages[::-1] %}{{ loop.index0 }}{{ loop.first }}{{ loop.last }}"
     "{{ loop.length }}{% endfor %}", "0TrueTrue1"),
    ("{% for k, v in {'a': 1, 'b': 2}.items() %}{{ k }}{{ v }}{% endfor %}", "a1b2"),
    ("{% for a, b in {'y': 1, 'x': 2} | dictsort %}{{ a }}{{ b }}{% endfor %}", "x2y1"),
    ("{{ messages[0].content ~ 1 ~ none ~ missing }}", "Hi1None"),
    ("{{ ' a b '.strip().split(' ')[-1] }}{{ 'x,y'.replace(',', '-') }}{{ '-'.join(['p', 'q']) }}",
     "bx-yp-q"),
    ("{{ 'a-a-a'.replace('a', 'b', 2) }}{{ 'aa'|replace('a', 'b', 1) }}", "b-b-aba"),
    ("{{ ['a', 'b'] | join(', ') }}{{ messages | map(attribute='role') | join }}", "a, buser"),
    ("{{ messages | selectattr('role', 'equalto', 'user') | list | length }}", "1"),
    ("{{ 7 % 4 }}{{ 2 * 3 }}{{ 'ab' * 2 }}{{ 7 // 2 }}", "36abab3"),
    ("{{ strftime_now('%Y') | length }}", "4"),
    ("{% for m in messages %}{{ m.content.replace('H', 'h') }}{{ '-'.join([m.role, 'x']) }}"
     "{% endfor %}", "hiuser-x"),
    ("{% set x %}<{{ 1 }}>{% endset %}{{ x }}{{ x | trim | upper }}", "<1><1>"),
    ("{% for m in messages if m.role == 'none' %}{% else %}empty{% endfor %}", "empty"),
    ("{{ 'x' if messages is defined and tools is none and documents is none }}", "x"),
]  # fmt: skip


@pytest.mark.parametrize(("source", "text"), OFFERED)
def test_what_templates_rely_on(source, text):
    assert _render(source) == text


def test_a_template_that_raises_refuses_the_request():
    with pytest.raises(InvalidRequestError, match="roles must alternate"):
        _render("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InvalidRequestError, match="chat template failed"):
        _render("{{ messages[5].content.upper() }}")


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{% if %}", "line 1"),
        ("a\n{{ 1 +", "line 2"),
        ("{% include 'x' %}", "cannot load others"),
        ("{% extends 'x' %}", "cannot load others"),
        ("{% import 'x' as y %}", "cannot load others"),
        ("{% for i in [[1]] recursive %}{{ loop(i) }}{% endfor %}", "recursive"),
        ("{{ 'x' | center(1000000000) }}", "center"),
        ("{{ '%1000000000d' | format(1) }}", "format"),
        ("{{ 'x' | nonsense }}", "nonsense"),
        ("{{ " + "(" * 50_000 + ")" * 50_000 + " }}", "cannot be compiled"),
        ("{{ " + "9" * 5_000 + " }}", "cannot be compiled"),
        ("x" * 300_000, "300000 characters"),
    ],
)
def test_bad_templates_are_refused_at_load(source, reason):
    with pytest.raises(CheckpointError) as error:
        ChatTemplate(source, "f.gguf")
    assert error.value.file == "f.gguf"
    assert error.value.tensor == "tokenizer.chat_template"
    assert reason in error.value.reason


def _loop(times: int, body: str, before: str = "") -> str:
    return before + "{% for i in range(" + str(times) + ") %}" + body + "{% endfor %}"


def _grow(value: str, before: str = "") -> str:
    """A template that sets x, at first "ab", to `value` sixty times."""
    start = "{% set ns = namespace(x='ab') %}"
    return _loop(60, before + "{% set ns.x = " + value + " %}", start)


_TREE = "{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}"
ENDLESS = {
    "long range": _loop(10**9, ""),
    "nested loops": _loop(99_999, _loop(99_999, "")),
    "range as a list": _loop(999, "{{ range(99999) | list | length }}"),
    "doubling +": _grow("ns.x + ns.x"),
    "doubling ~": _grow("ns.x ~ ns.x"),
    "doubling join": _grow("[ns.x, ns.x] | join"),
    "doubling method": _grow("ns.x.join(['', ns.x, ''])"),
    "replace": _grow("ns.x | replace('', ns.x)"),
    "replace method": _grow("ns.x.replace('', ns.x)"),
    "blocks": _grow("y", "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}"),
    "macro": _grow("m()", "{% macro m() %}{{ ns.x }}{{ ns.x }}{% endmacro %}"),
    "nested lists": _grow("[ns.x, ns.x]"),
    "nested tuples": _grow("(ns.x, ns.x)"),
    "nested objects": _grow("{'a': ns.x, 'b': ns.x}"),
    "nested dict calls": _grow("dict(a=ns.x, b=ns.x)"),
    "views": _grow("d.items()", "{% set d = {'a': ns.x, 'b': ns.x} %}"),
    "repeat": "{{ 'x' * 1000000000 }}",
    "repeat list": "{{ [1] * 1000000000 }}",
    "repeat reversed": "{{ 1000000000 * 'x' }}",
    "power": "{{ 10 ** 1000000000 }}",
    "numbers": _grow("n.x * n.x", "{% set n = namespace(x=3 if ns.x == 'ab' else ns.x) %}"),
    "percent": "{{ '%1000000000d' % 1 }}",
    "indent": "{{ [1] | tojson(indent=1000000000) }}",
    "macro tree": "{% macro m(n) %}" + _TREE + "{% endmacro %}{{ m(60) }}",
    "macro without end": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "output": _loop(100, "{{ x }}", "{% set x = 'x' * 1000000 %}"),
    "many strings": _loop(999, "{% set y = x ~ i %}", "{% set x = 'x' * 9999999 %}"),
    "splitting": _loop(999, "{% set y = x.split() %}", "{% set x = 'x ' * 999999 %}"),
    "searching": _loop(
        99_999, "{% set y = 'b' * 999 ~ 'c' in x %}", "{% set x = 'ab' * 8000000 %}"
    ),
    "slicing": _loop(99_999, "{% set y = x[1:] %}", "{% set x = 'ab' * 8000000 %}"),
    "counting": _loop(99_999, "{% set y = x.count('ba') %}", "{% set x = 'ab' * 8000000 %}"),
    "printing lists": _loop(99_999, "{{ x }}", "{% set x = range(30000) | list %}{% set y %}")
    + "{% endset %}",
    "testing": _loop(99_999, "{% if 'c' is in(x) %}{% endif %}", "{% set x = 'ab' * 8000000 %}"),
    "comparing": _loop(
        99_999,
        "{% if x is eq(y) and x == y %}{% endif %}",
        "{% set x = 'a' * 8000000 %}{% set y = x ~ '' %}",
    ),
}


@pytest.mark.parametrize("name", ENDLESS)
def test_a_template_ends_and_stays_small(name):
    """Each would run for hours or fill the memory; the test's own time limit is the check."""
    with pytest.raises((CheckpointError, InvalidRequestError)) as error:
        _render(ENDLESS[name])
    told = ("rendering: the ", "rendering: maximum recursion", "indent", "Range too big")
    assert any(words in str(error.value) for words in told)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ raise_exception.__globals__ }}",
        "{{ ''.format_map(messages[0]) }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='system') }}",
        "{{ messages[0].pop('role') }}",
        "{{ cycler(1).__init__ }}",
        "{{ (messages | map(attribute='__class__') | list)[0].mro() }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ self._TemplateReference__context.environment }}",
    ],
)
def test_the_sandbox_holds(source):
    messages = [{"role": "user", "content": "Hi"}]
    with contextlib.suppress(CheckpointError, InvalidRequestError):
        assert _render(source, messages) == ""  # undefined, and prints nothing
    assert messages == USER


MALFORMED = [
    ([], "messages"),
    (None, "messages"),
    ("Hi", "messages"),
    ({"role": "user", "content": "Hi"}, "messages"),
    (["Hi"], "messages[0]"),
    ([{"content": "Hi"}], "messages[0].role"),
    ([{"role": "root", "content": "Hi"}], "messages[0].role"),
    ([{"role": ["user"], "content": "Hi"}], "messages[0].role"),
    ([*USER, {"role": "user"}], "messages[1].content"),
    ([*USER, {"role": "user", "content": None}], "messages[1].content"),
    ([*USER, {"role": "user", "content": [{"type": "text"}]}], "messages[1].content"),
    ([*USER, {"role": "user", "content": "\ud83d"}], "messages[1].content"),
    ([{"role": "user", "content": "Hi", "name": "<|im_end|>"}], "messages[0].name"),
    (USER * (MAX_MESSAGES + 1), "messages"),
    ([{"role": "user", "content": "x" * (MAX_CONTENT + 1)}], "messages[0]"),
]


@pytest.mark.parametrize(("messages", "place"), MALFORMED)
def test_messages_are_checked_before_rendering(messages, place):
    tokenizer = from_gguf(byte_level() | {"tokenizer.chat_template": "x"}, "f")
    for call in (tokenizer.render_chat, tokenizer.encode_chat):
        with pytest.raises(InvalidRequestError) as error:
            call(messages)
        assert error.value.parameter == place


def test_a_long_chat_is_within_the_bounds():
    messages = [{"role": "user", "content": "x" * 700}] * MAX_MESSAGES
    assert len(_render(CHATML, messages)) > 700 * MAX_MESSAGES
    assert len(messages) < MAX_ITEMS
    assert len(_render(CHATML, [{"role": "user", "content": "x" * MAX_CONTENT}])) > MAX_CONTENT


def test_without_a_template_chats_are_refused():
    tokenizer = from_gguf(byte_level(), "f")
    assert tokenizer.chat_template is None
    with pytest.raises(InvalidRequestError, match="no chat template"):
        tokenizer.render_chat(USER)


def test_templates_of_real_models_render():
    expected = {
        "qwen2": "<|im_start|>system\nYou are a helpful assistant<|im_end|>\n<|im_start|>user\nHi"
        "<|im_end|>\n<|im_start|>assistant\n",
        "phi-3": "<s><|user|>\nHi<|end|>\n<|assistant|>\n",
        "command-r": "<BOS_TOKEN><|START_OF_TURN_TOKEN|><|USER_TOKEN|>Hi<|END_OF_TURN_TOKEN|>"
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
    }
    for name, text in expected.items():
        tokenizer = from_gguf(*vocabulary(name))
        assert tokenizer.render_chat(USER) == text
        ids = tokenizer.encode_chat(USER)
        assert ids == tokenizer.encode(text, add_special_tokens=False, parse_special=True)


@pytest.mark.parametrize("name", ["gemma-4", "command-r", "qwen2", "phi-3"])
def test_same_text_as_transformers(name):
    """gemma-4's template has 267 lines, most of them macros; its vocabulary is not supported."""
    pytest.importorskip("transformers")
    from transformers.utils.chat_template_utils import render_jinja_template

    source = vocabulary(name)[0]["tokenizer.chat_template"]
    turns = [("user", "Hi"), ("assistant", " Yo\n"), ("user", '<b>&"é🚀 {{ 1 }}')]
    chat = [{"role": role, "content": content} for role, content in turns]
    for messages in (chat[:1], chat, [{"role": "system", "content": "Be brief."}, *chat]):
        for prompt in (True, False):
            expected, _ = render_jinja_template(
                conversations=[messages],
                chat_template=source,
                add_generation_prompt=prompt,
                bos_token="<s>",
                eos_token="</s>",
            )
            assert _render(source, messages, prompt) == expected[0]


def _chat_tokenizer(template: str = CHATML, **keys):
    extra = [("<|im_start|>", CONTROL), ("<|im_end|>", CONTROL), ("<s>", CONTROL)]
    return from_gguf(byte_level(extra, **keys) | {"tokenizer.chat_template": template}, "f")


def test_the_begin_token_stands_once():
    keys = {"bos_token_id": 259, "add_bos_token": True}
    for template in (CHATML, "{{ bos_token }}" + CHATML):
        ids = _chat_tokenizer(template, **keys).encode_chat(USER)
        assert ids[0] == 259
        assert ids.count(259) == 1
    assert 259 not in _chat_tokenizer(bos_token_id=259).encode_chat(USER)


FRAGMENTS = ("<|im_end|>", "<|im_start|>", "<|im_", "end|>", "start|>", "<", "<|", ">", "|>", "|",
             "<|<|im_end|>im_end|>", "\n", " ", "\ufdd0", "\ufdd1", "system\n", "<s", "s>", "x",
             "<s>", "é")  # fmt: skip
TEMPLATES = (
    CHATML,
    "{% for m in messages %}{{ m.content }}{% endfor %}",  # content meets content
    "{% for m in messages %}{{ m.content | trim }}{% endfor %}",
    "{% for m in messages %}{{ m.content }}end|>{% endfor %}",  # content meets half a token
    "{% for m in messages %}<|im_{{ m.content | trim }}{% endfor %}",
    "{% for m in messages %}<|im_start|>{{ m.content.strip() }}\ufdd2<|im_end|>{% endfor %}",
)


@given(
    st.lists(st.lists(st.sampled_from(FRAGMENTS), max_size=8).map("".join), min_size=1, max_size=4),
    st.sampled_from(TEMPLATES),
)
@settings(derandomize=True, max_examples=400, deadline=None)
def test_content_never_makes_a_control_token(contents, template):
    tokenizer = _chat_tokenizer(template)
    messages = [{"role": "user", "content": content} for content in contents]
    ids = tokenizer.encode_chat(messages)
    harmless = tokenizer.encode_chat([{"role": "user", "content": "x"} for _ in contents])
    for control in (257, 258, 259):
        assert ids.count(control) == harmless.count(control)
    assert tokenizer.decode(ids, skip_special_tokens=False) == tokenizer.render_chat(messages)


def test_content_with_every_possible_mark_is_refused():
    content = "".join(map(chr, range(0xFDD0, 0xFDF0)))
    with pytest.raises(InvalidRequestError, match=r"U\+FDD0 to U\+FDEF"):
        _chat_tokenizer().encode_chat([{"role": "user", "content": content}])
    one_left = [{"role": "user", "content": content[1:] + "<|im_end|>"}]
    assert _chat_tokenizer().encode_chat(one_left).count(258) == 1


WITH_TOOLS = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}"
    "{{ m.content }}{% for call in m.tool_calls or [] %}[{{ call.function.name }}"
    "{{ call.function.arguments | tojson }}]{% endfor %}{{ m.tool_call_id }}<|im_end|>{% endfor %}"
)


def _tool_chat(text: str) -> tuple[list[dict], list[dict]]:
    """A chat with a tool, and `text` wherever somebody else's text may stand."""
    call = {"id": text, "function": {"name": text, "arguments": {text: [text, {"x": text}]}}}
    messages = [
        {"role": "user", "content": text},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": text, "tool_call_id": text},
    ]
    schema = {"type": "object", "properties": {text: {"description": text}}}
    function = {"name": text, "description": text, "parameters": schema}
    return messages, [{"type": "function", "function": function}]


@pytest.mark.parametrize("text", ["<|im_end|>", "x<|im_start|>", "<|im_<|im_end|>end|>", "end|>"])
def test_tools_and_calls_never_make_a_control_token(text):
    tokenizer = _chat_tokenizer(WITH_TOOLS)
    messages, tools = _tool_chat(text)
    ids = tokenizer.encode_chat(messages, tools=tools)
    shown = tokenizer.decode(ids, skip_special_tokens=False)
    assert shown.count(text) >= 9  # the model sees all of it, as text
    messages, tools = _tool_chat("x")
    honest = tokenizer.encode_chat(messages, tools=tools)
    for control in (257, 258, 259):
        assert ids.count(control) == honest.count(control)


def test_variables_of_a_template_do_not_replace_the_chat():
    template = ChatTemplate("{{ thinking }}{{ messages[0].content }}{{ tools }}", "f.gguf")
    variables = {"thinking": True, "messages": [], "tools": "x"}
    assert template.render(USER, True, variables=variables) == "TrueHiNone"


BAD_CALLS = [
    ([{"role": "assistant", "content": "", "tool_calls": {}}], "messages[0].tool_calls"),
    ([{"role": "assistant", "content": "", "tool_calls": [{}]}], "messages[0].tool_calls[0]"),
    ([{"role": "user", "content": "", "tool_calls": []}], "messages[0].tool_calls"),
    ([{"role": "assistant", "content": "", "tool_calls": [
        {"function": {"name": "f", "arguments": "{}"}}]}],
     "messages[0].tool_calls[0].function.arguments"),
    ([{"role": "assistant", "content": "", "tool_calls": [
        {"function": {"name": "f", "arguments": {"a": object()}}}]}], "messages[0]"),
]  # fmt: skip


@pytest.mark.parametrize(("messages", "place"), BAD_CALLS)
def test_calls_are_checked_before_rendering(messages, place):
    with pytest.raises(InvalidRequestError) as error:
        _chat_tokenizer(WITH_TOOLS).encode_chat(messages)
    assert error.value.parameter == place


def test_tools_that_are_nested_too_deep_are_refused():
    deep: dict = {}
    for _ in range(100):
        deep = {"a": deep}
    for tools in ([deep], [{"a": {1, 2}}], {"a": 1}):
        with pytest.raises(InvalidRequestError, match=r"^tools"):
            _chat_tokenizer(WITH_TOOLS).encode_chat(USER, tools=tools)


def test_ordinary_content_is_not_touched():
    guard = ContentGuard(["<|im_start|>", "<|im_end|>"])
    messages = [{"role": "user", "content": " a <b> | c\n"}]
    guarded, _, _ = guard.protect(messages, CHATML)
    assert guarded == messages


def test_injection_into_a_sentencepiece_chat():
    pieces = {"▁": 0.0, "a": 0.0}
    metadata = sentencepiece(pieces, [("</s>", CONTROL)], eos_token_id=258, add_bos_token=False)
    template = "{% for m in messages %}{{ m.content + eos_token }}{% endfor %}"
    tokenizer = from_gguf(metadata | {"tokenizer.chat_template": template}, "f")
    ids = tokenizer.encode_chat([{"role": "user", "content": "a</s>a"}])
    assert ids.count(258) == 1
    assert ids[-1] == 258
    assert b"".join(map(tokenizer.token_bytes, ids)) == b" a</s>a"
