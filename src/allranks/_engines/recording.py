"""Recording of the calls of engines other than the native engine.

The core records the calls of the native engine itself. For other engines, the begin of a call is known. Its end is
recorded when a waiting or polling thread finds that it has ended. A call for which no thread waits is checked when the
next call begins. Its end is therefore recorded without a watching thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from allranks import _core
from allranks._call.callsite import site, where
from allranks._engines.checks import CODES
from allranks._trace.reader import VERBS

if TYPE_CHECKING:
    from allranks._call.types import ReduceOp

__all__ = ["EngineRecording", "Subject"]

_VERBS = {verb: code for code, verb in enumerate(VERBS)}

_core.set_where(where)  # call sites of blocking calls need it, also if the native engine is not imported


class Subject(NamedTuple):
    """The data of a call for its record.

    Attributes:
        dtype: The dtype of its tensors.
        numel: The number of elements of this rank's tensor. None if it differs between ranks.
        op: The reduce op.
        peer: The root, or the other rank of a message. -1: none, or any.
        tag: The tag of a message.
    """

    dtype: torch.dtype = torch.uint8
    numel: int | None = None
    op: ReduceOp | None = None
    peer: int = -1
    tag: int = 0


class Unwaited(Protocol):
    """A call that may end without a thread that waits for it."""

    def has_ended(self) -> bool:
        """Return whether it has ended. If so, it has recorded its end."""
        ...


class EngineRecording:
    """The record of the calls of one group on one engine."""

    def __init__(self, recorder: _core.Recorder, group: int) -> None:
        self._recorder = recorder
        self._group = group
        self._number = 0  # number of the last collective
        self._unwaited: dict[Unwaited, None] = {}  # in the order in which they began

    def begin(self, verb: str, subject: Subject, nbytes: int, async_op: bool) -> _core.OtherCall:
        """Record the begin of a call. First check the oldest calls for which no thread waits."""
        # Only the oldest, up to the first that has not ended: the cost per call is constant on average.
        oldest = next(iter(self._unwaited), None)
        while oldest is not None and oldest.has_ended():
            self._unwaited.pop(oldest, None)
            oldest = next(iter(self._unwaited), None)
        code, number = _VERBS[verb], subject.tag
        # Only collectives are numbered. The codes of messages follow those of collectives, and their number is the tag.
        if code < _VERBS["send"]:
            number = self._number = self._number + 1
        return self._recorder.begin(
            self._group,
            code,
            CODES.get(subject.dtype, 0),
            subject.op or 0,
            subject.numel or 0,
            subject.peer,
            number,
            nbytes,
            # The core looks up the site of a blocking call itself, but only if the call lasts long
            # (docs/decisions/093).
            site() if async_op else "",
            async_op,
        )

    def watch(self, call: Unwaited) -> None:
        """Register a call for which perhaps no thread will wait."""
        self._unwaited[call] = None

    def ended(self, call: Unwaited) -> None:
        """Remove a call whose end has been recorded."""
        self._unwaited.pop(call, None)
