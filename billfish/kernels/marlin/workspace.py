"""Memory that GEMM kernels share: counters of arrivals that are zero whenever no kernel runs."""

from functools import cache

import torch
from torch import Tensor

_STREAM_COUNTERS = 1 << 14
_CAPTURED_COUNTERS = 1 << 20  # 4 MiB a device: a few thousand captured calls


@cache
def processor_count(device: torch.device) -> int:
    """Multiprocessors of a CUDA device."""
    return torch.cuda.get_device_properties(device).multi_processor_count


class _Pool:
    """Counters of one device, all zero between kernels: each kernel leaves them as it found them.

    Calls on one stream run one after another and share counters. A captured call may be replayed
    on any stream, beside any other, so it gets counters of its own, for ever.
    """

    def __init__(self) -> None:
        self._by_stream: dict[int, Tensor] = {}
        self._slabs: list[Tensor] = []  # kept for ever: graphs point into them
        self._taken = 0

    def for_stream(self, device: torch.device, stream: int, count: int) -> Tensor:
        if not self._slabs or self._taken * 2 > _CAPTURED_COUNTERS:
            # Memory cannot be cleared under capture without a kernel in the graph, so do it now.
            self._slabs.append(torch.zeros(_CAPTURED_COUNTERS, dtype=torch.int32, device=device))
            self._taken = 0
        counters = self._by_stream.get(stream)
        if counters is None or counters.numel() < count:
            size = max(count, _STREAM_COUNTERS)
            counters = torch.zeros(size, dtype=torch.int32, device=device)
            self._by_stream[stream] = counters
        return counters

    def for_capture(self, device: torch.device, count: int) -> Tensor:
        if not self._slabs or self._taken + count > _CAPTURED_COUNTERS:
            return torch.zeros(count, dtype=torch.int32, device=device)
        counters = self._slabs[-1][self._taken : self._taken + count]
        self._taken += -(-count // 64) * 64  # so that every slice is aligned
        return counters


_pools: dict[torch.device, _Pool] = {}


def zeroed_counters(device: torch.device, count: int) -> Tensor:
    """At least `count` int32 zeros for one call on the device's current stream."""
    if device.type != "cuda":
        return torch.zeros(count, dtype=torch.int32, device=device)
    pool = _pools.setdefault(device, _Pool())
    if torch.cuda.is_current_stream_capturing():
        return pool.for_capture(device, count)
    return pool.for_stream(device, torch._C._cuda_getCurrentRawStream(device.index), count)
