"""What the engine gives back. Plain data, no behaviour beyond arithmetic."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Literal

from billfish.engine.logprobs import TokenLogprobs

FinishReason = Literal["stop", "length", "abort", "error"]
"""stop: an end-of-sequence token, a stop token or a stop string. length: max_tokens, or no room for
more. abort: taken back by its owner. error: no token could be computed for it."""


@dataclass(slots=True, kw_only=True)
class RequestMetrics:
    """How one request went, at one moment. Times are readings of the engine's clock, in seconds.

    A time that has not come yet is None. peak_blocks: most KV blocks held at once. shared_blocks:
    those of them that it took over when it last started, from the prefix cache or from the sample
    that it was forked from, instead of filling them. cached_tokens: prompt tokens found in the
    prefix cache when the request first started; the same for all samples forked from one.
    preemptions: how often its blocks were taken away. swaps: how often of these its KV went to host
    memory and was not computed again.
    """

    arrival: float
    first_scheduled: float | None = None
    first_token: float | None = None
    finished_at: float | None = None
    num_prompt_tokens: int
    num_output_tokens: int = 0
    peak_blocks: int = 0
    shared_blocks: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    swaps: int = 0

    @property
    def queue_time(self) -> float | None:
        """Seconds from arrival to the first step that computed some of it."""
        return None if self.first_scheduled is None else self.first_scheduled - self.arrival

    @property
    def ttft(self) -> float | None:
        """Time to first token: seconds from arrival until it was there."""
        return None if self.first_token is None else self.first_token - self.arrival

    @property
    def tpot(self) -> float | None:
        """Time per output token: mean seconds per token after the first; None without a second.

        Known when the request has finished.
        """
        if self.first_token is None or self.finished_at is None or self.num_output_tokens < 2:
            return None
        return (self.finished_at - self.first_token) / (self.num_output_tokens - 1)


@dataclass(slots=True, eq=False, kw_only=True)
class RequestRecord(RequestMetrics):
    """What the engine writes down about one request as it goes. Its lists only grow.

    logprobs, prompt_logprobs: None where they are not asked for.
    """

    token_ids: list[int] = field(default_factory=list)
    text_pieces: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None


# Nobody changes one, but one is made for every token, which takes four times as long frozen.
@dataclass(slots=True, unsafe_hash=True)
class RequestOutput:
    """What one step brought one request, or one of its samples where it asked for several.

    Building one costs the new tokens, not all of them: `token_ids`, `text`, `logprobs` and
    `metrics` are made when they are read. All but the last are those of this moment; `metrics` are
    the latest known, and final once the request has finished.

    index: which of the `n` samples this is, from 0.
    new_token_ids: tokens of this step, the one that stopped the request included.
    delta: text of this step. Never half a character, never part of a stop string. The deltas of a
        request add up to exactly its text.
    finish_reason: None while the request goes on.
    stop_reason: the stop string or the token id that stopped it, where finish_reason is "stop";
        what went wrong with this request, where it is "error" and that is known.
    """

    request_id: str
    index: int
    prompt_token_ids: tuple[int, ...]
    new_token_ids: tuple[int, ...]
    delta: str
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    num_output_tokens: int
    _num_pieces: int = field(repr=False)
    _record: RequestRecord = field(repr=False, compare=False)

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All tokens generated so far; the one that stopped the request is the last of them."""
        return tuple(self._record.token_ids[: self.num_output_tokens])

    @property
    def logprobs(self) -> tuple[TokenLogprobs, ...] | None:
        """Of all tokens generated so far; None where they were not asked for."""
        known = self._record.logprobs
        return None if known is None else tuple(known[: self.num_output_tokens])

    @property
    def new_logprobs(self) -> tuple[TokenLogprobs, ...] | None:
        """Of this step's tokens."""
        known, end = self._record.logprobs, self.num_output_tokens
        return None if known is None else tuple(known[end - len(self.new_token_ids) : end])

    @property
    def prompt_logprobs(self) -> tuple[TokenLogprobs | None, ...] | None:
        """Of the prompt's tokens; None for the first, which nothing precedes.

        Complete in every output that brings a token. None where they were not asked for.
        """
        known = self._record.prompt_logprobs
        return None if known is None else tuple(known)

    @property
    def text(self) -> str:
        """All text so far, without the stop string or the text of the stop token."""
        return "".join(self._record.text_pieces[: self._num_pieces])

    @property
    def metrics(self) -> RequestMetrics:
        names = (each.name for each in fields(RequestMetrics))
        return RequestMetrics(**{name: getattr(self._record, name) for name in names})


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What one step computed. ended: reading of the engine's clock; seconds: since it was planned,
    or since the one before ended where they overlap.

    prefill_tokens, decode_tokens: computed. output_tokens: chosen. requests: how many had work in
    it. running, waiting: after it. blocks_in_use: KV blocks, after it. waited: of its seconds,
    those that the engine had nothing to do in but wait for the executor.
    """

    step: int
    ended: float
    seconds: float
    prefill_tokens: int
    decode_tokens: int
    output_tokens: int
    requests: int
    running: int
    waiting: int
    blocks_in_use: int
    waited: float = 0.0


@dataclass(frozen=True, slots=True)
class BlockMap:
    """What each KV block holds, at one moment, blocks 1..N in order.

    codes: N little-endian uint16: 0: free. 1: cached, held by no request. Others are 2 + the index
    of a group: blocks with the same holders; the last of 65,534 groups stands for all after it.
    groups: for each its reference count, and its holders as indexes into request_ids, the first 256
    of them.
    """

    codes: bytes
    groups: tuple[tuple[int, tuple[int, ...]], ...]
    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """The engine at one moment, and its totals since it started.

    All counts of requests count samples: a request with n = 4 is four.

    running, waiting: requests. blocks_*: KV blocks, the null block not counted; total = free +
        cached + in_use. blocks_cached: held by no request and kept for their content, until needed.
        blocks_peak: most in use in any step.
    kv_slots_allocated, kv_slots_used: token places in the blocks in use, and those that hold a
        token, now. kv_slot_steps_*: the same two, summed over all steps.
    kv_slot_steps_held: token places in all block tables, where a shared block counts once for each
        that shares it, summed over all steps.
    steps: plans that the executor completed.
    prefill_tokens: prompt tokens computed, and tokens computed again after a preemption.
    output_tokens: tokens generated. finished: requests by finish reason.
    prefix_queries, prefix_hits: tokens of requests that started, or started again after a
        preemption, and how many of them the prefix cache held. evictions: cached blocks that were
        needed for something else.
    forks: samples that began on the blocks of another one. block_copies: copies on write.
    step_seconds: spent in steps. wait_seconds: of these, waiting for the executor; with overlap,
        what is left is planning and text, during which a GPU computes. Where waiting is a small
        part, the GPU waits for the CPU.
    preemptions: blocks taken away from a request, swaps among them. blocks_swapped_out,
        blocks_swapped_in: copies to and from host memory. host_blocks_total, host_blocks_in_use:
        places for them, now.
    """

    running: int
    waiting: int
    blocks_total: int
    blocks_free: int
    blocks_cached: int
    blocks_in_use: int
    blocks_peak: int
    kv_slots_allocated: int
    kv_slots_used: int
    kv_slot_steps_allocated: int
    kv_slot_steps_used: int
    kv_slot_steps_held: int
    steps: int
    prefill_tokens: int
    output_tokens: int
    prefix_queries: int
    prefix_hits: int
    evictions: int
    forks: int
    block_copies: int
    preemptions: int
    swaps: int
    blocks_swapped_out: int
    blocks_swapped_in: int
    host_blocks_total: int
    host_blocks_in_use: int
    finished: Mapping[FinishReason, int]
    step_seconds: float = 0.0
    wait_seconds: float = 0.0

    @property
    def kv_waste(self) -> float:
        """Share of the allocated KV slots that held no token, over all steps; 0 before the first.

        The internal fragmentation of the PagedAttention paper (Kwon et al., SOSP 2023, section 4).
        """
        if not self.kv_slot_steps_allocated:
            return 0.0
        return 1.0 - self.kv_slot_steps_used / self.kv_slot_steps_allocated

    @property
    def kv_saved(self) -> float:
        """Share of KV memory saved by sharing, over all steps: of the blocks that there would be if
        each request had its own; 0 before the first step.

        The measure of the PagedAttention paper, section 6.3.
        """
        if not self.kv_slot_steps_held:
            return 0.0
        return 1.0 - self.kv_slot_steps_allocated / self.kv_slot_steps_held
