"""Checked access to the keys and values of a model file: GGUF metadata, or a JSON object."""

import math
import operator
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import numpy as np

from billfish.errors import CheckpointError, shown


class Metadata(Mapping[str, Any]):
    """Values by key, each of the type that is asked for or a CheckpointError with file and key.

    A key whose value is null counts as missing. Where a getter takes a default, None means that the
    key is required. Arrays may be lists, tuples or numpy arrays; they come back as lists of
    Python's own types. `within` is what errors put before the key, for objects inside others.
    """

    def __init__(self, values: Mapping[str, Any], path: str, within: str = "") -> None:
        self._values = values
        self._within = within
        self.path = path

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def with_defaults(self, **defaults: Any) -> "Metadata":
        """The same, with other values for keys that are not there; a null stays one."""
        return Metadata({**defaults, **self._values}, self.path, self._within)

    def with_values(self, **values: Any) -> "Metadata":
        """The same, with these values in place of its own."""
        return Metadata({**self._values, **values}, self.path, self._within)

    def text(self, key: str, default: str | None = None) -> str:
        value = self._find(key, default)
        if not isinstance(value, str):
            self._wrong_type(key, "a string", value)
        self._check_unicode(key, value)
        return value

    def flag(self, key: str, default: bool | None = None) -> bool:
        value = self._find(key, default)
        if not isinstance(value, bool):
            self._wrong_type(key, "true or false", value)
        return value

    def integer(self, key: str, low: int, high: int, default: int | None = None) -> int:
        """low <= value <= high."""
        value = self._find(key, default)
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            self._wrong_type(key, "an integer", value)
        value = operator.index(value)
        if not low <= value <= high:
            self.fail(key, f"must be from {low} to {high}, but is {shown(value)}")
        return value

    def number(self, key: str, low: float, high: float, default: float | None = None) -> float:
        """Finite, low <= value <= high."""
        value = self._find(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            self._wrong_type(key, "a number", value)
        if not low <= value <= high or not abs(value) <= _LARGEST:
            self.fail(key, f"must be finite and from {low} to {high}, but is {shown(value)}")
        return float(value)

    def token_id(self, key: str, vocab_size: int) -> int | None:
        """An id within the vocabulary, or None where there is no such key."""
        if self.get(key) is None:
            return None
        token_id = self.integer(key, -(2**63), 2**64)
        if not 0 <= token_id < vocab_size:
            self.fail(key, f"{token_id} is outside the vocabulary of {vocab_size}")
        return token_id

    def strings(self, key: str) -> list[str]:
        values = self.array(key)
        if not set(map(type, values)) <= {str}:
            self.fail(key, "must hold strings only")
        self._check_unicode(key, "".join(values))
        return values

    def integers(self, key: str, length: int) -> list[int]:
        return self._numbers(key, length, (int,), "integers")

    def numbers(self, key: str, length: int) -> list[float]:
        values = self._numbers(key, length, (int, float), "numbers")
        if any(type(value) is int and abs(value) > _LARGEST for value in values):
            self.fail(key, "holds an integer too large for a number")
        return values

    def array(self, key: str) -> list[Any]:
        """At least one element, of any types."""
        value = self._find(key, None)
        if isinstance(value, np.ndarray):
            value = value.tolist()
        if not isinstance(value, list | tuple) or not value:
            self.fail(key, "must be an array of at least one entry")
        return list(value)

    def section(self, key: str) -> "Metadata | None":
        """The object under a key, or None where there is no such key."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            self._wrong_type(key, "an object", value)
        return Metadata(value, self.path, f"{self._within}{key}.")

    def fail(self, key: str, reason: str) -> NoReturn:
        raise CheckpointError(self.path, reason, tensor=self._within + key)

    def _numbers(self, key: str, length: int, kinds: tuple[type, ...], name: str) -> list[Any]:
        values = self.array(key)
        if not set(map(type, values)) <= set(kinds):
            self.fail(key, f"must hold {name} only")
        if len(values) != length:
            self.fail(key, f"has {len(values)} entries, expected {length}")
        return values

    def _find(self, key: str, default: Any) -> Any:
        value = self._values.get(key)
        if value is None:
            value = default
        if value is None:
            self.fail(key, "is missing")
        return value

    def _check_unicode(self, key: str, text: str) -> None:
        try:
            text.encode()
        except UnicodeEncodeError:
            self.fail(key, "holds a lone surrogate, which no UTF-8 text can")

    def _wrong_type(self, key: str, expected: str, value: Any) -> NoReturn:
        found = "an array" if isinstance(value, list | np.ndarray) else type(value).__name__
        self.fail(key, f"must be {expected}, but is {found}")


_LARGEST = math.nextafter(math.inf, 0)
