"""Compiles what the benchmarks of W4A16 products run, in processes of their own."""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import BrokenExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from billfish.bench.gemm_cases import random_weights
from billfish.bench.processes import in_processes
from billfish.kernels.marlin.configs import Gpu, HopperConfig, Product
from billfish.kernels.marlin.hopper_plan import Plan, plan
from billfish.kernels.marlin.packing import unit_words


class Form(NamedTuple):
    """What a compiled Hopper kernel depends on, of symmetric weights."""

    config: HopperConfig
    m: int
    dtype: torch.dtype = torch.float16
    group_size: int = 128
    residual: bool = False
    silu_mul: bool = False


def compile_all(
    forms: Iterable[Form], jobs: int, others: Sequence[Callable[[], object]] = ()
) -> None:
    """Compile the Hopper kernel in these forms, and what `others` do at their first call.

    BrokenExecutor: a process ended before it was done.
    """
    once = {_plan(form).kernel_key: form for form in forms}
    # The others take longest, so they begin first.
    for done in in_processes([*others, *map(_task, once.values())], jobs):
        if isinstance(done, BrokenExecutor):
            raise done


def _plan(form: Form) -> Plan:
    units = (8, 4, unit_words(form.group_size, False))
    epilogue = (False, form.residual, form.silu_mul)
    return plan(
        form.m, units, form.dtype, Gpu("any", 132), 512, epilogue=epilogue, config=form.config
    )


def _task(form: Form) -> Callable[[], object]:
    return partial(_compile, form)


def _compile(form: Form) -> None:
    from billfish.kernels.marlin import hopper_launch

    units = torch.zeros(8, 4, unit_words(form.group_size, False), dtype=torch.int32, device="cuda")
    x = torch.zeros(form.m, 512, dtype=form.dtype, device="cuda")
    outputs = 256 if form.silu_mul else 512
    residual = torch.zeros(form.m, outputs, dtype=form.dtype, device="cuda")
    product = Product(outputs, residual=residual if form.residual else None, silu_mul=form.silu_mul)
    hopper_launch.launch(x, units, product, form.config)
    torch.cuda.synchronize()


def first_calls(
    name: str, shape: tuple[int, int], rows: Sequence[int], dtype: torch.dtype, group_size: int,
    folder: Path | None,
) -> None:  # fmt: skip
    """Call an implementation once for each number of tokens; what it refuses is told elsewhere."""
    from billfish.bench.gemm import OURS
    from billfish.bench.gemm_peers import makers

    maker = {**OURS, **makers(folder, rows)}[name]
    try:
        product = maker(*random_weights(*shape, group_size, dtype), group_size)
        for m in rows:
            product(torch.zeros(m, shape[1], dtype=dtype, device="cuda"))
    except Exception as error:
        print(f"{name} {shape}: {type(error).__name__}: {str(error)[:200]}", flush=True)
    torch.cuda.synchronize()
