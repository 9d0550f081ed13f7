"""The sampling options that a GGUF file asks for.

GGUF keeps them under `general.sampling.` (the keys are listed in llama.cpp's gguf-py/gguf/
constants.py), as Hugging Face checkpoints do in generation_config.json.
"""

from dataclasses import dataclass, field
from typing import Any

from billfish.checkpoint.gguf import GGUFFile
from billfish.errors import CheckpointError, InvalidRequestError
from billfish.sampling_params import SamplingParams

PREFIX = "general.sampling."


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


def read(file: GGUFFile) -> SamplingDefaults:
    """What the file asks for. Raises CheckpointError for a value out of range."""
    options: dict[str, Any] = {}
    ignored: list[str] = []
    for key in sorted(file.metadata):
        name = key.removeprefix(PREFIX)
        if name == key:
            continue
        if name == "temp":
            # Not above 0 is greedy there, whatever the number.
            options["temperature"] = max(0.0, file.metadata.number(key, -1e9, 1e9))
        elif name == "top_k":
            options["top_k"] = max(
                0, file.metadata.integer(key, -(2**31), 2**31 - 1)
            )  # not above 0: all
        elif name in ("top_p", "min_p"):
            options[name] = file.metadata.number(key, 0.0, 1.0)
        else:
            ignored.append(key)
    for name, value in options.items():
        try:
            SamplingParams(**{name: value})
        except InvalidRequestError as error:
            key = PREFIX + ("temp" if name == "temperature" else name)
            raise CheckpointError(file.path, error.reason, tensor=key) from error
    return SamplingDefaults(options, tuple(ignored))
