"""What a checkpoint format says of its quantized layers: their tensors, and what they mean.

A `Format` is what a checkpoint's configuration says; a `Scheme` is what it says of one layer.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor

from billfish.errors import CheckpointError, KernelArgumentError, shown
from billfish.quantization.int4 import Int4Groups

FLOATS = frozenset({"F16", "BF16", "F32"})
INT32 = frozenset({"I32"})
_DTYPES = {
    "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "U8": torch.uint8,
    "I32": torch.int32, "I64": torch.int64,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor that a layer has. dtypes: those allowed, by their names in safetensors files.

    shape: None for any, of a tensor that is known but never read.
    """

    shape: tuple[int, ...] | None
    dtypes: frozenset[str]
    required: bool = True


class Scheme(Protocol):
    """How the INT4 weight of one layer is stored."""

    def tensors(self, n: int, k: int) -> dict[str, TensorSpec]:
        """The tensors of a weight [n, k], by what follows "model.layers.0.mlp.up_proj.".

        Raises KernelArgumentError for a shape that the format cannot hold.
        """

    def int4_groups(self, tensors: Mapping[str, Tensor], n: int, k: int) -> Int4Groups:
        """The weight [n, k], exact, from those tensors.

        Raises KernelArgumentError for tensors that are missing or not of the shape and dtype that
        `tensors` gives, and for values that can only be damage.
        """


class Format(Protocol):
    """What the configuration of a checkpoint says of its quantization."""

    name: str

    def scheme(self, layer: str) -> Scheme | None:
        """How a linear layer ("model.layers.0.mlp.up_proj") is stored; None: it is dense.

        Raises CheckpointError where that layer is in a format that is not supported.
        """


def check_tensors(tensors: Mapping[str, Tensor], specs: Mapping[str, TensorSpec]) -> None:
    """Holds the tensors of a layer against what its scheme says of them."""
    for name, spec in specs.items():
        if name not in tensors:
            if spec.required:
                raise KernelArgumentError(f"{name}: is missing")
            continue
        if spec.shape is None:
            continue
        tensor = tensors[name]
        if tuple(tensor.shape) != spec.shape:
            raise KernelArgumentError(
                f"{name}: has shape {list(tensor.shape)}, expected {list(spec.shape)}"
            )
        if tensor.dtype not in {_DTYPES[dtype] for dtype in spec.dtypes}:
            expected = " or ".join(sorted(spec.dtypes))
            raise KernelArgumentError(f"{name}: has dtype {tensor.dtype}, expected {expected}")


def nibbles(packed: Tensor) -> Tensor:
    """int32 or uint8 [R, C] -> uint8 [R, 8 C or 2 C]: the four-bit values of each row, lowest bits
    first."""
    # A copy, because a transposed column counts as contiguous but cannot be viewed as bytes.
    # Bytes are little-endian, as on every machine served.
    bytes_ = packed.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    values = bytes_.new_empty(*bytes_.shape, 2)
    torch.bitwise_and(bytes_, 15, out=values[..., 0])
    torch.bitwise_right_shift(bytes_, 4, out=values[..., 1])
    return values.view(packed.shape[0], -1)


def floats(name: str, tensor: Tensor) -> Tensor:
    """float32 of a tensor, which must be finite."""
    values = tensor.to(torch.float32)
    if not bool(values.isfinite().all()):
        raise KernelArgumentError(f"{name}: holds values that are not finite")
    return values


class Settings:
    """A checkpoint's quantization settings, read with errors that name the file and the key.

    Numbers may not be told from True and False by isinstance alone, hence the exact types.
    """

    def __init__(
        self, values: Mapping[str, Any], file: str, where: str = "quantization_config"
    ) -> None:
        self.values, self.file, self.where = values, file, where

    def fail(self, key: str, reason: str) -> NoReturn:
        raise CheckpointError(self.file, reason, tensor=f"{self.where}.{key}")

    def __contains__(self, key: str) -> bool:
        """Whether the key is there; null is as good as absent."""
        return self.values.get(key) is not None

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._get(key, default)
        if type(value) is not int:
            self.fail(key, f"must be an integer, got {shown(value)}")
        return value

    def boolean(self, key: str, default: bool | None = None) -> bool:
        value = self._get(key, default)
        if type(value) is not bool:
            self.fail(key, f"must be true or false, got {shown(value)}")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._get(key, default)
        if type(value) is not str:
            self.fail(key, f"must be a string, got {shown(value)}")
        return value

    def texts(self, key: str) -> list[str]:
        """A list of strings, empty where the key is missing."""
        value = self._get(key, [])
        if type(value) is not list or any(type(each) is not str for each in value):
            self.fail(key, f"must be a list of strings, got {shown(value)}")
        return value

    def section(self, key: str) -> "Settings":
        value = self._get(key, None)
        if not isinstance(value, Mapping):
            self.fail(key, f"must be an object, got {shown(value)}")
        return Settings(value, self.file, f"{self.where}.{key}")

    def bits(self, key: str, what: str) -> None:
        """Refuses all but four bits, naming the format."""
        bits = self.integer(key)
        if bits != 4:
            self.fail(key, f"{what} of {bits} bits is not supported (supported: 4)")

    def group_size(self, key: str, default: int | None = None) -> int:
        """-1 for the whole row, or a number of columns that can be held exactly."""
        size = self.integer(key, default)
        if size != -1 and (size < 16 or size % 16):
            self.fail(key, f"got {size}, supported: -1 and multiples of 16")
        return size

    def pattern(self, key: str, text: str) -> re.Pattern[str]:
        """A regular expression from a file of unknown origin, which may not take for ever.

        A search takes exponential time only where repetitions are nested, and a high power of the
        length of a name only where many follow each other. Real ones have neither.
        """
        # What is escaped or in brackets counts as one letter.
        plain = re.sub(r"\[\^?\]?(?:\\.|[^\]\\])*\]", "a", re.sub(r"\\.", "a", text))
        nested = re.search(r"\)[*+{]", plain)
        if len(text) > 1000 or nested or len(re.findall(r"[*+{]", plain)) > 4:
            self.fail(key, f"the regular expression {shown(text)} is too complex")
        try:
            return re.compile(text)
        except (re.error, OverflowError, RecursionError) as error:
            self.fail(key, f"{shown(text)} is not a regular expression: {error}")

    def _get(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        if value is None:
            value = default
        if value is None:
            self.fail(key, "is missing")
        return value


def any_matches(patterns: Iterable[str | re.Pattern[str]], layer: str) -> bool:
    """Whether a layer is one of those named: exact names, or expressions matched at the start."""
    return any(p == layer if isinstance(p, str) else p.match(layer) is not None for p in patterns)
