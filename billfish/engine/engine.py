"""The step loop: schedule, execute, postprocess."""

import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import cast

from billfish.config import SchedulerConfig, check_swap
from billfish.engine.account import Account
from billfish.engine.block_manager import BlockManager
from billfish.engine.block_pool import BlockPool
from billfish.engine.detokenizer import Detokenizer
from billfish.engine.drawn_seeds import DrawnSeeds
from billfish.engine.logprobs import TokenLogprobs
from billfish.engine.outputs import (
    BlockMap,
    EngineStats,
    FinishReason,
    RequestOutput,
    RequestRecord,
    StepRecord,
)
from billfish.engine.plan import (
    NOT_FINITE,
    Executor,
    OverlappingExecutor,
    PendingStep,
    SleepingExecutor,
    StepPlan,
    StepResult,
)
from billfish.engine.prefix_cache import PrefixCache
from billfish.engine.request import Request, sample_seed
from billfish.engine.request_checks import (
    Room,
    TokenSequences,
    check_cache_salt,
    check_min_tokens,
    check_priority,
    check_queue,
    check_request_id,
    check_sampling,
    check_token_list,
    check_token_range,
)
from billfish.engine.scheduler import ScheduledStep, Scheduler
from billfish.errors import (
    ConfigError,
    ExecutorError,
    InvalidRequestError,
    shown,
)
from billfish.sampling_params import SamplingParams

CHECKED_BLOCKS_A_STEP = 1000
"""How much of the pool a step earns for the next check of all its blocks, at idle."""


@dataclass(slots=True)
class _InFlight:
    """A step whose result is still to come. pending: None where it is still to be computed."""

    scheduled: ScheduledStep
    began: float
    pending: PendingStep | None = None


