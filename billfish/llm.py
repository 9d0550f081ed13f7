"""The offline API: text in, text out, many requests at once."""

import itertools
import logging
import os
import signal
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from billfish.checkpoint.locate import DEMO_MODEL
from billfish.config import CacheConfig, EngineConfig, SchedulerConfig
from billfish.engine import Engine, EngineStats, RequestOutput
from billfish.errors import CapacityError, ConfigError, InvalidRequestError, shown
from billfish.loading import OpenModel, open_model
from billfish.models.weights import LoadOptions
from billfish.sampling_params import SamplingParams
from billfish.worker.device import choose
from billfish.worker.grammar import GrammarCompiler
from billfish.worker.start import Setting, Started, start

logger = logging.getLogger(__name__)

Prompt = str | Sequence[int]
"""A text, or the token ids of one."""
Conversation = Sequence[dict[str, Any]]
"""Messages with a "role" and a "content" each, oldest first."""
Progress = Callable[[int, int], None]
"""Called with (done, total)."""


Cancelled = Callable[[], bool]
"""Asked between steps; once it says yes, what is not done is aborted and the stream ends."""
TokenSequences = Sequence[Sequence[int]]
Submission = tuple[Sequence[int], SamplingParams, TokenSequences]
"""Prompt, options and token ids of the bad words of one request."""
Stream = Generator[tuple[int, RequestOutput], None, None]
"""Yields (index of the prompt, output so far); closing it aborts what is not done."""


@dataclass(slots=True)
class Inbox:
    """Where the outputs of one request go: those of a stream share it.

    prompt: its index among the prompts. unfinished: samples that have not ended.
    """

    outputs: deque[tuple[int, RequestOutput]]
    prompt: int
    unfinished: int


