"""Cases of `billfish bench general`: images and signals."""

from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from billfish.bench.general_case import Case, Function, compiled, with_cupy
from billfish.kernels import general

DOMAIN = "signal"


def cases() -> list[Case]:
    return [
        fft("fft", 1 << 19, 256, torch.complex64),
        fft("fft", 1 << 15, 4096, torch.complex64),
        fft("fft", 1 << 13, 16384, torch.complex64),
        fft("fft", 1 << 17, 1000, torch.complex64),
        fft("fft", 1 << 14, 4093, torch.complex64),
        fft("fft", 64, 1 << 20, torch.complex64),
        fft("fft", 1 << 14, 4096, torch.complex128),
        fft("rfft", 1 << 15, 4096, torch.float32),
        convolve2d(8, 4096, 3, torch.float32),
        convolve2d(8, 4096, 7, torch.float32),
        convolve2d(1, 4096, 31, torch.float32),
        convolve2d(32, 4096, 5, torch.uint8),
        separable_convolve2d(8, 4096, 5, torch.float32),
        separable_convolve2d(8, 4096, 9, torch.float32),
        separable_convolve2d(8, 4096, 31, torch.float32),
        sobel(8, 4096, torch.float32),
        sobel(16, 4096, torch.uint8),
        bilateral(1, 4096, 5, torch.float32),
        fir(64, 1 << 20, 16),
        fir(64, 1 << 20, 128),
        fir(64, 1 << 20, 4096),
    ]


def tiny() -> list[Case]:
    return [
        fft("fft", 3, 60, torch.complex64),
        fft("rfft", 2, 64, torch.float32),
        convolve2d(2, 20, 5, torch.float32),
        convolve2d(1, 20, 3, torch.uint8),
        separable_convolve2d(2, 20, 3, torch.float32),
        separable_convolve2d(2, 20, 7, torch.float32),
        sobel(2, 20, torch.float32),
        bilateral(1, 20, 2, torch.float32),
        fir(2, 300, 9),
        fir(1, 1000, 600),
    ]


def fft(kind: str, rows: int, n: int, dtype: torch.dtype) -> Case:
    def switched(**options: Any) -> Function:
        def run(x: Tensor) -> Tensor:
            from billfish.kernels.general import fft_gpu

            return fft_gpu.fft(x, n, kind, 1.0, **options)

        return run

    settings = {"one launch": {"off": switched(fused=False)}}
    if kind == "rfft":
        settings["pairs of reals"] = {"off": switched(folded=False)}
    transform: Function = getattr(torch.fft, kind)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    points = n if kind == "fft" else n // 2 + 1
    item = dtype.itemsize * (1 if dtype.is_complex else 2)
    return Case(
        domain=DOMAIN, kernel=kind, size=f"{rows} x {n}", dtype=dtype,
        draw=lambda device: (torch.randn(rows, n, dtype=dtype, device=device),),
        run=getattr(general, kind), reference=lambda x: transform(x.to(wide)),
        read=rows * n * dtype.itemsize, written=rows * points * item,
        peers={"torch": transform, "cufft": with_cupy(lambda cupy, x: getattr(cupy.fft, kind)(x))},
        settings=settings, tolerance=1e-13 if dtype == torch.complex128 else 4e-6,
    )  # fmt: skip


