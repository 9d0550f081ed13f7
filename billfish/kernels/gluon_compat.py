"""What differs between the Triton releases that Billfish's Gluon kernels support.

Gluon is experimental and renames things from release to release. Kernels take the moving names
from here; on a release outside `SUPPORTED` the portable Triton kernels run instead.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from threading import Lock, local
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
    from triton._C.libtriton import ir as _ir
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST as _TMA_DTYPES
    from triton.experimental import gluon as _gluon
    from triton.experimental.gluon import language as _gl
    from triton.language.core import _aggregate

    from billfish.kernels import cuda_driver

    # A barrier among the threads of one warp-specialized partition (or of the block outside one).
    barrier = _gl.barrier if hasattr(_gl, "barrier") else _gl.thread_barrier

    @_gl._core.builtin
    def multiply_add(a: Any, b: Any, total: Any, _semantic: Any = None) -> Any:
        """total + a @ b by multiply-adds, like `gl.dot_fma`, which refuses less than 16 along k."""
        exact = _ir.INPUT_PRECISION.IEEE
        handle = _semantic.builder.create_dot(a.handle, b.handle, total.handle, exact, 0)
        return _gl.tensor(handle, total.type)

    @_gluon.jit
    def next_stage(stage, phase, STAGES: _gl.constexpr):
        """The stage after this one of a circular queue, and the phase of its barriers."""
        stage += 1
        wrapped = stage == STAGES
        return _gl.where(wrapped, 0, stage), _gl.where(wrapped, phase ^ 1, phase)

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

    def tensor_map(kernel: Any, index: int, address: int, shape: Any, strides: Any) -> bytes:
        """The encoded map of descriptor `index` of a compiled kernel over this memory."""
        meta = kernel.metadata.tensordesc_meta[index]
        dtype = _TMA_DTYPES[meta["elem_type"]]
        return cuda_driver.tensor_map(address, meta, dtype, shape, strides)

    @contextmanager
    def tma_cache_hints(kernel: str, policies: Mapping[int, str]) -> Iterator[None]:
        """Within, the kernel of this name is compiled to load tiles under an L2 policy.

        policies: "evict_first" or "evict_last" by the number of dimensions of the descriptor. The
        copy engine's loads take a cache policy (PTX ISA, "cp.async.bulk.tensor"), but Gluon's do
        not yet, so it is written into the PTX. It has to show in a constant of the kernel: Triton
        caches what it compiles by that. A load of another form than expected stays as it is.
        """

        _watch(1)
        outer, _hinted.wanted = _wanted(), (kernel, policies)
        try:
            yield
        finally:
            _hinted.wanted = outer
            _watch(-1)

    # Triton has one hook for all threads, which may compile at the same time: it looks up what the
    # thread that calls it wants.
    _hinted = local()
    _hooking = Lock()
    _hook: dict[str, Any] = {"users": 0, "before": None}

    def _wanted() -> tuple[str, Mapping[int, str]] | None:
        found: tuple[str, Mapping[int, str]] | None = getattr(_hinted, "wanted", None)
        return found

    def _watch(users: int) -> None:
        """Set the hook for the first of its users, and take it away after the last."""
        with _hooking:
            if not _hook["users"]:
                _hook["before"] = _knobs.runtime.add_stages_inspection_hook
                _knobs.runtime.add_stages_inspection_hook = _inspect
            _hook["users"] += users
            if not _hook["users"]:
                _knobs.runtime.add_stages_inspection_hook = _hook["before"]

    def _inspect(*arguments: Any) -> Any:
        wanted, before = _wanted(), _hook["before"]
        if not arguments:  # Triton 3.7 asks for what the hook adds to the key of its cache
            if wanted is None:
                return ("", "") if before is None else before()
            return repr(wanted[1]), repr(wanted[1])
        if wanted is not None:
            kernel, policies = wanted
            stages = arguments[1]
            make = stages["ptx"]
            stages["ptx"] = lambda *given: _with_hints(make(*given), kernel, policies)
        return before(*arguments) if before is not None else None

    _TMA_LOAD = re.compile(
        r"(@!?%p\d+ )?(cp\.async\.bulk\.tensor\.(\d)d\.[^ ;]*complete_tx::bytes)( [^;]*\]);"
    )

    def _with_hints(ptx: str, kernel: str, policies: Mapping[int, str]) -> str:
        if f".entry {kernel}(" not in ptx:  # of another kernel
            return ptx

        def hinted(load: re.Match[str]) -> str:
            policy = policies.get(int(load[3]))
            if policy is None:
                return load[0]
            return (
                "{ .reg .b64 policy; "
                f"createpolicy.fractional.L2::{policy}.b64 policy, 1.0; "
                f"{load[1] or ''}{load[2]}.L2::cache_hint{load[4]}, policy; }}"
            )

        return _TMA_LOAD.sub(hinted, ptx)

    def launch_is_watched() -> bool:
        """Whether somebody (a profiler) asked Triton to be told of launches."""
        enter, leave = _knobs.runtime.launch_enter_hook, _knobs.runtime.launch_exit_hook
        return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))
