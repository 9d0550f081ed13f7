"""Equal beginnings share their KV blocks, and nobody can tell but by the time it takes."""

import random

import pytest

from billfish.engine.block_pool import BlockPool
from billfish.engine.plan import NOT_FINITE, StepPlan, StepResult
from billfish.engine.prefix_cache import PrefixCache
from billfish.errors import InvalidRequestError
from billfish.sampling_params import SamplingParams
from tests.engine.fake_worker import expected_tokens, make_engine, run

PROMPT = list(range(1, 13))  # three blocks of four


def params(max_tokens: int = 4, seed: int = 0) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, seed=seed)


def serve(engine, request_id: str, prompt, max_tokens: int = 4, seed: int = 0, salt=None):
    """Run one request to its end and compare it with the plain path; its metrics."""
    engine.add_request(request_id, prompt, params(max_tokens, seed), cache_salt=salt)
    output = run(engine)[request_id]
    assert output.token_ids == expected_tokens(prompt, max_tokens, seed)
    return output.metrics


class TestHits:
    def test_a_common_beginning_is_computed_once(self) -> None:
        engine, worker = make_engine()
        assert serve(engine, "a", [*PROMPT, 20, 21]).cached_tokens == 0
        metrics = serve(engine, "b", [*PROMPT, 30, 31, 32])
        assert (metrics.cached_tokens, metrics.shared_blocks, metrics.peak_blocks) == (12, 3, 5)
        (admitted,) = [new for plan in worker.plans for new in plan.admitted][1:]
        assert (admitted.block_ids, admitted.num_computed_tokens) == ((1, 2, 3), 12)
        stats = engine.stats()
        assert (stats.prefix_queries, stats.prefix_hits) == (14 + 15, 12)
        assert stats.prefill_tokens == 14 + 3
        assert stats.blocks_free + stats.blocks_cached == stats.blocks_total
        # "a" leaves 14 + 3 tokens written, four full blocks; "b" 15 + 3, one more than they share.
        assert stats.blocks_cached == 4 + 1

    def test_while_the_first_is_still_running(self) -> None:
        engine, _ = make_engine()
        engine.add_request("a", PROMPT, params(9))
        engine.step()
        engine.add_request("b", [*PROMPT, 40], params(9, seed=1))
        engine.step()
        stats = engine.stats()
        assert (stats.prefix_hits, stats.blocks_in_use) == (12, 3 + 1 + 1)
        # 13 + 13 tokens are known to the cache, 12 of them in shared blocks.
        assert stats.kv_slots_used == 13 + 1
        final = run(engine)
        assert final["a"].token_ids == expected_tokens(PROMPT, 9, 0)
        assert final["b"].token_ids == expected_tokens([*PROMPT, 40], 9, 1)

    def test_of_a_whole_prompt_the_last_token_is_computed_again(self) -> None:
        engine, worker = make_engine()
        serve(engine, "a", PROMPT)
        metrics = serve(engine, "b", PROMPT, seed=5)
        assert metrics.cached_tokens == 12
        plan = next(plan for plan in worker.plans for new in plan.admitted if "b" in new.request_id)
        (work,) = plan.work
        assert (work.start, work.num_tokens, work.new_block_ids) == (11, 1, ())
        assert plan.copies == ()  # nothing is written, so nothing is copied
        assert plan.admitted[0].num_computed_tokens == 12

    def test_of_a_whole_prompt_that_fills_the_cache(self) -> None:
        engine, _ = make_engine(num_blocks=3)
        for number in range(3):
            metrics = serve(engine, f"r{number}", PROMPT, max_tokens=1, seed=number)
        assert (metrics.cached_tokens, metrics.peak_blocks) == (12, 3)

    def test_the_next_turn_of_a_conversation(self) -> None:
        engine, _ = make_engine()
        serve(engine, "a", PROMPT, max_tokens=9)
        answer = expected_tokens(PROMPT, 9, 0)
        metrics = serve(engine, "b", [*PROMPT, *answer, 50, 51])
        assert metrics.cached_tokens == 12 + 8  # the ninth token was never computed

    def test_what_differs_is_not_found(self) -> None:
        engine, _ = make_engine()
        serve(engine, "a", PROMPT)
        # The second block alone is the same; what comes before it is not.
        assert serve(engine, "b", [9, *PROMPT[1:]]).cached_tokens == 0
        assert serve(engine, "c", [*PROMPT[:7], 99, *PROMPT[8:]]).cached_tokens == 4
        assert serve(engine, "d", PROMPT[4:]).cached_tokens == 0

    def test_what_another_holds_takes_no_room(self) -> None:
        """Eight blocks: five of a common prompt, and one and a half for what each adds."""
        engine, _ = make_engine(num_blocks=8)
        prompt = list(range(1, 21))
        engine.add_request("a", [*prompt, 30], params(3))
        engine.step()
        engine.add_request("b", [*prompt, 40], params(3, seed=1))
        engine.step()
        assert (engine.stats().running, engine.stats().blocks_in_use) == (2, 7)
        final = run(engine)
        assert final["b"].token_ids == expected_tokens([*prompt, 40], 3, 1)

    def test_off(self) -> None:
        engine, worker = make_engine(prefix_caching=False)
        for request_id in "ab":
            assert serve(engine, request_id, PROMPT).cached_tokens == 0
        stats = engine.stats()
        assert (stats.prefix_queries, stats.blocks_cached, stats.blocks_free) == (0, 0, 64)
        assert not any(new.block_ids for plan in worker.plans for new in plan.admitted)

    def test_two_that_start_at_once_do_not_mix_up_their_blocks(self) -> None:
        engine, _ = make_engine()
        for seed, request_id in enumerate("ab"):
            engine.add_request(request_id, PROMPT, params(12, seed))
        final = run(engine)
        for seed, request_id in enumerate("ab"):
            assert final[request_id].token_ids == expected_tokens(PROMPT, 12, seed)
        # Three of the prompt, known once; two of each answer (11 tokens written).
        assert engine.stats().blocks_cached == 3 + 2 + 2
        second = [*PROMPT, *final["b"].token_ids]
        assert serve(engine, "c", second).cached_tokens == 20


