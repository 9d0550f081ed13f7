"""Prepared launches: the bytes that the driver is given, with a driver that notes them."""

import ctypes
import struct
from types import SimpleNamespace

import pytest

from billfish.kernels import cuda_driver
from billfish.kernels.cuda_driver import CannotPrepare, DirectKernel, PreparedLaunch

PTX = """
.version 8.7
.visible .entry kernel(
	.param .align 64 .b8 kernel_param_0[128],
	.param .u32 kernel_param_1,
	.param .u64 kernel_param_2,
	.param .u64 .ptr .global .align 1 kernel_param_3,
	.param .u32 kernel_param_4,
	.param .u64 .ptr .global .align 1 kernel_param_5,
	.param .u64 .ptr .global .align 1 kernel_param_6
)
.reqntid 384
{
	.param .u32 not_one_of_them;
}
"""
FIELDS = (128, 4, 8, 8, 4)


def make_kernel(**changes):
    meta = {
        "num_ctas": 1, "launch_cooperative_grid": False, "launch_pdl": True, "num_warps": 12,
        "shared": 1000, "global_scratch_size": 0, "profile_scratch_size": 0,
    }  # fmt: skip
    return SimpleNamespace(
        asm={"ptx": PTX}, metadata=SimpleNamespace(**{**meta, **changes}), function=77
    )


CONTEXT = 0x7700


def fake_driver(launch, **functions):
    """A driver whose threads have CONTEXT."""

    def current(context):
        ctypes.cast(context, ctypes.POINTER(ctypes.c_void_p))[0] = CONTEXT
        return 0

    return SimpleNamespace(cuLaunchKernelEx=launch, cuCtxGetCurrent=current, **functions)


@pytest.fixture
def launches(monkeypatch):
    """What a driver was asked to launch: (config, attributes, function, arguments)."""
    seen = []

    def launch(config, function, pointers, extra):
        assert extra is None
        fields = struct.unpack("<7Ixxxx2QIxxxx", ctypes.string_at(config, 56))
        attribute = ctypes.string_at(fields[8], 72)
        sizes = cuda_driver.parameter_bytes(PTX)
        each = (ctypes.c_void_p * len(sizes)).from_address(pointers)
        values = [ctypes.string_at(p, size) for p, size in zip(each, sizes, strict=True)]
        seen.append((fields, attribute, function, values))
        return 0

    address = ctypes.c_void_p
    called = ctypes.CFUNCTYPE(ctypes.c_int, address, address, address, address)(launch)
    monkeypatch.setattr(cuda_driver, "_driver", lambda: fake_driver(called))
    return seen


def test_parameters_are_read_from_the_entry():
    assert cuda_driver.parameter_bytes(PTX) == [*FIELDS, 8, 8]


def make_launch(kernel, blocks=1):
    """Argument 3 is given at the launch."""
    return PreparedLaunch(kernel, blocks, [bytes(range(128)), -5, 1 << 40, 0, 9], 3, 1)


def test_arguments_arrive_as_the_driver_reads_them(launches):
    kernel = DirectKernel(make_kernel(), FIELDS)
    first, second = make_launch(kernel, 33), make_launch(kernel, 7)
    first(0xABCDEF, 0xFFFF_0000_0000_1234)
    second(1, 2)
    first(0xABCDEF, 3)  # what is not given stays
    for (config, attribute, function, values), blocks, stream, address in zip(
        launches, (33, 7, 33), (0xABCDEF, 1, 0xABCDEF), (0xFFFF_0000_0000_1234, 2, 3), strict=True
    ):
        assert config[:8] == (blocks, 1, 1, 384, 1, 1, 1000, stream)
        assert config[9] == 1
        assert struct.unpack("<ixxxxi", attribute[:12]) == (6, 1)
        assert function == 77
        assert values[0] == bytes(range(128))
        assert struct.unpack("<iqQi", b"".join(values[1:5])) == (-5, 1 << 40, address, 9)
        assert values[5] == values[6] == bytes(8)


def test_without_early_launch_there_is_no_attribute(launches):
    make_launch(DirectKernel(make_kernel(launch_pdl=False), FIELDS))(0, 0)
    assert launches[0][0][9] == 0


@pytest.mark.parametrize(
    "changes", [{"num_ctas": 2}, {"launch_cooperative_grid": True}, {"global_scratch_size": 8}]
)
def test_what_it_cannot_do_is_refused(launches, changes):
    with pytest.raises(CannotPrepare):
        DirectKernel(make_kernel(**changes), FIELDS)
    with pytest.raises(CannotPrepare):
        DirectKernel(make_kernel(), FIELDS[:-1])


def test_a_failed_launch_says_why(monkeypatch):
    def describe(code, text):
        ctypes.cast(text, ctypes.POINTER(ctypes.c_char_p))[0] = b"out of luck"

    driver = fake_driver(lambda *_: 700, cuGetErrorString=describe)
    monkeypatch.setattr(cuda_driver, "_driver", lambda: driver)
    launch = make_launch(DirectKernel(make_kernel(), FIELDS))
    with pytest.raises(RuntimeError, match=r"700: out of luck"):
        launch(0, 0)


def test_a_thread_without_a_context_is_given_that_of_the_kernel(monkeypatch):
    """A thread that has called nothing of CUDA's runtime has none, and the driver then refuses."""
    events = []

    def launch(*_):
        events.append("launch")
        return 0 if len(events) > 1 else 201

    def use(context):
        events.append(context.value)
        return 0

    driver = fake_driver(launch, cuCtxSetCurrent=use)
    monkeypatch.setattr(cuda_driver, "_driver", lambda: driver)
    launch = make_launch(DirectKernel(make_kernel(), FIELDS))
    for _ in range(2):
        launch(0, 0)
    assert events == ["launch", CONTEXT, "launch", "launch"]
