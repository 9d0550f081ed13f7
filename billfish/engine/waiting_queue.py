"""The requests that wait for a seat: by priority, those of one priority in the order they came."""

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator

from billfish.engine.request import Request


class WaitingQueue:
    """Lower priority numbers first. Whatever is in it, each call but iteration is cheap."""

    def __init__(self) -> None:
        self._priorities: list[int] = []  # those that have a queue, in order
        self._queues: dict[int, OrderedDict[str, Request]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Request]:
        """In order."""
        for priority in self._priorities:
            yield from self._queues[priority].values()

    def first(self) -> Request:
        """IndexError where there is none."""
        return next(iter(self._queues[self._priorities[0]].values()))

    def add(self, request: Request, *, in_front: bool = False) -> None:
        """Behind all others of its priority, or in front of them."""
        queue = self._queues.get(request.priority)
        if queue is None:
            queue = self._queues[request.priority] = OrderedDict()
            insort(self._priorities, request.priority)
        queue[request.sequence_id] = request
        if in_front:
            queue.move_to_end(request.sequence_id, last=False)
        self._count += 1

    def remove(self, request: Request) -> bool:
        """Whether it was here."""
        queue = self._queues.get(request.priority)
        if queue is None or queue.pop(request.sequence_id, None) is None:
            return False
        self._count -= 1
        if not queue:
            del self._queues[request.priority]
            del self._priorities[bisect_left(self._priorities, request.priority)]
        return True
