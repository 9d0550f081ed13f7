"""What a start on a GPU compiles: every kernel that steps launch, once, before any step runs.

The kernels' arguments are made on the CPU, as a GPU would be given them, and Triton is asked which
compiled form each launch takes; none is compiled.
"""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from triton import knobs
from triton.runtime.jit import JITFunction

from billfish.config import LayerConfig, ModelConfig, RopeConfig
from billfish.kernels import general, marlin, paged_attention
from billfish.kernels.gluon_compat import gluon_supported
from billfish.kernels.marlin.configs import Gpu
from billfish.kernels.paged_attention import AttentionMetadata, planner
from billfish.layers.linear import Linear, QuantLinear, quantized_head
from billfish.models.decoder import CausalLM, tensor_shapes
from billfish.models.random_weights import SHAPES
from billfish.worker import device_runner, step_inputs, warm_up
from billfish.worker.device_runner import DeviceRunner
from billfish.worker.step_graphs import ladder, mixed_ladder
from tests.compile.offline import FakeDriver, fake_device

if knobs.runtime.interpret:
    pytest.skip("compiles, so not with TRITON_INTERPRET=1", allow_module_level=True)
if not gluon_supported():
    pytest.skip("this Triton release is not one the Gluon kernels support", allow_module_level=True)

from billfish.kernels.general import gpu as general_gpu
from billfish.kernels.general import sample_gpu
from billfish.kernels.marlin import gpu as marlin_gpu
from billfish.kernels.marlin import hopper_launch
from billfish.kernels.paged_attention import cache_write, hopper_prefill
from billfish.kernels.paged_attention import gpu as attention_gpu
from billfish.worker import step_inputs_gpu

DTYPE = torch.bfloat16
SEATS, BUDGET, LENGTH = 256, 8192, 16384
LLAMA = replace(SHAPES["llama-3-8b"], vocab_size=512)
SMALL = replace(LLAMA, hidden_size=512, intermediate_size=1024, num_heads=8, num_kv_heads=2)
ROPE = RopeConfig(theta=1e4)
MODELS = {
    "Llama 3 8B": replace(LLAMA, layers=LLAMA.layers[:1]),
    "as Gemma 2": replace(
        SMALL, head_dim=256, rotary_dim=256, activation="gelu_tanh", post_norms=True,
        attention_soft_cap=50.0, logit_soft_cap=30.0,
        layers=(LayerConfig(rope=ROPE, sliding_window=1024), LayerConfig(rope=ROPE)),
    ),
    "a head in INT8": replace(SMALL, layers=LLAMA.layers[:1]),
    "as Qwen 3": replace(SMALL, head_dim=96, rotary_dim=96, qk_norm=True, layers=LLAMA.layers[:1]),
}  # fmt: skip