def _draw_images(count: int, side: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    shape = (count, side, side)
    if dtype == torch.uint8:
        return torch.randint(0, 256, shape, dtype=dtype, device=device)
    return torch.rand(shape, device=device).to(dtype)


def _padded(x: Tensor, side: int) -> Tensor:
    return functional.pad(x[:, None], [side // 2] * 4, mode="reflect")


def _convolved(x: Tensor, kernel: Tensor) -> Tensor:
    """Torch's convolution: cuDNN's on a GPU."""
    around = _padded(x.float(), kernel.shape[0])
    return _as_image(functional.conv2d(around, kernel[None, None])[:, 0], x.dtype)


def _in_full(function: Function) -> Function:
    """function with convolutions not in TF32, which is torch's default, and off by 1e-4."""

    def run(*inputs: Tensor) -> Any:
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            return function(*inputs)

    return run


def _both_sides(cupy: Any, x: Any, weights: Any) -> Any:
    correlate1d = import_module("cupyx.scipy.ndimage").correlate1d
    return correlate1d(correlate1d(x, weights, axis=2, mode="mirror"), weights, axis=1,
                       mode="mirror")  # fmt: skip


def _as_image(x: Tensor, dtype: torch.dtype) -> Tensor:
    return (x + 0.5).floor().clamp(0, 255).to(dtype) if dtype == torch.uint8 else x.to(dtype)


def _exactly(x: Tensor, kernel: Tensor) -> Tensor:
    """Tap by tap in float64, which needs no memory but the images'."""
    side = kernel.shape[0]
    around = _padded(x.double(), side)[:, 0]
    total = torch.zeros_like(x, dtype=torch.float64)
    for down in range(side):
        for across in range(side):
            part = around[:, down : down + x.shape[1], across : across + x.shape[2]]
            total += kernel[down, across].double() * part
    return total


def _image_error(got: Tensor, want: Tensor) -> float:
    """As `relative_error`; bytes may be off by the half that they are rounded by."""
    off = (got.double() - want).abs()
    if got.dtype == torch.uint8:
        return float((off - 0.51).clamp(min=0).max())
    return float(off.norm() / want.norm())


def _by_ndimage(name: str) -> Function:
    """A function of cupyx.scipy.ndimage, of whose modes "mirror" is "reflect" here."""

    def call(cupy: Any, x: Any, *weights: Any) -> Any:
        function = getattr(import_module("cupyx.scipy.ndimage"), name)
        return function(x, *(w[None] for w in weights), mode="mirror")

    return with_cupy(call)


def convolve2d(count: int, side: int, window: int, dtype: torch.dtype) -> Case:
    def draw(device: torch.device) -> tuple[Tensor, Tensor]:
        kernel = torch.rand(window, window, device=device)
        return _draw_images(count, side, dtype, device), kernel / kernel.sum()

    def off(x: Tensor, kernel: Tensor) -> Tensor:
        from billfish.kernels.general import convolve2d_gpu

        return convolve2d_gpu.convolve2d(x, kernel, "reflect", 0.0, reuse=False)

    moved = count * side * side * dtype.itemsize
    peers = {"torch": _in_full(_convolved), "torch.compile": _in_full(compiled(_convolved))}
    if dtype != torch.uint8:  # which SciPy's rules cut off, not round
        peers["cupy"] = _by_ndimage("correlate")
    return Case(
        domain=DOMAIN, kernel="convolve2d", size=f"{count} x {side} x {side}, window {window}",
        dtype=dtype, draw=draw,
        run=lambda x, kernel: general.convolve2d(x, kernel, "reflect", correlate=True),
        reference=_exactly, read=moved, written=moved,
        flops=2 * count * side * side * window * window, math=torch.float32,
        peers=peers, settings={"reuse": {"off": off}}, error=_image_error, tolerance=2e-6,
    )  # fmt: skip


def separable_convolve2d(count: int, side: int, window: int, dtype: torch.dtype) -> Case:
    def draw(device: torch.device) -> tuple[Tensor, Tensor]:
        weights = torch.rand(window, device=device)
        return _draw_images(count, side, dtype, device), weights / weights.sum()

    small = window <= 5

    def off(x: Tensor, weights: Tensor) -> Tensor:
        from billfish.kernels.general import convolve2d_gpu

        return convolve2d_gpu.separable_convolve2d(
            x, weights, weights, "reflect", 0.0, fused=not small
        )

    def twice(x: Tensor, weights: Tensor) -> Tensor:
        rows = functional.conv2d(_padded(x, window), weights[None, None, None])
        return functional.conv2d(rows, weights[None, None, :, None])[:, 0]

    def run(x: Tensor, weights: Tensor) -> Tensor:
        return general.separable_convolve2d(x, weights, weights, "reflect", correlate=True)

    moved = count * side * side * dtype.itemsize
    return Case(
        domain=DOMAIN, kernel="separable_convolve2d", dtype=dtype, draw=draw, run=run,
        size=f"{count} x {side} x {side}, window {window}",
        reference=lambda x, weights: _exactly(x, weights[:, None] * weights),
        read=moved, written=moved, flops=4 * count * side * side * window, math=torch.float32,
        peers={"torch": _in_full(twice), "torch.compile": _in_full(compiled(twice)),
               "cupy": with_cupy(_both_sides)},
        settings={"fused" if small else "two launches": {"off": off}}, error=_image_error,
        tolerance=2e-6,
    )  # fmt: skip


def _gradient(x: Tensor) -> tuple[Tensor, Tensor]:
    around = _padded(x if x.is_floating_point() else x.float(), 3)[:, 0]
    rows = around[:, :, 2:] - around[:, :, :-2]
    across = rows[:, :-2] + 2 * rows[:, 1:-1] + rows[:, 2:]
    columns = around[:, 2:] - around[:, :-2]
    down = columns[:, :, :-2] + 2 * columns[:, :, 1:-1] + columns[:, :, 2:]
    return torch.hypot(across, down), torch.atan2(down, across)


def _polar_error(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor]) -> float:
    """Of the gradients as vectors: where one is short, its direction says little."""
    ours, exact = (torch.polar(m.double(), d.double()) for m, d in (got, want))
    return float((ours - exact).norm() / exact.norm())


def sobel(count: int, side: int, dtype: torch.dtype) -> Case:
    def off(x: Tensor) -> tuple[Tensor, Tensor]:
        from billfish.kernels.general import sobel_gpu

        return sobel_gpu.sobel(x, "reflect", fused=False)

    pixels = count * side * side
    return Case(
        domain=DOMAIN, kernel="sobel", size=f"{count} x {side} x {side}", dtype=dtype,
        draw=lambda device: (_draw_images(count, side, dtype, device),),
        run=general.sobel, reference=lambda x: _gradient(x.double()),
        read=pixels * dtype.itemsize, written=pixels * 8,
        peers={"torch": _gradient, "torch.compile": compiled(_gradient)},
        settings={"fused": {"off": off}}, error=_polar_error, tolerance=2e-6,
    )  # fmt: skip


SPACE, RANGE = 2.0, 0.2


def _bilateral(x: Tensor, radius: int) -> Tensor:
    around = _padded(x, 2 * radius + 1)[:, 0]
    total, weight = torch.zeros_like(x), torch.zeros_like(x)
    for down in range(2 * radius + 1):
        for across in range(2 * radius + 1):
            other = around[:, down : down + x.shape[1], across : across + x.shape[2]]
            near = -((down - radius) ** 2 + (across - radius) ** 2) / (2 * SPACE**2)
            counts = (near - (other - x).square() / (2 * RANGE**2)).exp()
            weight, total = weight + counts, total + counts * other
    return total / weight


def bilateral(count: int, side: int, radius: int, dtype: torch.dtype) -> Case:
    def switched(**options: Any) -> Function:
        def run(x: Tensor) -> Tensor:
            from billfish.kernels.general import bilateral_gpu

            return bilateral_gpu.bilateral(x, radius, SPACE, RANGE, "reflect", **options)

        return run

    def plain(x: Tensor) -> Tensor:
        return _bilateral(x, radius)

    moved = count * side * side * dtype.itemsize
    return Case(
        domain=DOMAIN, kernel="bilateral", size=f"{count} x {side} x {side}, radius {radius}",
        dtype=dtype, draw=lambda device: (_draw_images(count, side, dtype, device),),
        run=lambda x: general.bilateral(x, SPACE, RANGE, radius),
        reference=lambda x: plain(x.double()), read=moved, written=moved,
        peers={"torch": plain, "torch.compile": compiled(plain)},
        settings={"reuse": {"off": switched(reuse=False)},
                  "table": {"off": switched(table=False)}},
        error=_image_error, tolerance=4e-6,
    )  # fmt: skip


def fir(rows: int, n: int, count: int) -> Case:
    """The floor reads and writes the signal; from many taps on, products take longer."""

    def draw(device: torch.device) -> tuple[Tensor, Tensor]:
        return torch.randn(rows, n, device=device), torch.randn(count, device=device)

    def off(x: Tensor, taps: Tensor) -> Tensor:
        from billfish.kernels.general import fir_gpu

        return fir_gpu.fir(x, taps, x.new_zeros(rows, count - 1), reuse=False)

    def direct(x: Tensor, taps: Tensor) -> Tensor:
        around = functional.pad(x, (count - 1, 0))[:, None]
        return functional.conv1d(around, taps.flip(0)[None, None])[:, 0]

    def by_fft(x: Tensor, taps: Tensor) -> Tensor:
        size = 1 << (n + count - 2).bit_length()
        return torch.fft.irfft(torch.fft.rfft(x, size) * torch.fft.rfft(taps, size), size)[:, :n]

    peers: dict[str, Function] = {"torch": _in_full(direct), "torch fft": by_fft}
    if count <= 128:
        peers["torch.compile"] = _in_full(compiled(direct))
    return Case(
        domain=DOMAIN, kernel="fir", size=f"{rows} x {n}, {count} taps", dtype=torch.float32,
        draw=draw, run=lambda x, taps: general.fir(x, taps)[0],
        reference=lambda x, taps: by_fft(x.double(), taps.double()),
        read=rows * n * 4, written=rows * n * 4, peers=peers,
        settings={} if count >= 512 else {"reuse": {"off": off}}, tolerance=4e-6,
    )  # fmt: skip
