"""Compiling in children: what they leave in Triton's cache is found there, and what they fail to
compile is compiled in this process."""

import logging
import os
from collections import Counter
from functools import partial

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl
from triton import knobs

from tests.compile.offline import fake_device

if knobs.runtime.interpret:
    pytest.skip("compiles, so not with TRITON_INTERPRET=1", allow_module_level=True)

from billfish.worker import compilation

CPU = torch.device("cpu")


@triton.jit
def _scale_kernel(x, FACTOR: tl.constexpr):
    index = tl.arange(0, 32)
    tl.store(x + index, tl.load(x + index) * FACTOR)


@triton.jit
def _no_kernel(x, SIZE: tl.constexpr):
    tl.static_assert(SIZE == 0, "nobody compiles this")


@pytest.fixture
def compiled(tmp_path, monkeypatch):
    """What this process compiles or finds on disk, in an empty cache: names, and whether it was
    there."""
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path))
    seen: Counter[tuple[str, bool]] = Counter()
    # Children note what they compile too, but in a copy.
    monkeypatch.setattr(
        knobs.compilation,
        "listener",
        lambda *, src, cache_hit, **_: seen.update([(src.name, cache_hit)]),
    )
    with fake_device(90):
        for kernel in (_scale_kernel, _no_kernel):
            kernel.device_caches.clear()
        yield seen


def job(runs: list[int], *factors: int) -> None:
    """Compiles the kernel in these forms, one after the other."""
    x = torch.zeros(32)
    for factor in factors:
        runs.append(factor)
        _scale_kernel.warmup(x, FACTOR=factor, grid=(1,))


def test_children_compile_and_this_process_finds_it(compiled) -> None:
    runs: list[int] = []
    compilation.compile_all([partial(job, runs, 2, 3), partial(job, runs, 3, 4)], CPU)
    assert compiled == {("_scale_kernel", True): 3}
    assert set(runs) == {2, 3, 4}
    compiled.clear()
    job(runs, 2, 3, 4)
    assert not compiled  # they are in memory


def test_what_is_on_disk_needs_no_child(compiled, monkeypatch) -> None:
    runs: list[int] = []
    compilation.compile_all([partial(job, runs, 2)], CPU)
    _scale_kernel.device_caches.clear()
    compiled.clear()
    monkeypatch.setattr(compilation, "_compile", None)
    compilation.compile_all([partial(job, runs, 2)], CPU)
    assert runs == [2, 2, 2]
    assert compiled == {("_scale_kernel", True): 1}


@pytest.mark.parametrize("most", [1, 2])
def test_many_kernels_wait_for_few_children(most: int, compiled, monkeypatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(most)))
    runs: list[int] = []
    compilation.compile_all([partial(job, runs, n) for n in range(2, 7)], CPU)
    assert compiled == {("_scale_kernel", True): 5}


def test_what_a_child_fails_to_compile_is_compiled_here(compiled, monkeypatch) -> None:
    monkeypatch.setattr(compilation, "_compile", lambda compile_fn: os._exit(3))
    compilation.compile_all([partial(job, [], 2)], CPU)
    assert compiled == {("_scale_kernel", False): 1}


def test_a_child_that_does_not_end_is_given_up(compiled, monkeypatch, caplog) -> None:
    monkeypatch.setattr(compilation, "_compile", lambda compile_fn: os.read(os.pipe()[0], 1))
    monkeypatch.setattr(compilation, "PATIENCE", 0.1)
    with caplog.at_level(logging.WARNING):
        compilation.compile_all([partial(job, [], 2)], CPU)
    assert compiled == {("_scale_kernel", False): 1}
    assert "1 kernels is given up" in caplog.text


def test_without_children_all_is_compiled_here(compiled, monkeypatch, caplog) -> None:
    def refuse(process: object) -> None:
        raise OSError("no more processes")

    context = compilation.multiprocessing.get_context("fork")
    monkeypatch.setattr(context.Process, "start", refuse)
    compilation.compile_all([partial(job, [], 2)], CPU)
    assert compiled == {("_scale_kernel", False): 1}
    assert "no more processes" in caplog.text


def test_a_job_that_fails_keeps_no_other_from_its_kernel(compiled, caplog) -> None:
    def fails() -> None:
        _no_kernel.warmup(torch.zeros(32), SIZE=1, grid=(1,))

    compilation.compile_all([fails, partial(job, [], 2)], CPU)
    assert compiled == {("_scale_kernel", True): 1}
    assert "was not compiled ahead" in caplog.text
