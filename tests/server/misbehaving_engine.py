"""An engine's process that does what it is told to in prompts: hang, die, raise, talk nonsense.

    python -m tests.server.misbehaving_engine SOCKET PIPE

A prompt that begins with one of these words, in a step that admits it:
    !hang  sleeps for ever     !spin  computes for ever, so that no other thread runs
    !exit  ends the process    !raise  raises
    !garbage  sends bytes that are no message     !huge  says that a message of 4 GiB follows
The reply of the launch, at the start:
    !exit, !raise, !hang as above     !config, !capacity  a setting is wrong
"""

import ctypes
import os
import sys
import time

from billfish.engine.plan import StepPlan
from billfish.errors import CapacityError, ConfigError
from billfish.server import engine_process, fake_engine
from billfish.server.connection import Connection
from billfish.server.engine_host import Host, Report
from billfish.server.messages import Launch, LaunchFake, ModelInfo

Connection.MAX_UNSENT = 1 << 21  # little, so that a test reaches it soon


def misbehave(word: str) -> None:
    if word.startswith("!"):
        print(word, flush=True)
    match word.rstrip():
        case "!hang":
            time.sleep(1000)
        case "!spin":
            ctypes.PyDLL(None).sleep(1000)  # a library's call that keeps the interpreter's lock
        case "!exit":
            os._exit(3)
        case "!raise":
            raise RuntimeError("told to")
        case "!garbage":
            os.write(int(sys.argv[1]), b"\0\0\0\3abc")
        case "!huge":
            os.write(int(sys.argv[1]), b"\xff\xff\xff\xff")
        case "!config":
            raise ConfigError("a setting is wrong")
        case "!capacity":
            raise CapacityError("16 GB are asked for and 8 are there")


def on_step(plan: StepPlan) -> None:
    for new in plan.admitted:
        misbehave(bytes(t for t in new.token_ids if t < 256).decode().partition(" ")[0])


def build(launch: Launch | LaunchFake, report: Report) -> tuple[Host, ModelInfo]:
    assert isinstance(launch, LaunchFake)
    report("loading the model", 1, 2)
    misbehave(launch.reply)
    executor = fake_engine.ScriptedExecutor(launch.reply, on_step)
    engine, model = fake_engine.make_engine(executor)
    return fake_engine.make_host(engine), model


if __name__ == "__main__":
    sys.exit(engine_process.main(sys.argv[1:], build))
