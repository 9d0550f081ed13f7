"""Times whole models on the CPU beside transformers and llama.cpp, in one run, on the same file.

    billfish bench throughput --out FILE [--peers transformers,llama.cpp]

Every measurement is a process of its own; the implementations take turns for several rounds and
each figure is the median of its rounds. All prompts have the same length and every request
generates the same number of tokens, greedily, so that peers without ragged batches lose nothing.
Where numba is installed (see `billfish.kernels.cpu_native`), Billfish is timed with its decoding
steps compiled and without.

    prefill_tok_s   prompt tokens of the batch / time to the first tokens of all
    output_tok_s    output tokens after the first ones / time from there to the end
    start_s         start of the process to its first token, file in the page cache
    step_ms         with --parts: where the time of a decoding step goes, see `step_time`

Rows say how much of the machine's processor time others took meanwhile (`others`, a share): where
that is not near 0 the figures are worth little. A figure is of few seconds, so peers are compared
within one file only.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from billfish.kernels import cpu_native

COMPILED = "billfish, compiled"
"""Decoding steps compiled by numba; "billfish" alone is without."""

KV_DTYPES = {
    "billfish": "bfloat16",
    COMPILED: "bfloat16",
    "transformers float32": "float32",
    "transformers bfloat16": "bfloat16",
    "llama.cpp": "float16",
}

Measure = Callable[[str, int, int, int], tuple[float, float]]
"""(model file, batch, prompt, output) -> seconds to the first tokens, seconds to the last."""


def billfish(path: str, batch: int, prompt: int, output: int) -> tuple[float, float]:
    from billfish import LLM, SamplingParams
    from billfish.config import CacheConfig, SchedulerConfig

    # The prompts differ from their first token on, so no implementation can share them.
    scheduler = SchedulerConfig(max_num_batched_tokens=max(512, batch * prompt))
    llm = LLM(path, cache=CacheConfig(memory_bytes=2 << 30), scheduler=scheduler)
    params = SamplingParams(max_tokens=output, temperature=0, ignore_eos=True)
    list(llm.stream(prompts(batch, 16, seed=1), SamplingParams(max_tokens=4, temperature=0)))
    start = time.perf_counter()
    first = last = start
    begun: set[int] = set()
    for index, _ in llm.stream(prompts(batch, prompt), params):
        last = time.perf_counter()
        if index not in begun:
            begun.add(index)
            first = last
    return first - start, last - start


def transformers(dtype: str) -> Measure:
    def measure(path: str, batch: int, prompt: int, output: int) -> tuple[float, float]:
        import torch
        from transformers import AutoModelForCausalLM

        file = Path(path)
        model = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=getattr(torch, dtype)
        ).eval()

        def generate(tokens: int, prompts: list[list[int]]) -> float:
            ids = torch.tensor(prompts)
            start = time.perf_counter()
            model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, min_new_tokens=tokens,
                max_new_tokens=tokens, pad_token_id=0,
            )  # fmt: skip
            return time.perf_counter() - start

        generate(4, prompts(batch, 16, seed=1))
        return generate(1, prompts(batch, prompt)), generate(output, prompts(batch, prompt))

    return measure


def llama_cpp(path: str, batch: int, prompt: int, output: int) -> tuple[float, float]:
    """llama.cpp's own batched decoding, through its C interface, on all threads that torch has."""
    import llama_cpp as api
    import numpy as np
    import torch

    model = api.llama_model_load_from_file(path.encode(), api.llama_model_default_params())
    settings = api.llama_context_default_params()
    settings.n_ctx = batch * (prompt + output + 16)
    settings.n_batch = settings.n_ubatch = max(512, batch)
    settings.n_seq_max = batch
    settings.n_threads = settings.n_threads_batch = torch.get_num_threads()
    settings.kv_unified = True
    context = api.llama_init_from_model(model, settings)
    vocab = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))
    tokens = api.llama_batch_init(settings.n_batch, 0, 1)

    def decode(entries: list[tuple[int, int, int, bool]]) -> list[int]:
        """entries: (token, position, sequence, wants the next token)."""
        for i, (token, position, sequence, wanted) in enumerate(entries):
            tokens.token[i], tokens.pos[i] = token, position
            tokens.n_seq_id[i], tokens.seq_id[i][0] = 1, sequence
            tokens.logits[i] = wanted
        tokens.n_tokens = len(entries)
        if api.llama_decode(context, tokens) != 0:
            raise RuntimeError("llama_decode failed")
        wanted_rows = [i for i, entry in enumerate(entries) if entry[3]]
        rows = [api.llama_get_logits_ith(context, i) for i in wanted_rows]
        return [int(np.ctypeslib.as_array(row, (vocab,)).argmax()) for row in rows]

    def generate(prompts: list[list[int]], count: int) -> tuple[float, float]:
        api.llama_memory_clear(api.llama_get_memory(context), True)
        start = time.perf_counter()
        length = len(prompts[0])
        last: list[int] = []
        entries = [
            (token, position, sequence, position == length - 1)
            for sequence, ids in enumerate(prompts)
            for position, token in enumerate(ids)
        ]
        for begin in range(0, len(entries), settings.n_batch):
            last += decode(entries[begin : begin + settings.n_batch])
        first = time.perf_counter() - start
        for step in range(count - 1):
            last = decode([(t, length + step, s, True) for s, t in enumerate(last)])
        return first, time.perf_counter() - start

    generate(prompts(batch, 16, seed=1), 4)
    return generate(prompts(batch, prompt), output)


