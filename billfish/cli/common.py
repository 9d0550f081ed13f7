"""What several commands share: the options of a model and of sampling, and its loading."""

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from billfish.errors import BillfishError

if TYPE_CHECKING:
    from billfish.engine import RequestOutput
    from billfish.llm import LLM

Model = Annotated[
    str,
    typer.Option("--model", "-m", help='Path of a .gguf file, or "smollm2" for the demo model.'),
]
Dtype = Annotated[
    str, typer.Option(help="Of activations and KV cache: bfloat16, float32 or float16.")
]
MaxTokens = Annotated[int, typer.Option(help="Most tokens to generate for a prompt.")]
Temperature = Annotated[float, typer.Option(help="0 takes the most likely token each time.")]
TopP = Annotated[float, typer.Option(help="Sample from the smallest set with this probability.")]
TopK = Annotated[int, typer.Option(help="Sample from this many most likely tokens; 0: all.")]
Seed = Annotated[int | None, typer.Option(help="Makes sampling repeatable.")]
# Bounds that NaN and infinity fail too.
KVMemory = Annotated[
    float, typer.Option("--kv-memory", min=1e-9, max=2**20, help="GiB for the KV cache.")
]


def progress_bar(console: Console) -> Progress:
    """A bar that says what is done, how much of it, and for how long."""
    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        console=console, transient=True,
    )  # fmt: skip


def load(model: str, dtype: str, kv_memory: float) -> "LLM":
    """Loads the model, with a progress bar on standard error. kv_memory: GiB."""
    from billfish.config import CacheConfig
    from billfish.llm import LLM

    with progress_bar(Console(stderr=True)) as bar:
        task = bar.add_task(f"Loading {model}", total=None)
        return LLM(
            model,
            dtype=dtype,
            cache=CacheConfig(memory_bytes=int(kv_memory * 2**30)),
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )


def check_answered(outputs: "Sequence[RequestOutput]") -> None:
    """BillfishError if any request ended without an answer."""
    for number, output in enumerate(outputs, 1):
        if output.finish_reason == "error":
            raise BillfishError(f"prompt {number} got no answer: {output.stop_reason}")


@dataclass
class Interrupt:
    """Whether Ctrl-C was pressed."""

    pressed: bool = False


@contextmanager
def catch_interrupt() -> Iterator[Interrupt]:
    """Inside, Ctrl-C sets `pressed` and no more, so that no step of the engine is torn apart."""
    interrupt = Interrupt()

    def handle(_signal: int, _frame: FrameType | None) -> None:
        interrupt.pressed = True

    previous = signal.signal(signal.SIGINT, handle)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, previous)
