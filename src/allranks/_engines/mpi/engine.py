"""The mpi engine: MPI through mpi4py, for jobs that mpirun has started.

A group has its own communicator. Every call is a nonblocking call of MPI, and a waiting thread polls it (`job.poll`).
Ctrl-C is therefore noticed, a timeout ends the wait, and a blocking call on one rank matches an asynchronous one on
another. A thread (`_Mover`) progresses calls for which no thread waits.

Behavior of MPI found with Open MPI 5.0 and MPICH 5.0, and the countermeasures:

- MIN and MAX lose NaN. Floating-point numbers are compared as integers that have the same order (`_keys`).
- Open MPI's SUM of 8 and 16 bits saturates. These are summed in 32 bits. So are 16-bit floats, which MPI lacks.
- Counts are limited to 2^31 - 1 in many MPIs. A larger block travels as one element of its own type (`_span`).
- Ranks that wait for a rank do not notice that it leaves. `Presence` notifies them.
"""

from __future__ import annotations

import functools
import os
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from allranks import _core
from allranks._base.errors import (
    AllranksError,
    ConfigError,
    MismatchError,
    PeerLostError,
    TimeoutError,
    UsageError,
    rank_list,
)
from allranks._base.threads import Daemon
from allranks._base.verbs import VERBS
from allranks._call.types import ReduceOp
from allranks._cluster.host import usable_cpus
from allranks._engines.checks import CODES
from allranks._engines.flat import FlatEngine, FlatWork, Progress
from allranks._engines.flat_calls import UNKNOWN_CAUSE, GroupTimeout
from allranks._engines.mpi import job
from allranks._engines.mpi.job import lock, poll
from allranks._engines.operands import Operands
from allranks._engines.presence import Presence
from allranks._engines.recording import Subject
from allranks._engines.spec import RECORD_BYTES, Exchange

if TYPE_CHECKING:
    from allranks._rendezvous.rendezvous import Member

__all__ = ["MpiEngine", "reduces"]

_RECORD = struct.Struct("!IIH16s")  # rank and size in MPI's world, the first CPU, and random bytes
assert _RECORD.size == RECORD_BYTES
_MOST = 1 << 30  # elements or bytes in one part; below the limit of 2^31 - 1 of many MPIs
_GRACE_S = 0.5  # seconds; data that a rank sent before it left may still be in transit
_CANCEL_S = 1.0  # seconds; MPI cancels a receive locally
# Tests of a blocking call before it gets the objects of a longer call; a short call then takes 4 us of Python, not 7
_QUICK_TESTS = 50
_NAP_S = 0.5e-3  # seconds between two rounds of the mover: MPI makes progress only when it is called

_TYPES = {
    torch.uint8: "UINT8_T", torch.uint16: "UINT16_T", torch.uint32: "UINT32_T", torch.uint64: "UINT64_T",
    torch.int8: "INT8_T", torch.int16: "INT16_T", torch.int32: "INT32_T", torch.int64: "INT64_T",
    torch.float32: "FLOAT", torch.float64: "DOUBLE",
}  # fmt: skip
_OPS = {
    ReduceOp.SUM: "SUM", ReduceOp.AVG: "SUM", ReduceOp.PRODUCT: "PROD", ReduceOp.MIN: "MIN", ReduceOp.MAX: "MAX",
    ReduceOp.BAND: "BAND", ReduceOp.BOR: "BOR", ReduceOp.BXOR: "BXOR",
}  # fmt: skip
_SUMMED_IN = {
    torch.float16: torch.float32, torch.bfloat16: torch.float32,
    torch.uint8: torch.int32, torch.int8: torch.int32, torch.uint16: torch.int32, torch.int16: torch.int32,
}  # fmt: skip
_WHOLE = {
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}

_DESTROYED = (
    "the group was destroyed while the call was pending.\n  Wait for all pending calls before destroy_process_group()."
)

_orphans: list[FlatWork] = []
"""Calls for which no thread can wait any more, whose tensors MPI may still use. They stay alive until the end."""


def reduces(dtype: torch.dtype, op: ReduceOp) -> bool:
    """Return whether the engine implements a reduce op for a dtype: the same combinations as the native engine."""
    return dtype in CODES and _core.reduces(CODES[dtype], op)


