"""Which device a model runs on."""

import logging
import warnings

import torch

from billfish.errors import ConfigError, shown

logger = logging.getLogger(__name__)

LEAST_CAPABILITY = (8, 0)
"""The kernels need compute capability 8.0, which GPUs have since 2020."""


def choose(device: str, dtype: torch.dtype) -> torch.device:
    """The device called "auto", "cpu", "cuda" or "cuda:1".

    "auto" takes the GPU where there is one that can be used, else the CPU, and says why in the log.
    Raises ConfigError, in one line that says what is wrong, for a GPU asked for that cannot be.
    """
    if device == "cpu":
        return torch.device("cpu")
    reason = why_no_gpu(device)
    if reason is None and dtype == torch.float32:
        reason = "float32 runs on a CPU only: use bfloat16 or float16"
    if reason is None:
        index = _index(device)
        return torch.device("cuda", torch.cuda.current_device() if index is None else index)
    if device != "auto":
        raise ConfigError(f"device {shown(device)}: {reason}")
    if torch.cuda.is_available():
        logger.warning("using the CPU: %s", reason)
    return torch.device("cpu")


def why_no_gpu(device: str = "cuda") -> str | None:
    """Why the kernels cannot run on a GPU of this name, in one line; None where they can."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} was built without CUDA: install a build with it"
    with warnings.catch_warnings(record=True) as warned:  # of a driver too old, among others
        warnings.simplefilter("always")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        says = f" ({_sentence(warned[0].message)})" if warned else ""
        return (
            f"torch {torch.__version__}, built for CUDA {torch.version.cuda}, finds no GPU that it "
            f"can use{says}: is there one, and does nvidia-smi show a driver for that version?"
        )
    index = _index(device) or 0
    if index >= count:
        return f"there are {count} GPUs, numbered from 0"
    capability = torch.cuda.get_device_capability(index)
    if capability < LEAST_CAPABILITY:
        return (
            f"{torch.cuda.get_device_name(index)} has compute capability "
            f"{capability[0]}.{capability[1]}, and the kernels need 8.0"
        )
    return None


def _sentence(message: object) -> str:
    """The first sentence of a warning, in one line."""
    text = " ".join(str(message).split())
    return text.partition(". ")[0].partition(" (Triggered")[0].removesuffix(".")


def _index(device: str) -> int | None:
    number = device.partition(":")[2]
    return int(number) if number else None
