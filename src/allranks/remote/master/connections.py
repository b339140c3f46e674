"""The connections of the master with its workers. Commands are sent in order, and workers answer only if requested.

All commands of a master have one order. For each worker the order is the same. The master waits for an answer only if
it needs a value, or a shape that depends on one.

Threads share the connections. `Connections.lock` keeps the commands of one operation together. No thread holds it while
it waits for an answer, except to replace workers and to make snapshots. A slow worker therefore does not block threads
that use other workers. If several threads wait for one worker, one of them receives for all of them.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import itertools
import select
import socket
import struct
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar

import msgspec
import torch

from allranks import _core
from allranks._base.errors import TimeoutError, UsageError, WorkerLost
from allranks._base.forks import forks, refusal
from allranks._trace import memory
from allranks.remote.master.long_waits import LongWaits
from allranks.remote.protocol import flags, wire
from allranks.remote.protocol.faults import error_of
from allranks.remote.protocol.wire import Answer, Command
from allranks.remote.torch_device.call_site import line_of
from allranks.remote.torch_device.handle import DeviceTarget

if TYPE_CHECKING:
    from allranks.remote.bootstrap.endpoint import WorkerConnection
    from allranks.remote.bootstrap.workers import Workers

__all__ = ["CPU", "Connections", "LostWorkerCalls", "InheritedCalls", "exclusive", "has_ended"]

_OMITTABLE_COMMANDS = (
    "keep", "drop", "forget", "forget_generator", "unmark", "copied", "group", "ungroup", "kind",
)  # fmt: skip
"""Commands that a captured step can omit."""

_CLOSE_WAIT_S = 0.2  # seconds to wait, when a process has ended, until its connection is closed
_RECEIVE_S = 0.5  # seconds of one receive, after which a wait checks its time limit
_LOSS_WAIT_S = 2.0  # seconds to wait, after a worker's fault that a loss has caused, until the loss is detected
_LOSS_ERRORS = ("PeerLostError", "AbortedError")  # kinds of faults that a worker reports if a peer of it has died
_CHUNK = 1 << 18  # bytes of one receive
CPU = "Before the fork, fetch the tensors that the child needs with .cpu()."
SHUT_DOWN = "the workers have been shut down.\n  Call shutdown() after the last use of their tensors."

_decode = msgspec.msgpack.Decoder(Answer).decode


# `_core.dispatch` looks up calls only in exact dicts. It leaves a call on these subclasses to `run`, which calls `get`.
class InheritedCalls(dict[Any, Any]):
    """Replaces the calls of the parent's workers in a forked child. Each look-up raises."""

    def get(self, key: Any, default: Any = None) -> Any:
        raise refusal("a tensor on a worker", CPU)


class LostWorkerCalls(dict[Any, Any]):
    """Replaces the calls of a lost worker. Every operation looks one up, and the look-up raises."""

    def __init__(self, why: str, rank: int, error: Callable[[int, str], WorkerLost] | None = None) -> None:
        self.why = why
        self.rank = rank
        self._error = error

    def get(self, key: Any, default: Any = None) -> Any:
        raise WorkerLost(self.why, self.rank) if self._error is None else self._error(self.rank, self.why)


