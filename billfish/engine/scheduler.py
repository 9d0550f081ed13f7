"""Decides what each step computes. It knows tokens, not phases, and never looks at their values.

Requests are served strictly in order of arrival. `running` is in that order, so is `waiting`, and
all that run arrived before all that wait: only the oldest waiting request is admitted, and only the
youngest running one is preempted, to become the oldest that waits.

Three rules keep a full cache from thrashing:

- Only a younger request gives way to an older one. A request for which no younger one is left to
  give way computes what the free blocks allow, perhaps nothing, and keeps its blocks: nobody needs
  them yet.
- A request is admitted only if the free blocks hold all known tokens and one block's worth of new
  ones, both its own and those of every running request. So for that many steps after an admission
  nobody runs out of blocks, and nobody is preempted.
- A preempted request counts as a waiting one, so it comes back by the same rule.

The oldest request is never preempted and its blocks always suffice, since a request that cannot fit
into the whole pool is refused at the door. So every step makes progress and every request ends.
"""

from collections import OrderedDict
from dataclasses import dataclass
from itertools import chain

from billfish.config import SchedulerConfig
from billfish.engine.block_pool import BlockPool
from billfish.engine.plan import Admission, StepPlan, Work
from billfish.engine.request import Request


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """A plan, and the requests for which it chooses a token."""

    plan: StepPlan
    sampling: list[Request]


class Scheduler:
    """Spends each step's token budget on the requests, and the pool's blocks on their tokens."""

    def __init__(self, config: SchedulerConfig, pool: BlockPool) -> None:
        self.config = config
        self.pool = pool
        self.running: list[Request] = []
        self.waiting: OrderedDict[str, Request] = OrderedDict()
        self.num_preemptions = 0
        self.num_prefill_tokens = 0
        self._released: list[str] = []
        self._next_step = 0

    @property
    def idle(self) -> bool:
        """Nothing to compute, and nothing that the executor still has to be told."""
        return not (self.running or self.waiting or self._released)

    def add(self, request: Request) -> None:
        self.waiting[request.request_id] = request

    def remove(self, request: Request) -> None:
        """Take a request that has ended off the books; the next plan tells the executor."""
        if self.waiting.pop(request.request_id, None) is None:
            self.running.remove(request)
            self._give_up_blocks(request)

    def fail_running(self, plan: StepPlan) -> list[Request]:
        """Take off the books all that the executor was told to know, after a plan failed.

        What it has forgotten or learned of that plan is unknown: the next plan releases it all.
        """
        failed = self.running[:]
        self._released = list(dict.fromkeys([*plan.released, *self._released]))
        for request in failed:
            self.remove(request)
        return failed

    def schedule(self, now: float) -> ScheduledStep | None:
        """Make the next plan, assuming that all plans so far succeed. None if there is no need.

        Deterministic: the same calls in the same order make the same plans. now: the time to record
        for requests that start.
        """
        budget = self.config.max_num_batched_tokens
        work: list[Work] = []
        sampling: list[Request] = []
        # _make_room takes requests off the end of this list, never the current one or one before.
        for request in self.running:
            wanted = min(request.num_tokens - request.num_computed_tokens, budget)
            num_tokens = self._make_room(request, wanted)
            if num_tokens:
                work.append(self._assign(request, num_tokens, sampling))
                budget -= num_tokens
        admitted = self._admit(budget, work, sampling, now) if self.waiting else ()
        if not (work or self._released):
            return None
        plan = StepPlan(self._next_step, tuple(self._released), admitted, tuple(work))
        self._next_step += 1
        self._released = []
        return ScheduledStep(plan, sampling)

    def _make_room(self, request: Request, num_tokens: int) -> int:
        """How many of these tokens the request can write, once younger requests gave way."""
        pool, held = self.pool, len(request.block_table)
        wanted = pool.blocks_for(request.num_computed_tokens + num_tokens) - held
        while wanted > pool.num_free and self.running[-1] is not request:
            self._preempt_youngest()
        if wanted <= pool.num_free:
            return num_tokens
        return (held + pool.num_free) * pool.block_size - request.num_computed_tokens

    def _preempt_youngest(self) -> None:
        request = self.running.pop()
        self._give_up_blocks(request)
        request.num_computed_tokens = 0
        request.record.preemptions += 1
        self.num_preemptions += 1
        self.waiting[request.request_id] = request
        self.waiting.move_to_end(request.request_id, last=False)

    def _give_up_blocks(self, request: Request) -> None:
        # Last block first: the beginning of a sequence is what others are likeliest to share.
        self.pool.free(request.block_table[::-1])
        request.block_table.clear()
        self._released.append(request.request_id)

    def _admit(
        self, budget: int, work: list[Work], sampling: list[Request], now: float
    ) -> tuple[Admission, ...]:
        """Start waiting requests, oldest first, while budget, seats and blocks last."""
        seats = self.config.max_num_seqs - len(self.running)
        if not (budget and seats):
            return ()
        admitted: list[Admission] = []
        spare = self.pool.num_free - sum(map(self._blocks_soon, self.running))
        while self.waiting and budget and len(admitted) < seats:
            request = next(iter(self.waiting.values()))
            spare -= self._blocks_soon(request)
            if spare < 0:
                break
            del self.waiting[request.request_id]
            self.running.append(request)
            request.num_prefill_tokens = request.num_tokens
            if request.record.first_scheduled is None:
                request.record.first_scheduled = now
            admitted.append(request.admission())
            num_tokens = min(request.num_tokens, budget)
            work.append(self._assign(request, num_tokens, sampling))
            budget -= num_tokens
        return tuple(admitted)

    def _blocks_soon(self, request: Request) -> int:
        """Blocks it lacks for its known tokens and for as many new ones as a block holds."""
        tokens = min(request.num_tokens + self.pool.block_size, request.max_kv_tokens)
        return self.pool.blocks_for(tokens) - len(request.block_table)

    def _assign(self, request: Request, num_tokens: int, sampling: list[Request]) -> Work:
        """Give the request the blocks that these tokens need, and count them as computed."""
        start = request.num_computed_tokens
        end = start + num_tokens
        new_blocks: tuple[int, ...] = ()
        count = self.pool.blocks_for(end) - len(request.block_table)
        if count:
            block_ids = self.pool.allocate(count)
            new_blocks = tuple(block_ids)
            request.block_table += block_ids
            request.record.peak_blocks = max(request.record.peak_blocks, len(request.block_table))
        request.num_computed_tokens = end
        self.num_prefill_tokens += max(0, min(end, request.num_prefill_tokens) - start)
        samples = end == request.num_tokens
        if samples:
            sampling.append(request)
        return Work(request.request_id, start, num_tokens, new_blocks, samples)

    def slots_used(self) -> int:
        """KV slots that hold a token, or will once the plans made so far have run."""
        return sum(request.num_computed_tokens for request in self.running)

    def check(self) -> None:
        """InvariantError unless the pool agrees with the block tables of all requests."""
        requests = chain(self.running, self.waiting.values())
        self.pool.check(request.block_table for request in requests)
