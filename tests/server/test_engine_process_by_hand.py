"""The engine's process, spoken to by hand: at rest, cut off from its parent, and told nonsense."""

import signal
import socket

import pytest

from billfish.server.frames import frame
from billfish.server.messages import (
    Failed,
    FromEngine,
    LaunchFake,
    Loading,
    Outputs,
    Ping,
    Ready,
    Submit,
    encode,
)
from tests.server.live import PATIENCE
from tests.server.processes import (
    NEEDS_PROC,
    RawEngine,
    memory,
    request,
)

pytestmark = NEEDS_PROC


class TestAtRest:
    def test_an_idle_engine_uses_no_processor(self) -> None:
        with RawEngine(LaunchFake(), Submit(request(max_tokens=5))) as engine:
            engine.read_until(Outputs)
            assert engine.seconds_while_quiet() < 0.1

    def test_a_server_that_does_not_read_makes_it_pause_and_loses_nothing(self) -> None:
        names = [str(i) for i in range(12)]
        messages = [Submit(request(name, max_tokens=2500, logprobs=20)) for name in names]
        with RawEngine(LaunchFake(), *messages) as engine:
            assert engine.seconds_while_quiet() < 0.1
            assert memory(engine.process.pid) < 200 << 20
            paused = engine.seconds()
            texts: dict[str, int] = dict.fromkeys(names, 0)
            left = len(names)
            while left:
                for message in engine.read():
                    for output in message.outputs if isinstance(message, Outputs) else ():
                        texts[output.request_id] += len(output.text)
                        left -= output.finished
            assert set(texts.values()) == {2500}
            assert engine.seconds() - paused > 0.1  # most was made only then


class TestDeathPipe:
    """Without help of the kernel, as where there is no PR_SET_PDEATHSIG: the parent lives on."""

    @pytest.mark.parametrize("prompt", ["Hello", "!hang"])
    def test_it_ends_when_the_pipe_closes(self, prompt: str) -> None:
        with RawEngine(LaunchFake(), Submit(request(prompt=prompt, max_tokens=4000))) as engine:
            engine.read_until(Ready)
            engine.close_pipe()
            assert engine.process.wait(timeout=PATIENCE) == -signal.SIGKILL

    def test_while_it_starts(self) -> None:
        with RawEngine(LaunchFake(reply="!hang")) as engine:
            engine.read_until(Loading)
            engine.close_pipe()
            assert engine.process.wait(timeout=PATIENCE) == -signal.SIGKILL


class TestHostileBytes:
    """To the engine: it says what is wrong, ends, and leaves nothing behind."""

    def talk(self, *pieces: bytes) -> tuple[int, list[FromEngine]]:
        """Starts an engine's process and says this; its exit status and what it said."""
        with RawEngine() as engine:
            engine.socket.sendall(b"".join(pieces))
            engine.socket.shutdown(socket.SHUT_WR)
            messages: list[FromEngine] = []
            while more := engine.read():
                messages += more
            return engine.process.wait(timeout=PATIENCE), messages

    @pytest.mark.parametrize(
        ("data", "names"),
        [
            (b"\xff\xff\xff\xff", "4294967295 bytes"),
            (b"\0\0\0\3abc", "not a message"),
            (b"\0\0\0\0", "not a message"),
            (frame(encode(Ping(1)).replace(b"Ping", b"Pong")), "not a message"),
            (frame(b"\x92\xa4Ping\xa1x"), "not a message"),
            (frame(b"\x93\xa4Ping" * 10_000), "not a message"),
            (frame(b"\x91" * 100_000), "not a message"),
            (frame(encode(LaunchFake())), "runs already"),
        ],
    )
    def test_what_is_no_message(self, data: bytes, names: str) -> None:
        status, messages = self.talk(frame(encode(LaunchFake())), data)
        assert status == 1
        assert isinstance(messages[-1], Failed)
        assert names in messages[-1].problem.message

    @pytest.mark.parametrize("data", [b"", b"\0", b"\0\0\0\5ab"])
    def test_what_is_cut_off(self, data: bytes) -> None:
        status, messages = self.talk(frame(encode(LaunchFake())), data)
        assert status == 0
        assert not any(isinstance(message, Failed) for message in messages)

    def test_something_else_first(self) -> None:
        status, messages = self.talk(frame(encode(Ping(1))))
        assert status == 1
        assert isinstance(messages[-1], Failed)
