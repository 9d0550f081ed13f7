"""`billfish bench`: measures kernels and whole models on this machine, and running servers."""

from importlib import import_module
from itertools import pairwise
from pathlib import Path

import typer

from billfish.errors import ConfigError

app = typer.Typer(
    help="Measure this machine, or a running server; results go to a JSON file. "
    "`billfish bench NAME --help` lists the options of each.",
    no_args_is_help=True,
)
_PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


@app.command("gemm", context_settings=_PASS_ON)
def gemm(context: typer.Context) -> None:
    """W4A16 products beside cuBLAS, Marlin, Machete and humming, on a GPU."""
    _run("gemm", context.args, needs_gpu=True)


@app.command("tune", context_settings=_PASS_ON)
def tune(context: typer.Context) -> None:
    """The fastest configurations of the W4A16 kernel on this GPU, into the table it is run by."""
    _run("tune", context.args, needs_gpu=True)


@app.command("attention", context_settings=_PASS_ON)
def attention(context: typer.Context) -> None:
    """Paged attention beside FlashAttention-3 and cuDNN, on a GPU."""
    _run("attention", context.args, needs_gpu=True)


@app.command("general", context_settings=_PASS_ON)
def general(context: typer.Context) -> None:
    """The general kernels beside torch, CuPy, Liger and others, on a GPU."""
    _run("general", context.args, needs_gpu=True)


@app.command("tutorial", context_settings=_PASS_ON)
def tutorial(context: typer.Context) -> None:
    """The steps of docs/write-a-kernel.md, from a naive kernel to a tiled one, on a GPU."""
    _run("tutorial", context.args, needs_gpu=True)


@app.command("throughput", context_settings=_PASS_ON)
def throughput(context: typer.Context) -> None:
    """A whole model beside transformers and llama.cpp, on the CPU."""
    _run("throughput", context.args, needs_gpu=False)


@app.command("server", context_settings=_PASS_ON)
def server(context: typer.Context) -> None:
    """What the HTTP server itself costs: tokens a second streamed from an instant engine."""
    _run("server", context.args, needs_gpu=False)


@app.command("engine", context_settings=_PASS_ON)
def engine(context: typer.Context) -> None:
    """The engine with random weights: decode, prefill, many requests at once, start."""
    _run("engine", context.args, needs_gpu=False)


@app.command("step", context_settings=_PASS_ON)
def step(context: typer.Context) -> None:
    """Where the time of a decode step goes, kernel by kernel, against this GPU's floor."""
    _run("step", context.args, needs_gpu=True)


@app.command("quantize", context_settings=_PASS_ON)
def quantize(context: typer.Context) -> None:
    """What INT4 costs in perplexity, by the method that made it."""
    _run("quantize", context.args, needs_gpu=False)


@app.command("serve", context_settings=_PASS_ON)
def serve(context: typer.Context) -> None:
    """A running server under load: TTFT, TPOT, ITL, end to end, throughput, goodput."""
    _run("serve", context.args, needs_gpu=False)


def _run(name: str, arguments: list[str], *, needs_gpu: bool) -> None:
    if needs_gpu and "--help" not in arguments:
        from billfish.worker.device import why_no_gpu

        if reason := why_no_gpu():
            other = "; for a CPU: bench throughput --parts --out FILE" if name == "step" else ""
            raise ConfigError(f"bench {name} measures a GPU: {reason}{other}")
    _check_out(arguments)
    import_module(f"billfish.bench.{name}").main(arguments)


def _check_out(arguments: list[str]) -> None:
    """ConfigError for results that could not be written once they are there."""
    for option, value in pairwise([*arguments, ""]):
        name, _, attached = option.partition("=")
        path = attached or value
        # To most, --ablation is a switch, and what comes behind it another option.
        if name not in ("--out", "--ablation") or not path:
            continue
        if not (folder := Path(path).parent).is_dir():
            raise ConfigError(f"{name}: there is no folder {folder}")
        if Path(path).is_dir():
            raise ConfigError(f"{name}: {path} is a folder")
