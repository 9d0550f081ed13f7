"""Times the engine with random weights: decode, prefill, many requests at once, start.

    billfish bench engine --out FILE --model llama-3-8b --weights int4 --measure decode,prefill

    tpot_ms       time per output token of `batch` requests that decode together; with "sampling",
                  of requests that draw their tokens
    prefill_ms    from the arrival of `batch` prompts to the first token of the last
    output_tok_s  output tokens of all requests / time from their arrival to the last token, with
                  the kinds of steps that the time went to
    start_s       from the start of a process to its first token, nothing compiled and all compiled

"throughput" is many requests at once; "cache" the same in a cache of blocks and with room set aside
for each request (--reserve-tokens), in memory of so many blocks (--cache-blocks).

Requests generate greedily, and as many tokens as they are asked for. The engine overlaps steps with
planning, as it does when it serves; --plain does not.
"""

import argparse
import gc
import json
import logging
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from billfish.bench.engine_many import draw_lengths, read_lengths, throughput
from billfish.config import CacheConfig, SchedulerConfig
from billfish.engine import Engine
from billfish.errors import ConfigError
from billfish.models import random_weights
from billfish.sampling_params import SamplingParams
from billfish.worker import device
from billfish.worker.device_runner import DeviceRunner
from billfish.worker.start import Setting, Started, start

DECODE = ((1, 512), (8, 512), (32, 512), (64, 512), (128, 512), (256, 512), (32, 8192))
BATCHES = tuple(str(batch) for batch in dict(DECODE))
PREFILL = ((1, 8192), (16, 2048), (1, 512))
"""(batch, prompt tokens) of each measurement."""
OUTPUT = 128
"""Tokens generated to measure decoding."""

SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 1.0},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 40},
    {"temperature": 1.0, "repetition_penalty": 1.1, "presence_penalty": 0.5},
)

MEASURES = ("decode", "prefill", "sampling", "throughput", "cache", "start")

READY = "first token: "
"""Begins the line that a process prints when it has one."""


@dataclass
class Served:
    """An engine over a model with random weights."""

    started: Started
    engine: Engine
    vocab_size: int
    count: int = 0

    def add(self, prompt: int, output: int, **options: Any) -> None:
        rng = random.Random(self.count)
        tokens = [rng.randrange(1, self.vocab_size) for _ in range(prompt)]
        options = {"temperature": 0.0, **options}
        params = SamplingParams(max_tokens=output, ignore_eos=True, **options)
        self.engine.add_request(str(self.count), tokens, params)
        self.count += 1


def serve(options: argparse.Namespace) -> Served:
    config = random_weights.shape(options.model)
    dtype = getattr(torch, options.dtype)
    where = device.choose(options.device, dtype)
    int4 = options.weights == "int4"
    setting = Setting(
        config=config, dtype=dtype, device=where,
        cache=CacheConfig(num_blocks=options.num_blocks, prefix_caching=False),
        scheduler=settings(options, options.reserve_tokens), vocab_size=config.vocab_size,
        int4=int4, graphs=not options.eager, head=options.head,
    )  # fmt: skip
    started = start(
        setting,
        lambda most: random_weights.load_model(
            config, dtype=dtype, device=where, max_len=most, int4=int4
        ),
    )
    return over(started, options, options.reserve_tokens, started.num_blocks)


def settings(options: argparse.Namespace, reserve_tokens: int | None) -> SchedulerConfig:
    context = random_weights.shape(options.model).context_length
    return SchedulerConfig(
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_model_len=min(options.max_model_len, context),
        reserve_tokens=reserve_tokens,
    )


def over(
    started: Started, options: argparse.Namespace, reserve_tokens: int | None, num_blocks: int
) -> Served:
    """A new engine over a model that is there, with so many of its blocks."""
    runner, vocab_size = started.executor, random_weights.shape(options.model).vocab_size
    engine = Engine(
        runner, num_blocks=num_blocks, block_size=CacheConfig().block_size,
        vocab_size=vocab_size, max_model_len=started.max_model_len, eos_token_ids=(),
        token_bytes=lambda token: b" token", scheduler=settings(options, reserve_tokens),
        prefix_caching=False, overlap=isinstance(runner, DeviceRunner) and not options.plain,
        seed=0,
    )  # fmt: skip
    return Served(started, engine, vocab_size)


