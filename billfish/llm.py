"""The offline API: text in, text out, many requests at once."""

import itertools
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from billfish.checkpoint.gguf import GGUFFile
from billfish.checkpoint.locate import DEMO_MODEL, locate
from billfish.config import CacheConfig, EngineConfig, SchedulerConfig
from billfish.engine import Engine, EngineStats, RequestOutput
from billfish.errors import CheckpointError, ConfigError, InvalidRequestError
from billfish.models import gguf as gguf_models
from billfish.quantization.gguf import INT4_TYPES
from billfish.sampling_params import SamplingParams
from billfish.tokenizer import from_gguf
from billfish.worker import ModelRunner, kv_cache

Prompt = str | Sequence[int]
"""A text, or the token ids of one."""
Conversation = Sequence[dict[str, Any]]
"""Messages with a "role" and a "content" each, oldest first."""
Progress = Callable[[int, int], None]
"""Called with (done, total)."""


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

    model: the path of a GGUF file, or "smollm2" for the demo model.
    dtype: of activations and KV cache: "bfloat16", "float32" or "float16".
    cache, scheduler: see `billfish.config`.
    seed: draws the seeds of requests that bring none; None takes one from the system.
    progress: called with (tensors loaded, tensors in all) while the model loads.

    Raises CheckpointError for a file that cannot be served, CapacityError for a cache too small,
    ConfigError for settings out of range.
    """

    def __init__(
        self,
        model: str = DEMO_MODEL,
        *,
        dtype: str = "bfloat16",
        cache: CacheConfig | None = None,
        scheduler: SchedulerConfig | None = None,
        seed: int | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.config = EngineConfig(
            model=model,
            dtype=dtype,
            cache=cache or CacheConfig(),
            scheduler=scheduler or SchedulerConfig(),
        )
        path = locate(model)
        with GGUFFile.open(path) as file:
            self.model_config = gguf_models.read_config(file)
            self.tokenizer = from_gguf(file.metadata, str(path))
            self.num_int4_layers = sum(info.type in INT4_TYPES for info in file.tensors.values())
            self._check_vocabulary(path)
            self.max_model_len = self._max_model_len()
            swap_blocks = self.config.cache.swap_blocks
            torch_dtype = getattr(torch, dtype)
            num_blocks = kv_cache.plan_num_blocks(self.model_config, self.config.cache, torch_dtype)
            network = gguf_models.load_model(
                file,
                self.model_config,
                dtype=torch_dtype,
                max_len=self.max_model_len,
                progress=progress,
            )
        self.executor = ModelRunner(
            network,
            self._allocate(num_blocks, self.config.device),
            vocab_size=self.tokenizer.vocab_size,
            max_num_seqs=self.config.scheduler.max_num_seqs,
            max_model_len=self.max_model_len,
            host_cache=self._allocate(swap_blocks, "cpu") if swap_blocks else None,
        )
        self.engine = Engine(
            self.executor,
            num_blocks=num_blocks,
            block_size=self.config.cache.block_size,
            vocab_size=self.tokenizer.vocab_size,
            max_model_len=self.max_model_len,
            eos_token_ids=self.tokenizer.eos_token_ids,
            token_bytes=self.tokenizer.token_bytes,
            scheduler=self.config.scheduler,
            prefix_caching=self.config.cache.prefix_caching,
            swap_blocks=swap_blocks,
            seed=seed,
        )
        self._request_numbers = itertools.count()
        self._inboxes: dict[str, Inbox] = {}

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

        params: one for all, or one each. cache_salt: keeps what these prompts leave in the prefix
        cache from requests that do not bring the same one. progress: called with (finished,
        outputs). Raises InvalidRequestError or CapacityError if any request is wrong, before any of
        them starts.
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
    ) -> Stream:
        """As `generate`, but yields (index of the prompt, output so far) as tokens come.

        Requests start at the first `next`; closing the iterator aborts those that are not done.
        """
        return self._stream(self._requests(self._prompt_ids(prompts), params), cache_salt)

    def stream_chat(
        self,
        conversations: Conversation | Sequence[Conversation],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        cache_salt: str | None = None,
    ) -> Stream:
        """As `chat`, but yields as `stream` does."""
        requests = self._requests(self._conversation_ids(conversations), params)
        return self._stream(requests, cache_salt)

    def stats(self) -> EngineStats:
        """The engine's counters since it started."""
        return self.engine.stats()

    def _allocate(self, num_blocks: int, device: str) -> torch.Tensor:
        dtype = getattr(torch, self.config.dtype)
        return kv_cache.allocate(self.model_config, self.config.cache, num_blocks, dtype, device)

    def _check_vocabulary(self, path: Path) -> None:
        tokens, rows = self.tokenizer.vocab_size, self.model_config.vocab_size
        if tokens > rows:
            raise CheckpointError(
                str(path), f"the tokenizer has {tokens} tokens, the embedding only {rows} rows"
            )

    def _max_model_len(self) -> int:
        asked, most = self.config.scheduler.max_model_len, self.model_config.context_length
        if asked is not None and asked > most:
            raise ConfigError(
                f"max_model_len {asked} is more than the model's context of {most} tokens"
            )
        return asked or most

    def _prompt_ids(self, prompts: Prompt | Sequence[Prompt]) -> list[Sequence[int]]:
        one = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))
        each: Sequence[Any] = [prompts] if one else prompts
        return [self.tokenizer.encode(p) if isinstance(p, str) else p for p in each]

    def _conversation_ids(
        self, conversations: Conversation | Sequence[Conversation]
    ) -> list[Sequence[int]]:
        one = len(conversations) > 0 and isinstance(conversations[0], dict)
        each: Sequence[Any] = [conversations] if one else conversations
        return [self.tokenizer.encode_chat(messages) for messages in each]

    def _requests(
        self,
        prompts: list[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[tuple[Sequence[int], SamplingParams]]:
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompts)
        if len(params) != len(prompts):
            raise InvalidRequestError(
                "params", f"got {len(params)} for {len(prompts)} prompts; give one, or one each"
            )
        return list(zip(prompts, params, strict=True))

    def _run(
        self,
        requests: list[tuple[Sequence[int], SamplingParams]],
        cache_salt: str | None,
        progress: Progress | None,
    ) -> list[RequestOutput]:
        total = sum(params.n for _, params in requests)
        finished: dict[tuple[int, int], RequestOutput] = {}
        for index, output in self._stream(requests, cache_salt):
            if output.finished:
                finished[index, output.index] = output
                if progress:
                    progress(len(finished), total)
        return [finished[place] for place in sorted(finished)]

    def _stream(
        self, requests: list[tuple[Sequence[int], SamplingParams]], cache_salt: str | None
    ) -> Stream:
        # Streams may be interleaved: whoever steps the engine delivers to all of them.
        inbox: deque[tuple[int, RequestOutput]] = deque()
        mine: list[str] = []
        unfinished = 0
        try:
            for index, (prompt, params) in enumerate(requests):
                request_id = str(next(self._request_numbers))
                self.engine.add_request(request_id, prompt, params, cache_salt=cache_salt)
                self._inboxes[request_id] = Inbox(inbox, index, params.n)
                mine.append(request_id)
                unfinished += params.n
            while unfinished:
                while not inbox:
                    self._step()
                index, output = inbox.popleft()
                unfinished -= output.finished
                yield index, output
        finally:
            for request_id in mine:
                if self._inboxes.pop(request_id, None):
                    self.engine.abort(request_id)
            if not self._inboxes and self.engine.has_unfinished:
                self._step()  # no one else will: tells the executor to forget what was aborted

    def _step(self) -> None:
        for output in self.engine.step():
            place = self._inboxes[output.request_id]
            place.unfinished -= output.finished
            if not place.unfinished:
                del self._inboxes[output.request_id]
            place.outputs.append((place.prompt, output))
