"""What `billfish bench serve` makes of the times it took, in the terms of vLLM's benchmark.

TTFT    time to first token: from sending a request to the first piece of its text
ITL     inter-token latency: from each piece of text to the next; a piece may be several tokens
E2EL    end-to-end latency: from sending a request to the last piece of its text
TPOT    time per output token: (E2EL - TTFT) / (output tokens - 1), of requests with 2 or more
goodput requests a second that kept to all limits given
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

PERCENTILES = (50, 90, 95, 99)
METRICS = {
    "ttft": "Time to first token",
    "tpot": "Time per output token",
    "itl": "Inter-token latency",
    "e2el": "End-to-end latency",
}


@dataclass(slots=True)
class Result:
    """One request. Times are readings of one clock, in seconds.

    pieces: when each piece of its text came. prompt_tokens, output_tokens: as the server counts
    them. error: what kind of failure it was; None for a success.
    """

    sent: float
    pieces: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None

    @property
    def ttft(self) -> float | None:
        return self.pieces[0] - self.sent if self.pieces else None

    @property
    def e2el(self) -> float | None:
        return self.pieces[-1] - self.sent if self.pieces else None

    @property
    def tpot(self) -> float | None:
        if self.ttft is None or self.e2el is None or self.output_tokens < 2:
            return None
        return (self.e2el - self.ttft) / (self.output_tokens - 1)

    @property
    def itls(self) -> list[float]:
        return [b - a for a, b in zip(self.pieces, self.pieces[1:], strict=False)]

    def keeps(self, limits: Mapping[str, float]) -> bool:
        """Whether none of its times, in seconds, is above its limit."""
        times = ((getattr(self, name), limit) for name, limit in limits.items())
        return self.error is None and all(t is None or t <= limit for t, limit in times)


def summarize(
    results: Sequence[Result], duration: float, limits: Mapping[str, float] | None = None
) -> dict[str, Any]:
    """duration: seconds from the first request to the end of the last. limits: for goodput, in
    seconds by metric. Times in the summary are milliseconds."""
    good = [result for result in results if result.error is None]
    prompt, output = (
        sum(getattr(result, name) for result in good) for name in ("prompt_tokens", "output_tokens")
    )
    summary: dict[str, Any] = {
        "completed": len(good),
        "failed": len(results) - len(good),
        "errors": dict(Counter(r.error for r in results if r.error is not None).most_common()),
        "duration_s": round(duration, 3),
        "total_input_tokens": prompt,
        "total_output_tokens": output,
        "request_throughput": _rate(len(good), duration),
        "output_throughput": _rate(output, duration),
        "total_token_throughput": _rate(prompt + output, duration),
        "max_concurrent_requests": _most_at_once(good),
    }
    if limits:
        kept = sum(result.keeps(limits) for result in good)
        summary["request_goodput"] = _rate(kept, duration)
        summary["goodput_limits_ms"] = {name: limit * 1000 for name, limit in limits.items()}
    for name in METRICS:
        summary |= _distribution(name, times_of(good, name))
    return summary


def times_of(results: Sequence[Result], metric: str) -> list[float]:
    """In seconds; of requests that succeeded."""
    if metric == "itl":
        return [itl for result in results if result.error is None for itl in result.itls]
    found = (getattr(result, metric) for result in results if result.error is None)
    return [time for time in found if time is not None]


def _distribution(name: str, seconds: Sequence[float]) -> dict[str, float | None]:
    names = [f"{kind}_{name}_ms" for kind in ("mean", "std", *(f"p{p}" for p in PERCENTILES))]
    if not seconds:
        return dict.fromkeys(names)
    times = np.asarray(seconds) * 1000
    values = (times.mean(), times.std(), *np.percentile(times, PERCENTILES))
    return {name: round(float(value), 3) for name, value in zip(names, values, strict=True)}


def _most_at_once(results: Sequence[Result]) -> int:
    ends = [(result.pieces[-1] if result.pieces else result.sent, -1) for result in results]
    now = most = 0
    for _, change in sorted([(result.sent, 1) for result in results] + ends):
        now += change
        most = max(most, now)
    return most


def _rate(count: float, seconds: float) -> float:
    return round(count / seconds, 3) if seconds > 0 else 0.0


def rows(results: Sequence[Result], start: float) -> list[dict[str, Any]]:
    """One for each request, in the order of sending."""
    return [
        {
            "sent_s": round(result.sent - start, 4),
            "prompt": result.prompt_tokens,
            "output": result.output_tokens,
            "ttft_ms": _ms(result.ttft),
            "tpot_ms": _ms(result.tpot),
            "e2el_ms": _ms(result.e2el),
            "error": result.error,
        }
        for result in sorted(results, key=lambda each: each.sent)
    ]


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)


def show(summary: Mapping[str, Any], console: Console) -> None:
    table = Table(title="Requests", title_justify="left", show_header=False)
    failed = ", ".join(f"{count} x {kind}" for kind, count in summary["errors"].items())
    table.add_row("completed", str(summary["completed"]))
    table.add_row("failed", str(summary["failed"]) + (f": {failed}" if failed else ""))
    table.add_row("duration", f"{summary['duration_s']:.1f} s")
    table.add_row("most at once", str(summary["max_concurrent_requests"]))
    table.add_row("prompt tokens", str(summary["total_input_tokens"]))
    table.add_row("output tokens", str(summary["total_output_tokens"]))
    table.add_row("requests/s", f"{summary['request_throughput']:.2f}")
    if "request_goodput" in summary:
        limits = summary["goodput_limits_ms"].items()
        within = ", ".join(f"{name} <= {limit:g} ms" for name, limit in limits)
        table.add_row(f"goodput, requests/s ({within})", f"{summary['request_goodput']:.2f}")
    table.add_row("output tokens/s", f"{summary['output_throughput']:.1f}")
    table.add_row("tokens/s, prompts too", f"{summary['total_token_throughput']:.1f}")
    console.print(table, markup=False)

    columns = ["mean", *(f"p{p}" for p in PERCENTILES)]
    table = Table("milliseconds", title="Latency", title_justify="left")
    for column in columns:
        table.add_column(column, justify="right")
    for name, title in METRICS.items():
        values = [summary[f"{column}_{name}_ms"] for column in columns]
        table.add_row(title, *("-" if value is None else f"{value:.2f}" for value in values))
    console.print(table)