def decode(served: Served, batch: int, prompt: int, output: int, **options: Any) -> float:
    """Milliseconds a token, while all requests of the batch decode."""
    for _ in range(batch):
        served.add(prompt, output, **options)
    times = []
    while served.engine.has_unfinished:
        outputs = served.engine.step()
        if len(outputs) == batch:
            times.append(time.perf_counter())
    if len(times) < 3:
        raise ConfigError(f"{batch} requests of {prompt} + {output} tokens never decode together")
    # The first of them may end a step that computed prompts.
    return (times[-1] - times[1]) / (len(times) - 2) * 1e3


def prefill(served: Served, batch: int, prompt: int) -> float:
    """Milliseconds from arrival to the last of the first tokens."""
    begin = time.perf_counter()
    for _ in range(batch):
        served.add(prompt, 1)
    while served.engine.has_unfinished:
        if served.engine.step():
            last = time.perf_counter()
    return (last - begin) * 1e3


class Rows:
    """The rows measured; `save` gets all that there are after each. blocks: what every row tells of
    the cache, once there is one."""

    def __init__(
        self, options: argparse.Namespace, save: Callable[[list[dict[str, Any]]], None]
    ) -> None:
        self.options, self.save = options, save
        self.all: list[dict[str, Any]] = []
        self.blocks: dict[str, int] = {}

    def add(
        self, measure: str, batch: int, prompt: int, output: int, values: list[float], **more: Any
    ) -> None:
        options = self.options
        value, spread = statistics.median(values), max(values) - min(values)
        self.all.append({
            "model": options.model, "weights": options.weights,
            "head": options.head or options.dtype,
            "kv_dtype": options.dtype,
            "impl": "billfish", "measure": measure, "batch": batch, "prompt": prompt,
            "output": output, "reserve_tokens": options.reserve_tokens,
            "value": round(value, 3), "spread": round(spread, 3), **self.blocks, **more,
        })  # fmt: skip
        print(f"{measure:14} batch {batch:4} prompt {prompt:5} {value:12.3f}  "
              f"spread {spread:.3f}", flush=True)  # fmt: skip
        self.save(self.all)


def run(
    options: argparse.Namespace, save: Callable[[list[dict[str, Any]]], None]
) -> list[dict[str, Any]]:
    """The rows measured; `save` gets those that there are after each."""
    began = time.perf_counter()
    measures = options.measure.split(",")
    lengths = read_lengths(options.lengths) if options.lengths else draw_lengths()
    rows = Rows(options, save)
    if "start" in measures:  # before this process takes the memory
        for kind, (seconds, phases) in zip(("cold", "warm"), start_seconds(options), strict=True):
            rows.add("start_s", 1, 64, 1, [seconds], compiled=kind, phases=phases)
    if measures == ["start"]:
        return rows.all
    served = serve(options)
    gc.collect()
    gc.freeze()  # as where it serves
    rows.blocks["num_blocks"] = served.started.num_blocks
    prefill(served, 1, 64)
    if measures == ["none"]:
        inside = time.perf_counter() - began
        print(READY + json.dumps({**served.started.seconds, "all but imports": inside}), flush=True)
    if "decode" in measures:
        _measure_decode(served, options, rows)
    if "sampling" in measures:
        for sampling in SAMPLING:
            for batch in (1, 64):
                values = [decode(served, batch, 128, 40, **sampling) for _ in range(options.rounds)]
                rows.add("tpot_ms", batch, 128, 40, values, sampling=json.dumps(sampling))
    if "prefill" in measures:
        _measure_prefill(served, options, rows)
    for reserve, count in _caches(options, measures, served.started.num_blocks):
        _measure_many(over(served.started, options, reserve, count), lengths, rows, reserve, count)
    if not rows.all and measures != ["none"]:
        raise ConfigError(
            "nothing was measured: no batch of these fits into --max-num-seqs "
            f"{options.max_num_seqs}, with prompts into {served.started.max_model_len} tokens"
        )
    return rows.all


