"""The sampling options that a model's files ask for.

GGUF keeps them under `general.sampling.` (the keys are listed in llama.cpp's gguf-py/gguf/
constants.py), Hugging Face directories in generation_config.json (transformers' GenerationConfig).
"""

from dataclasses import dataclass, field
from typing import Any

from billfish.checkpoint.metadata import Metadata
from billfish.errors import CheckpointError, InvalidRequestError
from billfish.sampling_params import SamplingParams

PREFIX = "general.sampling."
# Of generation_config.json: what changes which tokens are chosen, with the value that changes
# nothing.
_WITHOUT_EQUIVALENT: dict[str, Any] = {
    "num_beams": 1, "typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "top_h": None,
    "no_repeat_ngram_size": 0, "encoder_repetition_penalty": 1.0, "length_penalty": 1.0,
    "penalty_alpha": None, "guidance_scale": 1.0, "suppress_tokens": None,
    "begin_suppress_tokens": None, "forced_bos_token_id": None, "forced_eos_token_id": None,
    "bad_words_ids": None, "sequence_bias": None, "max_new_tokens": None, "min_new_tokens": None,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """options: those applied, by their names in SamplingParams. ignored: keys with no equivalent,
    such as a repetition penalty over the last few tokens only. False if there is nothing."""

    options: dict[str, Any] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.options or self.ignored)

    def __str__(self) -> str:
        parts = []
        if self.options:
            values = ", ".join(f"{name}={value:g}" for name, value in self.options.items())
            parts.append(f"sampling defaults of the model file: {values} (options you give win)")
        if self.ignored:
            parts.append(f"not supported, so not applied: {', '.join(self.ignored)}")
        return "; ".join(parts)


def from_gguf(metadata: Metadata) -> SamplingDefaults:
    """What a GGUF file asks for. Raises CheckpointError for a value out of range."""
    options: dict[str, Any] = {}
    keys: dict[str, str] = {}
    ignored: list[str] = []
    for key in sorted(metadata):
        name = key.removeprefix(PREFIX)
        if name == key:
            continue
        if name == "temp":
            # Not above 0 is greedy there, whatever the number.
            options["temperature"] = max(0.0, metadata.number(key, -1e9, 1e9))
            keys["temperature"] = key
        elif name == "top_k":
            # Not above 0 is all of them.
            options["top_k"] = max(0, metadata.integer(key, -(2**31), 2**31 - 1))
        elif name in ("top_p", "min_p"):
            options[name] = metadata.number(key, 0.0, 1.0)
        else:
            ignored.append(key)
        keys.setdefault(name, key)
    return _checked(options, ignored, metadata, keys)


def from_generation_config(config: Metadata) -> SamplingDefaults:
    """What generation_config.json asks for. `do_sample` false is greedy; where it is missing, the
    options that are there count. Raises CheckpointError for a value out of range."""
    options: dict[str, Any] = {}
    if not config.flag("do_sample", True):
        options["temperature"] = 0.0
    else:
        if config.get("temperature") is not None:
            options["temperature"] = config.number("temperature", 0.0, 1e9)
        if config.get("top_k") is not None:
            options["top_k"] = config.integer("top_k", 0, 2**31 - 1)
        for name in ("top_p", "min_p"):
            if config.get(name) is not None:
                options[name] = config.number(name, 0.0, 1.0)
    if config.get("repetition_penalty") is not None:
        options["repetition_penalty"] = config.number("repetition_penalty", 1e-3, 1e3)
    ignored = [
        key
        for key, neutral in _WITHOUT_EQUIVALENT.items()
        if config.get(key) is not None and config[key] != neutral
    ]
    return _checked(options, ignored, config, {})


def end_token_ids(config: Metadata) -> tuple[int, ...]:
    """`eos_token_id` of generation_config.json or config.json: one, a list of them, or none."""
    value = config.get("eos_token_id")
    if value is None:
        return ()
    if isinstance(value, list):
        return tuple(config.integers("eos_token_id", len(value)))
    return (config.integer("eos_token_id", 0, 2**31 - 1),)


def _checked(
    options: dict[str, Any], ignored: list[str], source: Metadata, keys: dict[str, str]
) -> SamplingDefaults:
    for name, value in options.items():
        try:
            SamplingParams(**{name: value})
        except InvalidRequestError as error:
            key = keys.get(name, name)
            raise CheckpointError(source.path, error.reason, tensor=key) from error
    return SamplingDefaults(options, tuple(ignored))
