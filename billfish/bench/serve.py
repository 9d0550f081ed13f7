"""Sends a trace to a running OpenAI-compatible server and tells how fast it answers.

    billfish bench serve --url http://localhost:8000 --rate 4 --requests 200
    billfish bench serve --trace ShareGPT.json --requests 500 --rate 8 --goodput ttft:500 tpot:50
    billfish bench serve --trace lengths.json --arrival burst --burst-size 16 --rate 8 --out it.json

Without --trace, lengths are drawn around --prompt-len and --output-len. A trace is a ShareGPT file
or a JSON list of [prompt tokens, output tokens]. Token counts are those of the server's own usage.

    TTFT    from sending a request to the first piece of its text
    ITL     from each piece of text to the next
    E2EL    from sending a request to the last piece of its text
    TPOT    (E2EL - TTFT) / (output tokens - 1)

With --max-concurrency a request that waits for its turn here has not been sent yet.
"""

import argparse
import asyncio
import os
import shlex
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, get_args

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from billfish.bench import serve_plot, serve_report
from billfish.bench.serve_report import Result
from billfish.bench.serve_requests import (
    POOL_TEXT,
    Arrival,
    Prompt,
    Words,
    arrivals,
    choose,
    read_trace,
    synthetic,
)
from billfish.client import Client, Piece, ServerError, Usage
from billfish.errors import BillfishError, ConfigError

Clock = Callable[[], float]
Send = Callable[[int], AsyncIterator[Piece | Usage]]
"""Sends the request of this number, and yields what comes."""


async def measure(events: AsyncIterator[Piece | Usage], clock: Clock) -> Result:
    """One request. A failure is an error of its own kind, not an exception."""
    result = Result(clock())
    try:
        async for event in events:
            if isinstance(event, Usage):
                result.prompt_tokens = event.prompt_tokens
                result.output_tokens = event.completion_tokens
            elif event.text:
                result.pieces.append(clock())
        if not result.output_tokens:
            result.error = "no token counts came"
    except ServerError as error:
        result.error = error.kind
    return result


async def replay(
    send: Send,
    times: Sequence[float],
    max_concurrency: int | None = None,
    *,
    on_done: Callable[[Result], None] = lambda result: None,
    clock: Clock = time.perf_counter,
    sleep: Callable[[float], Awaitable[Any]] = asyncio.sleep,
) -> list[Result]:
    """Send request i at times[i] seconds from now, at most max_concurrency at once."""
    turns = asyncio.Semaphore(max_concurrency or len(times) or 1)
    start = clock()

    async def one(number: int) -> Result:
        async with turns:
            result = await measure(send(number), clock)
        on_done(result)
        return result

    async with asyncio.TaskGroup() as group:
        tasks = []
        for number, at in enumerate(times):
            if (left := start + at - clock()) > 0:
                await sleep(left)
            tasks.append(group.create_task(one(number)))
    return [task.result() for task in tasks]


class Bodies:
    """The requests of a trace as the server takes them."""

    def __init__(self, options: argparse.Namespace, client: Client) -> None:
        self._options = options
        self._client = client
        self.path = "/v1/chat/completions" if options.chat else "/v1/completions"
        self.exact = False

    async def make(self, prompts: Sequence[Prompt]) -> list[dict[str, Any]]:
        options = self._options
        ids = None if options.chat else await self._client.token_ids(POOL_TEXT)
        self.exact = ids is not None or all(prompt.text is not None for prompt in prompts)
        words = Words(ids and sorted(set(ids)), options.prefix_len, options.seed)
        return [await self._body(prompt, words) for prompt in prompts]

    async def _body(self, prompt: Prompt, words: Words) -> dict[str, Any]:
        options = self._options
        content = prompt.text if prompt.text is not None else words.prompt(prompt.tokens or 1)
        body: dict[str, Any] = {
            "model": options.model, "max_tokens": await self._length(prompt),
            "temperature": options.temperature, "stream": True,
            "stream_options": {"include_usage": True},
        }  # fmt: skip
        if options.ignore_eos:
            body["ignore_eos"] = True
        if options.chat:
            return {**body, "messages": [{"role": "user", "content": content}]}
        return {**body, "prompt": content}

    async def _length(self, prompt: Prompt) -> int:
        """A ShareGPT answer is as long as the server says, or as --output-len does."""
        if prompt.output_tokens is not None:
            return prompt.output_tokens
        if self._options.output_len is not None:
            return self._options.output_len
        ids = await self._client.token_ids(prompt.reply or "")
        if ids is None:
            raise ConfigError(
                "the server does not tell how long answers are (no /tokenize): give --output-len"
            )
        return max(1, len(ids))


async def run(options: argparse.Namespace, console: Console) -> tuple[list[Result], float, float]:
    """The results, when the first request was sent, and when the last ended."""
    async with Client(options.url, options.api_key, options.timeout) as client:
        options.model = options.model or await client.first_model()
        options.server_version = await client.version()
        prompts = _prompts(options)
        bodies = Bodies(options, client)
        requests = await bodies.make(prompts)
        if not bodies.exact:
            console.print("lengths of prompts are approximate: they are made of words", style="dim")
        times = arrivals(
            len(requests), options.rate, options.arrival, options.seed, options.burst_size,
            options.burstiness,
        )  # fmt: skip
        for i in range(options.warmup):
            first = await measure(
                client.stream(bodies.path, requests[i % len(requests)]), time.perf_counter
            )
            if first.error is not None:
                raise BillfishError(f"a first request failed: {first.error}")
        with _bar(console) as bar:
            task = bar.add_task("Requests", total=len(requests), tokens=0, failed=0)
            total = failed = 0

            def done(result: Result) -> None:
                nonlocal total, failed
                total += result.output_tokens
                failed += result.error is not None
                bar.update(task, advance=1, tokens=total, failed=failed)

            start = time.perf_counter()
            results = await replay(
                lambda number: client.stream(bodies.path, requests[number]),
                times,
                options.max_concurrency,
                on_done=done,
            )
            return results, start, time.perf_counter()


def _prompts(options: argparse.Namespace) -> list[Prompt]:
    if options.trace is not None:
        return choose(read_trace(options.trace), options.requests, options.seed)
    return synthetic(
        options.requests or 100, options.prompt_len, options.output_len or 128, options.spread,
        options.seed,
    )  # fmt: skip


def _bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
        TextColumn("{task.fields[tokens]} tokens, {task.fields[failed]} failed"),
        TimeElapsedColumn(), console=console, transient=True,
    )  # fmt: skip


def limits(texts: Sequence[str]) -> dict[str, float]:
    """ttft:500 -> {"ttft": 0.5}. ConfigError for what is none."""
    found = {}
    for text in texts:
        name, _, value = text.partition(":")
        try:
            found[name] = float(value) / 1000
        except ValueError:
            found[name] = float("nan")
        if name not in ("ttft", "tpot", "e2el") or not 0 < found[name] < float("inf"):
            raise ConfigError(f"--goodput takes ttft, tpot or e2el and milliseconds, not {text!r}")
    return found


def parser() -> argparse.ArgumentParser:
    cli = argparse.ArgumentParser(
        prog="billfish bench serve",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    server = cli.add_argument_group("the server")
    server.add_argument("--url", default="http://127.0.0.1:8000", help="default: %(default)s")
    server.add_argument("--model", help="its name there; without, the first that it lists")
    server.add_argument(
        "--api-key", default=os.environ.get("BILLFISH_API_KEY"),
        help="or the environment's BILLFISH_API_KEY, which other users of this machine cannot see",
    )  # fmt: skip
    server.add_argument("--chat", action="store_true", help="chat instead of plain completions")
    server.add_argument(
        "--timeout", type=_positive(float), default=600.0, metavar="SECONDS",
        help="without anything from the server; default: %(default)s",
    )  # fmt: skip
    what = cli.add_argument_group("what is sent")
    what.add_argument("--trace", type=Path, metavar="FILE", help="ShareGPT, or lengths")
    what.add_argument(
        "--requests", type=_positive(int), metavar="N",
        help="how many; default: all of a trace, 100 without one",
    )  # fmt: skip
    what.add_argument(
        "--prompt-len", type=_positive(int), default=512, metavar="TOKENS",
        help="without a trace; default: %(default)s",
    )  # fmt: skip
    what.add_argument(
        "--output-len", type=_positive(int), metavar="TOKENS",
        help="default: 128, or what the ShareGPT answer has",
    )  # fmt: skip
    what.add_argument(
        "--spread", type=float, default=0.0, metavar="SHARE",
        help="lengths differ by up to this share, 0 to 1; default: %(default)s",
    )  # fmt: skip
    what.add_argument(
        "--prefix-len", type=int, default=0, metavar="TOKENS",
        help="that all prompts begin with; default: %(default)s",
    )  # fmt: skip
    what.add_argument("--temperature", type=float, default=0.0, help="default: %(default)s")
    what.add_argument(
        "--ignore-eos", action=argparse.BooleanOptionalAction, default=True,
        help="answers have the length asked for; not known to OpenAI's own servers",
    )  # fmt: skip
    what.add_argument("--seed", type=int, default=0, help="of all that is drawn")
    when = cli.add_argument_group("when it is sent")
    when.add_argument(
        "--rate", type=_positive(float), default=float("inf"), metavar="PER_SECOND",
        help="requests a second; default: all at once",
    )  # fmt: skip
    when.add_argument(
        "--arrival", choices=get_args(Arrival), default="poisson",
        help="how they are spread; default: %(default)s",
    )  # fmt: skip
    when.add_argument(
        "--burst-size", type=_positive(int), default=10, metavar="N",
        help="requests of a burst; default: %(default)s",
    )  # fmt: skip
    when.add_argument(
        "--burstiness", type=_positive(float), default=1.0, metavar="SHAPE",
        help="of gamma: 1 is poisson, less comes in clusters, more evenly; default: %(default)s",
    )  # fmt: skip
    when.add_argument(
        "--max-concurrency", type=_positive(int), metavar="N",
        help="most requests at once; default: any number",
    )  # fmt: skip
    when.add_argument(
        "--warmup", type=int, default=1, metavar="N", help="sent before; default: %(default)s"
    )
    told = cli.add_argument_group("what is told")
    told.add_argument(
        "--goodput", nargs="+", default=[], metavar="METRIC:MS",
        help="limits, as ttft:500 tpot:50 e2el:2000",
    )  # fmt: skip
    told.add_argument("--out", metavar="FILE", help="JSON with the summary and every request")
    told.add_argument(
        "--plot", metavar="FILE",
        help="a picture (needs billfish[plot]), or - for bars in the terminal",
    )  # fmt: skip
    return cli


def _positive(kind: type) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        value = kind(text)
        if not value > 0:
            raise argparse.ArgumentTypeError("must be above 0")
        return value

    return parse


def main(arguments: list[str]) -> None:
    options = parser().parse_args(arguments)
    if not 0 <= options.spread <= 1:
        raise ConfigError("--spread must be from 0 to 1")
    bounds = limits(options.goodput)
    console = Console(stderr=True)
    results, start, end = asyncio.run(run(options, console))
    summary = serve_report.summarize(results, end - start, bounds)
    serve_report.show(summary, Console())
    if options.plot is not None:
        _plot(results, start, options.plot)
    if options.out is not None:
        _write(options, arguments, summary, serve_report.rows(results, start))
    if not summary["completed"]:
        raise BillfishError("no request succeeded")


def _plot(results: Sequence[Result], start: float, path: str) -> None:
    if path != "-":
        try:
            serve_plot.as_picture(results, start, path)
            return
        except ImportError:
            Console(stderr=True).print(
                "a picture needs matplotlib (pip install 'billfish[plot]'); in the terminal:",
                style="yellow", markup=False,
            )  # fmt: skip
        except ValueError as error:
            raise ConfigError(f"--plot {path}: {error}") from None
    serve_plot.in_terminal(results, Console())


def _write(
    options: argparse.Namespace,
    arguments: Sequence[str],
    summary: dict[str, Any],
    rows: Sequence[dict[str, Any]],
) -> None:
    from billfish.bench import record

    shown = list(arguments)
    for i, argument in enumerate(shown):  # a key is not for a file that is shared
        if argument == "--api-key":
            shown[i + 1] = "..."
        elif argument.startswith("--api-key="):
            shown[i] = "--api-key=..."
    head = record.environment("billfish bench serve " + shlex.join(shown))
    server = {"url": options.url, "model": options.model, "version": options.server_version}
    record.write(options.out, {**head, "server": server, "summary": summary}, rows)
