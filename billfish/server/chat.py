"""/v1/chat/completions: messages in, messages out, whole or as they are written."""

from collections.abc import AsyncGenerator
from typing import Any

from billfish.errors import InvalidRequestError
from billfish.sampling_params import SamplingParams
from billfish.server.call_parser import Arguments, CallStart, Event, Text
from billfish.server.generation import Generation, now, sampling_params
from billfish.server.logprobs import LogprobFormatter
from billfish.server.messages import EngineOutput, ModelInfo
from billfish.server.schema import ChatRequest, Function, JsonObjectFormat, JsonSchemaFormat
from billfish.server.streaming import encode, event
from billfish.server.tools import ANY_OBJECT, ToolFormat, constraint, must_call, offered
from billfish.structured_output import StructuredOutput


def renamed(request: ChatRequest) -> dict[str, str]:
    """Fields of the request, by the names of the parameters that are made from them."""
    form = "response_format" if request.response_format is not None else "tools"
    return {
        "structured": "structured_outputs" if request.structured_outputs is not None else form,
        "text": "messages",
        "prompt_token_ids": "messages",
        "logprobs": "top_logprobs",
    }


def sampling(request: ChatRequest, model: ModelInfo, form: ToolFormat | None) -> SamplingParams:
    """InvalidRequestError for what does not go together."""
    marks = form.control.values() if offered(request) and form is not None else ()
    return sampling_params(
        request,
        model.default_sampling,
        max_tokens=request.max_completion_tokens or request.max_tokens,
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        structured=_structure(request, form),
        shown_special_token_ids=sorted(marks),
    )


def _structure(request: ChatRequest, form: ToolFormat | None) -> StructuredOutput | None:
    """What the text must be: of response_format, structured_outputs and tools together."""
    answer: dict[str, Any] | None = None
    match request.response_format:
        case JsonSchemaFormat(json_schema=named):
            answer = named.json_schema
        case JsonObjectFormat():
            answer = ANY_OBJECT
    free = request.structured_outputs
    if answer is not None and free is not None:
        raise InvalidRequestError("structured_outputs", "cannot be combined with response_format")
    if offered(request):
        if form is None:
            raise InvalidRequestError(
                "tools", "the format in which this model calls tools is not supported"
            )
        limit = constraint(request, form, answer)
        if limit is not None and free is not None:
            raise InvalidRequestError(
                "structured_outputs", "cannot be combined with tools that are enforced"
            )
        if limit is not None:
            return limit
    if free is not None:
        return free.form()
    if answer is ANY_OBJECT:
        return StructuredOutput.json_object()
    return None if answer is None else StructuredOutput.json_schema(answer)


class Choice:
    """One sample of a chat, as it is written. `take` gives the deltas of a message; their sum is
    the message, which is how the same answer is the same whether it is streamed or not.

    only_calls: the answer is calls and nothing else. What is no call then is the beginning of one
    for which there was no room, and no text for people.
    """

    def __init__(
        self,
        index: int,
        functions: list[Function],
        form: ToolFormat | None,
        only_calls: bool = False,
    ) -> None:
        self.index = index
        self._only_calls = only_calls
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self._form = form
        self._parser = form.parser(functions) if functions and form is not None else None

    def take(self, output: EngineOutput) -> list[dict[str, Any]]:
        if output.finish_reason is not None:
            self.finish_reason, self.stop_reason = output.finish_reason, output.stop_reason
        if self._parser is None or self._form is None:
            return [{"content": output.text}] if output.text else []
        events = self._parser.feed(output.text)
        if output.finish_reason is not None:
            events += self._parser.finish()
            if self._parser.num_calls and self.finish_reason == "stop":
                self.finish_reason = "tool_calls"
        if self._only_calls:
            events = [each for each in events if not isinstance(each, Text)]
        return [self._delta(each, self._form) for each in events]

    def _delta(self, found: Event, form: ToolFormat) -> dict[str, Any]:
        match found:
            case Text(text):
                return {"content": text}
            case CallStart(index, name):
                function = {"name": name, "arguments": ""}
                call: dict[str, Any] = {"index": index, "id": form.new_id(), "type": "function"}
                return {"tool_calls": [{**call, "function": function}]}
            case Arguments(index, text):
                return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


