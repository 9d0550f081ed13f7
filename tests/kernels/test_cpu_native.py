"""Decoding steps compiled for the CPU: equal to the operations they stand for, where they fit."""

import os
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from billfish import LLM, SamplingParams
from billfish.config import CacheConfig, ModelConfig
from billfish.kernels import cpu_native, marlin
from billfish.kernels.cpu_native.threads import Threads
from billfish.kernels.paged_attention import AttentionMetadata
from billfish.layers.linear import Linear, QuantLinear
from billfish.models.decoder import CausalLM
from billfish.models.random_weights import SHAPES, RandomWeights
from billfish.worker.compiled_decode import CompiledDecode, why_not
from billfish.worker.kv_cache import allocate

BLOCK = 16
LENGTHS = (1, 15, 16, 17, 33, 64, 90, 130)
CONFIG = replace(SHAPES["tiny"], num_heads=6, qkv_bias=True, mlp_bias=True)
"""Three query heads a KV head: not a number that the loops take at once."""


@pytest.fixture(autouse=True)
def _on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cpu_native.SWITCH, "1")
    if (reason := cpu_native.why_not()) is not None:
        pytest.skip(reason)


class Weights(RandomWeights):
    """INT4 layers with groups and offsets as given, rows not a multiple of a block."""

    def __init__(self, config: ModelConfig, group_size: int = 32, offsets: bool = True) -> None:
        super().__init__(config, torch.bfloat16, "cpu", int4=True)
        self.group_size, self.offsets = group_size, offsets

    def linear(self, *names: str, gated: bool = False) -> nn.Module:
        layer = super().linear(*names, gated=gated)
        if isinstance(layer, QuantLinear):
            made = random_weight(
                layer.weight.n, layer.weight.k, self.group_size, "offset" if self.offsets else None
            )
            layer.weight = made
        return layer


def random_weight(n: int, k: int, group_size: int, kind: str | None) -> marlin.PackedWeight:
    draw = torch.Generator().manual_seed(n * k + group_size)
    groups = 1 if group_size == -1 else k // group_size
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8, generator=draw)
    scales = (torch.rand(n, groups, generator=draw) + 0.5) * k**-0.5 / 4.6
    zeros = torch.randint(0, 16, (n, groups), dtype=torch.uint8, generator=draw)
    offsets = -scales * (7 + torch.rand(n, groups, generator=draw))
    return marlin.pack(
        codes, scales, zeros=zeros if kind == "integer" else None,
        offsets=offsets if kind == "offset" else None, group_size=group_size,
        dtype=torch.bfloat16,
    )  # fmt: skip


def model_and_cache(config: ModelConfig, **options: object) -> tuple[CausalLM, Tensor]:
    model = CausalLM(config, Weights(config, **options), max_len=256)  # type: ignore[arg-type]
    cache = allocate(config, CacheConfig(block_size=BLOCK), 80, torch.bfloat16)
    cache.copy_(torch.randn(cache.shape, generator=torch.Generator().manual_seed(5)) * 0.5)
    return model, cache


