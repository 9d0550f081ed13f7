"""Times the general kernels beside their peers, in one process on one GPU.

    billfish bench general --out benchmarks/general.json
    billfish bench general --ablation benchmarks/ablation_general.json
    billfish bench general --kernels data --out FILE, then --kernels training --keep --out FILE
    billfish bench general --compile-only --jobs 8 --out FILE, then the same without --compile-only

Peers: torch (with cuBLAS, cuDNN, cuFFT and cuSPARSE), torch.compile, and CuPy (which brings CUB),
Liger-Kernel and FlashInfer where they are installed; the record names those that are missing. All
implementations of a case are captured in CUDA graphs and replayed in turns, so that they meet the
same clock and power state; those of CuPy and what waits for the GPU are timed call by call (`graph`
is false). Each call of a graph has inputs and results of its own, enough of them to miss the L2
cache, fewer where arithmetic is what takes the time. Compilation is outside. Results are checked
against float64; one that is off is marked and not timed.

The floor is the time that the bytes which any implementation has to move need at the rates at which
this GPU reads, copies and writes memory, or the operations at the rate of its products of matrices
in that dtype, whichever is longer; all rates are measured first.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from billfish.bench import record
from billfish.bench.general_case import Case, Function, Inputs, Math, dtype_name, fresh, is_there
from billfish.bench.general_compile import compile_all, functions
from billfish.bench.turns import Call, elapsed_us, time_in_turns, waits
from billfish.errors import ConfigError

DOMAINS = ("data", "training", "science", "signal")
DEVICE = torch.device("cuda")
COLD_BYTES = 260_000_000  # four times the L2 of an H200
MOST_COPIES = 200
ROTATION_US = 10_000.0
AHEAD_CYCLES = 1_000_000  # half a millisecond in which the host queues a call
PACKAGES = ("cupy-cuda12x", "cupy-cuda13x", "cupy", "liger-kernel", "flashinfer-python")

Timer = Callable[..., dict[str, tuple[float, float]]]
Row = dict[str, Any]


def all_cases(names: Sequence[str] = (), quick: bool = False) -> list[Case]:
    """Those of the kernels or domains named, in that order (none: all). quick: the first of each
    kernel."""
    found: list[Case] = []
    for domain in DOMAINS:
        module = f"billfish.bench.general_{domain}"
        if find_spec(module) is not None:
            found += import_module(module).cases()
    known = {case.kernel for case in found} | {*DOMAINS}
    unknown = sorted(set(names) - known)
    if unknown:
        raise ConfigError(
            f"no general kernel is named {', '.join(unknown)}; there are {', '.join(sorted(known))}"
        )
    kept = [case for case in found if not names or {case.kernel, case.domain} & set(names)]
    if names:
        kept.sort(key=lambda c: min(names.index(n) for n in (c.kernel, c.domain) if n in names))
    return list({case.kernel: case for case in reversed(kept)}.values())[::-1] if quick else kept


@dataclass
class Rates:
    """Bytes a microsecond of memory read, copied (both directions counted) and written, and
    operations a microsecond of products of matrices, measured where first asked for."""

    read: float
    copy: float
    write: float
    flops: dict[Math, float] = field(default_factory=dict)

    @classmethod
    def measured(cls) -> "Rates":
        """Of 2 GiB, the best of some."""
        data = torch.ones(1 << 29, dtype=torch.float32, device="cuda")
        other = torch.empty_like(data)
        reads = (data.sum, partial(torch.sum, data.view(1 << 14, -1), 1))
        copies = (partial(other.copy_, data), partial(torch.mul, data, 2.0, out=other))
        return cls(
            read=data.nbytes / min(_best(read) for read in reads),
            copy=2 * data.nbytes / min(_best(copy) for copy in copies),
            write=data.nbytes / _best(other.zero_),
        )

    def memory_us(self, read: int, written: int) -> float:
        """Equal parts of reads and writes go at the rate of a copy, the rest at its own."""
        both = min(read, written)
        return 2 * both / self.copy + (read - both) / self.read + (written - both) / self.write

    def math(self, kind: Math) -> float:
        """Operations a microsecond."""
        if kind not in self.flops:
            self.flops[kind] = _matmul_rate(kind)
        return self.flops[kind]

    def floor_us(self, case: Case) -> float:
        math_us = case.flops / self.math(case.math or case.dtype) if case.flops else 0.0
        return max(self.memory_us(case.read, case.written), math_us)

    def as_json(self) -> dict[str, Any]:
        """In GB/s, and TFLOP/s by dtype."""
        return {
            "read_gbps": round(self.read / 1e3),
            "copy_gbps": round(self.copy / 1e3),
            "write_gbps": round(self.write / 1e3),
            "tflops": {dtype_name(kind): round(rate / 1e6, 1) for kind, rate in self.flops.items()},
        }


def _best(call: Call, times: int = 20) -> float:
    return min(elapsed_us(call) for _ in range(times))


def _matmul_rate(kind: Math, size: int = 8192) -> float:
    """Operations a microsecond; a product of float32 without TF32."""
    dtype = torch.float32 if isinstance(kind, str) else kind
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = kind == "tf32"
    try:
        a, b = (torch.randn(size, size, device="cuda").to(dtype) for _ in range(2))
        return 2 * size**3 / _best(partial(torch.mm, a, b), 4)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


@torch.no_grad()
def check(case: Case, impls: Mapping[str, Function], device: torch.device) -> dict[str, float]:
    """The error of each; those that fail are told and left out."""
    torch.manual_seed(0)
    inputs = case.draw(device)
    want = case.reference(*fresh(inputs))
    errors: dict[str, float] = {}
    for name, function in impls.items():
        try:
            errors[name] = case.error(function(*fresh(inputs)), want)
        except Exception as problem:
            print(f"{case.name}, {name}: {type(problem).__name__}: {str(problem)[:200]}")
    return errors


@torch.no_grad()
def memory(case: Case, impls: Mapping[str, Function], device: torch.device) -> dict[str, int]:
    """Bytes that a call of each allocates at most, its results among them."""
    inputs = case.draw(device)
    found = {}
    for name, function in impls.items():
        given = fresh(inputs)
        function(*given)  # what libraries keep for their next call is not counted
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        function(*given)
        found[name] = torch.cuda.max_memory_allocated(device) - before
    return found


def _held(function: Function, inputs: Inputs) -> Call:
    """A call whose result stays alive until the next: results of a rotation are all in memory."""
    last: list[Any] = [None]

    def call() -> None:
        last[0] = function(*inputs)

    return call


@torch.no_grad()
def timed(
    case: Case, impls: Mapping[str, Function], rates: Rates, device: torch.device, timer: Timer
) -> tuple[dict[str, tuple[float, float]], list[str]]:
    """(microseconds and spread of each, those that no graph holds)."""
    inputs = [case.draw(device) for _ in range(copies_of(case, rates))]
    calls = {name: [_held(function, each) for each in inputs] for name, function in impls.items()}
    eager = [
        name
        for name, each in calls.items()
        if getattr(impls[name], "eager", False) or (device.type == "cuda" and waits(each[0]))
    ]
    return timer(calls, eager=eager, ahead_cycles=AHEAD_CYCLES), eager


def copies_of(case: Case, rates: Rates) -> int:
    """Inputs that miss the L2 together; fewer where going through them would take long, which is
    where arithmetic takes the time and memory does not matter."""
    cold = -(-COLD_BYTES // max(1, case.read + case.written))
    quick = int(ROTATION_US / max(rates.floor_us(case), 0.01))
    return max(1, min(MOST_COPIES, cold, quick))


def measure(
    case: Case, rates: Rates, device: torch.device, peers: Sequence[str] | None = None,
    settings: bool = True, timer: Timer = time_in_turns,
) -> tuple[list[Row], list[Row]]:  # fmt: skip
    """Rows of general.json and of ablation_general.json, all timed in the same turns.

    peers: names of those wanted (None: all). settings: whether techniques are switched off too.
    """
    impls = functions(case, peers, settings)
    errors = check(case, impls, device)
    right = {name: impls[name] for name, error in errors.items() if error <= case.limit}
    times, eager = timed(case, right, rates, device, timer)
    held = memory(case, right, device) if case.held and device.type == "cuda" else {}
    floor = round(rates.floor_us(case), 2)
    switched = {
        f"{technique}: {setting}": (technique, setting)
        for technique, each in case.settings.items() for setting in each
    }  # fmt: skip
    wrong = [name for name in switched if name in errors and name not in right]
    if wrong:
        print(f"{case.name}: wrong results, not timed: {', '.join(wrong)}")
    rows, ablation = [], []
    for name, error in errors.items():
        took = {}
        if name in times:
            took = {"us": round(times[name][0], 2), "spread": round(times[name][1], 3)}
        if name not in switched:
            row: Row = {
                "kernel": case.kernel, "domain": case.domain, "size": case.size,
                "dtype": dtype_name(case.dtype), "impl": name, "bytes": case.read + case.written,
                "flops": case.flops, "floor_us": floor,
                "rel_err": float(f"{error:.2e}") if math.isfinite(error) else None,
            }  # fmt: skip
            kept = {"held_bytes": held[name]} if name in held else {}
            rows.append(row | took | kept | ({"graph": name not in eager} if took else {}))
        if took and settings and case.settings and name in {"billfish", *switched}:
            technique, setting = switched.get(name, ("all", "on"))
            ablation.append({
                "family": "general", "domain": case.domain, "kernel": case.kernel,
                "technique": technique, "setting": setting,
                "case": f"{case.size} {dtype_name(case.dtype)}", **took,
                "bytes": case.read + case.written, "floor_us": floor,
            })  # fmt: skip
    return rows, ablation


def compare(case: Case, rates: Rates, device: torch.device, peers: Sequence[str] | None = None,
            timer: Timer = time_in_turns) -> list[Row]:  # fmt: skip
    """Rows of general.json."""
    return measure(case, rates, device, peers, False, timer)[0]


def ablate(case: Case, rates: Rates, device: torch.device,
           timer: Timer = time_in_turns) -> list[Row]:  # fmt: skip
    """Rows of ablation_general.json: technique "all", as the kernel is, then each switched."""
    return measure(case, rates, device, [], True, timer)[1]


def missing(cases: Sequence[Case]) -> list[str]:
    """Peers that this machine does not have."""
    return sorted({name for case in cases for name in case.peers if not is_there(name)})


def table(rows: Sequence[Row]) -> str:
    """A line a case: ours, the best peer, how many times ours its time is, percent of the floor."""
    cases: dict[tuple[str, str, str], dict[str, Row]] = {}
    for row in rows:
        cases.setdefault((row["kernel"], row["size"], row["dtype"]), {})[row["impl"]] = row
    lines = [
        f"{'kernel':24}{'size':>24} {'dtype':9}{'us':>10}{'best peer':>26}{'x':>7}{'floor':>7}"
    ]
    for (kernel, size, dtype), impls in cases.items():
        ours = impls.get("billfish", {}).get("us")
        others = {n: r["us"] for n, r in impls.items() if n != "billfish" and "us" in r}
        best = min(others, key=lambda name: others[name], default=None)
        if ours is None:
            end = f"{'wrong':>10}"
        else:
            peer = f"{best} {others[best]:.1f}" if best else "-"
            ratio = f"{others[best] / ours:.2f}" if best else "-"
            part = f"{100 * impls['billfish']['floor_us'] / ours:.0f}%"
            end = f"{ours:10.1f}{peer:>26}{ratio:>7}{part:>7}"
        lines.append(f"{kernel:24}{size:>24} {dtype:9}{end}")
    return "\n".join(lines)


def ablation_table(rows: Sequence[Row]) -> str:
    """A line a switched technique: microseconds with all of them, with this one switched, times."""
    lines = []
    base: dict[tuple[str, str], float] = {}
    for row in rows:
        case = (row["kernel"], row["case"])
        if row["technique"] == "all":
            base[case] = row["us"]
        elif case in base:
            name = f"{row['technique']}: {row['setting']}"
            lines.append(f"{' '.join(case):48}{base[case]:10.1f} {name:44}{row['us']:10.1f}"
                         f"{row['us'] / base[case]:7.2f}")  # fmt: skip
    return "\n".join(lines)


def main(arguments: list[str]) -> None:
    options = _parse(arguments)
    names = tuple(name for name in options.kernels.split(",") if name)
    cases = all_cases(names, options.quick)
    peers = None if options.peers is None else [p for p in options.peers.split(",") if p]
    known = {peer for case in cases for peer in case.peers}
    if unknown := set(peers or ()) - known:
        raise ConfigError(f"--peers: no kernel of these has {unknown.pop()!r} beside it; there are "
                          + ", ".join(sorted(known)))  # fmt: skip
    if not options.out:
        peers = []  # the other record has none
    head = record.environment("billfish bench general " + " ".join(arguments), PACKAGES)
    head["versions"] |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    head["missing"] = missing(cases)
    began = time.monotonic()
    if options.jobs:
        wanted = (names, options.quick)
        until = time.time() + options.time_limit
        for line in compile_all(wanted, DEVICE, peers, bool(options.ablation), options.jobs, until):
            print(line)
        print(f"compiled after {time.monotonic() - began:.0f} s", flush=True)
    if options.compile_only:
        return
    paths = [path for path in (options.out, options.ablation) if path]
    rows = {path: _kept(path, head, cases) if options.keep else [] for path in paths}
    rates = Rates.measured()
    for index, case in enumerate(cases):
        if time.monotonic() - began > options.time_limit:
            print(f"out of time before {case.name}; --kernels and --keep go on from here")
            break
        print(f"[{index + 1}/{len(cases)}] {case.name}", flush=True)
        started = time.monotonic()
        found = _measured(
            case,
            partial(measure, case, rates, DEVICE, peers, bool(options.ablation), time_in_turns),
        )
        for path, more in zip((options.out, options.ablation), found, strict=True):
            if path:
                rows[path] += more
                record.write(path, head | {"rates": rates.as_json()}, rows[path])
        print(f"  {time.monotonic() - started:.1f} s", flush=True)
        torch._dynamo.reset()
        if not _sound():
            print("a CUDA graph failed and left this process unsound; --kernels and --keep go on")
            break
    for path, show in ((options.out, table), (options.ablation, ablation_table)):
        if path:
            print(show(rows[path]))
    if head["missing"]:
        print(f"not installed here: {', '.join(head['missing'])}")


def _measured(
    case: Case, measure: Callable[[], tuple[list[Row], list[Row]]]
) -> tuple[list[Row], list[Row]]:
    """A case that fails is told; the others go on."""
    try:
        return measure()
    except Exception as problem:
        print(f"{case.name}: {type(problem).__name__}: {str(problem)[:300]}", flush=True)
        return [], []


def _sound() -> bool:
    """Whether torch still draws and frees; a graph that fails leaves both in the middle of it."""
    try:
        torch.rand(1, device=DEVICE)
        torch.cuda.empty_cache()
    except RuntimeError:
        return False
    return True


def _kept(path: str, head: Mapping[str, Any], cases: Sequence[Case]) -> list[Row]:
    """The rows that a file has of other kernels, measured on this device with this commit."""
    if not Path(path).exists():
        return []
    old = json.loads(Path(path).read_text())
    for name in ("device", "commit"):
        if old[name] != head[name]:
            raise ConfigError(f"--keep: {path} is of {name} {old[name]}, this is {head[name]}")
    again = {case.kernel for case in cases}
    return [row for row in old["rows"] if row["kernel"] not in again]


def _parse(arguments: list[str]) -> argparse.Namespace:
    cli = argparse.ArgumentParser(
        prog="billfish bench general",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    cli.add_argument("--out", help="JSON file for the comparison with peers")
    cli.add_argument("--ablation", help="JSON file for the kernels with techniques switched off")
    cli.add_argument("--kernels", default="", help="names of kernels or of domains, in this order: "
                     + ", ".join(DOMAINS))  # fmt: skip
    cli.add_argument("--peers", help="names of the peers wanted (default: all; '' for none)")
    cli.add_argument("--quick", action="store_true", help="one size of each kernel")
    cli.add_argument("--keep", action="store_true", help="keep what the files have of others")
    cli.add_argument("--time-limit", type=float, default=540, help="start no case after (s)")
    cli.add_argument("--jobs", type=int, default=0, help="processes that compile first (none: 0)")
    cli.add_argument("--compile-only", action="store_true", help="compile, and time nothing")
    options = cli.parse_args(arguments)
    if not (options.out or options.ablation):
        cli.error("say where results go: --out FILE, --ablation FILE or both")
    if options.jobs < 0 or (options.compile_only and not options.jobs):
        cli.error("--compile-only needs --jobs, 1 or more")
    return options


if __name__ == "__main__":
    main(sys.argv[1:])
