"""What several commands share: the options of a model and of sampling, and its loading."""

import logging
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from billfish.errors import BillfishError, visible
from billfish.sampling_params import SamplingParams

if TYPE_CHECKING:
    from billfish.engine import RequestOutput
    from billfish.llm import LLM

ENGINE = "Engine"
"""The heading under which help shows how a model is served."""

Model = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        help="A .gguf file, a Hugging Face directory or repository, or smollm2, the demo model.",
    ),
]
Dtype = Annotated[
    str,
    typer.Option(
        help="Of activations and KV cache: bfloat16, float32 or float16.", rich_help_panel=ENGINE
    ),
]
Quantize = Annotated[
    str | None,
    typer.Option(
        help="int4: round layers that are not INT4 while they are loaded.", rich_help_panel=ENGINE
    ),
]
MaxTokens = Annotated[int, typer.Option(help="Most tokens to generate for a prompt.")]


def _sampling_option(text: str) -> Any:
    return typer.Option(help=text, rich_help_panel="Sampling")


# None stands for "not given": then the model file's own default counts, or else the command's.
Temperature = Annotated[float | None, _sampling_option("0 takes the most likely token each time.")]
TopP = Annotated[
    float | None, _sampling_option("Sample from the smallest set with this probability.")
]
TopK = Annotated[int | None, _sampling_option("Sample from this many most likely tokens; 0: all.")]
MinP = Annotated[
    float | None, _sampling_option("Drop tokens less likely than this share of the likeliest.")
]
PresencePenalty = Annotated[
    float, _sampling_option("Taken off the logits of tokens generated before; -2 to 2.")
]
FrequencyPenalty = Annotated[
    float, _sampling_option("The same, once for each time they were generated.")
]
RepetitionPenalty = Annotated[
    float, _sampling_option("Above 1: tokens of prompt and text become less likely.")
]
Seed = Annotated[int | None, _sampling_option("Makes sampling repeatable.")]
# Bounds that NaN and infinity fail too.
KVMemory = Annotated[
    float | None,
    typer.Option(
        "--kv-memory",
        min=1e-9,
        max=2**20,
        help="GiB for the KV cache; without: 1 on a CPU, on a GPU most of what is free.",
        rich_help_panel=ENGINE,
    ),
]
Device = Annotated[
    str,
    typer.Option(
        help="auto (a GPU where there is one), cpu, cuda or cuda:1.", rich_help_panel=ENGINE
    ),
]


def say(text: str, nl: bool = False) -> None:
    """Print what a model wrote. A terminal gets no control characters of it; a file gets all."""
    typer.echo(visible(text) if sys.stdout.isatty() else text, nl=nl)


def progress_bar(console: Console) -> Progress:
    """A bar that says what is done, how much of it, and for how long."""
    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        console=console, transient=True,
    )  # fmt: skip


def to_bytes(gib: float | None) -> int | None:
    return None if gib is None else int(gib * 2**30)


def load(
    model: str,
    dtype: str,
    kv_memory: float | None,
    device: str = "auto",
    quantize: str | None = None,
) -> "LLM":
    """Loads the model, with a progress bar on standard error. kv_memory: GiB."""
    from billfish.config import CacheConfig
    from billfish.llm import LLM

    console = Console(stderr=True)
    with progress_bar(console) as bar, _start_said(console):
        task = bar.add_task(f"Loading {model}", total=None)
        llm = LLM(
            model,
            dtype=dtype,
            device=device,
            quantize=quantize,
            cache=CacheConfig(memory_bytes=to_bytes(kv_memory)),
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    for note in (llm.checkpoint_defaults, llm.rounding):
        if note:
            _note(console, note)
    return llm


def _note(console: Console, note: object) -> None:
    console.print(str(note), style="dim", markup=False, highlight=False)


class _Notes(logging.Handler):
    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        _note(self._console, record.getMessage())


@contextmanager
def _start_said(console: Console) -> Iterator[None]:
    """Inside, what a start on a GPU logs is shown: its plan, before anything is loaded."""
    logger, handler = logging.getLogger("billfish.worker.start"), _Notes(console)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def sampling(
    command: dict[str, Any], given: dict[str, Any], llm: "LLM | None" = None
) -> SamplingParams:
    """Options: the command's defaults, over them the model file's, over them those given.

    Without a model it tells a wrong option before one is loaded.
    """
    checkpoint = llm.checkpoint_defaults.options if llm else {}
    chosen = {name: value for name, value in given.items() if value is not None}
    return SamplingParams(**{**command, **checkpoint, **chosen})


def check_answered(outputs: "Sequence[RequestOutput]") -> None:
    """BillfishError if any request ended without an answer."""
    number = 0
    for output in outputs:
        number += output.index == 0  # the samples of a prompt follow each other
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
