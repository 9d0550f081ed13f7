"""Small random GGUF models: every tensor type against transformers, and what must be refused."""

import tracemalloc
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type

from billfish import LLM, SamplingParams
from billfish.config import CacheConfig
from billfish.errors import CheckpointError
from billfish.layers.linear import Linear, MergedLinear, QuantLinear
from tests.e2e import tiny_gguf
from tests.e2e.test_against_oracle import logits_of, oracle_logits

TEXT = "The fish reads a long book about the sea, 3 times: été, 海."


def load(path: Path) -> LLM:
    return LLM(str(path), dtype="float32", cache=CacheConfig(num_blocks=64))


def oracle_of(path: Path):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()


def mixed(name: str) -> Type:
    """As files quantized to Q4_K_M are: some projections and the embedding in more bits."""
    high = ("attn_v", "ffn_down", "token_embd")
    return Type.Q6_K if any(part in name for part in high) else Type.Q4_K


FILES: dict[str, dict] = {
    "Q4_0": {"kinds": lambda _: Type.Q4_0},
    "Q4_1": {"kinds": lambda _: Type.Q4_1},
    "Q4_K": {"kinds": lambda _: Type.Q4_K},
    "Q4_K and Q6_K": {"kinds": mixed, "tied": False},
    "Q8_0": {"kinds": lambda _: Type.Q8_0},
    "F16": {"kinds": lambda _: Type.F16, "tied": False},
    "F32": {"kinds": lambda _: Type.F32},
}


@pytest.mark.parametrize("name", FILES)
def test_logits_and_tokens_equal_transformers(tmp_path: Path, name: str) -> None:
    path = tiny_gguf.write(tmp_path / "tiny.gguf", **FILES[name])
    llm, oracle = load(path), oracle_of(path)
    token_ids = llm.tokenizer.encode(TEXT)
    ours, theirs = logits_of(llm, token_ids), oracle_logits(oracle, token_ids)
    assert (ours - theirs).abs().max() <= 1e-4 * theirs.abs().max()

    greedy = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
    tokens = llm.generate(TEXT, greedy)[0].token_ids
    expected = oracle_logits(oracle, [*token_ids, *tokens]).argmax(-1)
    assert list(tokens) == expected[len(token_ids) - 1 : -1].tolist()


def test_int4_stays_int4(tmp_path: Path) -> None:
    def modules(name: str) -> tuple[type, type]:
        llm = load(tiny_gguf.write(tmp_path / "tiny.gguf", **FILES[name]))
        layer = llm.executor.model.layers[0]
        return type(layer.attention.qkv_proj), type(layer.mlp.down_proj)

    assert modules("Q4_0") == (QuantLinear, QuantLinear)
    assert modules("Q4_K and Q6_K") == (MergedLinear, Linear)
    assert modules("Q8_0") == (Linear, Linear)


