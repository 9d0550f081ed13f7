"""The engine on a GPU: the demo model against float32, and small random models of many shapes.

The demo model is looked for where it is installed, and at .carry/smollm2.gguf.
"""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from billfish import LLM, SamplingParams
from billfish.checkpoint.locate import DEMO_MODEL, locate
from billfish.config import CacheConfig, LayerConfig, ModelConfig, RopeConfig, SchedulerConfig
from billfish.engine import Engine
from billfish.errors import CapacityError, CheckpointError
from billfish.layers.attention import PagedAttention
from billfish.models import random_weights
from billfish.models.decoder import CausalLM
from billfish.worker.start import Setting, start
from tests.gpu import engine_oracle

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

CUDA = torch.device("cuda", 0)


# The demo model


@pytest.fixture(scope="module")
def model_path() -> str:
    carried = Path(".carry/smollm2.gguf")
    try:
        return str(carried if carried.is_file() else locate(DEMO_MODEL))
    except CheckpointError as error:
        pytest.skip(str(error))


def oracle() -> list[dict]:
    return json.loads(engine_oracle.FILE.read_text())


# Of tokens chosen after the same text: least share that agree; most that log-probabilities differ,
# on average and at all.
BOUNDS = {"float16": (0.97, 0.02, 0.3), "bfloat16": (0.92, 0.08, 1.0)}


@pytest.mark.parametrize("dtype", BOUNDS)
def test_demo_model_against_float32(model_path: str, dtype: str, record_property) -> None:
    llm = LLM(
        model_path, dtype=dtype, device="cuda", cache=CacheConfig(num_blocks=4096),
        scheduler=SchedulerConfig(max_num_seqs=32, max_num_batched_tokens=2048),
    )  # fmt: skip
    rows = oracle()
    # The oracle's own text, seen as a prompt: each of its tokens after the same beginning.
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    agree, differences = [], []
    for row, output in zip(
        rows, llm.generate([row["prompt"] + row["tokens"] for row in rows], params), strict=True
    ):
        assert output.prompt_logprobs is not None
        ours = output.prompt_logprobs[len(row["prompt"]) :]
        agree += [each.rank == 1 for each in ours]
        differences += [
            abs(a.logprob - b) for a, b in zip(ours, row["logprobs"], strict=True)
        ]  # fmt: skip
    share, mean, most = sum(agree) / len(agree), sum(differences) / len(agree), max(differences)
    params = SamplingParams(max_tokens=engine_oracle.TOKENS, temperature=0, ignore_eos=True)
    texts = llm.generate([row["prompt"] for row in rows], params)
    same = sum(
        list(output.token_ids) == row["tokens"] for row, output in zip(rows, texts, strict=True)
    )
    print(
        f"\n{dtype}: {sum(agree)} of {len(agree)} tokens agree; log-probabilities differ by "
        f"{mean:.4f} on average, {most:.4f} at most; {same} of {len(rows)} texts of "
        f"{engine_oracle.TOKENS} tokens are the same"
    )
    least, mean_bound, most_bound = BOUNDS[dtype]
    assert share >= least
    assert mean <= mean_bound
    assert most <= most_bound
    assert llm.stats().blocks_in_use == 0


# Random models


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
    graphs: bool = True, num_blocks: int = 400, swap_blocks: int = 0, invariant: bool = False,
    dtype: torch.dtype = torch.bfloat16, **scheduler,
) -> Engine:  # fmt: skip
    scheduler = {"max_num_seqs": 8, "max_num_batched_tokens": 256} | scheduler
    settings = SchedulerConfig(max_model_len=512, equal_chunks=invariant, **scheduler)
    cache = CacheConfig(num_blocks=num_blocks, swap_blocks=swap_blocks)
    setting = Setting(
        config=config, dtype=dtype, device=device, cache=cache, scheduler=settings,
        vocab_size=config.vocab_size, int4=int4, graphs=graphs, batch_invariant=invariant,
    )  # fmt: skip
    started = start(setting, lambda most: made(config, device, dtype, int4=int4))
    return Engine(
        started.executor, num_blocks=started.num_blocks, block_size=16,
        vocab_size=config.vocab_size, max_model_len=started.max_model_len, eos_token_ids=(0,),
        token_bytes=lambda token: b"t", scheduler=settings, swap_blocks=swap_blocks,
        overlap=overlap and device.type == "cuda", prefix_caching=not invariant, seed=0,
    )  # fmt: skip


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


KINDS = {
    "64, 2 of 4": {},
    "128, 1 of 8": {"head_dim": 128, "rotary_dim": 128, "num_heads": 8, "num_kv_heads": 1},
    "80, 4 of 4": {"head_dim": 80, "rotary_dim": 80, "num_kv_heads": 4},
    "96, 2 of 4": {"head_dim": 96, "rotary_dim": 96},
    "112, 2 of 8": {"head_dim": 112, "rotary_dim": 112, "num_heads": 8},
    "192, 1 of 2": {"head_dim": 192, "rotary_dim": 192, "num_heads": 2, "num_kv_heads": 1},
    "256, 1 of 4": {"head_dim": 256, "rotary_dim": 256, "num_kv_heads": 1},
    "half rotated": {"rotary_dim": 32},
    "biases": {"qkv_bias": True, "o_bias": True, "mlp_bias": True},
    "QK-norm": {"qk_norm": True},
    "windows": {
        "layers": (
            LayerConfig(rope=RopeConfig(theta=1e4), sliding_window=20),
            LayerConfig(rope=None),
        )
    },
    "as Gemma 2": {
        "activation": "gelu_tanh", "post_norms": True, "attention_soft_cap": 50.0,
        "logit_soft_cap": 30.0, "embedding_scale": 16.0, "tie_embeddings": True,
    },
}  # fmt: skip


