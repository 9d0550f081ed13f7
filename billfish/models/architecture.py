"""What an architecture file says: the names it goes by, and how each kind of file describes it."""

from collections.abc import Callable
from dataclasses import dataclass

from billfish.checkpoint.gguf import GGUFFile
from billfish.checkpoint.metadata import Metadata
from billfish.config import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """One family of models.

    model_type: as config.json of Hugging Face has it. classes: those of its models that continue
    text, as config.json's `architectures` names them. gguf: as `general.architecture` has it in
    GGUF files; None: no such files are read. from_hf, from_gguf: read the shape of a model, raising
    CheckpointError for what is missing, of the wrong type or not supported.

    zero_centred_norms: Hugging Face checkpoints hold what is added to 1 in norms; GGUF files hold
    the sum. interleaved: GGUF files hold the rows of each query and key head in the order that
    llama.cpp's converter gives them, for a rotary embedding that turns neighbouring dimensions.
    renamed: how names of tensors begin in some Hugging Face checkpoints, and how they begin here.
    others: how the names begin there of what is no part of the language model.
    """

    model_type: str
    classes: tuple[str, ...]
    from_hf: Callable[[Metadata], ModelConfig]
    gguf: str | None = None
    from_gguf: Callable[[GGUFFile], ModelConfig] | None = None
    zero_centred_norms: bool = False
    interleaved: bool = False
    renamed: tuple[tuple[str, str], ...] = ()
    others: tuple[str, ...] = ()
