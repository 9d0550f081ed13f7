"""`billfish compare`: the three kernel families side by side, each technique with and without."""

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from billfish.errors import ConfigError, RecordError

FAMILIES = ("marlin", "paged_attention", "general")


def command(
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for comparison.html and comparison.json, or one such file."),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="JSON file to write: all that is shown.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option(help="HTML file to write: one page that needs no network.")
    ] = None,
    family: Annotated[
        list[str] | None, typer.Option(help="marlin, paged_attention or general; all without it.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="With a GPU: fewer cases, under three minutes.")
    ] = False,
    recorded: Annotated[
        bool, typer.Option("--recorded", help="Recorded results even where there is a GPU.")
    ] = False,
    source: Annotated[
        Path | None,
        typer.Option("--from", help="A JSON file that this command wrote, to show it again."),
    ] = None,
    source_url: Annotated[
        str | None,
        typer.Option(help="What links to code begin with, as https://host/project/blob/main."),
    ] = None,
) -> None:
    """Marlin, PagedAttention and general CUDA kernels: what each technique is worth, measured.

    With a GPU the techniques are timed on it, in about ten minutes, most of them compilation, or
    under three with --quick. Without one the recorded results are shown, and named so.
    """
    from billfish.compare import build, records

    families = tuple(dict.fromkeys(family or FAMILIES))
    for name in families:
        if name not in FAMILIES:
            raise ConfigError(f"--family is one of {', '.join(FAMILIES)}, not {name!r}")
    if source is not None and (quick or recorded or family):
        raise ConfigError("--from shows a file as it is: without --quick, --recorded and --family")
    if quick and recorded:
        raise ConfigError("--quick shortens measuring, and --recorded measures nothing")
    if source_url is not None and not source_url.startswith(("https://", "http://")):
        raise ConfigError(f"--source-url begins with https:// or http://, not {source_url!r}")
    json_file, html = _targets(out, json_file, html)
    for path in filter(None, (json_file, html)):
        _check_writable(path)
    console = Console()
    if source is not None:
        document = build.check(records.read_json(source), str(source))
        document["made"]["file"] = source.name
    else:
        document = _made(families, quick, recorded)
        if json_file:  # before the page is made: what was measured is not to be lost by that
            _write_json(json_file, document)
    page = _shown(document, console, html, source_url, source)
    if json_file and source is not None:
        _write_json(json_file, document)
    if html:
        html.write_text(page, encoding="utf-8")
    written = [path for path in (json_file, html) if path]
    for path in written:
        console.print(f"wrote {path}", markup=False, highlight=False)
    if not written:
        console.print("Every case, plots and code: --html FILE. All figures: --json FILE.")


def _shown(
    document: dict[str, Any], console: Console, html: Path | None, source_url: str | None,
    source: Path | None,
) -> str:  # fmt: skip
    """The page, once the terminal has its part. RecordError where a file that was made elsewhere
    lacks what is to be shown, whatever that leads to."""
    from billfish.compare import report, terminal

    folder = html.resolve().parent if html else None
    try:
        page = report.page(document, folder=folder, source_url=source_url)
        terminal.show(document, console)
    except Exception as error:
        if source is None or isinstance(error, OSError):
            raise
        raise RecordError(str(source), f"not a whole comparison: {error!r}") from error
    return page


def _check_writable(path: Path) -> None:
    """Make the folder of a file. ConfigError where the file cannot be written, before minutes are
    spent measuring."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from None
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        reason = "it is a folder" if path.is_dir() else "permission denied"
        raise ConfigError(f"{path} cannot be written: {reason}")


def _write_json(path: Path, document: dict[str, object]) -> None:
    text = json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False)
    path.write_text(text + "\n", encoding="utf-8")


def _made(families: tuple[str, ...], quick: bool, recorded: bool) -> dict[str, object]:
    import torch

    from billfish.compare import build, measure, records
    from billfish.worker.device import why_no_gpu

    reason = why_no_gpu()
    gpu = None if reason else torch.cuda.get_device_name()
    if quick and reason:
        raise ConfigError(f"--quick shortens measuring on a GPU: {reason}")
    known = records.recorded()
    if gpu is None or recorded:
        return build.comparison(known, families, gpu=gpu)
    taken = measure.measure(families, quick=quick)
    return build.comparison(
        {**known, **taken.records}, families, gpu=gpu, seconds=taken.seconds,
        left_out=taken.left_out,
    )  # fmt: skip


def _targets(
    out: Path | None, json_file: Path | None, html: Path | None
) -> tuple[Path | None, Path | None]:
    """Which files to write. ConfigError: an --out of another kind, or one given twice."""
    if out is None:
        return json_file, html
    wanted = {
        ".json": (out, None),
        ".html": (None, out),
        "": (out / "comparison.json", out / "comparison.html"),
    }
    if out.suffix not in wanted and not out.is_dir():
        raise ConfigError(f"--out is a folder, a .json or a .html file, not {str(out)!r}")
    data, page = wanted["" if out.is_dir() else out.suffix]
    if (data and json_file) or (page and html):
        raise ConfigError("--out and --json or --html name the same kind of file")
    return data or json_file, page or html
