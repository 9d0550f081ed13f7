"""Compiles what `billfish bench general` runs, a case a task, in processes of their own."""

import time
from collections.abc import Sequence
from concurrent.futures import BrokenExecutor
from functools import partial

import torch

from billfish.bench.general_case import Case, Function, fresh, is_there
from billfish.bench.processes import in_processes

SLOW = ("fft", "rfft", "bilateral", "convolve2d", "separable_convolve2d", "matmul", "elementwise")
"""Kernels that take longest to compile: the last to end should not be the last to begin."""


def compile_all(
    wanted: tuple[tuple[str, ...], bool], device: torch.device, peers: Sequence[str] | None,
    settings: bool, jobs: int, until: float,
) -> list[str]:  # fmt: skip
    """Call everything that these cases time once; returns a line for each that failed.

    wanted: arguments of `general.all_cases`, for a case cannot be sent to a process. peers: names,
    None for all. settings: techniques switched off too. until: no case begins after this time, of
    time.time().
    """
    from billfish.bench.general import all_cases

    kernels = [case.kernel for case in all_cases(*wanted)]
    order = sorted(range(len(kernels)), key=lambda i: kernels[i] not in SLOW)
    tasks = [partial(_first_calls, wanted, i, device, peers, settings, until) for i in order]
    lines: list[str] = []
    for i, failed in zip(order, in_processes(tasks, min(jobs, len(order))), strict=True):
        ended = [f"a process ended before {kernels[i]} was compiled"]
        lines += ended if isinstance(failed, BrokenExecutor) else failed
    return lines


def _first_calls(
    wanted: tuple[tuple[str, ...], bool], index: int, device: torch.device,
    peers: Sequence[str] | None, settings: bool, until: float,
) -> list[str]:  # fmt: skip
    from billfish.bench.general import all_cases

    case = all_cases(*wanted)[index]
    if time.time() > until:
        return [f"{case.name}: not compiled, out of time"]
    failed = first_calls(case, functions(case, peers, settings), device)
    torch._dynamo.reset()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return failed


def functions(case: Case, peers: Sequence[str] | None, settings: bool) -> dict[str, Function]:
    """What is timed of a case, by name."""
    found: dict[str, Function] = {"billfish": case.run}
    for name, peer in case.peers.items():
        if is_there(name) and (peers is None or name in peers):
            found[name] = peer
    if settings:
        for technique, each in case.settings.items():
            found |= {f"{technique}: {setting}": call for setting, call in each.items()}
    return found


@torch.no_grad()
def first_calls(case: Case, calls: dict[str, Function], device: torch.device) -> list[str]:
    """Call each once; a line for each that failed."""
    lines = []
    torch.manual_seed(0)
    inputs = case.draw(device)
    for name, call in calls.items():
        try:
            call(*fresh(inputs))
            if device.type == "cuda":
                torch.cuda.synchronize()
        except Exception as problem:
            lines.append(f"{case.name}, {name}: {type(problem).__name__}: {str(problem)[:200]}")
    return lines
