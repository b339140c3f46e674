"""Messages between a launcher and an agent, over a pair of descriptors: ssh's pipes, or a TCP connection.

Never blocks while a job runs: what the other side does not take waits here, and whoever fills it looks at
``backlog``. The end of the stream is how either side learns that the other is gone, however it went.
"""

from __future__ import annotations

import os
import select
import time
from typing import Any, Generic, TypeVar

import msgspec

from allranks._base.forks import Descriptor
from allranks._store.wire import FrameDecoder, WireError, pack_frame
from allranks.launch.spec.messages import Command, Message

__all__ = ["Garbled", "Link", "LinkLost", "to_agent", "to_launcher"]

_CHUNK = 1 << 16
_FRAME_LIMIT = 1 << 31
_STRANGERS_LIMIT = 1 << 16  # text that a shell prints there looks like a frame of a gigabyte

_In = TypeVar("_In")


class LinkLost(Exception):
    """The other side is gone."""


class Garbled(LinkLost):
    """What comes is no message."""


class Link(Generic[_In]):
    """One end.

    Args:
        ear: the descriptor to read from. The link closes both.
        mouth: the one to write to; may be the same.
        kind: what comes in.
    """

    def __init__(self, ear: int, mouth: int, kind: Any) -> None:
        self.ear, self.mouth = ear, mouth
        self._held = [Descriptor(fd) for fd in {ear, mouth}]  # or a forked child would hide this process' end
        for fd in (ear, mouth):
            os.set_blocking(fd, False)
            os.set_inheritable(fd, False)
        self._decoder: msgspec.msgpack.Decoder[_In] = msgspec.msgpack.Decoder(kind)
        self._frames = FrameDecoder(_STRANGERS_LIMIT if kind is Message else _FRAME_LIMIT)
        self._due = bytearray()

    def trust(self) -> None:
        """Takes messages of any size from here on: the other side has said hello."""
        self._frames.limit = _FRAME_LIMIT

    @property
    def backlog(self) -> int:
        """Bytes that the other side has not taken yet."""
        return len(self._due)

    def say(self, message: Message | Command) -> None:
        """Takes a message, and writes as much as is possible at once.

        Raises:
            LinkLost: nobody is there to read it.
        """
        self._due += pack_frame(msgspec.msgpack.encode(message))
        self.flush()

    def flush(self) -> None:
        """Writes as much as is possible at once.

        Raises:
            LinkLost: nobody is there to read it.
        """
        try:
            while self._due:
                with memoryview(self._due) as view:
                    count = os.write(self.mouth, view[: 1 << 20])
                del self._due[:count]
        except BlockingIOError:
            pass
        except OSError as error:
            raise LinkLost(str(error.strerror).lower()) from error

    def hear(self) -> list[_In]:
        """What has come, without waiting.

        Raises:
            LinkLost: the stream has ended, or what comes is no message.
        """
        try:
            data = os.read(self.ear, _CHUNK)
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
            raise Garbled(f"what it says is no message of allranks ({error})") from error
        return messages

    def await_one(self, until: float) -> list[_In]:
        """Waits for the next messages, at least one.

        Raises:
            LinkLost: none will come.
            TimeoutError: none has come.
        """
        poll = select.poll()
        while True:
            poll.register(self.ear, select.POLLIN)
            if self._due:
                poll.register(self.mouth, select.POLLOUT | (select.POLLIN if self.mouth == self.ear else 0))
            left = until - time.monotonic()
            if left <= 0:
                raise TimeoutError
            poll.poll(min(left, 3600.0) * 1000)
            self.flush()
            if messages := self.hear():
                return messages

    def close(self) -> None:
        """Closes both descriptors. Idempotent."""
        for descriptor in self._held:
            descriptor.close()


def to_agent(ear: int, mouth: int) -> Link[Message]:
    """A launcher's end."""
    return Link(ear, mouth, Message)


def to_launcher(ear: int, mouth: int) -> Link[Command]:
    """An agent's end."""
    return Link(ear, mouth, Command)