IMPLEMENTATIONS: dict[str, Measure] = {
    "billfish": billfish,
    COMPILED: billfish,
    "transformers float32": transformers("float32"),
    "transformers bfloat16": transformers("bfloat16"),
    "llama.cpp": llama_cpp,
}


def prompts(batch: int, length: int, seed: int = 0) -> list[list[int]]:
    import random

    draw = random.Random(seed)
    return [[draw.randrange(1000, 40000) for _ in range(length)] for _ in range(batch)]


def start_seconds(name: str, path: str) -> float:
    """Process start to first token, in seconds."""
    code = (
        "import sys; from billfish import LLM, SamplingParams; "
        "LLM(sys.argv[1]).generate('Hello', SamplingParams(max_tokens=1, temperature=0))"
    )
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", code, path], check=True, env=_environment(name))
    return time.perf_counter() - start


def run(path: str, names: list[str], batches: list[int], options: argparse.Namespace) -> list[Any]:
    times: dict[tuple[str, int], list[tuple[float, float, float]]] = {}
    for _ in range(options.rounds):
        for batch in batches:
            for name in names:
                first, last, others = _one(name, path, batch, options)
                times.setdefault((name, batch), []).append((first, last, others))
                text = f"first {first:.2f} s, all {last:.2f} s, others {others:.0%}"
                print(name, batch, text, flush=True)
    rows = []
    for (name, batch), rounds in times.items():
        prefill = [batch * options.prompt / first for first, _, _ in rounds]
        decode = [batch * (options.output - 1) / (last - first) for first, last, _ in rounds]
        others = max(share for _, _, share in rounds)
        for measure, values in (("prefill_tok_s", prefill), ("output_tok_s", decode)):
            value, spread = statistics.median(values), max(values) - min(values)
            rows.append(_row(options, name, measure, batch, value, spread, others=round(others, 3)))
    if options.parts:
        rows += _part_rows(path, batches, options)
    if 1 in batches:
        for name in (name for name in names if IMPLEMENTATIONS[name] is billfish):
            starts = [start_seconds(name, path) for _ in range(options.rounds)]
            value, spread = statistics.median(starts), max(starts) - min(starts)
            rows.append(_row(options, name, "start_s", 1, value, spread))
    return rows


