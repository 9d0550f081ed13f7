"""/engine/state: the engine at one moment, for those who watch it; the page, above all.

Nothing is computed while nobody asks, and those who ask at once share one answer of the engine.
"""

import asyncio
import sys
import time
from array import array
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import msgspec

from billfish.engine.outputs import BlockMap, StepRecord
from billfish.errors import BillfishError
from billfish.server.engine_client import EngineClient
from billfish.server.messages import EngineHealth, ModelInfo, Snapshot

SHARED_SECONDS = 0.1
"""How long one snapshot serves all who ask."""
WAIT_SECONDS = 2.0
"""For the engine's answer, which comes between two steps."""


class EngineView:
    """Snapshots of one engine. For one event loop."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine
        self._task: asyncio.Task[Snapshot] | None = None
        self._taken = 0.0

    async def state(self, after: int) -> dict[str, Any]:
        """What /engine/state answers. after: only steps with larger numbers are told."""
        health = describe_health(await self._engine.health())
        state: dict[str, Any] = {"health": health, "model": None, "engine": None}
        try:
            state["model"] = _model(self._engine.model)
            if health["status"] == "dead":  # what it last said is true no more
                return state
            async with asyncio.timeout(WAIT_SECONDS):
                snapshot = await asyncio.shield(self._snapshot())
        except (BillfishError, TimeoutError):
            return state
        state["engine"] = describe(snapshot, after)
        return state

    def _snapshot(self) -> "asyncio.Task[Snapshot]":
        now = time.monotonic()
        task = self._task
        if task is None or (task.done() and now - self._taken > SHARED_SECONDS):
            task = self._task = asyncio.create_task(self._engine.stats(block_map=True))
            # Whoever waited may have gone: an error nobody reads is no news.
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
            self._taken = now
        return task


def describe_health(health: EngineHealth) -> dict[str, Any]:
    return {
        "status": health.state,
        "detail": "" if health.state == "dead" else health.detail,  # it may name files
        "accepting": health.accepting,
        "running": health.running,
        "waiting": health.waiting,
        "restarts": health.restarts,
        "loaded": health.loaded,
        "to_load": health.to_load,
    }


def describe(snapshot: Snapshot, after: int) -> dict[str, Any]:
    """Short lists, so that a page may ask several times a second."""
    counters = msgspec.to_builtins(snapshot.counters)
    ttfts = sorted(snapshot.ttfts)
    return {
        "counters": counters,
        "tokens_per_second": round(snapshot.tokens_per_second, 2),
        "ttft": {
            "latest": snapshot.ttfts[-1] if ttfts else None,
            "p50": _percentile(ttfts, 0.5),
            "p95": _percentile(ttfts, 0.95),
        },
        "steps": [_step(step) for step in snapshot.steps if step.step > after],
        "blocks": None if snapshot.block_map is None else _blocks(snapshot.block_map),
    }


def _model(model: ModelInfo) -> dict[str, Any]:
    names = (
        "architecture", "dtype", "max_model_len", "num_blocks", "block_size", "max_num_seqs",
        "max_waiting", "num_int4_layers",
    )  # fmt: skip
    return {name: getattr(model, name) for name in names}


def _step(step: StepRecord) -> list[float]:
    return [
        step.step, round(step.seconds, 6), step.prefill_tokens, step.decode_tokens,
        step.output_tokens, step.requests, step.running, step.waiting, step.blocks_in_use,
    ]  # fmt: skip


def _blocks(blocks: BlockMap) -> dict[str, Any]:
    """Neighbours are mostly alike: runs of codes instead of one for each block."""
    codes = array("H", blocks.codes)
    if sys.byteorder == "big":
        codes.byteswap()
    runs: list[int] = []
    for code, same in groupby(codes):
        runs += (sum(1 for _ in same), code)
    return {"runs": runs, "groups": blocks.groups, "requests": blocks.request_ids}


def _percentile(ordered: Sequence[float], share: float) -> float | None:
    """The nearest rank."""
    if not ordered:
        return None
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
