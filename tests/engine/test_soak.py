"""Everything at once, for a long time, against what each request would get alone."""

import random

import pytest

from billfish.engine.plan import StepPlan, StepResult
from billfish.engine.request import sample_seed
from billfish.sampling_params import SamplingParams
from tests.engine.fake_worker import FakeWorker, expected_tokens, make_engine, sample_key


class Broken(Exception):
    pass


class Soak:
    """Chats that go on for turns, of n samples, begun alike, aborted, failed, in a tiny pool."""

    def __init__(self, seed: int, **settings) -> None:
        self.rng = random.Random(seed)
        worker = FakeWorker(settings["num_blocks"], 4, settings["swap_blocks"])
        worker.keep_plans = False
        self.engine, self.worker = make_engine(
            worker, block_size=4, max_model_len=64, max_num_seqs=12, **settings
        )
        self.worker.hook = self.sometimes_fail
        self.beginnings = [[self.rng.randint(1, 255) for _ in range(20)] for _ in range(6)]
        self.requests: dict[str, tuple[list[int], SamplingParams]] = {}
        self.live: dict[str, int] = {}
        self.added = 0

    def sometimes_fail(self, plan: StepPlan, result: StepResult) -> StepResult:
        if self.rng.random() < 0.004:
            raise Broken
        return result

    def add(self) -> None:
        prompt = self.rng.choice(self.beginnings)[: self.rng.randint(1, 20)]
        prompt = prompt + [self.rng.randint(1, 255) for _ in range(self.rng.randint(0, 4))]
        n = self.rng.choice((1, 1, 1, 2, 3, 8))
        params = SamplingParams(n=n, max_tokens=self.rng.randint(1, 20), seed=self.added)
        request_id = f"r{self.added}"
        self.added += 1
        salt = self.rng.choice((None, None, None, "tenant"))
        self.engine.add_request(request_id, prompt, params, cache_salt=salt)
        self.requests[request_id] = (prompt, params)
        self.live[request_id] = n

    def take(self, outputs) -> None:
        for output in outputs:
            if not output.finished:
                continue
            prompt, params = self.requests[output.request_id]
            seed = sample_seed(params.seed, output.index)
            want = expected_tokens(prompt, params.max_tokens, seed)
            got = output.token_ids
            whole = output.finish_reason == "length"
            assert got == (want if whole else want[: len(got)]), sample_key(output)
            self.live[output.request_id] -= 1
            if not self.live[output.request_id]:
                del self.live[output.request_id], self.requests[output.request_id]
            if whole and self.rng.random() < 0.2 and len(prompt) + len(got) < 24:
                self.beginnings[self.rng.randrange(6)] = [*prompt, *got]  # the next turn

    def step(self) -> None:
        try:
            self.take(self.engine.step())
        except Broken:
            self.engine._scheduler.check()

    def run(self, count: int):
        while self.added < count or self.engine.has_unfinished:
            if self.added < count and len(self.live) < 10:
                self.add()
            if self.live and self.rng.random() < 0.02:
                self.take(self.engine.abort(self.rng.choice(sorted(self.live))))
            self.step()
        assert not self.live
        assert not self.worker.sequences
        stats = self.engine.stats()
        assert stats.blocks_in_use == stats.host_blocks_in_use == 0
        return stats


@pytest.mark.parametrize(
    "settings",
    [
        {"preemption": "swap", "swap_blocks": 24, "max_num_batched_tokens": 40},
        {"preemption": "recompute", "swap_blocks": 0, "max_num_batched_tokens": 7},
        {"swap_cost": 0.3, "swap_blocks": 10, "max_num_batched_tokens": 512},
    ],
    ids=["swap", "recompute", "auto"],
)
def test_soak(settings) -> None:
    stats = Soak(seed=11, num_blocks=24, **settings).run(1500)
    assert {"length", "abort", "error"} == set(stats.finished)
    assert min(stats.forks, stats.block_copies, stats.prefix_hits, stats.evictions) > 500
    assert stats.preemptions > 200
    assert (stats.swaps > 100) == (settings["swap_blocks"] > 0)
    assert stats.swaps < stats.preemptions  # host memory is full at times
