"""The tokenizer of a model, without its weights, for the server's own process."""

from billfish.checkpoint.gguf import GGUFFile
from billfish.checkpoint.locate import locate
from billfish.tokenizer import Tokenizer, from_directory, from_gguf


def load_tokenizer(model: str) -> Tokenizer:
    """model: as `locate` takes it. Raises CheckpointError for one that cannot be used."""
    path = locate(model)
    if path.is_dir():
        return from_directory(path)
    with GGUFFile.open(path) as file:
        return from_gguf(file.metadata, str(path))
