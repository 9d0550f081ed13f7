"""The engine's end of the socket: framed, non-blocking, with a way to be woken."""

import selectors
import socket
import time
from collections import deque
from contextlib import suppress

from billfish.server.frames import FrameReader, frame

RECEIVE_BYTES = 1 << 18
MAX_ROUND = 64
"""Reads of RECEIVE_BYTES at a time, so that steps go on while much comes in."""


class Closed(Exception):
    """The other side is gone."""


class Connection:
    """Messages to and from the server. For one thread; only `wake` may be called from others."""

    MAX_UNSENT = 1 << 26

    def __init__(self, sock: socket.socket) -> None:
        sock.set_inheritable(False)
        sock.setblocking(False)
        self._socket = sock
        self._reader = FrameReader()
        self._messages: deque[bytearray] = deque()
        self._end: str | None = None
        self._unsent: deque[memoryview] = deque()
        self._num_unsent = 0
        self._woken, self._waker = socket.socketpair()
        for end in (self._woken, self._waker):
            end.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(sock, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)

    @property
    def wake_fd(self) -> int:
        """A byte written to it ends `wait`."""
        return self._waker.fileno()

    def wake(self) -> None:
        with suppress(BlockingIOError):  # it is going to wake already
            self._waker.send(b"\0")

    @property
    def congested(self) -> bool:
        """Whether so much is unsent that no more should be made."""
        return self._num_unsent > self.MAX_UNSENT

    def receive(self) -> list[bytearray]:
        """The messages that are here. Closed once there are no more to come; ProtocolError."""
        self._read()
        messages = list(self._messages)
        self._messages.clear()
        if not messages and self._end is not None:
            raise Closed(self._end)
        return messages

    def receive_one(self) -> bytearray | None:
        """The first of them, if there is one."""
        self._read()
        if not self._messages and self._end is not None:
            raise Closed(self._end)
        return self._messages.popleft() if self._messages else None

    def _read(self) -> None:
        for _ in range(MAX_ROUND):
            if self._end is not None:
                return
            try:
                data = self._socket.recv(RECEIVE_BYTES)
            except BlockingIOError:
                return
            except OSError as error:
                self._end = str(error)
                return
            if not data:
                self._end = "in the middle of a message" if self._reader.partial else ""
                return
            self._messages += self._reader.feed(data)
            if len(data) < RECEIVE_BYTES // 2:
                return

    def send(self, data: bytes) -> None:
        """Send a message, or keep it until there is room. Closed if nobody is there."""
        packed = frame(data)
        self._unsent.append(memoryview(packed))
        self._num_unsent += len(packed)
        self._flush_some()

    def flush(self, seconds: float) -> None:
        """Wait at most so long until all is sent."""
        end = time.monotonic() + seconds
        while self._unsent and (left := end - time.monotonic()) > 0:
            self.wait(left)

    def wait(self, seconds: float | None) -> None:
        """Until a message comes, unsent bytes can be sent, `wake` is called, or time is up."""
        events = selectors.EVENT_READ
        if self._unsent:
            events |= selectors.EVENT_WRITE
        self._selector.modify(self._socket, events)
        self._selector.select(0 if self._messages else seconds)
        self._take_wakes()
        self._flush_some()

    def _flush_some(self) -> None:
        while self._unsent:
            part = self._unsent[0]
            try:
                sent = self._socket.send(part)
            except BlockingIOError:
                return
            except OSError as error:
                raise Closed(str(error)) from error
            self._num_unsent -= sent
            if sent < len(part):
                self._unsent[0] = part[sent:]
                return
            self._unsent.popleft()

    def _take_wakes(self) -> None:
        try:
            while self._woken.recv(4096):
                pass
        except BlockingIOError:
            pass
