import pytest

from billfish.engine.plan import StepPlan, StepResult, Work
from billfish.errors import ConfigError
from billfish.sampling_params import SamplingParams
from tests.engine.fake_worker import (
    FakeWorker,
    expected_tokens,
    make_engine,
    random_requests,
    run,
)


def add_all(engine, requests) -> None:
    for request_id, prompt, params in requests:
        engine.add_request(request_id, prompt, params)


def check_outputs(final, requests) -> None:
    assert final.keys() == {request_id for request_id, _, _ in requests}
    for request_id, prompt, params in requests:
        want = expected_tokens(prompt, params.max_tokens, params.seed)
        assert final[request_id].token_ids == want, request_id
        assert final[request_id].finish_reason == "length"


def work_of(plan: StepPlan) -> list[tuple[str, int, int, tuple[int, ...], bool]]:
    return [(w.request_id, w.start, w.num_tokens, w.new_block_ids, w.samples) for w in plan.work]


class TestOutputsDoNotDependOnTheSchedule:
    REQUESTS = random_requests(24, seed=1, max_prompt=40, max_tokens=24)

    def test_alone(self) -> None:
        for request in self.REQUESTS:
            engine, _ = make_engine()
            add_all(engine, [request])
            check_outputs(run(engine), [request])

    @pytest.mark.parametrize("budget", [1, 3, 4, 7, 16, 33, 512])
    @pytest.mark.parametrize("seats", [1, 5, 64])
    def test_in_a_batch_chunked_at_any_size(self, budget: int, seats: int) -> None:
        engine, worker = make_engine(
            num_blocks=400, max_num_batched_tokens=budget, max_num_seqs=seats
        )
        add_all(engine, self.REQUESTS)
        check_outputs(run(engine), self.REQUESTS)
        assert engine.stats().preemptions == 0
        for plan in worker.plans:
            assert sum(work.num_tokens for work in plan.work) <= budget
            assert len(plan.work) <= seats

    @pytest.mark.parametrize("budget", [1, 5, 512])
    @pytest.mark.parametrize("block_size", [1, 4, 7])
    def test_with_preemption(self, budget: int, block_size: int) -> None:
        engine, _ = make_engine(
            num_blocks=-(-80 // block_size), block_size=block_size, max_num_batched_tokens=budget
        )
        add_all(engine, self.REQUESTS)
        check_outputs(run(engine), self.REQUESTS)
        if budget > 1:  # with a budget of one token only one request ever runs
            assert engine.stats().preemptions > 0

    def test_same_inputs_same_plans(self) -> None:
        def plans() -> list[StepPlan]:
            engine, worker = make_engine(num_blocks=20, max_num_batched_tokens=9)
            for index, request in enumerate(self.REQUESTS):
                add_all(engine, [request])
                engine.step()
                if index == 10:
                    engine.abort("r7")
            run(engine)
            return worker.plans

        assert plans() == plans()


class TestPlansByHand:
    def test_running_first_then_waiting_in_chunks(self) -> None:
        engine, worker = make_engine(max_num_batched_tokens=6, block_size=4)
        add_all(engine, [("a", [1] * 3, SamplingParams(max_tokens=3, seed=0))])
        engine.step()
        add_all(engine, [("b", [2] * 9, SamplingParams(max_tokens=2, seed=0))])
        run(engine)
        first, second, third, fourth, fifth = worker.plans
        assert work_of(first) == [("a", 0, 3, (1,), True)]
        assert work_of(second) == [("a", 3, 1, (), True), ("b", 0, 5, (2, 3), False)]
        assert work_of(third) == [("a", 4, 1, (4,), True), ("b", 5, 4, (5,), True)]
        assert (fourth.released, work_of(fourth)) == (("a",), [("b", 9, 1, (), True)])
        assert (fifth.released, work_of(fifth)) == (("b",), [])

    def test_preemption_takes_the_youngest_and_brings_it_back(self) -> None:
        engine, worker = make_engine(num_blocks=6, block_size=4, prefix_caching=False)
        requests = [
            (name, [1, 2, 3, 4], SamplingParams(max_tokens=12, seed=seed))
            for seed, name in enumerate("ab")
        ]
        add_all(engine, requests)
        check_outputs(run(engine), requests)
        plans = worker.plans
        # Both hold three blocks of six when the thirteenth token of "a" needs a fourth.
        assert [len(plan.work) for plan in plans] == [2] * 9 + [1] * 6 + [0]
        assert plans[9].released == ("b",)
        assert work_of(plans[9])[0][:3] == ("a", 12, 1)
        assert plans[12].released == ("a",)
        (again,) = plans[12].admitted
        assert again.token_ids == (1, 2, 3, 4, *expected_tokens([1, 2, 3, 4], 9, 1))
        assert (again.num_prompt_tokens, again.seed) == (4, 1)
        (work,) = plans[12].work
        assert (work.start, work.num_tokens, work.samples) == (0, 13, True)
        # The last of the thirteen was chosen before the preemption and never computed: decoding.
        assert engine.stats().prefill_tokens == 4 + 4 + 12

    def test_the_youngest_waits_with_its_blocks_when_nobody_needs_them(self) -> None:
        engine, worker = make_engine(num_blocks=6, block_size=4)
        requests = [
            ("a", [1] * 4, SamplingParams(max_tokens=9, seed=0)),
            ("b", [2] * 8, SamplingParams(max_tokens=8, seed=0)),
        ]
        add_all(engine, requests)
        check_outputs(run(engine), requests)
        # From step 5 to 8 "a" and "b" hold three blocks each, and "b" needs a fourth.
        assert [len(plan.work) for plan in worker.plans] == [2] * 5 + [1] * 7 + [0]
        assert [plan.work[0].request_id for plan in worker.plans[5:12]] == list("aaaabbb")
        assert engine.stats().preemptions == 0

    def test_a_chunk_shrinks_to_the_free_blocks(self) -> None:
        engine, worker = make_engine(num_blocks=9, block_size=2, max_num_batched_tokens=4)
        requests = [
            ("a", [1, 1], SamplingParams(max_tokens=5, seed=0)),
            ("b", [2] * 14, SamplingParams(max_tokens=1, seed=0)),
        ]
        add_all(engine, requests)
        check_outputs(run(engine), requests)
        # After step 3 "a" holds three blocks and "b" six, with one slot left in the last.
        assert [plan.work[1].num_tokens for plan in worker.plans[:5]] == [2, 3, 3, 3, 1]
        assert work_of(worker.plans[4])[1] == ("b", 11, 1, (), False)
        assert worker.plans[5].released == ("a",)
        assert work_of(worker.plans[5]) == [("b", 12, 2, (7,), True)]  # the last block of "a"

    def test_nobody_is_admitted_into_the_blocks_that_running_ones_need_next(self) -> None:
        engine, worker = make_engine(num_blocks=5, block_size=4)
        requests = [
            ("a", [1] * 8, SamplingParams(max_tokens=9, seed=0)),  # grows to 16: four blocks
            ("b", [2] * 4, SamplingParams(max_tokens=8, seed=0)),  # to 11: two blocks soon
        ]
        add_all(engine, requests)
        check_outputs(run(engine), requests)
        # "a" holds two and will soon take a third: two are left, and "b" fits.
        assert [work.request_id for work in worker.plans[0].work] == ["a", "b"]

        engine, worker = make_engine(num_blocks=4, block_size=4)
        add_all(engine, requests)
        check_outputs(run(engine), requests)
        # One block fewer: "b" would fit now, but be in the way four steps later.
        assert [work.request_id for work in worker.plans[0].work] == ["a"]
        assert engine.stats().preemptions == 0

    def test_smaller_requests_do_not_overtake(self) -> None:
        engine, worker = make_engine(num_blocks=8, block_size=4)
        requests = [
            ("a", [1] * 16, SamplingParams(max_tokens=4, seed=0)),
            ("big", [2] * 20, SamplingParams(max_tokens=4, seed=0)),
            ("small", [3], SamplingParams(max_tokens=1, seed=0)),
        ]
        add_all(engine, requests)
        check_outputs(run(engine), requests)
        order = [new.request_id for plan in worker.plans for new in plan.admitted]
        assert order == ["a", "big", "small"]


class TestProgress:
    """A cache far too small for all that want it."""

    BLOCK_SIZE = 4
    REQUESTS = random_requests(60, seed=3, max_prompt=10, max_tokens=22)

    def watch(self, engine, worker) -> None:
        """Check each plan: only younger requests give way, and none overtakes an older one."""
        age = {request_id: i for i, (request_id, _, _) in enumerate(self.REQUESTS)}
        self.preempted = 0

        def check(plan: StepPlan, result: StepResult) -> StepResult:
            running = [age[request.request_id] for request in engine._scheduler.running]
            waiting = [age[request.request_id] for request in engine._scheduler.waiting]
            assert running == sorted(running)
            assert waiting == sorted(waiting)
            assert not (running and waiting) or running[-1] < waiting[0]
            ids = {request.sequence_id for request in engine._scheduler.waiting}
            gone = [age[i] for i in plan.released if i in ids]
            self.preempted += len(gone)
            assert all(age[work.request_id] < min(gone) for work in plan.work if gone)
            # The oldest request computes in every step: so every step makes progress.
            assert not running or age[plan.work[0].request_id] == running[0]
            return result

        worker.hook = check

    @pytest.mark.parametrize("num_blocks", [8, 9, 12, 20])
    def test_all_finish_with_few_preemptions(self, num_blocks: int) -> None:
        engine, worker = make_engine(num_blocks=num_blocks, block_size=self.BLOCK_SIZE)
        self.watch(engine, worker)
        add_all(engine, self.REQUESTS)
        final = run(engine, max_steps=2000)
        check_outputs(final, self.REQUESTS)
        stats = engine.stats()
        assert stats.preemptions == self.preempted > 0
        # An admission is good for one token and for as many more as a block holds.
        for output in final.values():
            assert output.metrics.preemptions * (self.BLOCK_SIZE + 1) <= len(output.token_ids)
        assert stats.blocks_peak == num_blocks

    @pytest.mark.parametrize("budget", [2, 3, 6])
    def test_all_finish_when_prompts_come_in_chunks(self, budget: int) -> None:
        engine, worker = make_engine(
            num_blocks=8, block_size=self.BLOCK_SIZE, max_num_batched_tokens=budget
        )
        self.watch(engine, worker)
        add_all(engine, self.REQUESTS)
        check_outputs(run(engine, max_steps=5000), self.REQUESTS)
        assert engine.stats().preemptions < len(self.REQUESTS)

    def test_one_block_of_one_token(self) -> None:
        engine, _ = make_engine(num_blocks=1, block_size=1)
        requests = [(f"r{i}", [5], SamplingParams(max_tokens=1, seed=i)) for i in range(4)]
        add_all(engine, requests)
        check_outputs(run(engine, max_steps=20), requests)

    def test_a_big_request_is_not_starved_by_small_ones(self) -> None:
        engine, worker = make_engine(num_blocks=16, block_size=4)
        small = SamplingParams(max_tokens=6, seed=0)
        for i in range(8):
            engine.add_request(f"before{i}", [1, 2, 3], small)
        engine.step()
        engine.add_request("big", [4] * 50, SamplingParams(max_tokens=15, seed=0))
        for i in range(40):
            engine.add_request(f"after{i}", [1, 2, 3], small)
            engine.step()
        order = [new.request_id for plan in worker.plans for new in plan.admitted]
        assert order.index("big") == 8
        final = run(engine)
        assert final["after39"].finish_reason == "length"


def test_the_fake_worker_sees_a_wrong_block_table() -> None:
    """The net has no hole: swap two blocks in a plan and the worker does not agree."""
    worker = FakeWorker(num_blocks=8, block_size=2)
    engine, _ = make_engine(worker, num_blocks=8, block_size=2)
    engine.add_request("a", [1, 2, 3], SamplingParams(max_tokens=2, seed=0))
    engine.add_request("b", [3, 2, 1], SamplingParams(max_tokens=2, seed=0))
    plan = engine._scheduler.schedule(0.0).plan
    first, second = plan.work
    shared = Work("b", 0, 3, first.new_block_ids, True)
    with pytest.raises(AssertionError):
        worker.execute(StepPlan(0, admitted=plan.admitted, work=(first, shared)))
    assert second.new_block_ids != first.new_block_ids


def test_room_set_aside_for_the_longest():
    """As without blocks: only as many run as whole reservations fit, and none is preempted."""
    outputs = []
    for reserve in (None, 32):
        engine, _ = make_engine(num_blocks=24, block_size=4, reserve_tokens=reserve)
        for number in range(12):
            engine.add_request(str(number), [1 + number] * 4, SamplingParams(max_tokens=6, seed=1))
        engine.step()
        assert engine.stats().running == (12 if reserve is None else 3)
        outputs.append({name: output.token_ids for name, output in run(engine).items()})
        if reserve is not None:
            assert engine.stats().preemptions == 0
    assert outputs[0] == outputs[1]
    with pytest.raises(ConfigError, match="97 tokens for a request, and the KV cache holds 96"):
        make_engine(num_blocks=24, block_size=4, reserve_tokens=97)


@pytest.mark.parametrize("num_blocks", [200, 20])
def test_equal_chunks(num_blocks):
    """How a prompt is cut does not depend on who else is there."""
    prompts = [(f"r{n}", [1 + n] * length) for n, length in enumerate((1, 30, 7, 17, 16, 23))]
    params = SamplingParams(max_tokens=5, seed=1)
    settings = {
        "max_num_batched_tokens": 20, "max_num_seqs": 4, "block_size": 4, "equal_chunks": True,
        "num_blocks": num_blocks, "prefix_caching": False,
    }  # fmt: skip

    def chunks(requests) -> dict[str, list[tuple[int, int]]]:
        engine, worker = make_engine(**settings)
        add_all(engine, [(name, prompt, params) for name, prompt in requests])
        run(engine)
        cut: dict[str, list[tuple[int, int]]] = {}
        for work in (work for plan in worker.plans for work in plan.work):
            if work.start < len(dict(prompts)[work.request_id]):
                cut.setdefault(work.request_id, []).append((work.start, work.num_tokens))
        return cut

    together = chunks(prompts)
    assert together["r1"] == [(0, 16), (16, 14)]
    for request in prompts:
        assert chunks([request])[request[0]] == together[request[0]][: len(together[request[0]])]
