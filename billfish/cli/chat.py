"""`billfish chat`: a conversation in the terminal."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from billfish.checkpoint.locate import DEMO_MODEL
from billfish.cli import common
from billfish.errors import BillfishError
from billfish.sampling_params import SamplingParams

if TYPE_CHECKING:
    from billfish.llm import LLM

Message = dict[str, str]
Answer = Callable[[list[Message]], str]
"""Prints the answer to these messages as it comes, and returns it."""

DEFAULTS = {"temperature": 0.2, "top_p": 0.9}
HELP = "/reset starts anew, /exit or Ctrl-D leaves, Ctrl-C stops an answer."


def command(
    model: common.Model = DEMO_MODEL,
    system: Annotated[str | None, typer.Option(help="A system message.")] = None,
    max_tokens: common.MaxTokens = 512,
    temperature: common.Temperature = None,
    top_p: common.TopP = None,
    top_k: common.TopK = None,
    min_p: common.MinP = None,
    presence_penalty: common.PresencePenalty = 0.0,
    frequency_penalty: common.FrequencyPenalty = 0.0,
    repetition_penalty: common.RepetitionPenalty = 1.0,
    seed: common.Seed = None,
    dtype: common.Dtype = "bfloat16",
    kv_memory: common.KVMemory = None,
    device: common.Device = "auto",
    quantize: common.Quantize = None,
    url: Annotated[
        str | None,
        typer.Option(
            help="A running OpenAI-compatible server to talk to, instead of loading a model here. "
            "--model is then its name there."
        ),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            show_default=False,
            help="What the server wants. Better in BILLFISH_API_KEY: others on this machine can "
            "see the command line.",
        ),
    ] = None,
) -> None:
    """Talk to a model, here or on a running server. Ctrl-C stops the answer, not the program."""
    given = {
        "max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "top_k": top_k,
        "min_p": min_p, "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty, "repetition_penalty": repetition_penalty,
        "seed": seed,
    }  # fmt: skip
    common.sampling(DEFAULTS, given)
    if url is None:
        answer = _local(common.load(model, dtype, kv_memory, device, quantize), given)
    else:
        answer = _remote(url, api_key, None if model == DEMO_MODEL else model, given)
    opening = [{"role": "system", "content": system}] if system is not None else []
    _talk(Console(), opening, answer)


def _talk(console: Console, opening: list[Message], answer: Answer) -> None:
    console.print(HELP, style="dim")
    messages = list(opening)
    while (text := _read(console)) is not None:
        if text == "/exit":
            return
        if text == "/reset":
            messages = list(opening)
            continue
        if not text:
            continue
        messages.append({"role": "user", "content": text})
        try:
            said = answer(messages)
        except BillfishError as error:
            messages.pop()
            console.print(f"error: {error}\n{HELP}", style="red", markup=False)
            continue
        messages.append({"role": "assistant", "content": said})


def _read(console: Console) -> str | None:
    """A line from the user, "" after Ctrl-C, None at the end of input."""
    try:
        return input("\n> ").strip()
    except KeyboardInterrupt:
        console.print(f"\n{HELP}", style="dim")
        return ""
    except (EOFError, RuntimeError):  # the end of input, or there never was any
        return None


def _local(llm: "LLM", given: dict[str, Any]) -> Answer:
    """Answers of a model in this process."""
    question = [{"role": "user", "content": "?"}]
    llm.tokenizer.encode_chat(question)  # a model that cannot chat says so
    params = common.sampling(DEFAULTS, given, llm)
    return lambda messages: _answer(llm, messages, params)


def _remote(url: str, api_key: str | None, model: str | None, given: dict[str, Any]) -> Answer:
    """Answers of a server. Options that are not given are left to it."""
    from billfish.client import Client, Piece

    neutral = {
        "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0,
    }  # fmt: skip
    options = {
        name: value
        for name, value in given.items()
        if value is not None and neutral.get(name) != value
    }

    async def name() -> str:
        async with Client(url, api_key) as client:
            return model or await client.first_model()

    served = asyncio.run(name())  # whether a server is there is told at once

    async def stream(messages: list[Message], said: list[str]) -> None:
        body = {"model": served, "messages": messages, "stream": True, **options}
        async with Client(url, api_key) as client:
            async for event in client.stream("/v1/chat/completions", body):
                if isinstance(event, Piece):
                    said.append(event.text)
                    common.say(event.text)

    def answer(messages: list[Message]) -> str:
        said: list[str] = []
        try:
            asyncio.run(stream(messages, said))
        except KeyboardInterrupt:
            typer.secho(" [stopped]", dim=True, nl=False)
        finally:
            typer.echo()
        return "".join(said)

    return answer


def _answer(llm: "LLM", messages: list[Message], params: SamplingParams) -> str:
    """Prints the answer as it comes and returns it, or as much as there was before Ctrl-C."""
    prompt = llm.tokenizer.encode_chat(messages)
    room = llm.max_model_len - len(prompt)
    if params.max_tokens is not None and 0 < room < params.max_tokens:
        params = replace(params, max_tokens=room)
    output = None
    with common.catch_interrupt() as interrupt:
        for _, output in llm.stream([prompt], params, cancelled=lambda: interrupt.pressed):
            common.say(output.delta)
        if interrupt.pressed:
            typer.secho(" [stopped]", dim=True, nl=False)
    typer.echo()
    if output is None:
        return ""
    if output.finish_reason == "error":
        raise BillfishError(f"no answer: {output.stop_reason}")
    return output.text
