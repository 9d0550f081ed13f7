"""An executor without a model: it does all the bookkeeping of a real one, and trusts no plan.

It keeps tokens and block tables from plans alone, writes every computed token into a KV store by
slot, and reads the whole sequence back through the block table to choose the next token. As in a
real cache, what is written depends on all that came before. So a wrong block table, a wrong start,
or a block shared, found, copied or swapped by mistake changes the output or fails an assertion.
"""

import random
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from billfish.config import SchedulerConfig
from billfish.engine import Engine, RequestOutput
from billfish.engine.plan import NULL_BLOCK, Admission, Fork, StepPlan, StepResult, Work
from billfish.sampling_params import SamplingParams

VOCAB = 256
EOS = 0


def next_token(token_ids: Sequence[int], seed: int, vocab_size: int = VOCAB) -> int:
    """The pseudo-model: a hash of all tokens. Never EOS, so that lengths are the test's choice."""
    text = f"{seed}:{','.join(map(str, token_ids))}"
    return 1 + zlib.crc32(text.encode()) % (vocab_size - 1)


def context(before: int, position: int, token_id: int) -> int:
    """What stands for the KV of a token: it depends on those before it, as KV does."""
    return zlib.crc32(b"%d:%d:%d" % (before, position, token_id))


@dataclass
class LiveSequence:
    token_ids: list[int]
    seed: int
    block_table: list[int] = field(default_factory=list)
    num_computed: int = 0


@dataclass(eq=False)
class FakeStep:
    """A step that was submitted; see `billfish.engine.plan.PendingStep`."""

    worker: "FakeWorker"
    answer: StepResult | None = None
    error: Exception | None = None

    def result(self) -> StepResult:
        assert self.worker.unanswered[0] is self, "not the oldest, or asked twice"
        self.worker.unanswered.pop(0)
        if self.error is not None:
            raise self.error
        assert self.answer is not None
        return self.answer


