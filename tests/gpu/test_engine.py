"""The engine on a GPU: the demo model against float32, and small random models of many shapes.

The demo model is looked for where it is installed, and at .carry/smollm2.gguf.
"""

import json
import random
from pathlib import Path

import pytest
import torch

from billfish import LLM, SamplingParams
from billfish.checkpoint.locate import DEMO_MODEL, locate
from billfish.config import CacheConfig, LayerConfig, RopeConfig, SchedulerConfig
from billfish.errors import CheckpointError
from tests.gpu import engine_oracle
from tests.gpu.engines import CUDA, outputs, requests, served, shape

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


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


KINDS = {
    "64, 2 of 4": {},
    "128, 1 of 8": {"head_dim": 128, "rotary_dim": 128, "num_heads": 8, "num_kv_heads": 1},
    "80, 4 of 4": {"head_dim": 80, "rotary_dim": 80, "num_kv_heads": 4},
    "96, 2 of 4": {"head_dim": 96, "rotary_dim": 96},
    "112, 2 of 8": {"head_dim": 112, "rotary_dim": 112, "num_heads": 8},
    "192, 1 of 2": {"head_dim": 192, "rotary_dim": 192, "num_heads": 2, "num_kv_heads": 1},
    "256, 1 of 4": {"head_dim": 256, "rotary_dim": 256, "num_kv_heads": 1},
    "64, 2 of 14": {"num_heads": 14},
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
    "as Gemma 3": {
        "activation": "gelu_tanh", "post_norms": True, "qk_norm": True, "embedding_scale": 16.0,
        "attention_scale": 0.1, "tie_embeddings": True, "layers": (
            LayerConfig(rope=RopeConfig(theta=1e4), sliding_window=20),
            LayerConfig(rope=RopeConfig(theta=1e6, factor=8.0)),
        ),
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
    # bfloat16 keeps 8 bits of logits, which are as large as these log-probabilities: 7 to 250.
    error, size = (gpu - exact).abs(), exact.abs().mean()
    print(f"\n{kind}: {error.mean():.4f} of {size:.1f} on average, {error.max():.4f} at most")
    assert error.mean() < size / 256
    assert error.max() < size / 64


@pytest.mark.parametrize("int4", [True, False], ids=["int4", "dense"])
def test_graphs_and_work_in_the_background_change_nothing(int4: bool) -> None:
    """The same steps launched one kernel at a time, and computed while the host waits."""
    batch = requests(40, seed=2)
    want = outputs(served(shape(), int4=int4), batch)
    assert outputs(served(shape(), int4=int4, graphs=False), batch) == want
    assert outputs(served(shape(), int4=int4, waits=True), batch) == want


@pytest.mark.parametrize("int4", [True, False], ids=["int4", "dense"])
def test_overlap_changes_nothing_where_steps_are_the_same(int4: bool) -> None:
    """What ends by its length has no row too many; all have seats, so nobody comes a step later."""
    batch = requests(8, seed=6, stop_token_ids=[], ignore_eos=True)
    want = outputs(served(shape(), int4=int4, prefix_caching=False), batch)
    plain = served(shape(), int4=int4, prefix_caching=False, overlap=False)
    assert outputs(plain, batch) == want


@pytest.mark.parametrize("int4", [True, False], ids=["int4", "dense"])
def test_overlap_and_graphs_change_nothing_in_batch_invariant_mode(int4: bool) -> None:
    """Whoever stops has a row in one more step with overlap: its batch-mates are not to see it."""
    batch = requests(40, seed=2)
    want = outputs(served(shape(), int4=int4, invariant=True), batch)
    assert {reason for _, reason, _ in want.values()} == {"length", "stop"}
    for changes in ({"overlap": False}, {"graphs": False}, {"overlap": False, "graphs": False}):
        assert outputs(served(shape(), int4=int4, invariant=True, **changes), batch) == want


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
