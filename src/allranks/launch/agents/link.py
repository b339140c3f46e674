"""Messages between a launcher and an agent, over a pair of descriptors: ssh's pipes, or a TCP connection.

A link never blocks while a job runs. It queues data that the other side does not read yet, and the sender watches
``backlog``. The end of the stream shows to each side that the other side has exited, for any reason.
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
_FRAME_LIMIT = 1 << 31  # bytes; a call of ``allranks.run`` has up to 1 GiB (``ranks/function``)
_STRANGERS_LIMIT = 1 << 16  # bytes; text that a shell prints there looks like a frame of a gigabyte

_In = TypeVar("_In")


class LinkLost(Exception):
    """The other side is lost."""


class Garbled(LinkLost):
    """The received bytes are no message."""


class Link(Generic[_In]):
    """One end of a link.

    Args:
        read_fd: the descriptor to read from. The link closes both.
        write_fd: the descriptor to write to; may be the same.
        kind: type of the received messages.
    """

    def __init__(self, read_fd: int, write_fd: int, kind: Any) -> None:
        self.read_fd, self.write_fd = read_fd, write_fd
        # closed in forked children, where they would hide the exit of this process
        self._held = [Descriptor(fd) for fd in {read_fd, write_fd}]
        for fd in (read_fd, write_fd):
            os.set_blocking(fd, False)
            os.set_inheritable(fd, False)
        self._decoder: msgspec.msgpack.Decoder[_In] = msgspec.msgpack.Decoder(kind)
        self._frames = FrameDecoder(_STRANGERS_LIMIT if kind is Message else _FRAME_LIMIT)
        self._due = bytearray()

    def trust(self) -> None:
        """Accept messages of any size from now on: the other side has identified itself."""
        self._frames.limit = _FRAME_LIMIT

    @property
    def backlog(self) -> int:
        """Bytes that the other side has not read yet."""
        return len(self._due)

    def send(self, message: Message | Command) -> None:
        """Queue a message, and write as much as is possible without blocking.

        Raises:
            LinkLost: the other side is lost.
        """
        self._due += pack_frame(msgspec.msgpack.encode(message))
        self.flush()

    def flush(self) -> None:
        """Write as much as is possible without blocking.

        Raises:
            LinkLost: the other side is lost.
        """
        try:
            while self._due:
                # Released before ``del``, because a bytearray with an exported buffer cannot change its size.
                with memoryview(self._due) as view:
                    count = os.write(self.write_fd, view[: 1 << 20])
                del self._due[:count]
        except BlockingIOError:
            pass
        except OSError as error:
            raise LinkLost(str(error.strerror).lower()) from error

    def receive(self) -> list[_In]:
        """Return the messages that have arrived, without waiting.

        Raises:
            LinkLost: the stream has ended, or the received bytes are no message.
        """
        try:
            data = os.read(self.read_fd, _CHUNK)
        except BlockingIOError:
            data = None
        except OSError as error:
            raise LinkLost(str(error.strerror).lower()) from error
        if data == b"":
            raise LinkLost("closed by the peer")
        self._frames.feed(data or b"")
        messages = []
        try:
            while (frame := self._frames.next()) is not None:
                messages.append(self._decoder.decode(frame))
        except (WireError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise Garbled(f"received data that is not an allranks message ({error})") from error
        return messages

    def await_one(self, until: float) -> list[_In]:
        """Wait for the next messages, at least one.

        Raises:
            LinkLost: no message can arrive any more.
            TimeoutError: no message has arrived in time.
        """
        poll = select.poll()
        while True:
            poll.register(self.read_fd, select.POLLIN)
            # A socket has one entry in the poll object: a second registration replaces the first.
            if self._due:
                poll.register(self.write_fd, select.POLLOUT | (select.POLLIN if self.write_fd == self.read_fd else 0))
            left = until - time.monotonic()
            if left <= 0:
                raise TimeoutError
            # poll takes milliseconds as a C int, and ``left`` may be infinite.
            poll.poll(min(left, 3600.0) * 1000)
            self.flush()
            if messages := self.receive():
                return messages

    def close(self) -> None:
        """Close both descriptors. Idempotent."""
        for descriptor in self._held:
            descriptor.close()


def to_agent(read_fd: int, write_fd: int) -> Link[Message]:
    """Return the launcher's end."""
    return Link(read_fd, write_fd, Message)


def to_launcher(read_fd: int, write_fd: int) -> Link[Command]:
    """Return the agent's end."""
    return Link(read_fd, write_fd, Command)
