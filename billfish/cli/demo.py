"""`billfish demo`: the main job, seen at work: a dozen chats served at once."""

from typing import TYPE_CHECKING

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from billfish.checkpoint.locate import DEMO_MODEL
from billfish.cli import common
from billfish.cli.ledger import print_ledger
from billfish.errors import visible
from billfish.sampling_params import SamplingParams

if TYPE_CHECKING:
    from billfish.engine import RequestOutput
    from billfish.llm import LLM

PROMPTS = (
    "What is the capital of Norway, and what is it known for?",
    "Write a haiku about the sea.",
    "Explain in two sentences why the sky is blue.",
    "Give me three tips for learning to cook.",
    "What is 17 + 25?",
    "Tell me a short story about a fish who learned to read.",
    "What does a compiler do?",
    "Translate 'good morning' into French, Spanish and German.",
    "List the planets of the solar system in order.",
    "Why do cats purr?",
    "Write a polite email asking for a day off.",
    "What is the difference between a list and a tuple in Python?",
)


def command(
    model: common.Model = DEMO_MODEL,
    max_tokens: common.MaxTokens = 96,
    dtype: common.Dtype = "bfloat16",
    kv_memory: common.KVMemory = None,
    device: common.Device = "auto",
    quantize: common.Quantize = None,
) -> None:
    """Serve a dozen chat prompts at once and show what it took."""
    console = Console()
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    llm = common.load(model, dtype, kv_memory, device, quantize)
    shape = llm.model_config
    console.print(
        f"{model}: {shape.num_layers} layers, {llm.num_int4_layers} linear layers in INT4, "
        f"activations in {dtype}. {len(PROMPTS)} chats, one batch, paged KV cache.\n"
    )
    outputs = _serve(console, llm, params)
    if console.is_terminal:
        for index, output in enumerate(outputs):
            _print_answer(console, index, output)
    print_ledger(console, outputs, llm)
    common.check_answered(outputs)


def _serve(console: Console, llm: "LLM", params: SamplingParams) -> "list[RequestOutput]":
    """Answers as they come: side by side on a terminal, else each when it is complete."""
    conversations = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    outputs: dict[int, RequestOutput] = {}
    stream = llm.stream_chat(conversations, params)
    if console.is_terminal:
        with Live(
            get_renderable=lambda: _view(outputs, console.width),
            console=console,
            transient=True,
            refresh_per_second=10,
        ):
            outputs.update(stream)
    else:
        for index, output in stream:
            outputs[index] = output
            if output.finished:
                _print_answer(console, index, output)
    return [outputs[index] for index in range(len(PROMPTS))]


def _view(outputs: "dict[int, RequestOutput]", width: int) -> Table:
    """One line a chat: the end of its text, as much as there is room for."""
    table = Table.grid(padding=(0, 1))
    room = max(10, width - 34)
    for index, prompt in enumerate(PROMPTS):
        output = outputs.get(index)
        text = " ".join(output.text.split()) if output else ""
        mark = "[green]done[/]" if output and output.finished else "[yellow]....[/]"
        table.add_row(mark, Text(prompt[:26], style="dim"), Text(visible(text[-room:])))
    return table


def _print_answer(console: Console, index: int, output: "RequestOutput") -> None:
    """With the number that the ledger gives it: answers may come in another order."""
    console.print(Text(f">>> {index + 1}. {PROMPTS[index]}", style="bold"))
    console.print(Text(visible(output.text.strip()) + "\n"))
