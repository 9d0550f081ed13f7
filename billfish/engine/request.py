"""One sample of a request, as the scheduler and the step loop see it: most requests have one."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from billfish.engine.detokenizer import Detokenizer
from billfish.engine.logprobs import PromptLogprobs, TokenLogprobs
from billfish.engine.outputs import FinishReason, RequestOutput, RequestRecord
from billfish.engine.plan import Admission, Fork
from billfish.sampling_params import SamplingParams

if TYPE_CHECKING:
    from billfish.engine.prefix_cache import CachedBlock

SEPARATOR = "\0"
"""Between the id of a request and the number of a sample; no request id may hold it."""


@dataclass(slots=True, eq=False)
class Request:
    """Mutable state of a live sample.

    request_id: what its owner calls the request, the same for all its samples. index: which of them
    this is. sequence_id: what plans call it. max_tokens: most tokens it may generate, resolved.
    stop_ids: token ids that end it. bad_word_ids: token sequences that it must not generate.
    cache_salt: see `prefix_cache`. priority: see `scheduler`.

    num_tokens: tokens of prompt and output, those included that the plans made so far will choose:
    num_pending of them are not known yet. most_tokens: as many as it may ever have. asks_logprobs:
    of the output or of the prompt. num_computed_tokens: those whose KV is in the
    cache, or will be once the plans made so far have run; while it waits, those whose KV is in
    host_blocks. num_found_tokens: those whose KV came with its first blocks, and is not written
    again. num_prefill_tokens: tokens known when it was last admitted; what is computed past them is
    decoding.

    block_table: its KV blocks. host_blocks: where its KV is in host memory while it is swapped out.
    digests: of its full blocks, as far as they were asked for. chain: its first full blocks, as far
    as the prefix cache knows them. chain_checked: how many blocks the cache had removed when it saw
    that all of them were there.
    """

    request_id: str
    index: int
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    max_tokens: int
    stop_ids: frozenset[int]
    bad_word_ids: tuple[tuple[int, ...], ...]
    detokenizer: Detokenizer
    record: RequestRecord
    cache_salt: str | None = None
    priority: int = 0
    sequence_id: str = field(init=False)
    num_tokens: int = field(init=False)
    most_tokens: int = field(init=False)
    asks_logprobs: bool = field(init=False)
    num_computed_tokens: int = 0
    num_found_tokens: int = 0
    num_prefill_tokens: int = 0
    block_table: list[int] = field(default_factory=list)
    host_blocks: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    chain: list["CachedBlock"] = field(default_factory=list)
    chain_checked: int = -1
    finish_reason: FinishReason | None = None

    def __post_init__(self) -> None:
        self.num_tokens = len(self.prompt_token_ids)
        self.most_tokens = self.num_tokens + self.max_tokens
        params = self.params
        self.asks_logprobs = params.logprobs is not None or params.prompt_logprobs is not None
        self.sequence_id = self.request_id
        if self.index:
            self.sequence_id += f"{SEPARATOR}{self.index}"

    @property
    def num_generated(self) -> int:
        """Output tokens, pending ones included."""
        return self.num_tokens - len(self.prompt_token_ids)

    @property
    def num_pending(self) -> int:
        """Output tokens that are being computed."""
        return self.num_generated - len(self.record.token_ids)

    def forget_pending(self) -> None:
        """The steps that were to choose them have failed."""
        self.num_tokens -= self.num_pending

    @property
    def max_kv_tokens(self) -> int:
        """Most tokens whose KV is ever written: the last token generated is never computed."""
        return self.most_tokens - 1

    def tokens(self, start: int, end: int) -> tuple[int, ...]:
        """Known tokens [start, end)."""
        prompt = self.prompt_token_ids
        if end <= len(prompt):
            return prompt[start:end]
        generated = self.record.token_ids
        return prompt[start:] + tuple(generated[max(0, start - len(prompt)) : end - len(prompt)])

    def admission(self) -> Admission:
        return Admission(
            request_id=self.sequence_id,
            token_ids=self.tokens(0, self.num_tokens),
            num_prompt_tokens=len(self.prompt_token_ids),
            sampling=self.params,
            seed=self.seed,
            stop_ids=self.stop_ids,
            bad_word_ids=self.bad_word_ids,
            block_ids=tuple(self.block_table),
            num_computed_tokens=max(self.num_found_tokens, self.num_computed_tokens),
        )

    def fork(self, source: "Request") -> Fork:
        return Fork(self.sequence_id, source.sequence_id, self.seed)

    @property
    def needs_prompt_logits(self) -> bool:
        """Whether the model has to see every token of the prompt, cached or not: the prompt's
        log-probabilities are asked for and not all there. They lack the first token's."""
        return self.record.prompt_logprobs is not None and len(self.record.prompt_logprobs) < len(
            self.prompt_token_ids
        )

    def add_prompt_logprobs(self, new: PromptLogprobs) -> None:
        """Take the next of them; those that are known already are passed over."""
        known = self.record.prompt_logprobs
        if known is not None and new.start <= len(known):
            known.extend(new.tokens[len(known) - new.start :])

    def forget_prompt_logprobs(self) -> None:
        """They came from broken logits: other samples of the prompt are to compute them anew."""
        if self.record.prompt_logprobs is not None:
            del self.record.prompt_logprobs[1:]  # the first token has none

    def append(self, token_id: int, logprobs: TokenLogprobs | None = None) -> RequestOutput:
        """Take the oldest pending token: extend the text, and see whether it ends here."""
        record = self.record
        record.token_ids.append(token_id)
        record.num_output_tokens += 1
        if record.logprobs is not None and logprobs is not None:
            record.logprobs.append(logprobs)
        new_token_ids = (token_id,)
        if token_id in self.stop_ids:
            return self.finish("stop", token_id, new_token_ids)
        too_early = record.num_output_tokens < self.params.min_tokens
        delta, stop = self.detokenizer.append(token_id, too_early)
        if stop is not None:
            self.finish_reason = "stop"
        elif record.num_output_tokens == self.max_tokens:
            return self.finish("length", None, new_token_ids, delta)
        return self._output(new_token_ids, delta, stop)

    def finish(
        self,
        reason: FinishReason,
        stop_reason: str | int | None = None,
        new_token_ids: tuple[int, ...] = (),
        delta: str = "",
    ) -> RequestOutput:
        """End the request. Text that was held back, and half a character, come out now."""
        self.finish_reason = reason
        too_early = self.record.num_output_tokens < self.params.min_tokens
        tail, stop = self.detokenizer.finish(too_early)
        if stop is not None and reason == "length":
            self.finish_reason, stop_reason = "stop", stop
        return self._output(new_token_ids, delta + tail, stop_reason)

    def _output(
        self, new_token_ids: tuple[int, ...], delta: str, stop_reason: str | int | None
    ) -> RequestOutput:
        record = self.record
        if delta:
            record.text_pieces.append(delta)
        return RequestOutput(
            self.request_id,
            self.index,
            self.prompt_token_ids,
            new_token_ids,
            delta,
            self.finish_reason,
            stop_reason,
            record.num_output_tokens,
            len(record.text_pieces),
            record,
        )


def sample_seed(seed: int, index: int) -> int:
    """The seed of a sample: that of its request for the first, so n does not change it.

    Sample i adds i times 2^64 divided by the golden ratio, modulo 2^64: all differ, and the sampler
    mixes the bits of a seed before it uses them.
    """
    return seed if index == 0 else (seed + index * 0x9E3779B97F4A7C15) % 2**64
