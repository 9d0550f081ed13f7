"""A few small products, to be run under compute-sanitizer by test_marlin.py.

They cover whole and shared tiles, several consumers, carried products, the epilogues, and, on
Hopper, tiles of equal parts and tiles with owners.
"""

import torch

from billfish.kernels import marlin
from billfish.kernels.marlin import reference


def otherwise(x: torch.Tensor, weight: marlin.PackedWeight) -> list[torch.Tensor]:
    """The product by equal parts, and by owners of tiles."""
    from billfish.kernels.marlin import hopper_launch
    from billfish.kernels.marlin.configs import HopperConfig, Product

    configs = (
        HopperConfig(rows=128, consumers=1, tile_m=8, stages=2, parts=4),
        HopperConfig(rows=64, consumers=2, tile_m=8, stages=2, owned=True, sharing_cost=0),
    )
    product = Product(weight.outputs)
    return [hopper_launch.launch(x, weight.tensors[0], product, config) for config in configs]


def main() -> None:
    rng = torch.Generator("cuda").manual_seed(0)
    for m, n, k, silu_mul in (
        (1, 256, 4096, False), (9, 208, 512, True), (40, 72, 2048, False), (70, 576, 1408, True),
        (300, 130, 384, False),
    ):  # fmt: skip
        codes = torch.randint(0, 16, (n, k), dtype=torch.uint8, generator=rng, device="cuda")
        scales = torch.rand(n, k // 128, generator=rng, device="cuda").half() * 0.02
        weight = marlin.pack(codes, scales, group_size=128, dtype=torch.half, silu_mul=silu_mul)
        x = torch.randn(m, k, generator=rng, device="cuda").half()
        residual = torch.randn(m, weight.outputs, generator=rng, device="cuda").half()
        y = marlin.w4a16_matmul(x, weight, residual=residual)
        exact = reference.dequantize(codes, scales, None, None, None, 128, torch.float64)
        expected = reference.w4a16_matmul(x, exact, None, residual, silu_mul)
        error = (y.double() - expected).norm() / expected.norm()
        assert error < 2e-3, error
        if m <= 8 and torch.cuda.get_device_capability() == (9, 0):
            for other in otherwise(x, weight):
                error = (other.double() - x.double() @ exact.T).norm() / expected.norm()
                assert error < 2e-3, error
    torch.cuda.synchronize()
    print("all products are right")


if __name__ == "__main__":
    main()