def _measure_decode(served: Served, options: argparse.Namespace, rows: Rows) -> None:
    wanted = (options.batches or ",".join(BATCHES)).split(",")
    for batch, prompt in DECODE:
        fits = prompt + OUTPUT <= served.started.max_model_len and batch <= options.max_num_seqs
        if fits and str(batch) in wanted:
            rounds = 1 if prompt > 512 else options.rounds
            values = [decode(served, batch, prompt, OUTPUT) for _ in range(rounds)]
            rows.add("tpot_ms", batch, prompt, OUTPUT, values)


def _measure_prefill(served: Served, options: argparse.Namespace, rows: Rows) -> None:
    for batch, prompt in PREFILL:
        if prompt < served.started.max_model_len:
            prefill(served, batch, prompt)
            values = [prefill(served, batch, prompt) for _ in range(options.rounds)]
            rows.add("prefill_ms", batch, prompt, 1, values)


def _measure_many(
    served: Served, lengths: list[tuple[int, int]], rows: Rows, reserve: int | None, count: int
) -> None:
    """In a cache of so many blocks, with room set aside for `reserve` tokens a request, or none."""
    prompts, outputs = (sum(pair[i] for pair in lengths) for i in (0, 1))
    many = throughput(served, lengths)
    rows.add(
        "output_tok_s", len(lengths), prompts, outputs, [many.tokens_s],
        reserve_tokens=reserve, num_blocks=count, seats=rows.options.max_num_seqs,
        requests_s=round(many.tokens_s * len(lengths) / outputs, 3),
        mean_request_s=round(many.request_s, 3), steps=many.steps,
    )  # fmt: skip
    print(served.engine.stats(), flush=True)


def _caches(
    options: argparse.Namespace, measures: list[str], num_blocks: int
) -> list[tuple[int | None, int]]:
    """(tokens set aside for each request, blocks in all) for which many requests are measured."""
    found: list[tuple[int | None, int]] = []
    if "throughput" in measures:
        found.append((options.reserve_tokens, num_blocks))
    if "cache" in measures:
        for count in (options.cache_blocks or "all").split(","):
            blocks = num_blocks if count == "all" else int(count)
            if blocks > num_blocks:
                raise ConfigError(f"--cache-blocks: there are {num_blocks}, got {blocks}")
            found += [(None, blocks), (options.reserve_tokens or options.max_model_len, blocks)]
    return found


def start_seconds(
    options: argparse.Namespace,
) -> Iterator[tuple[float, dict[str, float]]]:
    """From the start of a process to its first token: with nothing compiled yet, then with all.

    Each with the seconds of its phases, of which "imports" is all before this module runs.
    """
    command = [sys.executable, "-m", "billfish.bench.engine", "--measure", "none"]
    for name in ("model", "weights", "dtype", "device", "max_num_seqs", "max_num_batched_tokens",
                 "max_model_len", "num_blocks", "head"):  # fmt: skip
        if (value := getattr(options, name)) is not None:
            command += [f"--{name.replace('_', '-')}", str(value)]
    command += [f"--{name}" for name in ("eager", "plain") if getattr(options, name)]
    with tempfile.TemporaryDirectory() as cache:
        for _ in range(2):
            yield _start_once(command, {**os.environ, "TRITON_CACHE_DIR": cache})


def _start_once(command: list[str], environment: dict[str, str]) -> tuple[float, dict[str, float]]:
    begin = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) as child:
        assert child.stdout is not None
        for line in child.stdout:
            if line.startswith(READY):
                break
        seconds = time.perf_counter() - begin
        child.stdout.read()
    if child.returncode:
        raise subprocess.CalledProcessError(child.returncode, command)
    phases: dict[str, float] = json.loads(line.removeprefix(READY))
    inside = phases.pop("all but imports")
    first_token = inside - sum(phases.values())
    rounded = {"imports": seconds - inside, **phases, "first token": first_token}
    return seconds, {phase: round(value, 2) for phase, value in rounded.items()}


