"""Cases of `billfish bench general`: parallel data processing."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from billfish.bench.general_case import Case, compiled, relative_error, with_cupy
from billfish.kernels import general

DOMAIN = "data"


def cases() -> list[Case]:
    return [
        scan(1, 1 << 28, torch.float32),
        scan(1, 1 << 28, torch.int64),
        scan(8192, 16384, torch.bfloat16),
        reduce((1 << 28,), None, torch.float32),
        reduce((8192, 32768), 1, torch.bfloat16),
        reduce((32768, 8192), 0, torch.bfloat16),
        segment_reduce(1 << 27, 100_000, False),
        segment_reduce(1 << 27, 100_000, True),
        transpose(16384, 16384, torch.float32),
        transpose(16384, 16384, torch.bfloat16),
        histogram(1 << 28, 256, False),
        histogram(1 << 28, 256, True),
        histogram(1 << 28, 100_000, False),
        compact(1 << 28, 0.5),
        compact(1 << 28, 0.05),
        elementwise(32768, 8192, torch.bfloat16),
        elementwise(16384, 8192, torch.float32),
        sort(1, 1 << 27, torch.int32, False),
        sort(1, 1 << 27, torch.int64, False),
        sort(1, 1 << 27, torch.float32, True),
        sort(4096, 32768, torch.bfloat16, True),
    ]


def tiny() -> list[Case]:
    return [
        scan(3, 700, torch.float32),
        reduce((3000,), None, torch.float32),
        reduce((20, 300), 0, torch.float32),
        segment_reduce(2000, 10, True),
        transpose(70, 33, torch.float32),
        histogram(2000, 40, True),
        compact(1000, 0.5),
        elementwise(5, 40, torch.float32),
        sort(1, 60, torch.int32, False),
        sort(2, 50, torch.float16, True),
    ]


def scan(rows: int, n: int, dtype: torch.dtype) -> Case:
    def off(x: Tensor) -> Tensor:
        from billfish.kernels.general import scan_gpu

        return scan_gpu.scan(x, False, "sum", True)

    return Case(
        domain=DOMAIN, kernel="scan", size=f"{rows} x {n}", dtype=dtype,
        draw=lambda device: (torch.randint(-9, 9, (rows, n), device=device).to(dtype),),
        run=general.scan,
        reference=lambda x: x.cumsum(-1, dtype=torch.float64 if dtype.is_floating_point else None),
        read=rows * n * dtype.itemsize, written=rows * n * dtype.itemsize,
        peers={
            "torch": lambda x: x.cumsum(-1),
            "torch.compile": compiled(lambda x: x.cumsum(-1)),
        } | ({"cub": with_cupy(lambda cupy, x: cupy.cumsum(x)[None])} if rows == 1 else {}),
        settings={"look-back": {"off": off}},
    )  # fmt: skip


def reduce(shape: tuple[int, ...], dim: int | None, dtype: torch.dtype) -> Case:
    def off(x: Tensor) -> Tensor:
        from billfish.kernels.general import reduce_gpu

        if dim is None:
            return reduce_gpu.reduce(x.view(1, -1, 1), "sum", fused=False).view(())
        whole = x.view(math.prod(shape[:dim]), shape[dim], -1)
        return reduce_gpu.reduce(whole, "sum", fused=False).view(x.sum(dim).shape)

    n = torch.Size(shape).numel()
    kept = 1 if dim is None else n // shape[dim]
    which = "all" if dim is None else f"dim {dim}"
    axis: dict[str, Any] = {} if dim is None else {"dim": dim}
    peer = with_cupy(lambda cupy, x: x.sum(axis=dim))
    return Case(
        domain=DOMAIN, kernel="reduce", size=f"{' x '.join(map(str, shape))} {which}", dtype=dtype,
        draw=lambda device: (torch.rand(shape, device=device).to(dtype),),
        run=lambda x: general.reduce(x, dim),
        reference=lambda x: x.sum(**axis, dtype=torch.float64),
        read=n * dtype.itemsize, written=kept * dtype.itemsize,
        peers={
            "torch": lambda x: x.sum(**axis),
            "torch.compile": compiled(lambda x: x.sum(**axis)),
        } | ({} if dtype == torch.bfloat16 else {"cub": peer}),
        settings={"one launch": {"off": off}},
    )  # fmt: skip


def segment_reduce(n: int, segments: int, skewed: bool) -> Case:
    """skewed: one segment has half of all values."""

    def draw(device: torch.device) -> tuple[Tensor, Tensor]:
        begin = n // 2 if skewed else 0
        cuts = torch.randint(begin, n, (segments - 1,), device=device).sort().values
        ends = torch.tensor([0, n], device=device)
        return torch.rand(n, device=device), torch.cat((ends[:1], cuts, ends[1:]))

    def reference(x: Tensor, offsets: Tensor) -> Tensor:
        sums = torch.cat((torch.zeros(1, dtype=torch.float64, device=x.device),
                          x.cumsum(0, dtype=torch.float64)))  # fmt: skip
        return sums[offsets].diff()

    def off(x: Tensor, offsets: Tensor) -> Tensor:
        from billfish.kernels.general import segment_reduce_gpu

        return segment_reduce_gpu.segment_reduce(x, offsets, "sum", balanced=False)

    return Case(
        domain=DOMAIN, kernel="segment_reduce", dtype=torch.float32,
        size=f"{n} in {segments}{' skewed' if skewed else ''}",
        draw=draw, run=general.segment_reduce, reference=reference,
        read=4 * n + 8 * segments, written=4 * segments,
        peers={
            "torch": lambda x, offsets: torch.segment_reduce(x, "sum", offsets=offsets,
                                                             unsafe=True, initial=0.0),
        },
        settings={"balanced pieces": {"off": off}},
    )  # fmt: skip


def transpose(m: int, n: int, dtype: torch.dtype) -> Case:
    def off(x: Tensor) -> Tensor:
        from billfish.kernels.general import transpose_gpu

        return transpose_gpu.transpose_copy(x[None], tiled=False)[0]

    return Case(
        domain=DOMAIN, kernel="transpose", size=f"{m} x {n}", dtype=dtype,
        draw=lambda device: (torch.randn(m, n, device=device).to(dtype),),
        run=general.transpose, reference=lambda x: x.t().double(),
        read=m * n * dtype.itemsize, written=m * n * dtype.itemsize,
        peers={
            "torch": lambda x: x.t().contiguous(),
            "torch.compile": compiled(lambda x: x.t().contiguous()),
        } | ({} if dtype == torch.bfloat16 else {
            "cupy": with_cupy(lambda cupy, x: cupy.ascontiguousarray(x.T)),
        }),
        settings={"tiles in shared memory": {"off": off}}, tolerance=0.0,
    )  # fmt: skip


def histogram(n: int, bins: int, skewed: bool) -> Case:
    """skewed: nine values of ten are one."""

    def draw(device: torch.device) -> tuple[Tensor]:
        x = torch.randint(0, bins, (n,), dtype=torch.int32, device=device)
        return (x.masked_fill_(torch.rand(n, device=device) < 0.9, bins // 2) if skewed else x,)

    def off(x: Tensor) -> Tensor:
        from billfish.kernels.general import histogram_gpu

        return histogram_gpu.histogram(x, bins, 0.0, 1.0, private=False)

    return Case(
        domain=DOMAIN, kernel="histogram", dtype=torch.int32,
        size=f"{n} in {bins}{' skewed' if skewed else ''}",
        draw=draw, run=lambda x: general.histogram(x, bins),
        reference=lambda x: torch.bincount(x, minlength=bins), read=4 * n, written=8 * bins,
        peers={
            "torch": lambda x: torch.bincount(x, minlength=bins),
            "torch histc": lambda x: torch.histc(x.float(), bins, 0, bins).long(),
            "cupy": with_cupy(lambda cupy, x: cupy.bincount(x, minlength=bins)),
            "cub": with_cupy(lambda cupy, x: cupy.histogram(x, bins, (0, bins))[0]),
        },
        settings={"bins in shared memory": {"off": off}},
    )  # fmt: skip


def _kept(got: Any, want: Tensor) -> float:
    """Of what was kept: ours has zeros behind it."""
    if isinstance(got, tuple):
        got = got[0][: got[1].item()]
    return relative_error(got, want)


def compact(n: int, share: float) -> Case:
    def off(x: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
        from billfish.kernels.general import compact_gpu

        return compact_gpu.compact(x, keep, fused=False)

    return Case(
        domain=DOMAIN, kernel="compact", size=f"{n} keeps {share:.0%}", dtype=torch.float32,
        draw=lambda device: (
            torch.randn(n, device=device), torch.rand(n, device=device) < share),
        run=general.compact, reference=lambda x, keep: x[keep].double(), error=_kept,
        read=5 * n, written=int(4 * n * share),
        peers={
            "torch": lambda x, keep: x[keep],
            "cupy": with_cupy(lambda cupy, x, keep: x[keep]),
        },
        settings={"scan in the same pass": {"off": off}}, tolerance=0.0,
    )  # fmt: skip


def sort(rows: int, n: int, dtype: torch.dtype, pairs: bool) -> Case:
    """pairs: int32 places go along. At least one pass over the keys for every 8 bits."""

    def draw(device: torch.device) -> tuple[Tensor, ...]:
        if dtype.is_floating_point:
            keys = torch.randn(rows, n, device=device).to(dtype)
        else:
            limits = torch.iinfo(dtype)
            keys = torch.randint(limits.min, limits.max, (rows, n), dtype=dtype, device=device)
        if not pairs:
            return (keys,)
        return keys, torch.arange(n, dtype=torch.int32, device=device).repeat(rows, 1)

    def off(*inputs: Tensor) -> Any:
        from billfish.kernels.general import sort_gpu

        if pairs:
            return sort_gpu.sort_pairs(inputs[0], inputs[1], False, one_sweep=False)
        return sort_gpu.sort(inputs[0], False, one_sweep=False)

    def by_torch(*inputs: Tensor) -> Any:
        found = torch.sort(inputs[0], dim=-1, stable=True)
        return (found.values, found.indices.int()) if pairs else found.values

    def by_cupy(cupy: Any, *inputs: Any) -> Any:
        if pairs:
            places = cupy.argsort(inputs[0], axis=-1, kind="stable")
            return cupy.take_along_axis(inputs[0], places, -1), places.astype(cupy.int32)
        return cupy.sort(inputs[0], axis=-1)

    def exact(*inputs: Tensor) -> Any:
        keys, places = torch.sort(inputs[0], dim=-1, stable=True)
        keys = keys.double() if dtype.is_floating_point else keys
        return (keys, places) if pairs else keys

    # Counted once; then read and written by every pass.
    moved = rows * n * (dtype.itemsize + (4 if pairs else 0)) * dtype.itemsize
    return Case(
        domain=DOMAIN, kernel="sort pairs" if pairs else "sort", size=f"{rows} x {n}", dtype=dtype,
        draw=draw, run=general.sort, reference=exact,
        read=rows * n * dtype.itemsize + moved, written=moved,
        peers={"torch": by_torch}
        | ({} if dtype == torch.bfloat16 else {"cub": with_cupy(by_cupy)}),
        # Keys of one word are sorted without.
        settings={"one sweep": {"off": off}} if pairs or dtype.itemsize > 4 else {}, tolerance=0.0,
    )  # fmt: skip


CHAIN = "silu(x) * y + 0.5 * z"


def elementwise(rows: int, n: int, dtype: torch.dtype) -> Case:
    """Five operations of two matrices and a row."""

    def draw(device: torch.device) -> tuple[Tensor, ...]:
        shapes = ((rows, n), (rows, n), (n,))
        return tuple(torch.randn(shape, device=device).to(dtype) for shape in shapes)

    def off(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        from billfish.kernels.general import elementwise_gpu

        return elementwise_gpu.elementwise([x, y, z], CHAIN, ["x", "y", "z"], fused=False)

    def chain(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        return functional.silu(x) * y + 0.5 * z

    def by_cupy(cupy: Any, x: Any, y: Any, z: Any) -> Any:
        body = "w = x / (1 + exp(-x)) * y + 0.5f * z"
        return cupy.ElementwiseKernel("T x, T y, T z", "T w", body, "silu_chain")(x, y, z)

    return Case(
        domain=DOMAIN, kernel="elementwise", size=f"{CHAIN}, {rows} x {n}", dtype=dtype,
        draw=draw, run=lambda x, y, z: general.elementwise(CHAIN, x=x, y=y, z=z),
        reference=lambda x, y, z: chain(x.double(), y.double(), z.double()),
        read=(2 * rows + 1) * n * dtype.itemsize, written=rows * n * dtype.itemsize,
        peers={"torch": chain, "torch.compile": compiled(chain)}
        | ({} if dtype == torch.bfloat16 else {"cupy": with_cupy(by_cupy)}),
        settings={"fused": {"off": off}},
    )  # fmt: skip
