"""Decides what each step computes. It knows tokens, not phases, and never looks at their values.

Requests are served in order of priority, lower numbers first, and those of one priority strictly in
order of arrival, the samples of one in order of their numbers. "Older" means earlier in that order.
`running` is in it, so is `waiting`, and of one priority all that run arrived before all that wait:
only the oldest waiting request is admitted, and only the youngest running one is preempted, to
become the oldest of its priority that waits. (Here each sample is a request of its own.)

A request that waits never takes the seat or the blocks of one that runs, whatever their priorities:
it comes next. Nothing is promised to a priority while older ones keep coming; among those of one
priority nobody starves.

Three rules keep a full cache from thrashing:

- Only a younger request gives way to an older one. A request for which no younger one is left to
  give way computes what the free blocks allow, perhaps nothing, and keeps its blocks: nobody needs
  them yet.
- A request is admitted only if the blocks that can be allocated hold all known tokens and one
  block's worth of new ones, both its own and those of every running request. So for that many steps
  after an admission nobody runs out of blocks, and nobody is preempted.
- A preempted request counts as a waiting one, so it comes back by the same rule, whether its KV is
  computed again or swapped in.

The oldest request that runs is never preempted and its blocks always suffice, since a request that
cannot fit into the whole pool is refused at the door. So every step makes progress.

A sample that waits behind one whose prompt is complete in this step is forked from it, at no cost
but that of its own tokens. While a prompt is computed it takes what is left of each step's budget,
so nobody younger is admitted before its samples. Samples for which there are no seats or blocks at
that moment wait, and are admitted like anybody else: their prompt is in the prefix cache.
"""

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

from billfish.config import SchedulerConfig
from billfish.engine.block_manager import BlockManager
from billfish.engine.plan import Admission, Fork, StepPlan, Work
from billfish.engine.prefix_cache import CachedBlock
from billfish.engine.request import Request
from billfish.engine.waiting_queue import WaitingQueue


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """A plan, and what is to be done once it has succeeded or failed.

    computed: the requests whose tokens it computes, each with how many of its tokens are computed
    then. sampling: those for which it chooses a token. swapped: those that it swaps out.
    prefill_tokens, prefix_queries, prefix_hits: see EngineStats.
    """

    plan: StepPlan
    computed: list[tuple[Request, int]]
    sampling: list[Request]
    swapped: list[Request]
    prefill_tokens: int
    prefix_queries: int
    prefix_hits: int


@dataclass(slots=True)
class _Draft:
    """The step that is being made. source: whose prompt it completes, so that it can be forked."""

    budget: int
    computed: list[tuple[Request, int]] = field(default_factory=list)
    sampling: list[Request] = field(default_factory=list)
    swapped: list[Request] = field(default_factory=list)
    admitted: list[Admission] = field(default_factory=list)
    work: list[Work] = field(default_factory=list)
    forks: list[Fork] = field(default_factory=list)
    source: Request | None = None
    prefill_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0


