"""CUDA graphs of steps at a ladder of sizes: a step is launched by one call.

Capture records launches with their addresses, so everything that a graph reads is in buffers that
stay. All graphs take their memory from one pool; they run one after another.
"""

from bisect import bisect_left
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_LADDER = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224)


LARGEST_MIXED = 2048
"""Tokens of the largest step with prompts that is a graph. Larger ones keep a GPU busy while the
kernels of the next are launched."""


def ladder(max_num_seqs: int) -> list[int]:
    """Batch sizes to capture: dense where a step is short, then every 32, above 256 every 64, the
    largest included."""
    sizes = [size for size in _LADDER if size < max_num_seqs]
    return [*sizes, *range(256, max_num_seqs, 64), max_num_seqs]


def mixed_ladder(max_num_batched_tokens: int) -> list[int]:
    """Numbers of tokens to capture steps of any kind for."""
    most = min(LARGEST_MIXED, max_num_batched_tokens)
    sizes = [32, 64, 96, 128, *range(192, 513, 64), *range(640, 1025, 128), *range(1152, most, 128)]
    return [*(size for size in sizes if size < most), most]


class StepGraphs:
    """run: computes a step of so many rows from buffers that stay, to a result [rows, ...].

    On a CPU there is nothing to capture: `replay` calls `run`, with the same padding.
    """

    def __init__(self, run: Callable[[int], Tensor], sizes: list[int]):
        self._run, self._sizes = run, sizes
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}

    @property
    def largest(self) -> int:
        """Rows of the largest step."""
        return self._sizes[-1]

    @torch.inference_mode()
    def capture(
        self, prepare: Callable[[int], object], pool: Any, stream: torch.cuda.Stream
    ) -> None:
        """Capture all sizes, the largest first, so that the others fit in its memory.

        prepare: launches what `run` launches, each kernel once at least. What is first launched is
        loaded, and may be compiled, which cannot be captured. pool, stream: of all graphs together,
        to share memory.
        """
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        for size in reversed(self._sizes):
            with torch.cuda.stream(stream):
                prepare(size)
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                result = self._run(size)
            self._graphs[size] = (graph, result)
        torch.cuda.current_stream(stream.device).wait_stream(stream)

    def release(self) -> None:
        """Give up the graphs, and the memory of the pool with the last of them."""
        self._graphs.clear()

    def size(self, count: int) -> int:
        """Rows to which a step of `count` is padded."""
        return self._sizes[bisect_left(self._sizes, count)]

    def replay(self, count: int) -> Tensor:
        """The result [count, ...] of a step of `count` rows, valid until the next call."""
        size = self.size(count)
        if not self._graphs:
            return self._run(size)[:count]
        graph, result = self._graphs[size]
        graph.replay()
        return result[:count]
