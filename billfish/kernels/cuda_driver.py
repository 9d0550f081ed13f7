"""Kernel launches and tensor maps through the CUDA driver itself.

Triton's launcher binds, specializes and checks every argument, and encodes every tensor map, at
every launch: tens of microseconds for a kernel that takes ten. A `PreparedLaunch` keeps the
arguments of a compiled kernel as the bytes that the driver reads; a launch copies those that
changed. See the CUDA driver API, "Execution Control" and "Tensor Map Object Management".
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
_ADDRESSES = [struct.Struct(f"<{count}Q") for count in range(9)]
_BLOCKS, _STREAM = struct.Struct("<I"), struct.Struct("<Q")
_PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CUlaunchAttributeID
_L2_PROMOTION_128B = 2  # CUtensorMapL2promotion
_INVALID_CONTEXT = 201  # CUresult

Chunk = tuple[int, int, bytes]
"""Consecutive arguments as the driver reads them: where they begin and end, and the bytes."""


class CannotPrepare(Exception):
    """A kernel that needs what `PreparedLaunch` does not do: launch it with Triton."""


@cache
def _driver() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise CannotPrepare(str(error)) from None
    address = ctypes.c_void_p
    library.cuLaunchKernelEx.argtypes = [address, address, address, address]
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


class PreparedLaunch:
    """Launches of one compiled kernel with arguments that are ready.

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
        self._fields = fields
        self._starts = [0]
        for size in fields:  # in a packed form of our own: the driver is given every address
            self._starts.append(self._starts[-1] + size)
        # Tensor maps are copied out of here, so they need no alignment.
        self._memory = ctypes.create_string_buffer(self._starts[-1])
        self._view = memoryview(self._memory).cast("B")
        first = ctypes.addressof(self._memory)
        addresses = [first + start for start in self._starts[:-1]]
        self._pointers = (ctypes.c_void_p * len(addresses))(*addresses)
        # CUlaunchAttribute: id, 64 bytes of value at 8. CUlaunchConfig: grid, block, shared memory,
        # stream at 32, attributes at 40, their number at 48.
        self._attribute = ctypes.create_string_buffer(
            struct.pack("<ixxxxi60x", _PROGRAMMATIC_STREAM_SERIALIZATION, 1), 72
        )
        self._config = ctypes.create_string_buffer(
            struct.pack(
                "<7Ixxxx2QIxxxx", 1, 1, 1, 32 * meta.num_warps, 1, 1, meta.shared, 0,
                ctypes.addressof(self._attribute), int(bool(meta.launch_pdl)),
            ), 56,
        )  # fmt: skip
        self._call = (ctypes.addressof(self._config), kernel.function, self._pointers, None)
        self._launch = _driver().cuLaunchKernelEx
        self._context = ctypes.c_void_p()
        result = _driver().cuCtxGetCurrent(ctypes.byref(self._context))
        _check(result, "cannot tell the context of a kernel")
        self._last = (1, 0)  # blocks and stream in the config
        self._kernel = kernel  # keeps the module loaded
        self._lock = Lock()

    def chunk(self, first: int, values: Sequence[int | bytes]) -> Chunk:
        """Arguments `first` and following, ready to be launched with any number of times."""
        sizes = self._fields[first : first + len(values)]
        data = struct.pack("<" + "".join(_FORMAT[size] for size in sizes), *values)
        return self._starts[first], self._starts[first] + len(data), data

    def __call__(
        self, blocks: int, stream: int, chunks: Sequence[Chunk], first: int, addresses: Any
    ) -> None:
        """Launch `blocks` thread blocks. addresses: the pointers from argument `first` on."""
        with self._lock:
            view, config = self._view, self._config
            for start, stop, data in chunks:
                view[start:stop] = data
            _ADDRESSES[len(addresses)].pack_into(self._memory, self._starts[first], *addresses)
            if self._last != (blocks, stream):
                _BLOCKS.pack_into(config, 0, blocks)
                _STREAM.pack_into(config, 32, stream)
                self._last = (blocks, stream)
            result = self._launch(*self._call)
            if result == _INVALID_CONTEXT:  # a thread's first call, which no other has prepared
                _check(_driver().cuCtxSetCurrent(self._context), "cannot use the GPU")
                result = self._launch(*self._call)
        if result:
            _check(result, "cannot launch a kernel")
