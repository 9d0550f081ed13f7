"""Checked access to the key-value part of a model file."""

import operator
from collections.abc import Mapping
from typing import Any, NoReturn

from billfish.errors import CheckpointError, shown


class Metadata:
    """Values by key, each of the type that is asked for or a CheckpointError with file and key.

    Arrays may be lists, tuples or numpy arrays; they come back as lists of Python's own types.
    """

    def __init__(self, values: Mapping[str, Any], path: str) -> None:
        self._values = values
        self.path = path

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def get(self, key: str) -> Any:
        return self._values.get(key)

    def text(self, key: str) -> str:
        value = self._required(key)
        if not isinstance(value, str):
            self._fail(key, f"must be a string, but is {type(value).__name__}")
        self._check_unicode(key, value)
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self._values.get(key, default)
        if not isinstance(value, bool):
            self._fail(key, f"must be true or false, but is {shown(value)}")
        return value

    def token_id(self, key: str, vocab_size: int) -> int | None:
        """An id within the vocabulary, or None where there is no such key."""
        value = self._values.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            self._fail(key, f"must be an integer, but is {shown(value)}")
        token_id = operator.index(value)
        if not 0 <= token_id < vocab_size:
            self._fail(key, f"{token_id} is outside the vocabulary of {vocab_size}")
        return token_id

    def strings(self, key: str) -> list[str]:
        values = self._array(key)
        if not set(map(type, values)) <= {str}:
            self._fail(key, "must hold strings only")
        self._check_unicode(key, "".join(values))
        return values

    def integers(self, key: str, length: int) -> list[int]:
        return self._numbers(key, length, (int,), "integers")

    def numbers(self, key: str, length: int) -> list[float]:
        return self._numbers(key, length, (int, float), "numbers")

    def _numbers(self, key: str, length: int, kinds: tuple[type, ...], name: str) -> list[Any]:
        values = self._array(key)
        if not set(map(type, values)) <= set(kinds):
            self._fail(key, f"must hold {name} only")
        if len(values) != length:
            self._fail(key, f"has {len(values)} entries for {length} tokens")
        return values

    def _array(self, key: str) -> list[Any]:
        value = self._required(key)
        if hasattr(value, "tolist"):
            value = value.tolist()
        if not isinstance(value, list | tuple) or not value:
            self._fail(key, "must be an array of at least one entry")
        return list(value)

    def _required(self, key: str) -> Any:
        if key not in self._values:
            self._fail(key, "is missing")
        return self._values[key]

    def _check_unicode(self, key: str, text: str) -> None:
        try:
            text.encode()
        except UnicodeEncodeError:
            self._fail(key, "holds a lone surrogate, which no UTF-8 text can")

    def _fail(self, key: str, reason: str) -> NoReturn:
        raise CheckpointError(self.path, reason, tensor=key)
