"""Messages between a launcher and an agent, over a pair of descriptors: ssh's pipes, or a TCP connection.

A link never blocks while a job runs. What the other side does not read is queued here, and the sender watches
``backlog``. The end of the stream shows either side that the other is gone, however it ended.
"""

from __future__ import annotations

import os
import select
import time
from typing import Any, Generic, TypeVar

import msgspec

from allranks._base.forks import Descriptor
from allranks._net.frames import FrameDecoder, WireError, pack_frame
from allranks.launch.spec.messages import Command, Message

__all__ = ["Garbled", "Link", "LinkLost", "to_agent", "to_launcher"]

_CHUNK = 1 << 16
_FRAME_LIMIT = 1 << 31
_STRANGERS_LIMIT = 1 << 16  # text that a shell prints there looks like a frame of a gigabyte

_In = TypeVar("_In")


class LinkLost(Exception):
    """The other side is gone."""


class Garbled(LinkLost):
    """The bytes that came are no message."""


class Link(Generic[_In]):
    """One end.

    Args:
        read_fd: the descriptor to read from. The link closes both.
        write_fd: the one to write to; may be the same.
        kind: what comes in.
    """

    def __init__(self, read_fd: int, write_fd: int, kind: Any) -> None:
        self.read_fd, self.write_fd = read_fd, write_fd
        self._held = [Descriptor(fd) for fd in {read_fd, write_fd}]  # or a forked child would hide this process' end
        for fd in (read_fd, write_fd):
            os.set_blocking(fd, False)
            os.set_inheritable(fd, False)
        self._decoder: msgspec.msgpack.Decoder[_In] = msgspec.msgpack.Decoder(kind)
        self._frames = FrameDecoder(_STRANGERS_LIMIT if kind is Message else _FRAME_LIMIT)
        self._due = bytearray()

    def trust(self) -> None:
        """Takes messages of any size from here on: the other side has identified itself."""
        self._frames.limit = _FRAME_LIMIT

    @property
    def backlog(self) -> int:
        """Bytes that the other side has not taken yet."""
        return len(self._due)

    def send(self, message: Message | Command) -> None:
        """Queues a message, and writes as much as is possible at once.

        Raises:
            LinkLost: the other side is gone.
        """
        self._due += pack_frame(msgspec.msgpack.encode(message))
        self.flush()

    def flush(self) -> None:
        """Writes as much as is possible at once.

        Raises:
            LinkLost: the other side is gone.
        """
        try:
            while self._due:
                with memoryview(self._due) as view:
                    count = os.write(self.write_fd, view[: 1 << 20])
                del self._due[:count]
        except BlockingIOError:
            pass
        except OSError as error:
            raise LinkLost(str(error.strerror).lower()) from error

    def receive(self) -> list[_In]:
        """The messages that have come, without waiting.

        Raises:
            LinkLost: the stream has ended, or what comes is no message.
        """
        try:
            data = os.read(self.read_fd, _CHUNK)
        except BlockingIOError:
            data = None
        except OSError as error:
            raise LinkLost(str(error.strerror).lower()) from error
        if data == b"":
            raise LinkLost("it ended")
        self._frames.feed(data or b"")
        messages = []
        try:
            while (frame := self._frames.next()) is not None:
                messages.append(self._decoder.decode(frame))
        except (WireError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise Garbled(f"what it sent is no message of allranks ({error})") from error
        return messages

    def await_one(self, until: float) -> list[_In]:
        """Waits for the next messages, at least one.

        Raises:
            LinkLost: none will come.
            TimeoutError: none has come.
        """
        poll = select.poll()
        while True:
            poll.register(self.read_fd, select.POLLIN)
            if self._due:
                poll.register(self.write_fd, select.POLLOUT | (select.POLLIN if self.write_fd == self.read_fd else 0))
            left = until - time.monotonic()
            if left <= 0:
                raise TimeoutError
            poll.poll(min(left, 3600.0) * 1000)
            self.flush()
            if messages := self.receive():
                return messages

    def close(self) -> None:
        """Closes both descriptors. Idempotent."""
        for descriptor in self._held:
            descriptor.close()


def to_agent(read_fd: int, write_fd: int) -> Link[Message]:
    """A launcher's end."""
    return Link(read_fd, write_fd, Message)


def to_launcher(read_fd: int, write_fd: int) -> Link[Command]:
    """An agent's end."""
    return Link(read_fd, write_fd, Command)
