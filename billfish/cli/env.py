"""`billfish env`: what this machine has, for bug reports."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version

from rich.console import Console
from rich.table import Table

from billfish.version import __version__

PACKAGES = (
    "torch", "triton", "numpy", "tokenizers", "jinja2", "fastapi", "pydantic", "uvicorn", "uvloop",
    "httptools", "httpx", "msgspec", "llguidance", "prometheus-client", "numba",
)  # fmt: skip


def command() -> None:
    """Show versions, processor and GPUs, as a report of a bug needs them."""
    import torch

    table = Table(show_header=False, box=None)
    table.add_row("billfish", __version__)
    table.add_row("python", platform.python_version())
    table.add_row("system", f"{platform.system()} {platform.machine()}")
    for name in PACKAGES:
        try:
            table.add_row(name, version(name))
        except PackageNotFoundError:
            table.add_row(name, "not installed")
    table.add_row("cpu", f"{torch.backends.cpu.get_cpu_capability()}, {os.cpu_count()} cores")
    table.add_row("threads", str(torch.get_num_threads()))
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            gpu = torch.cuda.get_device_properties(index)
            table.add_row(
                f"gpu {index}",
                f"{gpu.name}, sm_{gpu.major}{gpu.minor}, {gpu.total_memory / 2**30:.0f} GiB",
            )
    else:
        table.add_row("gpu", "none")
    Console().print(table)