class Scheduler:
    """Spends each step's token budget on the requests, and the blocks on their tokens."""

    def __init__(self, config: SchedulerConfig, blocks: BlockManager) -> None:
        self.config = config
        self.blocks = blocks
        self.running: list[Request] = []
        self.waiting = WaitingQueue()
        self.num_preemptions = 0
        self.num_swaps = 0
        self.num_forks = 0
        self.num_prefill_tokens = 0
        self._released: list[str] = []
        self._next_step = 0

    @property
    def idle(self) -> bool:
        """Nothing to compute, and nothing that the executor still has to be told."""
        return not (self.running or self.waiting or self._released)

    def add(self, request: Request) -> None:
        self.waiting.add(request)

    def remove(self, request: Request) -> None:
        """Take a request that has ended off the books; the next plan tells the executor."""
        if self.waiting.remove(request):
            self.blocks.forget_swapped(request)
        else:
            self.running.remove(request)
            self._released.append(request.sequence_id)
            self.blocks.give_up(request)

    def succeed(self, step: ScheduledStep) -> None:
        """A step has been computed: what is in its blocks can be shared from now on."""
        self.blocks.register(step.computed)
        self.blocks.count(step.plan, step.prefix_queries, step.prefix_hits)
        self.num_forks += len(step.plan.forks)
        self.num_prefill_tokens += step.prefill_tokens

    def fail(self, steps: Sequence[ScheduledStep]) -> list[Request]:
        """Take off the books all that the executor was told to know, after one of the steps that
        are not answered yet has failed.

        What it has forgotten, learned or copied of their plans is unknown: the next plan releases
        it all, and what was to be swapped out is computed again.
        """
        failed = self.running[:]
        self._released = [*chain(*(step.plan.released for step in steps)), *self._released]
        for request in failed:
            self.remove(request)
        # An id may have come back in those plans.
        self._released = list(dict.fromkeys(self._released))
        for step in steps:
            for request in step.sampling:
                request.forget_pending()
            for request in step.swapped:
                if request.host_blocks:  # not aborted meanwhile
                    self.blocks.forget_swapped(request)
                    request.num_computed_tokens = 0
                    request.record.swaps -= 1
                    self.num_swaps -= 1
        return failed

    def schedule(self, now: float) -> ScheduledStep | None:
        """Make the next plan, assuming that all plans so far succeed. None if there is no need, or
        none before the tokens of the plans so far are known.

        Deterministic: the same calls in the same order make the same plans. now: the time to record
        for requests that start.
        """
        step = _Draft(self.config.budget)
        # _make_room takes requests off the end of this list, never the current one or one before.
        for request in self.running:
            num_tokens = request.num_tokens - request.num_computed_tokens
            if num_tokens != 1 or not step.budget:  # most decode, and get what they want
                num_tokens = self._share(request, step.budget)
            if not num_tokens or request.num_tokens == request.most_tokens:
                continue  # the last of its tokens is not computed, only waited for
            lacks = self.blocks.lacks(request, request.num_computed_tokens + num_tokens)
            if lacks:
                wanted = num_tokens
                num_tokens, lacks = self._make_room(request, num_tokens, step)
                if num_tokens < wanted and self.config.equal_chunks:
                    continue
            if num_tokens:
                self._assign(request, num_tokens, lacks, step)
        if self.waiting:
            self._admit(step, now)
        if not (step.work or self._released):
            return None
        swap_out, copies, swap_in = self.blocks.take_moves()
        plan = StepPlan(
            step=self._next_step,
            released=tuple(self._released),
            swap_out=swap_out,
            copies=copies,
            swap_in=swap_in,
            admitted=tuple(step.admitted),
            work=tuple(step.work),
            forks=tuple(step.forks),
        )
        self._next_step += 1
        self._released = []
        for request in step.sampling:
            request.num_tokens += 1
        return ScheduledStep(
            plan, step.computed, step.sampling, step.swapped,
            step.prefill_tokens, step.prefix_queries, step.prefix_hits,
        )  # fmt: skip

    def _share(self, request: Request, budget: int) -> int:
        """How many tokens of the request to compute in a step with this budget left."""
        wanted = request.num_tokens - request.num_computed_tokens
        if not self.config.equal_chunks:
            return min(wanted, budget)
        wanted = min(wanted, self.config.budget - self.config.seats)
        return wanted if wanted <= budget else 0

    def _make_room(self, request: Request, num_tokens: int, step: _Draft) -> tuple[int, int]:
        """How many of these tokens the request can write, and how many blocks it takes for them,
        once younger requests gave way."""
        blocks, pool = self.blocks, self.blocks.pool
        end = request.num_computed_tokens + num_tokens
        while (lacks := blocks.lacks(request, end)) > pool.available:
            if self.running[-1] is request:
                room = len(request.block_table) + pool.available - blocks.must_copy(request)
                num_tokens = room * pool.block_size - request.num_computed_tokens
                return max(0, num_tokens), pool.available
            self._preempt_youngest(step)
        return num_tokens, lacks

    def _preempt_youngest(self, step: _Draft) -> None:
        request = self.running.pop()
        self._released.append(request.sequence_id)
        if self.blocks.should_swap(request):
            self.blocks.swap_out(request)
            step.swapped.append(request)
            request.record.swaps += 1
            self.num_swaps += 1
        else:
            self.blocks.give_up(request)
        request.record.preemptions += 1
        self.num_preemptions += 1
        self.waiting.add(request, in_front=True)

    def _admit(self, step: _Draft, now: float) -> None:
        """Start waiting requests, oldest first, while budget, seats and blocks last."""
        blocks, seats = self.blocks, self.config.seats
        if len(self.running) == seats or not (step.budget or step.source):
            return
        spare = blocks.pool.available - sum(map(self._lacks_soon, self.running))
        while self.waiting and len(self.running) < seats:
            request = self.waiting.first()
            if request.num_pending:
                break  # just preempted; its last token will be known after this step
            source = step.source
            if source is not None and _can_fork(source, request):
                spare -= self._fork_cost(source)
                if spare < 0:
                    break
                self._start(request, now)
                self._fork(source, request, step)
            elif self._share(request, step.budget):
                found = blocks.find(request)
                spare -= blocks.cost(found, self._tokens_soon(request))
                if spare < 0:
                    break
                self._start(request, now)
                self._begin(request, found, step)
            else:
                break

    def _start(self, request: Request, now: float) -> None:
        """Give it a seat."""
        self.waiting.remove(request)
        insort(self.running, request, key=_priority)  # behind those of its own
        # The last token generated before a preemption was never computed: that is decoding.
        request.num_prefill_tokens = request.num_tokens - (request.num_generated > 0)
        if request.record.first_scheduled is None:
            request.record.first_scheduled = now

    def _begin(self, request: Request, found: list[CachedBlock], step: _Draft) -> None:
        """Begin with what the prefix cache or the host memory has of it, and compute the rest."""
        record = request.record
        self.blocks.start(request, found)
        step.prefix_queries += request.num_tokens
        step.prefix_hits += request.num_found_tokens
        record.shared_blocks = len(found)
        record.peak_blocks = max(record.peak_blocks, len(request.block_table))
        if not record.preemptions:
            record.cached_tokens = request.num_found_tokens
        step.admitted.append(request.admission())
        num_tokens = self._share(request, step.budget)
        lacks = self.blocks.lacks(request, request.num_computed_tokens + num_tokens)
        self._assign(request, num_tokens, lacks, step)

    def _fork(self, source: Request, request: Request, step: _Draft) -> None:
        self.blocks.fork(source, request)
        record = request.record
        record.peak_blocks = record.shared_blocks = len(request.block_table)
        record.cached_tokens = source.record.cached_tokens
        record.first_scheduled = source.record.first_scheduled
        step.forks.append(request.fork(source))
        step.sampling.append(request)

    def _tokens_soon(self, request: Request) -> int:
        """Its known tokens and as many new ones as a block holds, as far as it may go."""
        if self.config.reserve_tokens is not None:
            return max(self.config.reserve_tokens, request.max_kv_tokens)
        return min(request.num_tokens + self.blocks.pool.block_size, request.max_kv_tokens)

    def _lacks_soon(self, request: Request) -> int:
        return self.blocks.lacks(request, self._tokens_soon(request))

    def _fork_cost(self, source: Request) -> int:
        """Blocks that one more sample of this prompt takes soon; all share the last, if not full.

        The first to write to it copies it, and so on until the last, who owns it.
        """
        pool, soon = self.blocks.pool, self._tokens_soon(source)
        partial = source.num_tokens % pool.block_size > 0 and soon > source.num_tokens
        return pool.blocks_for(soon) - len(source.block_table) + partial

    def _assign(self, request: Request, num_tokens: int, lacks: int, step: _Draft) -> None:
        """Give the request the blocks that these tokens take, and count them as computed."""
        start = request.num_computed_tokens
        end = start + num_tokens
        record = request.record
        new_blocks: tuple[int, ...] = ()
        replaces_last = False
        if lacks:
            new_blocks, replaces_last = self.blocks.extend(request, lacks)
            record.peak_blocks = max(record.peak_blocks, len(request.block_table))
        request.num_computed_tokens = end
        step.budget -= num_tokens
        if start < request.num_prefill_tokens:
            step.prefill_tokens += min(end, request.num_prefill_tokens) - start
        samples = end == request.num_tokens
        if samples:
            step.sampling.append(request)
            if end == len(request.prompt_token_ids):  # nothing was generated yet
                step.source = request
        step.computed.append((request, end))
        work = Work(request.sequence_id, start, num_tokens, new_blocks, samples, replaces_last)
        step.work.append(work)

    def check(self, *, every: bool = True) -> None:
        """InvariantError unless the pools agree with what all requests hold; see BlockManager."""
        self.blocks.check(self.running, self.waiting, every=every)


def _priority(request: Request) -> int:
    return request.priority


def _can_fork(source: Request, request: Request) -> bool:
    """Whether both are samples of one prompt, and neither is past it."""
    return source.request_id == request.request_id and not request.num_generated