class MpiEngine(FlatEngine):
    """Collectives and messages of MPI."""

    on_host = True

    def __init__(
        self, rank: int, members: Sequence[Member], exchange: Exchange, group_name: str, timeout_s: float
    ) -> None:
        super().__init__("mpi", rank, members, group_name, timeout_s)
        self.mpi = job.start()
        self._comm: Any = None
        self._types = {dtype: getattr(self.mpi, name) for dtype, name in _TYPES.items()}
        self._ops: dict[object, Any] = {op: getattr(self.mpi, name) for op, name in _OPS.items()}
        self._calls = 0  # number of collectives that were begun
        self._lost = ""  # why the group cannot be used any more
        world = self.mpi.COMM_WORLD
        # The first CPU shows whether mpirun has bound each rank to CPUs of its own.
        mine = _RECORD.pack(world.rank, world.size, min(os.sched_getaffinity(0)), os.urandom(16))
        rows = [_RECORD.unpack(row) for row in exchange(mine)]
        ranks = [row[0] for row in rows]
        # mpirun of another MPI starts processes that each form a job of one rank.
        if world.size == 1 and len(rows) > 1:
            raise job.not_launched(self.mpi, len(rows))
        if len(set(ranks)) < len(ranks) or len({row[1] for row in rows}) > 1:
            raise ConfigError(
                f"group '{group_name}' on mpi: its ranks do not belong to one MPI job (their ranks in MPI: {ranks}).\n"
                "  Start all ranks with one mpirun."
            )
        secret: bytes = rows[0][3]
        # It exists before the ranks connect, so that all ranks immediately detect a rank that leaves.
        self._presence = Presence(rank, members, secret)
        self._threads = self.mpi.Query_thread() == self.mpi.THREAD_MULTIPLE
        # Create_group waits for the other ranks, whose other threads may wait for this process. If MPI does not need
        # the lock, it is therefore not held.
        with nullcontext() if self._threads else lock:
            all_ranks = world.Get_group()
            chosen = all_ranks.Incl(ranks)
            # A tag of the group's own secret keeps concurrent creations of groups apart.
            self._comm = world.Create_group(chosen, secret[0])
            # Errors become exceptions of mpi4py. MPI's default would abort the job.
            self._comm.Set_errhandler(self.mpi.ERRORS_RETURN)
            all_ranks.Free()
            chosen.Free()
        # The highest tag is reserved for large all_to_all calls, which travel as messages.
        self._collective_tag = world.Get_attr(self.mpi.TAG_UB)
        self.highest_tag = self._collective_tag - 1
        cpus = [row[2] for row, member in zip(rows, members, strict=True) if member.machine == members[rank].machine]
        # There are enough CPUs for all ranks of this host, or mpirun has bound each of them to its own.
        self.spins = usable_cpus() >= len(cpus) or len(set(cpus)) == len(cpus)
        if not self._debug:
            self.now = self._now

    def _now(self, verb: str, tensor: object, pieces: object = None, op: object = None, root: object = -1, /) -> bool:
        """See base.Now. It skips most of the Python code. The usual path follows if MPI does not end the call soon."""
        call = None if self.closed else self._plain_call(verb, tensor, pieces, op, root)
        if call is None:
            return False
        began = time.monotonic()
        # The lock also orders the calls: MPI matches collectives by the order in which each rank begins them.
        with lock:
            # Checked with the lock held, because another thread may close the group.
            self._check_usable()
            self._calls += 1
            number, (method, *args) = self._calls, call
            request = method(*args)
        nbytes = 0 if tensor is None else tensor.nbytes  # type: ignore[attr-defined]
        record = self._recorded(verb, tensor, nbytes, op, root)
        try:
            # If ranks share CPUs, repeated tests would only delay the rank that is awaited.
            for _ in range(_QUICK_TESTS if self.spins else 1):
                # Released after each test, so that other threads can call MPI in between.
                with lock:
                    if request.Test():
                        self._count(nbytes, began)
                        if record is not None:
                            record.end(True)
                        return True
        except self.mpi.Exception as error:
            if record is not None:
                record.end(False)
            self.explain(error, verb)
        except BaseException:  # Ctrl-C
            # MPI still uses the tensors, so the call must get an owner.
            work = self._adopted(verb, nbytes, number, request, record, (tensor, pieces))
            self.give_up(work)
            work.end_record(False)
            raise
        self._wait(self._adopted(verb, nbytes, number, request, record, (tensor, pieces)))
        return True

    def _recorded(self, verb: str, tensor: Any, nbytes: int, op: Any, root: Any) -> _core.OtherCall | None:
        """Record the begin of a blocking collective of an ordinary tensor."""
        if self._recording is None:
            return None
        reduces = VERBS[verb].reduces
        subject = Subject() if tensor is None else Subject(tensor.dtype, tensor.numel(), op if reduces else None, root)
        return self._recording.begin(verb, subject, nbytes, False)

    def _adopted(
        self, verb: str, nbytes: int, number: int, request: Any, record: _core.OtherCall | None, keep: object
    ) -> FlatWork:
        """Return a work for a collective that was begun without one."""
        progress = _Requests(self, keep)
        progress.call, progress.requests = number, [request]
        work = FlatWork(self, Operands(verb), nbytes)
        work.progress = progress
        if self._recording is not None and record is not None:
            work.record_as(self._recording, record)
        # It keeps the tensors alive until MPI has finished.
        self._pending.add(work)
        return work

    def _plain_call(self, verb: str, tensor: Any, pieces: Any, op: object, root: Any) -> tuple[Any, ...] | None:
        """Return the MPI method and its arguments if all arguments are ordinary, else None."""
        comm, size = self._comm, len(self.members)
        if verb == "barrier":
            return (comm.Ibarrier,)
        if not _ordinary(tensor):
            return None
        if verb in ("all_reduce", "broadcast"):
            if verb == "broadcast":
                return (comm.Ibcast, self._span(tensor), root) if type(root) is int and 0 <= root < size else None
            if type(op) is not ReduceOp or not _as_is(tensor.dtype, op):
                return None
            return comm.Iallreduce, self.mpi.IN_PLACE, self._part(tensor), self._op(op)
        # MPI forbids overlapping buffers. The ordinary path copies one of them.
        if not _ordinary(pieces) or pieces.dtype is not tensor.dtype or _overlap(pieces, tensor):
            return None
        if verb == "all_gather" and pieces.numel() == size * tensor.numel():
            return comm.Iallgather, self._span(tensor), self._span(pieces, tensor.nbytes)
        if verb == "reduce_scatter" and pieces.numel() == size * tensor.numel() and type(op) is ReduceOp:
            if not _as_is(tensor.dtype, op):
                return None
            return comm.Ireduce_scatter_block, self._part(pieces, tensor.numel()), self._part(tensor), self._op(op)
        return None

    # --- calls of MPI ---

    def reduces(self, dtype: torch.dtype, op: ReduceOp) -> bool:
        return reduces(dtype, op)

    def begin_all_reduce(self, flat: Tensor, op: ReduceOp) -> Progress:
        into, _, then = self._reducible(flat, flat, op)
        calls = [(self._comm.Iallreduce, self.mpi.IN_PLACE, part, self._op(op)) for part in self._parts(into)]
        return self._collective(calls, into, then)

    def begin_reduce(self, flat: Tensor, root: int, op: ReduceOp) -> Progress:
        given, _, then = self._reducible(flat, flat if root == self.rank else None, op)
        at_root = (self.mpi.IN_PLACE,) if root == self.rank else ()
        after = () if root == self.rank else (None,)
        calls = [(self._comm.Ireduce, *at_root, part, *after, self._op(op), root) for part in self._parts(given)]
        return self._collective(calls, given, then)

    def begin_broadcast(self, flat: Tensor, root: int) -> Progress:
        return self._collective([(self._comm.Ibcast, self._span(flat), root)])

    def begin_all_gather(self, into: Tensor, given: Tensor) -> Progress:
        # MPI forbids overlapping buffers, also a rank's own piece in place.
        given = given.clone() if _overlap(into, given) else given
        return self._collective([(self._comm.Iallgather, self._span(given), self._span(into, given.numel()))], given)

    def begin_gather(self, into: Tensor | None, given: Tensor, root: int) -> Progress:
        gets = None if into is None else self._span(into, given.numel())
        return self._collective([(self._comm.Igather, self._span(given), gets, root)])

    def begin_scatter(self, into: Tensor, given: Tensor | None, root: int) -> Progress:
        gives = None if given is None else self._span(given, into.numel())
        return self._collective([(self._comm.Iscatter, gives, self._span(into), root)])

    def begin_reduce_scatter(self, into: Tensor, given: Tensor, op: ReduceOp) -> Progress:
        given = given.clone() if _overlap(into, given) else given
        gives, gets, then = self._reducible(given, into, op)
        assert gets is not None
        on, count = self._op(op), gets.numel()
        if gives.numel() <= _MOST:
            call = (self._comm.Ireduce_scatter_block, self._part(gives, count), self._part(gets), on)
            return self._collective([call], (gives, gets), then)
        # A count beyond MPI's limit cannot be passed: one Ireduce per rank and part replaces the call.
        calls = []
        for root, piece in enumerate(torch.split(gives, count)):
            for part, kept in zip(self._parts(piece), self._parts(gets), strict=True):
                calls.append((self._comm.Ireduce, part, kept if root == self.rank else None, on, root))
        return self._collective(calls, (gives, gets), then)

    def begin_all_to_all(self, into: Tensor, given: Tensor, gets: list[int], gives: list[int]) -> Progress:
        if max(into.numel(), given.numel()) <= _MOST:
            gets_from, gives_to = (
                [self._span(flat)[0], (sizes, [end - size for size, end in zip(sizes, accumulate(sizes), strict=True)])]
                for flat, sizes in ((into, gets), (given, gives))
            )
            byte = self.mpi.BYTE
            return self._collective([(self._comm.Ialltoallv, [*gives_to, byte], [*gets_from, byte])])
        # Counts and offsets of Ialltoallv are C ints in many MPIs, so larger calls travel as messages.
        arriving, leaving = torch.split(into, gets), torch.split(given, gives)
        arriving[self.rank].copy_(leaving[self.rank])
        calls: list[tuple[Any, ...]] = []
        for peer in range(len(self.members)):
            if peer != self.rank:
                # Receives first, so that a message finds its buffer.
                calls.append((self._comm.Irecv, self._span(arriving[peer]), peer, self._collective_tag))
                calls.append((self._comm.Isend, self._span(leaving[peer]), peer, self._collective_tag))
        return self._collective(calls)

    def begin_barrier(self) -> Progress:
        return self._collective([(self._comm.Ibarrier,)])

    def begin_send(self, given: Tensor, to: int, tag: int) -> Progress:
        self._check_tag(tag, "send")
        return self._message((self._comm.Isend, self._span(given), to, tag), to, -1)

    def begin_recv(self, into: Tensor, source: int, tag: int) -> Progress:
        self._check_tag(tag, "recv")
        peer = self.mpi.ANY_SOURCE if source < 0 else source
        return self._message((self._comm.Irecv, self._span(into), peer, tag), source, into.numel())

    def _collective(
        self, calls: list[tuple[Any, ...]], keep: object = None, then: Callable[[], object] | None = None
    ) -> Progress:
        """Begin a collective that consists of these calls. When it has ended, the waiting thread calls ``then``."""
        progress = _Requests(self, keep, then)
        with lock:
            # The number, the check and the begin form one step: all ranks must number the calls of a group alike.
            self._check_usable()
            self._calls += 1
            progress.call = self._calls
            for method, *args in calls:
                progress.requests.append(method(*args))
        return progress

    def _message(self, call: tuple[Any, ...], peer: int, nbytes: int) -> Progress:
        progress = _Requests(self)
        progress.peer, progress.nbytes = peer, nbytes
        with lock:
            self._check_usable()
            method, *args = call
            progress.requests.append(method(*args))
        return progress

    def _check_usable(self) -> None:
        if self.closed:
            raise AllranksError(f"group '{self.group_name}' has been destroyed")
        if self._lost:
            raise AllranksError(
                f"group '{self.group_name}' cannot be used any more: {self._lost}.\n"
                "  Destroy it on all its ranks, and create a new group."
            )

    def _check_tag(self, tag: int, verb: str) -> None:
        if tag > self.highest_tag:
            raise UsageError(
                f"{verb} on group '{self.group_name}': tag={tag}, but this MPI supports tags up to {self.highest_tag}"
            )

    # --- arguments of MPI ---

    def _reducible(
        self, given: Tensor, into: Tensor | None, op: ReduceOp
    ) -> tuple[Tensor, Tensor | None, Callable[[], object] | None]:
        """Return the tensors that MPI reads and writes instead, and a function that copies the result to ``into``."""
        if _as_is(given.dtype, op):
            return given, into, None
        average = len(self.members) if op is ReduceOp.AVG else 1
        if op in (ReduceOp.MIN, ReduceOp.MAX):
            gives = _keys(given, op)
        elif given.dtype in _SUMMED_IN:
            gives = given.to(_SUMMED_IN[given.dtype])
        else:
            return given, into, None if into is None else lambda: into.div_(average)
        if into is None:
            return gives, None, None
        gets = gives if into is given else gives.new_empty(into.numel())

        def bring() -> None:
            if op in (ReduceOp.MIN, ReduceOp.MAX):
                into.copy_(_numbers_of(gets, into.dtype))
            else:
                into.copy_(gets.div_(average) if average > 1 else gets)

        return gives, gets, bring

    def _op(self, op: object) -> Any:
        return self._ops[op]

    def _parts(self, flat: Tensor) -> list[list[Any]]:
        """Return address, count and type of a tensor that is reduced, in as many parts as MPI requires."""
        return [self._part(part) for part in (torch.split(flat, _MOST) if flat.numel() > _MOST else (flat,))]

    def _part(self, numbers: Tensor, count: int = -1) -> list[Any]:
        """Return address, count and type of a tensor, or of the first of several blocks of ``count`` elements each."""
        return [self._memory(numbers), numbers.numel() if count < 0 else count, self._types[numbers.dtype]]

    def _span(self, flat: Tensor, nbytes: int = -1) -> list[Any]:
        """Return address, count and type of bytes, or of the first of several blocks of ``nbytes`` each."""
        nbytes = flat.nbytes if nbytes < 0 else nbytes
        if nbytes <= _MOST:
            return [self._memory(flat), nbytes, self.mpi.BYTE]
        return [self._memory(flat), 1, _large(self.mpi, nbytes)]

    def _memory(self, flat: Tensor) -> Any:
        return self.mpi.buffer.fromaddress(flat.data_ptr(), flat.nbytes)

    # --- waiting ---

    @property
    def closed(self) -> bool:
        """Whether the group has been closed, in this process or in the parent process."""
        return self._comm is None

    def check(self, progress: _Requests, waited_s: float) -> None:
        """Raise if a wait cannot succeed. A waiting thread calls this at intervals."""
        if self.closed:
            raise AllranksError(_DESTROYED)
        # Between the polls of a wait: MPI itself does not report a lost rank.
        gone = self._gone(progress)
        if gone:
            progress.noticed = progress.noticed or time.monotonic()
            # Data that a rank sent before it left may still arrive, so the loss counts only after a grace period.
            if time.monotonic() - progress.noticed >= _GRACE_S:
                raise _Gone(gone)
        if waited_s >= self.timeout_s:
            raise GroupTimeout

    def _gone(self, progress: _Requests) -> dict[int, str]:
        """Return the lost ranks without which the call cannot end, and what happened to them."""
        assert self._presence is not None
        died, left = self._presence.gone(0.0)
        gone = dict.fromkeys(died, "died") | dict.fromkeys(left, "has left the group")
        if progress.call:
            # A rank that has begun this call before it left has done its part: MPI ends a call on a rank as soon as it
            # can.
            return {rank: fate for rank, fate in gone.items() if left.get(rank, -1) < progress.call}
        # Any rank may send the message. It is lost only if all other ranks are gone.
        if progress.peer < 0:
            return gone if len(gone) == len(self.members) - 1 else {}
        return {rank: fate for rank, fate in gone.items() if rank == progress.peer}

    def explain(self, error: BaseException, verb: str) -> NoReturn:
        """Raise allranks's error for MPI's error, or for one that ``check`` has raised."""
        here = self.here(verb)
        match error:
            case _Gone():
                fates = ", ".join(f"{self._who(rank)} {fate}" for rank, fate in error.ranks.items())
                raise PeerLostError(
                    f"{here}: {fates}.\n  Check the end of the output of {rank_list(sorted(error.ranks))}.",
                    next(iter(error.ranks)),
                ) from None
            case GroupTimeout():
                raise TimeoutError(
                    f"{here}: another rank did not call within {self.timeout_s:g} s. MPI does not report which"
                    f"{', and the group cannot be used any more' if self._lost else ''}.\n"
                    "  Set a longer timeout with init_process_group(timeout=...)."
                ) from None
            case _Short():
                raise MismatchError(
                    f"{here}: {self._who(error.source)} sent {error.nbytes} bytes, but the tensor to receive into "
                    f"holds {error.expected}."
                ) from None
            case AllranksError():
                raise type(error)(f"{here}: {error}") from None
            case self.mpi.Exception() if error.Get_error_class() == self.mpi.ERR_TRUNCATE:
                raise MismatchError(
                    f"{here}: another rank sent more bytes than the tensor of this rank holds. The message was dropped."
                ) from error
        raise AllranksError(f"{here}: MPI: {error}{UNKNOWN_CAUSE}") from error

    def leave_running(self, work: FlatWork) -> None:
        assert isinstance(work.progress, _Requests)
        # Without THREAD_MULTIPLE, the mover must not call MPI beside the program's threads.
        if self._threads and not work.progress.done():
            _mover.add(work.progress)

    def give_up(self, work: FlatWork) -> None:
        # MPI cannot cancel a collective, so the ranks are now at different calls.
        if not _cancelled(work):
            self._lost = self._lost or f"{work.verb} was abandoned before it completed"

    def ended(self, work: FlatWork) -> None:
        super().ended(work)
        if not _cancelled(work):
            self._lost = self._lost or f"{work.verb} did not complete"
            # MPI may still write to its tensors, so they must outlive the work.
            _orphans.append(work)

    def close(self) -> None:
        # The lock waits for a call that another thread is beginning.
        with lock:
            comm, self._comm = self._comm, None
            if comm is None:
                return
            unfinished = [work for work in tuple(self._pending) if not _cancelled(work)]
            # Freed memory that MPI still writes to would corrupt the process.
            _orphans.extend(unfinished)
            missed = [work.progress.call for work in unfinished if isinstance(work.progress, _Requests)]
            if self._presence is not None:
                # For the others, this rank has done its part only in the collectives before its first unfinished one.
                self._presence.leave(min((call - 1 for call in missed if call), default=self._calls))
            # Pending calls still need the communicator, so it is leaked then.
            if not unfinished and not self.mpi.Is_finalized():
                comm.Free()

    def abandon(self) -> None:
        self._comm = None
        if self._presence is not None:
            self._presence.close()


