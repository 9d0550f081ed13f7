"""A model to be quantized, opened from where it is: its weights, its tokenizer, its other files."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from billfish.checkpoint import sampling_defaults
from billfish.checkpoint.directory import ModelDirectory
from billfish.checkpoint.gguf import GGUFFile
from billfish.checkpoint.locate import locate
from billfish.checkpoint.metadata import Metadata
from billfish.config import LayerConfig, ModelConfig, RopeConfig
from billfish.errors import CheckpointError, ConfigError
from billfish.models import gguf as gguf_models
from billfish.models import hf as hf_models
from billfish.models.architecture import Architecture
from billfish.models.decoder import tensor_shapes
from billfish.models.weights import LoadOptions, WeightSource
from billfish.tokenizer import Tokenizer, from_directory, from_gguf
from billfish.tokenizer.export import to_huggingface

# What a Hugging Face directory may have beside weights and config.json, and keeps.
_KEPT_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "tokenizer.model", "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json",
    "generation_config.json", "LICENSE", "LICENSE.txt", "NOTICE",
)  # fmt: skip
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class Source:
    """shapes: of all weights, by their names. config_json: what config.json says but for the
    quantization. files: texts of other files. copied: those that are copied. dtype: of the weights.
    zero_centred_norms: norms are stored as what is added to 1.
    """

    config: ModelConfig
    weights: WeightSource
    shapes: Mapping[str, tuple[int, ...]]
    tokenizer: Tokenizer
    config_json: Mapping[str, Any]
    files: Mapping[str, str]
    copied: tuple[Path, ...]
    dtype: torch.dtype
    zero_centred_norms: bool = False

    def is_int4(self, layer: str) -> bool:
        return self.weights.int4_groups(layer) is not None


@contextmanager
def open_source(model: str, options: LoadOptions) -> Iterator[Source]:
    """A GGUF file or a Hugging Face directory, as `LLM` takes them. Raises CheckpointError."""
    path = locate(model)
    if path.is_dir():
        with ModelDirectory.open(path) as directory:
            yield _from_directory(directory, options)
    else:
        with GGUFFile.open(path) as file:
            yield _from_gguf(file, options)


def _from_directory(directory: ModelDirectory, options: LoadOptions) -> Source:
    config = hf_models.read_config(directory)
    weights = hf_models.HFWeights(directory, config, options)
    shapes = tensor_shapes(config)
    for name in shapes:
        if weights.stored_name(name) != name:
            raise ConfigError(
                f"{directory.path} is more than a language model, and only those can be written"
            )
    config_json = {k: v for k, v in directory.config.items() if k != "quantization_config"}
    stated = config_json.get("dtype") or config_json.get("torch_dtype")
    return Source(
        config=config,
        weights=weights,
        shapes=shapes,
        tokenizer=from_directory(directory.path),
        config_json=config_json,
        files={},
        copied=tuple(p for p in (directory.path / n for n in _KEPT_FILES) if p.is_file()),
        dtype=_DTYPES.get(stated, torch.bfloat16) if isinstance(stated, str) else torch.bfloat16,
        zero_centred_norms=hf_models.architecture_of(directory).zero_centred_norms,
    )


def _from_gguf(file: GGUFFile, options: LoadOptions) -> Source:
    config = gguf_models.read_config(file)
    weights = gguf_models.GGUFWeights(file, config, options)
    shapes = tensor_shapes(config)
    weights.check(shapes)
    architecture = gguf_models.architecture_of(file)
    if architecture.zero_centred_norms:
        raise ConfigError(
            f"{file.path}: GGUF files of {architecture.gguf} hold norms in another form; quantize "
            "the model from its Hugging Face directory"
        )
    tokenizer = from_gguf(file.metadata, file.path)
    tokens: dict[str, Any] = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": list(tokenizer.eos_token_ids),
    }
    generation = {**tokens, **sampling_defaults.from_gguf(file.metadata).options}
    if generation.get("temperature"):
        generation["do_sample"] = True
    return Source(
        config=config,
        weights=weights,
        shapes=shapes,
        tokenizer=tokenizer,
        config_json={**_config_json(config, architecture, file.path), **tokens},
        files={
            **to_huggingface(file.metadata, file.path),
            "generation_config.json": json.dumps(generation, indent=2) + "\n",
        },
        copied=(),
        dtype=torch.bfloat16,
    )


def _config_json(config: ModelConfig, architecture: Architecture, path: str) -> dict[str, Any]:
    """config.json of a model whose shape comes from a GGUF file.

    Only what reads back as the very same shape is written; CheckpointError for the rest, such as
    rotary embeddings that no setting of config.json makes.
    """
    layer = config.layers[0]
    values: dict[str, Any] = {
        "architectures": [architecture.classes[0]],
        "model_type": architecture.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.context_length,
        "rms_norm_eps": config.rms_norm_eps,
        "hidden_act": "silu" if config.activation == "silu" else "gelu_pytorch_tanh",
        "attention_bias": config.qkv_bias and config.o_bias,
        "mlp_bias": config.mlp_bias,
        "tie_word_embeddings": config.tie_embeddings,
        "rope_theta": layer.rope.theta if layer.rope else 10000.0,
        "sliding_window": layer.sliding_window,
        "use_cache": True,
    }
    if layer.rope and layer.rope.scaling == "linear" and layer.rope.factor != 1:
        values["rope_scaling"] = {"rope_type": "linear", "factor": layer.rope.factor}
    try:
        read_back = architecture.from_hf(Metadata(values, path))
    except CheckpointError:
        read_back = None
    if read_back is None or _meaning(read_back) != _meaning(config):
        raise CheckpointError(
            path,
            "its settings cannot be written as config.json; quantize the model from its Hugging "
            "Face directory",
        )
    return values


def _meaning(config: ModelConfig) -> ModelConfig:
    """Without what names say and what has no effect."""

    def plain(layer: LayerConfig) -> LayerConfig:
        rope = layer.rope
        if rope is None or rope.scaling != "linear" or rope.short_divisors or rope.long_divisors:
            return layer
        used = RopeConfig(
            theta=rope.theta, factor=rope.factor, attention_factor=rope.attention_factor
        )
        return replace(layer, rope=used)

    scale = config.attention_scale
    if scale == config.head_dim**-0.5:
        scale = None
    layers = tuple(map(plain, config.layers))
    return replace(config, architecture="", layers=layers, attention_scale=scale)
