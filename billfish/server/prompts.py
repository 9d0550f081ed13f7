"""From what a request holds to the token ids that the engine gets."""

from collections.abc import Sequence
from typing import Any

from pydantic_core import from_json

from billfish.errors import CapacityError, InvalidRequestError
from billfish.server.engine_client import EngineClient
from billfish.server.schema import (
    AssistantMessage,
    ChatTemplateArguments,
    CompletionRequest,
    Content,
    Function,
    Message,
    ToolCall,
    ToolMessage,
)
from billfish.server.tools import ToolFormat, describe, template_tools


async def encode_text(
    engine: EngineClient, text: str, add_special_tokens: bool | None = None
) -> list[int]:
    """Token ids of a text, off the event loop. CapacityError at once for one that cannot fit."""
    _check_length(engine, len(text))
    add = add_special_tokens is not False
    return await engine.run(
        len(text), lambda: engine.tokenizer.encode(text, add_special_tokens=add)
    )


async def encode_chat(
    engine: EngineClient,
    messages: Sequence[Message],
    functions: Sequence[Function],
    form: ToolFormat | None,
    arguments: ChatTemplateArguments | None,
    add_generation_prompt: bool | None,
) -> list[int]:
    """Token ids of a chat, off the event loop."""
    size = sum(map(_size, messages))
    _check_length(engine, size)
    variables = {} if arguments is None else arguments.model_dump(exclude_none=True)
    source = engine.tokenizer.chat_template or ""
    for name in variables:
        if name not in source:
            raise InvalidRequestError(
                f"chat_template_kwargs.{name}", "is unknown to the model's chat template"
            )

    def encode() -> list[int]:
        plain = [_plain(message, f"messages[{i}]") for i, message in enumerate(messages)]
        tools = None
        if form is None or form.native:
            tools = template_tools(functions) or None
        else:
            plain = describe(plain, functions)
        return engine.tokenizer.encode_chat(
            plain,
            add_generation_prompt=add_generation_prompt is not False,
            tools=tools,
            variables=variables,
        )

    calls = [call for message in messages for call in _calls(message)]
    return await engine.run(size + sum(len(call.function.arguments) for call in calls), encode)


async def encode_prompts(engine: EngineClient, request: CompletionRequest) -> list[list[int]]:
    """Token ids of each prompt of a completion."""
    prompt = request.prompt
    if isinstance(prompt, str):
        return [await encode_text(engine, prompt, request.add_special_tokens)]
    found = []
    if isinstance(prompt[0], int):
        prompt = [prompt]
    for each in prompt:
        if isinstance(each, str):
            found.append(await encode_text(engine, each, request.add_special_tokens))
        else:
            _check_length(engine, len(each), 1)
            found.append(each)
    return found


def _check_length(engine: EngineClient, length: int, longest_token: int | None = None) -> None:
    """Refuse at once what cannot fit, however its tokens are cut. length: in characters, or in
    tokens, each of length 1."""
    longest = engine.model.max_model_len
    most = longest * (longest_token or engine.tokenizer.max_token_bytes)
    if length > most:
        unit = "characters" if longest_token is None else "tokens"
        raise CapacityError(
            f"the prompt has {length} {unit}, and max_model_len is {longest} tokens, in which at "
            f"most {most} {unit} could fit"
        )


def _plain(message: Message, place: str) -> dict[str, Any]:
    """A message as chat templates expect it."""
    role = "system" if message.role == "developer" else message.role
    plain: dict[str, Any] = {"role": role, "content": _text(message.content)}
    if isinstance(message, ToolMessage):
        plain["tool_call_id"] = message.tool_call_id
    if calls := _calls(message):
        plain["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.function.name,
                    "arguments": _arguments(
                        call.function.arguments, f"{place}.tool_calls[{i}].function.arguments"
                    ),
                },
            }
            for i, call in enumerate(calls)
        ]
    return plain


def _size(message: Message) -> int:
    """Characters of its content."""
    content = message.content or ""
    return len(content) if isinstance(content, str) else sum(len(part.text) for part in content)


def _calls(message: Message) -> Sequence[ToolCall]:
    return (isinstance(message, AssistantMessage) and message.tool_calls) or ()


def _text(content: Content | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part.text for part in content)


def _arguments(text: str, place: str) -> dict[str, Any]:
    """Templates want the object, not the text of it."""
    try:
        value = from_json(text, allow_inf_nan=False)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise InvalidRequestError(place, "must be a JSON object, written as a string")
    return value
