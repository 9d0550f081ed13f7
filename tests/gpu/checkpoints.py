"""Writes small random checkpoints as Hugging Face's tools name and pack their tensors."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from tests.unit import int4_writers as writers

HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 256, 512, 2, 4, 2, 64
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCAB = 256 + len(CONTROL)
GROUP = 128

KINDS: dict[str, dict[str, Any] | None] = {
    "dense": None,
    "gptq": writers.gptq_config(GROUP),
    "awq": writers.awq_config(GROUP),
}


def write(path: Path, kind: str) -> Path:
    """A Qwen 2 of this kind in the directory `path`."""
    rng = np.random.default_rng(0)

    def normal(*size: int, scale: float = 1.0) -> torch.Tensor:
        values = scale * rng.standard_normal(size, dtype=np.float32)
        return torch.from_numpy(values).to(torch.bfloat16)

    tensors = {
        "model.embed_tokens.weight": normal(VOCAB, HIDDEN),
        "lm_head.weight": normal(VOCAB, HIDDEN, scale=HIDDEN**-0.5),
        "model.norm.weight": 1 + normal(HIDDEN, scale=0.1),
    }
    heads, kv_heads = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    for index in range(LAYERS):
        layer = f"model.layers.{index}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{layer}.{name}.weight"] = 1 + normal(HIDDEN, scale=0.1)
        for name, rows, columns in (
            ("self_attn.q_proj", heads, HIDDEN), ("self_attn.k_proj", kv_heads, HIDDEN),
            ("self_attn.v_proj", kv_heads, HIDDEN), ("self_attn.o_proj", HIDDEN, heads),
            ("mlp.gate_proj", INNER, HIDDEN), ("mlp.up_proj", INNER, HIDDEN),
            ("mlp.down_proj", HIDDEN, INNER),
        ):  # fmt: skip
            if name.removeprefix("self_attn.")[0] in "qkv":
                tensors[f"{layer}.{name}.bias"] = normal(rows, scale=0.2)
            if kind == "dense":
                tensors[f"{layer}.{name}.weight"] = normal(rows, columns, scale=columns**-0.5)
                continue
            seed = int(rng.integers(1 << 31))
            zeros = 8 if kind == "gptq" else None
            matrix = writers.matrix(rows, columns, GROUP, seed=seed, zeros=zeros)
            # Codes less their zero points are 5 to 7 from 0, and scales about 1.
            matrix.scales = (matrix.scales.astype(np.float32) * columns**-0.5 / 6).astype("float16")
            parts = writers.gptq(matrix, 1) if kind == "gptq" else writers.awq(matrix)
            tensors.update({f"{layer}.{name}.{part}": value for part, value in parts.items()})
    save_file({k: v.contiguous() for k, v in tensors.items()}, path / "model.safetensors")
    config = {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": VOCAB,
        "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "hidden_act": "silu",
        "max_position_embeddings": 1024, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "eos_token_id": 2, "bos_token_id": 0,
    }  # fmt: skip
    if KINDS[kind] is not None:
        config["quantization_config"] = KINDS[kind]
    (path / "config.json").write_text(json.dumps(config))
    _write_tokenizer(path)
    return path


def _write_tokenizer(path: Path) -> None:
    """Of bytes, and control tokens before them."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE(vocab={t: i for i, t in enumerate([*CONTROL, *letters])}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in CONTROL])
    tokenizer.save(str(path / "tokenizer.json"))
    names = {"bos_token": CONTROL[0], "eos_token": CONTROL[2]}
    (path / "tokenizer_config.json").write_text(json.dumps(names))
