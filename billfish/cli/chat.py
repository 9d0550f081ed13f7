"""`billfish chat`: a conversation in the terminal."""

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from billfish.checkpoint.locate import DEMO_MODEL
from billfish.cli import common
from billfish.errors import BillfishError
from billfish.sampling_params import SamplingParams

if TYPE_CHECKING:
    from billfish.llm import LLM

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
) -> None:
    """Talk to a model. Ctrl-C stops the answer, not the program."""
    given = {
        "max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "top_k": top_k,
        "min_p": min_p, "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty, "repetition_penalty": repetition_penalty,
        "seed": seed,
    }  # fmt: skip
    common.sampling(DEFAULTS, given)
    llm = common.load(model, dtype, kv_memory, device, quantize)
    llm.tokenizer.encode_chat(
        [{"role": "user", "content": "?"}]
    )  # a model that cannot chat says so
    params = common.sampling(DEFAULTS, given, llm)
    console = Console()
    console.print(HELP, style="dim")
    opening = [{"role": "system", "content": system}] if system is not None else []
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
            answer = _answer(llm, messages, params)
        except BillfishError as error:
            messages.pop()
            console.print(f"error: {error}\n{HELP}", style="red", markup=False)
            continue
        messages.append({"role": "assistant", "content": answer})


def _read(console: Console) -> str | None:
    """A line from the user, "" after Ctrl-C, None at the end of input."""
    try:
        return input("\n> ").strip()
    except KeyboardInterrupt:
        console.print(f"\n{HELP}", style="dim")
        return ""
    except (EOFError, RuntimeError):  # the end of input, or there never was any
        return None


def _answer(llm: "LLM", messages: list[dict[str, str]], params: SamplingParams) -> str:
    """Prints the answer as it comes and returns it, or as much as there was before Ctrl-C."""
    prompt = llm.tokenizer.encode_chat(messages)
    room = llm.max_model_len - len(prompt)
    if params.max_tokens is not None and 0 < room < params.max_tokens:
        params = replace(params, max_tokens=room)
    output = None
    with common.catch_interrupt() as interrupt:
        for _, output in llm.stream([prompt], params, cancelled=lambda: interrupt.pressed):
            typer.echo(output.delta, nl=False)
        if interrupt.pressed:
            typer.secho(" [stopped]", dim=True, nl=False)
    typer.echo()
    if output is None:
        return ""
    if output.finish_reason == "error":
        raise BillfishError(f"no answer: {output.stop_reason}")
    return output.text
