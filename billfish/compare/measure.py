"""Takes the records of a comparison on this machine's GPU, by the modules of billfish.bench.

What does not fit in the time, or fails, is left out and said to be; the rest goes on.
"""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from billfish.bench import record as bench_record
from billfish.compare.records import Record, Records, Row, checked

LIMIT_S, QUICK_LIMIT_S = 540.0, 150.0
"""No case begins after this; one takes up to twenty seconds, most of it compilation."""

SHAPES = ((4096, 4096), (28672, 4096), (57344, 8192))
ROWS = (1, 8, 16, 32, 64, 128, 256, 1024)
ABLATED = ((4096, 4096), (57344, 8192))
QUICK_SHAPES, QUICK_ROWS = ((4096, 4096), (28672, 4096)), (1, 16, 64, 256)
QUICK_DECODE = ("1024 x 1", "1024 x 32", "16384 x 1")

Step = tuple[str, str, Callable[[], list[Row]]]
"""Record, what it measures, and how."""


@dataclass
class Measured:
    """What was taken; what could not be, and why; how long it took."""

    records: Records = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    seconds: float = 0.0


def measure(
    families: Iterable[str],
    *,
    quick: bool,
    say: Callable[[str], None] = print,
    clock: Callable[[], float] = time.monotonic,
) -> Measured:
    """The records of these families as this GPU gives them, a case of each family in turn.

    Over in about three minutes if quick, else ten: after LIMIT_S no further case begins.
    """
    began, limit = clock(), QUICK_LIMIT_S if quick else LIMIT_S
    rows: dict[str, list[Row]] = {}
    done = Measured()
    plans = [PLANS[name](quick, done) for name in families]
    rates = _rates()
    for name, what, take in _in_turns(plans, done.left_out):
        if clock() - began > limit:
            done.left_out.append(f"{what}: no time left")
            continue
        say(f"{clock() - began:5.0f} s  {what}")
        try:
            rows.setdefault(name, []).extend(take())
        except Exception as problem:  # what one kernel cannot do here must not cost the others
            done.left_out.append(f"{what}: {_reason(problem)}")
        torch.cuda.empty_cache()
    head = bench_record.environment("billfish compare" + (" --quick" if quick else ""))
    head["rates"] = rates
    for name, found in rows.items():
        if found:
            done.records[name] = checked(Record(name, "measured", head, found), "measured here")
    done.seconds = round(clock() - began)
    return done


def _in_turns(plans: list[Iterator[Step]], left_out: list[str]) -> Iterator[Step]:
    """The first of each, then the second of each: whatever the time is, no family goes without."""
    while plans:
        for plan in list(plans):
            try:
                step = next(plan, None)
            except Exception as problem:
                left_out.append(f"the rest of a family: {_reason(problem)}")
                step = None
            if step is None:
                plans.remove(plan)
            else:
                yield step


def _reason(problem: Exception) -> str:
    text = str(problem).strip()
    return f"{type(problem).__name__}: {text.splitlines()[0][:200] if text else ''}"


def _rates() -> dict[str, Any]:
    """The ceilings of a roofline: GB/s of memory, TFLOP/s of products of matrices."""
    from billfish.bench.general import Rates

    rates = Rates.measured()
    for kind in (torch.float16, torch.float32):
        rates.math(kind)
    torch.cuda.empty_cache()
    return rates.as_json()


def _marlin(quick: bool, done: Measured) -> Iterator[Step]:
    from billfish.bench import gemm

    shapes, counts = (QUICK_SHAPES, QUICK_ROWS) if quick else (SHAPES, ROWS)
    ablated = QUICK_SHAPES[:1] if quick else ABLATED
    hopper = _is_hopper()
    if not hopper:  # on others the portable kernels run, which have no switches
        done.left_out.append("Marlin's techniques: they are the Hopper kernel's")
    cases = [(s, m) for s in ablated for m in ((1, 16, 64) if quick else (1, 16, 64, 256))]
    if hopper:
        yield "ablation_gemm", "compilation of Marlin's techniques", partial(_compile, cases)
    for shape, m in cases if hopper else ():
        name = f"Marlin's techniques, {shape[0]} x {shape[1]}, M = {m}"
        yield "ablation_gemm", name, partial(_techniques, shape, m)
    for shape in shapes:
        name = f"INT4 beside FP16, {shape[0]} x {shape[1]}"
        yield "gemm", name, partial(_beside_fp16, gemm, shape, counts)


