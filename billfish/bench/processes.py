"""Tasks in processes of their own, for what they compile.

Triton, torch.compile, the driver and the peers keep what they compiled on disk, so the process that
measures finds it there.
"""

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")


def in_processes(tasks: Sequence[Callable[[], T]], jobs: int) -> Iterator[T | BrokenExecutor]:
    """What tasks return, in their order, in which they begin; an error for each that was not done
    when a process ended before its time.

    Raises what a task raises.
    """
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, context, initializer=_begin) as pool:
        for task in [pool.submit(task) for task in tasks]:
            try:
                yield task.result()
            except BrokenExecutor as error:
                yield error


def _begin() -> None:
    """Each process is one of many: it compiles by itself."""
    import torch._inductor.config as inductor

    torch.set_num_threads(1)
    inductor.compile_threads = 1
