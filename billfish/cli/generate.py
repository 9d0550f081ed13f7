"""`billfish generate`: continues prompts."""

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from billfish.checkpoint.locate import DEMO_MODEL
from billfish.cli import common
from billfish.cli.ledger import print_ledger
from billfish.errors import InvalidRequestError
from billfish.sampling_params import SamplingParams

if TYPE_CHECKING:
    from billfish.engine import RequestOutput
    from billfish.llm import LLM
    from billfish.tokenizer import Tokenizer

DEFAULTS = {"temperature": 0.0}


def command(
    prompts: Annotated[list[str], typer.Argument(help="One text or more, served together.")],
    model: common.Model = DEMO_MODEL,
    max_tokens: common.MaxTokens = 128,
    temperature: common.Temperature = None,
    top_p: common.TopP = None,
    top_k: common.TopK = None,
    min_p: common.MinP = None,
    presence_penalty: common.PresencePenalty = 0.0,
    frequency_penalty: common.FrequencyPenalty = 0.0,
    repetition_penalty: common.RepetitionPenalty = 1.0,
    samples: Annotated[
        int, typer.Option("-n", help="Samples of each prompt, printed one after another.")
    ] = 1,
    seed: common.Seed = None,
    min_tokens: Annotated[int, typer.Option(help="Do not end before so many tokens.")] = 0,
    bad_word: Annotated[
        list[str] | None, typer.Option(help="A text that is not generated; repeatable.")
    ] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Ends the text; repeatable.")] = None,
    include_stop: Annotated[
        bool, typer.Option("--include-stop", help="Keep the stop string in the text.")
    ] = False,
    special_tokens: Annotated[
        bool, typer.Option("--special-tokens", help="Show control tokens by their names.")
    ] = False,
    logprobs: Annotated[
        int | None,
        typer.Option(help="With --json: log-probabilities of tokens and so many likeliest ones."),
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Treat each prompt as a user's message to answer.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object a text, in order.")
    ] = False,
    ledger: Annotated[bool, typer.Option("--ledger", help="Show times and KV use.")] = False,
    dtype: common.Dtype = "bfloat16",
    kv_memory: common.KVMemory = None,
    device: common.Device = "auto",
    quantize: common.Quantize = None,
) -> None:
    """Continue one or more prompts. A single text is printed as it is generated."""
    given = {
        "n": samples, "max_tokens": max_tokens, "temperature": temperature, "top_p": top_p,
        "top_k": top_k, "min_p": min_p, "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty, "repetition_penalty": repetition_penalty,
        "seed": seed, "min_tokens": min_tokens, "bad_words": bad_word, "stop": stop,
        "include_stop_str_in_output": include_stop, "skip_special_tokens": not special_tokens,
        "logprobs": logprobs,
    }  # fmt: skip
    if logprobs is not None and not as_json:
        raise InvalidRequestError("logprobs", "are shown with --json only")
    common.sampling(DEFAULTS, given)
    llm = common.load(model, dtype, kv_memory, device, quantize)
    params = common.sampling(DEFAULTS, given, llm)
    inputs: list[Any] = [[{"role": "user", "content": p}] for p in prompts] if chat else prompts
    if len(prompts) == params.n == 1 and not as_json:
        outputs = [_stream_one(llm, inputs[0], params, chat)]
    else:
        outputs = _run_many(llm, inputs, params, chat)
        for number, output in enumerate(outputs):
            prompt = prompts[number // params.n]
            if as_json:
                line = _as_dict(prompt, output, llm.tokenizer)
                typer.echo(json.dumps(line, ensure_ascii=False, allow_nan=False))
            else:
                which = f" [{output.index}]" if params.n > 1 else ""
                typer.secho(f"\n>>> {prompt}{which}", bold=True)
                common.say(output.text, nl=True)
    common.check_answered(outputs)
    if ledger:
        print_ledger(Console(stderr=True), outputs, llm)


def _stream_one(llm: "LLM", prompt: Any, params: SamplingParams, chat: bool) -> "RequestOutput":
    run: Any = llm.stream_chat if chat else llm.stream
    with common.catch_interrupt() as interrupt:
        output = None
        for _, output in run([prompt], params, cancelled=lambda: interrupt.pressed):
            common.say(output.delta)
    typer.echo()
    if interrupt.pressed or output is None:
        raise KeyboardInterrupt
    return output


def _run_many(
    llm: "LLM", inputs: list[Any], params: SamplingParams, chat: bool
) -> "list[RequestOutput]":
    run: Any = llm.chat if chat else llm.generate
    with common.progress_bar(Console(stderr=True)) as bar:
        task = bar.add_task("Generating", total=len(inputs) * params.n)
        return run(inputs, params, progress=lambda done, _: bar.update(task, completed=done))


def _as_dict(prompt: str, output: "RequestOutput", tokenizer: "Tokenizer") -> dict[str, Any]:
    result: dict[str, Any] = {
        "prompt": prompt,
        "index": output.index,
        "text": output.text,
        "finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason,
        "prompt_tokens": output.metrics.num_prompt_tokens,
        "output_tokens": output.metrics.num_output_tokens,
    }

    def token(token_id: int, logprob: float) -> dict[str, Any]:
        text = tokenizer.decode([token_id], skip_special_tokens=False)
        return {"id": token_id, "token": text, "logprob": logprob}

    if output.logprobs is not None:
        result["logprobs"] = [
            {
                **token(each.token_id, each.logprob),
                "rank": each.rank,
                "top": [token(*pair) for pair in each.top],
            }
            for each in output.logprobs
        ]
    return result
