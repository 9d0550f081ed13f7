"""How the Hopper kernel's work is divided, and what its configurations claim: no GPU needed."""

import ast
import inspect
import json
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from billfish.bench import gemm, gemm_ablation, gemm_chain, gemm_compile
from billfish.bench.tune import candidates
from billfish.errors import KernelArgumentError
from billfish.kernels.cuda_driver import CannotPrepare
from billfish.kernels.marlin import (
    gpu,
    hopper_launch,
    hopper_plan,
    hopper_schedule,
    tuning,
    workspace,
)
from billfish.kernels.marlin.configs import Gpu, HopperConfig, Product, hopper_config, triton_config
from billfish.kernels.marlin.packing import unit_words
from billfish.kernels.marlin.weight import PackedWeight
from billfish.worker.step_graphs import ladder, mixed_ladder

PROCESSORS = 132
GPU = Gpu("a GPU without a table", PROCESSORS)
quick = settings(max_examples=200, deadline=None, derandomize=True)

configurations = st.builds(
    HopperConfig,
    rows=st.sampled_from([64, 128]),
    consumers=st.sampled_from([1, 2, 4]),
    tile_m=st.sampled_from([8, 16, 32, 64, 128, 256]),
    stages=st.just(4),
    blocks_per_sm=st.integers(1, 3),
    grid_per_sm=st.integers(1, 3),
    parts=st.sampled_from([0, 0, 2, 4, 7]),
    owned=st.booleans(),
    sharing_cost=st.sampled_from([0, 2, 10]),
    stream_k=st.booleans(),
)


def kernel_class(module, name):
    """A class of the kernel language as one of Python, whose methods compute with integers."""
    tree = ast.parse(inspect.getsource(module))
    made = next(node for node in tree.body if getattr(node, "name", None) == name)
    made.decorator_list = []
    for method in made.body:
        if isinstance(method, ast.FunctionDef):
            method.decorator_list = []
    language = SimpleNamespace(
        tensor=int, constexpr=int, minimum=min, maximum=max, where=lambda c, a, b: a if c else b
    )
    scope = {"gl": language}
    exec(compile(ast.Module([made], []), module.__file__, "exec"), scope)
    return dataclass(scope[name])


Schedule = kernel_class(hopper_schedule, "Schedule")


def schedule(division, pid, owned):
    d = division
    return Schedule(
        pid, d.blocks, d.steps, d.tiles_n, d.tiles_m, d.whole, d.share, d.extra, d.own, 0, owned
    )


def block_steps(division, pid, owned=False):
    """(tile, step) pairs of one block, in order, as the producer of the kernel walks them."""
    work = schedule(division, pid, owned)
    tile, step = work.first()
    for _ in range(work.count()):
        yield tile, step
        tile, step = work.next(tile, step)


def block_runs(division, pid, owned=False):
    """(tile, first step, steps) of one block, in order, as the kernel's consumers walk them."""
    work = schedule(division, pid, owned)
    tile, step = work.first()
    left = work.count()
    while left > 0:
        run = work.run(tile, step, left)
        yield tile, step, run
        left -= run
        tile, step = work.after(tile, step, run)


@quick
@given(configurations, st.integers(1, 2000), st.integers(1, 60), st.integers(1, 40))
def test_every_step_is_computed_once(config, m, n_units, steps):
    division = hopper_plan.divide(config, m, n_units, steps, 8)
    most = 8 * config.grid_per_sm
    if config.parts and not config.owned:
        most = max(most, config.parts * division.tiles_n * division.tiles_m)
    assert 1 <= division.blocks <= most
    assert division.tiles_n * config.tile_n >= n_units * 64
    assert division.tiles_m * config.tile_m >= m
    blocks, owned = range(division.blocks), config.owned
    seen = [pair for pid in blocks for pair in block_steps(division, pid, owned)]
    tiles = division.tiles_n * division.tiles_m
    assert sorted(seen) == [(tile, step) for tile in range(tiles) for step in range(steps)]
    for pid in blocks:
        runs = block_runs(division, pid, owned)
        in_runs = [(tile, first + i) for tile, first, count in runs for i in range(count)]
        assert in_runs == list(block_steps(division, pid, owned))


