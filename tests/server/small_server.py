"""A server's process without HTTP: python -m tests.server.small_server PROMPT

Starts an engine and prints its process id, and another line once a request with this prompt runs.
Drains on SIGTERM.
"""

import asyncio
import signal
import sys

from billfish.sampling_params import SamplingParams
from billfish.server.engine_client import EngineClient
from billfish.server.fake_engine import byte_tokenizer
from billfish.server.messages import EngineRequest, LaunchFake
from billfish.server.supervisor import EngineSupervisor
from tests.server.live import PATIENCE


async def main(prompt: str) -> None:
    engine = EngineSupervisor(LaunchFake(), module="tests.server.misbehaving_engine")
    client = EngineClient(engine, byte_tokenizer)
    await client.start()
    await client.wait_ready()
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    request = EngineRequest(
        request_id="a",
        prompt_token_ids=tuple(prompt.encode()),
        sampling=SamplingParams(max_tokens=4000),
    )
    print(engine.pid, flush=True)
    running = asyncio.ensure_future(client.submit(request))
    if not prompt.startswith("!"):  # then the engine says itself that it has got it
        stream = await running
        print("runs", flush=True)
    await ended.wait()
    drained = asyncio.ensure_future(client.drain(PATIENCE))
    text = "".join([output.text async for output in stream])
    await drained
    print(len(text), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
