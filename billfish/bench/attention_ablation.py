"""What each technique of paged attention is worth: the kernels with it and without."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from billfish.bench.attention_cases import HEAD_DIM, Batch, Case, cases, make_batch, plan_of
from billfish.bench.attention_peers import gather_then_attend
from billfish.bench.block_movement import copy_times, make_caches, rotate_times
from billfish.bench.turns import Call, time_in_turns
from billfish.kernels.paged_attention import AttentionMetadata, attend, decode, prefill
from billfish.kernels.paged_attention.planner import AttentionPlan, Scoring

DECODE = ("1024 x 1", "1024 x 32", "16384 x 1", "4096 x 128", "1 x 32768 + 63 x 512")
PREFILL = ("2048", "8192", "32768", "64 over 8192", "40 x (1..64 new)")

Techniques = dict[str, list[Call]]


def ablation(heads: tuple[int, int]) -> list[dict[str, Any]]:
    """Rows of ablation_attention.json."""
    rows = []
    for case in cases(heads):
        if case.name in DECODE or case.name in PREFILL:
            rows += case_rows(case)
    return rows + movement_rows()


def case_rows(case: Case) -> list[dict[str, Any]]:
    """The techniques of one batch shape; floor_us: the least time that the device's memory or its
    tensor cores, at their highest clock, need for it.
    """
    batch = make_batch(case)
    if case.name in DECODE:
        kernel, impls = "hopper_decode", decode_techniques(batch)
    else:
        kernel, impls = "hopper_prefill", prefill_techniques(batch)
    floor = max(case.kv_bytes / peak_bytes_a_us(), case.flops / peak_flops_a_us())
    rows = _rows(kernel, case.name, time_in_turns(impls), case.kv_bytes, floor)
    torch.cuda.empty_cache()
    return rows


def decode_techniques(batch: Batch) -> Techniques:
    """The calls with all techniques, and with each one off; planning is outside."""
    plan, whole = plan_of(batch), plan_of(batch, batch_invariant=True)
    for each in (plan, whole):
        each.update(batch.parts[0])
    return {
        "all": decode_calls(batch, plan, overlap=True),
        "split-KV": decode_calls(batch, whole, overlap=True),
        "programmatic dependent launch": decode_calls(batch, plan, overlap=False),
        "GQA packing": unpacked(batch),
        "fused block read": gather_then_attend(batch),
        "Hopper kernel": portable(batch),
    }


def prefill_techniques(batch: Batch) -> Techniques:
    """The same of prefill."""
    plan, whole = plan_of(batch), plan_of(batch, batch_invariant=True)
    steps = [plan.update(part) for part in batch.parts]
    return {
        "all": _attend_calls(batch, steps),
        "split-KV": _attend_calls(batch, [whole.update(part) for part in batch.parts]),
        "heads in turn": [partial(_in_one_section, call) for call in _attend_calls(batch, steps)],
        "GQA packing": unpacked(batch),
        "fused block read": gather_then_attend(batch),
        "Hopper kernel": portable(batch),
    }


def movement_rows() -> list[dict[str, Any]]:
    """The fused write, the copy in one launch, and 16-byte accesses."""
    rows, caches = [], make_caches()
    token, block = caches[0, 0, 0, 0].nbytes, caches[:, :, 0].nbytes
    for tokens in (64, 2048, 16384):
        times = rotate_times(caches, tokens)
        taken = {"all": times["billfish"], "fused write": times["separate"]}
        nbytes = 12 * tokens * token  # query, key and value, each read and written
        rows += _rows("cache_write", f"{tokens} tokens", taken, nbytes, nbytes / peak_bytes_a_us())
    for pairs in (1, 16, 256):
        times = copy_times(caches, pairs)
        taken = {
            "all": times["billfish"],
            "one launch": times["one by one"],
            "16-byte accesses": times["4 bytes a thread"],
        }
        nbytes = 2 * pairs * block
        rows += _rows("block_copy", f"{pairs} blocks", taken, nbytes, nbytes / peak_bytes_a_us())
    return rows


def _rows(
    kernel: str, case: str, times: dict[str, tuple[float, float]], nbytes: int, floor_us: float
) -> list[dict[str, Any]]:
    return [
        {"family": "paged_attention", "kernel": kernel, "technique": name,
         "setting": "on" if name == "all" else "off", "case": case, "us": round(us, 2),
         "spread": round(spread, 3), "bytes": nbytes, "floor_us": round(floor_us, 2)}
        for name, (us, spread) in times.items()
    ]  # fmt: skip


def peak_bytes_a_us() -> float:
    """Of device memory: both edges of its clock over the width of its bus."""
    device = torch.cuda.get_device_properties("cuda")
    return 2 * device.memory_clock_rate * 1e3 * device.memory_bus_width / 8 / 1e6


def peak_flops_a_us() -> float:
    """Of the tensor cores of a Hopper multiprocessor: 4096 a clock in 16 bits."""
    device = torch.cuda.get_device_properties("cuda")
    return 4096 * device.multi_processor_count * device.clock_rate * 1e3 / 1e6


def portable(batch: Batch) -> list[Call]:
    """The Triton kernels, which run on any GPU from sm_80 on."""
    sms = torch.cuda.get_device_properties("cuda").multi_processor_count
    plan, (k, v) = plan_of(batch, num_programs=2 * sms), batch.caches
    plan.update(batch.parts[0])
    limit = plan.max_query_len

    def call(m: AttentionMetadata) -> Tensor:
        out = torch.empty_like(batch.query)
        tables = (m.block_table, m.seq_lens, m.query_start)
        scoring = Scoring(HEAD_DIM**-0.5)
        if min(batch.case.query_lens) <= limit:
            decode.decode(
                batch.query, k, v, *tables, out, scoring, plan.workspace, max_query_len=limit
            )
        if max(batch.case.query_lens) > limit:
            prefill.prefill(batch.query, k, v, *tables, out, scoring, decoded_len=limit)
        return out

    return [partial(call, part) for part in batch.parts]


def _in_one_section(call: Call) -> None:
    """Draw the items of all heads together, as if all their keys fitted in the L2."""
    from billfish.kernels.paged_attention import hopper_prefill

    before = hopper_prefill.L2_BYTES
    hopper_prefill.L2_BYTES = 10**18
    try:
        call()
    finally:
        hopper_prefill.L2_BYTES = before


def _attend_calls(batch: Batch, steps: list[AttentionMetadata]) -> list[Call]:
    k, v = batch.caches
    return [partial(attend, batch.query, k, v, step) for step in steps]


def decode_calls(batch: Batch, plan: AttentionPlan, overlap: bool) -> list[Call]:
    """The decode kernel itself. overlap: starts while the kernel ahead drains."""
    from billfish.kernels.paged_attention import hopper_decode

    k, v = batch.caches

    def call(m: AttentionMetadata) -> None:
        hopper_decode.decode(
            batch.query, k, v, m.block_table, m.seq_lens, m.query_start,
            torch.empty_like(batch.query), Scoring(HEAD_DIM**-0.5), plan.workspace,
            max_query_len=1, overlap=overlap,
        )  # fmt: skip

    return [partial(call, part) for part in batch.parts]


def unpacked(batch: Batch) -> list[Call]:
    """Every query head reads K and V for itself: one launch for each head of a group."""
    case, (k, v) = batch.case, batch.caches
    group = case.heads_q // case.heads_kv
    plan = plan_of(replace(batch, case=replace(case, heads_q=case.heads_kv)))
    queries = [q.contiguous() for q in batch.query.unflatten(1, (-1, group)).unbind(2)]

    def call(m: AttentionMetadata) -> None:
        for query in queries:
            attend(query, k, v, m)

    return [partial(call, plan.update(part)) for part in batch.parts]