class TestSalt:
    def test_separates(self) -> None:
        engine, _ = make_engine()
        assert [
            serve(engine, f"r{i}", [*PROMPT, 20], salt=salt).cached_tokens
            for i, salt in enumerate([None, "x", "y", "x", None, "y", "\ud800", "\ud800"])
        ] == [0, 0, 0, 12, 12, 12, 0, 12]

    @pytest.mark.parametrize("salt", ["", 7, b"x", "x" * 1025])
    def test_is_checked(self, salt) -> None:
        engine, _ = make_engine()
        with pytest.raises(InvalidRequestError, match="cache_salt"):
            engine.add_request("a", PROMPT, params(), cache_salt=salt)
        assert not engine.has_unfinished

    def test_engines_draw_their_own_keys(self) -> None:
        first, second = (PrefixCache(BlockPool(4, 4))._digest(b"", b"x") for _ in range(2))
        assert first != second
        given = [PrefixCache(BlockPool(4, 4), b"k")._digest(b"", b"x") for _ in range(2)]
        assert given[0] == given[1] != first


class TestEviction:
    def test_least_recently_used_first_and_ends_before_beginnings(self) -> None:
        engine, _ = make_engine(num_blocks=8)
        serve(engine, "a", PROMPT, max_tokens=1)  # three blocks
        serve(engine, "b", [50, *PROMPT], max_tokens=1)  # three full ones and one more
        assert (engine.stats().blocks_cached, engine.stats().blocks_free) == (6, 2)
        serve(engine, "c", PROMPT, max_tokens=1)  # "a" is now more recent than "b"
        serve(engine, "d", [60] * 16, max_tokens=1)  # four blocks: two free, two of "b"
        assert engine.stats().evictions == 2
        assert serve(engine, "e", PROMPT, max_tokens=1).cached_tokens == 12
        assert serve(engine, "f", [50, *PROMPT], max_tokens=1).cached_tokens == 4

    def test_a_chain_on_anothers_block_mends_itself(self) -> None:
        """Two compute the same; the one whose blocks are known leaves, and they are evicted."""
        engine, _ = make_engine(num_blocks=12)
        engine.add_request("a", PROMPT, params(1, 0))
        engine.add_request("b", PROMPT, params(13, 1))
        engine.step()
        engine.add_request("c", [70] * 24, params(1, 0))  # takes all that "b" does not hold
        run(engine)
        assert engine.stats().evictions > 0
        turn = [*PROMPT, *expected_tokens(PROMPT, 13, 1)]
        assert serve(engine, "d", turn, max_tokens=1).cached_tokens == 24