def test_frequency_factors_are_linear_scaling_when_all_equal(tmp_path: Path) -> None:
    def linear(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(4.0)

    factors = {"rope_freqs.weight": np.full(tiny_gguf.HEAD_DIM // 2, 4.0, np.float32)}
    plain = load(tiny_gguf.write(tmp_path / "plain.gguf"))
    scaled = load(tiny_gguf.write(tmp_path / "scaled.gguf", metadata=linear))
    factored = load(tiny_gguf.write(tmp_path / "factored.gguf", extra=factors))
    token_ids = plain.tokenizer.encode(TEXT)
    expected = logits_of(scaled, token_ids)
    assert torch.equal(logits_of(factored, token_ids), expected)
    assert not torch.allclose(logits_of(plain, token_ids), expected, rtol=1e-2)


def _without(name: str) -> Callable[[dict], None]:
    return lambda shapes: shapes.pop(name)


def _reshaped(name: str, shape: tuple[int, ...]) -> Callable[[dict], None]:
    return lambda shapes: shapes.update({name: shape})


@pytest.mark.parametrize(
    ("options", "tensor", "reason"),
    [
        ({"change_shapes": _without("blk.1.attn_k.weight")}, "blk.1.attn_k.weight", "missing"),
        ({"change_shapes": _without("token_embd.weight")}, "token_embd.weight", "missing"),
        ({"change_shapes": _without("output_norm.weight")}, "output_norm.weight", "missing"),
        (
            {"change_shapes": _reshaped("blk.0.ffn_up.weight", (256, 512))},
            "blk.0.ffn_up.weight", "shape [256, 512], expected [512, 256]",
        ),
        (
            {"change_shapes": _reshaped("blk.0.attn_norm.weight", (128,))},
            "blk.0.attn_norm.weight", "shape [128], expected [256]",
        ),
        (
            {"extra": {"blk.0.attn_q.bias": np.zeros(256, np.float32)}},
            "blk.0.attn_k.bias", "missing",
        ),
        (
            {"extra": {"blk.2.attn_norm.weight": np.zeros(256, np.float32)}},
            "blk.2.attn_norm.weight", "not part of",
        ),
        (
            {"extra": {"rope_freqs.weight": np.ones(31, np.float32)}},
            "rope_freqs.weight", "shape [31]",
        ),
        ({"metadata": lambda w: w.add_expert_count(8)}, None, "mixture-of-experts"),
        ({"metadata": lambda w: w.add_rope_dimension_count(66)}, None, "at most head_dim"),
        ({"metadata": lambda w: w.add_value_length(32)}, None, "different sizes"),
        (
            {"metadata": lambda w: w.add_string("llama.rope.scaling.type", "ntk")},
            "llama.rope.scaling.type", "'ntk' is not supported",
        ),
    ],
)  # fmt: skip
def test_refused_with_tensor_and_reason(
    tmp_path: Path, options: dict, tensor: str | None, reason: str
) -> None:
    path = tiny_gguf.write(tmp_path / "bad.gguf", **options)
    with pytest.raises(CheckpointError) as error:
        load(path)
    assert error.value.file == str(path)
    assert error.value.tensor == tensor
    assert reason in error.value.reason


def test_other_architectures_are_refused_by_name(tmp_path: Path) -> None:
    path = tiny_gguf.write(tmp_path / "other.gguf", architecture="falcon")
    with pytest.raises(CheckpointError, match="'falcon' is not supported"):
        load(path)


def test_scales_that_are_not_finite_are_damage(tmp_path: Path) -> None:
    path = tiny_gguf.write(tmp_path / "tiny.gguf")
    info = next(t for t in gguf.GGUFReader(path).tensors if t.name == "blk.1.ffn_gate.weight")
    data = bytearray(path.read_bytes())
    data[info.data_offset : info.data_offset + 2] = np.float16(np.inf).tobytes()
    path.write_bytes(data)
    with pytest.raises(CheckpointError) as error:
        load(path)
    assert error.value.tensor == "blk.1.ffn_gate.weight"


def test_offsets_too_large_for_the_dtype_are_refused(tmp_path: Path) -> None:
    path = tiny_gguf.write(tmp_path / "tiny.gguf")
    info = next(t for t in gguf.GGUFReader(path).tensors if t.name == "blk.0.attn_k.weight")
    data = bytearray(path.read_bytes())
    data[info.data_offset : info.data_offset + 4] = np.float16([6e4, 6e4]).tobytes()
    path.write_bytes(data)
    load(path)  # float32 holds 6e4 * 8 + 6e4, float16 does not
    with pytest.raises(CheckpointError, match=r"blk\.0\.attn_k\.weight"):
        LLM(str(path), dtype="float16", cache=CacheConfig(num_blocks=64))


def test_a_context_longer_than_the_cache_costs_nothing(tmp_path: Path) -> None:
    def long(writer: gguf.GGUFWriter) -> None:
        writer.add_context_length(2**24)

    llm = load(tiny_gguf.write(tmp_path / "long.gguf", metadata=long))
    assert llm.max_model_len == 64 * 16 + 1
    assert len(llm.executor.model.layers[0].attention.attention.cos_sin) == llm.max_model_len


def test_only_linear_layers_count_as_int4(tmp_path: Path) -> None:
    assert load(tiny_gguf.write(tmp_path / "tiny.gguf")).num_int4_layers == 14


def test_a_layer_count_beyond_the_file_is_refused_at_once(tmp_path: Path) -> None:
    def many(writer: gguf.GGUFWriter) -> None:
        writer.add_block_count(2**20)

    path = tiny_gguf.write(tmp_path / "many.gguf", metadata=many)
    tracemalloc.start()
    with pytest.raises(CheckpointError, match="1048576 layers cannot be made of 20 tensors"):
        load(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 20e6


def test_a_factor_that_divides_by_zero_is_refused(tmp_path: Path) -> None:
    factors = {"rope_freqs.weight": np.zeros(tiny_gguf.HEAD_DIM // 2, np.float32)}
    path = tiny_gguf.write(tmp_path / "zero.gguf", extra=factors)
    with pytest.raises(CheckpointError, match="above 0"):
        load(path)


@pytest.mark.parametrize("key", ["llama.rope.scale_linear", "llama.rope.scaling.factor"])
def test_a_scaling_factor_without_a_type_is_linear(tmp_path: Path, key: str) -> None:
    def old(writer: gguf.GGUFWriter) -> None:
        writer.add_float32(key, 4.0)

    config = load(tiny_gguf.write(tmp_path / "old.gguf", metadata=old)).model_config
    assert [layer.rope.factor for layer in config.layers] == [4.0] * tiny_gguf.LAYERS


def test_a_message_is_short_whatever_the_file_holds(tmp_path: Path) -> None:
    def long(writer: gguf.GGUFWriter) -> None:
        writer.add_string("llama.rope.scaling.type", "x" * 10**6)

    path = tiny_gguf.write(tmp_path / "long.gguf", metadata=long)
    with pytest.raises(CheckpointError, match="is not supported") as error:
        load(path)
    assert len(error.value.reason) < 200