@pytest.mark.parametrize("int4", [True, False], ids=["int4", "dense"])
@pytest.mark.parametrize("kind", KINDS)
def test_random_models_against_float32(kind: str, int4: bool) -> None:
    """Log-probabilities of prompts and of a decoded token, against the CPU in float32."""
    config = shape(**KINDS[kind])
    params = SamplingParams(max_tokens=3, temperature=0, prompt_logprobs=0, logprobs=0)
    batch = [(prompt, params) for prompt, _ in requests(6, seed=1)]
    found = []
    for device, dtype in ((CUDA, torch.bfloat16), (torch.device("cpu"), torch.float32)):
        engine = served(config, device, int4=int4, dtype=dtype)
        for number, (prompt, options) in enumerate(batch):
            engine.add_request(str(number), prompt, options)
        values = {}
        while engine.has_unfinished:
            for output in engine.step():
                if output.finished:
                    prompt_logprobs = [each.logprob for each in output.prompt_logprobs[1:]]
                    values[output.request_id] = [*prompt_logprobs, output.logprobs[0].logprob]
        found.append(torch.tensor([v for name in sorted(values) for v in values[name]]))
    gpu, exact = found
    # Logits of random models spread over several units, of which bfloat16 keeps 8 bits.
    error = (gpu - exact).abs()
    print(f"\n{kind}: {error.mean():.4f} on average, {error.max():.4f} at most")
    assert error.mean() < 0.06
    assert error.max() < 0.5


@pytest.mark.parametrize("int4", [True, False], ids=["int4", "dense"])
def test_overlap_and_graphs_change_nothing(int4: bool) -> None:
    batch = requests(40, seed=2)
    want = outputs(served(shape(), int4=int4), batch)
    assert outputs(served(shape(), int4=int4, overlap=False), batch) == want
    # Without graphs steps are not padded, so products may add up in another order; in
    # batch-invariant mode they do not, and nothing may differ.
    want = outputs(served(shape(), int4=int4, invariant=True), batch)
    assert outputs(served(shape(), int4=int4, invariant=True, graphs=False), batch) == want


@pytest.mark.parametrize("int4", [True, False], ids=["int4", "dense"])
def test_batch_mates_change_nothing_in_batch_invariant_mode(int4: bool) -> None:
    """Alone, beside others, in another order: the same to the last bit."""
    batch = requests(12, seed=3, logprobs=3)
    engine = served(shape(), int4=int4, invariant=True, max_num_batched_tokens=64)
    want = outputs(engine, batch)
    for number, request in enumerate(batch):
        alone = outputs(engine, [request], [f"alone {number}"])
        assert alone[f"alone {number}/0"] == want[f"{number}/0"]
    names = [str(number) for number in range(len(batch))]
    order = random.Random(0).sample(range(len(batch)), len(batch))
    other = served(shape(), int4=int4, invariant=True, max_num_seqs=3, max_num_batched_tokens=59)
    got = outputs(other, [batch[i] for i in order], [names[i] for i in order])
    assert got == want


@pytest.mark.parametrize("swap_blocks", [0, 60], ids=["recompute", "swap"])
def test_many_requests_leave_nothing(swap_blocks: int) -> None:
    """Mixed lengths, samples, aborts and preemption: every block comes back, and so does every row;
    whoever was not aborted gets what it is due."""
    rng = random.Random(4)
    engine = served(
        shape(), num_blocks=40, swap_blocks=swap_blocks,
        preemption="swap" if swap_blocks else "recompute", max_num_seqs=16,
    )  # fmt: skip
    memory = torch.cuda.memory_allocated()
    batch = requests(1000, seed=5)
    reasons: dict[str, int] = {}
    most: dict[str, int | None] = {}
    added = 0
    while added < len(batch) or engine.has_unfinished:
        while added < len(batch) and engine.stats().waiting < 8:
            prompt, params = batch[added]
            params = replace(params, n=rng.choice((1, 1, 1, 3)), max_tokens=rng.randint(1, 120))
            engine.add_request(str(added), prompt, params)
            most[str(added)] = params.max_tokens
            added += 1
        for output in engine.step():
            if output.finished:
                reason = output.finish_reason
                reasons[reason] = reasons.get(reason, 0) + 1
                if reason == "length":
                    assert output.num_output_tokens == most[output.request_id]
            elif rng.random() < 0.003:
                engine.abort(output.request_id)
    stats = engine.stats()
    assert set(reasons) == {"length", "stop"}
    assert stats.finished["abort"] > 10
    assert stats.preemptions > 20
    assert (stats.swaps > 0) == (swap_blocks > 0)
    assert stats.blocks_in_use == stats.host_blocks_in_use == 0
    assert not engine._executor.batch.rows
    assert len(engine._executor.batch._free_rows) == 16
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - memory < 1 << 20


def test_a_plan_that_cannot_be_says_so_before_anything_is_loaded() -> None:
    config = random_weights.SHAPES["llama-3-70b"]
    setting = Setting(
        config=config, dtype=torch.bfloat16, device=CUDA, cache=CacheConfig(gpu_memory=0.05),
        scheduler=SchedulerConfig().on_gpu(), vocab_size=config.vocab_size,
    )  # fmt: skip
    with pytest.raises(CapacityError, match="GiB available"):
        start(setting, lambda most: pytest.fail("loaded"))
