"""Frames: messages on a stream of bytes. Each has a 4-byte big-endian length in front.

The stores, the links of the launcher, the reports of ranks and the meeting of master and workers use them. What a frame
contains is the matter of those who use it.
"""

from __future__ import annotations

import socket
import struct
import time

__all__ = ["LARGEST", "FrameDecoder", "FrameError", "pack_frame", "read_frame"]

LARGEST = (1 << 32) - 1
"""The largest frame that can be announced."""

_LENGTH = struct.Struct(">I")


class FrameError(Exception):
    """A peer announces a frame that is longer than the limit."""


def pack_frame(payload: bytes) -> bytes:
    """Puts the length in front."""
    return _LENGTH.pack(len(payload)) + payload


class FrameDecoder:
    """Turns bytes, cut anywhere, into frames. Keeps no more than it was fed, whatever length a peer announces."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._buffer = bytearray()

    @property
    def missing(self) -> int:
        """How many bytes the current frame needs at least, so that nothing behind it is read."""
        size = len(self._buffer)
        return 4 - size if size < 4 else max(4 + self._announced() - size, 0)

    def feed(self, data: bytes) -> None:
        """Takes the next bytes of the stream."""
        self._buffer += data

    def next(self) -> bytes | None:
        """Returns the next whole frame, or None until more is fed.

        Raises:
            FrameError: a frame longer than the limit is announced.
        """
        if len(self._buffer) < 4:
            return None
        length = self._announced()
        if length > self.limit:
            raise self._refusal(bytes(self._buffer[:80]), length)
        if len(self._buffer) < 4 + length:
            return None
        frame = bytes(self._buffer[4 : 4 + length])
        del self._buffer[: 4 + length]
        return frame

    def _announced(self) -> int:
        (length,) = _LENGTH.unpack_from(self._buffer)
        return int(length)

    def _refusal(self, head: bytes, length: int) -> FrameError:
        # A length beyond every limit is mostly the first four letters of another protocol.
        if not all(0x20 <= byte < 0x7F for byte in head[:4]):
            return FrameError(f"a frame of {length} bytes is announced, the limit is {self.limit}")
        line = head.splitlines()[0].decode("ascii", "replace")
        kind = "it looks like HTTP" if line.startswith(("HTTP", "<")) else "it sends text"
        return FrameError(f"{kind}: {line!r}")


def read_frame(sock: socket.socket, decoder: FrameDecoder, until: float) -> bytes:
    """Reads one frame, and nothing that follows it.

    Args:
        sock: a connection that blocks. Its timeout is changed.
        decoder: takes what has arrived of the frame.
        until: the time of ``time.monotonic`` when to give up.

    Raises:
        FrameError: a frame longer than the decoder's limit is announced.
        ConnectionResetError: the stream has ended.
        TimeoutError: the frame has not arrived in time.
    """
    while (frame := decoder.next()) is None:
        sock.settimeout(max(0.001, until - time.monotonic()))
        data = sock.recv(decoder.missing)
        if not data:
            raise ConnectionResetError("it closed the connection")
        decoder.feed(data)
    return frame
