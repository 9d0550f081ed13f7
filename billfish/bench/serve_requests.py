"""What `billfish bench serve` sends, and when: prompts of a trace, and their arrivals."""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from billfish.errors import ConfigError

Arrival = Literal["poisson", "gamma", "constant", "burst"]

POOL_TEXT = (
    "The tide carries small boats past the harbour wall while gulls argue over bread, old rope "
    "dries on grey stones, and somebody counts seven lamps along the quiet road to town. "
)


@dataclass(frozen=True, slots=True)
class Prompt:
    """text: None where only the length is known. tokens: its length; None where only the text is.
    output_tokens: to generate; None where a reply's text says how long."""

    text: str | None
    tokens: int | None
    output_tokens: int | None
    reply: str | None = field(default=None, repr=False)


def read_trace(path: Path) -> list[Prompt]:
    """A ShareGPT file, of which the first question and answer of each conversation count, or
    [[prompt tokens, output tokens], ...]. ConfigError for anything else."""
    try:
        content = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from None
    if not isinstance(content, list) or not content:
        raise ConfigError(f"{path} must hold a list of conversations or of [prompt, output]")
    if all(isinstance(entry, dict) for entry in content):
        found = [prompt for entry in content if (prompt := _conversation(entry)) is not None]
        if not found:
            raise ConfigError(f"{path} holds no conversation with a question and an answer")
        return found
    return [_lengths(path, number, entry) for number, entry in enumerate(content)]


def _conversation(entry: dict[str, Any]) -> Prompt | None:
    turns = entry.get("conversations") or entry.get("conversation") or []
    texts = [turn.get("value") for turn in turns if isinstance(turn, dict)]
    if len(texts) < 2 or not all(isinstance(text, str) and text for text in texts[:2]):
        return None
    return Prompt(texts[0], None, None, texts[1])


def _lengths(path: Path, number: int, entry: Any) -> Prompt:
    right = isinstance(entry, list) and len(entry) == 2 and set(map(type, entry)) == {int}
    if not right or min(entry) < 1:
        raise ConfigError(f"{path}: entry {number} is not [prompt tokens, output tokens], above 0")
    return Prompt(None, entry[0], entry[1])


def synthetic(count: int, prompt: int, output: int, spread: float, seed: int) -> list[Prompt]:
    """Lengths drawn evenly from length * (1 - spread) to length * (1 + spread)."""
    draw = random.Random(seed)

    def length(mean: int) -> int:
        return max(1, draw.randint(round(mean * (1 - spread)), round(mean * (1 + spread))))

    return [Prompt(None, length(prompt), length(output)) for _ in range(count)]


def choose(trace: Sequence[Prompt], count: int | None, seed: int) -> list[Prompt]:
    """`count` entries in an order drawn with the seed, from the start again if there are fewer; all
    in their own order if it is None."""
    if count is None:
        return list(trace)
    order = list(trace)
    random.Random(seed).shuffle(order)
    return [order[i % len(order)] for i in range(count)]


def arrivals(
    count: int, rate: float, kind: Arrival, seed: int, burst: int = 1, burstiness: float = 1.0
) -> list[float]:
    """Seconds from the start at which requests arrive, on average `rate` a second.

    poisson: with exponential gaps. gamma: with gaps of a gamma distribution, whose shape is
    `burstiness`: at 1 it is the exponential one, below 1 requests come in clusters, above 1 more
    evenly. constant: with equal gaps. burst: `burst` at once, in equal gaps. An infinite rate: all
    at once.
    """
    if rate == float("inf"):
        return [0.0] * count
    if kind == "constant":
        return [i / rate for i in range(count)]
    if kind == "burst":
        return [i // burst * burst / rate for i in range(count)]
    draw, now, times = random.Random(seed), 0.0, []
    for _ in range(count):
        times.append(now)
        now += (
            draw.gammavariate(burstiness, 1 / (rate * burstiness))
            if kind == "gamma"
            else draw.expovariate(rate)
        )
    return times


class Words:
    """Prompts of a given length. No two begin alike, beyond a prefix that all share, so that a
    server's prefix cache finds what it is meant to find.

    ids: token ids to draw from; without, prompts are words, and their lengths approximate.
    """

    def __init__(self, ids: Sequence[int] | None, prefix: int, seed: int) -> None:
        self._ids = ids
        self._words = POOL_TEXT.replace(",", "").replace(".", "").split()
        self._draw = random.Random(seed)
        self._prefix = self._some(prefix)

    def _some(self, length: int) -> list[Any]:
        return self._draw.choices(self._ids or self._words, k=length)

    def prompt(self, length: int) -> str | list[int]:
        drawn = self._prefix[:length] + self._some(max(0, length - len(self._prefix)))
        return drawn if self._ids else " ".join(drawn)
