"""Compiles kernels ahead, each in a process of its own, as many at a time as there are cores.

Much of a compilation by Triton runs under the interpreter's lock, so threads would wait for each
other. A child is a fork of this process: it has imported all that it needs. It compiles what it was
told, which needs no GPU, and leaves it in Triton's cache on disk, where the launch then finds it.
"""

import gc
import hashlib
import logging
import multiprocessing
import os
import signal
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import triton
from triton.runtime import driver
from triton.runtime.cache import get_cache_manager

logger = logging.getLogger(__name__)

Job = Callable[[], object]

PATIENCE = 120.0
"""Seconds in which one kernel at least must be done, else its children are given up."""
MOST = 16
"""Children at a time, however many cores there are: each takes a few hundred megabytes."""


def compile_all(jobs: Sequence[Job], device: torch.device) -> None:
    """Run jobs that launch kernels, those kernels compiled in children, and wait for the device.

    A job is broken off where it needs a kernel that is not compiled, and run again from its start
    when that is: so it may launch its first kernels several times. What is to take longest comes
    first. A job that fails is logged: what it was to compile is compiled when it is needed.
    """
    children = _Children(min(MOST, len(os.sched_getaffinity(0))))
    todo, waiting = deque(jobs), list[tuple[str, Job]]()
    on_gpu = device.type == "cuda"
    try:
        with torch.cuda.device(device) if on_gpu else nullcontext(), torch.inference_mode():
            while todo or waiting:
                if todo and not children.busy:
                    job = todo.popleft()
                    try:
                        with children:
                            job()
                    except _BeingCompiled as found:
                        waiting.append((found.key, job))
                    except Exception as error:
                        logger.warning("a kernel was not compiled ahead: %s", error)
                else:
                    done = children.collect()
                    # They go on before others begin, for they may need more kernels.
                    todo.extendleft(job for key, job in waiting if key in done)
                    waiting = [(key, job) for key, job in waiting if key not in done]
            if on_gpu:
                torch.cuda.synchronize(device)
    finally:
        children.give_up()


class _BeingCompiled(Exception):
    """A job needs the kernel of this key, which a child compiles."""

    def __init__(self, key: str) -> None:
        self.key = key
        super().__init__("a kernel that a child compiles")


class _Children(triton.AsyncCompileMode):
    """While it is entered, Triton asks it for the kernels that this process has not yet."""

    def __init__(self, most: int) -> None:
        super().__init__(executor=None)
        self._most = most
        self._running: dict[str, multiprocessing.process.BaseProcess] = {}
        self._tried: set[str] = set()

    @property
    def busy(self) -> bool:
        return len(self._running) >= self._most

    def submit(self, key: str, compile_fn: Callable[[], Any], finalize_fn: Any) -> Any:
        """The compiled kernel, from disk. Raises _BeingCompiled where a child has to compile it; if
        one has tried and failed, it is compiled here."""
        if key in self._running:
            raise _BeingCompiled(key)
        if key not in self._tried and not _on_disk(key) and self._start(key, compile_fn):
            raise _BeingCompiled(key)
        kernel = compile_fn()
        finalize_fn(kernel)
        return kernel

    def _start(self, key: str, compile_fn: Callable[[], Any]) -> bool:
        """Whether a child could be started."""
        self._tried.add(key)
        context = multiprocessing.get_context("fork")
        process = context.Process(target=_compile, args=(compile_fn,), daemon=True)
        try:
            with warnings.catch_warnings():  # that other threads may hold locks: none of Triton's
                warnings.simplefilter("ignore", DeprecationWarning)
                process.start()
        except (OSError, AssertionError) as error:  # the latter of daemons, which may have no child
            logger.warning("a kernel is compiled in this process: %s", error)
            return False
        self._running[key] = process
        return True

    def collect(self) -> set[str]:
        """Keys of the kernels of children that have ended; waits for one at least."""
        ended = set(wait([each.sentinel for each in self._running.values()], PATIENCE))
        if not ended:
            logger.warning("compilation of %d kernels is given up", len(self._running))
            return self.give_up()
        done = {key for key, process in self._running.items() if process.sentinel in ended}
        for key in done:
            self._running.pop(key).join()
        return done

    def give_up(self) -> set[str]:
        """End the children that still run; their keys."""
        given_up = set(self._running)
        for process in self._running.values():
            process.kill()
            process.join()
        self._running.clear()
        return given_up


def _on_disk(key: str) -> bool:
    """Whether Triton's cache has a kernel; False where that cannot be told."""
    manager = get_cache_manager(hashlib.sha256(key.encode()).hexdigest())
    folder = getattr(manager, "cache_dir", None)
    return folder is not None and any(Path(folder).glob("__grp__*"))


def _compile(compile_fn: Callable[[], Any]) -> None:
    """What a child does. It touches no GPU, and frees nothing that it shares with its parent, which
    might."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # its parent ends it
    gc.disable()
    kernel = compile_fn()
    # The function that passes arguments is compiled apart; it too is then found on disk.
    with suppress(Exception):
        driver.active.launcher_cls(kernel.src, kernel.metadata)
