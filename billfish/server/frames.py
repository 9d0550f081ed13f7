"""Messages on a stream of bytes: a length of four bytes, big-endian, before each."""

from billfish.errors import ProtocolError

MAX_FRAME = 1 << 26
"""Bytes of the largest message either side takes: a prompt of ten million tokens, or a step's
outputs with all their log-probabilities."""

HEADER = 4


def frame(data: bytes) -> bytes:
    """ProtocolError if it is larger than the other side takes."""
    if len(data) > MAX_FRAME:
        raise ProtocolError(f"a message has {len(data)} bytes; at most {MAX_FRAME} are allowed")
    return len(data).to_bytes(HEADER, "big") + data


class FrameReader:
    """Cuts what arrives, in whatever pieces, into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytearray]:
        """The messages that are complete now.

        ProtocolError as soon as one says that it is too large: nothing of it is kept. Whoever fed
        it must not go on.
        """
        buffer = self._buffer
        buffer += data
        messages: list[bytearray] = []
        start = 0
        while len(buffer) - start >= HEADER:
            length = int.from_bytes(buffer[start : start + HEADER], "big")
            if length > MAX_FRAME:
                raise ProtocolError(
                    f"a message says it has {length} bytes; at most {MAX_FRAME} are allowed"
                )
            end = start + HEADER + length
            if len(buffer) < end:
                break
            messages.append(buffer[start + HEADER : end])
            start = end
        del buffer[:start]
        return messages

    @property
    def partial(self) -> bool:
        """Whether a message has begun and not ended: at the end of the stream, it was cut off."""
        return bool(self._buffer)
