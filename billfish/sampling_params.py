"""How the next token is chosen and when a request ends."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from billfish.errors import InvalidRequestError, shown
from billfish.structured_output import StructuredOutput

_T = TypeVar("_T")

MAX_SAMPLES = 128
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_LENGTH = 1024
MAX_STOP_TOKEN_IDS = 256
MAX_SHOWN_SPECIAL_TOKEN_IDS = 256
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024
MAX_ALLOWED_TOKEN_IDS = 1024
MAX_BAD_WORDS = 256
MAX_BAD_WORD_LENGTH = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Options of one request. Validated on construction: InvalidRequestError names the option.

    Token ids are checked against the vocabulary when the engine gets the request. The order in
    which these options act on the logits is stated in `billfish.worker.logits_processor`.

    n: samples of the prompt, 1 to 128. They share its KV cache; each goes its own way, from a seed
        of its own derived from the request's and its number. The first is what n = 1 gives.
    max_tokens: most tokens to generate; None means up to the model's context length.
    min_tokens: before this many are generated no token that ends the request can be chosen, and a
        stop string completed by an earlier token is passed over.
    temperature: 0 takes the most likely token (greedy); otherwise logits are divided by it.
    top_p: keep the smallest set of tokens whose probability reaches top_p, in (0, 1].
    top_k: keep the k most likely tokens; 0 keeps all.
    min_p: keep tokens at least min_p times as probable as the most likely one, in [0, 1].
    presence_penalty, frequency_penalty: taken off the logit of a token generated before, once and
        once for each time, in [-2, 2].
    repetition_penalty: divides the positive and multiplies the negative logits of tokens in the
        prompt or generated before, in [0.01, 100]; 1 does nothing.
    logit_bias: added to the logits of tokens by id, each in [-100, 100]; at most 1024.
    allowed_token_ids: only these can be chosen; None allows all; at most 1024.
    bad_words: texts that are not generated: their last token is banned where the others were
        just generated. At most 256 of 256 characters.
    logprobs: report the log-probability and rank of each generated token, and of this many most
        likely ones, 0 to 20; None reports nothing.
    prompt_logprobs: the same for each token of the prompt but the first.
    seed: makes sampling repeatable, whatever else is in the batch; None draws a fresh one.
    stop: strings that end the text, and are not part of it.
    include_stop_str_in_output: the stop string that ended the text is part of it after all.
    stop_token_ids: token ids that end the request, besides the model's own; not part of the text.
    skip_special_tokens: control tokens are not part of the text; otherwise they are, by name, but
        for the one that ends the request.
    shown_special_token_ids: control tokens that are part of the text either way.
    ignore_eos: go on after the model's end-of-sequence tokens.
    structured: the form that the text must have; None allows all. Tokens that end the request can
        be chosen only where the text is complete, so it cannot be combined with ignore_eos.
    """

    n: int = 1
    max_tokens: int | None = 256
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    stop_token_ids: tuple[int, ...] = ()
    skip_special_tokens: bool = True
    shown_special_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    structured: StructuredOutput | None = None

    def __post_init__(self) -> None:
        _check_int("n", self.n, 1, MAX_SAMPLES)
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _check_int("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                "min_tokens", f"{self.min_tokens} is more than max_tokens, {self.max_tokens}"
            )
        self._check_distribution()
        for name in ("logprobs", "prompt_logprobs"):
            if (count := getattr(self, name)) is not None:
                _check_int(name, count, 0, MAX_LOGPROBS)
        if self.seed is not None:
            _check_int("seed", self.seed, -(2**63), 2**64 - 1)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(value := getattr(self, name), bool):
                raise InvalidRequestError(name, f"must be a bool, got {shown(value)}")
        self._check_texts("stop", MAX_STOP_STRINGS, MAX_STOP_STRING_LENGTH)
        self._check_texts("bad_words", MAX_BAD_WORDS, MAX_BAD_WORD_LENGTH)
        self._check_ids("stop_token_ids", MAX_STOP_TOKEN_IDS)
        self._check_ids("shown_special_token_ids", MAX_SHOWN_SPECIAL_TOKEN_IDS)
        if self.allowed_token_ids is not None:
            self._check_ids("allowed_token_ids", MAX_ALLOWED_TOKEN_IDS)
            if not self.allowed_token_ids:
                raise InvalidRequestError("allowed_token_ids", "must not be empty; None allows all")
        self._check_logit_bias()
        self._check_structured()

    def _check_distribution(self) -> None:
        _check_float("temperature", self.temperature, 0.0, 100.0)
        _check_float("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise InvalidRequestError("top_p", "must be above 0 and at most 1, got 0")
        _check_int("top_k", self.top_k, 0, 2**31 - 1)
        _check_float("min_p", self.min_p, 0.0, 1.0)
        _check_float("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_float("repetition_penalty", self.repetition_penalty, 0.01, 100.0)

    def _check_texts(self, name: str, most: int, longest: int) -> None:
        texts = getattr(self, name)
        texts = _tuple_of(name, (texts,) if isinstance(texts, str) else texts, str, most)
        object.__setattr__(self, name, texts)
        for text in texts:
            if not 0 < len(text) <= longest:
                raise InvalidRequestError(name, f"each string must have 1 to {longest} characters")
            if any("\ud800" <= character <= "\udfff" for character in text):
                raise InvalidRequestError(name, "holds a lone surrogate, which no text can match")

    def _check_ids(self, name: str, most: int) -> None:
        ids = _tuple_of(name, getattr(self, name), int, most)
        object.__setattr__(self, name, ids)
        for token_id in ids:
            _check_int(name, token_id, 0, 2**31 - 1)

    def _check_logit_bias(self) -> None:
        if not isinstance(self.logit_bias, Mapping):
            raise InvalidRequestError(
                "logit_bias", f"must map token ids to numbers, got {shown(self.logit_bias)}"
            )
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise InvalidRequestError(
                "logit_bias", f"at most {MAX_LOGIT_BIAS} are allowed, got {len(self.logit_bias)}"
            )
        for token_id, bias in self.logit_bias.items():
            _check_int("logit_bias", token_id, 0, 2**31 - 1)
            _check_float("logit_bias", bias, -100.0, 100.0)
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))  # nobody else's to change

    def _check_structured(self) -> None:
        if self.structured is None:
            return
        if not isinstance(self.structured, StructuredOutput):
            raise InvalidRequestError(
                "structured", f"must be a StructuredOutput, got {shown(self.structured)}"
            )
        if self.ignore_eos:
            raise InvalidRequestError(
                "ignore_eos", "cannot be combined with structured: its text has an end"
            )

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


def _check_int(name: str, value: object, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidRequestError(name, f"must be an integer, got {shown(value)}")
    if not low <= value <= high:
        raise InvalidRequestError(name, f"must be between {low} and {high}, got {shown(value)}")


def _check_float(name: str, value: object, low: float, high: float) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise InvalidRequestError(name, f"must be a number, got {shown(value)}")
    if not low <= value <= high:  # NaN fails both comparisons
        raise InvalidRequestError(name, f"must be between {low:g} and {high:g}, got {shown(value)}")


def _tuple_of(name: str, values: object, kind: type[_T], most: int) -> tuple[_T, ...]:
    if not isinstance(values, tuple | list):
        raise InvalidRequestError(name, f"must be a list of {kind.__name__}, got {shown(values)}")
    if len(values) > most:
        raise InvalidRequestError(name, f"at most {most} are allowed, got {len(values)}")
    for value in values:
        if not isinstance(value, kind) or isinstance(value, bool):
            raise InvalidRequestError(name, f"must hold only {kind.__name__}, got {shown(value)}")
    return tuple(values)
