"""Many requests at once, for `billfish bench engine`: their lengths, and where the time goes."""

import json
import random
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from billfish.engine.outputs import StepRecord
from billfish.errors import ConfigError
from billfish.worker.step_graphs import LARGEST_MIXED

if TYPE_CHECKING:
    from billfish.bench.engine import Served


@dataclass(frozen=True)
class Many:
    """Of requests that all come at once: output tokens a second, mean seconds of a request, and
    where the time went: by kind of step how many there were, their tokens and seconds, and how many
    of those the engine waited for the GPU."""

    tokens_s: float
    request_s: float
    steps: list[dict[str, Any]]


def throughput(served: "Served", lengths: list[tuple[int, int]]) -> Many:
    for prompt, output in lengths:
        served.add(prompt, output)
    begin = time.perf_counter()
    seconds: list[float] = []
    kinds: dict[str, list[StepRecord]] = {}
    last, recent = None, served.engine.recent_steps
    while served.engine.has_unfinished:
        finished = sum(output.finished for output in served.engine.step())
        seconds += [time.perf_counter() - begin] * finished
        if recent and recent[-1] is not last:
            last = recent[-1]
            kinds.setdefault(kind_of(last), []).append(last)
    steps = [
        {
            "kind": kind, "steps": len(these),
            "tokens": sum(step.prefill_tokens + step.decode_tokens for step in these),
            "seconds": round(sum(step.seconds for step in these), 3),
            "waited": round(sum(step.waited for step in these), 3),
        }
        for kind, these in kinds.items()
    ]  # fmt: skip
    tokens = sum(output for _, output in lengths)
    return Many(tokens / seconds[-1], statistics.fmean(seconds), steps)


def kind_of(step: StepRecord) -> str:
    if step.prefill_tokens:
        large = step.prefill_tokens + step.decode_tokens > LARGEST_MIXED
        return f"prompts, {'over' if large else 'up to'} {LARGEST_MIXED} tokens"
    for most in (32, 128, 256, 512):
        if step.requests <= most:
            return f"decode, up to {most} requests"
    return "decode, more requests"


def read_lengths(path: str) -> list[tuple[int, int]]:
    """(prompt, output) tokens of each request, from a file. ConfigError for one that has none."""
    try:
        loaded = json.loads(Path(path).read_text("utf-8"))
        pairs = loaded["lengths"] if isinstance(loaded, dict) else loaded
        lengths = [(int(prompt), int(output)) for prompt, output in pairs]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"--lengths {path}: {error!r}") from error
    if not lengths or min(map(min, lengths)) < 1:
        raise ConfigError(f"--lengths {path}: [prompt, output] each, of at least one token")
    return lengths


def draw_lengths(count: int = 1000) -> list[tuple[int, int]]:
    """As of a chat: prompts and answers of some two hundred tokens on average, a few much longer.
    The same on every machine."""
    draw = random.Random(0)
    return [
        (min(2048, 1 + int(draw.lognormvariate(5.0, 0.8))),
         min(2048, 1 + int(draw.lognormvariate(5.0, 0.7))))
        for _ in range(count)
    ]  # fmt: skip