def _cancelled(work: FlatWork) -> bool:
    """Cancel a call if possible. Return whether it has ended."""
    return isinstance(work.progress, _Requests) and work.progress.cancel()


class _Gone(RuntimeError):
    """Ranks that the call needs are lost."""

    def __init__(self, ranks: dict[int, str]) -> None:
        super().__init__(ranks)
        self.ranks = ranks


class _Short(RuntimeError):
    """A message was smaller than the tensor that receives it."""

    def __init__(self, source: int, nbytes: int, expected: int) -> None:
        super().__init__(source, nbytes, expected)
        self.source, self.nbytes, self.expected = source, nbytes, expected


class _Requests(Progress):
    """The MPI requests of a call.

    Attributes:
        requests: The requests that have not ended.
        call: The number of the collective in its group. 0: a message.
        peer: For a message: the other rank, or -1.
        nbytes: For a receive: the expected number of bytes, else -1.
        noticed: When the loss of a rank that the call needs was detected.
    """

    def __init__(self, engine: MpiEngine, keep: object = None, then: Callable[[], object] | None = None) -> None:
        self.requests: list[Any] = []
        self.call = 0
        self.peer = -1
        self.nbytes = -1
        self.noticed = 0.0
        self._engine = engine
        self._keep = keep
        self._then = then
        self._status = engine.mpi.Status()
        self._error: RuntimeError | None = None
        self._waited_s = 0.0
        self._waiters = 0

    def done(self) -> bool:
        # A closed group ends every wait. `wait` then raises, because requests remain.
        return self._engine.closed or self._test()

    def attended(self) -> bool:
        """Return whether a thread waits for it."""
        return self._waiters > 0

    def wait(self, seconds: float) -> bool:
        # While a thread waits, the mover leaves the call alone: both would compete for MPI's lock.
        self._waiters += 1
        try:
            ended = poll(self.done, seconds, self._waited_s, self._engine.spins)
        finally:
            self._waiters -= 1
        if not ended or self.requests:
            self._waited_s += seconds
            self._engine.check(self, self._waited_s)
            return False
        if self._error is not None:
            raise self._error
        # MPI's lock also ensures that only one of several waiting threads brings the result back.
        with lock:
            if self._then is not None:
                self._then()
                self._then = None
        return True

    def source(self) -> int:
        return int(self._status.Get_source())

    def cancel(self) -> bool:
        """Cancel it if possible; only receives can be canceled. Return whether it has ended."""
        with lock:
            # Only a receive can be canceled in MPI.
            if self._test() or self.nbytes < 0:
                return not self.requests
            self.requests[0].Cancel()
            return poll(self._test, _CANCEL_S)

    def _test(self) -> bool:
        """Return whether all requests have ended according to MPI."""
        with lock:
            while self.requests:
                try:
                    if not self.requests[-1].Test(self._status):
                        return False
                # An error of MPI; the other requests must still end before their tensors are released
                except RuntimeError as error:
                    self._error = self._error or error
                self.requests.pop()
                if self.nbytes >= 0 and self._error is None:
                    self._error = self._wrong()
            return True

    def _wrong(self) -> RuntimeError | None:
        """Return the error of a receive that MPI has ended, or None."""
        if self._status.Is_cancelled():
            return AllranksError(_DESTROYED)
        arrived = self._status.Get_elements(self._engine.mpi.BYTE)
        return None if arrived == self.nbytes else _Short(self.source(), arrived, self.nbytes)


