"""Tools: how a model is told about them, what it may write, and which parser reads it."""

import json
import re
import secrets
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from billfish.errors import InvalidRequestError
from billfish.server.call_parser import ToolParser
from billfish.server.schema import ChatRequest, Function, NamedToolChoice
from billfish.server.tool_parsers import PARSERS
from billfish.structured_output import StructuredOutput

ANY_OBJECT: dict[str, Any] = {"type": "object"}
_SPACING = {"x-guidance": {
    "whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ",
}}  # fmt: skip
"""Of JSON in a grammar: as models have mostly seen it, and with no way to write spaces for ever."""
_ALPHANUMERIC = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a model writes its calls. name: of the parser. native: its chat template takes tools;
    otherwise they are described in a system message of ours. control: those marks of the format
    that are control tokens of the vocabulary, with their ids. by_name: calls are name[ARGS]{...},
    as newer models of Mistral write them, and no list."""

    name: str
    native: bool
    control: Mapping[str, int] = field(default_factory=dict, hash=False)
    by_name: bool = False

    def parser(self, functions: Sequence[Function]) -> ToolParser:
        return PARSERS[self.name]([function.name for function in functions])

    def new_id(self) -> str:
        if self.name == "mistral":  # its template takes no other length
            return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"


def find_format(
    template: str | None, name: str | None = None, control: Mapping[str, int] | None = None
) -> ToolFormat | None:
    """The format that a chat template teaches; name: the one that the server was told instead.
    control: the vocabulary's control tokens.

    None: the template takes tools, but in a format that is not known here.
    """
    native = template is not None and re.search(r"\btools\b", template) is not None
    name = name or _taught_format(template or "", native)
    if name is None:
        return None
    known = control or {}
    marks = {mark: known[mark] for mark in PARSERS[name].marks if mark in known}
    by_name = name == "mistral" and "[ARGS]" in (template or "")
    return ToolFormat(name, native, marks, by_name)


def _taught_format(template: str, native: bool) -> str | None:
    if not native:
        return "hermes"
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<function=" in template:
        return None
    if "<tool_call>" in template:
        return "hermes"
    if "<|python_tag|>" in template or '"parameters"' in template or "ipython" in template:
        return "llama3_json"
    return None


def offered(request: ChatRequest) -> list[Function]:
    """The functions that the model may call; none where tool_choice says so."""
    if not request.tools or request.tool_choice == "none":
        return []
    return [tool.function for tool in request.tools]


def must_call(request: ChatRequest) -> bool:
    """Whether the answer has to be calls."""
    choice = request.tool_choice
    return choice == "required" or isinstance(choice, NamedToolChoice)


def constraint(
    request: ChatRequest, form: ToolFormat, answer: dict[str, Any] | None
) -> StructuredOutput | None:
    """What makes the model keep to tool_choice, to strict functions and to `answer`, the schema of
    its text where response_format asks for one. None where it is free."""
    functions = offered(request)
    choice = request.tool_choice
    forced = must_call(request)
    if isinstance(choice, NamedToolChoice):
        functions = [each for each in functions if each.name == choice.function.name]
    if not forced and answer is None and not any(each.strict for each in functions):
        return None
    several = request.parallel_tool_calls is not False and not isinstance(choice, NamedToolChoice)
    if form.name not in _LAYOUT:
        raise InvalidRequestError(
            "tool_choice" if forced else "tools",
            f"calls in the format {form.name} cannot be enforced: use tool_choice auto or none, "
            "no strict functions and no response_format",
        )
    calls = _calls(form, functions, several, strict_only=not forced)
    if forced:
        start = "start: calls"
    elif answer is not None:
        start = f"start: calls | answer\nanswer: %json {json.dumps({**answer, **_SPACING})}"
    else:
        start = _free_text(form)
    return StructuredOutput.grammar(f"%llguidance {{}}\n{start}\n{calls}")


def _free_text(form: ToolFormat) -> str:
    """Rules of a grammar: text in which calls may be, which keep to their schemas."""
    mark = _LAYOUT[form.name].mark
    if not mark:  # calls are the whole answer, or there is none
        return "start: calls | tail\ntail: /([^{\\s](.|\\n)*)?/"
    if mark in form.control:  # no text can hold it
        lead = f"lead: ANYTHING {_terms(form, mark)}"
    else:  # a lazy terminal ends at the first place where it can: where the mark is complete
        lead = f"lead[lazy]: ANYTHING {_terms(form, mark)}"
    return f"start: talk* tail\ntail: ANYTHING\nANYTHING: /(.|\\n)*/\ntalk: lead after_mark\n{lead}"


def _calls(
    form: ToolFormat, functions: Sequence[Function], several: bool, strict_only: bool
) -> str:
    """Rules of a grammar: `calls`, and `after_mark`: the same from behind the first mark on."""
    layout = _BY_NAME if form.by_name else _LAYOUT[form.name]
    rules = []
    for number, function in enumerate(functions):
        free = strict_only and not function.strict
        schema = ANY_OBJECT if free else {**ANY_OBJECT, **(function.parameters or {})}
        schema = {**schema, **_SPACING}
        head = _terms(form, layout.head.format(name=function.name))
        rules.append(f"call_{number}: {head} arguments_{number} {_terms(form, layout.tail)}")
        rules.append(f"arguments_{number}: %json {json.dumps(schema)}")
    each = " | ".join(f"call_{number}" for number in range(len(functions)))
    rules.append(f"call: {each}")
    more = f"({_terms(form, layout.between)} call)*" if several else ""
    rules.append(f"after_mark: {layout.space} {_terms(form, layout.begin)} call {more} "
                 f"{_terms(form, layout.end)}")  # fmt: skip
    rules.append(f"calls: {_terms(form, layout.mark)} after_mark")
    return "\n".join(rules)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """mark, begin: what stands before all calls, with `space`, a rule of the grammar, in the
    middle; between, end: between and after them; head, tail: around the arguments of each."""

    mark: str = ""
    space: str = ""
    begin: str = ""
    between: str = ""
    end: str = ""
    head: str = '{{"name": "{name}", "arguments": '
    tail: str = "}"


_LAYOUT = {
    "hermes": _Layout(
        mark="<tool_call>",
        begin="\n",
        between="\n</tool_call>\n<tool_call>\n",
        end="\n</tool_call>",
    ),
    "llama3_json": _Layout(between="; ", head='{{"name": "{name}", "parameters": '),
    "mistral": _Layout(mark="[TOOL_CALLS]", space='" "?', begin="[", between=", ", end="]"),
}
_BY_NAME = _Layout(mark="[TOOL_CALLS]", between="[TOOL_CALLS]", head="{name}[ARGS]", tail="")


def _terms(form: ToolFormat, text: str) -> str:
    """`text` in a grammar: its control tokens by id, for no text can stand for them, and its JSON
    token by token, as in an answer that may be chosen instead."""
    marks = "|".join(re.escape(mark) for mark in form.control)
    terms = []
    for part in re.split(f"({marks})", text) if marks else [text]:
        if part in form.control:
            terms.append(f"<[{form.control[part]}]>")
        else:
            pieces = re.findall(r'"[^"]*"|[{,:] ?|[^"{,:]+', part)
            terms += map(json.dumps, pieces)
    return " ".join(terms)


INSTRUCTIONS = """\
You can call functions. Each line between <tools> and </tools> describes one, with a JSON schema \
of its arguments:
<tools>
{tools}
</tools>
To call one, write its name and arguments as JSON, like this:
<tool_call>
{{"name": "the_name", "arguments": {{"argument": "value"}}}}
</tool_call>
Results come back between <tool_response> and </tool_response>. Where no function helps, answer in \
words."""


def template_tools(functions: Sequence[Function]) -> list[dict[str, Any]]:
    """Functions as chat templates expect them."""
    return [
        {
            "type": "function",
            "function": {
                "name": function.name,
                "description": function.description or "",
                "parameters": function.parameters or {**ANY_OBJECT, "properties": {}},
            },
        }
        for function in functions
    ]


def describe(messages: list[dict[str, Any]], functions: Sequence[Function]) -> list[dict[str, Any]]:
    """Messages for a template that knows nothing of tools: all is put into their text."""
    told = [_spelled_out(message) for message in messages]
    if not functions:
        return told
    lines = (json.dumps(each["function"]) for each in template_tools(functions))
    text = INSTRUCTIONS.format(tools="\n".join(lines))
    if told and told[0]["role"] == "system":
        first = {**told[0], "content": f"{told[0]['content']}\n\n{text}"}
        return [first, *told[1:]]
    return [{"role": "system", "content": text}, *told]


def _spelled_out(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        content = f"<tool_response>\n{message['content']}\n</tool_response>"
        return {"role": "user", "content": content}
    calls = message.get("tool_calls") or ()
    parts = [message["content"]] if message["content"] else []
    for call in calls:
        body = json.dumps(call["function"], ensure_ascii=False)
        parts.append(f"<tool_call>\n{body}\n</tool_call>")
    return {"role": message["role"], "content": "\n".join(parts)}
