"""Engines without a model, for tests of the server; `build` is what an engine's process runs.

The tokens are scripted, all else is real: the scheduler, the KV blocks, stop strings, `n`, errors,
metrics. The vocabulary is the 256 bytes, so that a character may span several tokens.
"""

import asyncio
import re
from collections.abc import Callable, Sequence
from contextlib import suppress

from billfish.config import SchedulerConfig
from billfish.engine import Engine
from billfish.engine.logprobs import PromptLogprobs, TokenLogprobs
from billfish.engine.plan import StepPlan, StepResult
from billfish.sampling_params import SamplingParams
from billfish.server.engine_client import EngineClient
from billfish.server.engine_host import EngineHost, Host
from billfish.server.instant_host import InstantHost
from billfish.server.messages import (
    Ask,
    Drain,
    FromEngine,
    LaunchFake,
    Loading,
    ModelInfo,
    Ready,
    ToEngine,
    decode_from_engine,
    decode_to_engine,
    encode,
)
from billfish.tokenizer import Tokenizer
from billfish.tokenizer.chat_template import ChatTemplate
from billfish.tokenizer.tokenizer import Vocabulary

SPOKEN = ("[TOOL_CALLS]", "[ARGS]")
"""Control tokens that a reply may hold, by name: those of Mistral's tool calls."""
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *SPOKEN)
VOCAB_SIZE = 256 + len(CONTROL)
EOS = 256 + CONTROL.index("<|im_end|>")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ENDLESS = "All work and no play makes Jack a dull boy. "

Reply = str | Callable[[str], str]
"""What the fake model answers: one text for all, or a function of the prompt's text."""


def byte_tokenizer() -> Tokenizer:
    """Bytes as tokens 0 to 255, then control tokens."""
    control = {text: 256 + i for i, text in enumerate(CONTROL)}
    vocabulary = Vocabulary(
        texts=[*(f"<0x{byte:02X}>" for byte in range(256)), *CONTROL],
        token_bytes=[*(bytes((byte,)) for byte in range(256)), *(b"" for _ in CONTROL)],
        control=control,
        user_defined={},
        bos_token_id=None,
        eos_token_ids=(EOS, 256),
        control_ids=frozenset(control.values()),
    )
    template = ChatTemplate(TEMPLATE, "fake")
    return Tokenizer(vocabulary, lambda text, place: list(text.encode()), template)


class ScriptedExecutor:
    """Answers each sequence with the bytes of a reply, then the end-of-sequence token.

    reply: "" goes on for ever, until max_tokens. on_step: called before each step, and may raise.
    """

    def __init__(
        self, reply: Reply = "", on_step: Callable[[StepPlan], None] | None = None
    ) -> None:
        self.reply = reply
        self.on_step = on_step
        self._sequences: dict[str, tuple[SamplingParams, list[int], Sequence[int], int]] = {}

    def execute(self, plan: StepPlan) -> StepResult:
        if self.on_step is not None:
            self.on_step(plan)
        result = StepResult(plan.step)
        for request_id in plan.released:
            self._sequences.pop(request_id, None)
        for new in plan.admitted:
            prompt, generated = new.token_ids[: new.num_prompt_tokens], len(new.token_ids)
            script = self._script(prompt)
            position = generated - new.num_prompt_tokens
            self._sequences[new.request_id] = (new.sampling, list(prompt), script, position)
        for fork in plan.forks:
            self._sequences[fork.request_id] = self._sequences[fork.source]
        for work in plan.work:
            sampling, prompt_ids, _, _ = self._sequences[work.request_id]
            if sampling.prompt_logprobs is not None and work.start + 1 < len(prompt_ids):
                some = prompt_ids[work.start + 1 : work.start + work.num_tokens + 1]
                found = tuple(fake_logprobs(t, sampling.prompt_logprobs) for t in some)
                result.prompt_logprobs[work.request_id] = PromptLogprobs(work.start + 1, found)
        due = [work.request_id for work in plan.work if work.samples]
        for request_id in (*due, *(fork.request_id for fork in plan.forks)):
            self._choose(request_id, result)
        return result

    def _choose(self, request_id: str, result: StepResult) -> None:
        sampling, prompt, script, position = self._sequences[request_id]
        if position < len(script):
            token_id = script[position]
        else:
            token_id = EOS if self.reply else ENDLESS.encode()[position % len(ENDLESS)]
        self._sequences[request_id] = (sampling, prompt, script, position + 1)
        result.token_ids[request_id] = token_id
        if sampling.logprobs is not None:
            result.logprobs[request_id] = fake_logprobs(token_id, sampling.logprobs)

    def _script(self, prompt: Sequence[int]) -> Sequence[int]:
        if isinstance(self.reply, str):
            return _spoken(self.reply)
        text = bytes(token_id for token_id in prompt if token_id < 256)
        return _spoken(self.reply(text.decode(errors="replace")))


def _spoken(reply: str) -> list[int]:
    parts = re.split("|".join(f"({re.escape(mark)})" for mark in SPOKEN), reply)
    ids: list[int] = []
    for part in filter(None, parts):
        ids += [256 + CONTROL.index(part)] if part in SPOKEN else part.encode()
    return ids