class _Mover:
    """A thread that progresses calls for which no thread waits: MPI makes no progress by itself."""

    def __init__(self) -> None:
        self._moving: set[_Requests] = set()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, progress: _Requests) -> None:
        self._moving.add(progress)
        if self._thread is None:
            self._thread = Daemon(target=self._run, name="allranks-mpi")
            self._thread.start()
        self._wake.set()

    def _run(self) -> None:
        while True:
            self._wake.wait()
            # Cleared before the round: a call that is added during it sets the event again.
            self._wake.clear()
            while self._moving:
                for progress in tuple(self._moving):
                    # A call with a waiting thread stays in the set, because that wait may time out.
                    if not progress.attended() and progress.done():
                        self._moving.discard(progress)
                time.sleep(_NAP_S)


_mover = _Mover()


@functools.cache
def _large(mpi: Any, nbytes: int) -> Any:
    """Return an MPI type of this number of bytes: chunks and the rest."""
    chunks, rest = divmod(nbytes, _MOST)
    chunk = mpi.BYTE.Create_contiguous(_MOST)
    whole = mpi.Datatype.Create_struct([chunks, rest], [0, chunks * _MOST], [chunk, mpi.BYTE]).Commit()
    chunk.Free()
    return whole


@functools.cache
def _as_is(dtype: torch.dtype, op: ReduceOp) -> bool:
    """Return whether MPI's op on the dtype is equivalent to allranks's op."""
    if op is ReduceOp.AVG or dtype not in _TYPES or not reduces(dtype, op):
        return False
    if op in (ReduceOp.MIN, ReduceOp.MAX):
        return not dtype.is_floating_point
    return op not in (ReduceOp.SUM, ReduceOp.PRODUCT) or dtype not in _SUMMED_IN


