"""What the HTTP side may rely on, with an engine that has no model and no process of its own."""

import asyncio
import gc
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from billfish.config import SchedulerConfig
from billfish.errors import (
    CapacityError,
    EngineDiedError,
    EngineUnavailableError,
    InvalidRequestError,
    QueueFullError,
)
from billfish.sampling_params import SamplingParams
from billfish.server.fake_engine import ENDLESS, VOCAB_SIZE, FakeEngine
from billfish.server.messages import EngineOutput, EngineRequest
from tests.server.live import PATIENCE

PROMPT = tuple(b"Hello")


def request(name: str = "a", prompt: Any = PROMPT, **options: Any) -> EngineRequest:
    outer = {key: options.pop(key) for key in ("priority", "cache_salt") if key in options}
    return EngineRequest(
        request_id=name, prompt_token_ids=prompt, sampling=SamplingParams(**options), **outer
    )


def with_engine(test: Callable[[FakeEngine], Awaitable[None]], **settings: Any) -> None:
    async def run() -> None:
        engine = FakeEngine(**settings)
        await engine.start()
        try:
            async with asyncio.timeout(PATIENCE):
                await test(engine)
        finally:
            await engine.close()

    asyncio.run(run())


async def collect(engine: FakeEngine, wanted: EngineRequest) -> list[EngineOutput]:
    return [output async for output in engine.generate(wanted)]


async def idle(engine: FakeEngine) -> None:
    """Wait until all blocks are back."""
    while (counters := (await engine.stats()).counters).blocks_in_use or counters.running:
        await asyncio.sleep(0)
    assert counters.blocks_free + counters.blocks_cached == counters.blocks_total


def text_of(outputs: list[EngineOutput], index: int = 0) -> str:
    return "".join(output.text for output in outputs if output.index == index)


class TestGenerate:
    def test_texts_add_up_and_usage_comes_last(self) -> None:
        async def test(engine: FakeEngine) -> None:
            outputs = await collect(engine, request())
            assert text_of(outputs) == "Tschüß 🐟"
            assert [output.finish_reason for output in outputs[:-1]] == [None] * (len(outputs) - 1)
            last = outputs[-1]
            assert last.finish_reason == "stop"
            assert last.usage is not None
            assert last.usage.prompt_tokens == 5
            assert last.usage.completion_tokens == len("Tschüß 🐟".encode()) + 1
            assert sum(len(output.token_ids) for output in outputs) == last.completion_tokens

        with_engine(test, reply="Tschüß 🐟")

    def test_samples_come_with_their_index(self) -> None:
        async def test(engine: FakeEngine) -> None:
            outputs = await collect(engine, request(n=3))
            assert {output.index for output in outputs} == {0, 1, 2}
            assert all(text_of(outputs, index) == "abc" for index in range(3))
            assert sum(output.finished for output in outputs) == 3

        with_engine(test, reply="abc")

    def test_logprobs_travel(self) -> None:
        async def test(engine: FakeEngine) -> None:
            outputs = await collect(engine, request(logprobs=2, prompt_logprobs=1, max_tokens=4))
            assert outputs[0].prompt_logprobs is not None
            assert outputs[0].prompt_logprobs[0] is None
            assert [item.token_id for item in outputs[0].prompt_logprobs[1:]] == list(b"ello")
            found = [item for output in outputs for item in output.logprobs or ()]
            assert bytes(item.token_id for item in found) == ENDLESS[:4].encode()
            assert all(len(item.top) == 2 for item in found)

        with_engine(test, reply="")

    def test_a_slow_reader_gets_the_same_text_and_holds_nobody_up(self) -> None:
        async def test(engine: FakeEngine) -> None:
            stream = await engine.submit(request("slow", n=2, max_tokens=3000, logprobs=0))
            assert text_of(await collect(engine, request("quick", max_tokens=3500))) != ""
            await idle(engine)
            outputs = [output async for output in stream]
            assert len(outputs) < 600  # merged: it did not cost an output a token
            for index in range(2):
                assert text_of(outputs, index) == (ENDLESS * 100)[:3000]
            kept = [output for output in outputs if output.index == 1]
            assert sum(len(output.logprobs or ()) for output in kept) == 3000
            assert kept[-1].finish_reason == "length"

        with_engine(test, reply="")


