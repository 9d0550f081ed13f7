"""Plots of `billfish bench serve`: a picture with matplotlib, or bars in the terminal."""

from collections.abc import Sequence

import numpy as np
from rich.console import Console

from billfish.bench.serve_report import METRICS, Result, times_of

BINS = 12
WIDTH = 40


def in_terminal(results: Sequence[Result], console: Console) -> None:
    """How the times are distributed."""
    for metric in ("ttft", "itl"):
        times = np.asarray(times_of(results, metric)) * 1000
        if not times.size:
            continue
        console.print(f"\n{METRICS[metric]}, ms", style="bold")
        for low, high, count in histogram(times):
            bar = "█" * round(WIDTH * count / times.size) or ("▏" if count else "")
            console.print(f"{low:10.2f} - {high:10.2f}  {bar} {count}", highlight=False)


def histogram(times: np.ndarray) -> list[tuple[float, float, int]]:
    """(from, to, how many), up to the 99th percentile; what is above it is in the last."""
    end = float(np.percentile(times, 99))
    low = float(times.min())
    edges = np.linspace(low, max(end, low + 1e-6), BINS + 1)
    counts, _ = np.histogram(np.clip(times, edges[0], edges[-1]), edges)
    edges[-1] = max(edges[-1], times.max())
    return [(float(a), float(b), int(c)) for a, b, c in zip(edges, edges[1:], counts, strict=False)]


def as_picture(results: Sequence[Result], start: float, path: str) -> None:
    """Latencies of each request over time, and how each metric is distributed. ImportError where
    there is no matplotlib; ValueError for a kind of file that it does not write."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    good = [result for result in results if result.error is None and result.pieces]
    sent = [result.sent - start for result in good]
    for metric in ("e2el", "ttft"):
        values = [getattr(result, metric) * 1000 for result in good]
        axes[0].scatter(sent, values, s=10, label=METRICS[metric])
    axes[0].set(xlabel="sent, s", ylabel="ms", yscale="log", title="Requests")
    axes[0].legend()
    for metric, title in METRICS.items():
        times = np.sort(times_of(results, metric)) * 1000
        if times.size:
            axes[1].plot(times, np.arange(1, times.size + 1) / times.size, label=title)
    axes[1].set(xlabel="ms", ylabel="share of all", xscale="log", title="Distribution")
    axes[1].legend()
    for each in axes:
        each.grid(alpha=0.3)
    figure.savefig(path, dpi=144)
    pyplot.close(figure)