class FakeWorker:
    def __init__(self, num_blocks: int, block_size: int, host_blocks: int = 0) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        # Block -> (context, token) by offset. What is stale stays, to be read by mistake.
        self.kv: dict[int, list[tuple[int, int] | None]] = {}
        self.host: dict[int, list[tuple[int, int] | None]] = {}
        self.host_blocks = host_blocks
        self.sequences: dict[str, LiveSequence] = {}
        self.plans: list[StepPlan] = []
        self.keep_plans = True
        self.last_step = -1
        self.unanswered: list[FakeStep] = []
        self.hook: Callable[[StepPlan, StepResult], StepResult] = lambda plan, result: result

    def execute(self, plan: StepPlan) -> StepResult:
        assert plan.step > self.last_step
        assert plan.released or plan.work, "an empty plan"
        self.last_step = plan.step
        if self.keep_plans:
            self.plans.append(plan)
        assert len(set(plan.released)) == len(plan.released)
        for request_id in plan.released:
            self.sequences.pop(request_id, None)
        self._move(self.kv, self.host, plan.swap_out, self.host_blocks)
        self._move(self.kv, self.kv, plan.copies, self.num_blocks)
        self._move(self.host, self.kv, plan.swap_in, self.num_blocks)
        for new in plan.admitted:
            self._admit(new)
        self._extend(plan)
        for fork in plan.forks:
            self._fork(fork, plan)
        self._check_blocks(plan)
        tokens = {
            work.request_id: self._choose(work.request_id) for work in plan.work if work.samples
        }
        tokens |= {fork.request_id: self._choose(fork.request_id) for fork in plan.forks}
        for request_id, token_id in tokens.items():
            self.sequences[request_id].token_ids.append(token_id)
        return self.hook(plan, StepResult(plan.step, tokens))

    def submit(self, plan: StepPlan) -> "FakeStep":
        """Computes at once, and tells at the end: nobody can see a token, or a failure, early."""
        assert len(self.unanswered) < 2, "more than one step ahead"
        step = FakeStep(self)
        self.unanswered.append(step)
        try:
            for before in self.unanswered:
                if before.error is not None:
                    raise before.error  # it does not even know what that plan spoke of
            step.answer = self.execute(plan)
        except Exception as error:
            if plan.step % 2:  # some failures are seen at once
                self.unanswered.pop()
                raise
            step.error = error
        return step

    def _move(self, source, target, pairs, num_target: int) -> None:
        """Snapshot semantics: all are read before any is written."""
        assert len({block for _, block in pairs}) == len(pairs), "a destination twice"
        for block, content in [(d, source[s][:]) for s, d in pairs]:
            assert NULL_BLOCK < block <= num_target
            target[block] = content

    def _admit(self, new: Admission) -> None:
        assert new.request_id not in self.sequences
        assert 1 <= new.num_prompt_tokens <= len(new.token_ids)
        assert new.num_computed_tokens <= len(new.token_ids)
        assert len(new.block_ids) == self._blocks_for(new.num_computed_tokens)
        self.sequences[new.request_id] = LiveSequence(
            list(new.token_ids), new.seed, list(new.block_ids), new.num_computed_tokens
        )

    def _extend(self, plan: StepPlan) -> None:
        """Extend all block tables, then write: into blocks that no other sequence has."""
        assert len({work.request_id for work in plan.work}) == len(plan.work)
        copied = {target for _, target in plan.copies}
        for work in plan.work:
            table = self.sequences[work.request_id].block_table
            if work.replaces_last:
                assert (table.pop(), work.new_block_ids[0]) in plan.copies
                copied.remove(work.new_block_ids[0])
            table += work.new_block_ids
        assert not copied, "a copy for nobody"
        holders = self.holders()
        for work in plan.work:
            self._write(work, holders)

    def _write(self, work: Work, holders: Counter[int]) -> None:
        sequence = self.sequences[work.request_id]
        end = work.start + work.num_tokens
        known = sequence.num_computed
        assert work.num_tokens >= 1
        # Only the last token of all is ever computed twice, for its logits.
        assert work.start == known or (work.start == known - 1 and end == known)
        assert end <= len(sequence.token_ids)
        assert work.samples == (end == len(sequence.token_ids))
        # Exactly the blocks that are needed: neither too few nor any too early.
        assert len(sequence.block_table) == self._blocks_for(end)
        before = self._read(sequence, work.start - 1)[0] if work.start else 0
        for position in range(work.start, end):
            token_id = sequence.token_ids[position]
            before = context(before, position, token_id)
            block, offset = self._place(sequence, position)
            if position < known:
                assert self.kv[block][offset] == (before, token_id)
                continue
            assert holders[block] == 1, "a write to a shared block"
            content = self.kv.setdefault(block, [None] * self.block_size)
            content[offset] = (before, token_id)
        sequence.num_computed = end

    def _fork(self, fork: Fork, plan: StepPlan) -> None:
        source = self.sequences[fork.source]
        assert fork.request_id not in self.sequences
        assert any(work.request_id == fork.source and work.samples for work in plan.work)
        self.sequences[fork.request_id] = LiveSequence(
            source.token_ids[:], fork.seed, source.block_table[:], source.num_computed
        )

    def _choose(self, request_id: str) -> int:
        sequence = self.sequences[request_id]
        token_ids, before = [], 0
        for position in range(len(sequence.token_ids)):
            found, token_id = self._read(sequence, position)
            before = context(before, position, token_id)
            assert found == before, "KV of another context"
            token_ids.append(token_id)
        return next_token(token_ids, sequence.seed)

    def _read(self, sequence: LiveSequence, position: int) -> tuple[int, int]:
        block, offset = self._place(sequence, position)
        entry = self.kv[block][offset]
        assert entry is not None, "a slot that was never written"
        return entry

    def _place(self, sequence: LiveSequence, position: int) -> tuple[int, int]:
        index, offset = divmod(position, self.block_size)
        return sequence.block_table[index], offset

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def holders(self) -> Counter[int]:
        """How many sequences have each block."""
        return Counter(b for sequence in self.sequences.values() for b in sequence.block_table)

    def _check_blocks(self, plan: StepPlan) -> None:
        assert all(NULL_BLOCK < block <= self.num_blocks for block in self.holders())
        for sequence in self.sequences.values():
            assert len(set(sequence.block_table)) == len(sequence.block_table)


