"""The kernels of scientific computing, compiled without a GPU: what their machine code holds."""

import re

import pytest
import torch

pytest.importorskip("triton")

import triton

from billfish.kernels.general import matmul_gpu, monte_carlo_gpu, nbody_gpu, spmv_gpu, stencil_gpu
from billfish.kernels.gluon_compat import gluon_supported
from tests.compile.offline import fake_device
from tests.compile.test_general_compile import Recorder, compiled, of_both

if triton.knobs.runtime.interpret:
    pytest.skip("compiles, so not with TRITON_INTERPRET=1", allow_module_level=True)


@pytest.mark.parametrize(
    ("dtype", "boundary", "fused"),
    [
        (torch.float32, "dirichlet", 2),
        (torch.float32, "dirichlet", 1),
        (torch.float32, "periodic", 1),
        (torch.float64, "neumann", 2),
        (torch.float64, "dirichlet", 1),
        (torch.bfloat16, "neumann", 1),
    ],
)
def test_heat_equation(monkeypatch, dtype, boundary, fused):
    x = torch.empty(64, 512, 512, dtype=dtype)

    def launch(coalesced=True):
        stencil_gpu.heat_equation(
            x, 0.1, 0.1, 0.1, fused, boundary, 0.0, fused=fused, coalesced=coalesced
        )

    name = "_step_kernel" if fused == 1 else "_march_kernel"
    code = of_both(monkeypatch, stencil_gpu, name, launch)
    assert code.count("LDG.E.128") > 0
    assert code.count("STG.E.128") > 0
    # No neighbour comes through shared memory; of a plane that is in registers alone, by shuffles.
    assert "STS" not in code.sass
    assert ("SHFL" in code.sass) == (fused > 1)
    if fused == 1 and dtype == torch.float32:
        code = compiled(monkeypatch, stencil_gpu, name, lambda: launch(False), 90)
        assert code.count("LDG.E.128") == 0


@pytest.mark.parametrize("steps", [1, 2])
def test_heat_equation_keeps_planes_from_turn_to_turn(monkeypatch, steps):
    x = torch.empty(64, 512, 512)
    name = "_step_kernel" if steps == 1 else "_march_kernel"
    kernel, recorder = getattr(stencil_gpu, name), Recorder()
    with monkeypatch.context() as patch:
        patch.setattr(stencil_gpu, name, recorder)
        stencil_gpu.heat_equation(x, 0.1, 0.1, 0.1, steps, "periodic", 0.0, fused=steps)
    with fake_device(90):
        binary = kernel.warmup(*recorder.arguments, **recorder.keywords, grid=(1,))
    # Two planes of each level, and the one read ahead.
    loop = re.search(r"scf\.for .* iter_args\((.*?)\) ->", binary.asm["ttir"])
    assert loop[1].count("=") == 2 * steps + 1


@pytest.mark.parametrize(
    ("dtype", "softening"), [(torch.float32, 0.0), (torch.float32, 0.1), (torch.float64, 0.1)]
)
def test_nbody_acceleration(monkeypatch, dtype, softening):
    position, mass = torch.empty(65536, 3, dtype=dtype), torch.empty(65536, dtype=dtype)
    monkeypatch.setattr(nbody_gpu, "reduce", lambda parts, op: torch.empty(3 * 65536))
    for tiled in (True, False) if dtype == torch.float32 and softening else (True,):
        code = of_both(
            monkeypatch, nbody_gpu, "_nbody_kernel",
            lambda t=tiled: nbody_gpu.nbody_acceleration(position, mass, softening, 1.0, tiled=t),
        )  # fmt: skip
        if dtype == torch.float32:
            # Bodies are handed around in shared memory, four numbers a read.
            assert (code.count("LDS.128") > 0) == tiled


@pytest.mark.parametrize(("steps", "kind"), [(1, "european"), (252, "asian")])
def test_option_price(monkeypatch, steps, kind):
    contracts = torch.zeros(3, 6, dtype=torch.float64)
    monkeypatch.setattr(monte_carlo_gpu, "reduce", lambda parts, op: torch.zeros(3, 2))
    launch = lambda: monte_carlo_gpu.option_price(  # noqa: E731
        contracts, 1 << 20, steps, kind, True, 5
    )
    code = of_both(monkeypatch, monte_carlo_gpu, "_paths_kernel", launch)
    # What is written is two sums, after the loop.
    assert code.count("STG.E.64") == 2
    assert code.count("STG.E") == 2
    # No bits are moved to predicates: ptxas of CUDA 12.8 mixed up those of two numbers.
    assert "R2P" not in code.sass


@pytest.mark.parametrize(("dtype", "vectors"), [(torch.float32, 1), (torch.bfloat16, 8)])
def test_spmv(monkeypatch, dtype, vectors):
    rows, mean = 100_000, 8
    values, x = torch.empty(rows * mean, dtype=dtype), torch.empty(rows, vectors, dtype=dtype)
    columns = torch.zeros(rows * mean, dtype=torch.int32)
    offsets = torch.zeros(rows + 1, dtype=torch.int32)
    for balanced in (True, False):
        launch = lambda b=balanced: spmv_gpu.spmv(  # noqa: E731
            values, columns, offsets, x, balanced=b
        )
        code = of_both(monkeypatch, spmv_gpu, "_rows_kernel", launch)
        assert code.registers <= 80  # many threads wait for memory
        # Only where long rows are cut is there a list to put them on.
        assert ("ATOMG" in code.sass) == balanced
    for name in ("_pieces_kernel", "_long_rows_kernel") if vectors == 1 else ():
        launch = lambda: spmv_gpu.spmv(values, columns, offsets, x)  # noqa: E731
        of_both(monkeypatch, spmv_gpu, name, launch)


