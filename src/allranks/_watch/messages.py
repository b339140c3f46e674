"""A record of ``isend`` and ``irecv``, on which ``send``, ``recv`` and ``batch_isend_irecv`` are built.

torch's Flight Recorder records no messages on gloo. Each of the two functions is replaced by one that calls it and
appends one entry to a ring.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
import weakref
from collections import deque
from dataclasses import dataclass
from types import CodeType, ModuleType
from typing import Any

__all__ = ["Message", "record_messages", "recorded_messages"]

_KEPT = 64  # messages; a program with more pending messages than these loses the oldest ones


@dataclass(frozen=True)
class Message:
    """A message that has been begun.

    Attributes:
        verb: ``send`` or ``recv``.
        began_ns: When it was begun, in nanoseconds of ``time.time_ns``.
        peer: The other side, as a world rank, or a rank of the group if ``of_group``. None: any.
        of_group: ``peer`` is a rank of the group.
        group: The group; None for the default group.
        tag: Its tag.
        count: Number of elements.
        dtype: Data type.
        code: The function that called it, and the position of the call in it.
        position: The position of the call in ``code``, in bytes.
        thread: The thread, as ``threading.get_ident`` returns it.
        work: The handle. A dead reference means that the program has dropped it.
    """

    verb: str
    began_ns: int
    peer: int | None
    of_group: bool
    group: Any
    tag: int
    count: int
    dtype: Any
    code: CodeType
    position: int
    thread: int
    work: weakref.ref[Any]


_ring: deque[Message] = deque(maxlen=_KEPT)
_replaced = False


def recorded_messages() -> list[Message]:
    """Return the newest messages, oldest first."""
    return list(_ring)


def record_messages(c10d: ModuleType) -> None:
    """Replace ``isend`` and ``irecv`` of torch.distributed. Idempotent."""
    global _replaced
    if _replaced:
        return
    _replaced = True
    package = sys.modules["torch.distributed"]
    for verb, name in (("send", "isend"), ("recv", "irecv")):
        recorded = _recorded(verb, getattr(c10d, name))
        # The program may use the name of either module. torch compares the functions by identity, under these names.
        setattr(c10d, name, recorded)
        setattr(package, name, recorded)


def _recorded(verb: str, function: Any) -> Any:
    torch_folder = os.path.dirname(sys.modules["torch"].__file__ or "") + os.sep
    peer_name, group_peer_name = ("dst", "group_dst") if verb == "send" else ("src", "group_src")

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        began_ns = time.time_ns()
        work = function(*args, **kwargs)
        if work is not None:
            given = dict(zip(("tensor", peer_name, "group", "tag", group_peer_name), args, strict=False)) | kwargs
            peer, group_peer = given.get(peer_name), given.get(group_peer_name)
            tensor, frame = given["tensor"], sys._getframe(1)
            while frame.f_code.co_filename.startswith(torch_folder) and frame.f_back is not None:
                frame = frame.f_back  # `send` and `batch_isend_irecv` call this function
            _ring.append(
                Message(
                    verb,
                    began_ns,
                    peer if group_peer is None else group_peer,
                    group_peer is not None,
                    given.get("group"),
                    given.get("tag") or 0,
                    tensor.numel(),
                    tensor.dtype,
                    frame.f_code,
                    frame.f_lasti,
                    threading.get_ident(),
                    weakref.ref(work),
                )
            )
        return work

    return call
