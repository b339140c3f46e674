"""Messages between master and workers: data only, never code.

Operations travel as frames of a few bytes: the number of a template and the ids of tensors. `_core.Outbox` documents
the format. A template is sent once. It contains the name of the operator in `torch.ops` and its arguments, with gaps
for tensors and for numbers that change from call to call. All other messages are a length and a msgpack structure.
"""

from __future__ import annotations

import struct
from typing import Any

import msgspec
import torch

from allranks.remote.protocol.arguments import Form

__all__ = [
    "CALL", "CONJ", "ECHO", "ECHOED", "FREE", "HEAD", "LARGE", "LARGEST", "LINE", "LINKING", "MESSAGE", "NEG",
    "ONLY_STRIDED", "SMALL",
    "Answer", "Ask", "Command", "Define", "Fault", "Hold", "Message", "Meta", "RemoteProgram", "Warned",
    "bits_of", "dtype_of", "frame", "pack", "pack_fault", "refuse_odd", "unpack", "unpack_fault",
]  # fmt: skip

HEAD = struct.Struct("<H")
FREE, MESSAGE, LINE, ECHO, CALL = 0, 1, 2, 3, 16
"""The first number of a frame: ids to free, a message, the call site, a number to be sent back. CALL and larger numbers
are the number of a template."""

ECHOED = struct.Struct("<II")
"""The answer to an ECHO: 0 in the position of the length of other answers, and the number. See core/remote/inbox.h."""

SMALL = 1 << 16
"""Largest tensor, in bytes, that a worker returns on the connection with the master. Larger ones use the native
channel."""

LARGE = 8 << 20
"""Tensors of more than this number of bytes also travel to a worker on the native channel."""

LARGEST = (1 << 32) - (1 << 16)
"""Tensors of at least this number of bytes cannot be a message: its length is a u32, which includes the header."""

LINKING = "a link between workers"
"""The operation that a fault names if a native group could not be created."""

Meta = tuple[str, list[int], list[int], int, int]
"""A tensor without its data: dtype, shape, strides, offset into its storage, and the sum of `CONJ` and `NEG`.

A tensor with one of these bits reads its memory as conjugated, or negated: `x.conj()` copies nothing."""

CONJ, NEG = 1, 2


class Define(msgspec.Struct, tag="define", array_like=True):
    """Defines a template.

    Attributes:
        results: For each returned value: a meta if it is a new tensor, None if it is not kept.
        checked: Compare the results with the metas on each call, not only on the first.
    """

    number: int
    op: str
    args: list[Form]
    kwargs: dict[str, Form]
    results: list[Meta | None]
    checked: bool


class Ask(msgspec.Struct, tag="ask", array_like=True):
    """Requests one operator call and the metas, or values, of its results, which get the ids."""

    number: int
    op: str
    args: list[Form]
    kwargs: dict[str, Form]
    inputs: list[int]
    values: bytes


class Hold(msgspec.Struct, tag="hold", array_like=True):
    """Sends a tensor. Its data follows the message."""

    id: int
    meta: Meta


class Command(msgspec.Struct, tag="cmd", array_like=True):
    """A command, identified by its name: all requests that the other messages do not cover."""

    name: str
    number: int  # of the answer that the master waits for; 0: no answer
    arguments: dict[str, Any] = {}


class RemoteProgram(msgspec.Struct, tag="program", array_like=True):
    """A captured step: frames whose ids are numbers within the program.

    Attributes:
        number: Its template. A call of it passes the ids of the inputs, then those of the outputs.
        frames: LINE, calls and FREE, in order.
        inputs: The numbers of the tensors that a call passes.
        outputs: The numbers of the tensors that get the ids that a call passes.
        fixed: Tensors that exist before the program runs, and their ids. A FREE of one also frees its id.
        kept: The numbers of the tensors that get the same id on each call, and these ids.
    """

    number: int
    frames: bytes
    inputs: list[int]
    outputs: list[int]
    fixed: dict[int, int]
    kept: dict[int, int]


class Fault(msgspec.Struct, array_like=True):
    """An error on a worker: the operation, the number of the call site on the master, the error and its traceback.

    `serial` distinguishes it from other faults of the worker, because each command that depends on it reports it again.
    `pickled` is the exception of a user function, if it can be pickled.
    """

    rank: int
    serial: int
    op: str
    line: int
    kind: str
    error: str
    traceback: str
    pickled: bytes = b""


class Warned(msgspec.Struct, array_like=True):
    """A Python warning of a worker.

    It contains the number of the call site on the master, the class of the warning, its builtin base class, and its
    text.
    """

    line: int
    kind: str
    builtin: str
    text: str


class Answer(msgspec.Struct, array_like=True):
    number: int
    result: Any = None
    fault: Fault | None = None
    warned: list[Warned] = []  # msgspec copies mutable defaults for each object
    printed: list[str] = []  # to stdout and stderr, by a user function


Message = Define | Ask | Hold | Command | RemoteProgram
"""Messages that a master sends in addition to calls of templates."""


def frame(answer: Answer) -> bytes:
    """Encode an answer, with its length."""
    packed = _encode(answer)
    return _LENGTH.pack(len(packed)) + packed


def pack_fault(fault: Fault) -> bytes:
    return _encode(fault)


def unpack_fault(packed: bytes) -> Fault:
    return msgspec.msgpack.decode(packed, type=Fault)


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Define | Ask | Hold | Command | RemoteProgram).decode
_answers = msgspec.msgpack.Decoder(Answer).decode
_LENGTH = struct.Struct("<I")


def pack(message: Message) -> bytes:
    """Encode a message, with its length because data may follow it."""
    packed = _encode(message)
    return _LENGTH.pack(len(packed)) + packed


def unpack(payload: memoryview) -> tuple[Message, memoryview]:
    """Decode a message. Return it and the data that follows it."""
    (length,) = _LENGTH.unpack_from(payload)
    return _decode(payload[4 : 4 + length]), payload[4 + length :]


ONLY_STRIDED = (
    "workers support only strided tensors.\n"
    "  Create other tensors on the master, or in a function that mw.remote() runs on the worker."
)


def refuse_odd(tensor: torch.Tensor, what: str) -> None:
    """Refuse a tensor whose memory a dtype, a shape and strides do not describe.

    Raises:
        TypeError: The tensor is nested, quantized or not strided.
    """
    kind = "nested" if tensor.is_nested else "quantized" if tensor.is_quantized else str(tensor.layout)
    if kind != "torch.strided":
        raise TypeError(f"{what} is {kind}: {ONLY_STRIDED}")


def bits_of(tensor: torch.Tensor) -> int:
    """Return how the tensor's memory must be read, as in `Meta`."""
    return CONJ * tensor.is_conj() + NEG * tensor.is_neg()


def dtype_of(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype
