"""An executor without a model: it does all the bookkeeping of a real one, and trusts no plan.

It keeps tokens and block tables from plans alone, writes every computed token into a KV store by
slot, and reads the whole sequence back through the block table to choose the next token. So a wrong
block table, a wrong start, or a block shared by mistake changes the output or fails an assertion.
"""

import random
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from billfish.config import SchedulerConfig
from billfish.engine import Engine, RequestOutput
from billfish.engine.plan import NULL_BLOCK, StepPlan, StepResult, Work
from billfish.sampling_params import SamplingParams

VOCAB = 256
EOS = 0


def next_token(token_ids: Sequence[int], seed: int, vocab_size: int = VOCAB) -> int:
    """The pseudo-model: a hash of all tokens. Never EOS, so that lengths are the test's choice."""
    text = f"{seed}:{','.join(map(str, token_ids))}"
    return 1 + zlib.crc32(text.encode()) % (vocab_size - 1)


@dataclass
class LiveSequence:
    token_ids: list[int]
    seed: int
    block_table: list[int] = field(default_factory=list)
    num_computed: int = 0


class FakeWorker:
    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.kv: dict[int, tuple[int, int]] = {}  # slot -> position, token; stale ones stay
        self.sequences: dict[str, LiveSequence] = {}
        self.plans: list[StepPlan] = []
        self.hook: Callable[[StepPlan, StepResult], StepResult] = lambda plan, result: result

    def execute(self, plan: StepPlan) -> StepResult:
        assert not self.plans or plan.step > self.plans[-1].step
        assert plan.released or plan.work, "an empty plan"
        self.plans.append(plan)
        for request_id in plan.released:
            self.sequences.pop(request_id, None)
        assert len(set(plan.released)) == len(plan.released)
        for new in plan.admitted:
            assert new.request_id not in self.sequences
            assert 1 <= new.num_prompt_tokens <= len(new.token_ids)
            self.sequences[new.request_id] = LiveSequence(list(new.token_ids), new.seed)
        assert len({work.request_id for work in plan.work}) == len(plan.work)
        for work in plan.work:
            self._write(work)
        self._check_blocks()
        tokens = {work.request_id: self._sample(work) for work in plan.work if work.samples}
        return self.hook(plan, StepResult(plan.step, tokens))

    def _write(self, work: Work) -> None:
        sequence = self.sequences[work.request_id]
        end = work.start + work.num_tokens
        assert work.num_tokens >= 1
        assert work.start == sequence.num_computed
        assert end <= len(sequence.token_ids)
        assert work.samples == (end == len(sequence.token_ids))
        sequence.block_table += work.new_block_ids
        # Exactly the blocks that are needed: neither too few nor any too early.
        assert len(sequence.block_table) == -(-end // self.block_size)
        for position in range(work.start, end):
            self.kv[self._slot(sequence, position)] = (position, sequence.token_ids[position])
        sequence.num_computed = end

    def _sample(self, work: Work) -> int:
        sequence = self.sequences[work.request_id]
        read = [self.kv[self._slot(sequence, i)] for i in range(sequence.num_computed)]
        assert [position for position, _ in read] == list(range(sequence.num_computed))
        token = next_token([token for _, token in read], sequence.seed)
        sequence.token_ids.append(token)
        return token

    def _slot(self, sequence: LiveSequence, position: int) -> int:
        block, offset = divmod(position, self.block_size)
        return sequence.block_table[block] * self.block_size + offset

    def _check_blocks(self) -> None:
        held = [block for sequence in self.sequences.values() for block in sequence.block_table]
        assert len(held) == len(set(held)), "a block is in two live requests"
        assert NULL_BLOCK not in held
        assert all(1 <= block <= self.num_blocks for block in held)


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
    **scheduler: int,
) -> tuple[Engine, Any]:
    worker = worker or FakeWorker(num_blocks, block_size)
    engine = Engine(
        worker,
        num_blocks=num_blocks,
        block_size=block_size,
        vocab_size=vocab_size,
        max_model_len=max_model_len,
        eos_token_ids=eos_token_ids,
        token_bytes=token_bytes,
        scheduler=SchedulerConfig(**scheduler),
        seed=seed,
        clock=clock or Clock(),
    )
    return engine, worker


def run(engine: Engine, max_steps: int = 100_000) -> dict[str, RequestOutput]:
    """Step until all is done; the last output of each request, its deltas checked on the way."""
    final: dict[str, RequestOutput] = {}
    texts: dict[str, str] = {}
    tokens: dict[str, tuple[int, ...]] = {}
    for _ in range(max_steps):
        if not engine.has_unfinished:
            break
        for output in engine.step():
            key = output.request_id
            assert key not in final, "an output after the last"
            if key in texts:
                assert output.text == texts[key] + output.delta
                assert output.token_ids == tokens[key] + output.new_token_ids
            texts[key], tokens[key] = output.text, output.token_ids
            if output.finished:
                final[key] = output
    assert not engine.has_unfinished, f"not done after {max_steps} steps"
    return final


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
