"""Threads that run one function at the same time, and wait for each other inside it."""

import os
import threading
from collections.abc import Callable
from functools import lru_cache

Job = Callable[[int], None]


class Threads:
    """count - 1 threads beside the caller's. A job must not raise: the others would wait forever.

    They sleep between jobs. A compiled function that gives up the interpreter's lock runs in all at
    once.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._starts = [threading.Event() for _ in range(count - 1)]
        self._done = threading.Semaphore(0)
        self._job: Job | None = None
        self._lock = threading.Lock()
        for index in range(1, count):
            name = f"billfish-{index}"
            threading.Thread(target=self._serve, args=(index,), name=name, daemon=True).start()

    def run(self, job: Job) -> None:
        """job(index) in every thread, index from 0; returns when all have ended."""
        with self._lock:
            self._job = job
            for start in self._starts:
                start.set()
            try:
                job(0)
            finally:  # an interrupt comes when a compiled function is left; others are in theirs
                for _ in self._starts:
                    self._done.acquire()
                self._job = None

    def _serve(self, index: int) -> None:
        start = self._starts[index - 1]
        while True:
            start.wait()
            start.clear()
            assert self._job is not None
            self._job(index)
            self._done.release()


def shared(count: int) -> Threads:
    """Those of this process: models in it take turns."""
    return _shared(count, os.getpid())


@lru_cache(maxsize=4)
def _shared(count: int, process: int) -> Threads:
    return Threads(count)