class Engine:
    """Serves many requests at once through one executor. Not thread-safe.

        engine.add_request("a", prompt_token_ids, SamplingParams())
        while engine.has_unfinished:
            for output in engine.step():
                ...

    If a step fails (the executor raises, or its result does not answer the plan), `step` raises
    that exception. All requests that were running have then ended with finish reason "error", since
    what the executor knows of them is unknown, and their blocks are back; requests that wait still
    do. The next `step` returns the outputs of the failed requests and computes nothing; those after
    it go on, with a plan that releases everything the failed one spoke of.

    With `overlap` the executor always has work: `step` makes the next plan and submits it, and only
    then waits for the result of the one before. So a step computes while the CPU plans the next and
    turns the tokens of the last into text. What ends a request by the value of a token is seen one
    step late, and what was computed past it is dropped: the tokens are those of the plain loop, if
    the executor's choice for a sequence does not depend on the others in its step.
    """

    def __init__(
        self,
        executor: Executor,
        *,
        num_blocks: int,
        block_size: int,
        vocab_size: int,
        max_model_len: int,
        eos_token_ids: Collection[int],
        token_bytes: Callable[[int], bytes],
        named_token_bytes: Callable[[int], bytes] | None = None,
        scheduler: SchedulerConfig,
        prefix_caching: bool = True,
        prefix_cache_key: bytes | None = None,
        swap_blocks: int = 0,
        overlap: bool = False,
        seed: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """num_blocks: usable KV blocks, of block_size tokens each. max_model_len: longest sequence
        in tokens; scheduler.max_model_len lowers it. token_bytes: the UTF-8 bytes of a token, b""
        for control tokens and for ids below vocab_size that are no token. named_token_bytes: the
        same, but of a control token its name; None: control tokens are never shown. prefix_caching:
        share the blocks of equal beginnings. prefix_cache_key: of their digests; None draws one.
        swap_blocks: places for KV blocks in host memory. overlap: compute a step while the next is
        planned; the executor is an OverlappingExecutor. seed: of the seeds that requests without
        one get; None takes the operating system's entropy. clock: seconds.
        ConfigError if a setting is out of range or two contradict each other.
        """
        if vocab_size < 1 or max_model_len < 1:
            raise ConfigError(
                f"vocab_size and max_model_len must be at least 1, got {vocab_size} and "
                f"{max_model_len}"
            )
        if not all(0 <= token_id < vocab_size for token_id in eos_token_ids):
            raise ConfigError(
                f"eos_token_ids must be in 0..{vocab_size - 1}, got {sorted(eos_token_ids)}"
            )
        reserved, slots = scheduler.reserve_tokens or 0, num_blocks * block_size
        if reserved > slots:
            raise ConfigError(
                f"reserve_tokens sets aside {reserved} tokens for a request, and the KV cache "
                f"holds {slots}: nothing would ever start"
            )
        self.max_model_len = min(max_model_len, scheduler.max_model_len or max_model_len)
        self._room = Room(self.max_model_len, num_blocks, block_size)
        self._executor = executor
        self._pool = BlockPool(num_blocks, block_size)
        self._host = _host_pool(scheduler, swap_blocks, block_size)
        self._prefix_cache = PrefixCache(self._pool, prefix_cache_key) if prefix_caching else None
        self._blocks = BlockManager(scheduler, self._pool, self._prefix_cache, self._host)
        self._scheduler = Scheduler(scheduler, self._blocks)
        self._vocab_size = vocab_size
        self._eos_token_ids = frozenset(eos_token_ids)
        self._token_bytes = token_bytes
        self._named_token_bytes = named_token_bytes or token_bytes
        self._seeds = DrawnSeeds(seed)
        self._clock = clock
        self._requests: dict[str, list[Request]] = {}  # the samples that go on
        self._undelivered: list[RequestOutput] = []
        self._submit = cast(OverlappingExecutor, executor).submit if overlap else None
        self._in_flight: deque[_InFlight] = deque()
        self._asleep = False
        self._account = Account()
        self._checked_at = 0

    @property
    def num_running(self) -> int:
        """Samples that have a seat."""
        return len(self._scheduler.running)

    @property
    def num_waiting(self) -> int:
        """Samples in the queue."""
        return len(self._scheduler.waiting)

    @property
    def num_steps(self) -> int:
        """Plans that the executor completed."""
        return self._account.steps

    @property
    def recent_steps(self) -> Sequence[StepRecord]:
        """The latest of them, the oldest first."""
        return self._account.recent

    @property
    def request_ids(self) -> list[str]:
        """Of the requests that have not ended."""
        return list(self._requests)

    @property
    def has_unfinished(self) -> bool:
        """Whether `step` has anything to do; after the last output, it tells the executor so."""
        return bool(self._undelivered or self._in_flight) or not self._scheduler.idle

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        bad_word_ids: TokenSequences = (),
        cache_salt: str | None = None,
        priority: int = 0,
    ) -> None:
        """Queue a request. Nothing has changed if it is refused.

        max_tokens None generates for as long as max_model_len and the KV cache allow.
        bad_word_ids: params.bad_words as token ids, in all spellings (`Tokenizer.bad_word_ids`).
        cache_salt: only requests with the same one share blocks of equal beginnings, and so can
        tell by the time it takes whether another was there before; None is what all without one
        share.
        priority: lower numbers are served first, equal ones as they come (`scheduler`).
        InvalidRequestError: an argument is wrong, or the id belongs to a request that has not
        ended. CapacityError: it can never fit. QueueFullError: max_waiting
        requests wait already.
        """
        check_request_id(request_id)
        undelivered = (output.request_id for output in self._undelivered)
        if request_id in self._requests or request_id in undelivered:
            raise InvalidRequestError("request_id", f"{shown(request_id)} is in use")
        if self._asleep:
            raise InvalidRequestError("request_id", "the engine sleeps: wake it first")
        check_cache_salt(cache_salt)
        check_priority(priority)
        if not isinstance(params, SamplingParams):
            raise InvalidRequestError("params", f"must be SamplingParams, got {shown(params)}")
        stop_ids = frozenset(params.stop_token_ids)
        stop_ids = stop_ids if params.ignore_eos else stop_ids | self._eos_token_ids
        bad_words = check_sampling(params, stop_ids, bad_word_ids, self._vocab_size)
        check_token_list(prompt_token_ids)
        max_tokens = self._room.max_tokens(len(prompt_token_ids), params.max_tokens)
        prompt = tuple(prompt_token_ids)  # only now: its length is bounded
        check_token_range("prompt_token_ids", prompt, self._vocab_size)
        check_min_tokens(params, max_tokens)
        check_queue(params.n, self.num_waiting, self._scheduler.config.max_waiting)
        bytes_of = self._text_bytes(params)
        detokenizers = [
            Detokenizer(bytes_of, prompt, params.stop, params.include_stop_str_in_output)
            for _ in range(params.n)
        ]
        seed = self._seeds.take(request_id) if params.seed is None else params.seed
        arrival = self._clock()
        # One list for all samples: whichever computes the prompt fills it.
        prompt_logprobs: list[TokenLogprobs | None] | None = (
            None if params.prompt_logprobs is None else [None]
        )
        samples = [
            Request(
                request_id=request_id,
                index=index,
                prompt_token_ids=prompt,
                params=params,
                seed=sample_seed(seed, index),
                max_tokens=max_tokens,
                stop_ids=stop_ids,
                bad_word_ids=bad_words,
                detokenizer=detokenizer,
                record=RequestRecord(
                    arrival=arrival,
                    num_prompt_tokens=len(prompt),
                    logprobs=None if params.logprobs is None else [],
                    prompt_logprobs=prompt_logprobs,
                ),
                cache_salt=cache_salt,
                priority=priority,
            )
            for index, detokenizer in enumerate(detokenizers)
        ]
        self._requests[request_id] = samples
        for sample in samples:
            self._scheduler.add(sample)

    def abort(self, request_id: str) -> list[RequestOutput]:
        """End a request now, whatever its state: the last outputs of its samples. No more come.

        Of samples whose last output is out already there is none. Where a step has failed, what
        `step` has not delivered yet is returned here, in order. Empty, and no harm, if there is no
        such request. One that never started leaves no trace: requests without a seed that come
        later get the seeds that they would have got without it.
        """
        outputs = [o for o in self._undelivered if o.request_id == request_id]
        self._undelivered = [o for o in self._undelivered if o.request_id != request_id]
        samples = self._requests.get(request_id, [])
        if samples and all(request.record.first_scheduled is None for request in samples):
            self._seeds.give_back(request_id)
        for request in samples[:]:
            outputs.append(request.finish("abort"))
            self._scheduler.remove(request)
            self._forget(request, "abort")
        if outputs:
            self._check_if_idle()
        return outputs

    def step(self) -> list[RequestOutput]:
        """Compute one step; the outputs of the requests that got a token. See the class on failure.

        Empty while prompts are only partly computed, when there is nothing to do and, with overlap,
        when the first step has been submitted.
        """
        if self._undelivered:
            undelivered, self._undelivered = self._undelivered, []
            return undelivered
        began = self._clock()
        try:
            return self._step(began)
        finally:  # so that waiting is a part of it, whatever fails
            self._account.step_seconds += self._clock() - began

    def _step(self, began: float) -> list[RequestOutput]:
        scheduled = self._scheduler.schedule(began)
        outputs: list[RequestOutput] = []
        try:
            if scheduled is not None:
                self._start(scheduled, began)
            most = 1 if self._submit and scheduled is not None else 0
            if len(self._in_flight) > most:
                self._finish_oldest(outputs)
        except BaseException:
            self._fail(outputs)
            raise
        self._check_if_idle()
        return outputs

    def sleep(self) -> None:
        """Give the executor's memory back, until `wake`. Prompts are found no more.

        InvalidRequestError where requests are unfinished; ConfigError where the executor cannot;
        CapacityError where the host has no room for what is kept. Nothing has changed then.
        """
        if self.has_unfinished:
            raise InvalidRequestError("sleep", "requests are unfinished: end or abort them first")
        if not self._asleep:
            cast(SleepingExecutor, self._executor).sleep()
            self._asleep = True
            if self._prefix_cache is not None:
                self._prefix_cache.clear()

    def wake(self) -> None:
        """Take the memory again that `sleep` gave back. No harm where the engine is awake.

        CapacityError where there is not as much any more: it sleeps on, and may be woken again.
        """
        if self._asleep:
            cast(SleepingExecutor, self._executor).wake()
            self._asleep = False

    def _start(self, scheduled: ScheduledStep, began: float) -> None:
        """Submit a step; the plain loop computes it when it is finished."""
        step = _InFlight(scheduled, began)
        self._in_flight.append(step)  # before it is submitted: that may fail
        if self._submit:
            step.pending = self._submit(scheduled.plan)

    def _finish_oldest(self, outputs: list[RequestOutput]) -> None:
        step = self._in_flight[0]
        scheduled, plan = step.scheduled, step.scheduled.plan
        pending, step.pending = step.pending, None
        asked = self._clock()
        result = pending.result() if pending else self._executor.execute(plan)
        waited = self._clock() - asked
        self._account.wait_seconds += waited
        self._check_result(plan, result)
        self._take_logprobs(scheduled, result)
        self._account.count_step(self._scheduler)
        self._scheduler.succeed(scheduled)
        self._postprocess(scheduled, result, outputs)
        self._in_flight.popleft()
        self._account.record(
            scheduled,
            self._scheduler,
            began=step.began,
            ended=self._clock(),
            waited=waited,
            output_tokens=len(result.token_ids),
        )

    def stats(self) -> EngineStats:
        return self._account.stats(self._scheduler)

    def block_map(self) -> BlockMap:
        """What each KV block holds now."""
        running = self._scheduler.running
        codes, groups = self._pool.map([request.block_table for request in running])
        return BlockMap(codes, groups, tuple(request.sequence_id for request in running))

    def _postprocess(
        self, scheduled: ScheduledStep, result: StepResult, outputs: list[RequestOutput]
    ) -> None:
        """Give every request its token. Fills outputs as it goes, so that none is lost."""
        now = self._clock()
        for request in scheduled.sampling:
            if request.finish_reason is not None:  # aborted while the step was computed
                continue
            failure = result.failed.get(request.sequence_id) if result.failed else None
            if failure is not None:
                if failure == NOT_FINITE:
                    self._blocks.distrust(request)
                    request.forget_prompt_logprobs()
                output = request.finish("error", failure)
            else:
                if request.record.first_token is None:
                    request.record.first_token = now
                name = request.sequence_id
                output = request.append(result.token_ids[name], result.logprobs.get(name))
                self._account.output_tokens += 1
            outputs.append(output)
            if output.finish_reason is not None:
                self._scheduler.remove(request)
                self._forget(request, output.finish_reason)

    def _forget(self, request: Request, reason: FinishReason) -> None:
        samples = self._requests[request.request_id]
        samples.remove(request)
        if not samples:
            del self._requests[request.request_id]
            self._seeds.forget(request.request_id)
        request.record.finished_at = self._clock()
        self._account.finished[reason] += 1

    def _fail(self, outputs: list[RequestOutput]) -> None:
        """A step failed: end all running requests, and keep the outputs for the next step.

        What another step in flight brings is dropped with it.
        """
        self._undelivered += outputs
        steps = [step.scheduled for step in self._in_flight]
        for step in self._in_flight:
            if step.pending:
                with suppress(Exception):
                    step.pending.result()
        self._in_flight.clear()
        for request in self._scheduler.fail(steps):
            self._undelivered.append(request.finish("error"))
            self._forget(request, "error")

    def _check_if_idle(self) -> None:
        if self.has_unfinished:
            return
        # Block by block takes time: in a large pool only after many steps.
        steps = self._account.steps
        every = steps - self._checked_at >= self._pool.num_blocks // CHECKED_BLOCKS_A_STEP
        self._scheduler.check(every=every)
        if every:
            self._checked_at = steps

    def _check_result(self, plan: StepPlan, result: StepResult) -> None:
        """ExecutorError unless each that was due has either a token of the vocabulary or failed."""
        if not isinstance(result, StepResult) or result.step != plan.step:
            raise ExecutorError(f"step {plan.step} was answered with {shown(result)}")
        due = {work.request_id for work in plan.work if work.samples}
        due.update(fork.request_id for fork in plan.forks)
        if result.failed or result.token_ids.keys() != due:
            answered = [*result.token_ids, *result.failed]
            if len(answered) != len(due) or set(answered) != due:
                missing = sorted(due.difference(answered), key=str)[:5]
                unknown = sorted(set(answered) - due, key=str)[:5]
                raise ExecutorError(
                    f"step {plan.step}: no token for {missing}, tokens not asked for {unknown}"
                )
        for request_id, token_id in result.token_ids.items():
            if type(token_id) is not int or not 0 <= token_id < self._vocab_size:
                raise ExecutorError(
                    f"step {plan.step}: {shown(token_id)} for {shown(request_id)} is not a token "
                    f"id below {self._vocab_size}"
                )

    def _take_logprobs(self, step: ScheduledStep, result: StepResult) -> None:
        """ExecutorError unless they are there for every token whose request asks for them."""
        if result.prompt_logprobs:
            for request, _ in step.computed:
                logprobs = result.prompt_logprobs.get(request.sequence_id)
                if logprobs is not None and request.finish_reason is None:
                    request.add_prompt_logprobs(logprobs)
        for request in step.sampling:
            if not request.asks_logprobs or request.finish_reason is not None:
                continue
            name = request.sequence_id
            if name not in result.token_ids:
                continue
            missing = request.params.logprobs is not None and name not in result.logprobs
            if missing or request.needs_prompt_logits:
                raise ExecutorError(f"step {result.step}: no log-probabilities for {shown(name)}")

    def _text_bytes(self, params: SamplingParams) -> Callable[[int], bytes]:
        """What a token adds to the text of such a request."""
        plain, named = self._token_bytes, self._named_token_bytes
        if not params.skip_special_tokens:
            return named
        if not params.shown_special_token_ids:
            return plain
        shown = frozenset(params.shown_special_token_ids)
        return lambda token_id: named(token_id) if token_id in shown else plain(token_id)


def _host_pool(config: SchedulerConfig, swap_blocks: int, block_size: int) -> BlockPool | None:
    check_swap(config, swap_blocks)
    return BlockPool(swap_blocks, block_size) if swap_blocks else None