def _one(name: str, path: str, batch: int, options: argparse.Namespace) -> Any:
    """One measurement, or {part: milliseconds} for the name "parts", in a process of its own."""
    command = [sys.executable, "-m", "billfish.bench.throughput", "--one", name]
    command += [path, str(batch), str(options.prompt), str(options.output)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=_environment(name)
    )
    if done.returncode != 0:
        raise SystemExit(f"{name} at batch {batch} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def _environment(name: str) -> dict[str, str]:
    return {**os.environ, cpu_native.SWITCH: "1" if name == COMPILED else "0"}


def _part_rows(path: str, batches: list[int], options: argparse.Namespace) -> list[Any]:
    rows = []
    for batch in batches:
        rounds = [_one("parts", path, batch, options) for _ in range(options.rounds)]
        for part in rounds[0]:
            values = [each[part] for each in rounds]
            value, spread = statistics.median(values), max(values) - min(values)
            rows.append(_row(options, "billfish", "step_ms", batch, value, spread, part=part))
    return rows


def _busy() -> tuple[float, float]:
    """Seconds of processor time: of all processes, and of this one. Equal where nobody says."""
    mine = sum(os.times()[:4])
    try:
        fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:]
    except OSError:
        return mine, mine
    ticks = [int(field) for field in fields]
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK"), mine


def _with_others(measure: Measure, path: str, *sizes: int) -> tuple[float, float, float]:
    (all_before, mine_before), start = _busy(), time.perf_counter()
    first, last = measure(path, *sizes)
    all_after, mine_after = _busy()
    taken = (all_after - all_before) - (mine_after - mine_before)
    share = taken / (time.perf_counter() - start) / (os.cpu_count() or 1)
    return first, last, max(0.0, share)


def _row(
    options: argparse.Namespace,
    name: str,
    measure: str,
    batch: int,
    value: float,
    spread: float,
    **more: Any,
) -> dict[str, Any]:
    return {
        "model": options.model, "weights": "gguf", "kv_dtype": KV_DTYPES[name], "impl": name,
        "measure": measure, **more,
        "batch": batch, "prompt": options.prompt, "output": options.output,
        "value": round(value, 2), "spread": round(spread, 2),
    }  # fmt: skip


def _count(text: str) -> int:
    if (count := int(text)) < 1:
        raise ValueError(text)
    return count


def _counts(text: str) -> list[int]:
    return [_count(count) for count in text.split(",")]


def main(arguments: list[str]) -> None:
    if arguments[:1] == ["--one"]:
        name, path, *sizes = arguments[1:]
        if name == "parts":
            from billfish.bench.step_time import step_parts

            print(json.dumps(step_parts(path, *map(int, sizes))))
        else:
            print(json.dumps(_with_others(IMPLEMENTATIONS[name], path, *map(int, sizes))))
        return
    from billfish.bench import record
    from billfish.checkpoint.locate import DEMO_MODEL, locate

    cli = argparse.ArgumentParser(
        prog="billfish bench throughput",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    cli.add_argument("--out", required=True, help="JSON file to write")
    cli.add_argument("--model", default=DEMO_MODEL)
    cli.add_argument(
        "--peers", default="", help="transformers, transformers float32, llama.cpp: comma-separated"
    )
    cli.add_argument("--batches", type=_counts, default="1,8,32")
    cli.add_argument("--prompt", type=_count, default=128, help="tokens")
    cli.add_argument("--output", type=_count, default=128, help="tokens")
    cli.add_argument("--rounds", type=_count, default=3)
    cli.add_argument("--parts", action="store_true", help="also where a decoding step's time goes")
    options = cli.parse_args(arguments)
    peers = [peer for peer in options.peers.split(",") if peer]
    known = {name for n in IMPLEMENTATIONS for name in (n, n.split()[0])}
    if unknown := [peer for peer in peers if peer not in known]:
        cli.error(f"--peers: there is no {unknown[0]!r}")
    wanted = ["billfish", *peers]
    if cpu_native.why_not() is None:
        wanted.append(COMPILED)
    names = [n for n in IMPLEMENTATIONS if n in wanted or n.split()[0] in wanted]
    head = record.environment(
        "billfish bench throughput " + " ".join(arguments),
        ("numba", "transformers", "llama-cpp-python"),
    )
    if "llama.cpp" in names:
        import llama_cpp

        head["llama.cpp"] = llama_cpp.llama_print_system_info().decode().strip()
    rows = run(str(locate(options.model)), names, options.batches, options)
    record.write(options.out, head, rows)
    for row in rows:
        print(f"{row['impl']:24} {row['measure']:14} batch {row['batch']:3} {row['value']:10.1f}")


if __name__ == "__main__":
    main(sys.argv[1:])