def shared(prog: str, description: str | None) -> argparse.ArgumentParser:
    """The options of whatever measures an engine with random weights."""
    cli = argparse.ArgumentParser(
        prog=prog, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cli.add_argument("--out", help="JSON file to write")
    cli.add_argument(
        "--model", choices=tuple(random_weights.SHAPES),
        help="without: llama-3-8b on a GPU, tiny on a CPU",
    )  # fmt: skip
    cli.add_argument("--weights", default="int4", choices=("int4", "dense"))
    cli.add_argument("--head", choices=("int8", "int4"), help="without: as activations")
    cli.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    cli.add_argument("--device", default="auto")
    cli.add_argument("--max-num-batched-tokens", type=int, default=8192)
    cli.add_argument("--max-model-len", type=int, default=16384)
    cli.add_argument("--num-blocks", type=int)
    cli.add_argument("--eager", action="store_true", help="without graphs")
    cli.add_argument("--plain", action="store_true", help="without overlap")
    return cli


def parser() -> argparse.ArgumentParser:
    cli = shared("billfish bench engine", __doc__)
    cli.add_argument(
        "--measure", default="decode,prefill", help="also sampling, throughput, cache, start"
    )
    cli.add_argument("--batches", help="of decode; without: " + ",".join(BATCHES))
    cli.add_argument(
        "--lengths",
        help='of throughput and cache: JSON list of [prompt, output], perhaps as "lengths"; '
        "without it 1000 are drawn",
    )
    cli.add_argument("--rounds", type=int, default=3)
    cli.add_argument("--max-num-seqs", type=int, default=256)
    cli.add_argument(
        "--reserve-tokens", type=int, help="room set aside for each request, as without blocks"
    )
    cli.add_argument(
        "--cache-blocks", help='of cache: "all", or fewer; or several: "all,4096"; without: all'
    )
    cli.add_argument("--keep", action="store_true", help="keep the rows that the file has")
    return cli


def parsed(arguments: list[str]) -> argparse.Namespace:
    """The options. What is wrong or would have no effect ends the program."""
    cli = parser()
    options = cli.parse_args(arguments)
    measures = options.measure.split(",")
    for measure in measures:
        if measure not in (*MEASURES, "none") or (measure == "none" and len(measures) > 1):
            cli.error(f"--measure: {measure!r} is none of {', '.join(MEASURES)}")
    if options.rounds < 1:
        cli.error(f"--rounds: at least 1, got {options.rounds}")
    for batch in (options.batches or BATCHES[0]).split(","):
        if batch not in BATCHES:
            cli.error(f"--batches: {batch!r} is none of {', '.join(BATCHES)}")
    for count in (options.cache_blocks or "all").split(","):
        if count != "all" and not (count.isdecimal() and int(count)):
            cli.error(f'--cache-blocks: "all" or a number of blocks, got {count!r}')
    without = {
        "--batches": options.batches and "decode" not in measures,
        "--lengths": options.lengths and not {"throughput", "cache"} & set(measures),
        "--cache-blocks": options.cache_blocks and "cache" not in measures,
        "--keep": options.keep and not options.out,
    }
    for name, has_none in without.items():
        if has_none:
            cli.error(f"{name} has no effect here")
    return with_model(options)


def with_model(options: argparse.Namespace) -> argparse.Namespace:
    """The options, with a model that the device can be asked to run where none is named."""
    if options.model is None:
        where = device.choose(options.device, getattr(torch, options.dtype))
        options.model = "tiny" if where.type == "cpu" else "llama-3-8b"
    return options


def main(arguments: list[str]) -> None:
    from billfish.bench import record

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    options = parsed(arguments)
    head = record.environment("billfish bench engine " + " ".join(arguments))
    kept = _kept(options.out, head) if options.out and options.keep else []

    def save(rows: list[dict[str, Any]]) -> None:
        if options.out:
            record.write(options.out, head, kept + rows)

    run(options, save)


def _kept(path: str, head: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of a file, if they were measured on this device with this commit."""
    if not Path(path).exists():
        return []
    old: dict[str, Any] = json.loads(Path(path).read_text())
    for name in ("device", "commit"):
        if old[name] != head[name]:
            raise ConfigError(f"--keep: {path} is of {name} {old[name]}, this is {head[name]}")
    return list(old["rows"])


if __name__ == "__main__":
    main(sys.argv[1:])
