"""Where the time of a decode step goes: each kernel's time, bytes, FLOPs and floor on this GPU.

    billfish bench step --model llama-3-8b --weights int4 --batch 32 --context 512
    billfish bench step --batch 1,32,256 --out benchmarks/step.json

Kernels of a step overlap: the next one starts and loads its weights while the last one ends. So the
time of a kernel is what it adds: from the end of the one before, or its own start if that is later,
to its own end. What is then left of the step are gaps, where nothing ran. The floor of a kernel is
the larger of its bytes over the bandwidth and its FLOPs over the matrix rate, both measured here:
copying 2 GiB, reads and writes counted, and a bf16 product of 8192^3.
"""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from billfish.bench import engine as bench_engine
from billfish.config import ModelConfig
from billfish.errors import ConfigError
from billfish.worker.device import why_no_gpu
from billfish.worker.memory_plan import INT4_BYTES

STEPS = 20
HEAD_BYTES = {None: 2.0, "int8": 2 * INT4_BYTES, "int4": 4.5 / 8}
"""A weight of the head: in 16 bits; as two INT4 products; in groups of 32 with a scale each."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel as it ran: microseconds on one clock."""

    name: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Cost:
    """What a part of the model must move and compute, at least, in a step."""

    bytes: float
    flops: float


@dataclass(frozen=True, slots=True)
class Part:
    """One row of the table: a part of the step, all its kernels together. us: a step."""

    name: str
    calls: float
    us: float
    cost: Cost | None


def label(kernels: Sequence[Kernel], *, fused: bool) -> list[str]:
    """Which part of the model each kernel of a step belongs to, by what is around it.

    Norms, cache writes, attention and gated activations have kernels with names of their own; what
    lies between is a product. fused: the gated activation is part of the product before.
    """
    labels, place = [], "inputs"
    for kernel in kernels:
        name = kernel.name
        if "_rms_norm_kernel" in name:
            place = "qkv" if place in ("inputs", "down") else "gate_up"
            labels.append("norm")
        elif "_write_kernel" in name:
            place = "attention"
            labels.append("rotate and write")
        elif "_gated_kernel" in name:
            place = "down"
            labels.append("gated activation")
        elif "_sample_kernel" in name or "_largest_kernel" in name:
            labels.append("sampling")
            place = "inputs"
        elif place == "attention" and not any(n in name for n in ("decode", "prefill", "attn")):
            labels.append("o")
            place = "o"
        elif place == "gate_up" and fused:
            labels.append("gate_up")
            place = "down"
        else:
            labels.append(place)
    # The norm after the last layer comes before the head, not before a layer.
    last = len(labels) - 1 - labels[::-1].index("norm") if "norm" in labels else len(labels)
    return [
        "head" if i > last and part in ("qkv", "gate_up") else part for i, part in enumerate(labels)
    ]


def exclusive(kernels: Sequence[Kernel]) -> list[float]:
    """Microseconds that each kernel adds to those before it; kernels in order of their starts."""
    added, end = [], 0.0
    for kernel in kernels:
        added.append(max(0.0, kernel.end - max(kernel.start, end)))
        end = max(end, kernel.end)
    return added


def costs(
    config: ModelConfig, batch: int, context: int, *, int4: bool, head: str | None = None
) -> dict[str, Cost]:
    """By part, of a decode step with 16-bit activations and KV. head: what it is rounded to."""
    layers = config.num_layers
    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    heads, kv_heads = config.num_heads * dim, config.num_kv_heads * dim
    weight = INT4_BYTES if int4 else 2.0

    def product(n: int, k: int, out: int | None = None) -> Cost:
        size = weight * n * k + 2 * batch * (k + (out or n))
        return Cost(layers * size, 2.0 * layers * batch * n * k)

    elementwise = 2 * batch * hidden
    return {
        "norm": Cost((2 * layers + 1) * 4 * elementwise, 0),
        "qkv": product(heads + 2 * kv_heads, hidden),
        "rotate and write": Cost(layers * 4 * batch * (heads + 2 * kv_heads), 0),
        "attention": Cost(
            layers * 4 * batch * (context * kv_heads + heads),
            4.0 * layers * batch * context * heads,
        ),
        "o": product(hidden, heads),
        "gate_up": product(2 * inner, hidden, inner if int4 else 2 * inner),
        "gated activation": Cost(layers * 6 * batch * inner, 0),
        "down": product(hidden, inner),
        "head": Cost(
            config.vocab_size * (HEAD_BYTES[head] * hidden + 2 * batch),
            2.0 * batch * config.vocab_size * hidden,
        ),
        "sampling": Cost(2 * batch * config.vocab_size, 0),
    }


