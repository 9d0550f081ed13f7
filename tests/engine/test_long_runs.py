"""Many requests: how much KV memory is wasted, and that nothing is left behind."""

import math
import random
import tracemalloc

from billfish.engine.plan import StepPlan, StepResult
from billfish.sampling_params import SamplingParams
from tests.engine.fake_worker import make_engine


class QuickWorker:
    """Remembers only which requests it knows, and always says the same token."""

    def __init__(self) -> None:
        self.known: set[str] = set()

    def execute(self, plan: StepPlan) -> StepResult:
        self.known.difference_update(plan.released)
        self.known.update(new.request_id for new in (*plan.admitted, *plan.forks))
        sampled = (*(work for work in plan.work if work.samples), *plan.forks)
        return StepResult(plan.step, {new.request_id: 65 for new in sampled})


def lognormal(rng: random.Random, mean: float, sigma: float) -> int:
    return max(1, round(rng.lognormvariate(math.log(mean) - sigma**2 / 2, sigma)))


def test_kv_waste_on_a_trace_of_chat_lengths() -> None:
    """Mean lengths of ShareGPT: 161 tokens in, 338 out (Kwon et al., SOSP 2023, figure 11)."""
    rng = random.Random(2023)
    engine, _ = make_engine(
        QuickWorker(), num_blocks=2000, block_size=16, max_model_len=2048, max_num_seqs=256,
        prefix_caching=False,
    )  # fmt: skip
    prompt_tokens = output_tokens = 0
    for i in range(400):
        prompt = min(1000, lognormal(rng, 161, 1.0))
        output = min(1000, lognormal(rng, 338, 0.8))
        prompt_tokens, output_tokens = prompt_tokens + prompt, output_tokens + output
        engine.add_request(f"r{i}", [1] * prompt, SamplingParams(max_tokens=output))
    assert 130 < prompt_tokens / 400 < 190
    assert 280 < output_tokens / 400 < 390
    while engine.has_unfinished:
        engine.step()
    stats = engine.stats()
    assert stats.finished == {"length": 400}
    assert stats.output_tokens == output_tokens
    assert stats.blocks_peak > 1900  # the cache was the limit
    assert 0.005 < stats.kv_waste < 0.04
    # Computing again what was preempted stays a small part of the work.
    again = stats.prefill_tokens - prompt_tokens
    assert 0 < again < 0.1 * (prompt_tokens + output_tokens)


def test_five_thousand_requests_leave_nothing_behind() -> None:
    engine, worker = make_engine(QuickWorker(), num_blocks=64, block_size=4)
    rng = random.Random(0)
    number = 0

    def serve(count: int) -> int:
        """Serve so many requests, some aborted; the memory in use afterwards, in bytes."""
        nonlocal number
        last = number + count
        while number < last or engine.has_unfinished:
            if number < last:
                params = SamplingParams(max_tokens=rng.randint(1, 6), stop=("AAAAA",))
                engine.add_request(f"r{number}", [7] * rng.randint(1, 12), params)
                if number % 10 == 9:
                    engine.abort(f"r{number - rng.randint(0, 9)}")
                number += 1
            engine.step()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        early, late = serve(1000), serve(4000)
    finally:
        tracemalloc.stop()
    assert sum(engine.stats().finished.values()) == 5000
    assert engine.stats().finished.keys() == {"length", "stop", "abort"}
    assert engine.stats().blocks_in_use == 0
    assert not worker.known
    assert late - early < 20_000  # five bytes a request