class TestRefused:
    @pytest.mark.parametrize(
        ("wanted", "error", "names"),
        [
            ({"prompt": ()}, InvalidRequestError, "prompt_token_ids"),
            ({"prompt": (1, -1)}, InvalidRequestError, "prompt_token_ids"),
            ({"prompt": (1, 10**30)}, InvalidRequestError, "prompt_token_ids"),
            ({"prompt": (1, 300)}, InvalidRequestError, "prompt_token_ids"),
            ({"prompt": (1, True)}, InvalidRequestError, "prompt_token_ids"),
            ({"prompt": (1, "a")}, InvalidRequestError, "prompt_token_ids"),
            ({"prompt": "abc"}, InvalidRequestError, "prompt_token_ids"),
            ({"logit_bias": {VOCAB_SIZE: 1.0}}, InvalidRequestError, "logit_bias"),
            ({"stop_token_ids": (10**6,)}, InvalidRequestError, "stop_token_ids"),
            ({"cache_salt": "\ud800"}, InvalidRequestError, "cache_salt"),
            ({"cache_salt": ""}, InvalidRequestError, "cache_salt"),
            ({"name": ""}, InvalidRequestError, "request_id"),
            ({"name": "x" * 257}, InvalidRequestError, "request_id"),
            ({"name": "a\0b"}, InvalidRequestError, "request_id"),
            ({"priority": 2**40}, InvalidRequestError, "priority"),
            ({"priority": 0.5}, InvalidRequestError, "priority"),
            ({"max_tokens": 4095}, CapacityError, "max_model_len"),
            ({"prompt": (1,) * 4096}, CapacityError, "max_model_len"),
        ],
    )
    def test_bad_requests_get_their_error_and_harm_nobody(
        self, wanted: dict[str, Any], error: type[Exception], names: str
    ) -> None:
        async def test(engine: FakeEngine) -> None:
            neighbour = await engine.submit(request("neighbour", max_tokens=8))
            with pytest.raises(error, match=names):
                await engine.submit(request(**wanted))
            assert text_of([output async for output in neighbour]) == ENDLESS[:8]
            assert text_of(await collect(engine, request("after", max_tokens=8))) == ENDLESS[:8]

        with_engine(test, reply="")

    def test_a_duplicate_id(self) -> None:
        async def test(engine: FakeEngine) -> None:
            first = await engine.submit(request("a", max_tokens=8))
            with pytest.raises(InvalidRequestError, match="in use"):
                await engine.submit(request("a"))
            assert text_of([output async for output in first]) == ENDLESS[:8]
            assert len(await collect(engine, request("a", max_tokens=1))) == 1

        with_engine(test, reply="")

    def test_a_full_queue(self) -> None:
        async def test(engine: FakeEngine) -> None:
            running = await engine.submit(request("a", max_tokens=99))
            engine.pause()
            waiting = asyncio.ensure_future(engine.submit(request("b", max_tokens=8)))
            refused = asyncio.ensure_future(engine.submit(request("c", max_tokens=8)))
            await asyncio.sleep(0)
            engine.resume()
            with pytest.raises(QueueFullError, match="max_waiting"):
                await refused
            assert (await engine.health()).state == "busy"
            assert len(text_of([output async for output in running])) == 99
            assert text_of([output async for output in await waiting]) == ENDLESS[:8]

        scheduler = SchedulerConfig(max_num_seqs=1, max_waiting=1)
        with_engine(test, reply="", scheduler=scheduler)

    def test_more_requests_than_the_client_may_hold(self) -> None:
        async def test(engine: FakeEngine) -> None:
            unread = await engine.submit(request("a", max_tokens=1))
            await idle(engine)
            with pytest.raises(QueueFullError, match="try again later"):
                await engine.submit(request("b"))
            assert not (await engine.health()).accepting
            await unread.aclose()
            assert (await engine.health()).accepting
            assert len(await collect(engine, request("b", max_tokens=1))) == 1

        with_engine(test, reply="", max_requests=1)


