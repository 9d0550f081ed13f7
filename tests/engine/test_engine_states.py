"""Add, abort, step and fail in any order: the books balance and the tokens are right."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from billfish.engine import RequestOutput
from billfish.engine.plan import StepPlan, StepResult
from billfish.sampling_params import SamplingParams
from tests.engine.fake_worker import VOCAB, expected_tokens, make_engine


class Broken(Exception):
    pass


class EngineMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.requests: dict[str, tuple[list[int], int, int]] = {}
        self.texts: dict[str, str] = {}
        self.ended: dict[str, RequestOutput] = {}

    @initialize(
        num_blocks=st.integers(4, 12), budget=st.sampled_from([1, 3, 64]), seats=st.integers(1, 4)
    )
    def start(self, num_blocks: int, budget: int, seats: int) -> None:
        self.engine, self.worker = make_engine(
            num_blocks=num_blocks,
            block_size=3,
            max_model_len=12,
            max_num_batched_tokens=budget,
            max_num_seqs=seats,
        )

    @rule(
        prompt=st.lists(st.integers(1, VOCAB - 1), min_size=1, max_size=8),
        max_tokens=st.integers(1, 4),
        seed=st.integers(0, 9),
    )
    def add(self, prompt: list[int], max_tokens: int, seed: int) -> None:
        request_id = f"r{len(self.requests)}"
        self.requests[request_id] = (prompt, max_tokens, seed)
        self.engine.add_request(
            request_id, prompt, SamplingParams(max_tokens=max_tokens, seed=seed)
        )

    @rule(number=st.integers(0, 20))
    def abort(self, number: int) -> None:
        request_id = f"r{number}"
        output = self.engine.abort(request_id)
        live = request_id in self.requests and request_id not in self.ended
        assert (output is not None) == live
        if output is not None:
            assert output.finish_reason in ("abort", "error")
            self.take(output, aborted=True)

    @rule(count=st.integers(1, 4))
    def step(self, count: int) -> None:
        for _ in range(count):
            for output in self.engine.step():
                self.take(output)

    @rule(before=st.booleans())
    def fail(self, before: bool) -> None:
        """The next step fails, before or after the executor has done its part."""

        def broken(plan: StepPlan, result: StepResult | None = None) -> StepResult:
            raise Broken

        execute = self.worker.execute
        if before:
            self.worker.execute = broken
        else:
            self.worker.hook = broken
        try:
            for output in self.engine.step():
                self.take(output)
        except Broken:
            pass
        self.worker.execute = execute
        self.worker.hook = lambda plan, result: result

    def take(self, output: RequestOutput, aborted: bool = False) -> None:
        request_id = output.request_id
        assert request_id not in self.ended
        self.texts[request_id] = self.texts.get(request_id, "") + output.delta
        assert aborted or output.text == self.texts[request_id]
        prompt, max_tokens, seed = self.requests[request_id]
        want = expected_tokens(prompt, max_tokens, seed)
        assert output.token_ids == want[: len(output.token_ids)]
        if output.finished:
            self.ended[request_id] = output
            assert (output.finish_reason == "length") == (output.token_ids == want)

    @invariant()
    def books_balance(self) -> None:
        if not hasattr(self, "engine"):
            return
        scheduler = self.engine._scheduler
        scheduler.check()
        stats = self.engine.stats()
        assert stats.blocks_free + stats.blocks_in_use == stats.blocks_total
        assert stats.kv_slots_used <= stats.kv_slots_allocated
        assert stats.running + stats.waiting == len(self.engine._requests)
        assert all(not request.block_table for request in scheduler.waiting.values())
        order = [int(r.request_id[1:]) for r in (*scheduler.running, *scheduler.waiting.values())]
        assert order == sorted(order)

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for _ in range(1000):
            if not self.engine.has_unfinished:
                break
            self.step(1)
        assert not self.engine.has_unfinished
        assert self.ended.keys() == self.requests.keys()
        assert not self.worker.sequences
        assert self.engine.stats().blocks_in_use == 0


EngineMachine.TestCase.settings = settings(
    derandomize=True, max_examples=120, stateful_step_count=40, deadline=None
)
TestEngineMachine = EngineMachine.TestCase
