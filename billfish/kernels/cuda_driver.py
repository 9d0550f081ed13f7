"""Kernel launches and tensor maps through the CUDA driver itself.

Triton's launcher binds, specializes and checks every argument, and encodes every tensor map, at
every launch: tens of microseconds for a kernel that takes ten. A `PreparedLaunch` keeps its
arguments as the bytes that the driver reads and writes only the addresses that change. See the CUDA
driver API, "Execution Control" and "Tensor Map Object Management".
"""

import ctypes
import re
import struct
from collections.abc import Sequence
from functools import cache
from threading import Lock
from typing import Any

MAP_BYTES = 128
"""Size of a tensor map."""

_PARAMETER = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)[^,\[)]*(?:\[(\d+)\])?\s*[,)]")
_BYTES = {"b8": 1, "u8": 1, "s8": 1, "u16": 2, "s16": 2, "u32": 4, "s32": 4, "u64": 8, "s64": 8}
_FORMAT = {4: "i", 8: "q", MAP_BYTES: f"{MAP_BYTES}s"}
_CONFIG = struct.Struct("<7Ixxxx2QIxxxx")  # CUlaunchConfig: grid, block, shared memory, stream, ...
_STREAM, _STREAM_AT = struct.Struct("<Q"), 32  # in a CUlaunchConfig
_PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CUlaunchAttributeID
_L2_PROMOTION_128B = 2  # CUtensorMapL2promotion
_INVALID_CONTEXT = 201  # CUresult


class CannotPrepare(Exception):
    """A kernel that needs what a `PreparedLaunch` does not do: launch it with Triton."""


@cache
def _driver() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise CannotPrepare(str(error)) from None
    address = ctypes.c_void_p
    library.cuCtxGetCurrent.argtypes = library.cuCtxSetCurrent.argtypes = [address]
    library.cuGetErrorString.argtypes = [ctypes.c_int, address]
    library.cuTensorMapEncodeTiled.argtypes = [
        address, ctypes.c_int, ctypes.c_uint32, address, address, address, address, address,
        ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int,
    ]  # fmt: skip
    return library


def _check(result: int, what: str) -> None:
    if result:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(result, ctypes.byref(text))
        raise RuntimeError(f"{what}: CUDA error {result}: {(text.value or b'unknown').decode()}")


def parameter_bytes(ptx: str) -> list[int]:
    """Sizes of the parameters of the kernel in a PTX text, in order."""
    entry = ptx[ptx.index(".entry") :]
    declared = _PARAMETER.findall(entry[: entry.index("{")])
    return [_BYTES[kind] * int(count or 1) for kind, count in declared]


