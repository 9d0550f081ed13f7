"""Compiles what a model on a GPU will launch, several kernels at a time, before it serves.

Triton compiles a kernel when it is first launched. One after another that takes most of a first
start; most of a compilation runs outside the interpreter's lock. (Later starts find the machine
code in Triton's cache.)
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor, nn

from billfish.layers.linear import QuantLinear

THREADS = 8
ROWS = (1, 16, 32, 64, 128, 256, 512, 2048, 8192)
"""Numbers of tokens for which products are compiled: one in each range that has a tiling."""


def compile_all(jobs: Sequence[Callable[[], object]], device: torch.device) -> None:
    """Run jobs that launch kernels, each on a stream of its own, and wait for them."""

    def run(job: Callable[[], object]) -> None:
        with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
            with torch.inference_mode():
                job()
            torch.cuda.current_stream(device).synchronize()

    torch.cuda.synchronize(device)
    with ThreadPoolExecutor(THREADS) as pool:
        for done in [pool.submit(run, job) for job in jobs]:
            done.result()


def products(model: nn.Module, max_tokens: int) -> list[Callable[[], object]]:
    """A job for each INT4 product of the model and each range of tokens, up to max_tokens."""
    layers: dict[tuple[int, int, bool], QuantLinear] = {}
    for module in model.modules():
        if isinstance(module, QuantLinear):
            weight = module.weight
            layers.setdefault((weight.n, weight.k, weight.silu_mul), module)
    rows = sorted({min(count, max_tokens) for count in ROWS}, reverse=True)
    return [partial(_product, layer, count) for count in rows for layer in layers.values()]


def _product(layer: QuantLinear, rows: int) -> Tensor:
    weight = layer.weight
    return layer(torch.zeros(rows, weight.k, dtype=weight.dtype, device=weight.device))
