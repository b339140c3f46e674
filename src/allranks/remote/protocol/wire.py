"""What master and workers send to each other: data only, never code.

Operations travel as frames of a few bytes (`_core.Outbox` says how they look): the number of a template and the ids of
tensors. A template is sent once: the operator by its name in `torch.ops`, and its arguments with gaps for tensors and
numbers that change from call to call. The rest are messages, one letter and msgpack.
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
"""What a frame begins with: ids to forget, a message, the program's line, a number to be sent back; from CALL on, the
number of a template."""

ECHOED = struct.Struct("<II")
"""The answer to an ECHO: 0, where others have their length, and the number. See core/remote/inbox.h."""

SMALL = 1 << 16
"""Up to so many bytes a tensor comes back on the line between master and worker, beyond that on the native channel."""

LARGE = 8 << 20
"""From so many bytes on a tensor goes to a worker on the native channel, too."""

LARGEST = (1 << 32) - (1 << 16)
"""From so many bytes on a tensor cannot be a message. Its length is a u32, of what is beside the data too."""

LINKING = "a link between workers"
"""What has failed, in a fault, where a native group could not be made."""

Meta = tuple[str, list[int], list[int], int, int]
"""A tensor without its data: dtype, shape, strides, offset into its storage, and `CONJ` and `NEG` added up.

A tensor with one of these reads its memory as conjugated, or negated: `x.conj()` copies nothing."""

CONJ, NEG = 1, 2


class Define(msgspec.Struct, tag="define", array_like=True):
    """A template.

    Attributes:
        results: for each value returned: a meta where it is a new tensor, None where nothing is kept.
        checked: compare with the metas each time, not only the first.
    """

    number: int
    op: str
    args: list[Form]
    kwargs: dict[str, Form]
    results: list[Meta | None]
    checked: bool


class Ask(msgspec.Struct, tag="ask", array_like=True):
    """Run an operator and answer with the metas, or values, of what it returns, which gets the ids."""

    number: int
    op: str
    args: list[Form]
    kwargs: dict[str, Form]
    inputs: list[int]
    values: bytes


class Hold(msgspec.Struct, tag="hold", array_like=True):
    """Here is a tensor's data: what follows the message."""

    id: int
    meta: Meta


class Command(msgspec.Struct, tag="cmd", array_like=True):
    """A command, by name: what is none of the others."""

    name: str
    number: int  # of the answer that is awaited, 0 for none
    arguments: dict[str, Any] = {}


class RemoteProgram(msgspec.Struct, tag="program", array_like=True):
    """A captured step: frames whose ids are numbers within the program.

    Attributes:
        number: its template. A call of it takes the ids of the inputs, then those of the outputs.
        frames: LINE, calls and FREE, in order.
        inputs: the numbers of the tensors that a call gives.
        outputs: what gets the ids that a call gives.
        fixed: tensors that are there before it begins, and their ids. A FREE of one frees its id too.
        kept: what gets the same id at each call.
    """

    number: int
    frames: bytes
    inputs: list[int]
    outputs: list[int]
    fixed: dict[int, int]
    kept: dict[int, int]


class Fault(msgspec.Struct, array_like=True):
    """What went wrong on a worker: the operation, the master's line (by number), the error and its traceback.

    `serial` tells it from the worker's others, as it is reported wherever it has spread to. `pickled` is what a
    function of the user's has raised, where it can be.
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
    """A Python warning of a worker's: the master's line (by number), the warning's class and the builtin one that it is
    of, and its text."""

    line: int
    kind: str
    builtin: str
    text: str


class Answer(msgspec.Struct, array_like=True):
    number: int
    result: Any = None
    fault: Fault | None = None
    warned: list[Warned] = []
    printed: list[str] = []  # to stdout and stderr, by a function


Message = Define | Ask | Hold | Command | RemoteProgram
"""What a master sends beside calls of templates."""


def frame(answer: Answer) -> bytes:
    """An answer as it travels."""
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
    """A message, with its length, as data may follow it."""
    packed = _encode(message)
    return _LENGTH.pack(len(packed)) + packed


def unpack(payload: memoryview) -> tuple[Message, memoryview]:
    """A message and what follows it."""
    (length,) = _LENGTH.unpack_from(payload)
    return _decode(payload[4 : 4 + length]), payload[4 + length :]


ONLY_STRIDED = (
    "only strided tensors can live on a worker. "
    "Have others on the master, or within a function that mw.remote() runs on the worker"
)


def refuse_odd(tensor: torch.Tensor, what: str) -> None:
    """
    Raises:
        TypeError: a dtype, a shape and strides do not say how the tensor's memory is to be read.
    """
    kind = "nested" if tensor.is_nested else "quantized" if tensor.is_quantized else str(tensor.layout)
    if kind != "torch.strided":
        raise TypeError(f"{what} is {kind}: {ONLY_STRIDED}")


def bits_of(tensor: torch.Tensor) -> int:
    """How its memory is to be read, as in `Meta`."""
    return CONJ * tensor.is_conj() + NEG * tensor.is_neg()


def dtype_of(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype
