"""Frames over a stream socket: four bytes of length, then the body; and a reader that takes many frames from one `recv`."""

from __future__ import annotations

import socket
import struct

HEADER = struct.Struct("!I")
MAX_FRAME_BYTES = 256 * 1024**2


def frame(body: bytes) -> bytes:
    assert len(body) <= MAX_FRAME_BYTES, len(body)
    return HEADER.pack(len(body)) + body


class FrameReader:
    """Cuts a byte stream into frames.

    Args:
        max_bytes: a longer frame is a broken stream (ValueError): the other end may be hostile.
    """

    def __init__(self, max_bytes: int = MAX_FRAME_BYTES):
        self.max_bytes = max_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Take bytes and return the frames that they complete."""
        self._buffer += data
        frames, start = [], 0
        while len(self._buffer) - start >= HEADER.size:
            (length,) = HEADER.unpack_from(self._buffer, start)
            if length > self.max_bytes:
                raise ValueError(f"a frame of {length} bytes, more than {self.max_bytes}")
            end = start + HEADER.size + length
            if len(self._buffer) < end:
                break
            frames.append(bytes(self._buffer[start + HEADER.size : end]))
            start = end
        del self._buffer[:start]
        return frames


def read_frame(stream: socket.socket, max_bytes: int = MAX_FRAME_BYTES) -> bytes | None:
    """Block until one whole frame has come; None when the other end is gone. A longer frame is a ValueError."""
    header = read_exactly(stream, HEADER.size)
    if header is None:
        return None
    (length,) = HEADER.unpack(header)
    if length > max_bytes:
        raise ValueError(f"a frame of {length} bytes, more than {max_bytes}")
    return read_exactly(stream, length)


def read_exactly(stream: socket.socket, count: int) -> bytes | None:
    parts = []
    while count:
        data = stream.recv(min(count, 1 << 20))
        if not data:
            return None
        parts.append(data)
        count -= len(data)
    return b"".join(parts)