@quick
@given(configurations, st.integers(1, 2000), st.integers(1, 60), st.integers(1, 40))
def test_sums_of_a_tile_lie_in_the_order_of_its_steps(config, m, n_units, steps):
    """Each part of a shared tile has a slot of its own; an owner adds up those of its helpers."""
    division = hopper_plan.divide(replace(config, owned=True), m, n_units, steps, 8)
    parts = {}
    for pid in range(division.blocks):
        runs = list(block_runs(division, pid, True))
        helper = schedule(division, pid, True).helper()
        shared = [run for run in runs if run[0] >= division.whole]
        # A helper begins with what it shares, an owner ends with it.
        assert shared == (runs[: len(shared)] if helper >= 0 else runs[len(runs) - len(shared) :])
        for tile, first, count in shared:
            index = tile - division.whole
            slot = index + (helper if helper >= 0 else division.blocks)
            parts.setdefault(index, []).append((first, count, slot, pid))
    assert sorted(parts) == list(range(division.divided))
    slots = [slot for found in parts.values() for _, _, slot, _ in found]
    assert len(set(slots)) == len(slots)
    assert max(slots, default=-1) < division.blocks + division.divided
    for index, found in parts.items():
        (first, count, slot, pid), *others = sorted(found)
        assert (first, count, slot, pid) == (0, division.own, division.blocks + index, index)
        work = schedule(division, pid, True)
        at = work.shared_step(division.whole + index, work.own)
        end = work.shared_step(division.whole + index, steps - 1)
        helpers = range(work.block_of(at), work.block_of(end) + 1)
        assert [slot for _, _, slot, _ in others] == [index + helper for helper in helpers]


@quick
@given(configurations, st.integers(1, 2000), st.integers(1, 60), st.integers(1, 40))
def test_blocks_get_equal_shares(config, m, n_units, steps):
    """With Stream-K, blocks differ by one step in the divided part and by nothing before it."""
    division = hopper_plan.divide(replace(config, owned=False), m, n_units, steps, 8)
    counts = [sum(1 for _ in block_steps(division, pid)) for pid in range(division.blocks)]
    if division.divided:
        assert max(counts) - min(counts) <= 1
    else:
        assert max(counts) - min(counts) <= steps


@quick
@given(st.integers(1, 2000), st.integers(1, 300), st.integers(8, 40))
def test_owners_and_helpers_get_about_as_much(m, n_units, steps):
    config = HopperConfig(rows=64, consumers=2, tile_m=256, stages=3, owned=True, sharing_cost=2)
    division = hopper_plan.divide(config, m, n_units, steps, 132)
    counts = [sum(1 for _ in block_steps(division, pid, True)) for pid in range(division.blocks)]
    if division.divided:
        owners, helpers = counts[: division.divided], counts[division.divided :]
        assert max(owners) == min(owners)
        assert max(helpers) - min(helpers) <= 1
        assert max(helpers) <= max(owners)
        fair = division.tiles_n * division.tiles_m * steps / 132
        assert max(owners) < fair + 1 + hopper_plan._LEAD


def test_sharing_is_for_blocks_that_would_idle():
    config = HopperConfig(rows=64, consumers=2, tile_m=16, stages=4)
    assert hopper_plan.divide(config, 1, 2 * 132, 64, 132).divided == 0  # one tile a block
    assert hopper_plan.divide(config, 1, 2 * 40, 64, 132).divided == 40  # 92 blocks would idle
    assert hopper_plan.divide(config, 1, 2 * 125, 64, 132).divided == 0  # 7 blocks idle: cheaper
    off = HopperConfig(rows=64, consumers=2, tile_m=16, stages=4, stream_k=False)
    assert hopper_plan.divide(off, 1, 2 * 40, 64, 132).divided == 0


