"""Writes a model of transformers as the GGUF file that llama.cpp's converter makes of it.

Names come from the `gguf` package; row order, folded norms and metadata follow the converter.
"""

import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from tokenizers import pre_tokenizers

from tests.e2e.tiny_hf import CONTROL

ARCHITECTURES = {
    "llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma2": "gemma2",
    "gemma3_text": "gemma3", "phi3": "phi3", "smollm3": "smollm3",
}  # fmt: skip
INTERLEAVED = ("llama", "smollm3")


def write(model: Any, path: Path, kind: Type = Type.F32) -> Path:
    """kind: of matrices in layers. `model` gets the values that are written."""
    config = model.config
    name = ARCHITECTURES[config.model_type]
    writer = gguf.GGUFWriter(path, name)
    _write_shape(writer, config)
    _write_rope(writer, config)
    _write_tokenizer(writer, config)
    enum = next(a for a, text in gguf.MODEL_ARCH_NAMES.items() if text == name)
    names = gguf.get_tensor_name_map(enum, config.num_hidden_layers)
    tied = config.tie_word_embeddings
    for stored, parameter in model.state_dict().items():
        if stored == "lm_head.weight" and tied:
            continue
        target = names.get_name(stored, try_suffixes=(".weight", ".bias"))
        assert target is not None, stored
        raw_kind = kind if parameter.dim() == 2 and ".layers." in stored else Type.F32
        values = parameter.detach().numpy()
        if name.startswith("gemma") and stored.endswith("norm.weight"):
            values = values + 1
        raw = gguf.quants.quantize(values, raw_kind)
        if raw_kind is not Type.F32:
            with torch.no_grad():
                parameter.copy_(torch.from_numpy(gguf.quants.dequantize(raw, raw_kind)))
        if name in INTERLEAVED and (".q_proj" in stored or ".k_proj" in stored):
            raw = raw[_interleaved(len(raw), _head_dim(config))]
        writer.add_tensor(target, np.ascontiguousarray(raw), raw_dtype=raw_kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _interleaved(rows: int, head_dim: int) -> np.ndarray:
    """The halves of every head, one row of each in turn."""
    order = np.arange(rows).reshape(-1, 2, head_dim // 2)
    return order.swapaxes(1, 2).reshape(-1)


def _head_dim(config: Any) -> int:
    given = getattr(config, "head_dim", None)
    return given or config.hidden_size // config.num_attention_heads


def _write_shape(writer: gguf.GGUFWriter, config: Any) -> None:
    head_dim = _head_dim(config)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    if config.model_type != "phi3":
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if config.model_type in ("gemma2", "gemma3_text"):
        writer.add_sliding_window(config.sliding_window)
        if config.attn_logit_softcapping:
            writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        if config.final_logit_softcapping:
            writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if config.model_type == "phi3":
        writer.add_sliding_window(config.sliding_window or 0)
        part = config.rope_parameters["partial_rotary_factor"]
        writer.add_rope_dimension_count(int(part * head_dim))


def _write_rope(writer: gguf.GGUFWriter, config: Any) -> None:
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    kind = rope["rope_type"]
    writer.add_rope_freq_base(rope["rope_theta"])
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
    if kind == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_factors(rope, config.head_dim))
    if kind == "longrope":
        original = rope["original_max_position_embeddings"]
        scale = config.max_position_embeddings / original
        writer.add_rope_scaling_orig_ctx_len(original)
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(scale) / math.log(original)))
        for length in ("long", "short"):
            factors = np.float32(rope[f"{length}_factor"])
            writer.add_tensor(f"rope_factors_{length}.weight", factors)


def _llama3_factors(rope: dict[str, Any], head_dim: int) -> np.ndarray:
    factors = []
    for i in range(0, head_dim, 2):
        turns = rope["original_max_position_embeddings"] * rope["rope_theta"] ** (-i / head_dim)
        turns /= 2 * math.pi
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        smooth = (turns - low) / (high - low)
        if turns > high:
            factors.append(1.0)
        elif turns < low:
            factors.append(rope["factor"])
        else:
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.float32(factors)


def _write_tokenizer(writer: gguf.GGUFWriter, config: Any) -> None:
    tokens = [*CONTROL, *sorted(pre_tokenizers.ByteLevel.alphabet()), "he"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(CONTROL) + [1] * (len(tokens) - len(CONTROL)))
    writer.add_token_merges(["h e"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(2)
