"""What of a request is checked before the engine takes it: its parts, and whether it can fit."""

from collections.abc import Sequence
from typing import NamedTuple

from billfish.engine.request import SEPARATOR
from billfish.errors import CapacityError, InvalidRequestError, QueueFullError, shown
from billfish.sampling_params import SamplingParams

MAX_CACHE_SALT_LENGTH = 1024

TokenSequences = Sequence[Sequence[int]]


class Room(NamedTuple):
    """What a sequence has to fit into. max_model_len: in tokens. num_blocks: of the KV cache."""

    max_model_len: int
    num_blocks: int
    block_size: int

    def max_tokens(self, num_prompt: int, wanted: int | None) -> int:
        """How many tokens may be generated; wanted None: as many as fit. CapacityError if what is
        asked for can never fit."""
        # The last token generated ends the request, so its KV is never written.
        slots = self.num_blocks * self.block_size
        longest = min(self.max_model_len, slots + 1)
        total = num_prompt + (1 if wanted is None else wanted)
        if total <= longest:
            return longest - num_prompt if wanted is None else wanted
        if longest == self.max_model_len:
            limit = f"max_model_len is {longest} tokens"
        else:
            limit = (
                f"the KV cache holds {slots} tokens ({self.num_blocks} blocks of {self.block_size})"
            )
        if num_prompt >= longest:
            raise CapacityError(
                f"the prompt has {num_prompt} tokens and needs room for at least one more, but "
                f"{limit}: a prompt of at most {longest - 1} tokens fits"
            )
        raise CapacityError(
            f"{num_prompt} prompt tokens + max_tokens {wanted} = {total} tokens, but {limit}: "
            f"max_tokens of at most {longest - num_prompt} fits this prompt"
        )


def check_request_id(request_id: str) -> None:
    """InvalidRequestError unless it is a text that can name a request."""
    if not isinstance(request_id, str) or not request_id:
        raise InvalidRequestError("request_id", f"must be a string, got {shown(request_id)}")
    if SEPARATOR in request_id:
        raise InvalidRequestError("request_id", f"must not hold {SEPARATOR!r}")


def check_queue(samples: int, waiting: int, most: int) -> None:
    """QueueFullError where so many more samples would be more than may wait."""
    if waiting + samples > most:
        wanted = f" and n is {samples}" if samples > 1 else ""
        raise QueueFullError(
            f"{waiting} requests are waiting{wanted} and max_waiting is {most}: "
            "try again later, or raise max_waiting"
        )


def check_token_list(prompt_token_ids: Sequence[int]) -> None:
    """InvalidRequestError unless it is a sequence and not empty; what it holds is not looked at."""
    if not isinstance(prompt_token_ids, Sequence) or isinstance(
        prompt_token_ids, str | bytes | bytearray | memoryview
    ):
        kind = type(prompt_token_ids).__name__
        raise InvalidRequestError("prompt_token_ids", f"must be a list of token ids, got {kind}")
    if not prompt_token_ids:
        raise InvalidRequestError("prompt_token_ids", "must not be empty")


def check_token_range(parameter: str, token_ids: tuple[int, ...], vocab_size: int) -> None:
    """InvalidRequestError unless all are integers in 0..vocab_size - 1."""
    if not token_ids:
        return
    if set(map(type, token_ids)) != {int}:
        wrong = next(i for i, token_id in enumerate(token_ids) if type(token_id) is not int)
        raise InvalidRequestError(
            parameter, f"must hold only integers, got {shown(token_ids[wrong])} at index {wrong}"
        )
    for token_id in (min(token_ids), max(token_ids)):
        if not 0 <= token_id < vocab_size:
            raise InvalidRequestError(
                parameter,
                f"token id {shown(token_id)} at index {token_ids.index(token_id)} is not in the "
                f"vocabulary, 0..{vocab_size - 1}",
            )


def check_sampling(
    params: SamplingParams,
    stop_ids: frozenset[int],
    bad_word_ids: TokenSequences,
    vocab_size: int,
) -> tuple[tuple[int, ...], ...]:
    """bad_word_ids as tuples. stop_ids: all token ids that end the request.

    InvalidRequestError for a token id outside the vocabulary, for bad words without their token
    ids, which only a tokenizer knows, and where options leave no token to begin with.
    """
    check_token_range("stop_token_ids", params.stop_token_ids, vocab_size)
    check_token_range("allowed_token_ids", params.allowed_token_ids or (), vocab_size)
    check_token_range("logit_bias", tuple(params.logit_bias), vocab_size)
    if bool(params.bad_words) != bool(bad_word_ids):
        raise InvalidRequestError("bad_words", "must come with their token ids, and only so")
    if not isinstance(bad_word_ids, list | tuple) or not all(
        isinstance(sequence, list | tuple) for sequence in bad_word_ids
    ):
        raise InvalidRequestError(
            "bad_words", f"their token ids must be lists in a list, got {shown(bad_word_ids)}"
        )
    sequences = tuple(map(tuple, bad_word_ids))
    for sequence in sequences:
        if not sequence:
            raise InvalidRequestError("bad_words", "one of them has no tokens")
        check_token_range("bad_words", sequence, vocab_size)
    if params.structured is not None and not stop_ids:
        raise InvalidRequestError("structured", "no token can end the text: give stop_token_ids")
    banned = {sequence[0] for sequence in sequences if len(sequence) == 1}
    if params.min_tokens:
        banned |= stop_ids
    if params.allowed_token_ids is not None and banned.issuperset(params.allowed_token_ids):
        raise InvalidRequestError(
            "allowed_token_ids", "bad_words and min_tokens leave none of them to choose"
        )
    return sequences


def check_min_tokens(params: SamplingParams, max_tokens: int) -> None:
    """max_tokens: as many as may be generated, resolved."""
    if params.min_tokens > max_tokens:
        raise InvalidRequestError(
            "min_tokens", f"{params.min_tokens} do not fit: {max_tokens} is the most"
        )


def check_priority(priority: int) -> None:
    """InvalidRequestError unless it is an integer of 32 bits."""
    if type(priority) is not int or not -(2**31) <= priority < 2**31:
        raise InvalidRequestError(
            "priority", f"must be an integer in -2^31..2^31 - 1, got {shown(priority)}"
        )


def check_cache_salt(cache_salt: str | None) -> None:
    """InvalidRequestError unless it is None or a text of 1 to MAX_CACHE_SALT_LENGTH characters."""
    if cache_salt is None:
        return
    if not isinstance(cache_salt, str):
        raise InvalidRequestError("cache_salt", f"must be a string, got {shown(cache_salt)}")
    if not 0 < len(cache_salt) <= MAX_CACHE_SALT_LENGTH:
        raise InvalidRequestError(
            "cache_salt",
            f"must have 1 to {MAX_CACHE_SALT_LENGTH} characters, got {len(cache_salt)}",
        )
