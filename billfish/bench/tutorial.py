"""Times the steps of docs/write-a-kernel.md: from a naive kernel to a fused and tiled one.

    billfish bench tutorial --out benchmarks/tutorial.json

All steps compute the same: silu(x * scale + bias) of every channel, pixels last, turned around to
channels last, the end of a convolution layer with its normalization folded in. They are replayed in
turns in CUDA graphs over enough data to miss the L2 cache, and each is checked against float64
first. `bytes` is what a step asks for; the floor is the time in which this GPU copies what any of
them has to read and to write.
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

Layer = Callable[[Tensor, Tensor, Tensor], Tensor]


def reference(x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """x [channels, pixels] -> [pixels, channels]; scale and bias [channels]."""
    return torch.nn.functional.silu(x * scale[:, None] + bias[:, None]).t().contiguous()


@triton.jit
def affine_kernel(x, scale, bias, out, size, pixels, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    channel = at // pixels
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    value *= tl.load(scale + channel, mask=inside, other=0.0).to(tl.float32)
    value += tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def silu_kernel(x, out, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    value = value / (1 + tl.exp(-value))
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def turn_kernel(x, out, size, channels, pixels, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    pixel = at // channels
    channel = at % channels
    value = tl.load(x + channel * pixels + pixel, mask=inside, other=0.0)
    tl.store(out + at, value, mask=inside)


def naive(x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    channels, pixels = x.shape
    size, grid = x.numel(), (triton.cdiv(x.numel(), 1024),)
    scaled, active = torch.empty_like(x), torch.empty_like(x)
    out = torch.empty(pixels, channels, dtype=x.dtype, device=x.device)
    affine_kernel[grid](x, scale, bias, scaled, size, pixels, BLOCK=1024)
    silu_kernel[grid](scaled, active, size, BLOCK=1024)
    turn_kernel[grid](active, out, size, channels, pixels, BLOCK=1024)
    return out


@triton.jit
def fused_kernel(x, scale, bias, out, size, channels, pixels, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    pixel = at // channels
    channel = at % channels
    value = tl.load(x + channel * pixels + pixel, mask=inside, other=0.0).to(tl.float32)
    value *= tl.load(scale + channel, mask=inside, other=0.0).to(tl.float32)
    value += tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
    value = value / (1 + tl.exp(-value))
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


def fused(x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    channels, pixels = x.shape
    out = torch.empty(pixels, channels, dtype=x.dtype, device=x.device)
    grid = (triton.cdiv(x.numel(), 1024),)
    fused_kernel[grid](x, scale, bias, out, x.numel(), channels, pixels, BLOCK=1024)
    return out


@triton.jit
def coalesced_kernel(x, scale, bias, out, channels, pixels, BLOCK: tl.constexpr):
    channel = tl.program_id(1).to(tl.int64)
    pixel = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = pixel < pixels
    value = tl.load(x + channel * pixels + pixel, mask=inside, other=0.0).to(tl.float32)
    value = value * tl.load(scale + channel).to(tl.float32) + tl.load(bias + channel).to(tl.float32)
    value = value / (1 + tl.exp(-value))
    tl.store(out + pixel * channels + channel, value.to(out.dtype.element_ty), mask=inside)


def coalesced(x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    channels, pixels = x.shape
    out = torch.empty(pixels, channels, dtype=x.dtype, device=x.device)
    grid = (triton.cdiv(pixels, 1024), channels)
    coalesced_kernel[grid](x, scale, bias, out, channels, pixels, BLOCK=1024)
    return out


@triton.jit
def tiled_kernel(
    x, scale, bias, out, channels, pixels, CHANNELS: tl.constexpr, PIXELS: tl.constexpr
):
    pixel = tl.program_id(0).to(tl.int64) * PIXELS + tl.arange(0, PIXELS)[None, :]
    channel = tl.program_id(1).to(tl.int64) * CHANNELS + tl.arange(0, CHANNELS)[:, None]
    inside = (channel < channels) & (pixel < pixels)
    value = tl.load(x + channel * pixels + pixel, mask=inside, other=0.0).to(tl.float32)
    value *= tl.load(scale + channel, mask=channel < channels, other=0.0).to(tl.float32)
    value += tl.load(bias + channel, mask=channel < channels, other=0.0).to(tl.float32)
    value = value / (1 + tl.exp(-value))
    tl.store(out + pixel * channels + channel, value.to(out.dtype.element_ty), mask=inside)


def tiled(x: Tensor, scale: Tensor, bias: Tensor, side: int = 32) -> Tensor:
    channels, pixels = x.shape
    out = torch.empty(pixels, channels, dtype=x.dtype, device=x.device)
    grid = (triton.cdiv(pixels, side), triton.cdiv(channels, side))
    tiled_kernel[grid](x, scale, bias, out, channels, pixels, CHANNELS=side, PIXELS=side)
    return out


STEPS: dict[str, tuple[Layer, int]] = {
    "torch operations": (reference, 4),
    "naive": (naive, 3),
    "fused": (fused, 1),
    "coalesced reads": (coalesced, 1),
    "tiled 32 x 32": (tiled, 1),
    "tiled 64 x 64": (partial(tiled, side=64), 1),
}
"""Each step, and how many times it reads and writes all of the data."""

SIZE = (2048, 8192)
"""Channels and pixels that are timed: 32 MiB in float16."""


def step_bytes(step: str) -> int:
    """What a step reads and writes at SIZE in float16."""
    return STEPS[step][1] * 2 * 2 * SIZE[0] * SIZE[1]


TOLERANCE = 4e-3
"""Of the norm: the naive step and torch round to float16 between their passes."""


def draw(channels: int, pixels: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(channels, pixels, device=device)
    scale, bias = torch.randn(2, channels, device=device)
    return x.half(), scale.half(), bias.half()


def error_of(layer: Layer, inputs: tuple[Tensor, Tensor, Tensor]) -> float:
    """||result - exact|| / ||exact||."""
    exact = reference(*(each.double() for each in inputs))
    return float((layer(*inputs).double() - exact).norm() / exact.norm())


def rows() -> list[dict[str, Any]]:
    """Rows of tutorial.json; a step that is wrong is told and not timed."""
    from billfish.bench.turns import Call, elapsed_us, time_in_turns

    sets = [draw(*SIZE, "cuda") for _ in range(8)]  # 256 MiB: more than any L2 cache
    calls: dict[str, list[Call]] = {}
    for name, (layer, _) in STEPS.items():
        error = error_of(layer, sets[0])
        if error < TOLERANCE:
            calls[name] = [partial(layer, *each) for each in sets]
        else:
            print(f"{name}: wrong by {error:.1e}, not timed")
    times = time_in_turns(calls)
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copied = min(elapsed_us(partial(target.copy_, source)) for _ in range(8))
    floor = step_bytes("fused") / (2 * source.nbytes / copied)
    return [
        {"step": name, "size": f"{SIZE[0]} x {SIZE[1]}", "dtype": "float16", "us": round(us, 2),
         "spread": round(spread, 3), "bytes": step_bytes(name), "floor_us": round(floor, 2)}
        for name, (us, spread) in times.items()
    ]  # fmt: skip


def main(arguments: list[str]) -> None:
    from billfish.bench import record

    cli = argparse.ArgumentParser(
        prog="billfish bench tutorial",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    cli.add_argument("--out", required=True, help="JSON file to write")
    options = cli.parse_args(arguments)
    head = record.environment("billfish bench tutorial " + " ".join(arguments))
    found = rows()
    for row in found:
        print(f"{row['step']:18} {row['us']:9.2f} us  {100 * row['floor_us'] / row['us']:5.1f}%")
    record.write(options.out, head, found)


if __name__ == "__main__":
    main(sys.argv[1:])