class TestNeverTrustTheHash:
    """With digests of a few bits everything collides, and the outputs are right all the same."""

    @pytest.mark.parametrize("bits", [0, 1, 3])
    @pytest.mark.parametrize("num_blocks", [9, 40])
    def test_collisions(self, monkeypatch, bits: int, num_blocks: int) -> None:
        digest = PrefixCache._digest
        monkeypatch.setattr(
            PrefixCache,
            "_digest",
            lambda self, *parts: bytes([digest(self, *parts)[0] % (1 << bits)]),
        )
        rng = random.Random(bits)
        engine, _ = make_engine(num_blocks=num_blocks, block_size=2)
        requests = {}
        for number in range(150):
            prompt = [rng.randint(1, 2) for _ in range(rng.randint(1, 8))]
            requests[f"r{number}"] = (prompt, rng.randint(1, 6), number)
            engine.add_request(f"r{number}", prompt, params(*requests[f"r{number}"][1:]))
            engine.step()
        # Every answer is checked, KV contexts too: the worker reads them back.
        rest = run(engine)
        assert all(
            output.token_ids == expected_tokens(*requests[request_id])
            for request_id, output in rest.items()
        )
        assert engine.stats().finished == {"length": 150}
        assert engine.stats().prefix_hits > 0


class Broken(Exception):
    pass


class TestOnlyWhatIsWrittenIsFound:
    @pytest.mark.parametrize("before", [True, False])
    def test_a_failed_step_leaves_nothing(self, before: bool) -> None:
        engine, worker = make_engine(max_num_batched_tokens=8)
        engine.add_request("a", PROMPT, params())
        engine.step()  # two blocks are written
        execute = worker.execute

        def broken(plan: StepPlan) -> StepResult:
            if not before:
                execute(plan)
            raise Broken

        worker.execute = broken
        with pytest.raises(Broken):
            engine.step()
        worker.execute = execute
        run(engine)
        assert serve(engine, "b", [*PROMPT, 9]).cached_tokens == 8

    def test_a_request_without_logits_leaves_nothing(self) -> None:
        engine, worker = make_engine(max_num_batched_tokens=8)
        worker.hook = lambda plan, result: StepResult(
            plan.step, {}, dict.fromkeys(result.token_ids, NOT_FINITE)
        )
        engine.add_request("a", PROMPT, params())
        assert run(engine)["a"].finish_reason == "error"
        worker.hook = lambda plan, result: result
        assert engine.stats().blocks_cached == 0
        assert serve(engine, "b", [*PROMPT, 9]).cached_tokens == 0

    def test_not_before_the_step_is_done(self) -> None:
        engine, worker = make_engine()
        engine.add_request("a", PROMPT, params())
        seen = []

        def look(plan: StepPlan, result: StepResult) -> StepResult:
            seen.append(len(engine._prefix_cache._by_digest))
            return result

        worker.hook = look
        engine.step()
        assert (seen, len(engine._prefix_cache._by_digest)) == ([0], 3)

    def test_aborted_ones_leave_what_they_computed(self) -> None:
        engine, _ = make_engine(max_num_batched_tokens=8)
        engine.add_request("a", PROMPT, params())
        engine.step()
        engine.abort("a")
        run(engine)
        assert serve(engine, "b", [*PROMPT, 9]).cached_tokens == 8


def test_recomputation_finds_what_is_left() -> None:
    """A preempted request computes only what was taken by others meanwhile."""
    engine, _ = make_engine(num_blocks=6)
    for seed, request_id in enumerate("ab"):
        engine.add_request(request_id, [seed + 1] * 4, params(12, seed))
    final = run(engine)
    assert final["b"].metrics.preemptions == 1
    assert final["b"].token_ids == expected_tokens([2] * 4, 12, 1)
    assert engine.stats().prefix_hits >= 4
    assert final["b"].metrics.cached_tokens == 0  # it found its own, nobody else's


class CountingList(list):
    """Counts the elements that loops over it have seen."""

    seen = 0

    def __iter__(self):
        for element in super().__iter__():
            CountingList.seen += 1
            yield element


def test_registering_costs_the_new_blocks_only() -> None:
    """With a block for each token, a look at all those before would cost the square."""
    engine, _ = make_engine(num_blocks=200, block_size=1)
    engine.add_request("a", [1], params(100))
    engine.step()
    (request,) = engine._scheduler.running
    request.chain = CountingList(request.chain)
    CountingList.seen = 0
    assert run(engine)["a"].token_ids == expected_tokens([1], 100, 0)
    assert CountingList.seen <= 200