class Connections:
    """The connections with all workers, and the state of the master that all commands depend on.

    Attributes:
        workers: Starts, watches and terminates the workers.
        timeout_s: Time limit for an answer, in seconds.
        outbox: Queues frames.
        by_rank: The connection with each worker, by rank.
        indices: Indices of the workers in the outbox, by rank.
        lock: Held while the commands of one operation are queued (`exclusive`).
        recorder: The recorder of the step that is being captured, or None.
        lost: The reasons why workers are lost, by rank.
        closed: Whether the workers have been shut down.
        flags: torch's flags on the workers, which follow the master's.
        state: The number of this combination of flags.
        seed: The random seed of workers that are added later.
        on_lost: Called with a lost worker's rank and the reason, by any thread.
        recover: Called if a lost worker is needed. It replaces the worker and returns the exception to raise. None:
            programs replace workers themselves.
        unrecovered: Workers whose replacement has started and not finished, with the reasons of their loss.
    """

    def __init__(self, workers: Workers, timeout_s: float, on_lost: Callable[[int, str], None]) -> None:
        self.workers = workers
        self.timeout_s = timeout_s
        self.on_lost = on_lost
        self.outbox = _core.Outbox()
        self.by_rank: dict[int, WorkerConnection] = {}
        self.indices: dict[int, int] = {}
        # Lock order: `lock`, `_receive_lock`, `_loss_lock`. `lock` is reentrant, because methods that hold it call each
        # other.
        self.lock = threading.RLock()
        self.recorder: Any = None
        self.lost: dict[int, str] = {}
        self.closed = False
        self.flags = flags.read()
        self.state = 0
        self.seed = torch.initial_seed()
        self._per_thread = (
            threading.local()
        )  # per thread: the last fault, and whether the thread must not replace workers
        self._shown_warnings: dict[str, dict[Any, Any]] = {}  # the warnings that have been shown, by file
        self._states = {self.flags: 0}
        self.recover: Callable[[], WorkerLost | None] | None = None
        self.unrecovered: dict[int, str] = {}
        self._forks = forks()
        self._loss_lock = threading.RLock()
        self._numbers = itertools.count(1)
        self._answers: dict[tuple[int, int], Answer] = {}
        self._received: dict[int, bytearray] = {}
        self._receiving: set[int] = set()  # the workers from which a thread is receiving now
        # Protects _answers, _received and _receiving; released while a thread waits for a worker.
        self._receive_lock = threading.RLock()
        self._arrivals = threading.Condition(self._receive_lock)
        self._waiting_threads = 0  # number of threads that wait for data that another thread receives
        self._raised: set[tuple[int, int]] = set()  # the faults for which an exception has been raised
        self._waits = LongWaits()
        self._interrupted: dict[int, float] = {}  # time at which Ctrl-C interrupted a wait for a worker, by rank
        _core.while_waiting(self._receive_while_full)

    def admit(self, worker: WorkerConnection) -> None:
        """Add a worker, or replace a lost one."""
        # With a Python timeout the socket would be non-blocking, and SO_RCVTIMEO would have no effect.
        worker.socket.settimeout(None)
        _set_receive_timeout(worker, _RECEIVE_S)
        # From here on `mark_lost` ignores reports about the previous process, because it compares the connection.
        self.by_rank[worker.rank] = worker
        self.lost.pop(worker.rank, None)
        self._interrupted.pop(worker.rank, None)
        # The bytes from the previous process may end in the middle of an answer.
        self._received[worker.rank] = bytearray()
        if worker.rank in self.indices:
            # Keeps the index, because targets of the outbox refer to it. Frames for the previous process are dropped.
            self.outbox.replace(self.indices[worker.rank], worker.socket.fileno())
        else:
            self.indices[worker.rank] = self.outbox.add(worker.socket.fileno())

    @property
    def ranks(self) -> list[int]:
        """The ranks of the workers that are not lost."""
        return [each for each in self.by_rank if each not in self.lost]

    def read_flags(self) -> tuple[Any, ...]:
        """Read torch's flags again, and return those that have changed."""
        now, before = flags.read(), set(self.flags)
        changed = tuple([each for each in now if each not in before])
        if changed:
            # A known combination keeps its number, so that calls that were learned under it are not learned again.
            self.flags, self.state = now, self._states.setdefault(now, len(self._states))
        return changed

    # Commands.

    def next_number(self) -> int:
        """Return a new number for an answer."""
        return next(self._numbers)

    def put(self, place: DeviceTarget, message: Any, data: Any = None, bulk: bool = False) -> None:
        """Queue a message. `bulk`: it does not wait for space, see `Outbox::put` in core/remote/outbox.h."""
        self.outbox.put(place.target, wire.pack(message), data, bulk)

    def command(self, place: DeviceTarget, name: str, /, **arguments: Any) -> None:
        """Queue a command that has no answer."""
        if name not in _OMITTABLE_COMMANDS:
            self.refuse_recording(f"the step sends workers the command {name!r}")
        self.put(place, Command(name, 0, arguments))

    def request(self, place: DeviceTarget, name: str, /, **arguments: Any) -> Any:
        """Queue a command for the first worker of a place, and wait for its answer."""
        if name not in _OMITTABLE_COMMANDS:
            self.refuse_recording(f"the step waits for a worker's answer to {name!r}")
        self.check(place)
        number, rank = self.next_number(), place.ranks[0]
        self.outbox.put(place.master.devices.worker(rank).target, wire.pack(Command(name, number, arguments)))
        return self.wait(number, rank, name)

    # Answers.

    def wait(self, number: int, rank: int, what: str, timeout_s: float | None = None) -> Any:
        """Wait for an answer.

        Raises:
            RemoteError: The operation, or a previous one that it depends on, has failed on the worker.
            WorkerLost: The worker is lost.
            TimeoutError: The worker does not answer in time.
        """
        self.check_process()
        # The outbox holds frames for up to 100 us to combine them, and the worker must have them before it can answer.
        self.outbox.flush()
        try:
            answer = self._wait(number, rank, what, timeout_s)
        except WorkerLost as lost:
            # `_receive_lock` is no longer held: `loss_error` may replace workers, which waits for answers.
            raise self.loss_error(lost.rank, str(lost)) from None
        if answer.warned or answer.printed:
            self._show_output(rank, answer)
        if answer.fault is not None:
            # The result "now" means that the call itself has failed, and not a previous one that computed an operand.
            self._per_thread.poisoned = None if answer.result == "now" else answer.fault
            # The next synchronization reports this fault again, and must not raise it a second time.
            self._raised.add((answer.fault.rank, answer.fault.serial))
            raise self._error_or_loss(
                answer.fault, error_of(answer.fault, line_of(answer.fault.line), answer.result == "now")
            )
        return answer.result

    def _show_output(self, rank: int, answer: Answer) -> None:
        """Print the output of a user function, and issue the worker's warnings at their call sites.

        Raises:
            Warning: The program's filters turn such a warning into an error.
        """
        for text, stream in zip(answer.printed, (sys.stdout, sys.stderr), strict=False):
            stream.write(text)
        for each in answer.warned:
            file, _, line = line_of(each.line).rpartition(":")
            warnings.warn_explicit(
                f"worker {rank}: {each.text}", _category(each), file or "worker", int(line or 0),
                registry=self._shown_warnings.setdefault(file, {}),
            )  # fmt: skip

    @property
    def poisoned(self) -> wire.Fault | None:
        """The fault of this thread's last failed answer if it came from an operand, or None if it did not."""
        found: wire.Fault | None = self._per_thread.poisoned
        return found

    def _wait(self, number: int, rank: int, what: str, timeout_s: float | None) -> Answer:
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + timeout_s
        # Bound to this connection: if the worker is replaced during the wait, `_receive` raises instead of timing out.
        worker, answer, recorded = self.by_rank[rank], None, None
        if memory.records_in_file():
            recorded = self._waits.begin(rank, len(self.by_rank) + 1)
        try:
            with self._receive_lock:
                # Another thread, or `_receive_while_full`, may have received the answer already.
                self._decode_received(rank)
                while (answer := self._answers.pop((rank, number), None)) is None:
                    if self._receive(worker, deadline - time.monotonic()):
                        self._decode_received(rank)
                    elif time.monotonic() >= deadline:
                        raise self.unanswered(rank, timeout_s, what)
                    else:
                        # The wait has lasted for `_RECEIVE_S`. Shorter waits are not recorded, so they cost nothing.
                        recorded = recorded or self._waits.begin(rank, len(self.by_rank) + 1)
                        self._warn_of_interrupted(rank)
        except KeyboardInterrupt:
            # The first interrupt counts: the warning states for how long the worker has been busy since.
            self._interrupted.setdefault(rank, time.monotonic())
            raise
        finally:
            if recorded is not None:
                recorded.end(answer is not None)
        self._interrupted.pop(rank, None)
        return answer

    def take_answer(self, number: int, rank: int) -> Answer | None:
        """Return an answer if it has arrived. No thread may still be waiting for it."""
        with self._receive_lock:
            return self._answers.pop((rank, number), None)

    def wait_for_all(self, number: int, place: DeviceTarget, what: str) -> Any:
        """Wait for the same answer from all workers of a group.

        Raises:
            UsageError: The answers differ, so no handle can represent all results.
        """
        found: list[tuple[int, Any]] = []
        errors: list[Exception] = []
        for rank in place.ranks:
            try:
                # All workers are awaited, also after an error: an answer without a reader would stay in `_answers`.
                found.append((rank, self.wait(number, rank, what)))
            except Exception as error:  # noqa: BLE001 - the first error is raised when all have answered
                errors.append(error)
        if errors:
            raise errors[0]
        for rank, answer in found:
            if answer != found[0][1]:
                raise UsageError(
                    f"{what}: the workers of {place} differ: worker {found[0][0]} has {found[0][1][0]}, worker {rank}"
                    f" has {answer[0]}.\n  Request a value that determines a shape, or that the master reads, from each"
                    f" worker: x.shard({rank})."
                )
        return found[0][1]

    def forget_raised(self, fault: wire.Fault) -> None:
        """Unmark a fault whose exception was caught internally, so that it is reported to the program later."""
        self._raised.discard((fault.rank, fault.serial))

    def synchronize(self, place: DeviceTarget) -> None:
        """Wait until some workers have executed all queued commands.

        Raises:
            RemoteError: An operation has failed for which no exception has been raised yet.
        """
        number = self.next_number()
        self.outbox.echo(place.target, number)
        bare_echo = wire.ECHOED.pack(0, number)
        answers: list[Any] = []
        # In reverse order: when the last worker has answered, most others have too, and the master has slept until
        # then.
        for rank in reversed(place.ranks):
            # `_has_echoed` records no wait, so it is skipped if a file must contain all waits.
            if memory.records_in_file() or not self._has_echoed(rank, bare_echo):
                answers += self.wait(number, rank, "synchronize") or []
        faults = [msgspec.convert(each, wire.Fault) for each in answers]
        new = [each for each in faults if (each.rank, each.serial) not in self._raised]
        # The worker has reported these faults now, and no later synchronization reports them again.
        self._raised -= {(each.rank, each.serial) for each in faults}
        if new:
            raise self._error_or_loss(new[0], error_of(new[0], line_of(new[0].line), False, len(new) - 1))

    def _has_echoed(self, rank: int, bare_echo: bytes) -> bool:
        """Receive once, and return whether the bytes are a bare echo, which most synchronizations receive."""
        with self._receive_lock:
            received = self._received[rank]
            # With earlier bytes, or another receiving thread, only `wait` can assign the answers to their requests.
            if received or rank in self._receiving:
                return False
            try:
                self._receive(self.by_rank[rank], _RECEIVE_S)
            except WorkerLost:
                return False  # `wait` raises it next
            if found := received == bare_echo:
                received.clear()
            return found

    def _receive(self, worker: WorkerConnection, seconds: float) -> bool:
        """Wait for bytes from a worker, for `_RECEIVE_S` at most. Return whether any thread has received some.

        The caller must hold `_receive_lock`, which is released during the wait.

        Raises:
            WorkerLost: The worker is lost.
        """
        rank = worker.rank
        if self.by_rank[rank] is not worker:  # another thread has replaced it
            raise WorkerLost(
                f"worker {rank} ({worker.host}, pid {worker.pid}) is lost: it has been replaced.\n"
                "  Create the tensors on it again.",
                rank,
            )
        if rank in self.lost:
            raise WorkerLost(self.lost[rank], rank)
        if rank in self._receiving:
            # A second reader would take bytes from the middle of an answer, so this thread waits for the first one.
            self._waiting_threads += 1
            try:
                return self._arrivals.wait(min(max(seconds, 0.0), _RECEIVE_S))
            finally:
                self._waiting_threads -= 1
        received = self._received[rank]
        # This costs a system call, so it is done only for the last receive before a deadline.
        if seconds < _RECEIVE_S:
            _set_receive_timeout(worker, max(seconds, 1e-3))  # an SO_RCVTIMEO of 0 is no limit (socket(7))
        # Added before the lock is released, so that no second thread receives from this worker.
        self._receiving.add(rank)
        # Other threads can take answers, and receive from other workers, during the wait.
        self._receive_lock.release()
        try:
            part = worker.socket.recv(_CHUNK)
        except BlockingIOError:  # EAGAIN: the receive timeout has passed
            return False
        except OSError:
            part = b""  # a connection that was reset has ended, too
        finally:
            self._receive_lock.acquire()
            self._receiving.discard(rank)
            # A condition around each receive cost 17 us per synchronization of two workers (docs/decisions/131).
            if self._waiting_threads:
                self._arrivals.notify_all()
            if seconds < _RECEIVE_S:
                with contextlib.suppress(OSError):  # another thread has closed it
                    _set_receive_timeout(worker, _RECEIVE_S)
        # No bytes: the connection has ended. This is not a loss if the worker has been replaced since.
        if part:
            received += part
        elif self.by_rank[rank] is worker:
            self.mark_lost(rank)
        return bool(part)

    def unanswered(self, rank: int, timeout_s: float, what: str) -> TimeoutError:
        """Return the exception for a worker that has not answered in time."""
        worker = self.by_rank[rank]
        return TimeoutError(
            f"{what}: worker {rank} ({worker.host}, pid {worker.pid}) has not answered for {timeout_s:g} s"
            f"{_process_state(worker)}.\n  To wait longer, pass init_master_worker(timeout=...)."
        )

    def _warn_of_interrupted(self, rank: int) -> None:
        """Warn once if a worker is still executing a command for which Ctrl-C interrupted the wait."""
        since = self._interrupted.pop(rank, None)
        if since is None:
            return
        worker = self.by_rank[rank]
        warnings.warn(
            f"worker {rank} ({worker.host}, pid {worker.pid}) is still executing commands queued before Ctrl-C,"
            f" {time.monotonic() - since:.1f} s ago{_process_state(worker)}. This call waits for it.\n"
            f"  To kill it and lose its tensors, call mw.respawn({rank}, force=True).",
            RuntimeWarning,
            stacklevel=2,
        )

    def _decode_received(self, rank: int) -> None:
        received = self._received[rank]
        while len(received) >= 8:
            length, number = wire.ECHOED.unpack_from(received)
            # A bare echo has the length 0, and 4 bytes of its number follow.
            if len(received) < 4 + (length or 4):
                return
            answer = _decode(bytes(received[4 : 4 + length])) if length else Answer(number)
            self._answers[rank, answer.number] = answer
            del received[: 4 + (length or 4)]

    def _receive_while_full(self, seconds: float) -> None:
        """Receive answers while a worker's queue is full, because the worker may wait until they are taken.

        Raises:
            TimeoutError: The queue stays full for too long.
        """
        # The outbox calls this every 0.1 s while a call waits for space (core/python/bind_outbox.cc).
        full = [rank for rank, index in self.indices.items() if self.outbox.pending(index) and rank not in self.lost]
        for rank in full:
            with self._receive_lock, contextlib.suppress(BlockingIOError, OSError):
                # A thread that is receiving from this worker empties the socket itself.
                while rank not in self._receiving:
                    part = self.by_rank[rank].socket.recv(_CHUNK, socket.MSG_DONTWAIT)
                    if not part:
                        break
                    self._received[rank] += part
        if seconds > self.timeout_s:
            stuck = ", ".join(
                f"worker {rank} ({self.by_rank[rank].host}, pid {self.by_rank[rank].pid})" for rank in full
            )
            raise TimeoutError(
                f"{stuck} did not read the queued commands for {seconds:.0f} s.\n"
                "  To wait longer, pass init_master_worker(timeout=...)."
            )

    # Lost workers, other processes and captured steps.

    def mark_lost(self, rank: int, reason: str | None = None) -> None:
        """Mark a worker as lost, so that its handles, and its groups', raise `WorkerLost`. Any thread may call this."""
        worker = self.by_rank[rank]
        # `how_ended` may wait for up to 1 s, so `_loss_lock` is not held yet.
        if reason is None:
            reason = self.workers.how_ended(rank)
        with self._loss_lock:
            # Several threads may detect one loss, and the worker may have been replaced since.
            if rank in self.lost or self.by_rank[rank] is not worker or self.closed:
                return
            self.lost[rank] = (
                f"worker {rank} ({worker.host}, pid {worker.pid}) is lost{': ' + reason if reason else ''}.\n"
                f"  Call mw.respawn({rank}) to replace it; the tensors on it are lost."
            )
            self.outbox.lose(self.indices[rank])
            self.on_lost(rank, self.lost[rank])

    def loss_error(self, rank: int, why: str) -> WorkerLost:
        """Return the exception for a lost worker that is needed. Replace it first, if the policy requires that."""
        # A replacement itself uses workers. A further loss in it must raise, and not start another replacement within
        # it.
        if self.recover is not None and not self._in_recovery:
            with self.lock, self.without_recovery():
                # `lock` is held throughout: commands of other threads would see a half-restored state
                # (docs/decisions/131).
                found = self.recover()
            if found is not None:
                return found
        return WorkerLost(why, rank)

    @contextlib.contextmanager
    def without_recovery(self) -> Iterator[None]:
        """Disable the replacement of lost workers in this thread, for calls that are not a step of the program."""
        before, self._per_thread.recovering = self._in_recovery, True
        try:
            yield
        finally:
            self._per_thread.recovering = before

    @property
    def _in_recovery(self) -> bool:
        return getattr(self._per_thread, "recovering", False)

    def _error_or_loss(self, fault: wire.Fault, error: Exception) -> Exception:
        """Return the exception for a fault. If lost workers are replaced, this is the loss that caused the fault."""
        # If a worker dies while a link is created with it, the other worker may only detect that the exchange has
        # failed.
        of_loss = fault.kind in _LOSS_ERRORS or fault.op == wire.LINKING
        if self.recover is None or self._in_recovery or not of_loss:
            return error
        until = time.monotonic() + _LOSS_WAIT_S
        while not self.lost and time.monotonic() < until:
            time.sleep(_RECEIVE_S / 100)  # 5 ms
        if not self.lost:
            return error
        rank = min(self.lost)
        return self.loss_error(rank, self.lost[rank])

    def check(self, place: DeviceTarget) -> None:
        """Check that all workers of a place are available.

        Raises:
            WorkerLost: A worker of the place is lost.
        """
        self.check_open()
        if isinstance(place.calls, LostWorkerCalls):
            raise self.loss_error(place.calls.rank, place.calls.why)
        for rank in place.ranks:
            self.check_worker(rank)

    def check_worker(self, rank: int) -> None:
        """Check that a worker is available.

        Raises:
            WorkerLost: It is lost.
        """
        # The outbox may have failed to send before another thread has detected the end of the connection.
        if rank not in self.lost and self.outbox.failure(self.indices[rank]):
            self.mark_lost(rank)
        if rank in self.lost:
            raise self.loss_error(rank, self.lost[rank])
        # The new worker is running, but its kept tensors have not been restored yet.
        if rank in self.unrecovered and not self._in_recovery:
            raise self.loss_error(rank, self.unrecovered[rank])

    def check_process(self) -> None:
        """Check that this is the master's process.

        Raises:
            NotInitializedError: This is a forked child of the master's process.
        """
        if self._forks != forks():
            raise refusal("the master of the workers", CPU)

    def check_open(self) -> None:
        """Check that the workers have not been shut down.

        Raises:
            WorkerLost: The workers have been shut down.
        """
        self.check_process()
        if self.closed:
            raise WorkerLost(SHUT_DOWN, 0)

    def refuse_recording(self, why: str, always: bool = True) -> None:
        """Report to a recorder an action that a captured step cannot contain. `always`: not even in its first calls."""
        if self.recorder is not None:
            self.recorder.refuse(why, always)

    def close(self) -> None:
        """Close the outbox. The workers terminate with their connections, which `workers` closes."""
        # First, because `mark_lost` then ignores the connections that end during the shutdown.
        self.closed = True
        _core.while_waiting(None)  # the core holds one function for the whole process
        self.outbox.close()


