"""Weights of the benchmarks of W4A16 products, and the Hopper kernel over them."""

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from billfish.bench.turns import Call, elapsed_us, time_in_turns
from billfish.kernels import marlin
from billfish.kernels.marlin.configs import Gpu, HopperConfig, Product
from billfish.kernels.marlin.packing import unit_words

SHAPES = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (8192, 28672), (57344, 8192))
"""(N, K) of the projections of Llama 3 8B, and the two large ones of 70B."""
AHEAD_CYCLES = 1_000_000  # half a millisecond: what a busy host takes to queue a call, and more
COLD_BYTES = 260_000_000  # four times the L2 of an H200


def parse_numbers(text: str) -> list[int]:
    """Of an option: 1,8,16. ValueError for anything else."""
    found = [int(number) for number in text.split(",")]
    if min(found) < 1:
        raise ValueError(text)
    return found


def parse_shapes(text: str) -> list[tuple[int, int]]:
    """(N, K) of an option: 4096x4096,6144x4096. ValueError for anything else."""
    pairs = [shape.split("x") for shape in text.split(",")]
    found = [(int(n), int(k)) for n, k in pairs]
    if min(min(pair) for pair in found) < 1:
        raise ValueError(text)
    return found


def this_gpu() -> Gpu:
    from billfish.kernels.marlin.workspace import gpu_of

    return gpu_of(torch.device("cuda", torch.cuda.current_device()))


def random_weights(n: int, k: int, group_size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes [n, k] of 4 bits, one a byte, and their scales [n, k / group_size]."""
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8, device="cuda")
    scales = torch.rand(n, -(-k // group_size), device="cuda") * 0.01 + 0.002
    return codes, scales.to(dtype)


def units_of(n: int, k: int, group_size: int = 128) -> tuple[int, int, int]:
    """The shape of the units of a symmetric weight."""
    return -(-n // 64), -(-k // 128), unit_words(group_size, False)


def weight_bytes(name: str, n: int, k: int, group_size: int) -> int:
    """Bytes of a weight [n, k]: FP16 for cuBLAS, else INT4 with FP16 scales."""
    return 2 * n * k if name == "cublas" else n * k // 2 + 2 * n * (k // group_size)


def packed_copies(n: int, k: int) -> list[Tensor]:
    """The units of one random fp16 weight, groups of 128, in copies that miss the L2 cache."""
    codes, scales = random_weights(n, k, 128, torch.float16)
    copies = min(40, -(-COLD_BYTES // weight_bytes("billfish", n, k, 128)))
    return [
        marlin.pack(codes, scales, group_size=128, dtype=torch.float16).tensors[0]
        for _ in range(copies)
    ]


def time_configs(
    weights: list[Tensor], n: int, m: int, configs: Mapping[str, HopperConfig]
) -> dict[str, tuple[float, float]]:
    """(microseconds, spread) of the Hopper kernel for m tokens in several configurations."""
    from billfish.kernels.marlin import hopper_launch

    x = torch.randn(m, 128 * weights[0].shape[1], device="cuda").half()
    calls: dict[str, list[Call]] = {
        name: [partial(hopper_launch.launch, x, units, Product(n), config) for units in weights]
        for name, config in configs.items()
    }
    return time_in_turns(calls)


def read_rate() -> float:
    """Bytes a microsecond at which memory is read: the sum of 2 GiB, the best of a few."""
    data = torch.ones(1 << 29, dtype=torch.float32, device="cuda")
    best = min(elapsed_us(data.sum, AHEAD_CYCLES) for _ in range(8))
    return data.nbytes / best