def fake_logprobs(token_id: int, count: int) -> TokenLogprobs:
    """The token is the likeliest, and so many in all are told."""
    ids = [token_id, *(i for i in range(count) if i != token_id)][:count]
    return TokenLogprobs(token_id, -0.5, 1, tuple((t, -0.5 - i) for i, t in enumerate(ids)))


def make_engine(
    executor: ScriptedExecutor,
    *,
    num_blocks: int = 4096,
    block_size: int = 16,
    max_model_len: int = 4096,
    scheduler: SchedulerConfig | None = None,
) -> tuple[Engine, ModelInfo]:
    """A real engine over scripted tokens, and what it says of itself."""
    scheduler = scheduler or SchedulerConfig(max_num_batched_tokens=8192, max_num_seqs=256)
    tokenizer = byte_tokenizer()
    engine = Engine(
        executor,
        num_blocks=num_blocks,
        block_size=block_size,
        vocab_size=VOCAB_SIZE,
        max_model_len=max_model_len,
        eos_token_ids=(EOS, 256),
        token_bytes=tokenizer.token_bytes,
        named_token_bytes=tokenizer.named_token_bytes,
        scheduler=scheduler,
        seed=0,
    )
    model = ModelInfo(
        name="fake",
        architecture="scripted",
        dtype="none",
        vocab_size=VOCAB_SIZE,
        max_model_len=engine.max_model_len,
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=scheduler.seats,
        max_waiting=scheduler.max_waiting,
        eos_token_ids=(EOS, 256),
    )
    return engine, model


def make_host(engine: Engine) -> EngineHost:
    """The reply is scripted, whatever form is asked for."""
    return EngineHost(engine, lambda structured: None)


def build(launch: LaunchFake) -> tuple[Host, ModelInfo]:
    """What the engine's process runs for a LaunchFake."""
    engine, model = make_engine(ScriptedExecutor(launch.reply))
    if launch.instant:
        return InstantHost(launch.step_seconds, engine.stats()), model
    return make_host(engine), model


class FakeEngine(EngineClient):
    """An EngineClient whose engine is in this process, on this event loop.

    reply: what it answers (see ScriptedExecutor). The settings of `make_engine` limit it. Messages
    are encoded and decoded as if they went to another process.

    pause, resume: between two steps, so that a test needs no sleep to act while requests run.
    die, revive: as if the process had been killed, and started again. start_by_hand: `start` leaves
    it "starting" until `revive`.
    """

    def __init__(
        self,
        reply: Reply = "Hello! I am a fake model, and this is all I say. 🐟",
        *,
        start_by_hand: bool = False,
        max_requests: int = 4096,
        num_blocks: int = 4096,
        block_size: int = 16,
        max_model_len: int = 4096,
        scheduler: SchedulerConfig | None = None,
    ) -> None:
        self.executor = ScriptedExecutor(reply)
        engine, model = make_engine(
            self.executor,
            num_blocks=num_blocks,
            block_size=block_size,
            max_model_len=max_model_len,
            scheduler=scheduler,
        )
        self.host = make_host(engine)
        self._local = _LocalBackend(self.host, model, start_by_hand)
        super().__init__(self._local, byte_tokenizer, max_requests=max_requests)

    def pause(self) -> None:
        self._local.gate.clear()

    @property
    def paused(self) -> bool:
        return not self._local.gate.is_set()

    def resume(self) -> None:
        self._local.gate.set()

    def die(self, reason: str = "the engine's process was killed by SIGKILL") -> None:
        self._local.die(reason)

    def revive(self) -> None:
        self._local.ready()


class _LocalBackend:
    """Runs an EngineHost in a task of the event loop."""

    receive: Callable[[FromEngine], None]
    lost: Callable[[str, bool], None]
    silent_seconds = 0.0
    unsent_bytes = 0

    def __init__(self, host: EngineHost, model: ModelInfo, start_by_hand: bool) -> None:
        self._host = host
        self._model = model
        self._start_by_hand = start_by_hand
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.gate = asyncio.Event()
        self.gate.set()

    async def start(self) -> None:
        self.receive(Loading("loading weights", 0, 1))
        if not self._start_by_hand:
            self.ready()

    def ready(self) -> None:
        self.receive(Ready(self._model))
        if self._task is None:
            self._loop = asyncio.get_running_loop()
            self._host.wake = self._wake_soon
            self._task = self._loop.create_task(self._run())

    def _wake_soon(self) -> None:
        """Called by a thread that has compiled a grammar."""
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._wake.set)

    def die(self, reason: str) -> None:
        self._host.abort_all()
        self.lost(reason, True)

    def send(self, message: ToEngine) -> None:
        self._host.handle(decode_to_engine(encode(message)))
        if isinstance(message, Drain):
            self.gate.set()
        if isinstance(message, Ask) and not self.gate.is_set():  # answered between two steps
            for answer in self._host.say([]):
                self.receive(decode_from_engine(encode(answer)))
        self._wake.set()

    async def stop(self) -> None:
        self._host.abort_all()
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def _run(self) -> None:
        while True:
            if not self._host.busy:
                self._wake.clear()
                await self._wake.wait()
            await self.gate.wait()
            for message in self._host.step():
                self.receive(decode_from_engine(encode(message)))
            await asyncio.sleep(0)
