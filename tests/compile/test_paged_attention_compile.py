"""Every kind of paged-attention kernel, compiled without a GPU: what its machine code must hold."""

import re

import pytest
import torch

pytest.importorskip("triton")

import triton

from billfish.kernels.paged_attention import (
    AttentionMetadata,
    block_copy,
    cache_write,
    decode,
    planner,
    prefill,
    prefill_combine,
    prefill_items,
)
from billfish.kernels.paged_attention.planner import AttentionPlan, Scoring
from tests.compile.offline import (
    ARCHITECTURES,
    MachineCode,
    Recorder,
    fake_device,
    machine_code,
)

if triton.knobs.runtime.interpret:
    pytest.skip("compiles, so not with TRITON_INTERPRET=1", allow_module_level=True)

SMALLEST_SHARED_MEMORY = 101376  # bytes a block may use on sm_86, sm_89 and sm_120


def compiled(monkeypatch, module, name, launch, capability) -> tuple[MachineCode, int]:
    """(machine code, bytes of shared memory) of the kernel `module.name` as launched."""
    kernel, recorder = getattr(module, name), Recorder()
    with monkeypatch.context() as patch:
        patch.setattr(module, name, recorder)
        if hasattr(module, "launches_early"):
            patch.setattr(module, "launches_early", lambda device: capability >= 90)
        launch()
    with fake_device(capability):
        binary = kernel.warmup(*recorder.arguments, **recorder.keywords, grid=(1,))
    return machine_code(binary, ARCHITECTURES[capability]), binary.metadata.shared


def step(heads, kv_heads, head_dim, block_size=16, query_len=1, dtype=torch.bfloat16):
    cache = torch.empty(8, block_size, kv_heads, head_dim, dtype=dtype)
    metadata = AttentionMetadata.build([[1]] * 2, [1] * 2, [query_len] * 2, block_size)
    query = torch.empty(2 * query_len, heads, head_dim, dtype=dtype)
    tables = (metadata.block_table, metadata.seq_lens, metadata.query_start)
    return query, cache, cache.clone(), *tables, torch.empty_like(query)


def plan_for(heads, kv_heads, head_dim, query_len=1, **options):
    return AttentionPlan.allocate(
        max_requests=2, num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim,
        max_query_len=query_len, num_programs=132, device="cpu", **options,
    )  # fmt: skip


DECODE = [(32, 8, 128, 1), (8, 8, 80, 1), (32, 8, 128, 16), (8, 4, 256, 8)]


@pytest.mark.parametrize("capability", ARCHITECTURES)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "query_len"), DECODE)
def test_decode(monkeypatch, heads, kv_heads, head_dim, query_len, capability):
    plan = plan_for(heads, kv_heads, head_dim, query_len)
    arguments = step(heads, kv_heads, head_dim, query_len=query_len)

    def launch():
        decode.decode(
            *arguments, Scoring(0.1), plan.workspace, max_query_len=query_len,
            lse=torch.empty(arguments[0].shape[:2]),
        )  # fmt: skip

    code, shared = compiled(monkeypatch, decode, "_decode_kernel", launch, capability)
    # Keys and values, asynchronously, 16 bytes a thread.
    assert code.count("LDGSTS.E.BYPASS.128") + code.count("LDGSTS.E.BYPASS.LTC128B.128") >= 16
    assert code.count("HMMA") + code.count("HGMMA") > 0
    assert code.spill_bytes <= 128  # outside the loop
    assert not code.undefined_descriptors
    assert shared <= (SMALLEST_SHARED_MEMORY if capability == 80 else 232448)


@pytest.mark.parametrize("capability", ARCHITECTURES)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_prefill(monkeypatch, head_dim, capability):
    arguments = step(32, 8, head_dim, query_len=64)

    def launch():
        prefill.prefill(*arguments, Scoring(0.1), decoded_len=4)

    code, shared = compiled(monkeypatch, prefill, "_prefill_kernel", launch, capability)
    assert code.count("HGMMA" if capability == 90 else "HMMA") >= 16
    assert not code.serialized
    assert not code.undefined_descriptors
    assert code.spill_bytes <= 64  # outside the loop
    assert shared <= (SMALLEST_SHARED_MEMORY if capability == 80 else 232448)