class ChatReply:
    """The answer to one chat request."""

    def __init__(
        self,
        request: ChatRequest,
        generation: Generation,
        *,
        request_id: str,
        model: str,
        form: ToolFormat | None,
        formatter: LogprobFormatter,
    ) -> None:
        functions = offered(request)
        self._request = request
        self._generation = generation
        self._head = {"id": f"chatcmpl-{request_id}", "created": now(), "model": model}
        self._formatter = formatter
        self._plain = not functions
        forced = must_call(request)
        self._choices = [Choice(i, functions, form, forced) for i in range(request.n or 1)]

    async def whole(self) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        choices = self._choices
        messages: list[dict[str, Any]] = [
            {"role": "assistant", "content": None, "refusal": None} for _ in choices
        ]
        texts: list[list[str]] = [[] for _ in choices]
        asked = bool(self._request.logprobs)
        logprobs = [_content([]) if asked else None for _ in choices]
        async for batch in self._generation.outputs():
            for _, output in batch:
                at = output.index
                for delta in choices[at].take(output):
                    _add(messages[at], texts[at], delta)
                known = logprobs[at]
                if known is not None and output.logprobs is not None:
                    known["content"] += self._formatter.chat(output.logprobs)
        for message, text in zip(messages, texts, strict=True):
            _complete(message, text)
        return {
            **self._head,
            "object": "chat.completion",
            "choices": [
                {
                    "index": choice.index,
                    "message": messages[choice.index],
                    "logprobs": logprobs[choice.index],
                    "finish_reason": choice.finish_reason,
                    "stop_reason": choice.stop_reason,
                }
                for choice in choices
            ],
            "usage": self._generation.usage.body(),
        }

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """The events of an answer that is streamed, all but the last."""
        asked = self._request.stream_options
        with_usage = asked is not None and bool(asked.include_usage)
        tail = {"usage": None} if with_usage else {}
        head = {**self._head, "object": "chat.completion.chunk"}
        fast = self._plain and not self._request.logprobs
        lines = [_Lines(head, choice.index, tail) for choice in self._choices]
        begun = [False] * len(lines)
        async for batch in self._generation.outputs():
            data: list[bytes] = []
            for _, output in batch:
                at = output.index
                line = lines[at]
                if not begun[at]:
                    begun[at] = True
                    data.append(line.event({"role": "assistant", "content": ""}))
                if fast and output.finish_reason is None:
                    if output.text:
                        data += (line.before, encode(output.text), line.after)
                    continue
                data += self._deltas(line, self._choices[at], output)
            yield b"".join(data)
        if with_usage:
            yield event({**head, "choices": [], "usage": self._generation.usage.body()})

    def _deltas(self, line: "_Lines", choice: Choice, output: EngineOutput) -> list[bytes]:
        """Events of one output. Its log-probabilities go with the first; its end is the last."""
        deltas = choice.take(output)
        logprobs = None
        if output.logprobs:
            logprobs = _content(self._formatter.chat(output.logprobs))
            deltas = deltas or [{"content": ""}]
        data = []
        for delta in deltas:
            data.append(line.event(delta, logprobs))
            logprobs = None
        if output.finish_reason is not None:
            data.append(line.event({}, None, choice.finish_reason, choice.stop_reason))
        return data


class _Lines:
    """Events of one choice. before, after: what stands around the text of a plain one, made once:
    that is nearly all events, and they are to cost little."""

    def __init__(self, head: dict[str, Any], index: int, tail: dict[str, Any]) -> None:
        self._head, self._index, self._tail = head, index, tail
        mark = "\ufffd"
        self.before, self.after = self.event({"content": mark}).rsplit(encode(mark), 1)

    def event(
        self,
        delta: dict[str, Any],
        logprobs: dict[str, Any] | None = None,
        finish_reason: str | None = None,
        stop_reason: str | int | None = None,
    ) -> bytes:
        choice: dict[str, Any] = {
            "index": self._index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }
        if finish_reason is not None:
            choice["stop_reason"] = stop_reason
        return event({**self._head, "choices": [choice], **self._tail})


def _add(message: dict[str, Any], text: list[str], delta: dict[str, Any]) -> None:
    if "content" in delta:
        text.append(delta["content"])
    for part in delta.get("tool_calls", ()):
        calls = message.setdefault("tool_calls", [])
        if "id" in part:
            function = {"name": part["function"]["name"], "arguments": []}
            calls.append({"id": part["id"], "type": "function", "function": function})
        else:
            calls[part["index"]]["function"]["arguments"].append(part["function"]["arguments"])


def _complete(message: dict[str, Any], text: list[str]) -> None:
    calls = message.get("tool_calls", ())
    for call in calls:
        call["function"]["arguments"] = "".join(call["function"]["arguments"])
    if text or not calls:
        message["content"] = "".join(text)


def _content(logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"content": logprobs, "refusal": None}
