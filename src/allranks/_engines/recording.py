"""What an engine records of its calls that is not the core's.

The core records the calls of the native engine itself. Here the begin of a call is known, and its end is when somebody
who waits or asks has found that it has ended. A call that nobody waits for is looked at when the next one begins: so it
ends without a thread that watches it.
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

_core.set_where(where)  # for the lines of blocking calls, also where nobody imports the native engine


class Subject(NamedTuple):
    """What a call is about.

    Attributes:
        dtype: of its tensors.
        numel: elements of this rank's tensor; None where it is not the same on all ranks.
        op: the reduce op.
        peer: the root, or the other side of a message; -1: none, or any.
        tag: of a message.
    """

    dtype: torch.dtype = torch.uint8
    numel: int | None = None
    op: ReduceOp | None = None
    peer: int = -1
    tag: int = 0


class Unwaited(Protocol):
    """A call that may end without somebody who waits for it."""

    def has_ended(self) -> bool:
        """Whether it has ended. If so, it has recorded that."""
        ...


class EngineRecording:
    """The calls of one group on one engine."""

    def __init__(self, recorder: _core.Recorder, group: int) -> None:
        self._recorder = recorder
        self._group = group
        self._number = 0  # of the last collective
        self._unwaited: dict[Unwaited, None] = {}  # in the order of their begin

    def begin(self, verb: str, subject: Subject, nbytes: int, async_op: bool) -> _core.OtherCall:
        """A call begins."""
        oldest = next(iter(self._unwaited), None)
        while oldest is not None and oldest.has_ended():
            self._unwaited.pop(oldest, None)
            oldest = next(iter(self._unwaited), None)
        code, number = _VERBS[verb], subject.tag
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
            site() if async_op else "",
            async_op,
        )

    def watch(self, call: Unwaited) -> None:
        """A call has begun for which perhaps nobody will wait."""
        self._unwaited[call] = None

    def ended(self, call: Unwaited) -> None:
        """It has ended, and that has been recorded."""
        self._unwaited.pop(call, None)
