"""Memory that GEMM kernels share: sums of parts of tiles, and counters of who has left his."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

from billfish.kernels._library import lasting
from billfish.kernels.marlin.configs import Gpu

_STREAM_COUNTERS = 1 << 14
_CAPTURED_COUNTERS = 1 << 21  # 8 MiB: all graphs of a model of 70B take half of them


@cache
def gpu_of(device: torch.device) -> Gpu:
    """What configurations depend on, of a CUDA device."""
    properties = torch.cuda.get_device_properties(device)
    return Gpu(properties.name, properties.multi_processor_count)


def lasting_zeros(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros on a GPU that outlive the call, cleared on its current stream."""
    return lasting(lambda: torch.zeros(size, dtype=dtype, device=device), device)


class Workspace:
    """float32 sums, and int32 counters that are zero between kernels.

    Sizes and addresses of both are kept: asking a tensor costs more than looking them up.
    """

    def __init__(self, sums: Tensor, counters: Tensor) -> None:
        self.sums, self.counters = sums, counters
        self.sizes = sums.numel(), counters.numel()
        self.addresses = sums.data_ptr(), counters.data_ptr()


class Counters:
    """Zeros of which every captured call gets some, its own as long as its graph is there."""

    def __init__(self, zeros: Tensor) -> None:
        self.zeros, self.taken = zeros, 0

    def take(self, count: int) -> Tensor | None:
        """None where so many are not left."""
        if self.taken + count > self.zeros.numel():
            return None
        mine = self.zeros[self.taken : self.taken + count]
        self.taken += -(-count // 64) * 64  # so that every slice is aligned
        return mine


class _Pool:
    """The workspaces of one device.

    Calls on one stream run one after another and share a workspace, which is as large as the
    largest of them needed and is kept. A captured call may be replayed on any stream, beside any
    other, so it gets counters of its own, for ever or as `captured_into` says, and sums from the
    graph's memory.
    """

    def __init__(self) -> None:
        self._by_stream: dict[int, Workspace] = {}
        self.counters: list[Counters] = []  # kept for ever: graphs point into them
        self.given: Counters | None = None

    def for_stream(self, device: torch.device, stream: int, sums: int, counters: int) -> Workspace:
        kept = self._by_stream.get(stream)
        if kept is not None and kept.sizes[0] >= sums and kept.sizes[1] >= counters:
            return kept
        if not self.counters or self.counters[-1].taken * 2 > _CAPTURED_COUNTERS:
            # Memory cannot be cleared under capture without a kernel in the graph, so do it now.
            self.counters.append(captured_counters(device))
        if kept is not None:
            sums, counters = max(sums, kept.sizes[0]), max(counters, kept.sizes[1])
        kept = Workspace(
            lasting_zeros(sums, torch.float32, device),
            lasting_zeros(max(counters, _STREAM_COUNTERS), torch.int32, device),
        )
        self._by_stream[stream] = kept
        return kept

    def for_capture(self, device: torch.device, sums: int, counters: int) -> Workspace:
        own = torch.empty(sums, dtype=torch.float32, device=device)
        source = self.given or (self.counters[-1] if self.counters else None)
        mine = source.take(counters) if source else None
        if mine is None:
            mine = torch.zeros(counters, dtype=torch.int32, device=device)
        return Workspace(own, mine)


def captured_counters(device: torch.device) -> Counters:
    """For `captured_into`, or for captured calls that say nothing."""
    return Counters(lasting_zeros(_CAPTURED_COUNTERS, torch.int32, device))


@contextmanager
def captured_into(counters: Counters, device: torch.device) -> Iterator[None]:
    """Within, captured calls on the device take these counters, from the first on: for graphs that
    come in place of others, which took them before and are gone."""
    pool = _pools.get(device) or _pools.setdefault(device, _Pool())
    counters.taken, pool.given = 0, counters
    try:
        yield
    finally:
        pool.given = None


_pools: dict[torch.device, _Pool] = {}


def workspace(device: torch.device, sums: int, counters: int) -> Workspace:
    """At least `sums` float32, and `counters` int32 zeros, for one call on the current stream."""
    if device.type != "cuda":
        own = torch.empty(sums, dtype=torch.float32, device=device)
        return Workspace(own, torch.zeros(counters, dtype=torch.int32, device=device))
    pool = _pools.get(device) or _pools.setdefault(device, _Pool())
    if torch._C._cuda_isCurrentStreamCapturing():
        return pool.for_capture(device, sums, counters)
    stream = torch._C._cuda_getCurrentRawStream(device.index)
    return pool.for_stream(device, stream, sums, counters)