def _ordinary(tensor: Any) -> bool:
    """Return whether the argument is a plain CPU tensor whose memory MPI can use directly."""
    return (
        type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and tensor.numel() <= _MOST
        and not (tensor.is_neg() or tensor.is_conj())
    )


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Return whether contiguous tensors share memory, for example a rank's own part of the whole. MPI forbids it."""
    return a.data_ptr() < b.data_ptr() + b.nbytes and b.data_ptr() < a.data_ptr() + a.nbytes


def _keys(numbers: Tensor, op: ReduceOp) -> Tensor:
    """Return integers in the order of the floating-point numbers, NaN beyond all: the bits, inverted if negative."""
    whole = _WHOLE[numbers.dtype]
    bits, limits = numbers.view(whole), torch.iinfo(whole)
    # NaN is lost by MPI's MIN and MAX, so it becomes the extreme key, which wins.
    return _turned(bits).masked_fill_(numbers.isnan(), limits.max if op is ReduceOp.MAX else limits.min)


def _numbers_of(keys: Tensor, dtype: torch.dtype) -> Tensor:
    return _turned(keys).view(dtype)


def _turned(bits: Tensor) -> Tensor:
    """Invert all bits except the sign if the sign is set. The function is its own inverse."""
    limits = torch.iinfo(bits.dtype)
    return bits ^ ((bits >> (limits.bits - 1)) & limits.max)