def step_of(lengths: tuple[int, ...]) -> tuple[Tensor, Tensor, AttentionMetadata]:
    """Sequences of these lengths, whose blocks lie apart and out of order."""
    tables = [[1 + 9 * i + (5 * b) % 9 for b in range(-(-n // BLOCK))]
              for i, n in enumerate(lengths)]  # fmt: skip
    metadata = AttentionMetadata.build(tables, lengths, [1] * len(lengths), BLOCK)
    return torch.arange(len(lengths)) * 7 + 3, torch.tensor(lengths) - 1, metadata


def compiled_of(model: CausalLM, cache: Tensor) -> CompiledDecode:
    compiled = CompiledDecode.of(model, cache, 256)
    assert compiled is not None
    return compiled


@torch.inference_mode()
def both(config: ModelConfig, lengths: tuple[int, ...], **options: object) -> list[Tensor]:
    """(hidden, logits, cache) of the model's operations, then of the compiled step."""
    model, cache = model_and_cache(config, **options)
    ids, positions, metadata = step_of(lengths)
    native_cache = cache.clone()
    compiled = compiled_of(model, native_cache)
    assert compiled.takes(positions, metadata)
    hidden = model(ids, positions, cache, metadata)
    native = compiled(ids, positions, native_cache, metadata)
    return [hidden, model.logits(hidden), cache, native, compiled.logits(hidden), native_cache]


def far(one: Tensor, other: Tensor) -> float:
    return float((one.float() - other.float()).norm() / other.float().norm())


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8])
def test_a_step_is_that_of_the_models_operations(rows: int) -> None:
    hidden, logits, cache, native, native_logits, native_cache = both(CONFIG, LENGTHS[-rows:])
    assert native.shape == hidden.shape
    # Both round to bfloat16 after every operation, a relative 2^-9 each time.
    assert far(native, hidden) < 0.02
    assert far(native_logits, logits) < 0.003
    assert far(native_cache, cache) < 1e-3
    changed = (native_cache != cache).flatten(2, 3).any(dim=(0, 1, 3, 4)).sum()
    assert changed <= rows  # nothing was written but the new tokens


@pytest.mark.parametrize(
    ("group_size", "offsets"), [(32, False), (64, True), (128, True), (128, False)]
)
def test_groups_and_offsets(group_size: int, offsets: bool) -> None:
    hidden, _, _, native, _, _ = both(CONFIG, (40, 9), group_size=group_size, offsets=offsets)
    assert far(native, hidden) < 0.02


def test_rows_that_do_not_fill_blocks_and_many_heads() -> None:
    config = replace(
        SHAPES["tiny"], hidden_size=352, intermediate_size=224, num_heads=7, num_kv_heads=1,
        head_dim=96, rotary_dim=64, vocab_size=301, attention_scale=0.2, embedding_scale=3.0,
        tie_embeddings=True,
    )  # fmt: skip
    hidden, logits, _, native, native_logits, _ = both(config, (77, 3, 20))
    assert far(native, hidden) < 0.02
    assert far(native_logits, logits) < 0.003


@pytest.mark.parametrize("kind", ["symmetric", "integer", "offset"])
@pytest.mark.parametrize("group_size", [32, 64, 128, -1])
def test_a_product_is_that_of_the_dequantized_weight(group_size: int, kind: str) -> None:
    """Through a step's own product: n odd, sums in float32 until the end."""
    import numpy as np

    step = cpu_native.load()
    n, k = 101, 384
    weight = random_weight(n, k, group_size, kind)
    codes, pairs = weight.tensors
    table = np.zeros((1, 19), dtype=np.int64)
    table[0, step.QKV : step.QKV + 4] = codes.data_ptr(), pairs.data_ptr(), 0, k // len(pairs)
    for rows, threads in ((1, 2), (2, 2), (4, 2), (8, 2), (1, 3), (4, 3)):
        draw = torch.Generator().manual_seed(rows)
        # x is multiplied as 16-bit integers with a scale a group: these are such.
        exact = torch.randint(-32767, 32768, (rows, k), generator=draw).float() / 1024
        exact[:, ::32] = 32767 / 1024
        for x, most in ((exact, 2e-6), (torch.randn(rows, k, generator=draw), 5e-5)):
            out, found = np.zeros((rows, 128), np.float32), np.zeros((rows, k), np.float32)
            sync, short = np.zeros(16, dtype=np.int64), np.zeros((rows, k), np.int16)
            step._product(
                x.numpy(), rows, k, table, 0, step.QKV, n, threads, short, found, out, sync, 0
            )
            expected = x.double() @ _as_multiplied(weight).T
            assert far(torch.from_numpy(out[:, :n].copy()), expected) < most
            # Behind the last row there is padding, with scales of nothing.
            assert not out[:, n:].any()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, 1e-38])
def test_what_cannot_be_an_integer(value: float) -> None:
    """In a product: nothing finite where it is none, nothing where there is nothing."""
    import numpy as np

    products = cpu_native.load().p
    x = np.full(64, value, dtype=np.float32)
    x[32:] = np.arange(32) - 7
    codes, found = np.ones(64, dtype=np.int16), np.ones(4, dtype=np.float32)

    @import_module("numba").njit
    def call(x: int, codes: int, found: int) -> None:
        products.quantize(x, 2, 32, codes, found)

    call(x.ctypes.data, codes.ctypes.data, found.ctypes.data)
    assert not codes[:32].any()
    assert not np.isfinite(found[0]) if not 0 <= value < 1 else found[0] * 0 == 0
    assert list(codes[32:]) == list(np.rint(x[32:] * 32767 / 24))
    assert found[2] == np.float32(24 / 32767)
    assert found.view(np.int32)[3] == codes[32:].sum()


