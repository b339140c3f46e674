"""Calls of an engine that transfers flat tensors: begun, recorded, waited for and explained."""

from __future__ import annotations

import abc
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from allranks import _core
from allranks._base.errors import AllranksError, MismatchError, PeerLostError, TimeoutError, rank_list
from allranks._base.forks import forks, refusal
from allranks._base.timeouts import seconds_of
from allranks._call.callsite import site
from allranks._call.debug import DebugLevel, get_debug_level
from allranks._call.types import Stats
from allranks._call.work import Work
from allranks._engines.base import Engine
from allranks._engines.operands import Operands, OperandsWork
from allranks._engines.presence import Presence
from allranks._engines.recording import EngineRecording, Subject

if TYPE_CHECKING:
    from allranks._rendezvous.rendezvous import Member

__all__ = ["UNKNOWN_CAUSE", "FlatCalls", "FlatWork", "GroupTimeout", "Progress"]

_SLICE_S = 0.1  # seconds; a wait inside an engine may not notice signals, so Python checks for Ctrl-C at this interval
_MANY_PENDING = 64  # number of pending works from which on each call checks which of them have finished without a wait
# Bytes of the description of a call in debug mode, the same on all ranks, because all_gather needs equal sizes
_TEXT_BYTES = 80
UNKNOWN_CAUSE = (
    "\n  Check the output of the other ranks. If it shows no failure, set ALLRANKS_DEBUG=DETAIL: the ranks then compare"
    " their calls."
)
"""The end of an error whose cause only the engine knows."""


class GroupTimeout(RuntimeError):
    """A call has not completed within the group's timeout. Internal: users receive a TimeoutError."""


class Progress(abc.ABC):
    """A call that an engine has begun.

    Attributes:
        asked_cheaply: ``done`` is inexpensive, so it may be called for calls for which no thread waits.
    """

    asked_cheaply = True

    @abc.abstractmethod
    def done(self) -> bool:
        """Return whether it has ended, successfully or not. Does not wait."""

    @abc.abstractmethod
    def wait(self, seconds: float) -> bool:
        """Wait for at most this time. Return whether the call has ended. Raises the engine's error."""

    @abc.abstractmethod
    def source(self) -> int:
        """Return the sender of a message that has arrived."""


