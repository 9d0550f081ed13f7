"""How an operation becomes `torch.ops.billfish.<name>`.

`Library.define/impl` costs a fraction of what the `custom_op` decorator costs a call. The
dispatcher picks the implementation by device; under `torch.compile` and in `FakeTensorMode` it
takes the fake one. A small model makes hundreds of calls a step, each of about the dispatcher's own
cost on the host, so plain tensors in inference go to the implementation directly.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib import import_module
from typing import Any

import torch

from billfish.errors import KernelArgumentError

_torch_library: Any = torch.library  # untyped there

_LIBRARY: Any = _torch_library.Library("billfish", "DEF")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Activation dtypes of every operation."""


def register(
    schema: str,
    *,
    fake: Callable[..., Any],
    cpu: Callable[..., Any],
    gpu: str,
) -> Callable[..., Any]:
    """Define `billfish::<schema>` with one implementation a device; return what calls it, for
    tensors that are all on the device of the first.

    gpu: the module whose function of the op's name is the implementation for a GPU. It is imported
    at the first call: a machine without a GPU needs no triton.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, _exact(cpu), "CPU")
    cuda = _imported(gpu, name)
    _LIBRARY.impl(name, lambda *arguments: cuda()(*arguments), "CUDA")
    _torch_library.register_fake(f"billfish::{name}", fake, lib=_LIBRARY)
    op: Callable[..., Any] = getattr(torch.ops.billfish, name).default

    def call(first: torch.Tensor, *arguments: Any) -> Any:
        if is_plain(first):
            if first.is_cuda:
                return cuda()(first, *arguments)
            if first.is_cpu and not torch.is_autocast_enabled("cpu"):
                return cpu(first, *arguments)
        return op(first, *arguments)

    return call


def is_plain_cpu(tensor: torch.Tensor) -> bool:
    """Whether nobody but a CPU implementation has to see a call with this tensor."""
    return tensor.is_cpu and is_plain(tensor) and not torch.is_autocast_enabled("cpu")


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether nobody but an implementation has to see a call with this tensor.

    That is in inference, outside torch.compile and any dispatch mode (fake tensors, profilers of
    operations, tests), for tensors of no subclass.
    """
    return not (
        torch.compiler.is_compiling()
        or torch.is_grad_enabled()
        or torch._C._len_torch_dispatch_stack()
        or type(tensor) is not torch.Tensor
        or torch._C._is_tracing()
    )


def _exact(cpu: Callable[..., Any]) -> Callable[..., Any]:
    """Out of autocast's reach, which would round the operands of products inside to bfloat16."""

    def run(*arguments: Any) -> Any:
        if not torch.is_autocast_enabled("cpu"):
            return cpu(*arguments)
        with torch.autocast("cpu", enabled=False):
            return cpu(*arguments)

    return run


def _imported(module: str, name: str) -> Callable[[], Callable[..., Any]]:
    """What imports an implementation the first time and returns it."""

    @cache
    def load() -> Callable[..., Any]:
        found: Callable[..., Any] = getattr(import_module(module), name)
        return found

    return load


@cache
def launches_early(device: torch.device) -> bool:
    """Whether a device starts a kernel while the one ahead drains (programmatic dependent launch):
    compute capability 9.0 and up. The kernel then waits for the other's results itself, with
    `gdc_wait`.

    False for a CPU, where Triton's interpreter runs the kernels in tests.
    """
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def lasting(make: Callable[[], torch.Tensor], device: torch.device) -> torch.Tensor:
    """What make() returns, on the current stream of a GPU, for memory that outlives the call.

    torch.compile with mode="reduce-overhead" has all that a thread allocates come from the memory
    of its graphs, and refuses what is kept of it. So another thread asks.
    """
    if device.type != "cuda":
        return make()
    stream = torch.cuda.current_stream(device)

    def made() -> torch.Tensor:
        with torch.cuda.stream(stream):
            return make()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(made).result()


def kept_table(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A table of the host's, on a device for good.

    Raises KernelArgumentError where a graph is captured: nothing can be sent to a GPU then.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise KernelArgumentError(
            "a first call of this size cannot be captured: call the operation once before"
        )
    return lasting(lambda: values.to(device), device)


def bad_argument(name: str, got: object, expected: str) -> KernelArgumentError:
    """The error for one wrong argument: its name, what was got, what is expected."""
    try:
        text = str(got)
    except ValueError:  # an integer of more digits than Python prints
        text = f"a value of type {type(got).__name__}"
    return KernelArgumentError(f"{name}: got {text}, expected {expected}")


def check_tensors(**tensors: object) -> None:
    """Refuse what is not a tensor."""
    for name, value in tensors.items():
        if not isinstance(value, torch.Tensor):
            raise bad_argument(name, type(value).__name__, "a tensor")


def number(name: str, value: Any) -> float:
    """A number as a float; refuse what is none, or too large for one."""
    if isinstance(value, torch.Tensor):
        check_no_grad(name, value)
    try:
        if not isinstance(value, (str, bytes)):
            return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        pass
    raise bad_argument(name, value, "a number")


def check_activation(name: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor that is not floating point or not on a CPU or a CUDA device."""
    if not isinstance(tensor, torch.Tensor):
        raise bad_argument(name, type(tensor).__name__, "a tensor")
    if tensor.dtype not in DTYPES:
        raise bad_argument(name, tensor.dtype, "float32, bfloat16 or float16")
    if not (tensor.is_cpu or tensor.is_cuda):
        raise bad_argument(f"{name}.device", tensor.device, "cpu or cuda")
    check_dense(name, tensor)


def check_dense(name: str, tensor: object) -> None:
    """Refuse what is not a tensor, and a sparse one."""
    if not isinstance(tensor, torch.Tensor):
        raise bad_argument(name, type(tensor).__name__, "a tensor")
    if tensor.layout is not torch.strided:
        raise bad_argument(name, tensor.layout, "a tensor that is not sparse")


def check_no_grad(name: str, tensor: torch.Tensor) -> None:
    """Refuse an input that autograd would follow through an operation that has no derivative."""
    if tensor.requires_grad and torch.is_grad_enabled():
        raise bad_argument(name, "a tensor that requires a gradient", "torch.no_grad() around it")


def check_like(name: str, tensor: torch.Tensor, other_name: str, other: torch.Tensor) -> None:
    """Refuse what is no tensor, and one whose dtype or device is not that of another."""
    check_dense(name, tensor)
    if tensor.dtype != other.dtype:
        raise bad_argument(name, tensor.dtype, f"the dtype of {other_name}, {other.dtype}")
    if tensor.device != other.device:
        raise bad_argument(name, tensor.device, f"the device of {other_name}, {other.device}")


def differentiate(
    name: str, setup_context: Callable[..., None], backward: Callable[..., Any]
) -> None:
    """Give a registered operation its derivative, as `torch.library.register_autograd` takes it.

    A second derivative is refused by torch, which else would follow only a part of the first.
    """
    once = torch.autograd.function.once_differentiable(backward)
    _torch_library.register_autograd(
        f"billfish::{name}", once, setup_context=setup_context, lib=_LIBRARY
    )
