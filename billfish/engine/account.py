"""What the engine counts as it goes: what its statistics and its latest steps are told from."""

from collections import Counter, deque
from dataclasses import dataclass, field

from billfish.engine.outputs import EngineStats, FinishReason, StepRecord
from billfish.engine.scheduler import ScheduledStep, Scheduler

RECENT_STEPS = 256


@dataclass(slots=True)
class Account:
    """Totals since the start, each as EngineStats says; `recent` holds the latest steps."""

    steps: int = 0
    blocks_peak: int = 0
    output_tokens: int = 0
    slot_steps_allocated: int = 0
    slot_steps_used: int = 0
    slot_steps_held: int = 0
    step_seconds: float = 0.0
    wait_seconds: float = 0.0
    finished: Counter[FinishReason] = field(default_factory=Counter)
    recent: deque[StepRecord] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))

    def count_step(self, scheduler: Scheduler) -> None:
        """A step that the executor has completed, before its requests get their tokens."""
        blocks, pool = scheduler.blocks, scheduler.blocks.pool
        self.steps += 1
        self.blocks_peak = max(self.blocks_peak, pool.in_use)
        self.slot_steps_allocated += pool.in_use * pool.block_size
        self.slot_steps_used += blocks.slots_used(scheduler.running)
        self.slot_steps_held += pool.block_size * pool.references

    def record(
        self,
        step: ScheduledStep,
        scheduler: Scheduler,
        *,
        began: float,
        ended: float,
        waited: float,
        output_tokens: int,
    ) -> None:
        """A step whose requests have their tokens; nothing where it computed none."""
        plan, prefill_tokens = step.plan, step.prefill_tokens
        if not plan.work:
            return
        before = self.recent[-1].ended if self.recent else 0.0
        record = StepRecord(
            step=plan.step,
            ended=ended,
            seconds=ended - max(began, before),
            prefill_tokens=prefill_tokens,
            decode_tokens=sum(work.num_tokens for work in plan.work) - prefill_tokens,
            output_tokens=output_tokens,
            requests=len(plan.work),
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            blocks_in_use=scheduler.blocks.pool.in_use,
            waited=waited,
        )
        self.recent.append(record)

    def stats(self, scheduler: Scheduler) -> EngineStats:
        blocks, pool = scheduler.blocks, scheduler.blocks.pool
        cache, host = blocks.prefix_cache, blocks.host
        return EngineStats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            blocks_total=pool.num_blocks,
            blocks_free=pool.num_free,
            blocks_cached=pool.num_cached,
            blocks_in_use=pool.in_use,
            blocks_peak=self.blocks_peak,
            kv_slots_allocated=pool.in_use * pool.block_size,
            kv_slots_used=blocks.slots_used(scheduler.running),
            kv_slot_steps_allocated=self.slot_steps_allocated,
            kv_slot_steps_used=self.slot_steps_used,
            kv_slot_steps_held=self.slot_steps_held,
            steps=self.steps,
            prefill_tokens=scheduler.num_prefill_tokens,
            output_tokens=self.output_tokens,
            prefix_queries=cache.queries if cache else 0,
            prefix_hits=cache.hits if cache else 0,
            evictions=cache.evictions if cache else 0,
            forks=scheduler.num_forks,
            block_copies=blocks.num_copies,
            preemptions=scheduler.num_preemptions,
            swaps=scheduler.num_swaps,
            blocks_swapped_out=blocks.num_swapped_out,
            blocks_swapped_in=blocks.num_swapped_in,
            host_blocks_total=host.num_blocks if host else 0,
            host_blocks_in_use=host.in_use if host else 0,
            finished=dict(self.finished),
            step_seconds=self.step_seconds,
            wait_seconds=self.wait_seconds,
        )
