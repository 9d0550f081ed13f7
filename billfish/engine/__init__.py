"""The engine: which request computes what, when, and in which KV blocks. Pure Python, no torch."""

from billfish.engine.block_pool import InvariantError
from billfish.engine.engine import Engine, ExecutorError
from billfish.engine.outputs import EngineStats, FinishReason, RequestMetrics, RequestOutput

__all__ = [
    "Engine",
    "EngineStats",
    "ExecutorError",
    "FinishReason",
    "InvariantError",
    "RequestMetrics",
    "RequestOutput",
]