def test_products_on_a_processor_with_avx2_alone(tmp_path: Path) -> None:
    """torch then packs in another way, and LLVM has other instructions."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        pytest.skip("needs AVX-512: with AVX2 the other tests are of it")
    environment = {
        **os.environ, "ATEN_CPU_CAPABILITY": "avx2", "NUMBA_CPU_NAME": "haswell",
        "NUMBA_CPU_FEATURES": "+avx2,+fma,+f16c,+bmi2", "NUMBA_CACHE_DIR": str(tmp_path),
    }  # fmt: skip
    test = f"{__file__}::{test_a_product_is_that_of_the_dequantized_weight.__name__}"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"{test}[32-offset]"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert "1 passed" in done.stdout, done.stdout + done.stderr


def _as_multiplied(weight: marlin.PackedWeight) -> Tensor:
    """float64 [n, k], with the shift rounded to bfloat16 as it is stored."""
    codes = weight.unpack()[0].double()
    scale, shift = weight.tensors[1].double().unbind(-1)
    size = weight.k // len(scale)
    wide = [each.T[: weight.n].repeat_interleave(size, 1) for each in (scale, shift)]
    return (codes - 8) * wide[0] + wide[1]


def in_q8_0(head: Linear) -> Tensor:
    """Rounds a head to 8 bits, in place, and gives it as GGUF stores it; float64 [n, k] with it."""
    blocks = head.weight.float().view(-1, 32)
    scales = (blocks.abs().amax(dim=1, keepdim=True) / 127).half()
    codes = (blocks / scales.float()).round().clamp(-128, 127).to(torch.int8)
    exact = (codes.double() * scales.double()).view(head.weight.shape)
    head.weight.copy_(exact)
    head.q8_0 = torch.cat((scales.view(torch.uint8), codes.view(torch.uint8)), dim=1)
    return exact


@torch.inference_mode()
def test_a_head_in_8_bits_is_read_as_it_is_stored() -> None:
    model, cache = model_and_cache(replace(CONFIG, vocab_size=301))
    exact = in_q8_0(model.lm_head)
    compiled = compiled_of(model, cache)
    for rows in (1, 3, 8):
        hidden = torch.randn(rows, CONFIG.hidden_size, generator=torch.Generator().manual_seed(1))
        hidden = hidden.bfloat16()
        logits = compiled.logits(hidden)
        expected = hidden.double() @ exact.T
        # Nothing is rounded but the result; torch's weights are, too.
        assert bool(((logits - expected).abs() <= 2**-8 * expected.abs() + 1e-5).all())
        assert far(logits, model.logits(hidden)) < 0.003


@torch.inference_mode()
@pytest.mark.parametrize("q8_0", [False, True])
def test_a_row_does_not_depend_on_the_others(q8_0: bool) -> None:
    model, cache = model_and_cache(CONFIG)
    if q8_0:
        in_q8_0(model.lm_head)
    compiled = compiled_of(model, cache)
    ids, positions, metadata = step_of(LENGTHS)
    together = compiled.forward(ids, positions, metadata)
    logits = compiled.logits(together)
    for i, length in enumerate(LENGTHS):
        blocks = metadata.block_table[i : i + 1, : -(-length // BLOCK)]
        alone = AttentionMetadata.build(blocks, [length], [1], BLOCK)
        hidden = compiled.forward(ids[i : i + 1], positions[i : i + 1], alone)
        assert torch.equal(hidden[0], together[i])
        assert torch.equal(compiled.logits(hidden)[0], logits[i])


@torch.inference_mode()
def test_what_is_not_a_number_stays_in_its_row() -> None:
    model, cache = model_and_cache(CONFIG)
    model.embed_tokens[3] = float("nan")  # the first request's token
    compiled = compiled_of(model, cache)
    ids, positions, metadata = step_of(LENGTHS[:3])
    logits = compiled.logits(compiled.forward(ids, positions, metadata))
    assert logits[0].isnan().all()
    assert logits[1:].isfinite().all()


def test_other_models_are_not_compiled() -> None:
    def reason(**changes: object) -> str | None:
        return why_not(*model_and_cache(replace(CONFIG, **changes)))  # type: ignore[arg-type]

    assert reason() is None
    assert reason(qk_norm=True) == "norms of query and key"
    assert reason(post_norms=True) == "norms behind sub-layers"
    assert reason(activation="gelu_tanh") == "an activation other than SiLU"
    assert reason(logit_soft_cap=30.0) == "soft caps"
    windowed = tuple(replace(layer, sliding_window=8) for layer in CONFIG.layers)
    assert reason(layers=windowed) == "sliding windows"
    plain = CausalLM(CONFIG, RandomWeights(CONFIG, torch.float32, "cpu", int4=True), 256)
    cache = allocate(CONFIG, CacheConfig(block_size=BLOCK), 4, torch.float32)
    assert why_not(plain, cache) is not None
    model, cache = model_and_cache(CONFIG)
    model.layers[1].mlp.down_proj.batch_invariant = True
    assert why_not(model, cache) == "batch_invariant"


def test_other_steps_are_not_taken() -> None:
    compiled = compiled_of(*model_and_cache(CONFIG))
    _, positions, metadata = step_of((5,) * 9)
    assert not compiled.takes(positions, metadata)
    prefill = AttentionMetadata.build([[1]], [5], [5], BLOCK)
    assert not compiled.takes(torch.arange(5), prefill)
    beyond = AttentionMetadata.build([[1000]], [5], [1], BLOCK)
    assert not compiled.takes(torch.tensor([4]), beyond)
    _, positions, metadata = step_of((5, 7))
    known = replace(metadata, slot_mapping=torch.tensor([20, -1]))
    assert not compiled.takes(positions, known)


def test_without_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    model, cache = model_and_cache(CONFIG)
    for name in [name for name in sys.modules if name.startswith(cpu_native.__name__ + ".step")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr(cpu_native, "step", raising=False)
    monkeypatch.setitem(sys.modules, "numba", None)
    assert CompiledDecode.of(model, cache, 256) is None
    monkeypatch.setenv(cpu_native.SWITCH, "0")
    assert cpu_native.why_not() == "BILLFISH_CPU_NATIVE is 0"


def test_the_compiler_sees_a_change_of_any_file() -> None:
    step = cpu_native.load()
    for entry in (step.layers, step.head):  # numba's cache goes by what a function closes over
        assert [cell.cell_contents for cell in entry.py_func.__closure__] == [step._version()]


def test_threads_all_run_every_job() -> None:
    threads, seen = Threads(3), []
    for _ in range(50):
        threads.run(seen.append)
    assert sorted(seen) == [0] * 50 + [1] * 50 + [2] * 50


def test_a_whole_model(model_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo model says what it says without, up to roundings, and uses no more threads after."""
    before = torch.get_num_threads()
    params = SamplingParams(max_tokens=12, temperature=0.0, logprobs=0)
    prompt = "The capital of France is"
    cache = CacheConfig(num_blocks=64)
    outputs, steps, forward = [], [], CompiledDecode.forward

    def counted(*arguments: Tensor) -> Tensor:
        steps.append(1)
        return forward(*arguments)

    monkeypatch.setattr(CompiledDecode, "forward", counted)
    for switch in ("1", "0"):
        monkeypatch.setenv(cpu_native.SWITCH, switch)
        llm = LLM(str(model_path), cache=cache)
        head = llm.executor.model.lm_head.q8_0  # of which only compiled steps know
        assert (head is not None) == (switch == "1")
        steps.clear()
        outputs.append(llm.generate([prompt] * 3, params))
        assert len(steps) == (11 if switch == "1" else 0)
    for native, plain in zip(*outputs, strict=True):
        assert native.token_ids == plain.token_ids
    assert torch.get_num_threads() == before
