"""The outputs of one request on their way to whoever reads them, however slowly."""

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Self

from billfish.server.messages import EngineOutput

MERGE_AT = 256
"""Outputs that wait to be read before they are merged, so that a slow reader costs no more memory
than the text itself."""


class Mailbox:
    """Where the client puts what comes for one request. Call it on the event loop only."""

    __slots__ = (
        "_error", "_is_accepted", "_is_closed", "_loop", "_on_close", "_pending", "_unfinished",
        "_waiter", "request_id",
    )  # fmt: skip

    def __init__(
        self, request_id: str, samples: int, on_close: Callable[[str, bool], None]
    ) -> None:
        """on_close: called once, with (request_id, whether the request has not ended)."""
        self.request_id = request_id
        self._loop = asyncio.get_running_loop()
        self._on_close = on_close
        self._unfinished = samples
        self._pending: list[EngineOutput] = []
        self._waiter: asyncio.Future[None] | None = None
        self._error: BaseException | None = None
        self._is_accepted = False
        self._is_closed = False

    @property
    def ended(self) -> bool:
        """Whether no more outputs come."""
        return not self._unfinished or self._error is not None

    def accept(self) -> None:
        """The engine has taken the request."""
        self._is_accepted = True
        self._wake()

    def put(self, output: EngineOutput) -> None:
        if self._is_closed:
            return
        self._pending.append(output)
        if output.finish_reason is not None:
            self._unfinished -= 1
        if len(self._pending) >= MERGE_AT:
            self._pending = merge(self._pending)
        self._wake()

    def fail(self, error: BaseException) -> None:
        """No more outputs come; error is raised after those that are here."""
        self._error = error
        self._wake()

    async def take(self) -> EngineOutput | None:
        """The next output; None after the last."""
        batch = await self.take_all()
        self._pending = batch[1:]
        return batch[0] if batch else None

    async def take_all(self) -> list[EngineOutput]:
        """All that has come, once there is something; empty after the last."""
        while not self._pending:
            if self._error is not None:
                self.close()
                raise self._error
            if self._is_closed or not self._unfinished:
                self.close()
                return []
            await self._wait()
        pending, self._pending = self._pending, []
        return pending if len(pending) == 1 else merge(pending)

    async def accepted(self) -> None:
        """Wait until the engine has taken the request; raises the error if it does not."""
        while not self._is_accepted:
            if self._error is not None:
                raise self._error
            if self._is_closed:
                return
            await self._wait()

    def close(self) -> None:
        """Nobody reads any more."""
        if self._is_closed:
            return
        self._is_closed = True
        self._pending.clear()
        self._on_close(self.request_id, not self.ended)
        self._wake()

    def close_soon(self) -> None:
        """`close`, called from any thread."""
        if not (self._is_closed or self._loop.is_closed()):
            self._loop.call_soon_threadsafe(self.close)

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def _wait(self) -> None:
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None


class RequestStream:
    """An asynchronous iterator over the outputs of one request, all its samples.

    It ends after the last output of the last sample. If the engine is lost, what had come is still
    delivered, then EngineDiedError raised. Outputs that came while nobody was reading are delivered
    merged, one for each sample, so there may be fewer of them than steps.

    `aclose`, leaving `async with`, or dropping the stream aborts the request if it has not ended.
    """

    __slots__ = ("_mailbox",)

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox

    @property
    def request_id(self) -> str:
        return self._mailbox.request_id

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> EngineOutput:
        output = await self._mailbox.take()
        if output is None:
            raise StopAsyncIteration
        return output

    async def batch(self) -> list[EngineOutput]:
        """What has come by now, one output for each sample; waits for the first. Empty at the end.

        Not to be mixed with iteration.
        """
        return await self._mailbox.take_all()

    async def aclose(self) -> None:
        """Nobody reads it any more."""
        self._mailbox.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._mailbox.close()

    def __del__(self) -> None:
        # The garbage collector may run this in any thread.
        self._mailbox.close_soon()


def merge(outputs: list[EngineOutput]) -> list[EngineOutput]:
    """One output for each sample, in the order of their first; nothing is lost."""
    samples: dict[int, list[EngineOutput]] = {}
    for output in outputs:
        samples.setdefault(output.index, []).append(output)
    return [parts[0] if len(parts) == 1 else _join(parts) for parts in samples.values()]


def _join(parts: list[EngineOutput]) -> EngineOutput:
    last = parts[-1]
    logprobs = [item for part in parts for item in part.logprobs or ()]
    return EngineOutput(
        last.request_id,
        last.index,
        "".join([part.text for part in parts]),
        [token_id for part in parts for token_id in part.token_ids],
        last.completion_tokens,
        last.finish_reason,
        last.stop_reason,
        None if all(part.logprobs is None for part in parts) else logprobs,
        next((p.prompt_logprobs for p in parts if p.prompt_logprobs is not None), None),
        last.metrics,
    )
