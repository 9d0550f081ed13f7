"""The account of what requests got and what they cost."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from billfish.engine import RequestOutput
    from billfish.llm import LLM


def print_ledger(console: Console, outputs: "Sequence[RequestOutput]", llm: "LLM") -> None:
    """A table of the requests, the last output of each given, then the engine's totals."""
    console.print(_request_table(outputs))
    console.print(_totals(outputs, llm))


def _request_table(outputs: "Sequence[RequestOutput]") -> Table:
    table = Table(title="Requests", title_justify="left")
    table.add_column("#", justify="right")
    cached = any(output.metrics.cached_tokens for output in outputs)
    shared = any(output.metrics.shared_blocks for output in outputs)
    columns = [
        "prompt\ntokens", *["cached\ntokens"] * cached, "output\ntokens", "TTFT\nms", "TPOT\nms",
        "KV\nblocks", *["shared\nblocks"] * shared,
    ]  # fmt: skip
    for name in columns:
        table.add_column(name, justify="right")
    table.add_column("ended by")
    for number, output in enumerate(outputs, 1):
        metrics = output.metrics
        table.add_row(
            str(number),
            str(metrics.num_prompt_tokens),
            *[str(metrics.cached_tokens)] * cached,
            str(metrics.num_output_tokens),
            _milliseconds(metrics.ttft),
            _milliseconds(metrics.tpot),
            str(metrics.peak_blocks),
            *[str(metrics.shared_blocks)] * shared,
            output.finish_reason or "interrupted",
        )
    return table


def _totals(outputs: "Sequence[RequestOutput]", llm: "LLM") -> Table:
    stats = llm.stats()
    every = [output.metrics for output in outputs]
    start = min(metrics.arrival for metrics in every)
    end = max((m.finished_at for m in every if m.finished_at is not None), default=None)
    tokens = sum(metrics.num_output_tokens for metrics in every)
    block_size = llm.config.cache.block_size

    table = Table(title="Engine", title_justify="left", show_header=False)
    table.add_row("time to first token, mean", _mean_ms([m.ttft for m in every]))
    table.add_row("time per output token, mean", _mean_ms([m.tpot for m in every]))
    if end is not None and end > start:
        table.add_row("output tokens/s, all requests", f"{tokens / (end - start):.1f}")
    table.add_row("steps", str(stats.steps))
    table.add_row(
        f"KV blocks of {block_size} tokens, most in use",
        f"{stats.blocks_peak} of {stats.blocks_total}",
    )
    table.add_row("KV memory wasted", f"{stats.kv_waste:.1%} of what was allocated")
    if stats.kv_saved > 0:
        table.add_row("KV memory saved by sharing", f"{stats.kv_saved:.1%}")
    if stats.prefix_hits:
        found = f"{stats.prefix_hits} of {stats.prefix_queries}"
        table.add_row("tokens found in the prefix cache", found)
    if stats.forks:
        copied = f"{stats.forks}, {stats.block_copies} blocks copied on write"
        table.add_row("samples forked", copied)
    if stats.preemptions:
        table.add_row("preemptions", f"{stats.preemptions}, {stats.swaps} of them by swapping")
    return table


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.1f}"


def _mean_ms(times: Sequence[float | None]) -> str:
    known = [time for time in times if time is not None]
    return f"{sum(known) / len(known) * 1000:.1f} ms" if known else "-"
