"""Timing of implementations of one thing, side by side."""

import random
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence

import torch

ROUNDS = 7

Call = Callable[[], object]


def capture(calls: Sequence[Call], at_least_us: float = 2000.0) -> tuple[torch.cuda.CUDAGraph, int]:
    """A graph of whole rotations through `calls`, and how many calls it makes."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
        once = max(elapsed_us(lambda: [call() for call in calls]), 1.0)
        rotations = max(1, min(int(at_least_us / once) + 1, 200 // len(calls) + 1))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(rotations):
                for call in calls:
                    call()
    torch.cuda.current_stream().wait_stream(stream)
    return graph, rotations * len(calls)


def waits(call: Call) -> bool:
    """Whether the call makes the host wait for the GPU, which no CUDA graph may hold.

    Told by torch, not tried in a graph: one that fails while it is captured leaves torch's
    allocator and random generator in the middle of it.
    """
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        return True
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return False


def elapsed_us(call: Call, ahead_cycles: int = 0) -> float:
    """Time of a call on the GPU. ahead_cycles: for how long the GPU is kept busy before, so that
    the time in which the host queues the call does not count.
    """
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    if ahead_cycles:
        torch.cuda._sleep(ahead_cycles)
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3


def summary(times: Sequence[float]) -> tuple[float, float]:
    """Median, and (largest - smallest) / median."""
    middle = statistics.median(times)
    return middle, (max(times) - min(times)) / middle


def time_in_turns(
    impls: Mapping[str, Sequence[Call]],
    *,
    graphs: bool = True,
    eager: Collection[str] = (),
    ahead_cycles: int = 0,
) -> dict[str, tuple[float, float]]:
    """(median microseconds of a call, relative spread) of each; run in a new order every round.

    The calls of an implementation do the same on different data. With `graphs` they are captured
    and replayed; without, or where `eager` names them, the first is called. ahead_cycles: see
    `elapsed_us`; of those that are not in graphs.
    """
    runs: dict[str, tuple[Call, int]] = {}
    for name, calls in impls.items():
        if calls and graphs and name not in eager:
            graph, count = capture(calls)
            runs[name] = (graph.replay, count)
        elif calls:
            runs[name] = (calls[0], 1)
    times: dict[str, list[float]] = {name: [] for name in runs}
    order = list(runs)
    for turn in range(ROUNDS + 1):
        random.shuffle(order)
        for name in order:
            run, count = runs[name]
            held = graphs and name not in eager
            us = elapsed_us(run, 0 if held else ahead_cycles) / count
            if turn:  # the first round warms up
                times[name].append(us)
    return {name: summary(values) for name, values in times.items()}