class FlatCalls(Engine):
    """The calls that an engine has begun.

    Attributes:
        rank: The rank of this process in the group.
        members: The members of the group, by rank.
        group_name: The name of the group for error messages.
        timeout_s: Seconds that a call waits for other ranks.
        on_host: It can access host memory only. Tensors of other devices are copied to the host and back.
        averages_integers: It implements AVG of integers itself. Otherwise their sums are divided here.
        queues: Waiting for a call only makes the device's stream wait, so the call ends later.
    """

    on_host = False
    averages_integers = False
    queues = False

    def __init__(self, name: str, rank: int, members: Sequence[Member], group_name: str, timeout_s: float) -> None:
        self.name = name
        self.rank = rank
        self.members = members
        self.group_name = group_name
        self.timeout_s = timeout_s
        # Works whose tensors the engine may still use, although the caller may have dropped all of them. A work is
        # added before the engine receives its tensors, so that an exception in between cannot release a tensor.
        self._pending: set[FlatWork] = set()
        self._presence: Presence | None = None
        self._stats = Stats(0, 0, 0.0, 0)
        self._recording: EngineRecording | None = None
        self._forks = forks()
        self._debug = get_debug_level() is DebugLevel.DETAIL

    def explain(self, error: BaseException, verb: str) -> NoReturn:
        """Raise allranks's error for an error of the engine. An AllranksError gets the name of the call."""
        here = self.here(verb)
        if isinstance(error, PeerLostError):
            raise PeerLostError(f"{here}: {error}", error.rank) from error
        if isinstance(error, AllranksError):
            raise type(error)(f"{here}: {error}") from error
        raise AllranksError(f"{here}: {self.name}: {error}{UNKNOWN_CAUSE}") from error

    def set_timeout(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s

    def leave_running(self, work: FlatWork) -> None:
        """Take over an asynchronous call that has begun. Perhaps no thread will wait for it."""

    def give_up(self, work: FlatWork) -> None:
        """Handle a blocking call that an exception has left. The engine may still use its tensors."""

    @abc.abstractmethod
    def begin_all_gather(self, into: Tensor, given: Tensor) -> Progress: ...

    def _call(
        self,
        operands: Operands,
        nbytes: int,
        async_op: bool,
        subject: Subject,
        begin: Callable[..., Progress],
        *args: Any,
    ) -> Work | None:
        work = self._started(operands, nbytes, async_op, subject, begin, *args)
        if async_op:
            self.leave_running(work)
            return work
        self._wait(work)
        return None

    def _wait(self, work: FlatWork) -> None:
        try:
            work.wait()
        except BaseException:
            self.give_up(work)
            work.end_record(False)
            raise

    def _started(
        self,
        operands: Operands,
        nbytes: int,
        async_op: bool,
        subject: Subject,
        begin: Callable[..., Progress],
        *args: Any,
    ) -> FlatWork:
        """Begin a call and record it."""
        # Only from this number on: a check of all pending works in each call would make many calls quadratic.
        if len(self._pending) > _MANY_PENDING:
            for other in tuple(self._pending):
                # Its side effect is wanted: a work that has ended removes itself and releases its tensors.
                other.is_completed()
        work = FlatWork(self, operands, nbytes)
        # A call of nccl is only queued when its wait returns, so its end must be polled as well.
        unwaited = async_op or self.queues
        if self._recording is not None:
            work.record_as(self._recording, self._recording.begin(operands.verb, subject, nbytes, unwaited))
        try:
            # Messages are not compared: they need not be called in the same order on all ranks.
            if self._debug and operands.verb not in ("send", "recv"):
                self._compare(operands.verb, subject)
            self._launched(work, begin, *args)
        except BaseException:
            work.end_record(False)
            raise
        if unwaited:
            work.watch()
        return work

    def _launched(self, work: FlatWork, begin: Callable[..., Progress], *args: Any) -> FlatWork:
        # Before the engine receives the tensors: see `_pending`.
        self._pending.add(work)
        try:
            work.progress = begin(*args)
        except Exception as error:
            self._pending.discard(work)
            # allranks's own errors already have their text. A lost peer still needs the name of the call.
            ours = isinstance(error, AllranksError) and not isinstance(error, PeerLostError)
            if ours or not isinstance(error, RuntimeError | OSError):
                raise
            self.explain(error, work.verb)
        except BaseException:  # Ctrl-C: it is unknown whether the engine has begun the call
            # The engine may use the tensors, so the work is given up but not released.
            self.give_up(work)
            raise
        return work

    def _compare(self, verb: str, subject: Subject) -> None:
        """Raise if the ranks are about to make different calls."""
        numel, op = subject.numel, subject.op
        text = verb if numel is None else f"{verb} of {numel} x {str(subject.dtype).removeprefix('torch.')}"
        if op is not None:
            text += f", {op.name}"
        if subject.peer >= 0:
            text += f", root {subject.peer}"
        mine = torch.tensor(list(text.encode().ljust(_TEXT_BYTES)), dtype=torch.uint8, device=self.device)
        everyones = mine.new_empty(len(self.members), _TEXT_BYTES)
        comparing = Operands(verb)
        comparing.keep += [mine, everyones]
        # Without `_started`: this exchange must neither be compared nor recorded itself.
        self._wait(self._launched(FlatWork(self, comparing, 0), self.begin_all_gather, everyones.view(-1), mine))
        calls = [bytes(row).decode().rstrip() for row in everyones.tolist()]
        if len(set(calls)) > 1:
            ranks = {call: [rank for rank, other in enumerate(calls) if other == call] for call in calls}
            raise MismatchError(
                f"call on group '{self.group_name}': "
                + "; ".join(f"{rank_list(by)} called {call}" for call, by in ranks.items())
                + ". No tensor was changed."
            )

    def ended(self, work: FlatWork) -> None:
        """Remove a work that has ended, successfully or not. Called by the work."""
        # A work may end in a wait and in a poll. Only the first one counts it.
        if work in self._pending:
            self._pending.discard(work)
            self._count(work.nbytes, work.began)

    def _count(self, nbytes: int, began: float) -> None:
        calls, total, seconds, shared = self._stats
        self._stats = Stats(calls + 1, total + nbytes, seconds + time.monotonic() - began, shared)

    def check_process(self, verb: str) -> None:
        """Raise in a forked child, in which no call can be waited for."""
        if self._forks != forks():
            raise refusal(f"{verb} on group '{self.group_name}': the group")

    def here(self, verb: str) -> str:
        """Return the beginning of error messages."""
        return f"{verb} on group '{self.group_name}' (rank {self.rank} of {len(self.members)})"

    def _who(self, rank: int) -> str:
        return f"rank {rank} ({self.members[rank].host}, pid {self.members[rank].pid})"

    def record_in(self, recorder: _core.Recorder, group: int) -> bool:
        self._recording = EngineRecording(recorder, group)
        return True

    def stats(self) -> Stats:
        return self._stats


class FlatWork(OperandsWork):
    """An asynchronous call of a flat engine."""

    def __init__(self, engine: FlatCalls, operands: Operands, nbytes: int) -> None:
        super().__init__(operands)
        self.began = time.monotonic()
        self.nbytes = nbytes
        self.progress: Progress | None = None  # None until the engine has begun the call
        self._engine = engine
        self._recording: EngineRecording | None = None
        self._record: _core.OtherCall | None = None  # until its end is recorded
        self._awaited = False  # whether the record contains a wait

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        if self._error is not None:
            raise self._error
        if self._finished:
            return True
        verb = self._operands.verb
        # In a forked child, MPI and gloo would hang: their threads and connections belong to the parent.
        self._engine.check_process(verb)
        limit_s = max(seconds_of(timeout), 0.0) if timeout else None
        deadline = None if limit_s is None else time.monotonic() + limit_s
        # In slices, so that Ctrl-C is noticed between them.
        while not self._ended_within(_SLICE_S if deadline is None else min(_SLICE_S, deadline - time.monotonic())):
            if deadline is not None and time.monotonic() >= deadline:
                self._record_end_of_wait()
                raise TimeoutError(
                    f"{self._engine.here(verb)}: has not completed after {limit_s:.1f} s.\n"
                    "  The call continues. Call wait() again to wait longer."
                )
            self._record_wait()
        # For nccl, the wait has only been queued on the stream: `has_ended` records the end later.
        if not self._engine.queues:
            self.end_record(True)
        self._finish()
        self._engine.ended(self)
        return True

    def _ended_within(self, seconds: float) -> bool:
        assert self.progress is not None
        try:
            return self.progress.wait(seconds)
        except (RuntimeError, OSError) as error:
            # Recorded and removed before the explanation, which may take some time to find lost ranks.
            self.end_record(False)
            self._engine.ended(self)
            try:
                self._engine.explain(error, self._operands.verb)
            except AllranksError as explained:
                self._error = explained
                raise

    def record_as(self, recording: EngineRecording, call: _core.OtherCall) -> None:
        """Set the record in which the work records its end."""
        self._recording, self._record = recording, call

    def watch(self) -> None:
        """Let the recorder check for the end of a call for which perhaps no thread will wait."""
        assert self.progress is not None
        # An expensive check, such as that of gloo's messages, would start a thread for each call.
        if self._recording is not None and self.progress.asked_cheaply:
            self._recording.watch(self)

    def end_record(self, succeeded: bool) -> None:
        """Record that the call has ended. Idempotent."""
        # Exchanged first: two threads may find the end, and only one may record it.
        record, self._record = self._record, None
        if record is not None and self._recording is not None:
            record.end(succeeded)
            self._recording.ended(self)

    def has_ended(self) -> bool:
        """Return whether the call has ended, if this check is inexpensive. Records the end."""
        assert self.progress is not None
        if not self._engine.queues:
            return self.is_completed()
        if not self.progress.done():
            return False
        self.end_record(True)
        return True

    def _record_wait(self) -> None:
        """Record that the program waits, and at which call site."""
        if self._record is not None and not self._awaited:
            self._awaited = True
            self._record.set_awaited(site())

    def _record_end_of_wait(self) -> None:
        if self._record is not None and self._awaited:
            self._awaited = False
            self._record.clear_awaited()

    def source_rank(self) -> int:
        assert self.progress is not None
        return self.progress.source()

    def done(self) -> bool:
        """Return whether it has ended: the engine no longer uses the tensors, or the call has failed."""
        return self._error is not None or (self.progress is not None and self.progress.done())
