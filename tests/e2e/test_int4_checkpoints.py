"""Whole models in every INT4 format, against transformers with the weights that they stand for."""

import functools
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from billfish import LLM, SamplingParams
from billfish.config import CacheConfig
from billfish.errors import CheckpointError
from billfish.layers.linear import Linear, QuantLinear
from tests.e2e import tiny_hf
from tests.e2e.test_against_oracle import logits_of, oracle_logits
from tests.unit import int4_writers as writers
from tests.unit.test_int4_formats import compressed

VARIANT = tiny_hf.Variant("Qwen2", {"hidden_size": 96, "intermediate_size": 160})
TOKENS = [int(t) for t in np.random.default_rng(0).integers(3, 259, 50)]

# Group size, zero points, act-order; the configuration, and how a layer is written.
CASES: dict[str, tuple[int, Any, bool, dict[str, Any], Any]] = {
    "gptq": (32, 8, False, writers.gptq_config(32), lambda m: writers.gptq(m, 1)),
    "gptq asymmetric, v2": (
        64, None, False, writers.gptq_config(64, sym=False, checkpoint_format="gptq_v2"),
        lambda m: writers.gptq(m, 2),
    ),
    "gptq act-order": (
        32, None, True, writers.gptq_config(32, sym=False, desc_act=True),
        lambda m: writers.gptq(m, 1),
    ),
    "gptq act-order, every layer its own": (
        32, None, True, writers.gptq_config(32, sym=False, desc_act=True),
        lambda m: writers.gptq(m, 1),
    ),
    "gptq whole rows": (-1, 8, False, writers.gptq_config(-1), lambda m: writers.gptq(m, 1)),
    "awq": (32, None, False, writers.awq_config(32), writers.awq),
    "compressed-tensors": (
        32, 8, False, writers.compressed_config(32), lambda m: compressed(m, 32, True)[0],
    ),
    "compressed-tensors asymmetric channels": (
        -1, None, False, writers.compressed_config(-1, symmetric=False),
        lambda m: compressed(m, -1, False)[0],
    ),
    "hqq": (32, "float", False, writers.hqq_config(32), lambda m: writers.hqq(m, 32)),
}  # fmt: skip


@functools.cache
def dense_model() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return tiny_hf.build(VARIANT)


def write(path: Path, name: str) -> tuple[Path, Any]:
    """The directory, and transformers' model with the weights that it stands for."""
    group_size, zeros, act_order, settings, writer = CASES[name]
    model = dense_model()
    state = {key: value.clone() for key, value in model.state_dict().items()}
    tiny_hf.save(model, path)
    tensors = {}
    for seed, (key, value) in enumerate(state.items()):
        layer = key.removesuffix(".weight")
        if not layer.endswith("_proj") or value.dim() != 2:
            tensors[key] = value
            continue
        # Layers of one input have one order of columns, as GPTQ gives them, or it is made so.
        own = name.endswith("its own") or layer.endswith(("o_proj", "down_proj"))
        order = seed if own else 0
        m = writers.matrix(
            *value.shape, group_size, seed=seed, zeros=zeros, act_order=act_order and order + 1
        )
        m.scales = (m.scales.astype(np.float32) * 0.05).astype(np.float16)
        tensors.update({f"{layer}.{part}": tensor for part, tensor in writer(m).items()})
        state[key] = torch.from_numpy(m.values()).float()
    (path / "model.safetensors").unlink()
    save_file({k: v.contiguous() for k, v in tensors.items()}, path / "model.safetensors")
    tiny_hf.rewrite(path / "config.json", lambda c: c.update(quantization_config=settings))
    oracle = type(model)(model.config).eval()
    oracle.load_state_dict(state)
    return path, oracle


def load(path: Path) -> LLM:
    return LLM(str(path), dtype="float32", cache=CacheConfig(num_blocks=64))


