"""The executor: turns the engine's plans into tensors, runs the model, samples."""

from billfish.worker.model_runner import ModelRunner

__all__ = ["ModelRunner"]