class Weights:
    """Of no values, packed as for a GPU."""

    def __init__(self, config: ModelConfig) -> None:
        self._shapes = tensor_shapes(config)

    def tensor(self, name: str) -> torch.Tensor:
        return torch.zeros(self._shapes[name], dtype=DTYPE)

    norm = tensor

    def linear(self, *names: str, gated: bool = False) -> torch.nn.Module:
        if names[0] == "lm_head":
            return Linear(self.tensor("lm_head.weight"))
        shapes = [self._shapes[f"{name}.weight"] for name in names]
        rows, columns = sum(rows for rows, _ in shapes), shapes[0][1]
        codes = torch.zeros(rows, columns, dtype=torch.uint8)
        scales = torch.zeros(rows, columns // 128)
        return QuantLinear(
            marlin.pack(codes, scales, group_size=128, dtype=DTYPE, silu_mul=gated)
        )  # fmt: skip


@pytest.fixture
def launched(monkeypatch):
    """The compiled forms that are asked for, in order, each once: a GPU pretended on a CPU."""
    properties = Gpu("NVIDIA H200", 132)
    places = {
        marlin.weight: {"_layouts": lambda device: marlin_gpu},
        marlin: {"_w4a16_matmul": marlin_gpu.w4a16_matmul},
        marlin_gpu: {
            "_hopper_kernel": lambda device: hopper_launch, "_launches": {},
            "gpu_of": lambda device: properties,
        },
        hopper_launch: {
            "gpu_of": lambda device: properties,
            "DirectKernel": lambda kernel, fields: None, "_kernels": {},
            "_empty": lambda shape, strides, dtype: torch.empty(shape, dtype=dtype),
        },
        paged_attention: {
            "_attend": attention_gpu.attend, "_rotate_and_write": attention_gpu.rotate_and_write,
            "is_plain_cpu": lambda tensor: False,
        },
        planner: {"is_hopper": lambda device: True, "multiprocessors": lambda device: 132},
        attention_gpu: {"is_hopper": lambda device: True},
        hopper_prefill: {"multiprocessors": lambda device: 132},
        cache_write: {"launches_early": lambda device: True},
        general: {
            "rms_norm": lambda x, weight, eps, residual=None: general_gpu.rms_norm(x, weight, eps)
            if residual is None
            else general_gpu.add_rms_norm(x, residual, weight, eps),
            "gelu_tanh_mul": general_gpu.gelu_tanh_mul,
        },
        general_gpu: {"launches_early": lambda device: True},
        sample_gpu: {"launches_early": lambda device: True},
        step_inputs: {"make": step_inputs_gpu.make},
        device_runner: {"_on_cpu": lambda metadata, block_size: metadata},
        # Of a device of its own: what tests have compiled for others would be launched.
        FakeDriver: {"get_current_device": lambda driver: 1000 + driver.target.arch},
        torch._C: {"_cuda_getDevice": lambda: -1, "_cuda_getCurrentRawStream": lambda index: 0},
        torch.cuda: {
            "device": lambda index: torch.inference_mode(),
            "current_device": lambda: None,
            "get_device_capability": lambda device=None: (9, 0),
        },
    }  # fmt: skip
    for place, changes in places.items():
        for name, value in changes.items():
            monkeypatch.setattr(place, name, value, raising=False)
    forms: dict[tuple[str, str], None] = {}

    def ask(function: JITFunction, key: object, *_: object) -> None:
        forms[function.fn.__qualname__, str(key)] = None

    monkeypatch.setattr(JITFunction, "_do_compile", ask)
    with fake_device(90), torch.inference_mode():
        yield forms


def runner_of(config: ModelConfig, monkeypatch) -> DeviceRunner:
    def plans(model: CausalLM, kv_cache: torch.Tensor, seats: int, invariant: bool):
        return [
            planner.AttentionPlan.allocate(
                max_requests=seats, num_heads=config.num_heads, num_kv_heads=config.num_kv_heads,
                head_dim=config.head_dim, sliding_window=window, device="cpu",
            )
            for window in dict.fromkeys(layer.sliding_window for layer in config.layers)
        ]  # fmt: skip

    monkeypatch.setattr(device_runner, "_attention_plans", plans)
    model = CausalLM(config, Weights(config), LENGTH)
    shape = (config.num_layers, 2, 2, 16, config.num_kv_heads, config.head_dim)
    return DeviceRunner(
        model, torch.zeros(shape, dtype=DTYPE), vocab_size=config.vocab_size, max_num_seqs=SEATS,
        max_model_len=LENGTH, max_num_batched_tokens=BUDGET,
    )  # fmt: skip


def run_large_step(runner: DeviceRunner, total: int, count: int) -> None:
    """A step that has no graph: so many tokens of prompts of so many requests."""
    lens = [total // count + (i < total % count) for i in range(count)]
    starts = [sum(lens[:i]) for i in range(count + 1)]
    runner.batch.header.send(
        {"rows": [0] * count, "seq_lens": lens, "query_start": starts, "found": lens}
    )
    inputs = step_inputs.allocate(total, count, runner.batch.max_blocks, runner.device)
    query_start = runner.batch.header.query_start[: count + 1]
    runner.batch.fill(query_start, inputs, max(lens))
    seq_lens = runner.batch.header.seq_lens[:count]
    metadata = AttentionMetadata(
        inputs.block_table, seq_lens, query_start, inputs.slots, max(lens), max(lens)
    )
    runner._forward(inputs, metadata)


@pytest.mark.parametrize("name", MODELS)
def test_all_that_steps_launch_is_compiled_ahead(name: str, launched, monkeypatch) -> None:
    runner = runner_of(MODELS[name], monkeypatch)
    if "INT8" in name:
        runner.model.lm_head = quantized_head(runner.model.lm_head, "int8")
    for job in runner._launches(BUDGET):
        job()
    ahead = list(launched)
    assert {"w4a16_hopper", "_inputs_kernel", "_sample_kernel"} <= {name for name, _ in ahead}
    for size in ladder(SEATS):
        runner._decode(size)
    for size in mixed_ladder(BUDGET):
        runner._mixed(size)
    for total, count in ((2049, 1), (3001, 7), (4096, 2), (5000, 256), (6000, 8), (8192, 1)):
        run_large_step(runner, total, count)
    header = runner.batch.header
    for count, greedy in ((1, True), (SEATS, False)):
        logits = torch.zeros(count, runner.vocab_size, dtype=DTYPE)
        sample_gpu.sample(
            logits, header.sample_rows[:count], header.sample_positions[:count], header.numbers,
            header.integers, runner.batch.token_table, runner._tokens[:count], greedy=greedy,
        )  # fmt: skip
    late = list(launched)[len(ahead) :]
    assert [kernel for kernel, _ in late] == []


def test_each_product_is_compiled_once(launched, monkeypatch) -> None:
    """A second job of the same kernel would make tensors and launch for nothing."""
    runner = runner_of(MODELS["Llama 3 8B"], monkeypatch)
    for job in warm_up.products(runner.model, [*ladder(SEATS), *mixed_ladder(BUDGET)], BUDGET):
        before = len(launched)
        job()
        assert len(launched) == before + 1


def test_one_layer_of_each_kind_stands_for_all(launched, monkeypatch) -> None:
    config = replace(SMALL, layers=MODELS["as Gemma 2"].layers * 3)
    runner = runner_of(config, monkeypatch)
    kinds = warm_up.kinds_of_layers(runner.model)
    assert kinds == [0, 1]
    runner._decode(16, layers=kinds)
    some = list(launched)
    runner._decode(16)
    assert list(launched) == some