def _compile(cases: Sequence[tuple[tuple[int, int], int]]) -> list[Row]:
    """All configurations at once, in processes of their own: they take seconds each."""
    from billfish.bench import gemm
    from billfish.bench.gemm_compile import Form, compile_all

    found = (Form(c, m) for shape, m in cases for c in gemm.techniques_off(*shape, m).values())
    compile_all(found, min(8, os.cpu_count() or 1))
    return []


def _techniques(shape: tuple[int, int], m: int) -> list[Row]:
    from billfish.bench import gemm

    return gemm.ablation(shape, [m], gemm.read_rate())


def _beside_fp16(gemm: Any, shape: tuple[int, int], counts: tuple[int, ...]) -> list[Row]:
    from billfish.bench.gemm_peers import cublas

    weights = gemm.random_weights(*shape, 128, torch.float16)
    products = gemm.build(shape, weights, 128, {"cublas": cublas})
    return [row for m in counts for row in gemm.run_case(products, weights, m, 128)]


def _paged_attention(quick: bool, done: Measured) -> Iterator[Step]:
    from billfish.bench import attention, attention_ablation, block_movement
    from billfish.bench.attention_cases import cases
    from billfish.bench.attention_peers import contiguous

    hopper = _is_hopper()
    if not hopper:
        done.left_out.append("PagedAttention's techniques: they are the Hopper kernels'")
    makers: dict[str, Callable[[Any], list[Callable[[], object]]]] = {
        "billfish": attention.ours,
        "portable": attention_ablation.portable,
        "contiguous": contiguous,
    }
    names = (*attention_ablation.DECODE, *attention_ablation.PREFILL)
    yield "ablation_attention", "block movement, techniques", attention_ablation.movement_rows
    for case in cases((32, 8)):
        if hopper and case.name in (QUICK_DECODE if quick else names):
            take = partial(attention_ablation.case_rows, case)
            yield "ablation_attention", f"PagedAttention's techniques, {case.name}", take
    for case in cases((32, 8)):
        wanted = case.name in QUICK_DECODE if quick else case.kv_bytes < 20e9
        if wanted and case.mode in ("decode", "prefill"):
            take = partial(attention.run_case, case, makers)
            yield "attention", f"attention, {case.mode} {case.name}", take
    if not quick:
        yield "attention_movement", "block movement by size", block_movement.movement


def _general(quick: bool, done: Measured) -> Iterator[Step]:
    from billfish.bench import general, tutorial

    device = torch.device("cuda")
    rates = general.Rates.measured()
    cases = general.all_cases(quick=True)
    # Without torch.compile, which alone would take the time there is.
    peers = ["torch"] if quick else sorted({p for c in cases for p in c.peers} - {"torch.compile"})
    for case in cases:
        if case.settings:
            take = partial(general.ablate, case, rates, device)
            yield "ablation_general", f"techniques of {case.name}", take
        yield "general", case.name, partial(general.compare, case, rates, device, peers)
    yield "tutorial", "the steps of the tutorial", tutorial.rows


PLANS: dict[str, Callable[[bool, Measured], Iterator[Step]]] = {
    "marlin": _marlin,
    "paged_attention": _paged_attention,
    "general": _general,
}


def _is_hopper() -> bool:
    from billfish.kernels.gluon_compat import gluon_supported

    there = torch.cuda.is_available()
    return there and gluon_supported() and torch.cuda.get_device_capability()[0] == 9