class _HasConnections(Protocol):
    @property
    def connections(self) -> Connections: ...


S = TypeVar("S", bound=_HasConnections)
P = ParamSpec("P")
R = TypeVar("R")


def exclusive(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Run a method with several commands in one thread at a time. Only snapshots may wait for an answer in it."""

    @functools.wraps(method)
    def called(self: S, *args: P.args, **kwargs: P.kwargs) -> R:
        connections = self.connections
        # Before the lock: in a forked child, a thread that does not exist there may hold it.
        connections.check_process()
        with connections.lock:
            return method(self, *args, **kwargs)

    return called  # type: ignore[return-value]


def _category(warned: wire.Warned) -> type[Warning]:
    """Return the class of a worker's warning if this program has imported it, else its builtin base class."""
    module, _, name = warned.kind.rpartition(".")
    for found in (getattr(sys.modules.get(module), name, None), getattr(builtins, warned.builtin, None)):
        if isinstance(found, type) and issubclass(found, Warning):
            return found
    return UserWarning


def has_ended(sock: socket.socket) -> bool:
    """Return whether the other end of a connection is closed. Wait up to 0.2 s for that."""
    poll = select.poll()
    poll.register(sock, select.POLLRDHUP)  # reports the end even if answers are still unread
    return bool(poll.poll(_CLOSE_WAIT_S * 1e3))


def _set_receive_timeout(worker: WorkerConnection, seconds: float) -> None:
    """Set the time limit of a receive: the kernel's, because Python's costs a poll before each receive."""
    worker.socket.setsockopt(
        socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", *divmod(int(seconds * 1e6), 10**6))
    )


def _process_state(worker: WorkerConnection) -> str:
    """Return the state of a local worker that does not answer, as the kernel reports it."""
    if worker.host != socket.gethostname():
        return ""
    try:
        # The field before the state is the command name, which may itself contain spaces and parentheses (proc(5)).
        state = Path(f"/proc/{worker.pid}/stat").read_text(errors="surrogateescape").rpartition(")")[2].split()[0]
    except OSError:
        return ""
    return {"T": "; it is stopped (SIGSTOP)", "t": "; a debugger has stopped it", "R": "; it is running"}.get(state, "")
