"""The engine: which request computes what, when, and in which KV blocks. Pure Python, no torch."""

from billfish.engine.engine import Engine
from billfish.engine.outputs import EngineStats, FinishReason, RequestMetrics, RequestOutput
from billfish.errors import ExecutorError, InvariantError

__all__ = [
    "Engine",
    "EngineStats",
    "ExecutorError",
    "FinishReason",
    "InvariantError",
    "RequestMetrics",
    "RequestOutput",
]