class TestClientGone:
    def test_a_reader_that_is_cancelled(self) -> None:
        async def test(engine: FakeEngine) -> None:
            task = asyncio.ensure_future(collect(engine, request(max_tokens=4000)))
            while (await engine.stats()).counters.output_tokens < 5:
                await asyncio.sleep(0)
            task.cancel()
            await idle(engine)
            assert (await engine.stats()).counters.finished["abort"] == 1

        with_engine(test, reply="")

    def test_in_the_middle_of_its_prompt(self) -> None:
        async def test(engine: FakeEngine) -> None:
            stream = await engine.submit(request(prompt=(1,) * 2000))
            while not (counters := (await engine.stats()).counters).prefill_tokens:
                await asyncio.sleep(0)
            assert counters.output_tokens == 0
            await stream.aclose()
            await idle(engine)
            counters = (await engine.stats()).counters
            assert counters.finished == {"abort": 1}
            assert counters.prefill_tokens < 2000

        with_engine(test, reply="", scheduler=SchedulerConfig(max_num_batched_tokens=16))

    def test_a_stream_that_is_dropped_unread(self) -> None:
        async def test(engine: FakeEngine) -> None:
            await engine.submit(request(max_tokens=4000))
            gc.collect()
            await idle(engine)
            assert (await engine.stats()).counters.finished["abort"] == 1

        with_engine(test, reply="")

    def test_a_request_that_is_not_taken_yet(self) -> None:
        async def test(engine: FakeEngine) -> None:
            engine.pause()
            task = asyncio.ensure_future(engine.submit(request(max_tokens=4000)))
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            engine.resume()
            await idle(engine)

        with_engine(test, reply="")


class TestStates:
    def test_health_tells_the_truth(self) -> None:
        async def test(engine: FakeEngine) -> None:
            health = await engine.health()
            assert (health.state, health.accepting) == ("starting", False)
            assert (health.loaded, health.to_load) == (0, 1)
            with pytest.raises(EngineUnavailableError) as caught:
                await engine.submit(request())
            assert caught.value.state == "starting"
            engine.revive()
            assert (await engine.wait_ready()).name == "fake"
            assert (await engine.health()).state == "ready"
            stream = await engine.submit(request(max_tokens=4000))
            engine.die("it was killed")
            with pytest.raises(EngineDiedError, match="it was killed"):
                async for _ in stream:
                    pass
            health = await engine.health()
            assert (health.state, health.detail, health.restarts) == ("dead", "it was killed", 1)
            with pytest.raises(EngineUnavailableError) as caught:
                await engine.submit(request("b"))
            assert caught.value.state == "dead"
            engine.revive()
            assert len(await collect(engine, request("b", max_tokens=2))) == 2

        with_engine(test, reply="", start_by_hand=True)

    def test_drain_lets_run_what_runs(self) -> None:
        async def test(engine: FakeEngine) -> None:
            stream = await engine.submit(request(max_tokens=50))
            drained = asyncio.ensure_future(engine.drain(PATIENCE))
            await asyncio.sleep(0)
            with pytest.raises(EngineUnavailableError) as caught:
                await engine.submit(request("b"))
            assert caught.value.state == "draining"
            assert text_of([output async for output in stream]) == (ENDLESS * 2)[:50]
            await drained
            assert (await engine.health()).state == "dead"

        with_engine(test, reply="")

    def test_the_block_map_shows_who_holds_what(self) -> None:
        async def test(engine: FakeEngine) -> None:
            engine.pause()
            submitted = asyncio.ensure_future(engine.submit(request("a", (1,) * 40, n=2)))
            engine.resume()
            stream = await submitted
            while not (snapshot := await engine.stats(block_map=True)).counters.running:
                await asyncio.sleep(0)
            found = snapshot.block_map
            assert found is not None
            assert found.request_ids[0] == "a"
            codes = memoryview(found.codes).cast("H").tolist()
            assert len(codes) == snapshot.counters.blocks_total
            held = [code for code in codes if code >= 2]
            assert len(held) == snapshot.counters.blocks_in_use
            names = found.request_ids
            holders = [(count, {names[i] for i in at}) for count, at in found.groups]
            held_by = [holders[code - 2] for code in held]
            both = set(names)
            assert len(both) == 2
            assert held_by.count((2, both)) >= 2  # the full blocks of the prompt are shared
            assert {count for count, who in held_by if len(who) == 1} == {1}
            assert set().union(*(who for _, who in held_by)) == both
            await stream.aclose()
            await idle(engine)
            found = (await engine.stats(block_map=True)).block_map
            assert found is not None
            assert set(memoryview(found.codes).cast("H")) == {0, 1}

        with_engine(test, reply="")
