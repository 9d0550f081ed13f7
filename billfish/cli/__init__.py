"""The command line: `billfish COMMAND`, one file a command."""

import io
import sys

import typer
from rich.console import Console

from billfish.cli import bench, chat, compare, demo, env, generate, quantize, serve, settings
from billfish.errors import BillfishError

app = typer.Typer(
    help="INT4 large language models, served from a paged KV cache.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.callback()(settings.from_file)
app.command("serve", cls=settings.Command, context_settings=settings.CONTEXT)(serve.command)
app.command("chat", cls=settings.Command, context_settings=settings.CONTEXT)(chat.command)
app.command("generate", cls=settings.Command, context_settings=settings.CONTEXT)(generate.command)
app.command("demo", cls=settings.Command, context_settings=settings.CONTEXT)(demo.command)
app.command("quantize")(quantize.command)
app.command("compare")(compare.command)
app.command("env")(env.command)
app.add_typer(bench.app, name="bench")


def main() -> None:
    """Entry point. An error that Billfish raises on purpose is one line, not a traceback."""
    # A model may write what the terminal's encoding lacks, and a pipe may bring in anything.
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        app()
    except (BillfishError, OSError) as error:
        console = Console(stderr=True)
        console.print(f"error: {error}", style="bold red", markup=False, soft_wrap=True)
        sys.exit(1)
