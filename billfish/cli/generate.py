"""`billfish generate`: continues prompts."""

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from billfish.checkpoint.locate import DEMO_MODEL
from billfish.cli import common
from billfish.cli.ledger import print_ledger
from billfish.sampling_params import SamplingParams

if TYPE_CHECKING:
    from billfish.engine import RequestOutput
    from billfish.llm import LLM


def command(
    prompts: Annotated[list[str], typer.Argument(help="One text or more, served together.")],
    model: common.Model = DEMO_MODEL,
    max_tokens: common.MaxTokens = 128,
    temperature: common.Temperature = 0.0,
    top_p: common.TopP = 1.0,
    top_k: common.TopK = 0,
    seed: common.Seed = None,
    stop: Annotated[list[str] | None, typer.Option(help="Ends the text; repeatable.")] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Treat each prompt as a user's message to answer.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object a prompt, in order.")
    ] = False,
    ledger: Annotated[bool, typer.Option("--ledger", help="Show times and KV use.")] = False,
    dtype: common.Dtype = "bfloat16",
    kv_memory: common.KVMemory = 1.0,
) -> None:
    """Continue one or more prompts. A single one is printed as it is generated."""
    params = SamplingParams(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed,
        stop=tuple(stop or ()),
    )  # fmt: skip
    llm = common.load(model, dtype, kv_memory)
    inputs: list[Any] = [[{"role": "user", "content": p}] for p in prompts] if chat else prompts
    if len(prompts) == 1 and not as_json:
        outputs = [_stream_one(llm, inputs[0], params, chat)]
    else:
        outputs = _run_many(llm, inputs, params, chat)
        for prompt, output in zip(prompts, outputs, strict=True):
            if as_json:
                typer.echo(json.dumps(_as_dict(prompt, output), ensure_ascii=False))
            else:
                typer.secho(f"\n>>> {prompt}", bold=True)
                typer.echo(output.text)
    common.check_answered(outputs)
    if ledger:
        print_ledger(Console(stderr=True), outputs, llm)


def _stream_one(llm: "LLM", prompt: Any, params: SamplingParams, chat: bool) -> "RequestOutput":
    run: Any = llm.stream_chat if chat else llm.stream
    with common.catch_interrupt() as interrupt:
        output = None
        for _, output in run([prompt], params, cancelled=lambda: interrupt.pressed):
            typer.echo(output.delta, nl=False)
    typer.echo()
    if interrupt.pressed or output is None:
        raise KeyboardInterrupt
    return output


def _run_many(
    llm: "LLM", inputs: list[Any], params: SamplingParams, chat: bool
) -> "list[RequestOutput]":
    run: Any = llm.chat if chat else llm.generate
    with common.progress_bar(Console(stderr=True)) as bar:
        task = bar.add_task("Generating", total=len(inputs))
        return run(inputs, params, progress=lambda done, _: bar.update(task, completed=done))


def _as_dict(prompt: str, output: "RequestOutput") -> dict[str, Any]:
    return {
        "prompt": prompt,
        "text": output.text,
        "finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason,
        "prompt_tokens": output.metrics.num_prompt_tokens,
        "output_tokens": output.metrics.num_output_tokens,
    }
