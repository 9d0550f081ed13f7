"""Work that would hold up the event loop, in threads: tokenization, chat templates, grammars."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")

LARGE = 1 << 15


class Offload:
    """Two pools, so that small work never waits behind large."""

    def __init__(self, small: int = 2, large: int = 2) -> None:
        self._small = ThreadPoolExecutor(small, "offload")
        self._large = ThreadPoolExecutor(large, "offload-large")

    async def run(
        self, size: int, function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs
    ) -> _T:
        """function(*args, **kwargs) in a thread. size: of what it works on, in characters or so."""
        pool = self._small if size < LARGE else self._large
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(pool, lambda: function(*args, **kwargs))

    def close(self) -> None:
        for pool in (self._small, self._large):
            pool.shutdown(wait=False, cancel_futures=True)
