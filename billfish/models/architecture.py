"""What an architecture file says: the name it goes by, and how a file describes it."""

from collections.abc import Callable
from dataclasses import dataclass

from billfish.checkpoint.gguf import GGUFFile
from billfish.config import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """One family of models.

    gguf: as `general.architecture` has it in GGUF files. from_gguf: reads the shape of a model,
    raising CheckpointError for what is missing, of the wrong type or not supported. interleaved:
    GGUF files hold the rows of each query and key head in the order that llama.cpp's converter
    gives them, for a rotary embedding that turns neighbouring dimensions.
    """

    gguf: str
    from_gguf: Callable[[GGUFFile], ModelConfig]
    interleaved: bool = False
