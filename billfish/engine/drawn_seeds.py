"""The seeds of requests that bring none."""

import random
from heapq import heappop, heappush


class DrawnSeeds:
    """Seeds in an order that the first one alone decides; those given back are the next again."""

    def __init__(self, seed: int | None) -> None:
        """seed: of the order; None takes the operating system's entropy."""
        self._random = random.Random(seed)
        self._drawn = 0
        self._back: list[tuple[int, int]] = []
        self._taken: dict[str, tuple[int, int]] = {}

    def take(self, request_id: str) -> int:
        """The next seed, 64 bits."""
        if self._back:
            number, seed = heappop(self._back)
        else:
            number, seed = self._drawn, self._random.getrandbits(64)
            self._drawn += 1
        self._taken[request_id] = number, seed
        return seed

    def give_back(self, request_id: str) -> None:
        """The request has not used its seed, if it took one."""
        if (taken := self._taken.pop(request_id, None)) is not None:
            heappush(self._back, taken)

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self._taken.pop(request_id, None)
