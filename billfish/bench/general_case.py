"""What `billfish bench general` times: cases, and what their authors need to write one.

A domain's cases are in general_<domain>.py, which has two functions: `cases()`, at the sizes that
are timed, and `tiny()`, the same kernels at sizes that a CPU checks in a moment. A case in full:

    def scan(n: int, dtype: torch.dtype) -> Case:
        return Case(
            domain="data", kernel="scan", size=f"{n}", dtype=dtype,
            draw=lambda device: (torch.randn(n, device=device).to(dtype),),
            run=general.scan,
            reference=lambda x: x.double().cumsum(0),
            read=n * dtype.itemsize, written=n * dtype.itemsize,
            peers={
                "torch": lambda x: x.cumsum(0),
                "torch.compile": compiled(lambda x: x.cumsum(0)),
                "cub": with_cupy(lambda cupy, x: cupy.cumsum(x)),
            },
            settings={"look-back": {"off": lambda x: scan_gpu.scan(x[None], False, "sum", True)}},
        )
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

Inputs = tuple[Any, ...]
Function = Callable[..., Any]
Math = torch.dtype | str
"""In what products of matrices are computed: a dtype, or "tf32"."""

MODULES = {"cupy": "cupy", "cub": "cupy", "cufft": "cupy", "liger": "liger_kernel",
           "flashinfer": "flashinfer"}  # fmt: skip
"""What a peer needs besides torch, by the first word of its name."""

TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
"""The error from which a result counts as wrong, where the case names none; 0 for integers."""


def relative_error(got: Any, want: Any) -> float:
    """||got - want|| / ||want||, of several results the largest; of integers, how many differ.

    want: in float64, or integers; NaN where either has NaN, infinite where they have other shapes.
    """
    if isinstance(want, (tuple, list)):
        if not isinstance(got, (tuple, list)) or len(got) != len(want):
            return float("inf")
        return max((relative_error(g, w) for g, w in zip(got, want, strict=True)), default=0.0)
    if got.shape != want.shape:
        return float("inf")
    if not want.numel():
        return 0.0
    if not (want.is_floating_point() or want.is_complex()):
        return float((got != want).double().mean())
    wide = torch.complex128 if want.is_complex() else torch.float64
    size = float(want.norm())
    return float((got.to(wide) - want).norm()) / (size or 1.0)


@dataclass(frozen=True)
class Case:
    """One kernel at one size, and what it is compared with.

    draw: (device) -> inputs, random by torch's global generator. run, reference, peers and settings
    take them. read, written: the bytes that any implementation has to move; flops: what it has to
    compute, at the rate of products of matrices of `math` (default: dtype; float32 without TF32,
    "tf32" with).
    reference: the result in float64 or integers, as `error` compares it. peers: by name, whose
    first word says what it needs (MODULES); one that waits for the GPU, or has the attribute
    `eager`, is timed without a graph. settings: technique -> setting -> the kernel with that
    technique switched; the technique as `run` has it is not listed. held: record the memory of a
    GPU that a call takes besides its inputs, where that is the point.
    """

    domain: str
    kernel: str
    size: str
    dtype: torch.dtype
    draw: Callable[[torch.device], Inputs]
    run: Function
    reference: Function
    read: int
    written: int
    flops: int = 0
    math: Math | None = None
    peers: Mapping[str, Function] = field(default_factory=dict)
    settings: Mapping[str, Mapping[str, Function]] = field(default_factory=dict)
    error: Callable[[Any, Any], float] = relative_error
    tolerance: float | None = None
    held: bool = False

    @property
    def name(self) -> str:
        return f"{self.kernel} {self.size} {dtype_name(self.dtype)}"

    @property
    def limit(self) -> float:
        """The largest error of a result that is right."""
        return TOLERANCE.get(self.dtype, 0.0) if self.tolerance is None else self.tolerance


def dtype_name(dtype: Math) -> str:
    return str(dtype).removeprefix("torch.")


def fresh(inputs: Inputs) -> Inputs:
    """Inputs that an operation in place may change."""
    return tuple(
        x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x
        for x in inputs
    )


def is_there(peer: str) -> bool:
    """Whether this machine has what a peer of that name needs."""
    module = MODULES.get(peer.split()[0])
    return module is None or find_spec(module) is not None


def compiled(function: Function) -> Function:
    """function as torch.compile makes it, at its first call."""
    made: list[Function] = []

    def call(*inputs: Any) -> Any:
        if not made:
            made.append(torch.compile(function, dynamic=False))
        return made[0](*inputs)

    return call


def with_cupy(function: Function) -> Function:
    """function(cupy, *arrays) on torch's stream and memory, its arrays back as tensors.

    Timed without a graph: much of CuPy waits for the GPU, and does not say so.
    """

    def call(*inputs: Any) -> Any:
        cupy = _cupy()
        with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
            return _to_torch(cupy, function(cupy, *(_to_cupy(cupy, x) for x in inputs)))

    call.eager = True  # type: ignore[attr-defined]
    return call


@cache
def _cupy() -> Any:
    """With torch's allocator, so that both share what is free."""
    cupy: Any = import_module("cupy")

    def take(size: int, device: int) -> int:
        stream = torch.cuda.current_stream(device)
        return torch.cuda.caching_allocator_alloc(max(size, 1), device, stream)

    def free(pointer: int, device: int) -> None:
        torch.cuda.caching_allocator_delete(pointer)

    cupy.cuda.set_allocator(cupy.cuda.PythonFunctionAllocator(take, free).malloc)
    return cupy


def _to_cupy(cupy: Any, value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return cupy.from_dlpack(value.detach())


def _to_torch(cupy: Any, value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value)(_to_torch(cupy, each) for each in value)
    return torch.from_dlpack(value) if isinstance(value, cupy.ndarray) else value
