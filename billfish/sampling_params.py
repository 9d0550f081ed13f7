"""How the next token is chosen and when a request ends."""

from dataclasses import dataclass
from typing import TypeVar

from billfish.errors import InvalidRequestError

_T = TypeVar("_T")

MAX_SAMPLES = 128
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_LENGTH = 1024
MAX_STOP_TOKEN_IDS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Options of one request. Validated on construction: InvalidRequestError names the option.

    n: samples of the prompt, 1 to 128. They share its KV cache; each goes its own way, from a seed
        of its own derived from the request's and its number. The first is what n = 1 gives.
    max_tokens: most tokens to generate; None means up to the model's context length.
    temperature: 0 takes the most likely token (greedy); otherwise logits are divided by it.
    top_p: keep the smallest set of tokens whose probability reaches top_p, in (0, 1].
    top_k: keep the k most likely tokens; 0 keeps all.
    seed: makes sampling repeatable, whatever else is in the batch; None draws a fresh one.
    stop: strings that end the text, and are not part of it.
    stop_token_ids: token ids that end the request, besides the model's own; not part of the text.
    ignore_eos: go on after the model's end-of-sequence tokens.
    """

    n: int = 1
    max_tokens: int | None = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        _check_int("n", self.n, 1, MAX_SAMPLES)
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _check_float("temperature", self.temperature, 0.0, 100.0)
        _check_float("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise InvalidRequestError("top_p", "must be above 0 and at most 1, got 0")
        _check_int("top_k", self.top_k, 0, 2**31 - 1)
        if self.seed is not None:
            _check_int("seed", self.seed, -(2**63), 2**64 - 1)
        if not isinstance(self.ignore_eos, bool):
            raise InvalidRequestError("ignore_eos", f"must be a bool, got {self.ignore_eos!r}")

        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        object.__setattr__(self, "stop", _tuple_of("stop", stop, str, MAX_STOP_STRINGS))
        for text in self.stop:
            if not 0 < len(text) <= MAX_STOP_STRING_LENGTH:
                raise InvalidRequestError(
                    "stop", f"each string must have 1 to {MAX_STOP_STRING_LENGTH} characters"
                )
        ids = _tuple_of("stop_token_ids", self.stop_token_ids, int, MAX_STOP_TOKEN_IDS)
        object.__setattr__(self, "stop_token_ids", ids)
        for token_id in ids:
            _check_int("stop_token_ids", token_id, 0, 2**31 - 1)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


def _check_int(name: str, value: object, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidRequestError(name, f"must be an integer, got {value!r}")
    if not low <= value <= high:
        raise InvalidRequestError(name, f"must be between {low} and {high}, got {value}")


def _check_float(name: str, value: object, low: float, high: float) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise InvalidRequestError(name, f"must be a number, got {value!r}")
    if not low <= value <= high:  # NaN fails both comparisons
        raise InvalidRequestError(name, f"must be between {low:g} and {high:g}, got {value}")


def _tuple_of(name: str, values: object, kind: type[_T], most: int) -> tuple[_T, ...]:
    if not isinstance(values, tuple | list):
        raise InvalidRequestError(name, f"must be a list of {kind.__name__}, got {values!r}")
    if len(values) > most:
        raise InvalidRequestError(name, f"at most {most} are allowed, got {len(values)}")
    for value in values:
        if not isinstance(value, kind) or isinstance(value, bool):
            raise InvalidRequestError(name, f"must hold only {kind.__name__}, got {value!r}")
    return tuple(values)