def test_parts_share_a_tile_evenly():
    config = HopperConfig(rows=128, consumers=1, tile_m=8, stages=5, parts=4)
    division = hopper_plan.divide(config, 1, 64, 32, 132)
    assert division.blocks == division.divided * 4 == 128
    for pid in range(division.blocks):
        own = list(block_steps(division, pid))
        assert own == [(pid // 4, pid % 4 * 8 + step) for step in range(8)]
    by_rule = hopper_plan.divide(replace(config, parts=0), 1, 64, 32, 132)
    # Where the steps cannot be divided by them, and where no tile is to be shared.
    assert hopper_plan.divide(replace(config, parts=5), 1, 64, 32, 132) == by_rule
    whole = hopper_plan.divide(replace(config, stream_k=False), 1, 64, 32, 132)
    assert whole.divided == 0


def test_more_steps_than_numbers_is_refused():
    config = HopperConfig(rows=64, consumers=2, tile_m=256, stages=3)
    largest = hopper_plan.divide(config, 1 << 20, 152064 // 64, 160, 132)
    assert largest.tiles_m * largest.tiles_n * largest.steps < 2**31
    with pytest.raises(KernelArgumentError, match="too large"):
        hopper_plan.divide(config, 1 << 20, 152064 // 64, 512, 132)


SHAPES = [(64, 16), (576, 1408), (4096, 4096), (4096, 14336), (28672, 4096), (57344, 8192)]


def make_plan(config):
    units = (64, 32, unit_words(128, False))
    return hopper_plan.plan(9, units, torch.float16, GPU, 4096, config=config)


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("zero_point", ["symmetric", "integer", "offset"])
@pytest.mark.parametrize("group_size", [16, 32, 64, 128, -1])
def test_plans_fit_the_multiprocessor(group_size, zero_point, batch_invariant):
    for m in (1, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 256, 257, 4096):
        for n, k in SHAPES:
            units = (-(-n // 64), -(-k // 128), unit_words(group_size, zero_point != "symmetric"))
            plan = hopper_plan.plan(
                m, units, torch.float16, GPU, n, zero_point, batch_invariant=batch_invariant
            )
            config, constants = plan.config, plan.constants
            memory = constants["STAGES"] * config.stage_bytes(plan.meta_rows)
            assert constants["STAGES"] >= 2
            assert config.blocks_per_sm * (memory + 1024) <= 228 * 1024
            assert constants["SUM_SCALE"] <= (plan.groups == 1 and zero_point != "offset")
            assert config.tile_m >= min(m, 128)
            assert config.grid_per_sm <= config.blocks_per_sm
            producer, consumer, at_launch = hopper_plan.register_budget(config)
            warps = 4 * config.consumers + 4
            assert at_launch * warps * 32 * config.blocks_per_sm <= 65536
            assert 4 * (producer + config.consumers * consumer) <= at_launch * warps


def test_workspace_is_sized_by_the_division():
    plan = make_plan(HopperConfig(rows=64, consumers=2, tile_m=16, stages=4))
    assert plan.division.divided == 32
    assert plan.counter_count == 32 * 2
    assert plan.partial_size == 2 * plan.division.blocks * 128 * 16
    plan = make_plan(HopperConfig(rows=64, consumers=2, tile_m=16, stages=4, owned=True))
    assert plan.division.divided == 32
    assert plan.partial_size == (plan.division.blocks + 32) * 128 * 16
    plan = make_plan(HopperConfig(rows=64, consumers=2, tile_m=16, stages=4, stream_k=False))
    assert plan.partial_size == plan.counter_count == 0


@pytest.fixture
def gpus(monkeypatch):
    """Devices by the name of their index: cuda:75 has compute capability 7.5."""

    def capability(device):
        return divmod(torch.device(device).index, 10)

    monkeypatch.setattr(torch.cuda, "get_device_capability", capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"a GPU, {device}")
    gpu._hopper_kernel.cache_clear()
    yield
    gpu._hopper_kernel.cache_clear()


def test_each_gpu_gets_its_kernel(gpus, monkeypatch):
    """The Hopper kernel on 9.0, the portable one on everything else from 8.0 on."""
    assert gpu._hopper_kernel(torch.device("cuda:90")) is hopper_launch
    for number in (80, 86, 89, 100, 103, 120, 121):
        assert gpu._hopper_kernel(torch.device("cuda", number)) is None
    for number in (60, 70, 75):
        with pytest.raises(KernelArgumentError, match=rf"8\.0 or newer; a GPU, cuda:{number} has"):
            gpu._hopper_kernel(torch.device("cuda", number))
    gpu._hopper_kernel.cache_clear()
    monkeypatch.setattr("billfish.kernels.gluon_compat.gluon_supported", lambda: False)
    with pytest.warns(RuntimeWarning, match="portable kernels"):
        assert gpu._hopper_kernel(torch.device("cuda:90")) is None


def test_captured_calls_share_no_counters():
    """A graph may be replayed beside any other, so each call has its own until they run out."""
    pool, cpu = workspace._Pool(), torch.device("cpu")
    zeros = torch.zeros(1024, dtype=torch.int32)
    pool.counters.append(workspace.Counters(zeros))
    taken = [pool.for_capture(cpu, 8, count) for count in (1, 65, 200, 500, 64, 1)]
    begins = [memory.addresses[1] - zeros.data_ptr() for memory in taken]
    assert begins[:4] == [0, 4 * 64, 4 * 192, 4 * 448]
    assert begins[4] == 4 * 960
    assert not 0 <= begins[5] < 4 * 1024  # memory of its own
    assert [memory.sizes for memory in taken] == [(8, n) for n in (1, 65, 200, 500, 64, 1)]
    assert not any(memory.counters.any() for memory in taken)


def test_graphs_that_come_in_place_of_others_take_their_counters(monkeypatch):
    """However often a model is captured anew, it takes no more, and nobody else's."""
    cpu = torch.device("cpu")
    pool = workspace._Pool()
    monkeypatch.setattr(workspace, "_pools", {cpu: pool})
    pool.counters.append(workspace.Counters(torch.zeros(1024, dtype=torch.int32)))
    zeros = torch.zeros(1024, dtype=torch.int32)
    own = workspace.Counters(zeros)
    for _ in range(50):
        with workspace.captured_into(own, cpu):
            taken = [pool.for_capture(cpu, 8, count) for count in (70, 500, 64)]
        begins = [memory.addresses[1] - zeros.data_ptr() for memory in taken]
        assert begins == [0, 4 * 128, 4 * 640]
    assert pool.counters[0].taken == 0
    outside = pool.for_capture(cpu, 8, 70)
    assert outside.addresses[1] == pool.counters[0].zeros.data_ptr()


def test_counters_suffice_for_all_graphs_of_a_large_model():
    """Where they do not, each product of a graph clears its own first, which takes longer."""
    taken = 0
    for m in (*ladder(512), *mixed_ladder(8192)):
        for n, k, outputs in ((10240, 8192, 10240), (8192, 8192, 8192), (57344, 8192, 28672),
                              (8192, 28672, 8192)):  # fmt: skip
            units = (-(-n // 64), -(-k // 128), unit_words(128, False))
            epilogue = (False, False, outputs < n)
            plan = hopper_plan.plan(
                m, units, torch.bfloat16, Gpu("NVIDIA H200", PROCESSORS), outputs,
                epilogue=epilogue,
            )  # fmt: skip
            taken += 80 * -(-plan.counter_count // 64) * 64
    assert taken < workspace._CAPTURED_COUNTERS


@pytest.fixture
def launches(monkeypatch):
    """What Triton and the driver were given, on a CPU: (by_triton, prepared)."""
    by_triton, prepared = [], []

    class Kernel:
        __name__ = "a kernel"

        def __getitem__(self, grid):
            return lambda *arguments, **constants: by_triton.append((arguments, constants))

    class Prepared:
        def __init__(self, kernel, blocks, arguments, first, count):
            self.known = blocks, arguments, first, count

        def __call__(self, stream, *addresses):
            assert len(addresses) == self.known[3]
            prepared.append((self.known, stream, addresses))

    for name, stand_in in {
        "w4a16_hopper": Kernel(),
        "gpu_of": lambda device: GPU,
        "DirectKernel": lambda kernel, fields: SimpleNamespace(kernel=kernel),
        "PreparedLaunch": Prepared,
        "tensor_map": lambda kernel, index, *rest: f"map {index}",
        "_empty": torch._C._dynamo.guards._empty_strided_cpu,
        "_kernels": {},
    }.items():
        monkeypatch.setattr(hopper_launch, name, stand_in)
    monkeypatch.setattr(gpu, "_hopper_kernel", lambda device: hopper_launch)
    monkeypatch.setattr(gpu, "_launches", {})
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: -1, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 42, raising=False)
    return by_triton, prepared


def product_of(x, units, outputs, **epilogue):
    """The implementation of the operation for a GPU."""
    named = {"bias": None, "residual": None, "silu_mul": False, "batch_invariant": False}
    rest = {"group_size": 128, "g_idx": None, "perm": None, **named, **epilogue}
    return gpu.w4a16_matmul(x, outputs, [units], "units-symmetric", **rest)


def test_one_kernel_serves_whole_and_divided_tiles(launches):
    """It is compiled for the dtypes of its arguments, which must not depend on the division."""
    for steps in (1, 64):
        x = torch.zeros(1, 128 * steps, dtype=torch.float16)
        units = torch.zeros(64, steps, 1056, dtype=torch.int32)
        hopper_launch._kernels.clear()
        hopper_launch.launch(x, units, Product(4096))
    whole, divided = launches[0]
    assert whole[1] == divided[1]
    dtypes = [[a.dtype for a in arguments[3:8]] for arguments, _ in launches[0]]
    assert dtypes[0] == dtypes[1] == [torch.float16] * 3 + [torch.float32, torch.int32]
    assert divided[0][6].numel() > whole[0][6].numel()


def test_a_kernel_that_cannot_be_prepared_is_launched_by_triton(launches, monkeypatch):
    def refuse(kernel, fields):
        raise CannotPrepare

    monkeypatch.setattr(hopper_launch, "DirectKernel", refuse)
    x, units = torch.zeros(3, 384).half(), torch.zeros(5, 3, 1056, dtype=torch.int32)
    for _ in range(3):
        product_of(x, units, 320)
    assert len(launches[0]) == 3
    assert not launches[1]


def test_later_launches_are_prepared_unless_a_profiler_watches(launches):
    import triton

    by_triton, prepared = launches
    units = torch.zeros(5, 3, 1056, dtype=torch.int32)
    x, residual = torch.zeros(3, 384, dtype=torch.float16), torch.zeros(3, 320).half()
    for _ in range(3):
        y = product_of(x, units, 320, residual=residual)
    assert len(by_triton) == 1
    assert len(prepared) == 2
    (blocks, arguments, first, count), stream, addresses = prepared[1]
    assert (stream, first, count) == (42, arguments.index(0), 5)
    assert arguments[first : first + count] == [0] * count
    assert [v for v in arguments if isinstance(v, str)] == ["map 0", "map 1", "map 2"]
    assert len(arguments) == len(hopper_launch.FIELDS)
    assert addresses[:3] == (y.data_ptr(), y.data_ptr(), residual.data_ptr())
    assert arguments[first + count :][:3] == [3, 320, 3]
    assert blocks <= 2 * GPU.processors
    triton.knobs.runtime.launch_enter_hook.add(print)
    try:
        product_of(x, units, 320, residual=residual)
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(print)
    assert len(by_triton) == 2
    assert len(prepared) == 2


def test_what_is_ready_is_that_of_the_same_call(launches):
    """Another place, shape, stride, dtype, weight or epilogue is prepared anew."""
    units = torch.zeros(5, 6, 1056, dtype=torch.int32)
    other_units, memory = units.clone(), torch.zeros(12, 768, dtype=torch.float16)
    other_dtype = memory.view(torch.bfloat16)
    residual = torch.zeros(3, 320).half()
    calls = [
        (memory[:3], units, {}),
        (memory[3:6], units, {}),
        (memory[:6:2], units, {}),
        (memory[:1], units, {}),
        (memory[:4].view(2, 2, 768), units, {}),
        (memory[:4].view(2, 1, 2, 768), units, {}),
        (other_dtype[:3], units, {}),
        (memory[:3], other_units, {}),
        (memory[:3], units, {"batch_invariant": True}),
        (memory[:3], units, {"residual": residual}),
        (memory[:3], units, {"bias": residual[0]}),
    ]
    for _ in range(3):
        for x, weight, epilogue in calls:
            y = product_of(x, weight, 320, **epilogue)
            assert y.shape == (*x.shape[:-1], 320)
            assert y.dtype == x.dtype
            assert y.is_contiguous()
    assert len(gpu._launches) == len(calls)
    known = [id(known) for known, _, _ in launches[1]]
    assert known[-len(calls) :] == known[-2 * len(calls) : -len(calls)]
    assert len(set(known[-len(calls) :])) == len(calls)


def test_a_call_finds_what_an_earlier_one_left(launches, monkeypatch):
    """And nothing where anything differs: also another weight at the same place."""
    codes = torch.randint(0, 16, (320, 384), dtype=torch.uint8)
    fields = gpu.pack(
        codes, torch.ones(320, 3), None, None, group_size=128, dtype=torch.float16, g_idx=None,
        silu_mul=False,
    )  # fmt: skip
    weight = PackedWeight(
        n=320, k=384, group_size=128, dtype=torch.float16, zero_point="symmetric", silu_mul=False,
        **fields,
    )  # fmt: skip
    x, (units,) = torch.zeros(3, 384).half(), weight.tensors
    assert gpu.launch_of(x, weight, False) is None
    y = product_of(x, units, 320)
    found = gpu.launch_of(x, weight, False)
    assert found is gpu._launches[next(iter(gpu._launches))]
    assert found(x, units, None, None).shape == y.shape
    others = [
        replace(weight, k=256), replace(weight, n=640), replace(weight, dtype=torch.bfloat16),
        replace(weight, group_size=-1), replace(weight, silu_mul=True, n=640),
        replace(weight, perm=torch.arange(384)), replace(weight, layout="units-integer"),
        replace(weight, tensors=(units.clone(),)),
    ]  # fmt: skip
    assert all(gpu.launch_of(x, other, False) is None for other in others)
    assert gpu.launch_of(x, weight, True) is None
    for other in (x[:2], x.clone(), x[:1], x.view(1, 3, 384), x.view(torch.bfloat16)):
        assert gpu.launch_of(other, weight, False) is None
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 1)
    assert gpu.launch_of(x, weight, False) is None


def test_copies_of_activations_are_not_kept(launches):
    """They live elsewhere the next time."""
    units = torch.zeros(5, 3, 1056, dtype=torch.int32)
    wide = torch.zeros(8, 512, dtype=torch.float16)
    for x in (wide[:, 1:385], wide[:, :384].t().contiguous().t()):
        product_of(x, units, 320)
    product_of(wide[:, :384], units, 320, perm=torch.arange(384))
    assert not gpu._launches


def test_a_single_output_is_computed_by_the_portable_kernel(launches, monkeypatch):
    from billfish.kernels.marlin import triton_gemm

    given = []

    def launch(x, units, product, tiling):
        given.append((product.outputs, tiling.split))
        return x.new_zeros(x.shape[0], product.outputs)

    monkeypatch.setattr(triton_gemm, "launch", launch)
    monkeypatch.setattr(gpu, "gpu_of", lambda device: GPU)
    units = torch.zeros(1, 32, 1056, dtype=torch.int32)
    for batch_invariant in (False, True):
        x = torch.zeros(2, 3, 4096, dtype=torch.float16)
        y = product_of(x, units, 1, batch_invariant=batch_invariant)
        assert y.shape == (2, 3, 1)
    assert [outputs for outputs, _ in given] == [1, 1]
    assert given[1][1] == 1
    assert launches == ([], [])


@pytest.mark.parametrize("m", [1, 3])
def test_rows_of_odd_length_are_padded(launches, m):
    """A single row too: its stride is never used, but has to be a multiple of 16 bytes."""
    units = torch.zeros(5, 2, 1056, dtype=torch.int32)
    y = product_of(torch.zeros(m, 203, dtype=torch.float16), units, 320)
    assert y.shape == (m, 320)
    ((arguments, _),) = launches[0]
    assert list(arguments[2].shape) == [m, 203]
    assert list(arguments[2].strides) == [208, 1]


def test_few_launches_are_kept(launches, monkeypatch):
    monkeypatch.setattr(gpu, "_KEPT", 2)
    units = torch.zeros(5, 3, 1056, dtype=torch.int32)
    others = [torch.zeros(3, 384, dtype=torch.float16) for _ in range(3)]
    for x in (*others, others[0]):
        product_of(x, units, 320)
        assert any(x.data_ptr() in key for key in gpu._launches)
        assert len(gpu._launches) <= 2


@pytest.mark.parametrize("shape", SHAPES)
def test_batch_invariant_plans_add_up_in_one_order(shape):
    """The order is that of the steps of a tile, with the scale on fragments, for every m."""
    units = (-(-shape[0] // 64), -(-shape[1] // 128), unit_words(128, False))
    for m in (1, 8, 9, 33, 64, 65, 129, 300, 5000):
        config = hopper_config(m, units, GPU, True)
        division = hopper_plan.divide(config, m, *units[:2], PROCESSORS)
        assert division.divided == 0
        assert not config.sum_scale
        assert config.tile_m >= min(m, 128)
        assert triton_config(m, units, GPU, True).split == 1


def test_heuristics_cover_every_size():
    for m in range(1, 600):
        config = hopper_config(m, (64, 32, 1056), GPU)
        assert config.tile_m in (8, 16, 32, 64, 128, 256)
        tiling = triton_config(m, (64, 32, 1056), GPU)
        assert tiling.tile_m >= min(m, 64)
        assert tiling.split <= 32


def test_tiles_are_not_left_half_empty():
    """Of a wide matrix, whose tiles are of 256 tokens where those are full."""
    units = (448, 32, 1056)
    tiles = {m: hopper_config(m, units, GPU).tile_m for m in range(129, 4097)}
    assert {m for m, tile in tiles.items() if tile == 128} == {
        *range(257, 385), *range(513, 641), *range(769, 897)
    }  # fmt: skip
    assert set(tiles.values()) == {128, 256}


def test_a_table_serves_its_weight_up_to_each_number_of_tokens(tmp_path, monkeypatch):
    rows = [
        {"n": 4096, "k": 4096, "m": 16, "config": {"rows": 64, "consumers": 1, "tile_m": 16,
                                                   "stages": 3}},
        {"n": 4096, "k": 4096, "m": 256, "config": {"rows": 64, "consumers": 2, "tile_m": 128,
                                                    "stages": 4, "sum_scale": False}},
    ]  # fmt: skip
    path = tmp_path / "some_gpu.json"
    path.write_text(json.dumps({"rows": rows}))
    monkeypatch.setattr(tuning, "table_path", lambda name: path)
    tuning._table.cache_clear()
    gpu, units, other = Gpu("Some GPU", PROCESSORS), (64, 32, 1056), (65, 32, 1056)
    for m in range(1, 600):
        expected = rows[0] if 8 < m <= 16 else rows[1] if 128 < m <= 256 else None
        rule = hopper_config(m, units, GPU)
        want = HopperConfig(**expected["config"]) if expected else rule
        assert hopper_config(m, units, gpu) == want
        assert hopper_config(m, other, gpu) == hopper_config(m, other, GPU)
        assert hopper_config(m, units, gpu, True) == hopper_config(m, units, GPU, True)
    tuning._table.cache_clear()


def test_tables_in_the_package_are_whole():
    tables = sorted(tuning.table_path("NVIDIA H200").parent.glob("*.json"))
    assert tuning.table_path("NVIDIA H200") in tables
    for path in tables:
        table = json.loads(path.read_text())
        assert tuning.table_path(table["device"]) == path
        keys = [(row["n"], row["k"], row["m"]) for row in table["rows"]]
        assert len(set(keys)) == len(keys)
        for row in table["rows"]:
            config = HopperConfig(**row["config"])
            assert row["m"] in tuning.ROWS
            assert row["us"] < row["us_by_rule"]
            assert config in [*candidates(row["m"])]


@pytest.mark.parametrize("m", tuning.ROWS)
def test_candidates_for_tuning_fit(m):
    """Each is a kernel that can be launched, and the choice by rules is among them or simpler."""
    for config in candidates(m):
        meta_rows = 1
        stages = min(config.stages, hopper_plan.max_stages(config, meta_rows))
        assert stages >= 2
        assert config.blocks_per_sm * (stages * config.stage_bytes(meta_rows) + 1024) <= 228 * 1024
        assert hopper_plan.divide(config, m, 64, 32, PROCESSORS).blocks > 0
        assert not (config.carry and config.sum_scale)


@pytest.mark.parametrize("m", [1, 16, 64, 256])
def test_the_ablation_switches_one_thing_at_a_time(m, monkeypatch):
    """Queue depths are those that shared memory has room for; one stage carries no product."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr("billfish.kernels.marlin.workspace.gpu_of", lambda device: GPU)
    settings = gemm_ablation.techniques_off(4096, 4096, m)
    chosen = settings["all on"]
    assert chosen == hopper_config(m, (64, 32, unit_words(128, False)), GPU)
    for name, config in settings.items():
        if name.startswith("queue depth"):
            depth = int(name.removeprefix("queue depth"))
            assert config.stages == depth <= hopper_plan.max_stages(config, 1)
            assert not (config.carry and depth < 2)
            assert replace(config, stages=chosen.stages, carry=chosen.carry) == chosen
        elif name != "all on":
            assert (
                replace(config, **{k: getattr(chosen, k) for k in gemm_ablation.TECHNIQUES[name]})
                == chosen
            )
            assert config != chosen
    assert {"queue depth 1", "queue depth 2"} <= set(settings)


@pytest.mark.parametrize("m", [1, 16])
def test_what_a_chain_runs_is_compiled_before(m, monkeypatch):
    monkeypatch.setattr(gemm_chain, "this_gpu", lambda: GPU)

    def kernels(plans):
        return {plan.kernel_key[1:] for plan in plans}  # but for the outputs, which are compiled in

    run = [
        hopper_plan.plan(
            m, gemm_chain.units_of(n, k), torch.float16, GPU, n,
            epilogue=(False, residual, silu_mul), config=gemm_chain.chain_config(m, n, k, pdl),
        )
        for index, (n, k) in enumerate(gemm_chain.LAYER)
        for pdl in (True, False)
        for residual, silu_mul in {(False, False), (index in (1, 3), n == gemm_chain.GATED)}
    ]  # fmt: skip
    assert kernels(run) == kernels(map(gemm_compile._plan, gemm_chain.chain_forms(m)))


def test_errors_of_results_are_told_apart():
    torch.manual_seed(0)
    codes = torch.randint(0, 16, (5000, 64), dtype=torch.uint8)
    scales, x = torch.rand(5000, 2), torch.randn(3, 64)
    exact = x @ ((codes.float() - 8).view(5000, 2, 32) * scales[..., None]).view(5000, 64).t()
    wrong = exact.clone()
    wrong[:, -1] += 100
    found = gemm.relative_errors({"right": exact, "wrong": wrong}, x, codes, scales, 32)
    assert found["right"] < 1e-6
    assert found["wrong"] == pytest.approx(100 * 3**0.5 / float(exact.norm()), rel=1e-3)


@pytest.mark.parametrize(
    "options",
    [
        ["--formats", "--dtype", "bf16"],
        ["--chain", "--shapes", "64x64"],
        ["--ablation", "--peers", "x"],
        ["--formats", "--chain"],
    ],
)
def test_options_without_effect_are_refused(options, capsys):
    with pytest.raises(SystemExit):
        gemm.parsed(["--out", "x.json", *options])
    assert "has no effect" in (said := capsys.readouterr().err) or "not allowed" in said
