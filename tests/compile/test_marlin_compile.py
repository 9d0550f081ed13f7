"""Every shipped form of the GEMM kernels, compiled without a GPU, and its machine code read."""

import itertools
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

import triton

from billfish.bench.gemm_ablation import DEPTHS
from billfish.kernels.cuda_driver import parameter_bytes
from billfish.kernels.gluon_compat import gluon_supported, tma_cache_hints
from billfish.kernels.marlin import configs, triton_gemm, tuning
from billfish.kernels.marlin.configs import Gpu, HopperConfig, Product, TritonConfig
from billfish.kernels.marlin.packing import unit_words
from tests.compile.offline import MachineCode, fake_device, machine_code

if triton.knobs.runtime.interpret:
    pytest.skip("compiles, so not with TRITON_INTERPRET=1", allow_module_level=True)
if not gluon_supported():
    pytest.skip("this Triton release is not one the Gluon kernels support", allow_module_level=True)

from billfish.kernels.marlin import hopper_launch, hopper_plan
from billfish.kernels.marlin.hopper_gemm import w4a16_hopper

H200 = Gpu("NVIDIA H200", 132)
OTHER = Gpu("a GPU without a table", 132)
FIRST_RELEASE = triton.__version__.startswith("3.6.")
SHARED_MEMORY = 232448  # bytes a block may use on sm_90
DTYPES = (torch.float16, torch.bfloat16)
KINDS = tuple(itertools.product((128, 64, 32, 16), ("symmetric", "integer", "offset"), DTYPES))

# Bytes that the assembler may spill, by (rows, consumers, tile_m); the larger figure is that of
# Triton 3.7's assembler. These kernels trade a few registers for another block or for two more
# consumers a multiprocessor, or for the widest tile, and were the fastest on an H200 for all that.
SPILLS = {(128, 1, 16): 20, (64, 2, 16): 4, (64, 2, 32): 8, (64, 2, 256): 48, (128, 2, 128): 16}


