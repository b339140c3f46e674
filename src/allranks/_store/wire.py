"""Requests to a store and their replies, as typed msgspec structs in frames (`_net.frames`).

The module uses no socket and no clock, so that it can be tested on any input.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from allranks._net.frames import WireError
from allranks._net.handshake import Protocol

__all__ = [
    "Add",
    "Append",
    "CompareSet",
    "Delete",
    "RequestDone",
    "FRAME_LIMIT",
    "RequestFailed",
    "FoundValues",
    "WaitTimedOut",
    "Length",
    "FoundNames",
    "ListNames",
    "PROTOCOL",
    "Peek",
    "Pop",
    "Push",
    "Reply",
    "Request",
    "Set",
    "SetMany",
    "WaitForKeys",
    "decode_reply",
    "decode_request",
    "encode",
]

PROTOCOL = Protocol(b"allranks-store/", b"4")  # version 4: verdicts of the handshake are frames

FRAME_LIMIT = 16 << 20
"""The largest frame in bytes. The largest value is slightly smaller."""


class _Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


class Set(_Message, frozen=True):
    key: str
    value: bytes


class SetMany(_Message, frozen=True):
    keys: list[str]
    values: list[bytes]


class Add(_Message, frozen=True):
    key: str
    amount: int


class Append(_Message, frozen=True):
    key: str
    value: bytes


class Peek(_Message, frozen=True):
    keys: list[str]


class WaitForKeys(_Message, frozen=True):
    keys: list[str]
    timeout_s: float
    values: bool  # the reply contains the values; otherwise a queue with the name of a key counts as set, too


class Delete(_Message, frozen=True):
    key: str


class CompareSet(_Message, frozen=True):
    key: str
    expected: bytes
    desired: bytes


class ListNames(_Message, frozen=True):
    prefix: str


class Push(_Message, frozen=True):
    key: str
    value: bytes


class Pop(_Message, frozen=True):
    key: str
    timeout_s: float


class Length(_Message, frozen=True):
    key: str


class RequestDone(_Message, frozen=True):
    number: int = 0


class FoundValues(_Message, frozen=True):
    values: list[bytes | None]


class FoundNames(_Message, frozen=True):
    names: list[str]


class WaitTimedOut(_Message, frozen=True):
    missing: list[str]


class RequestFailed(_Message, frozen=True):
    text: str


Request = Set | SetMany | Add | Append | Peek | WaitForKeys | Delete | CompareSet | ListNames | Push | Pop | Length
Reply = RequestDone | FoundValues | FoundNames | WaitTimedOut | RequestFailed

encode = msgspec.msgpack.Encoder().encode


def _decoder(kind: Any) -> Callable[[bytes], Any]:
    decode = msgspec.msgpack.Decoder(kind).decode

    def checked(frame: bytes) -> Any:
        """Decode a frame. Raise msgspec.ValidationError if only an argument has a wrong type, otherwise WireError."""
        try:
            return decode(frame)
        # A wrong argument is an error of the caller only: the server replies to it and keeps the connection.
        except msgspec.ValidationError:
            raise
        # Invalid UTF-8 and deep nesting have their own exceptions. Uncaught, they would terminate the server's thread.
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise WireError(f"invalid message: {error}") from None

    return checked


decode_request: Callable[[bytes], Request] = _decoder(Request)
decode_reply: Callable[[bytes], Reply] = _decoder(Reply)
