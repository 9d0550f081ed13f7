"""/v1/completions: prompts in, their continuations out, whole or as they are written."""

from collections.abc import AsyncGenerator, Sequence
from typing import Any

from billfish.errors import InvalidRequestError
from billfish.sampling_params import SamplingParams
from billfish.server.generation import Generation, now, sampling_params
from billfish.server.logprobs import LogprobFormatter, Offsets
from billfish.server.messages import EngineOutput, ModelInfo
from billfish.server.schema import (
    MAX_TOTAL_SAMPLES,
    CompletionRequest,
    JsonObjectFormat,
    JsonSchemaFormat,
)
from billfish.server.streaming import encode, event
from billfish.structured_output import StructuredOutput
from billfish.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 16


def renamed(request: CompletionRequest) -> dict[str, str]:
    """Fields of the request, by the names of the parameters that are made from them."""
    form = "structured_outputs" if request.structured_outputs is not None else "response_format"
    return {"structured": form, "text": "prompt", "prompt_token_ids": "prompt"}


def sampling(request: CompletionRequest, model: ModelInfo) -> SamplingParams:
    """InvalidRequestError for what does not go together."""
    prompt = request.prompt
    several = not isinstance(prompt, str) and not isinstance(prompt[0], int)
    samples = (len(prompt) if several else 1) * (request.n or 1)
    if samples > MAX_TOTAL_SAMPLES:
        raise InvalidRequestError(
            "n", f"{samples} samples of all prompts are asked for; {MAX_TOTAL_SAMPLES} are the most"
        )
    most = DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    return sampling_params(
        request,
        model.default_sampling,
        # Where nothing is to be generated, one token is, and thrown away: the engine has no less.
        max_tokens=most or 1,
        logprobs=request.logprobs,
        prompt_logprobs=request.logprobs if request.echo else None,
        structured=_structure(request),
    )


def _structure(request: CompletionRequest) -> StructuredOutput | None:
    form = request.response_format
    if isinstance(form, JsonSchemaFormat | JsonObjectFormat):
        if request.structured_outputs is not None:
            raise InvalidRequestError(
                "structured_outputs", "cannot be combined with response_format"
            )
        if isinstance(form, JsonObjectFormat):
            return StructuredOutput.json_object()
        return StructuredOutput.json_schema(form.json_schema.json_schema)
    return request.structured_outputs.form() if request.structured_outputs is not None else None


class Choice:
    """One sample of one prompt: what of its text and log-probabilities is to be shown."""

    def __init__(self, index: int, echo: str | None, prompt_ids: Sequence[int], start: Offsets):
        self.index = index
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self._echo = echo
        self._prompt_ids = prompt_ids
        self._offsets = start

    def take(
        self, output: EngineOutput, formatter: LogprobFormatter, nothing: bool
    ) -> tuple[str, dict[str, Any] | None]:
        """New text, and its log-probabilities where asked for. nothing: only the prompt counts."""
        text, logprobs = ("", None) if nothing else (output.text, None)
        ids: list[int] = []
        known: list[Any] = []
        if self._echo is not None:
            text, self._echo = self._echo + text, None
            if output.prompt_logprobs is not None:
                ids += self._prompt_ids
                known += output.prompt_logprobs
        if output.logprobs is not None and not nothing:
            ids += output.token_ids
            known += output.logprobs
        if known or output.logprobs is not None:
            logprobs = formatter.completion(ids, known, self._offsets)
        if output.finish_reason is not None:
            self.finish_reason = "length" if nothing else output.finish_reason
            self.stop_reason = None if nothing else output.stop_reason
        return text, logprobs


