"""Engines over small random models, the same on a GPU and on the CPU, and requests for them."""

import random
from dataclasses import replace

import torch

from billfish import SamplingParams
from billfish.config import CacheConfig, ModelConfig, SchedulerConfig
from billfish.engine import Engine
from billfish.layers.attention import PagedAttention
from billfish.models import random_weights
from billfish.models.decoder import CausalLM
from billfish.worker.start import Setting, start

CUDA = torch.device("cuda", 0)


def shape(**changes) -> ModelConfig:
    return replace(random_weights.SHAPES["tiny"], **changes)


def made(config: ModelConfig, device: torch.device, dtype: torch.dtype, *, int4: bool) -> CausalLM:
    """The same bfloat16 numbers on each device and in each dtype."""
    model = random_weights.load_model(
        config, dtype=torch.bfloat16, device="cpu", max_len=512, int4=int4
    )
    angles = {
        module: module.cos_sin
        for module in model.modules()
        if isinstance(module, PagedAttention) and module.cos_sin is not None
    }
    model.to(device, dtype)
    for module, table in angles.items():  # stay in float32
        module.cos_sin = table.to(device)
    return model


def served(
    config: ModelConfig, device: torch.device = CUDA, *, int4: bool = True, overlap: bool = True,
    graphs: bool = True, waits: bool = False, num_blocks: int = 400, swap_blocks: int = 0,
    invariant: bool = False, prefix_caching: bool = True, dtype: torch.dtype = torch.bfloat16,
    head: str | None = None, **scheduler,
) -> Engine:  # fmt: skip
    """waits: each step is done before the next is planned, in whatever order they are planned."""
    scheduler = {"max_num_seqs": 8, "max_num_batched_tokens": 256} | scheduler
    settings = SchedulerConfig(max_model_len=512, equal_chunks=invariant, **scheduler)
    cache = CacheConfig(num_blocks=num_blocks, swap_blocks=swap_blocks)
    setting = Setting(
        config=config, dtype=dtype, device=device, cache=cache, scheduler=settings,
        vocab_size=config.vocab_size, int4=int4, graphs=graphs, batch_invariant=invariant,
        head=head,
    )  # fmt: skip
    started = start(setting, lambda most: made(config, device, dtype, int4=int4))
    executor = Waiting(started.executor) if waits else started.executor
    return Engine(
        executor, num_blocks=started.num_blocks, block_size=16,
        vocab_size=config.vocab_size, max_model_len=started.max_model_len, eos_token_ids=(0,),
        token_bytes=lambda token: b"t", scheduler=settings, swap_blocks=swap_blocks,
        overlap=overlap and device.type == "cuda", seed=0,
        prefix_caching=prefix_caching and not invariant,
    )  # fmt: skip


class Waiting:
    """An executor that computes nothing beside the host: what overlap must not change."""

    def __init__(self, executor) -> None:
        self.executor = executor

    def submit(self, plan):
        pending = self.executor.submit(plan)
        torch.cuda.synchronize()
        return pending


def requests(count: int, seed: int, **options) -> list[tuple[list[int], SamplingParams]]:
    rng = random.Random(seed)
    beginnings = [[rng.randrange(1, 512) for _ in range(48)] for _ in range(4)]
    made = []
    for number in range(count):
        prompt = rng.choice(beginnings)[: rng.randint(1, 48)]
        prompt = prompt + [rng.randrange(1, 512) for _ in range(rng.randint(0, 100))]
        choices = {
            "temperature": rng.choice((0.0, 0.0, 1.0, 0.6)), "top_p": rng.choice((1.0, 0.9)),
            "top_k": rng.choice((0, 20)), "min_p": rng.choice((0.0, 0.05)),
            "repetition_penalty": rng.choice((1.0, 1.0, 1.2)), "logprobs": rng.choice((None, 2)),
            "stop_token_ids": [rng.randrange(1, 512) for _ in range(4)],
        }  # fmt: skip
        params = SamplingParams(
            max_tokens=rng.randint(1, 40), seed=number, **{**choices, **options}
        )
        made.append((prompt, params))
    return made


def outputs(engine: Engine, batch, names=None) -> dict[str, tuple]:
    for number, (prompt, params) in enumerate(batch):
        engine.add_request(names[number] if names else str(number), prompt, params)
    final = {}
    while engine.has_unfinished:
        for output in engine.step():
            if output.finished:
                key = f"{output.request_id}/{output.index}"
                final[key] = (output.token_ids, output.finish_reason, output.logprobs)
    assert engine.stats().blocks_in_use == 0
    return final
