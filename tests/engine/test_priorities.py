"""Who is served first, and that nobody is served anything else for it."""

import random

import pytest

from billfish.engine import Engine
from billfish.errors import InvalidRequestError
from billfish.sampling_params import SamplingParams
from tests.engine.fake_worker import expected_tokens, make_engine, run


def add(engine: Engine, name: str, priority: int = 0, max_tokens: int = 4, length: int = 3) -> None:
    params = SamplingParams(max_tokens=max_tokens, seed=1)
    engine.add_request(name, [ord(name[0])] * length, params, priority=priority)


def order_of_ends(engine: Engine) -> list[str]:
    return list(run(engine))


def test_lower_numbers_first_and_ties_as_they_came() -> None:
    engine, _ = make_engine(max_num_seqs=1)
    for name, priority in (("a", 5), ("b", 0), ("c", 5), ("d", -7), ("e", 0), ("f", 2**31 - 1)):
        add(engine, name, priority)
    assert order_of_ends(engine) == ["d", "b", "e", "a", "c", "f"]


def test_one_that_runs_keeps_its_seat() -> None:
    engine, _ = make_engine(max_num_seqs=1)
    add(engine, "runs", 9)
    engine.step()
    add(engine, "waits", -9)
    assert order_of_ends(engine) == ["runs", "waits"]
    assert engine.stats().preemptions == 0


def test_who_came_late_with_a_low_number_is_preempted_last() -> None:
    # Nine blocks for three requests that grow to four blocks each.
    engine, worker = make_engine(num_blocks=9, prefix_caching=False)
    for name, priority in (("old", 5), ("mid", 5)):
        add(engine, name, priority, max_tokens=13)
    engine.step()
    add(engine, "urgent", 0, max_tokens=13)
    final = run(engine)
    preempted = {name: output.metrics.preemptions for name, output in final.items()}
    assert preempted["urgent"] == 0
    assert preempted["old"] == 0
    assert preempted["mid"] > 0
    admitted = [new.request_id for plan in worker.plans for new in plan.admitted]
    assert admitted == ["old", "mid", "urgent", "mid"]


def test_a_preempted_request_waits_behind_lower_numbers() -> None:
    engine, worker = make_engine(num_blocks=8, prefix_caching=False, max_num_seqs=2)
    add(engine, "a", 1, max_tokens=20)
    add(engine, "b", 1, max_tokens=20)
    while not engine.stats().preemptions:
        engine.step()
    add(engine, "urgent", 0, max_tokens=1)
    final = run(engine)
    assert list(final).index("urgent") < list(final).index("b")
    admitted = [new.request_id for plan in worker.plans for new in plan.admitted]
    assert admitted.index("urgent") < len(admitted) - 1 - admitted[::-1].index("b")


@pytest.mark.parametrize("seed", range(5))
def test_the_tokens_are_those_without_priorities(seed: int) -> None:
    rng = random.Random(seed)
    engine, _ = make_engine(num_blocks=12, max_num_seqs=4, swap_blocks=rng.choice([0, 6]))
    wanted = {}
    for i in range(30):
        prompt = [rng.randrange(1, 250) for _ in range(rng.randint(1, 12))]
        params = SamplingParams(max_tokens=rng.randint(1, 12), seed=i)
        engine.add_request(f"r{i}", prompt, params, priority=rng.randint(-3, 3))
        wanted[f"r{i}"] = expected_tokens(prompt, params.max_tokens, i)
        for _ in range(rng.randint(0, 3)):
            for output in engine.step():
                if output.finished:
                    assert output.token_ids == wanted.pop(output.request_id)
    final = run(engine)
    assert {name: output.token_ids for name, output in final.items()} == wanted


def test_as_many_priorities_as_requests() -> None:
    engine, _ = make_engine(max_num_seqs=3)
    numbers = random.Random(0).sample(range(-(2**31), 2**31), 200)
    for number in numbers:
        engine.add_request(str(number), [1], SamplingParams(max_tokens=1), priority=number)
    engine.abort(str(min(numbers)))
    numbers.remove(min(numbers))
    assert list(map(int, order_of_ends(engine))) == sorted(numbers)
    assert engine.num_waiting == 0


@pytest.mark.parametrize("priority", [2**31, -(2**31) - 1, 1.0, "1", True, None])
def test_what_is_no_priority(priority: object) -> None:
    engine, _ = make_engine()
    with pytest.raises(InvalidRequestError, match="priority"):
        engine.add_request("a", [1], SamplingParams(), priority=priority)  # type: ignore[arg-type]
    assert not engine.has_unfinished
