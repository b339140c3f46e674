"""One of this process's output descriptors, written without waiting for its reader.

A pipe that is not read, a terminal held by Ctrl-S, ``| less``: a blocking write there would make the launcher miss
Ctrl-C and failed ranks. ``O_NONBLOCK`` must not be set on the descriptor itself, which the shell and other processes
share. Therefore the file is opened again, which creates a separate file description. If that is not possible (sockets,
another session's terminal), it writes only when poll allows it, and at most as much as a pipe then accepts without
blocking.
"""

from __future__ import annotations

import codecs
import contextlib
import errno
import os
import select
import stat
from typing import TextIO

__all__ = ["NonblockingOutput", "TextOutput"]

# bytes; Linux reports a pipe as writable if a page is free, so a write of this size does not block.
_PIECE = select.PIPE_BUF


class NonblockingOutput:
    """An output descriptor with a queue of the bytes that cannot be written yet.

    Args:
        fd: 1 or 2. Not closed.

    Attributes:
        fd: the descriptor to watch for writability while ``backlog`` is not 0.
    """

    def __init__(self, fd: int) -> None:
        self._pending = bytearray()
        self._gone = False
        self._reopened = False
        self._regular = stat.S_ISREG(os.fstat(fd).st_mode)  # never blocks, and must keep the shared offset
        self.fd = fd
        if not self._regular:
            with contextlib.suppress(OSError):
                # O_NOCTTY: opening a terminal must not make it the controlling terminal.
                self.fd = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
                self._reopened = True

    @property
    def backlog(self) -> int:
        """Bytes that are not written yet."""
        return len(self._pending)

    def put(self, data: bytes) -> None:
        """Queue bytes, which ``flush`` writes."""
        if not self._gone:
            self._pending += data

    def flush(self) -> None:
        """Write as much as is possible without blocking.

        Raises:
            OSError: the descriptor is no longer writable. Raised once; later bytes are dropped.
        """
        free = self._reopened or self._regular
        try:
            while self._pending and (free or self._ready()):
                # Released before ``del``, because a bytearray with an exported buffer cannot change its size.
                with memoryview(self._pending) as view, view[: None if free else _PIECE] as piece:
                    count = os.write(self.fd, piece)
                del self._pending[:count]
        except BlockingIOError:
            pass
        except OSError:
            self._gone = True
            self._pending.clear()
            raise

    def close(self) -> None:
        """Drop the bytes that are not written."""
        self._pending.clear()
        if self._reopened:
            self._reopened = False
            os.close(self.fd)

    def _ready(self) -> bool:
        poll = select.poll()
        poll.register(self.fd, select.POLLOUT)
        return bool(poll.poll(0))


class TextOutput:
    """The same interface for a python stream without a descriptor, such as a notebook's: it accepts all bytes.

    Args:
        stream: the stream; None to drop all output, as ``print`` does.
    """

    fd = -1
    backlog = 0

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self._pending = bytearray()
        # Incremental, because a character may be cut between two reads of a rank's output.
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def put(self, data: bytes) -> None:
        """Queue bytes, which ``flush`` writes."""
        if self._stream is not None:
            self._pending += data

    def flush(self) -> None:
        """Write all queued bytes.

        Raises:
            OSError: the stream is no longer writable. Raised once; later bytes are dropped.
        """
        if self._stream is None or not self._pending:
            return
        text = self._decoder.decode(bytes(self._pending))
        encoding = getattr(self._stream, "encoding", None) or "utf-8"  # a user-defined stream may have none
        text = text.encode(encoding, "backslashreplace").decode(encoding)
        self._pending.clear()
        try:
            self._stream.write(text)
            self._stream.flush()
        except OSError:
            self._stream = None
            raise
        except ValueError as error:  # the stream is closed
            self._stream = None
            raise OSError(errno.EBADF, str(error)) from error

    def close(self) -> None:
        """Drop the bytes that are not written."""
        self._pending.clear()