@pytest.mark.parametrize("capability", ARCHITECTURES)
@pytest.mark.parametrize("longest", [1, 40])
def test_plan(monkeypatch, longest, capability):
    plan = plan_for(32, 8, 128, sliding_window=100)
    step = AttentionMetadata.build([[1, 2, 3]] * 2, [1, 40], [1, longest], 16)

    def launch():
        plan.update(step)

    code, _ = compiled(monkeypatch, planner, "_plan_kernel", launch, capability)
    assert code.spill_bytes == 0


@pytest.mark.parametrize("capability", ARCHITECTURES)
def test_prefill_items(monkeypatch, capability):
    lens = torch.empty(2, dtype=torch.int32), torch.empty(3, dtype=torch.int32)
    items = torch.empty(4, prefill_items.ENTRY, dtype=torch.int32)

    def launch():
        prefill_items.list_items(*lens, 100, 4, 32, 4, items, 132)

    code, _ = compiled(monkeypatch, prefill_items, "_list_kernel", launch, capability)
    assert code.spill_bytes == 0


@pytest.mark.parametrize("head_dim", [64, 128])
def test_prefill_combine(monkeypatch, head_dim):
    items = torch.empty(4, prefill_items.ENTRY, dtype=torch.int32)
    acc, sums = torch.empty(132, 128, head_dim), torch.empty(132, 2, 128)
    info = torch.empty(132, prefill_items.INFO, dtype=torch.int32)
    out = torch.empty(9, 32, head_dim, dtype=torch.bfloat16)

    def launch():
        prefill_combine.combine(items, acc, sums, info, torch.zeros(32), out, None, 2, 4)

    code, _ = compiled(monkeypatch, prefill_combine, "_combine_kernel", launch, 90)
    # All 4 rows of 4 parts are asked for at once, 16 bytes a thread.
    assert code.count("LDG.E.128") >= 16 * head_dim // 128 // 4
    assert code.spill_bytes == 0


@pytest.mark.parametrize("capability", ARCHITECTURES)
@pytest.mark.parametrize("fused", [False, True])
def test_write(monkeypatch, fused, capability):
    qkv = torch.empty(4096, 48, 128, dtype=torch.bfloat16)
    query, key, value = qkv.split((32, 8, 8), dim=1)
    cache = torch.empty(2, 8, 16, 8, 128, dtype=torch.bfloat16)
    slots = torch.empty(4096, dtype=torch.int64)

    def launch():
        if fused:
            cache_write.rotate_and_write(
                query, key, value, *cache, slots, positions=slots, cos_sin=torch.empty(64, 128),
                q_norm=torch.empty(128), k_norm=torch.empty(128),
            )  # fmt: skip
        else:
            cache_write.write(key, value, *cache, slots)

    code, _ = compiled(monkeypatch, cache_write, "_write_kernel", launch, capability)
    assert code.spill_bytes == 0
    assert (code.count("ACQBULK") > 0) == (capability >= 90)  # waits for the kernel ahead
    assert code.count("STG.E.128") == code.count("STG") >= (6 if fused else 2)


@pytest.mark.parametrize("capability", ARCHITECTURES)
@pytest.mark.parametrize("pairs", [1, 16, 64, 256, 512])
def test_copy(monkeypatch, pairs, capability):
    cache = block_copy.as_words(torch.empty(2, 2, 8, 16, 8, 128, dtype=torch.bfloat16))
    ids = torch.empty(pairs, dtype=torch.int64)

    def launch():
        block_copy.launch_copy(cache, cache, ids, ids, pairs)

    code, _ = compiled(monkeypatch, block_copy, "_copy_kernel", launch, capability)
    assert code.count("LDG.E.128") == code.count("STG.E.128") > 0
    assert code.count("BAR") > 0  # between reading and writing
    assert code.spill_bytes == 0


# Bytes that the assembler may spill in the kernels of Hopper GPUs. What lives from one request to
# the next waits in memory while the registers hold a tile; more so in decode, whose results are
# combined at the end of a request. In the loops over keys nothing is, but two registers of a
# prefill with a window.
SPILLS = {"decode": 448, "prefill": 128}

