"""The kernels of docs/write-a-kernel.md: the machine code is as the page says."""

import pytest
import torch

pytest.importorskip("triton")

import triton

from billfish.bench import tutorial
from tests.compile.offline import ARCHITECTURES, fake_device, machine_code

if triton.knobs.runtime.interpret:
    pytest.skip("compiles, so not with TRITON_INTERPRET=1", allow_module_level=True)

CHANNELS, PIXELS = tutorial.SIZE
SIZE = CHANNELS * PIXELS


def compiled(kernel, capability, *numbers, **constants):
    x = torch.empty(CHANNELS, PIXELS, dtype=torch.float16)
    scale, out = x[:, 0].clone(), torch.empty(PIXELS, CHANNELS, dtype=torch.float16)
    data = (x, out) if kernel is tutorial.turn_kernel else (x, scale, scale, out)
    with fake_device(capability):
        binary = kernel.warmup(*data, *numbers, **constants, grid=(1,))
    code = machine_code(binary, ARCHITECTURES[capability])
    assert not code.spill_bytes
    return code


@pytest.mark.parametrize("capability", ARCHITECTURES)
class TestAccesses:
    def test_naive_and_fused_gather(self, capability):
        for kernel in (tutorial.turn_kernel, tutorial.fused_kernel):
            code = compiled(kernel, capability, SIZE, CHANNELS, PIXELS, BLOCK=1024)
            assert code.count("LDG.E.U16") == 8
            assert code.count("STG.E.128") == 1

    def test_coalesced_scatters(self, capability):
        code = compiled(tutorial.coalesced_kernel, capability, CHANNELS, PIXELS, BLOCK=1024)
        assert code.count("LDG.E.128") == 1
        assert code.count("STG.E.U16") == 8

    @pytest.mark.parametrize("side", [32, 64])
    def test_tiles_go_through_shared_memory(self, capability, side):
        code = compiled(
            tutorial.tiled_kernel, capability, CHANNELS, PIXELS, CHANNELS=side, PIXELS=side
        )
        assert code.count("STG.E.128") == side * side * 2 // (16 * 128)
        assert code.count("LDG.E.128") > 0
        assert not code.count("LDG.E.U16")
        assert not code.count("STG.E.U16")
        for instruction in ("STS", "BAR", "LDSM"):
            assert instruction in code.sass
