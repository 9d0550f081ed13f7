"""Host memory that costs nothing until it is used."""

import math
import mmap
import sys
from pathlib import Path

import torch
from torch import Tensor

GIB = 2**30


def zeros_on_demand(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros in pages that the system maps to memory only when they are first written."""
    count = math.prod(shape)
    return torch.frombuffer(mmap.mmap(-1, count * dtype.itemsize), dtype=dtype).view(shape)


def available_memory() -> int:
    """Bytes that the system could give without swapping; without limit where it does not tell."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return sys.maxsize
    values = dict(line.split(":", 1) for line in lines)
    return int(values["MemAvailable"].split()[0]) * 1024


def gib(size: int) -> str:
    """A number of bytes as people say it."""
    return f"{size / GIB:.2f} GiB"