MACHINES = {80: (166912, False), 90: (232448, True)}


def product(monkeypatch, m, n, k, dtype, capability, *, precision="ieee", turned=True, **options):
    monkeypatch.setattr(matmul_gpu, "_machine", lambda device: MACHINES[capability])
    a, b = torch.empty(m, k, dtype=dtype), torch.empty(k, n, dtype=dtype)
    b = torch.empty(n, k, dtype=dtype).t() if turned else b
    bias, residual = torch.empty(n, dtype=dtype), torch.empty(m, n, dtype=dtype)
    return compiled(
        monkeypatch, matmul_gpu, "_matmul_kernel",
        lambda: matmul_gpu.matmul(a, b, bias, "silu", residual, precision, **options), capability,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("dtype", "turned", "options"),
    [
        (torch.bfloat16, True, {}),
        (torch.float16, False, {}),
        (torch.float16, True, {"tma": False}),
    ],
)
def test_matmul_on_hopper(monkeypatch, dtype, turned, options):
    code = product(monkeypatch, 4096, 4096, 4096, dtype, 90, turned=turned, **options)
    assert code.spill_bytes == 0
    assert "HGMMA" in code.sass
    assert not code.serialized
    assert not code.undefined_descriptors
    assert code.count("STG.E.128") > 0
    engine = options.get("tma", True)
    assert ("UTMALDG" in code.sass) == engine
    assert ("LDGSTS" in code.sass) == (not engine)


@pytest.mark.parametrize(
    ("size", "dtype", "precision", "capability"),
    [
        ((4096, 4096, 4096), torch.bfloat16, "ieee", 80),
        ((16, 4096, 4096), torch.float16, "ieee", 90),
        ((4096, 512, 4096), torch.float16, "ieee", 90),
        ((4096, 4096, 4096), torch.float32, "tf32", 90),
        ((4096, 1024, 4096), torch.float32, "tf32", 90),
        ((4096, 4096, 4096), torch.float32, "tf32x3", 80),
        ((4096, 4096, 4096), torch.float32, "ieee", 80),
    ],
)
def test_matmul(monkeypatch, size, dtype, precision, capability):
    code = product(monkeypatch, *size, dtype, capability, precision=precision)
    assert code.spill_bytes == 0
    cores = dtype != torch.float32 or precision != "ieee"
    assert not code.serialized
    assert (code.count("HMMA") + code.count("HGMMA") > 0) == cores
    assert code.count("STG.E.128") > 0


@pytest.mark.skipif(not gluon_supported(), reason="needs a Triton release with known Gluon")
@pytest.mark.parametrize(
    ("turned_a", "turned_b", "activation"),
    [
        (False, False, "silu"), (False, True, "relu"), (True, False, "gelu_tanh"),
        (True, True, "none"),
    ],
)  # fmt: skip
def test_matmul_of_float32_on_hopper(monkeypatch, turned_a, turned_b, activation):
    """Not by tensor cores, and with 16 multiplications for each read of shared memory."""
    monkeypatch.setattr(matmul_gpu, "_machine", lambda device: MACHINES[90])
    a, b = torch.empty(2048, 1024), torch.empty(1024, 2000)
    a = torch.empty(1024, 2048).t() if turned_a else a
    b = torch.empty(2000, 1024).t() if turned_b else b
    bias, residual = torch.empty(2000), torch.empty(2048, 2000)
    code = compiled(
        monkeypatch, matmul_gpu.matmul_hopper, "_float32_kernel",
        lambda: matmul_gpu.matmul(a, b, bias, activation, residual, "ieee"), 90,
    )  # fmt: skip
    assert code.spill_bytes == 0
    assert code.count("HMMA") == code.count("HGMMA") == 0
    loop = 4 * 8 * 64  # boxes, steps of each, results of a thread
    assert loop <= code.count("FFMA") < 2 * loop
    after = 3 * 16  # the sums are laid out anew
    assert code.count("LDS") == code.count("LDS.128") <= loop // 16 + after
    assert "UTMALDG" in code.sass
    assert code.count("STG.E.128") > 0


def test_matmul_epilogue(monkeypatch):
    a, b = (
        torch.empty(16, 4096, dtype=torch.bfloat16),
        torch.empty(4096, 4096, dtype=torch.bfloat16),
    )
    bias, residual = torch.empty(4096, dtype=torch.bfloat16), torch.empty(16, 4096).bfloat16()
    launch = lambda: matmul_gpu.matmul(a, b, bias, "relu", residual, "ieee")  # noqa: E731
    code = of_both(monkeypatch, matmul_gpu, "_epilogue_kernel", launch)
    assert code.count("LDG.E.128") > 0
