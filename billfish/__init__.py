"""Billfish: INT4 large language models, served from a paged KV cache.

The names below are loaded when they are first used, so that `from billfish.kernels import marlin`
brings in no engine and `import billfish` costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from billfish.version import __version__

if TYPE_CHECKING:
    from billfish.engine.outputs import RequestOutput
    from billfish.llm import LLM
    from billfish.sampling_params import SamplingParams

_HOMES = {
    "LLM": "billfish.llm",
    "SamplingParams": "billfish.sampling_params",
    "RequestOutput": "billfish.engine.outputs",
}

__all__ = ["LLM", "RequestOutput", "SamplingParams", "__version__"]


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
