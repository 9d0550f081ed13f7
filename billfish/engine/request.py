"""One request, as the scheduler and the step loop see it."""

from dataclasses import dataclass, field

from billfish.engine.detokenizer import Detokenizer
from billfish.engine.logprobs import PromptLogprobs, TokenLogprobs
from billfish.engine.outputs import FinishReason, RequestOutput, RequestRecord
from billfish.engine.plan import Admission
from billfish.sampling_params import SamplingParams


@dataclass(slots=True, eq=False)
class Request:
    """Mutable state of a live request.

    max_tokens: most tokens it may generate, resolved. stop_ids: token ids that end it.
    bad_word_ids: token sequences that it must not generate.
    num_tokens: tokens known, prompt and output. num_computed_tokens: those whose KV is in the
    cache, or will be once the plans made so far have run. num_prefill_tokens: tokens known when it
    was last admitted; what is computed past them is decoding.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    max_tokens: int
    stop_ids: frozenset[int]
    bad_word_ids: tuple[tuple[int, ...], ...]
    detokenizer: Detokenizer
    record: RequestRecord
    num_tokens: int
    num_computed_tokens: int = 0
    num_prefill_tokens: int = 0
    block_table: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    @property
    def max_kv_tokens(self) -> int:
        """Most tokens whose KV is ever written: the last token generated is never computed."""
        return len(self.prompt_token_ids) + self.max_tokens - 1

    def admission(self) -> Admission:
        return Admission(
            request_id=self.request_id,
            token_ids=self.prompt_token_ids + tuple(self.record.token_ids),
            num_prompt_tokens=len(self.prompt_token_ids),
            sampling=self.params,
            seed=self.seed,
            stop_ids=self.stop_ids,
            bad_word_ids=self.bad_word_ids,
        )

    @property
    def needs_prompt_logits(self) -> bool:
        """Whether the model has to see every token of the prompt, cached or not: the prompt's
        log-probabilities are asked for and not all there. They lack the first token's."""
        return self.record.prompt_logprobs is not None and len(self.record.prompt_logprobs) < len(
            self.prompt_token_ids
        )

    def add_prompt_logprobs(self, new: PromptLogprobs) -> None:
        """Take the next of them; those that a preempted request had already are passed over."""
        known = self.record.prompt_logprobs
        if known is not None and new.start <= len(known):
            known.extend(new.tokens[len(known) - new.start :])

    def append(self, token_id: int, logprobs: TokenLogprobs | None = None) -> RequestOutput:
        """Take the token that a step chose: extend the text, and see whether it ends here."""
        self.record.token_ids.append(token_id)
        if self.record.logprobs is not None and logprobs is not None:
            self.record.logprobs.append(logprobs)
        self.num_tokens += 1
        new_token_ids = (token_id,)
        if token_id in self.stop_ids:
            return self.finish("stop", token_id, new_token_ids)
        delta, stop = self.detokenizer.append(token_id, self._too_early)
        if stop is not None:
            self.finish_reason = "stop"
        elif len(self.record.token_ids) == self.max_tokens:
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
        tail, stop = self.detokenizer.finish(self._too_early)
        if stop is not None and reason == "length":
            self.finish_reason, stop_reason = "stop", stop
        return self._output(new_token_ids, delta + tail, stop_reason)

    @property
    def _too_early(self) -> bool:
        """Whether a stop string that is complete now does not count yet."""
        return len(self.record.token_ids) < self.params.min_tokens

    def _output(
        self, new_token_ids: tuple[int, ...], delta: str, stop_reason: str | int | None
    ) -> RequestOutput:
        record = self.record
        if delta:
            record.text_pieces.append(delta)
        return RequestOutput(
            self.request_id,
            self.prompt_token_ids,
            new_token_ids,
            delta,
            self.finish_reason,
            stop_reason,
            len(record.token_ids),
            len(record.text_pieces),
            record,
        )