def tensor_map(
    address: int, meta: dict[str, Any], dtype: int, shape: Sequence[int], strides: Sequence[int]
) -> bytes:
    """The encoded map of a tensor. meta: what Triton's compiler says of the descriptor.

    dtype: a CUtensorMapDataType. shape and strides in elements, outermost dimension first; the last
    stride is 1.
    """
    rank, size = len(shape), meta["elem_size"]
    sizes = (ctypes.c_uint64 * rank)(*reversed(shape))
    steps = (ctypes.c_uint64 * rank)(*(size * s for s in reversed(strides[:-1])))
    block = (ctypes.c_uint32 * rank)(*reversed(meta["block_size"]))
    ones = (ctypes.c_uint32 * rank)(*[1] * rank)
    memory = ctypes.create_string_buffer(2 * MAP_BYTES)
    at = -(-ctypes.addressof(memory) // 64) * 64
    result = _driver().cuTensorMapEncodeTiled(
        at, dtype, rank, address, sizes, steps, block, ones, 0, meta["swizzle"],
        _L2_PROMOTION_128B, 0,
    )  # fmt: skip
    _check(result, "cannot describe a tensor to the copy engine")
    return ctypes.string_at(at, MAP_BYTES)


class DirectKernel:
    """A compiled kernel as the driver takes it; `PreparedLaunch` launches it.

    kernel: Triton's, launched before by this thread, so that it is loaded and its context current.
    fields: sizes in bytes of its parameters, but for the two scratch addresses that Triton appends.

    Raises CannotPrepare: the kernel's parameters are others, or it needs scratch memory, clusters
    or a cooperative launch.
    """

    def __init__(self, kernel: Any, fields: Sequence[int]) -> None:
        meta = kernel.metadata
        fields = [*fields, 8, 8]
        if parameter_bytes(kernel.asm["ptx"]) != fields:
            raise CannotPrepare("the parameters of the kernel are not those expected")
        if (
            meta.num_ctas != 1
            or meta.launch_cooperative_grid
            or meta.global_scratch_size
            or meta.profile_scratch_size
        ):
            raise CannotPrepare("the launch needs more than a grid and arguments")
        self.kernel = kernel  # keeps the module loaded
        self.function = ctypes.c_void_p(kernel.function)
        self.threads, self.shared = 32 * meta.num_warps, meta.shared
        # In a packed form of our own: the driver is given the address of each.
        self.arguments = struct.Struct("<" + "".join(_FORMAT[size] for size in fields))
        self.starts = [sum(fields[:index]) for index in range(len(fields))]
        self.pointers = struct.Struct(f"<{len(fields)}Q")
        # CUlaunchAttribute: id, 64 bytes of value at 8.
        self.attribute = ctypes.create_string_buffer(
            struct.pack("<ixxxxi60x", _PROGRAMMATIC_STREAM_SERIALIZATION, 1), 72
        )
        self.attribute_count = int(bool(meta.launch_pdl))
        self.context = ctypes.c_void_p()
        result = _driver().cuCtxGetCurrent(ctypes.byref(self.context))
        _check(result, "cannot tell the context of a kernel")


class PreparedLaunch:
    """A launch whose arguments are ready, but for some addresses and the stream.

    blocks: thread blocks of the grid. arguments: as numbers and, for tensor maps, bytes. first: the
    number of the first argument that is given at the launch, `count` addresses in all.
    """

    def __init__(
        self, kernel: DirectKernel, blocks: int, arguments: Sequence[int | bytes], first: int,
        count: int,
    ) -> None:  # fmt: skip
        self._kernel = kernel
        # Tensor maps are copied out of here, so they need no alignment.
        self._memory = ctypes.create_string_buffer(kernel.arguments.pack(*arguments, 0, 0))
        base = ctypes.addressof(self._memory)
        each = kernel.pointers.pack(*[base + start for start in kernel.starts])
        pointers = ctypes.create_string_buffer(each)
        self._write, self._at = struct.Struct(f"<{count}Q").pack_into, kernel.starts[first]
        self._config = ctypes.create_string_buffer(
            _CONFIG.pack(
                blocks, 1, 1, kernel.threads, 1, 1, kernel.shared, 0,
                ctypes.addressof(kernel.attribute), kernel.attribute_count,
            )
        )  # fmt: skip
        self._stream = 0
        # Objects of ctypes, which it passes on as they are: with `argtypes` it would convert them.
        self._call = (ctypes.byref(self._config), kernel.function, pointers, None)
        self._launch = _driver().cuLaunchKernelEx
        self._lock = Lock()

    def __call__(self, stream: int, *addresses: int) -> None:
        with self._lock:
            self._write(self._memory, self._at, *addresses)
            if stream != self._stream:
                _STREAM.pack_into(self._config, _STREAM_AT, stream)
                self._stream = stream
            result = self._launch(*self._call)
            if result == _INVALID_CONTEXT:  # a thread's first call, which no other has prepared
                _check(_driver().cuCtxSetCurrent(self._kernel.context), "cannot use the GPU")
                result = self._launch(*self._call)
        if result:
            _check(result, "cannot launch a kernel")
