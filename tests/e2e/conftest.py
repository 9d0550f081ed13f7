"""The real model, loaded once a process, and its independent oracle."""

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from billfish import LLM
from billfish.config import CacheConfig, SchedulerConfig


@pytest.fixture(scope="session")
def llm(model_path: Path) -> LLM:
    """float32, so that results can be compared to the last digits."""
    return LLM(str(model_path), dtype="float32", cache=CacheConfig(num_blocks=2048), seed=0)


@pytest.fixture(scope="session")
def llm_bf16(model_path: Path) -> LLM:
    return LLM(str(model_path), dtype="bfloat16", cache=CacheConfig(num_blocks=2048), seed=0)


@pytest.fixture(scope="session")
def make_llm(model_path: Path):
    """Another engine over the float32 model, with other limits."""

    def make(*, num_blocks: int = 2048, block_size: int = 16, **scheduler: int) -> LLM:
        cache = CacheConfig(num_blocks=num_blocks, block_size=block_size)
        return LLM(
            str(model_path), dtype="float32", cache=cache, scheduler=SchedulerConfig(**scheduler)
        )

    return make


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The directory of a variant of `tiny_hf`, by name, written once: not to be changed."""
    from tests.e2e import tiny_hf

    folder = tmp_path_factory.mktemp("models")

    @functools.cache
    def save(name: str) -> Path:
        return tiny_hf.save(tiny_hf.model_of(name), folder / name.replace(" ", "-"))

    return save


@pytest.fixture(scope="session")
def oracle(model_path: Path):
    """transformers' own reading of the same file, weights dequantized to float32."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        model_path.parent, gguf_file=model_path.name, dtype=torch.float32
    )
    return model.eval()
