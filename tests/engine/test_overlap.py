"""Steps that overlap give what the plain loop gives, and leave nothing behind."""

import random

import pytest

from billfish.engine.outputs import RequestOutput
from billfish.engine.request import sample_seed
from billfish.sampling_params import SamplingParams
from tests.engine.fake_worker import expected_tokens, make_engine, run, sample_key
from tests.engine.test_soak import Soak


def test_a_step_is_submitted_before_the_last_one_is_answered():
    engine, worker = make_engine(overlap=True)
    engine.add_request("a", [1, 2, 3], SamplingParams(max_tokens=3))
    assert engine.step() == []  # the prompt is being computed
    assert len(worker.unanswered) == 1
    (first,) = engine.step()
    assert len(worker.unanswered) == 1
    assert worker.plans[1].work[0].start == 3  # the place of a token that nobody had told
    assert first.token_ids == expected_tokens([1, 2, 3], 1, worker.sequences["a"].seed)
    (second,) = engine.step()
    (third,) = engine.step()
    assert (second.finished, third.finish_reason) == (False, "length")
    assert len(worker.plans) == 3  # max_tokens is known ahead: nothing is computed past it
    assert engine.step() == []  # tells the executor
    engine.step()
    assert not engine.has_unfinished
    assert not worker.sequences


def test_what_is_computed_past_a_stop_token_is_dropped():
    prompt, seed = [5, 6, 7], 3
    want = expected_tokens(prompt, 6, seed)
    params = SamplingParams(max_tokens=20, seed=seed, stop_token_ids=[want[3]])
    engine, worker = make_engine(overlap=True)
    engine.add_request("a", prompt, params)
    final = run(engine)["a"]
    assert final.token_ids == want[: want.index(want[3]) + 1]
    assert final.finish_reason == "stop"
    assert engine.stats().output_tokens == len(final.token_ids)
    assert engine.stats().blocks_in_use == 0
    assert not worker.sequences


@pytest.mark.parametrize("seed", range(12))
def test_same_outputs_as_the_plain_loop(seed):
    """Stops by token and by string, aborts, samples, preemption and swap, in a pool too small."""
    plain, overlapped = (_outputs(seed, overlap) for overlap in (False, True))
    assert plain.keys() == overlapped.keys()
    for key, output in plain.items():
        other = overlapped[key]
        assert (output.token_ids, output.text, output.finish_reason, output.stop_reason) == (
            other.token_ids, other.text, other.finish_reason, other.stop_reason
        ), key  # fmt: skip


def _outputs(seed: int, overlap: bool) -> dict[str, RequestOutput]:
    rng = random.Random(seed)
    swap = rng.choice((0, 12))
    engine, worker = make_engine(
        num_blocks=rng.randint(14, 24), block_size=3, max_model_len=40, overlap=overlap,
        swap_blocks=swap, preemption="swap" if swap else "recompute",
        max_num_batched_tokens=rng.choice((2, 16, 64)), max_num_seqs=rng.randint(2, 8),
    )  # fmt: skip
    abort_at: dict[str, int] = {}
    for number in range(30):
        prompt = [rng.randint(1, 3) for _ in range(rng.randint(1, 12))]
        params = SamplingParams(
            n=rng.choice((1, 1, 2, 4)), max_tokens=rng.randint(1, 20), seed=number,
            stop_token_ids=[rng.randint(1, 255) for _ in range(12)],
            stop=[chr(rng.randint(32, 126)) for _ in range(rng.choice((0, 3)))],
            min_tokens=rng.choice((0, 1)),
        )  # fmt: skip
        engine.add_request(f"r{number}", prompt, params)
        if rng.random() < 0.2:
            abort_at[f"r{number}"] = rng.randint(1, 5)
    final: dict[str, RequestOutput] = {}
    for _ in range(100_000):
        if not engine.has_unfinished:
            break
        for output in engine.step():
            assert sample_key(output) not in final
            if output.request_id in abort_at and output.index == 0:
                if output.num_output_tokens == abort_at[output.request_id]:
                    engine.abort(output.request_id)
            elif output.finished and output.request_id not in abort_at:
                final[sample_key(output)] = output
    stats = engine.stats()
    assert stats.blocks_in_use == stats.host_blocks_in_use == 0
    assert not worker.sequences
    assert not worker.unanswered
    return final


class StoppingSoak(Soak):
    """The soak with requests that end by the value of a token, as the plain loop would end them."""

    def add(self) -> None:
        super().add()
        stops = tuple(self.rng.sample(range(1, 256), 8))
        request_id = f"r{self.added - 1}"
        prompt, params = self.requests[request_id]
        self.engine.abort(request_id)
        params = SamplingParams(
            n=params.n, max_tokens=params.max_tokens, seed=params.seed, stop_token_ids=stops
        )
        self.engine.add_request(request_id, prompt, params)
        self.requests[request_id] = (prompt, params)

    def take(self, outputs) -> None:
        for output in outputs:
            if output.finish_reason != "stop":
                continue
            prompt, params = self.requests[output.request_id]
            seed = sample_seed(params.seed, output.index)
            want = expected_tokens(prompt, params.max_tokens, seed)
            ends = [i for i, token in enumerate(want) if token in params.stop_token_ids]
            assert output.token_ids == want[: ends[0] + 1]
        super().take(outputs)


@pytest.mark.parametrize("swap_blocks", [24, 0], ids=["swap", "recompute"])
def test_soak_with_overlap(swap_blocks):
    stats = StoppingSoak(
        seed=5, num_blocks=24, swap_blocks=swap_blocks, overlap=True, max_num_batched_tokens=40,
        preemption="swap" if swap_blocks else "recompute",
    ).run(1000)  # fmt: skip
    assert {"length", "stop", "abort", "error"} == set(stats.finished)
    assert min(stats.forks, stats.block_copies, stats.prefix_hits, stats.evictions) > 300
    assert stats.preemptions > 100
    assert (stats.swaps > 50) == (swap_blocks > 0)