class LLM:
    """A model, its tokenizer and the engine that serves it. For one thread at a time.

    model: the path of a GGUF file or of a Hugging Face directory, a repository of the Hugging Face
    Hub ("organization/model"), or "smollm2" for the demo model.
    dtype: of activations and KV cache: "bfloat16", "float32" or "float16".
    device: "auto" takes a GPU where one can be used; "cpu"; "cuda", or "cuda:1". batch_invariant:
    what a request gets does not depend on the requests beside it; slower. head: "int8" or "int4"
    rounds a dense head, which reads less.
    quantize: "int4" rounds the linear layers that are not INT4 in the model's files, all but the
    head, to the nearest INT4 weights with a scale for each 128; what that costs is logged and in
    `rounding`. None keeps them.
    cache, scheduler: see `billfish.config`.
    seed: draws the seeds of requests that bring none; None takes one from the system.
    progress: called with (tensors loaded, tensors in all) while the model loads.

    default_params: the options of requests that bring none: those of SamplingParams, with what the
    model's file asks for in place of some (`checkpoint_defaults`, logged at start). Options that a
    request brings are used as they are; to change some and keep the rest, use
    `dataclasses.replace(llm.default_params, temperature=0.2)`.

    Raises CheckpointError for a file that cannot be served, CapacityError for a cache too small,
    ConfigError for settings out of range.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] = DEMO_MODEL,
        *,
        dtype: str = "bfloat16",
        device: str = "auto",
        batch_invariant: bool = False,
        head: str | None = None,
        quantize: str | None = None,
        cache: CacheConfig | None = None,
        scheduler: SchedulerConfig | None = None,
        seed: int | None = None,
        progress: Progress | None = None,
    ) -> None:
        if not isinstance(model, str | os.PathLike):
            raise ConfigError(f"model must be a path or a name, got {shown(model)}")
        self.config = EngineConfig(
            model=os.fspath(model),
            dtype=dtype,
            device=device,
            batch_invariant=batch_invariant,
            head=head,
            quantize=quantize,
            cache=CacheConfig() if cache is None else cache,
            scheduler=SchedulerConfig() if scheduler is None else scheduler,
        )
        self.device = choose(device, getattr(torch, dtype))
        if self.device.type == "cuda":
            self.config = replace(self.config, scheduler=self.config.scheduler.on_gpu())
        if batch_invariant:
            self.config = self.config.invariant()
        with open_model(self.config.model) as opened:
            self.model_config, self.tokenizer = opened.config, opened.tokenizer
            self.checkpoint_defaults = opened.sampling_defaults
            self.grammars = GrammarCompiler(self.tokenizer)
            started = self._start(opened, progress)
        self.num_int4_layers, self.rounding = opened.num_int4_layers, opened.rounding
        self.executor, self.memory_plan = started.executor, started.plan
        self.max_model_len = started.max_model_len
        self.engine = Engine(
            self.executor,
            num_blocks=started.num_blocks,
            block_size=self.config.cache.block_size,
            vocab_size=self.tokenizer.vocab_size,
            max_model_len=self.max_model_len,
            eos_token_ids=self.tokenizer.eos_token_ids,
            token_bytes=self.tokenizer.token_bytes,
            named_token_bytes=self.tokenizer.named_token_bytes,
            scheduler=self.config.scheduler,
            prefix_caching=self.config.cache.prefix_caching,
            swap_blocks=self.config.cache.swap_blocks,
            overlap=self.device.type == "cuda",
            seed=seed,
        )
        self.default_params = SamplingParams(**self.checkpoint_defaults.options)
        if self.checkpoint_defaults:
            logger.info("%s", self.checkpoint_defaults)
        if self.rounding:
            logger.info("%s", self.rounding)
        self._request_numbers = itertools.count()
        self._inboxes: dict[str, Inbox] = {}

    def _start(self, opened: OpenModel, progress: Progress | None) -> Started:
        """Bring the model up on the device, as the configuration says."""
        config, dtype = self.config, getattr(torch, self.config.dtype)
        options = LoadOptions(dtype, self.device, config.quantize, progress)
        setting = Setting(
            config=opened.config,
            dtype=dtype,
            device=self.device,
            cache=config.cache,
            scheduler=config.scheduler,
            vocab_size=opened.tokenizer.vocab_size,
            int4=opened.int4 or config.quantize is not None,
            grammars=self.grammars,
            batch_invariant=config.batch_invariant,
            head=config.head,
        )
        return start(setting, lambda max_len: opened.load(max_len, options))

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        cache_salt: str | None = None,
        progress: Progress | None = None,
    ) -> list[RequestOutput]:
        """Continues each prompt; the outputs come in the order of the prompts.

        A prompt with `n` > 1 has n outputs, one after the other in the order of their `index`.

        params: one for all, or one each; without, `default_params`. cache_salt: keeps what these
        prompts leave in the prefix cache from requests that do not bring the same one. progress:
        called with (finished, outputs). Raises InvalidRequestError or CapacityError if any request
        is wrong, before any of them starts.
        """
        requests = self._requests(self._prompt_ids(prompts), params)
        return self._run(requests, cache_salt, progress)

    def chat(
        self,
        conversations: Conversation | Sequence[Conversation],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        cache_salt: str | None = None,
        progress: Progress | None = None,
    ) -> list[RequestOutput]:
        """Answers each conversation through the model's chat template; otherwise as `generate`."""
        requests = self._requests(self._conversation_ids(conversations), params)
        return self._run(requests, cache_salt, progress)

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        cache_salt: str | None = None,
        cancelled: Cancelled | None = None,
    ) -> Stream:
        """As `generate`, but yields (index of the prompt, output so far) as tokens come.

        Requests start at the first `next`; closing the iterator aborts those that are not done.
        """
        requests = self._requests(self._prompt_ids(prompts), params)
        return self._stream(requests, cache_salt, cancelled)

    def stream_chat(
        self,
        conversations: Conversation | Sequence[Conversation],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        cache_salt: str | None = None,
        cancelled: Cancelled | None = None,
    ) -> Stream:
        """As `chat`, but yields as `stream` does."""
        requests = self._requests(self._conversation_ids(conversations), params)
        return self._stream(requests, cache_salt, cancelled)

    def sleep(self) -> None:
        """Give a GPU's memory back until `wake`: weights wait in host memory, what the prefix cache
        held is lost. InvalidRequestError while requests are unfinished, ConfigError on a CPU,
        CapacityError where the host has no room for the weights: then nothing has changed."""
        self.engine.sleep()

    def wake(self) -> None:
        """Serve again after `sleep`, with the same answers. CapacityError where others have taken
        the memory meanwhile: it sleeps on, and may be woken again."""
        self.engine.wake()

    def stats(self) -> EngineStats:
        """The engine's counters since it started."""
        return self.engine.stats()

    def _prompt_ids(self, prompts: Prompt | Sequence[Prompt]) -> list[Sequence[int]]:
        _check_sequence("prompts", prompts, "a text, token ids, or a list of either")
        one = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))
        each: Sequence[Any] = [prompts] if one else prompts
        return [self.tokenizer.encode(p) if isinstance(p, str) else p for p in each]

    def _conversation_ids(
        self, conversations: Conversation | Sequence[Conversation]
    ) -> list[Sequence[int]]:
        _check_sequence("conversations", conversations, "messages, or a list of conversations")
        one = len(conversations) > 0 and isinstance(conversations[0], dict)
        each: Sequence[Any] = [conversations] if one else conversations
        return [self.tokenizer.encode_chat(messages) for messages in each]

    def _requests(
        self,
        prompts: list[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[Submission]:
        if params is None or isinstance(params, SamplingParams):
            params = [params or self.default_params] * len(prompts)
        _check_sequence("params", params, "SamplingParams, or a list of them")
        if len(params) != len(prompts):
            raise InvalidRequestError(
                "params", f"got {len(params)} for {len(prompts)} prompts; give one, or one each"
            )
        for structured in {each.structured for each in params if isinstance(each, SamplingParams)}:
            if structured is not None:
                self.grammars.compile(structured)
        return [
            (prompt, each, self._bad_word_ids(each))
            for prompt, each in zip(prompts, params, strict=True)
        ]

    def _bad_word_ids(self, params: SamplingParams) -> TokenSequences:
        # What is no SamplingParams at all the engine refuses, by name.
        words = params.bad_words if isinstance(params, SamplingParams) else ()
        return self.tokenizer.bad_word_ids(words)

    def _run(
        self, requests: list[Submission], cache_salt: str | None, progress: Progress | None
    ) -> list[RequestOutput]:
        finished: dict[tuple[int, int], RequestOutput] = {}
        total = 0
        for index, output in self._stream(requests, cache_salt):
            total = total or _count_samples(requests)
            if output.finished:
                finished[index, output.index] = output
                if progress:
                    progress(len(finished), total)
        return [finished[place] for place in sorted(finished)]

    def _stream(
        self,
        requests: list[Submission],
        cache_salt: str | None,
        cancelled: Cancelled | None = None,
    ) -> Stream:
        # Streams may be interleaved: whoever steps the engine delivers to all of them.
        inbox: deque[tuple[int, RequestOutput]] = deque()
        mine: list[str] = []
        try:
            self._add(requests, cache_salt, inbox, mine)
            unfinished = _count_samples(requests)
            while unfinished:
                while not inbox:
                    if cancelled is not None and cancelled():
                        return
                    self._step()
                index, output = inbox.popleft()
                unfinished -= output.finished
                yield index, output
        finally:
            self._drop(mine)

    def _add(
        self,
        requests: list[Submission],
        cache_salt: str | None,
        inbox: deque[tuple[int, RequestOutput]],
        mine: list[str],
    ) -> None:
        """Queue the requests; their ids go to mine, where they are found if one is refused."""
        for index, (prompt, params, bad_word_ids) in enumerate(requests):
            request_id = str(next(self._request_numbers))
            try:
                with interrupts_wait():
                    self.engine.add_request(
                        request_id, prompt, params, bad_word_ids=bad_word_ids, cache_salt=cache_salt
                    )
                    self._inboxes[request_id] = Inbox(inbox, index, params.n)
                    mine.append(request_id)
            except (InvalidRequestError, CapacityError) as error:
                if len(requests) > 1:
                    error.args = (f"prompt {index}: {error}",)
                raise

    def _step(self) -> None:
        with interrupts_wait():
            for output in self.engine.step():
                place = self._inboxes.get(output.request_id)
                if place is None:  # its stream was collected while the step ran
                    continue
                place.unfinished -= output.finished
                if not place.unfinished:
                    del self._inboxes[output.request_id]
                place.outputs.append((place.prompt, output))

    def _drop(self, mine: list[str]) -> None:
        """Abort what is not done; the executor learns of it with the next step."""
        with interrupts_wait():
            for request_id in mine:
                if self._inboxes.pop(request_id, None):
                    self.engine.abort(request_id)
        while not self._inboxes and self.engine.has_unfinished:
            self._step()


def _count_samples(requests: list[Submission]) -> int:
    return sum(params.n for _, params, _ in requests)


@contextmanager
def interrupts_wait() -> Iterator[None]:
    """Holds Ctrl-C back until the end: raised in the middle of a step, at any line whatever, it
    would leave the engine and the executor with different ideas of what was done."""
    if not hasattr(signal, "pthread_sigmask"):  # not a POSIX system
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _check_sequence(name: str, value: object, expected: str) -> None:
    if not isinstance(value, Sequence) or isinstance(value, bytes | bytearray | memoryview):
        raise InvalidRequestError(name, f"must be {expected}, got {type(value).__name__}")
