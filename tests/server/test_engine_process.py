"""The engine in a process of its own: what it says, how it dies, and what is left of it then."""

import asyncio
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from billfish.config import EngineConfig
from billfish.errors import CapacityError, EngineDiedError, EngineUnavailableError
from billfish.server.engine_client import EngineClient
from billfish.server.fake_engine import ENDLESS, byte_tokenizer
from billfish.server.messages import (
    Launch,
    LaunchFake,
)
from billfish.server.supervisor import EngineSupervisor, Watch, describe
from tests.server.live import PATIENCE
from tests.server.processes import (
    LOOP,
    MISBEHAVING,
    NEEDS_PROC,
    QUICK,
    ROOT,
    alive,
    children,
    collect,
    idle,
    memory,
    request,
    text_of,
    wait_until_gone,
    with_process,
)

pytestmark = NEEDS_PROC


@pytest.fixture(params=["asyncio", "uvloop"])
def any_loop(request: pytest.FixtureRequest) -> Iterator[None]:
    """The server runs on uvloop, whose transports and processes differ in detail."""
    factory = None
    if request.param == "uvloop":
        factory = pytest.importorskip("uvloop", reason="needs uvloop").new_event_loop
    token = LOOP.set(factory)
    yield
    LOOP.reset(token)


@pytest.fixture
def often_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines are asked for a sign of life ten times a second."""
    monkeypatch.setattr("billfish.server.supervisor.LONGEST_PAUSE", 0.1)


class TestServes:
    @pytest.mark.usefixtures("any_loop")
    def test_what_came_out_is_what_was_said(self) -> None:
        async def test(client: EngineClient, supervisor: EngineSupervisor) -> None:
            outputs = await collect(client, request(n=2, logprobs=1))
            for index in range(2):
                mine = [output for output in outputs if output.index == index]
                assert text_of(mine) == "Grüße 🐟"
                assert mine[-1].finish_reason == "stop"
                assert mine[-1].usage is not None
                assert mine[-1].usage.completion_tokens == mine[-1].completion_tokens
            snapshot = await idle(client)
            assert snapshot.counters.finished == {"stop": 2}
            assert snapshot.steps[-1].output_tokens == 2
            assert len(snapshot.ttfts) == 2

        with_process(test, LaunchFake(reply="Grüße 🐟"))

    def test_many_at_once(self) -> None:
        async def test(client: EngineClient, supervisor: EngineSupervisor) -> None:
            lengths = [7 * i % 90 + 1 for i in range(100)]
            found = await asyncio.gather(
                *(collect(client, request(str(i), max_tokens=n)) for i, n in enumerate(lengths))
            )
            assert [len(text_of(outputs)) for outputs in found] == lengths
            await idle(client)

        with_process(test)

    def test_5000_requests_leave_no_memory_behind(self) -> None:
        """Neither host memory nor blocks, on either side."""

        async def test(client: EngineClient, supervisor: EngineSupervisor) -> None:
            async def some(start: int, count: int) -> None:
                async def worker(first: int) -> None:
                    for i in range(first, start + count, 50):
                        wanted = request(str(i), f"{i} " * 20, max_tokens=3, logprobs=2)
                        await collect(client, wanted)

                await asyncio.gather(*(worker(start + i) for i in range(50)))

            await some(0, 1500)
            pid = supervisor.pid
            assert pid is not None
            before = memory(pid), memory(os.getpid())
            await some(1500, 3500)
            after = memory(pid), memory(os.getpid())
            snapshot = await idle(client)
            assert snapshot.counters.finished == {"length": 5000}
            for old, new in zip(before, after, strict=True):
                assert new - old < 6 << 20

        with_process(test)

    def test_nothing_on_disk_and_nobody_else_can_connect(self) -> None:
        """The engine listens nowhere: its socket has no name and came with the process."""

        async def test(client: EngineClient, supervisor: EngineSupervisor) -> None:
            pid = supervisor.pid
            found = [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()]
            mine = {name[8:-1] for name in found if name.startswith("socket:")}
            assert mine
            for table in ("tcp", "tcp6", "udp", "udp6", "raw"):
                path = Path(f"/proc/{pid}/net/{table}")
                rows = path.read_text().splitlines()[1:] if path.exists() else []
                assert not mine.intersection(row.split()[9] for row in rows)
            for row in Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]:
                fields = row.split()
                if fields[6] in mine:
                    assert len(fields) == 7  # no path, no abstract name
                    assert not int(fields[3], 16) & 0x10000  # not listening

        with_process(test)

    def test_log_probabilities_of_long_prompts(self) -> None:
        async def test(client: EngineClient, supervisor: EngineSupervisor) -> None:
            wanted = request("a", "x" * 2500, n=4, prompt_logprobs=20, max_tokens=1)
            outputs = await collect(client, wanted)
            assert [len(output.prompt_logprobs or ()) for output in outputs] == [2500] * 4
            with pytest.raises(CapacityError, match="prompt_logprobs"):
                await client.submit(request("b", "x" * 3000, n=128, prompt_logprobs=20))
            assert text_of(await collect(client, request("c", max_tokens=5))) == ENDLESS[:5]

        with_process(test)

    def test_a_model(self, model_path: Path) -> None:
        async def test(client: EngineClient, supervisor: EngineSupervisor) -> None:
            assert client.model.architecture == "llama"
            assert client.model.vocab_size == 49152
            outputs = await collect(client, request(max_tokens=4, temperature=0.0))
            assert outputs[-1].finish_reason in ("length", "stop")

        launch = Launch(config=EngineConfig(model=str(model_path)), seed=0)
        with_process(test, launch, module="billfish.server.engine_process")

    def test_a_model_that_is_not_there(self) -> None:
        async def test(client: EngineClient, supervisor: EngineSupervisor) -> None:
            with pytest.raises(EngineUnavailableError, match=r"nowhere\.gguf"):
                await client.wait_ready()
            assert (await client.health()).restarts == 0  # it would not help

        launch = Launch(config=EngineConfig(model="/nowhere.gguf"))
        with_process(test, launch, module="billfish.server.engine_process", ready=False)


class TestClientGone:
    """Blocks come back at every stage: queued, in prefill, in decode, not read."""

    @pytest.mark.parametrize("outputs_before", [0, 1, 20])
    def test_streaming(self, outputs_before: int) -> None:
        async def test(client: EngineClient, supervisor: EngineSupervisor) -> None:
            stream = await client.submit(request(max_tokens=4000))
            for _ in range(outputs_before):
                await anext(stream)
            await stream.aclose()
            assert (await idle(client)).counters.finished == {"abort": 1}

        with_process(test)

    @pytest.mark.usefixtures("any_loop")
    def test_queued_and_not_streaming(self) -> None:
        async def test(client: EngineClient, supervisor: EngineSupervisor) -> None:
            # More than there are seats, so that most are queued.
            tasks = [
                asyncio.ensure_future(collect(client, request(str(i), max_tokens=4000)))
                for i in range(300)
            ]
            while not (await client.health()).waiting:
                await asyncio.sleep(0.001)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            snapshot = await idle(client)
            assert snapshot.counters.finished == {"abort": 300}
            assert text_of(await collect(client, request(max_tokens=5))) == ENDLESS[:5]

        with_process(test)

    def test_at_random(self) -> None:
        """A third leave, whenever they like; the others get all of their text."""

        async def test(client: EngineClient, supervisor: EngineSupervisor) -> None:
            rng = random.Random(0)

            async def one(i: int, leaves_after: int | None) -> int:
                length = rng.randint(1, 60)
                stream = await client.submit(request(str(i), f"{i % 7} " * 30, max_tokens=length))
                text, count = "", 0
                async with stream:
                    async for output in stream:
                        if count == leaves_after:
                            return 0
                        text += output.text
                        count += 1
                assert text == (ENDLESS * 2)[:length]
                return 1

            for start in range(0, 600, 150):
                leavers = [rng.choice([None, None, rng.randint(0, 30)]) for _ in range(150)]
                ended = await asyncio.gather(
                    *(one(start + i, leaves) for i, leaves in enumerate(leavers))
                )
                assert sum(ended) >= leavers.count(None)
                await idle(client)

        with_process(test)


class TestEngineDies:
    @pytest.mark.usefixtures("any_loop")
    def test_killed_in_mid_stream(self) -> None:
        async def test(client: EngineClient, supervisor: EngineSupervisor) -> None:
            first = supervisor.pid
            assert first is not None
            streams = [await client.submit(request(str(i), max_tokens=4000)) for i in range(5)]
            await anext(streams[0])
            os.kill(first, signal.SIGKILL)
            for stream in streams:
                with pytest.raises(EngineDiedError, match="SIGKILL"):
                    async for _ in stream:
                        pass
            health = await client.health()
            assert health.state in ("dead", "starting")
            assert not health.accepting
            with pytest.raises(EngineUnavailableError):
                await client.submit(request())
            await client.wait_ready()
            assert supervisor.pid not in (None, first)
            assert (await client.health()).restarts == 1
            assert text_of(await collect(client, request(max_tokens=5))) == ENDLESS[:5]

        with_process(test)

    @pytest.mark.parametrize("how", ["!exit", "!garbage", "!huge"])
    @pytest.mark.usefixtures("any_loop")
    def test_other_deaths(self, how: str) -> None:
        async def test(client: EngineClient, supervisor: EngineSupervisor) -> None:
            neighbour = asyncio.ensure_future(
                collect(client, request("neighbour", max_tokens=4000))
            )
            with pytest.raises(EngineDiedError, match=r"status 3|protocol"):
                await collect(client, request("bad", how, max_tokens=4000))
            with pytest.raises(EngineDiedError):
                await neighbour
            await client.wait_ready()
            assert text_of(await collect(client, request(max_tokens=5))) == ENDLESS[:5]

        with_process(test)

    @pytest.mark.parametrize("how", ["!hang", "!spin"])
    def test_a_step_that_hangs_is_noticed(self, how: str) -> None:
        async def test(client: EngineClient, supervisor: EngineSupervisor) -> None:
            supervisor._watch = QUICK  # for the engine that comes after
            with pytest.raises(EngineDiedError, match="a step hangs"):
                await collect(client, request("bad", how))
            await client.wait_ready()
            assert text_of(await collect(client, request(max_tokens=5))) == ENDLESS[:5]

        with_process(test, watch=Watch(first_delay=0.01, answer=1.0))

    @pytest.mark.usefixtures("often_asked")
    def test_health_tells_of_a_long_step(self) -> None:
        """Neither "ready" while nothing moves, nor "dead" while it only takes long."""

        async def test(client: EngineClient, supervisor: EngineSupervisor) -> None:
            assert (await client.health()).state == "ready"
            hung = asyncio.ensure_future(collect(client, request("bad", "!hang")))
            while (health := await client.health()).state == "ready":
                await asyncio.sleep(0.02)
            assert (health.state, health.accepting) == ("busy", True)
            assert "no answer for" in health.detail
            hung.cancel()

        with_process(test)

    def test_a_step_that_fails_ends_its_requests_alone(self) -> None:
        async def test(client: EngineClient, supervisor: EngineSupervisor) -> None:
            pid = supervisor.pid
            outputs = await collect(client, request("bad", "!raise"))
            assert outputs[-1].finish_reason == "error"
            assert text_of(await collect(client, request(max_tokens=5))) == ENDLESS[:5]
            assert supervisor.pid == pid

        with_process(test)

    @pytest.mark.usefixtures("any_loop")
    def test_it_gives_up_and_says_why(self) -> None:
        async def test(client: EngineClient, supervisor: EngineSupervisor) -> None:
            with pytest.raises(EngineUnavailableError, match=r"status 3 .*3 times in a row"):
                await client.wait_ready()
            health = await client.health()
            assert (health.state, health.restarts) == ("dead", 2)
            with pytest.raises(EngineUnavailableError):
                await client.submit(request())

        watch = Watch(first_delay=0.01, give_up=3)
        with_process(test, LaunchFake(reply="!exit"), watch=watch, ready=False)

    @pytest.mark.parametrize(
        ("reply", "names"),
        [("!config", "a setting is wrong"), ("!capacity", "16 GB are asked for and 8 are there")],
    )
    def test_what_would_happen_again_is_not_tried_again(self, reply: str, names: str) -> None:
        async def test(client: EngineClient, supervisor: EngineSupervisor) -> None:
            with pytest.raises(EngineUnavailableError, match=names):
                await client.wait_ready()
            assert (await client.health()).restarts == 0

        with_process(test, LaunchFake(reply=reply), ready=False)

    def test_a_start_that_hangs_is_named(self) -> None:
        """No hang at the start without a cause."""

        async def test(client: EngineClient, supervisor: EngineSupervisor) -> None:
            while not (await client.health()).loaded:  # however long an interpreter takes
                await asyncio.sleep(0.01)
            object.__setattr__(watch, "load", 0.5)
            with pytest.raises(EngineUnavailableError, match="its start hangs"):
                await client.wait_ready()
            assert (await client.health()).loaded == 1

        watch = Watch(answer=1.0, give_up=1)
        with_process(test, LaunchFake(reply="!hang"), watch=watch, ready=False)

    def test_exit_statuses_in_words(self) -> None:
        assert describe(2) == "the engine's process ended with status 2"
        assert "SIGSEGV" in describe(-signal.SIGSEGV)
        assert "memory" in describe(-signal.SIGKILL)


class TestSigterm:
    @pytest.mark.usefixtures("any_loop")
    def test_of_the_engine_lets_run_what_runs(self) -> None:
        async def test(client: EngineClient, supervisor: EngineSupervisor) -> None:
            first = supervisor.pid
            assert first is not None
            stream = await client.submit(request(max_tokens=3000))
            begun = await anext(stream)  # as much as has come while this process waited
            os.kill(first, signal.SIGTERM)
            assert len(text_of([begun, *[output async for output in stream]])) == 3000
            while supervisor.pid == first:
                await asyncio.sleep(0.01)
            await client.wait_ready()
            assert text_of(await collect(client, request(max_tokens=5))) == ENDLESS[:5]

        with_process(test, LaunchFake(drain_seconds=600.0))

    @pytest.mark.usefixtures("often_asked")
    def test_the_deadline_of_a_drain(self) -> None:
        async def test(client: EngineClient, supervisor: EngineSupervisor) -> None:
            hung = asyncio.ensure_future(collect(client, request("bad", "!hang")))
            while (await client.health()).state == "ready":
                await asyncio.sleep(0.01)
            await client.drain(0.2)
            with pytest.raises(EngineUnavailableError, match="the server is ending"):
                await hung

        with_process(test)


@pytest.fixture
def small_server():
    """Starts `small_server` with a prompt; gives its process and its engine's id."""
    servers = []

    def start(prompt: str) -> tuple[subprocess.Popen[str], int]:
        server = subprocess.Popen(
            [sys.executable, "-m", "tests.server.small_server", prompt],
            cwd=ROOT, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        servers.append(server)
        assert server.stdout is not None
        pid = int(server.stdout.readline())
        assert server.stdout.readline().strip() in ("runs", prompt)
        return server, pid

    yield start
    for server in servers:
        server.kill()
        server.wait()
        server.stdout.close()


class TestNoOrphans:
    @pytest.mark.parametrize("turns", [0, 1, 2, 3, 5, 50])
    def test_stopped_while_it_starts(self, turns: int) -> None:
        async def run() -> None:
            supervisor = EngineSupervisor(LaunchFake(), watch=QUICK, module=MISBEHAVING)
            client = EngineClient(supervisor, byte_tokenizer)
            await client.start()
            for _ in range(turns):
                await asyncio.sleep(0)
            await client.close()

        before = children()
        asyncio.run(run())
        for pid in children() - before:
            wait_until_gone(pid)

    @pytest.mark.parametrize("prompt", ["Hello", "!hang", "!spin"])
    def test_after_the_server_was_killed(self, small_server, prompt: str) -> None:
        server, engine = small_server(prompt)
        assert alive(engine)
        server.kill()
        server.wait()
        wait_until_gone(engine)

    def test_after_sigterm_of_the_server(self, small_server) -> None:
        server, engine = small_server("Hello")
        server.terminate()
        text, _ = server.communicate(timeout=PATIENCE)
        assert server.returncode == 0
        assert int(text) == 4000  # what ran was let run
        wait_until_gone(engine)
