"""The general kernels for a GPU, compiled without one: what their machine code must hold."""

import pytest
import torch

pytest.importorskip("triton")

import triton

from billfish.kernels.general import gpu, sample_gpu
from billfish.worker import step_inputs, step_inputs_gpu
from tests.compile.offline import MachineCode, fake_device, machine_code

if triton.knobs.runtime.interpret:
    pytest.skip("compiles, so not with TRITON_INTERPRET=1", allow_module_level=True)

ARCHITECTURES = {80: "sm_80", 90: "sm_90a"}


class Recorder:
    """Stands for a kernel: keeps the arguments of its launch."""

    def __getitem__(self, grid):
        def launch(*arguments, **keywords):
            self.arguments, self.keywords = arguments, keywords

        return launch


def compiled(monkeypatch, module, name, launch, capability) -> MachineCode:
    kernel = getattr(module, name)
    with monkeypatch.context() as patch:
        for other in [attribute for attribute in vars(module) if attribute.endswith("_kernel")]:
            patch.setattr(module, other, Recorder())
        if hasattr(module, "overlaps"):
            patch.setattr(module, "overlaps", lambda device: capability >= 90)
        launch()
        recorder = getattr(module, name)
    with fake_device(capability):
        binary = kernel.warmup(*recorder.arguments, **recorder.keywords, grid=(1,))
    return machine_code(binary, ARCHITECTURES[capability])


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("size", [576, 4096])
def test_add_rms_norm(monkeypatch, capability, size):
    x, weight = torch.empty(4, size, dtype=torch.bfloat16), torch.empty(size, dtype=torch.bfloat16)
    code = compiled(
        monkeypatch, gpu, "_rms_norm_kernel", lambda: gpu.add_rms_norm(x, x, weight, 1e-5),
        capability,
    )  # fmt: skip
    assert code.spill_bytes == 0
    assert code.count("LDG.E.128") > 0 or size == 576
    # Waits for the kernel ahead, and lets the one behind it start.
    assert (code.count("ACQBULK") > 0) == (capability >= 90)


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("function", ["silu_mul", "gelu_tanh_mul"])
def test_gated_activation(monkeypatch, capability, function):
    x = torch.empty(4, 2 * 14336, dtype=torch.bfloat16)
    launch = getattr(gpu, function)
    code = compiled(monkeypatch, gpu, "_gated_kernel", lambda: launch(x), capability)
    assert code.spill_bytes == 0
    assert code.count("LDG.E.128") > 0


@pytest.mark.parametrize(
    ("capability", "dtype", "greedy"),
    [(80, torch.float32, False), (90, torch.bfloat16, False), (90, torch.bfloat16, True)],
)
def test_sample(monkeypatch, capability, dtype, greedy):
    logits = torch.empty(2, 49152, dtype=dtype)
    index, table = torch.zeros(2, dtype=torch.int32), torch.zeros(2, 64, dtype=torch.int32)
    numbers = torch.zeros(2, 4, dtype=torch.float64)
    integers = torch.zeros(2, 2, dtype=torch.int64)

    def launch() -> None:
        sample_gpu.sample(logits, index, index, numbers, integers, table, index, greedy=greedy)

    for name in ("_sample_kernel", "_largest_kernel"):
        code = compiled(monkeypatch, sample_gpu, name, launch, capability)
        assert code.spill_bytes == 0


@pytest.mark.parametrize("capability", [80, 90])
def test_step_inputs(monkeypatch, capability):
    device = torch.device("cpu")
    header = step_inputs.Header(2, device)
    out = step_inputs.allocate(2, 2, 16, device)
    table = torch.zeros(2, 256, dtype=torch.int32)

    def launch() -> None:
        step_inputs_gpu.make(header, header.query_start, table, table, 16, out, 1)

    code = compiled(monkeypatch, step_inputs_gpu, "_inputs_kernel", launch, capability)
    assert code.spill_bytes == 0