def units_for(n, k, group_size, zero_point):
    return -(-n // 64), -(-k // 128), unit_words(group_size, zero_point != "symmetric")


def shipped_configs() -> list[HopperConfig]:
    """Every kernel that a table or the rules choose for some shape.

    The grid is no part of a kernel, and raster order and L2 policies hardly change it.
    """
    shapes = [(64, 128), (4096, 4096), (4096, 14336), (28672, 4096), (8192, 28672), (57344, 8192)]
    rows = [*tuning.ROWS, 200, 500, 8192]
    ways = ((H200, False), (OTHER, False), (OTHER, True))
    chosen = (
        configs.hopper_config(m, units_for(n, k, 128, "symmetric"), gpu, batch_invariant)
        for (gpu, batch_invariant), m, (n, k) in itertools.product(ways, rows, shapes)
    )
    same = {"grid_per_sm": 1, "sharing_cost": 10, "stream_k": True, "group_m": 8, "keep_x": True}
    parts = {1: 0, 4: 2, 8: 8}  # as many as make a kernel that loads so many sums together
    configs_ = (replace(config, **same, parts=parts[config.together]) for config in chosen)
    return list(dict.fromkeys(configs_))


def cases():
    """Groups of 128 for every configuration and dtype, and another kind of weights in turn.

    By a later release of Triton every configuration with one dtype, in turn, and not both.
    """
    other = itertools.cycle(kind for kind in KINDS if kind[:2] != (128, "symmetric"))
    for index, config in enumerate(shipped_configs()):
        dtypes = DTYPES if FIRST_RELEASE else (DTYPES[index % 2],)
        kinds = [(128, "symmetric", dtype) for dtype in dtypes]
        # How a tile ends is no matter of the weights: those that end otherwise need one kind only.
        ends_otherwise = config.owned or config.parts
        for group_size, zero_point, dtype in kinds[:1] if ends_otherwise else (*kinds, next(other)):
            yield config, group_size, zero_point, dtype


def compile_hopper(
    config, group_size, zero_point, dtype, epilogue=(False, False, False)
) -> tuple[MachineCode, int]:
    """(machine code, bytes of shared memory) of the kernel that a launch would run.

    epilogue: whether it has a bias and a residual, and whether it is that of a gated activation.
    """
    m, n, k = config.tile_m + 1 if config.tile_m > 64 else config.tile_m, 512, 512
    shape = units_for(n, k, group_size, zero_point)
    plan = hopper_plan.plan(m, shape, dtype, H200, n, zero_point, epilogue=epilogue, config=config)
    x, y = torch.empty(m, k, dtype=dtype), torch.empty(m, n, dtype=dtype)
    units = torch.empty(shape, dtype=torch.int32)
    memory = (y, y, y, torch.empty(4), torch.empty(4, dtype=torch.int32))
    arguments = (*hopper_launch.descriptors(plan, x, units), *memory, *plan.numbers)
    with fake_device(90), tma_cache_hints(w4a16_hopper.__name__, plan.cache_hints):
        kernel = w4a16_hopper.warmup(*arguments, **plan.constants, **plan.options, grid=(1,))
    assert parameter_bytes(kernel.asm["ptx"]) == [*hopper_launch.FIELDS, 8, 8]
    return machine_code(kernel), kernel.metadata.shared


def test_threads_compile_with_policies_of_their_own_at_the_same_time():
    """Triton has one hook for all threads, and a start compiles many products at once."""
    together = threading.Barrier(2, timeout=60)
    load = "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [a], [b];"
    before = triton.knobs.runtime.add_stages_inspection_hook

    def compiled(kernel: str, policies: dict[int, str]) -> str:
        stages = {"ptx": lambda: f".entry {kernel}(\n{load}"}
        with tma_cache_hints(kernel, policies):
            together.wait()  # both are within, or this fails
            triton.knobs.runtime.add_stages_inspection_hook(None, stages)
            together.wait()
        return stages["ptx"]()

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(compiled, "a", {2: "evict_first"})
        second = pool.submit(compiled, "b", {2: "evict_last"})
        assert "L2::evict_first" in first.result()
        assert "L2::evict_last" in second.result()
    assert triton.knobs.runtime.add_stages_inspection_hook is before


def test_heuristic_is_one_of_few():
    """The shipped set stays small enough to compile and to test all of it."""
    assert 5 <= len(shipped_configs()) <= 30


@pytest.mark.parametrize(("config", "group_size", "zero_point", "dtype"), list(cases()))
def test_hopper_kernel(config, group_size, zero_point, dtype):
    code, shared = compile_hopper(config, group_size, zero_point, dtype)
    units = config.rows // 64
    # 128 columns of a stage take 8 instructions of 16 columns for each 64 rows.
    assert code.count("HGMMA") == 8 * units * config.consumers
    # The codes of a unit are two loads of 16 bytes a thread.
    assert code.count("LDS.128") >= 2 * units * config.consumers
    assert not code.undefined_descriptors
    assert not code.serialized
    key = (config.rows, config.consumers, config.tile_m)
    assert code.spill_bytes <= SPILLS.get(key, 0)
    assert shared <= SHARED_MEMORY
    assert config.blocks_per_sm * (shared + 1024) <= 228 * 1024
    assert config.blocks_per_sm * code.registers * 32 * (4 * config.consumers + 4) <= 65536


@pytest.mark.parametrize(
    "technique",
    ["overlap", "stream_k", "pdl", "carry", "sum_scale", "stream_weights", "keep_x"],
)
def test_techniques_can_be_switched_off(technique):
    """Each technique is a switch of the same kernel: turned around, it still compiles well."""
    base = {"rows": 64, "consumers": 2, "tile_m": 16, "stages": 4}
    on = {"carry": {"carry": True, "sum_scale": False}}.get(technique, {technique: True})
    off = {"carry": {"carry": False, "sum_scale": False}}.get(technique, {technique: False})
    codes = []
    for setting in (on, off):
        config = HopperConfig(**base, **setting)
        code, _ = compile_hopper(config, 128, "symmetric", torch.float16)
        assert not code.serialized
        assert code.count("HGMMA") == 16
        codes.append(code)
    if technique == "pdl":
        assert "ACQBULK" in codes[0].sass
        assert "ACQBULK" not in codes[1].sass
    elif technique in ("stream_weights", "keep_x"):
        dimensions = {"stream_weights": "4D", "keep_x": "2D"}[technique]
        hinted = rf"UTMALDG\.{dimensions}.*desc\["
        assert re.search(hinted, codes[0].sass)
        assert not re.search(hinted, codes[1].sass)
    elif technique != "stream_k":  # the division of the work is the host's
        assert codes[0].sass != codes[1].sass


@pytest.mark.parametrize(
    ("depth", "tile_m", "sum_scale"),
    [(min(DEPTHS), 8, True), (min(DEPTHS), 64, False), (max(DEPTHS), 8, True)],
)
def test_queues_of_any_depth(depth, tile_m, sum_scale):
    """What the ablation times: from one stage, with nothing in flight, to eight."""
    config = HopperConfig(
        rows=64, consumers=2, tile_m=tile_m, stages=depth, sum_scale=sum_scale, stream_k=False
    )
    code, shared = compile_hopper(config, 128, "symmetric", torch.float16)
    assert code.count("HGMMA") == 16
    assert not code.serialized
    assert not code.spill_bytes
    assert shared >= depth * config.stage_bytes(1)
    assert shared <= SHARED_MEMORY


# Bytes more with epilogues (24 with the assembler of Triton 3.7): they run once a tile, so a few
# spilled registers cost nothing.
EPILOGUE_SPILLS = 32


@pytest.mark.parametrize("config", shipped_configs())
def test_epilogues(config):
    """All of them at once fit beside the product."""
    code, shared = compile_hopper(config, 128, "symmetric", torch.bfloat16, (True, True, True))
    assert code.count("HGMMA") == 8 * config.rows // 64 * config.consumers
    assert not code.serialized
    key = (config.rows, config.consumers, config.tile_m)
    assert code.spill_bytes <= SPILLS.get(key, 0) + EPILOGUE_SPILLS
    assert shared <= SHARED_MEMORY


@pytest.mark.parametrize("place", range(3))
def test_one_epilogue(place):
    config = HopperConfig(rows=64, consumers=1, tile_m=8, stages=4)
    epilogue = tuple(i == place for i in range(3))
    code, _ = compile_hopper(config, 32, "integer", torch.bfloat16, epilogue)
    assert code.count("HGMMA") == 8
    assert not code.spill_bytes


ARCHITECTURES = {
    80: ("sm_80", "HMMA"),
    89: ("sm_89", "HMMA"),
    90: ("sm_90a", "HGMMA"),
    100: ("sm_100a", "UTCHMMA"),
}


@pytest.mark.parametrize("capability", ARCHITECTURES)
@pytest.mark.parametrize(
    ("config", "group_size", "zero_point", "dtype", "silu_mul"),
    [
        (TritonConfig(rows=64, tile_m=16, split=4, stages=4), 128, "symmetric", torch.float16, 0),
        (TritonConfig(rows=128, tile_m=32, split=1, stages=4), 32, "integer", torch.bfloat16, 1),
        (TritonConfig(rows=64, tile_m=64, split=2, stages=3), 16, "offset", torch.float16, 0),
    ],
)
def test_triton_kernel(capability, config, group_size, zero_point, dtype, silu_mul):
    m, n, k = config.tile_m, 512, 512
    units = torch.empty(units_for(n, k, group_size, zero_point), dtype=torch.int32)
    x, y = torch.empty(m, k, dtype=dtype), torch.empty(m, n, dtype=dtype)
    scratch = torch.empty(4), torch.empty(4, dtype=torch.int32)
    product = Product(n, zero_point, residual=y, silu_mul=silu_mul)
    arguments, keywords = triton_gemm.arguments(x, units, y, *scratch, product, config)
    with fake_device(capability):
        kernel = triton_gemm.w4a16_triton.warmup(*arguments, **keywords, grid=(1, 1, 1))
    arch, instruction = ARCHITECTURES[capability]
    code = machine_code(kernel, arch)
    assert code.count(instruction) > 0
    assert code.count("LDS.128") > 0
    assert code.spill_bytes <= EPILOGUE_SPILLS
    assert not code.undefined_descriptors
    # sm_86, sm_89 and sm_120 allow a block 99 KiB.
    assert kernel.metadata.shared <= 101376
