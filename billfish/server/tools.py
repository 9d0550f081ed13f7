"""Tools: how a model is told about them, what it may write, and which parser reads it."""

import json
import re
import secrets
import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from billfish.errors import InvalidRequestError
from billfish.server.schema import ChatRequest, Function, NamedToolChoice
from billfish.server.tool_parsers import PARSERS, ToolParser
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
    otherwise they are described in a system message of ours."""

    name: str
    native: bool

    def parser(self, functions: Sequence[Function]) -> ToolParser:
        return PARSERS[self.name]([function.name for function in functions])

    def new_id(self) -> str:
        if self.name == "mistral":  # its template takes no other length
            return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"


def find_format(template: str | None, name: str | None = None) -> ToolFormat | None:
    """The format that a chat template teaches; name: the one that the server was told instead.

    None: the template takes tools, but in a format that is not known here.
    """
    native = template is not None and re.search(r"\btools\b", template) is not None
    if name is not None:
        return ToolFormat(name, native)
    if template is None or not native:
        return ToolFormat("hermes", native=False)
    if "[TOOL_CALLS]" in template:
        return ToolFormat("mistral", native)
    if "<function=" in template:
        return None
    if "<tool_call>" in template:
        return ToolFormat("hermes", native)
    if "<|python_tag|>" in template or '"parameters"' in template or "ipython" in template:
        return ToolFormat("llama3_json", native)
    return None


def offered(request: ChatRequest) -> list[Function]:
    """The functions that the model may call; none where tool_choice says so."""
    if not request.tools or request.tool_choice == "none":
        return []
    return [tool.function for tool in request.tools]


def constraint(
    request: ChatRequest, form: ToolFormat, answer: dict[str, Any] | None
) -> StructuredOutput | None:
    """What makes the model keep to tool_choice, to strict functions and to `answer`, the schema of
    its text where response_format asks for one. None where it is free."""
    functions = offered(request)
    choice = request.tool_choice
    forced = choice == "required" or isinstance(choice, NamedToolChoice)
    if isinstance(choice, NamedToolChoice):
        functions = [each for each in functions if each.name == choice.function.name]
    if not forced and answer is None and not any(each.strict for each in functions):
        return None
    several = request.parallel_tool_calls is not False and not isinstance(choice, NamedToolChoice)
    calls = _calls(form, functions, several, strict_only=not forced)
    if forced:
        start = "start: calls"
    elif answer is not None:
        start = f"start: calls | answer\nanswer: %json {json.dumps({**answer, **_SPACING})}"
    else:
        start = _FREE_TEXT[form.name]
    return StructuredOutput.grammar(f"%llguidance {{}}\n{start}\n{calls}")


# A lazy terminal ends at the first place where it can: where the mark of a call is complete.
_FREE_TEXT = {
    "hermes": (
        "start: talk* tail\ntail: ANYTHING\nANYTHING: /(.|\\n)*/\n"
        'talk: lead after_mark\nlead[lazy]: ANYTHING "<tool_call>"'
    ),
    "llama3_json": "start: calls | tail\ntail: /([^{\\s](.|\\n)*)?/",
}


def _calls(
    form: ToolFormat, functions: Sequence[Function], several: bool, strict_only: bool
) -> str:
    """Rules of a grammar: `calls`, for hermes also `after_mark`: a call whose mark was written."""
    if form.name not in _LAYOUT:
        raise InvalidRequestError(
            "tool_choice", f"calls in the format {form.name} cannot be enforced; use auto or none"
        )
    layout = _LAYOUT[form.name]
    rules = []
    for number, function in enumerate(functions):
        free = strict_only and not function.strict
        schema = ANY_OBJECT if free else {**ANY_OBJECT, **(function.parameters or {})}
        schema = {**schema, **_SPACING}
        head = _quoted(f'{{"name": "{function.name}", "{layout.key}": ')
        rules.append(f'call_{number}: {head} arguments_{number} "}}"')
        rules.append(f"arguments_{number}: %json {json.dumps(schema)}")
    each = " | ".join(f"call_{number}" for number in range(len(functions)))
    rules.append(f"call: {each}")
    begin, end, between = map(_quoted, (layout.begin, layout.end, layout.between))
    more = f"({between} call)*" if several else ""
    rules.append(f"calls: {begin} call {more} {end}")
    if form.name == "hermes":
        rules.append(f"after_mark: {_quoted(layout.begin.removeprefix('<tool_call>'))} call {end}")
    return "\n".join(rules)


@dataclass(frozen=True, slots=True)
class _Layout:
    """What stands before, after and between calls, and the key of the arguments."""

    begin: str
    between: str
    end: str
    key: str = "arguments"


_LAYOUT = {
    "hermes": _Layout("<tool_call>\n", "\n</tool_call>\n<tool_call>\n", "\n</tool_call>"),
    "llama3_json": _Layout("", "; ", "", "parameters"),
    "mistral": _Layout("[TOOL_CALLS][", ", ", "]"),
}


def _quoted(text: str) -> str:
    return json.dumps(text) if text else ""


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
