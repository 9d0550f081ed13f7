"""What differs between the Triton releases that Billfish's Gluon kernels support.

Gluon is experimental and renames things from release to release. Kernels take the moving names
from here; on a release outside `SUPPORTED` the portable Triton kernels run instead.
"""

from typing import Any, dataclass_transform

import triton

SUPPORTED = ((3, 6), (3, 7))
"""The (major, minor) Triton releases on which every Gluon kernel is compiled and checked."""

TRITON_VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])


def gluon_supported() -> bool:
    """Whether the Gluon kernels may run on the installed Triton."""
    return TRITON_VERSION in SUPPORTED


if gluon_supported():
    from triton import knobs as _knobs
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST as _TMA_DTYPES
    from triton.experimental import gluon as _gluon
    from triton.experimental.gluon import language as _gl
    from triton.language.core import _aggregate
    from triton.runtime import driver as _driver

    # A barrier among the threads of one warp-specialized partition (or of the block outside one).
    barrier = _gl.barrier if hasattr(_gl, "barrier") else _gl.thread_barrier

    @dataclass_transform()
    def aggregate(cls: Any) -> Any:
        """Make `cls` a value of the kernel language whose fields are its annotations, in order.

        Fields annotated `gl.constexpr` are compile-time constants, all others run-time values.
        """
        fields = tuple(cls.__annotations__)

        def init(self, *values):
            for field, value in zip(fields, values, strict=True):
                setattr(self, field, value)

        def set_field(self, field, value):
            constant = cls.__annotations__[field] is _gl.constexpr
            object.__setattr__(self, field, _gl.constexpr(value) if constant else value)

        cls.__init__ = _gluon.constexpr_function(init)
        made = _aggregate(cls)
        made.__setattr__ = set_field
        return made

    class DirectLaunch:
        """Launches of a compiled kernel whose tensor maps are ready.

        Triton encodes a tensor map for each descriptor at every launch. This takes the function
        beneath, which is given encoded maps; how it is called differs between the releases.
        """

        def __init__(self, kernel: Any) -> None:
            self._kernel = kernel
            self._run = kernel.run
            encoding = self._run.launch
            names = encoding.__code__.co_freevars
            self._beneath = encoding.__closure__[names.index("launcher")].cell_contents
            utils = _driver.active.utils
            tiled = getattr(utils, "fill_tma_descriptor_tiled", None)
            self._encode = tiled or utils.fill_tma_descriptor

        def tensor_map(
            self, index: int, address: int, shape: list[int], strides: list[int]
        ) -> list[Any]:
            """What the launch takes for descriptor `index` of the kernel over this memory."""
            meta = self._kernel.metadata.tensordesc_meta[index]
            encoded = self._encode(
                address,
                meta["swizzle"],
                meta["elem_size"],
                _TMA_DTYPES[meta["elem_type"]],
                meta["block_size"],
                shape,
                strides,
                0,
            )
            return [encoded, *shape, *strides]

        def __call__(self, blocks: int, arguments: list[Any]) -> None:
            """Launch on the current stream; arguments are all of the kernel's, maps in place."""
            run, kernel = self._run, self._kernel
            stream = _driver.active.get_current_stream(_driver.active.get_current_device())
            hooks = _knobs.runtime
            info = kernel.launch_metadata((blocks,), stream, *arguments)
            rest = (
                kernel.packed_metadata, info, hooks.launch_enter_hook, hooks.launch_exit_hook,
            )  # fmt: skip
            start = (
                blocks, 1, 1, stream, kernel.function, run.launch_cooperative_grid, run.launch_pdl,
            )  # fmt: skip
            if TRITON_VERSION == (3, 6):
                self._beneath(*start, None, None, *rest, *arguments)
            else:
                tail = (run.arg_annotations, run.kernel_signature, arguments)
                self._beneath(*start, *rest, None, None, *tail)
