"""The command line: `billfish COMMAND`, one file a command."""

import io
import sys

import typer
from rich.console import Console

from billfish.cli import chat, demo, env, generate
from billfish.errors import BillfishError

app = typer.Typer(
    help="INT4 large language models, served from a paged KV cache.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("demo")(demo.command)
app.command("generate")(generate.command)
app.command("chat")(chat.command)
app.command("env")(env.command)


def main() -> None:
    """Entry point. An error that Billfish raises on purpose is one line, not a traceback."""
    # A model may write what the terminal's encoding lacks, and a pipe may bring in anything.
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        app()
    except (BillfishError, OSError) as error:
        Console(stderr=True).print(f"error: {error}", style="bold red", markup=False)
        sys.exit(1)