@pytest.mark.parametrize("name", CASES)
def test_logits_and_tokens(name: str, tmp_path: Path) -> None:
    path, oracle = write(tmp_path, name)
    llm = load(path)
    ours, theirs = logits_of(llm, TOKENS), oracle_logits(oracle, TOKENS)
    assert (ours - theirs).norm() <= 1e-4 * theirs.norm()
    assert (ours - theirs).abs().max() <= 1e-4 * theirs.abs().max()
    (output,) = llm.generate(
        [TOKENS], SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
    )
    logits = oracle_logits(oracle, [*TOKENS, *output.token_ids])[:, : tiny_hf.TOKENS]
    assert list(output.token_ids) == logits.argmax(-1)[len(TOKENS) - 1 : -1].tolist()
    # Nothing was made dense on the way, and what can be is merged.
    layers = [m for m in llm.executor.model.modules() if isinstance(m, QuantLinear)]
    each = 7 if name.endswith("its own") else 4
    assert len(layers) == each * tiny_hf.COMMON["num_hidden_layers"]
    dense = [m for m in llm.executor.model.modules() if isinstance(m, Linear)]
    assert len(dense) == 1  # the head


def test_layers_that_are_left_dense(tmp_path: Path) -> None:
    path, oracle = write(tmp_path, "compressed-tensors")
    tensors = load_file(path / "model.safetensors")
    for key, value in oracle.state_dict().items():
        if key.endswith("v_proj.weight"):
            layer = key.removesuffix(".weight")
            for part in ("weight_packed", "weight_scale", "weight_shape"):
                del tensors[f"{layer}.{part}"]
            tensors[key] = value.clone()
    save_file(tensors, path / "model.safetensors")
    settings = writers.compressed_config(32, ignore=["lm_head", r"re:.*\.v_proj$"])
    tiny_hf.rewrite(path / "config.json", lambda c: c.update(quantization_config=settings))
    ours, theirs = logits_of(load(path), TOKENS), oracle_logits(oracle, TOKENS)
    assert (ours - theirs).norm() <= 1e-4 * theirs.norm()


def test_settings_beside_config_json(tmp_path: Path) -> None:
    """As older checkpoints have them."""
    path, oracle = write(tmp_path, "gptq")
    tiny_hf.rewrite(path / "config.json", lambda c: c.pop("quantization_config"))
    settings = {k: v for k, v in writers.gptq_config(32).items() if k != "quant_method"}
    (path / "quantize_config.json").write_text(json.dumps(settings))
    ours, theirs = logits_of(load(path), TOKENS), oracle_logits(oracle, TOKENS)
    assert (ours - theirs).norm() <= 1e-4 * theirs.norm()


@pytest.mark.parametrize(
    ("part", "change", "reason"),
    [
        ("scales", lambda t: t.fill_(float("nan")), "scales: holds values that are not finite"),
        ("g_idx", lambda t: t.fill_(7), "g_idx: got groups 7 to 7, expected 0 to 2"),
        ("qweight", lambda t: t[1:].clone(), r"has shape \[11, 96\], expected \[12, 96\]"),
        ("qzeros", lambda t: t.float(), "dtype F32 is not supported"),
        ("qzeros", lambda t: None, "is missing"),
    ],
)
def test_damage_names_file_and_tensor(part: str, change: Any, reason: str, tmp_path: Path) -> None:
    path, _ = write(tmp_path, "gptq")
    tensors = load_file(path / "model.safetensors")
    name = f"model.layers.2.self_attn.q_proj.{part}"
    changed = change(tensors.pop(name))
    if changed is not None:
        tensors[name] = changed
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=reason) as error:
        load(path)
    assert "model.layers.2.self_attn.q_proj" in str(error.value.tensor)
    assert str(tmp_path) in error.value.file


@pytest.mark.parametrize(
    "settings", [{"quant_method": "fp8"}, writers.gptq_config(bits=8), {"quant_method": "exl2"}]
)
def test_other_formats(settings: dict[str, Any], tmp_path: Path) -> None:
    tiny_hf.save(dense_model(), tmp_path)
    tiny_hf.rewrite(tmp_path / "config.json", lambda c: c.update(quantization_config=settings))
    with pytest.raises(CheckpointError, match="not supported") as error:
        load(tmp_path)
    assert error.value.file == str(tmp_path / "config.json")