HOPPER = [
    (32, 8, 128, 16, 1, {}),
    (32, 8, 64, 8, 2, {"sliding_window": 100, "soft_cap": 30.0}),
    (32, 8, 128, 64, 4, {"sinks": torch.zeros(32)}),
]


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "block", "query_len", "options"), HOPPER)
def test_hopper_decode(monkeypatch, heads, kv_heads, head_dim, block, query_len, options):
    hopper_decode = pytest.importorskip("billfish.kernels.paged_attention.hopper_decode")
    window = options.get("sliding_window")
    plan = plan_for(heads, kv_heads, head_dim, query_len, sliding_window=window)
    arguments = step(heads, kv_heads, head_dim, block, query_len)
    assert hopper_decode.supports(*arguments[1:3], query_len * heads // kv_heads)

    def launch():
        hopper_decode.decode(
            *arguments, Scoring(0.1, **options), plan.workspace, max_query_len=query_len,
            lse=torch.empty(arguments[0].shape[:2]) if "sinks" in options else None, overlap=True,
        )  # fmt: skip

    code, shared = compiled(monkeypatch, hopper_decode, "_decode_kernel", launch, 90)
    boxes = 64 // min(block, 64)
    assert code.count("UTMALDG.2D") == 2 * boxes * head_dim // 64
    assert code.count("HMMA") == 32 * head_dim // 128
    assert code.count("LDSM") > 0
    assert code.count("LDGSTS") == 0
    assert code.count("ACQBULK") > 0  # waits for the kernel ahead
    assert not code.undefined_descriptors
    assert shared <= 232448
    assert code.spill_bytes <= SPILLS["decode"]
    assert spills_in_loops(code) == 0


HOPPER_PREFILL = [
    (32, 8, 128, 16, {}),
    (10, 2, 128, 64, {"sliding_window": 100, "sinks": torch.zeros(10)}),
    (16, 1, 64, 8, {"soft_cap": 30.0}),
]


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "block", "options"), HOPPER_PREFILL)
def test_hopper_prefill(monkeypatch, heads, kv_heads, head_dim, block, options):
    hopper_prefill = pytest.importorskip("billfish.kernels.paged_attention.hopper_prefill")
    arguments = step(heads, kv_heads, head_dim, block, query_len=64)
    scoring = Scoring(0.1, **options)
    assert hopper_prefill.supports(*arguments[:3], scoring)
    plan = plan_for(heads, kv_heads, head_dim).workspace

    def launch():
        hopper_prefill.prefill(
            *arguments, scoring, decoded_len=4, max_query_len=64, max_seq_len=4096, plan=plan,
            lse=torch.empty(arguments[0].shape[:2]) if "sinks" in options else None, overlap=True,
            num_programs=132,
        )  # fmt: skip

    code, shared = compiled(monkeypatch, hopper_prefill, "_prefill_kernel", launch, 90)
    # Two warpgroups: the first product, that of each kind of step, and the last.
    kinds = 1 if scoring.sliding_window else 2
    assert code.count("HGMMA") == 2 * (kinds + 1) * (8 + head_dim // 16)
    assert not code.serialized
    assert not code.undefined_descriptors
    assert code.spill_bytes <= SPILLS["prefill"]
    assert shared <= 232448
    assert softmax_runs_under_products(code)


def softmax_runs_under_products(code: MachineCode) -> bool:
    """Whether both warpgroups have a loop where the wait for Q K^T alone (one product left in
    flight) has the exponentials of a tile before the wait for P V.
    """
    marks = re.findall(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x[01]|MUFU\.EX2", code.sass)
    waits = [i for i, mark in enumerate(marks) if mark.endswith("0x1")]
    under = [next(n for n, mark in enumerate(marks[i + 1 :]) if "DEPBAR" in mark) for i in waits]
    return sum(count >= 64 for count in under) >= 2


def spills_in_loops(code: MachineCode) -> int:
    """Reloads of spilled registers between the first and the last tensor-core instruction."""
    lines = code.sass.splitlines()
    products = [i for i, line in enumerate(lines) if "HMMA" in line]
    return sum("LDL" in line for line in lines[products[0] : products[-1]])
