"""Writes small random models with transformers, one for each architecture and variant."""

import functools
import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from tokenizers import AddedToken, decoders, pre_tokenizers, processors
from tokenizers.models import BPE

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOKENS = 256 + len(CONTROL) + 1
VOCAB = TOKENS + 5  # a few rows more than there are tokens

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": None, "initializer_range": 0.2,
}  # fmt: skip


@dataclass(frozen=True)
class Variant:
    """model: transformers' class, less "Config" and "ForCausalLM". options: of its configuration.
    length: the longest sequence that is compared."""

    model: str
    options: dict[str, Any] = field(default_factory=dict)
    max_model_len: int | None = None
    config_class: str | None = None


def rope(kind: str, **options: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **options}}


VARIANTS: dict[str, Variant] = {
    "llama": Variant("Llama", {"tie_word_embeddings": True}),
    "llama biased, odd": Variant(
        "Llama",
        {
            "attention_bias": True, "mlp_bias": True, "head_dim": 24, "hidden_size": 60,
            "intermediate_size": 72, "num_attention_heads": 6, "num_key_value_heads": 3,
        },
    ),
    "llama linear": Variant("Llama", rope("linear", factor=4.0)),
    "llama llama3": Variant(
        "Llama",
        rope(
            "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
            original_max_position_embeddings=64,
        ),
    ),
    "llama yarn": Variant(
        "Llama", rope("yarn", factor=4.0, original_max_position_embeddings=64, beta_fast=8.0)
    ),
    "llama dynamic": Variant("Llama", rope("dynamic", factor=2.0)),
    "mistral": Variant("Mistral", {"sliding_window": 24}),
    "qwen2": Variant("Qwen2"),
    "qwen2 window": Variant(
        "Qwen2", {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}
    ),
    "qwen3": Variant("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "gemma2": Variant(
        "Gemma2",
        {
            "head_dim": 32, "sliding_window": 24, "query_pre_attn_scalar": 32,
            "attn_logit_softcapping": 5.0,
        },
    ),
    "gemma2 scaled": Variant("Gemma2", {"query_pre_attn_scalar": 24, "num_hidden_layers": 2}),
    "gemma3": Variant(
        "Gemma3",
        {
            "head_dim": 32, "sliding_window": 24, "query_pre_attn_scalar": 32,
            "num_hidden_layers": 6, "final_logit_softcapping": 30.0,
        },
        config_class="Gemma3TextConfig",
    ),
    "phi3": Variant("Phi3", {"sliding_window": 24, "rope_parameters": {
        "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}}),
    "phi3 short": Variant("Phi3", {"original_max_position_embeddings": 128, **rope(
        "longrope", original_max_position_embeddings=128, partial_rotary_factor=1.0,
        short_factor=[1.0 + i / 8 for i in range(8)], long_factor=[2.0 + i for i in range(8)],
    )}, max_model_len=128),
    "phi3 long": Variant("Phi3", {"original_max_position_embeddings": 64, **rope(
        "longrope", original_max_position_embeddings=64, partial_rotary_factor=1.0,
        short_factor=[1.0 + i / 8 for i in range(8)], long_factor=[2.0 + i for i in range(8)],
    )}),
    "smollm3": Variant("SmolLM3", {"num_hidden_layers": 4}),
    "smollm3 window": Variant(
        "SmolLM3",
        {"no_rope_layers": [1, 0, 1], "use_sliding_window": True, "sliding_window": 24},
    ),
}  # fmt: skip


def build(variant: Variant) -> Any:
    """The model of transformers, random, float32; norms and biases too are far from their start."""
    name = variant.config_class or f"{variant.model}Config"
    # Its other attention ignores Gemma 2's soft cap.
    options = {**COMMON, **variant.options, "attn_implementation": "eager"}
    config = getattr(transformers, name)(**options)
    torch.manual_seed(0)
    model = getattr(transformers, f"{variant.model}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.generation_config = transformers.GenerationConfig(bos_token_id=0, eos_token_id=[2, 0])
    return model


@functools.cache
def model_of(name: str) -> Any:
    """The variant of this name, built once a process: not to be changed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return build(VARIANTS[name])


def byte_tokenizer() -> tokenizers.Tokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {text: i for i, text in enumerate([*CONTROL, *letters, "he"])}
    tokenizer = tokenizers.Tokenizer(BPE(vocab=vocab, merges=[("h", "e")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in CONTROL])
    return tokenizer


def save(model: Any, path: Path, **options: Any) -> Path:
    """The model, and a tokenizer of bytes, as transformers writes them."""
    model.save_pretrained(path, **options)
    byte_tokenizer().save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"})
    )
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


def rewrite(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the object in a JSON file."""
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))
