"""Which device a model runs on."""

import logging

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
    reason = _why_not(device, dtype)
    if reason is None:
        index = _index(device)
        return torch.device("cuda", torch.cuda.current_device() if index is None else index)
    if device != "auto":
        raise ConfigError(f"device {shown(device)}: {reason}")
    if torch.cuda.is_available():
        logger.warning("using the CPU: %s", reason)
    return torch.device("cpu")


def _why_not(device: str, dtype: torch.dtype) -> str | None:
    """Why a GPU cannot be used; None where it can."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} was built without CUDA: install a build with it"
    count = torch.cuda.device_count()
    if not torch.cuda.is_available() or count == 0:
        return (
            f"torch {torch.__version__}, built for CUDA {torch.version.cuda}, finds no GPU that it "
            "can use: is there one, and does nvidia-smi show a driver for that version?"
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
    if dtype == torch.float32:
        return "float32 runs on a CPU only: use bfloat16 or float16"
    return None


def _index(device: str) -> int | None:
    number = device.partition(":")[2]
    return int(number) if number else None