class ScriptedWorker:
    """Answers every request with the next token of its script."""

    def __init__(self, **scripts: str | bytes | list[int]) -> None:
        self.scripts = {
            name: list(script.encode() if isinstance(script, str) else script)
            for name, script in scripts.items()
        }
        self.plans: list[StepPlan] = []

    def execute(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        return StepResult(
            plan.step, {w.request_id: self.scripts[w.request_id].pop(0) for w in plan.work}
        )


class Clock:
    """Seconds that pass only when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def token_bytes(token_id: int) -> bytes:
    return bytes((token_id,)) if token_id != EOS else b""


def make_engine(
    worker: Any = None,
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    max_model_len: int = 128,
    eos_token_ids: tuple[int, ...] = (EOS,),
    vocab_size: int = VOCAB,
    seed: int | None = 0,
    clock: Callable[[], float] | None = None,
    prefix_caching: bool = True,
    swap_blocks: int = 0,
    overlap: bool = False,
    **scheduler: Any,
) -> tuple[Engine, Any]:
    worker = worker or FakeWorker(num_blocks, block_size, swap_blocks)
    engine = Engine(
        worker,
        num_blocks=num_blocks,
        block_size=block_size,
        vocab_size=vocab_size,
        max_model_len=max_model_len,
        eos_token_ids=eos_token_ids,
        token_bytes=token_bytes,
        scheduler=SchedulerConfig(**scheduler),
        prefix_caching=prefix_caching,
        prefix_cache_key=b"key",
        swap_blocks=swap_blocks,
        overlap=overlap,
        seed=seed,
        clock=clock or Clock(),
    )
    return engine, worker


def run(engine: Engine, max_steps: int = 100_000) -> dict[str, RequestOutput]:
    """Step until all is done; the last output of each request, its deltas checked on the way.

    Samples after the first are under "id/index".
    """
    final: dict[str, RequestOutput] = {}
    texts: dict[str, str] = {}
    tokens: dict[str, tuple[int, ...]] = {}
    for _ in range(max_steps):
        if not engine.has_unfinished:
            break
        for output in engine.step():
            key = sample_key(output)
            assert key not in final, "an output after the last"
            if key in texts:
                assert output.text == texts[key] + output.delta
                assert output.token_ids == tokens[key] + output.new_token_ids
            texts[key], tokens[key] = output.text, output.token_ids
            if output.finished:
                final[key] = output
    assert not engine.has_unfinished, f"not done after {max_steps} steps"
    return final


def sample_key(output: RequestOutput) -> str:
    return f"{output.request_id}/{output.index}" if output.index else output.request_id


def expected_tokens(prompt: Iterable[int], max_tokens: int, seed: int) -> tuple[int, ...]:
    """What the pseudo-model generates for this prompt when nothing is in its way."""
    token_ids = list(prompt)
    start = len(token_ids)
    for _ in range(max_tokens):
        token_ids.append(next_token(token_ids, seed))
    return tuple(token_ids[start:])


def random_requests(
    count: int, seed: int, *, max_prompt: int, max_tokens: int
) -> list[tuple[str, list[int], SamplingParams]]:
    rng = random.Random(seed)
    return [
        (
            f"r{i}",
            [rng.randrange(1, VOCAB) for _ in range(rng.randint(1, max_prompt))],
            SamplingParams(max_tokens=rng.randint(1, max_tokens), seed=i),
        )
        for i in range(count)
    ]
