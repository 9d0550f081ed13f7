"""Direct launches reach Triton's launcher with the arguments that Triton itself would give it."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

import triton

from billfish.kernels import gluon_compat

if not gluon_compat.gluon_supported():
    pytest.skip("this Triton release is not one the Gluon kernels support", allow_module_level=True)

from triton.backends.nvidia import driver as nvidia
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime import driver

from tests.compile.offline import FakeDriver


def encode(*arguments):
    """Stands for the encoding of a tensor map: what it was asked to encode."""
    return ("map", *(tuple(a) if isinstance(a, (list, torch.Size)) else a for a in arguments))


@pytest.fixture
def kernel(monkeypatch):
    """A kernel of one descriptor and two numbers, with a launcher that notes what it is given."""
    fake = FakeDriver(90)
    fake.utils = SimpleNamespace(fill_tma_descriptor=encode, fill_tma_descriptor_tiled=encode)
    monkeypatch.setattr(driver, "_active", fake)
    given = []

    def note(*arguments):
        given.append(arguments)

    meta = {
        "swizzle": 3, "elem_size": 4, "elem_type": 9, "block_size": [2, 32], "fp4_padded": False,
    }  # fmt: skip
    signature = {"desc": "tensordesc<i32[2, 32]>", "m": "i32", "n": "i32"}
    run = object.__new__(nvidia.CudaLauncher)
    run.launch = nvidia.wrap_handle_tensordesc(note, signature, [meta])
    run.num_ctas, run.launch_cooperative_grid, run.launch_pdl = 1, False, True
    run.global_scratch_size = run.profile_scratch_size = 0
    run.global_scratch_align = run.profile_scratch_align = 1
    run.arg_annotations, run.kernel_signature = "annotations", "signature"
    return SimpleNamespace(
        run=run, function=77, packed_metadata=b"packed", given=given,
        metadata=SimpleNamespace(tensordesc_meta=[meta]),
        launch_metadata=lambda grid, stream, *arguments: None,
    )  # fmt: skip


def test_same_arguments_as_tritons_own_launch(kernel):
    memory = torch.zeros(6, 32, dtype=torch.int32)
    descriptor = TensorDescriptor(memory, [6, 32], [32, 1], [2, 32], gl.NVMMASharedLayout(128, 32))
    hooks = triton.knobs.runtime
    kernel.run(
        5, 1, 1, 0, kernel.function, kernel.packed_metadata, None,
        hooks.launch_enter_hook, hooks.launch_exit_hook, descriptor, 3, 4,
    )  # fmt: skip
    direct = gluon_compat.DirectLaunch(kernel)
    direct(5, [*direct.tensor_map(0, memory.data_ptr(), [6, 32], [32, 1]), 3, 4])
    own, ours = kernel.given
    assert ours == own
    assert repr(memory.data_ptr()) in repr(ours)