class CompletionReply:
    """The answer to one completion request."""

    def __init__(
        self,
        request: CompletionRequest,
        generation: Generation,
        *,
        request_id: str,
        model: str,
        prompts: Sequence[Sequence[int]],
        tokenizer: Tokenizer,
        formatter: LogprobFormatter,
    ) -> None:
        self._request = request
        self._generation = generation
        self._formatter = formatter
        self._nothing = request.max_tokens == 0
        self._head = {
            "id": f"cmpl-{request_id}",
            "object": "text_completion",
            "created": now(),
            "model": model,
        }
        self._n = request.n or 1
        self._choices: list[Choice] = []
        plain, named = tokenizer.token_bytes, tokenizer.named_token_bytes
        output = named if request.skip_special_tokens is False else plain
        for number, ids in enumerate(prompts):
            text = self._text_of_prompt(number)
            prompt = plain if text is not None else output  # a text has no control tokens in it
            echo, echoed = None, 0
            if request.echo:
                echo = self._decode(ids, tokenizer) if text is None else text
                echoed = len(ids)
            for _ in range(self._n):
                offsets = Offsets(prompt, output, echoed)
                self._choices.append(Choice(len(self._choices), echo, ids, offsets))

    def _text_of_prompt(self, number: int) -> str | None:
        """None where it is given as token ids."""
        prompt = self._request.prompt
        each = prompt if isinstance(prompt, str) else prompt[number]
        return each if isinstance(each, str) else None

    def _decode(self, ids: Sequence[int], tokenizer: Tokenizer) -> str:
        skip = self._request.skip_special_tokens is not False
        return tokenizer.decode(ids, skip_special_tokens=skip)

    async def whole(self) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        texts: list[list[str]] = [[] for _ in self._choices]
        logprobs: list[dict[str, list[Any]] | None] = [None for _ in self._choices]
        async for batch in self._generation.outputs():
            for number, output in batch:
                at = number * self._n + output.index
                text, new = self._choices[at].take(output, self._formatter, self._nothing)
                texts[at].append(text)
                if new is not None:
                    logprobs[at] = _joined(logprobs[at], new)
        return {
            **self._head,
            "choices": [
                {
                    "index": choice.index,
                    "text": "".join(texts[choice.index]),
                    "logprobs": logprobs[choice.index],
                    "finish_reason": choice.finish_reason,
                    "stop_reason": choice.stop_reason,
                }
                for choice in self._choices
            ],
            "usage": self._usage(),
        }

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """The events of an answer that is streamed, all but the last."""
        asked = self._request.stream_options
        with_usage = asked is not None and bool(asked.include_usage)
        tail = {"usage": None} if with_usage else {}
        around = [self._around(choice.index, tail) for choice in self._choices]
        fast = self._request.logprobs is None and not self._request.echo and not self._nothing
        async for batch in self._generation.outputs():
            data: list[bytes] = []
            for number, output in batch:
                at = number * self._n + output.index
                if fast and output.finish_reason is None:
                    if output.text:
                        data += (around[at][0], encode(output.text), around[at][1])
                    continue
                choice = self._choices[at]
                text, logprobs = choice.take(output, self._formatter, self._nothing)
                if text or logprobs is not None or choice.finish_reason is not None:
                    data.append(self._event(choice, text, logprobs, tail))
            yield b"".join(data)
        if with_usage:
            yield event({**self._head, "choices": [], "usage": self._usage()})

    def _event(
        self,
        choice: Choice,
        text: str,
        logprobs: dict[str, Any] | None,
        tail: dict[str, Any],
    ) -> bytes:
        body: dict[str, Any] = {
            "index": choice.index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": choice.finish_reason,
        }
        if choice.finish_reason is not None:
            body["stop_reason"] = choice.stop_reason
        return event({**self._head, "choices": [body], **tail})

    def _around(self, index: int, tail: dict[str, Any]) -> tuple[bytes, bytes]:
        """What stands around the text of a plain event, made once."""
        choice = {"index": index, "text": "\ufffd", "logprobs": None, "finish_reason": None}
        whole = event({**self._head, "choices": [choice], **tail})
        before, after = whole.rsplit(encode("\ufffd"), 1)
        return before, after

    def _usage(self) -> dict[str, Any]:
        usage = self._generation.usage
        if self._nothing:
            usage.completion_tokens = 0
        return usage.body()


def _joined(before: dict[str, list[Any]] | None, new: dict[str, list[Any]]) -> dict[str, list[Any]]:
    if before is None:
        return new
    for name, values in new.items():
        before[name] += values
    return before
