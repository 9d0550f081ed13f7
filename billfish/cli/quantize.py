"""`billfish quantize`: writes a model in INT4."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from billfish.cli import common


def command(
    model: Annotated[
        str, typer.Argument(help='A Hugging Face directory, a .gguf file, or "smollm2".')
    ],
    out: Annotated[Path, typer.Argument(help="The folder to write; it may not hold anything.")],
    method: Annotated[
        str, typer.Option(help="gptq, calibrated on a text, or rtn, round to nearest.")
    ] = "gptq",
    group_size: Annotated[
        int, typer.Option(help="Columns that share a scale: 16, 32, 64, 128, or -1 for a row.")
    ] = 128,
    symmetric: Annotated[
        bool, typer.Option("--symmetric/--asymmetric", help="Without or with zero points.")
    ] = True,
    act_order: Annotated[
        bool, typer.Option("--act-order/--no-act-order", help="GPTQ: largest inputs first.")
    ] = True,
    damping: Annotated[
        float, typer.Option(help="GPTQ: added to the Hessian's diagonal, relative to its mean.")
    ] = 0.01,
    calibration: Annotated[
        Path | None,
        typer.Option(
            help="GPTQ: a UTF-8 text like those the model will see. Default: the reference manual "
            "that comes with Python."
        ),
    ] = None,
    held: Annotated[
        Path | None,
        typer.Option(
            help="A text to measure the perplexity with. Default: the last eighth of the other, "
            "which is then not calibrated on."
        ),
    ] = None,
    num_sequences: Annotated[
        int, typer.Option("--sequences", help="GPTQ: most pieces of the text to calibrate on.")
    ] = 32,
    num_held: Annotated[
        int, typer.Option("--held-sequences", help="Most pieces of the text to measure with.")
    ] = 16,
    sequence_length: Annotated[int, typer.Option(help="Tokens of a piece.")] = 512,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="Of scales and all that is not INT4: bfloat16, float16 or float32. Default: the "
            "model's own; bfloat16 for GGUF."
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="Where to work: cpu or cuda.")] = "cpu",
    requantize: Annotated[
        bool, typer.Option("--requantize", help="Take a model that is INT4 already.")
    ] = False,
) -> None:
    """Write a model in INT4 (compressed-tensors), and say what that costs in perplexity."""
    from billfish.export.quantize import QuantizeOptions, quantize_checkpoint

    options = QuantizeOptions(
        method=method, group_size=group_size, symmetric=symmetric, act_order=act_order,
        damping=damping, calibration=calibration, held=held, num_sequences=num_sequences,
        num_held=num_held, sequence_length=sequence_length, dtype=dtype, device=device,
        requantize=requantize,
    )  # fmt: skip
    with common.progress_bar(Console(stderr=True)) as bar:
        task = bar.add_task("Reading", total=None)
        report = quantize_checkpoint(
            model,
            out,
            options,
            progress=lambda what, done, total: bar.update(
                task, description=what, completed=done, total=total
            ),
        )
    table = Table(show_header=False, box=None)
    before, after = report.perplexity_before, report.perplexity_after
    table.add_row("written", f"{out}, {report.nbytes / 2**20:.1f} MiB of weights")
    table.add_row("INT4 layers", str(report.num_layers))
    if report.tokens:
        table.add_row("calibrated on", f"{report.tokens} tokens of {report.calibration_text}")
    table.add_row("measured on", f"{report.held_tokens} tokens of {report.held_text}")
    table.add_row("perplexity", f"{before:.4f} before, {after:.4f} after ({after - before:+.4f})")
    Console().print(table)