def table(
    parts: Sequence[Part], wall_us: float, bandwidth: float, rate: float
) -> tuple[list[dict[str, Any]], str]:
    """Rows for a file, and the same as text. wall_us: of a step. bandwidth: bytes a second. rate:
    FLOPs a second."""
    rows, lines = (
        [],
        [
            f"{'part':18}{'calls':>7}{'us':>10}{'share':>8}{'MB':>10}{'GFLOP':>9}{'floor us':>10}"
            f"{'of floor':>10}"
        ],
    )
    for part in parts:
        row: dict[str, Any] = {"part": part.name, "calls": part.calls, "us": round(part.us, 2)}
        text = f"{part.name:18}{part.calls:7.1f}{part.us:10.1f}{part.us / wall_us:8.1%}"
        if part.cost is not None and part.us:
            size, flops = part.cost.bytes, part.cost.flops
            floor = max(size / bandwidth, flops / rate) * 1e6
            row |= {"bytes": round(size), "flops": round(flops), "floor_us": round(floor, 2)}
            text += f"{size / 1e6:10.1f}{flops / 1e9:9.1f}{floor:10.1f}{floor / part.us:10.0%}"
        rows.append(row)
        lines.append(text)
    floor = sum(row.get("floor_us", 0.0) for row in rows)
    gaps = wall_us - sum(part.us for part in parts)
    rows.append({"part": "gaps", "us": round(gaps, 2)})
    rows.append({"part": "step", "us": round(wall_us, 2), "floor_us": round(floor, 2)})
    lines.append(f"{'gaps':25}{gaps:10.1f}{gaps / wall_us:8.1%}")
    lines.append(f"{'step':25}{wall_us:10.1f}{'':27}{floor:10.1f}{floor / wall_us:10.0%}")
    return rows, "\n".join(lines)


def ceilings() -> tuple[float, float]:
    """(bytes a second, FLOPs a second) of this GPU: the best of a few runs each."""
    source = torch.randn(1 << 29, device="cuda")
    target = torch.empty_like(source)
    copy = _fastest(lambda: target.copy_(source))
    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    return 2 * 4 * (1 << 29) / copy, 2 * 8192**3 / _fastest(lambda: torch.mm(a, b))


def _fastest(run: Callable[[], Tensor]) -> float:
    """Seconds."""
    times = []
    for _ in range(8):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return min(times[2:])


def measure(served: bench_engine.Served, batch: int, context: int) -> tuple[list[Kernel], float]:
    """The kernels of STEPS decode steps of the engine, and the microseconds of a step without the
    profiler."""
    from torch.profiler import ProfilerActivity, profile

    engine = served.engine
    for _ in range(batch):
        served.add(context, 3 * STEPS + 8)
    while len(engine.step()) < batch:
        if not engine.has_unfinished:
            raise ConfigError(f"{batch} requests of {context} tokens never decode together")
    for _ in range(4):
        engine.step()
    begin = time.perf_counter()
    for _ in range(STEPS):
        engine.step()
    wall = (time.perf_counter() - begin) / STEPS * 1e6
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(STEPS):
            engine.step()
        torch.cuda.synchronize()
    while engine.has_unfinished:
        engine.step()
    kernels = [
        Kernel(event.name, event.time_range.start, event.time_range.end)
        for event in profiler.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    return sorted(kernels, key=lambda kernel: kernel.start), wall


def parts_of(
    kernels: Sequence[Kernel],
    config: ModelConfig,
    batch: int,
    context: int,
    *,
    int4: bool,
    head: str | None = None,
) -> list[Part]:
    """The kernels of STEPS steps, by part of the model, in the order in which parts come first."""
    fused = int4 and not any("_gated_kernel" in kernel.name for kernel in kernels)
    labels = []
    step: list[Kernel] = []
    for kernel in kernels:  # a step ends with the choice of its tokens
        step.append(kernel)
        if "_sample_kernel" in kernel.name:
            labels += label(step, fused=fused)
            step = []
    labels += label(step, fused=fused)
    known = costs(config, batch, context, int4=int4, head=head)
    sums: dict[str, list[float]] = {}
    for part, us in zip(labels, exclusive(kernels), strict=True):
        entry = sums.setdefault(part, [0, 0.0])
        entry[0] += 1
        entry[1] += us
    return [
        Part(name, count / STEPS, us / STEPS, known.get(name))
        for name, (count, us) in sums.items()
    ]  # fmt: skip


def _batches(said: str) -> list[int]:
    try:
        batches = [int(batch) for batch in said.split(",")]
    except ValueError:
        batches = [0]
    if min(batches) < 1:
        raise ConfigError(f"--batch is a number of requests, or several as 1,32, got {said!r}")
    return batches


def main(arguments: list[str]) -> None:
    from billfish.bench import record

    cli = bench_engine.shared("billfish bench step", __doc__)
    cli.add_argument("--batch", default="1", help="requests that decode; or several: 1,32,256")
    cli.add_argument("--context", type=int, default=512, help="tokens of each prompt")
    options = cli.parse_args(arguments)
    if reason := why_no_gpu():
        raise ConfigError(f"bench step measures a GPU: {reason}")
    batches = _batches(options.batch)
    options = bench_engine.with_model(options)
    options.max_num_seqs, options.reserve_tokens = max(batches), None
    head = record.environment("billfish bench step " + " ".join(arguments))
    served = bench_engine.serve(options)
    bandwidth, rate = ceilings()
    head |= {"bandwidth": bandwidth, "rate": rate}
    print(f"this GPU copies {bandwidth / 1e12:.2f} TB/s and multiplies {rate / 1e12:.0f} TFLOP/s")
    config = bench_engine.random_weights.shape(options.model)
    int4 = options.weights == "int4"
    found: list[dict[str, Any]] = []
    for batch in batches:
        kernels, wall = measure(served, batch, options.context)
        parts = parts_of(
            kernels, config, batch, options.context, int4=int4, head=options.head
        )  # fmt: skip
        rows, text = table(parts, wall, bandwidth, rate)
        print(f"{options.model}, {options.weights}, {batch} x {options.context} tokens\n{text}")
        case = {"model": options.model, "weights": options.weights, "batch": batch,
                "context": options.context, "head": options.head or options.dtype}  # fmt: skip
        found += [case | row for row in rows]
        if options.out:
            record.write(options.out, head, found)


if __name__ == "__main__":
    main(sys.argv[1:])
