"""The connections of the master with its workers: commands go out in order, and answers come back where one is needed.

There is one order of everything that a master does. For each worker the order is the same. An answer is waited for only
where a value, or a shape that depends on one, is needed here.

Threads share the connections. `Connections.lock` keeps commands together that belong together. No thread holds it while
it waits for an answer, except to replace workers and to make snapshots. So a slow worker does not stop threads that use
other workers. Of the threads that wait for one worker, one receives, and what it receives is for all of them.
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

__all__ = ["CPU", "Connections", "WorkerGone", "Inherited", "exclusive", "has_ended"]

_WITHOUT_EFFECT = (
    "keep", "drop", "forget", "forget_generator", "unmark", "copied", "group", "ungroup", "kind",
)  # fmt: skip
"""Commands that a captured step can do without."""

_END_S = 0.2  # between the end of a process and that of its connection
_LOOK_S = 0.5
_CAUSE_S = 2.0  # between the fault of a worker that has met a loss and word of the loss
_OF_LOSSES = ("PeerLostError", "AbortedError")
_CHUNK = 1 << 18
CPU = "What the child needs is fetched before it is forked, with .cpu()"

_decode = msgspec.msgpack.Decoder(Answer).decode


class Inherited(dict[Any, Any]):
    """Takes the place of the calls of the parent's workers, in a forked child."""

    def get(self, key: Any, default: Any = None) -> Any:
        raise refusal("a tensor on a worker", CPU)


class WorkerGone(dict[Any, Any]):
    """Takes the place of the calls of a lost worker. Every operation looks one up, and raises."""

    def __init__(self, why: str, rank: int, error: Callable[[int, str], WorkerLost] | None = None) -> None:
        self.why = why
        self.rank = rank
        self._error = error

    def get(self, key: Any, default: Any = None) -> Any:
        raise WorkerLost(self.why, self.rank) if self._error is None else self._error(self.rank, self.why)


class Connections:
    """The connections with all workers, and the state of the master that all commands depend on.

    Attributes:
        workers: starts, watches and ends them.
        timeout_s: how long to wait for an answer.
        outbox: queues frames.
        by_rank: the connection with each worker, by rank.
        indices: of workers in the outbox, by rank.
        lock: held while commands are queued that belong together (`exclusive`).
        recorder: of the step that is captured at this moment; None otherwise.
        lost: why workers are gone, by rank.
        closed: that the workers have been shut down.
        flags: torch's flags on the workers, which follow the master's.
        state: the number of these flags.
        seed: of workers to come.
        on_lost: called with a lost worker's rank and the reason, by any thread.
        recover: called where a worker is needed that is gone: replaces it, and returns what is to be raised; None where
            programs do that.
        unrecovered: workers whose replacement was begun, and has not come to its end; why they were lost.
    """

    def __init__(self, workers: Workers, timeout_s: float, on_lost: Callable[[int, str], None]) -> None:
        self.workers = workers
        self.timeout_s = timeout_s
        self.on_lost = on_lost
        self.outbox = _core.Outbox()
        self.by_rank: dict[int, WorkerConnection] = {}
        self.indices: dict[int, int] = {}
        self.lock = threading.RLock()
        self.recorder: Any = None
        self.lost: dict[int, str] = {}
        self.closed = False
        self.flags = flags.read()
        self.state = 0
        self.seed = torch.initial_seed()
        self._own = threading.local()  # of each thread: the last fault, and whether it wants no worker to be replaced
        self._shown: dict[str, dict[Any, Any]] = {}  # which warnings have been shown, by file
        self._states = {self.flags: 0}
        self.recover: Callable[[], WorkerLost | None] | None = None
        self.unrecovered: dict[int, str] = {}
        self._forks = forks()
        self._losing = threading.RLock()
        self._numbers = itertools.count(1)
        self._answers: dict[tuple[int, int], Answer] = {}
        self._received: dict[int, bytearray] = {}
        self._receiving: set[int] = set()  # the workers from which a thread receives at this moment
        self._guard = threading.RLock()  # of these three; not held while a thread waits for a worker
        self._arrivals = threading.Condition(self._guard)
        self._others = 0  # threads that wait for what another one receives
        self._raised: set[tuple[int, int]] = set()  # the faults of which an exception has been raised
        self._waits = LongWaits()
        self._interrupted: dict[int, float] = {}  # when Ctrl-C has ended a wait for a worker, by rank
        _core.while_waiting(self._receive_while_full)

    def admit(self, worker: WorkerConnection) -> None:
        """Adds a worker, or replaces one that is lost."""
        worker.socket.settimeout(None)
        _set_receive_timeout(worker, _LOOK_S)
        self.by_rank[worker.rank] = worker
        self.lost.pop(worker.rank, None)
        self._interrupted.pop(worker.rank, None)
        self._received[worker.rank] = bytearray()
        if worker.rank in self.indices:
            self.outbox.replace(self.indices[worker.rank], worker.socket.fileno())
        else:
            self.indices[worker.rank] = self.outbox.add(worker.socket.fileno())

    @property
    def ranks(self) -> list[int]:
        """The workers that are there."""
        return [each for each in self.by_rank if each not in self.lost]

    def read_flags(self) -> tuple[Any, ...]:
        """Reads torch's flags again, and returns those that have changed."""
        now, before = flags.read(), set(self.flags)
        changed = tuple([each for each in now if each not in before])
        if changed:
            self.flags, self.state = now, self._states.setdefault(now, len(self._states))
        return changed

    # Commands.

    def next_number(self) -> int:
        """A new number, for an answer."""
        return next(self._numbers)

    def put(self, place: DeviceTarget, message: Any, data: Any = None, bulk: bool = False) -> None:
        """Queues a message. `bulk`: it waits for no room, see `Outbox::put` in core/remote/outbox.h."""
        self.outbox.put(place.target, wire.pack(message), data, bulk)

    def command(self, place: DeviceTarget, name: str, /, **arguments: Any) -> None:
        """Queues a command that is not answered."""
        if name not in _WITHOUT_EFFECT:
            self.refuse_recording(f"workers are given the command {name!r}")
        self.put(place, Command(name, 0, arguments))

    def request(self, place: DeviceTarget, name: str, /, **arguments: Any) -> Any:
        """Queues a command and waits for the answer of the first worker."""
        if name not in _WITHOUT_EFFECT:
            self.refuse_recording(f"an answer of a worker's is waited for, {name!r}")
        self.check(place)
        number, rank = self.next_number(), place.ranks[0]
        self.outbox.put(place.master.devices.worker(rank).target, wire.pack(Command(name, number, arguments)))
        return self.wait(number, rank, name)

    # Answers.

    def wait(self, number: int, rank: int, what: str, timeout_s: float | None = None) -> Any:
        """Waits for an answer.

        Raises:
            RemoteError: the operation, or one before that it depends on, has failed on the worker.
            WorkerLost: the worker is gone.
            TimeoutError: it does not answer.
        """
        self.check_process()
        self.outbox.flush()
        try:
            answer = self._wait(number, rank, what, timeout_s)
        except WorkerLost as lost:
            raise self.gone(lost.rank, str(lost)) from None
        if answer.warned or answer.printed:
            self._pass_on(rank, answer)
        if answer.fault is not None:
            self._own.poisoned = None if answer.result == "now" else answer.fault
            self._raised.add((answer.fault.rank, answer.fault.serial))
            raise self._cause(answer.fault, error_of(answer.fault, line_of(answer.fault.line), answer.result == "now"))
        return answer.result

    def _pass_on(self, rank: int, answer: Answer) -> None:
        """Prints what a function has printed, and gives the program the worker's warnings, at the line they are of.

        Raises:
            Warning: the program's filters make errors of such warnings.
        """
        for text, stream in zip(answer.printed, (sys.stdout, sys.stderr), strict=False):
            stream.write(text)
        for each in answer.warned:
            file, _, line = line_of(each.line).rpartition(":")
            warnings.warn_explicit(
                f"worker {rank}: {each.text}", _category(each), file or "worker", int(line or 0),
                registry=self._shown.setdefault(file, {}),
            )  # fmt: skip

    @property
    def poisoned(self) -> wire.Fault | None:
        """The fault of this thread's last failed answer, if it was about an operand; None: about the operation."""
        found: wire.Fault | None = self._own.poisoned
        return found

    def _wait(self, number: int, rank: int, what: str, timeout_s: float | None) -> Answer:
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + timeout_s
        worker, answer, recorded = self.by_rank[rank], None, None
        if memory.records_in_file():
            recorded = self._waits.begin(rank, len(self.by_rank) + 1)
        try:
            with self._guard:
                self._decode_received(rank)
                while (answer := self._answers.pop((rank, number), None)) is None:
                    if self._receive(worker, deadline - time.monotonic()):
                        self._decode_received(rank)
                    elif time.monotonic() >= deadline:
                        raise self.unanswered(rank, timeout_s, what)
                    else:
                        recorded = recorded or self._waits.begin(rank, len(self.by_rank) + 1)
                        self._warn_of_interrupted(rank)
        except KeyboardInterrupt:
            self._interrupted.setdefault(rank, time.monotonic())
            raise
        finally:
            if recorded is not None:
                recorded.end(answer is not None)
        self._interrupted.pop(rank, None)
        return answer

    def take_answer(self, number: int, rank: int) -> Answer | None:
        """An answer, if it has come. Nobody waits for it any more."""
        with self._guard:
            return self._answers.pop((rank, number), None)

    def wait_for_all(self, number: int, place: DeviceTarget, what: str) -> Any:
        """Waits for the one answer of all workers of a group.

        Raises:
            UsageError: their answers differ, and no handle could stand for all of them.
        """
        found: list[tuple[int, Any]] = []
        errors: list[Exception] = []
        for rank in place.ranks:
            try:
                found.append((rank, self.wait(number, rank, what)))
            except Exception as error:  # noqa: BLE001 - the first is raised when all have answered
                errors.append(error)
        if errors:
            raise errors[0]
        for rank, answer in found:
            if answer != found[0][1]:
                raise UsageError(
                    f"{what}: the workers of {place} differ: worker {found[0][0]} has {found[0][1][0]}, worker {rank}"
                    f" {answer[0]}. What a shape, or a value here, depends on must be asked of each: x.shard({rank})"
                )
        return found[0][1]

    def forget_raised(self, fault: wire.Fault) -> None:
        """An exception was raised of a fault, and caught here: the program has not seen it."""
        self._raised.discard((fault.rank, fault.serial))

    def synchronize(self, place: DeviceTarget) -> None:
        """Waits until all that is queued for some workers is done.

        Raises:
            RemoteError: something has failed of which no exception has been raised yet.
        """
        number = self.next_number()
        self.outbox.echo(place.target, number)
        plain = wire.ECHOED.pack(0, number)
        answers: list[Any] = []
        # Backwards: when the last has answered most others have too, and the master has slept meanwhile.
        for rank in reversed(place.ranks):
            if memory.records_in_file() or not self._has_echoed(rank, plain):
                answers += self.wait(number, rank, "synchronize") or []
        faults = [msgspec.convert(each, wire.Fault) for each in answers]
        new = [each for each in faults if (each.rank, each.serial) not in self._raised]
        self._raised -= {(each.rank, each.serial) for each in faults}
        if new:
            raise self._cause(new[0], error_of(new[0], line_of(new[0].line), False, len(new) - 1))

    def _has_echoed(self, rank: int, plain: bytes) -> bool:
        """Whether a worker's next bytes are those of a bare echo, which is what most synchronizations get."""
        with self._guard:
            received = self._received[rank]
            if received or rank in self._receiving:
                return False
            try:
                self._receive(self.by_rank[rank], _LOOK_S)
            except WorkerLost:
                return False  # the wait that follows raises it
            if found := received == plain:
                received.clear()
            return found

    def _receive(self, worker: WorkerConnection, seconds: float) -> bool:
        """Waits for more from a worker, `_LOOK_S` at most. Returns whether some has come; to any thread.

        `_guard` must be held. It is not held during the wait.

        Raises:
            WorkerLost: the worker is gone.
        """
        rank = worker.rank
        if self.by_rank[rank] is not worker:  # another thread has replaced it
            raise WorkerLost(f"worker {rank} ({worker.host}, pid {worker.pid}) is gone: another has its place", rank)
        if rank in self.lost:
            raise WorkerLost(self.lost[rank], rank)
        if rank in self._receiving:
            self._others += 1
            try:
                return self._arrivals.wait(min(max(seconds, 0.0), _LOOK_S))
            finally:
                self._others -= 1
        received = self._received[rank]
        if seconds < _LOOK_S:
            _set_receive_timeout(worker, max(seconds, 1e-3))
        self._receiving.add(rank)
        self._guard.release()
        try:
            part = worker.socket.recv(_CHUNK)
        except BlockingIOError:
            return False
        except OSError:
            part = b""
        finally:
            self._guard.acquire()
            self._receiving.discard(rank)
            if self._others:
                self._arrivals.notify_all()
            if seconds < _LOOK_S:
                with contextlib.suppress(OSError):  # another thread has closed it
                    _set_receive_timeout(worker, _LOOK_S)
        if part:
            received += part
        elif self.by_rank[rank] is worker:
            self.lose(rank)
        return bool(part)

    def unanswered(self, rank: int, timeout_s: float, what: str) -> TimeoutError:
        """What is to be raised where a worker has not answered in time."""
        worker = self.by_rank[rank]
        return TimeoutError(
            f"{what}: worker {rank} ({worker.host}, pid {worker.pid}) has not answered for {timeout_s:g} s"
            f"{_process_state(worker)}.\n  Longer: init_master_worker(timeout=...)"
        )

    def _warn_of_interrupted(self, rank: int) -> None:
        """Warns, once, that a worker still executes what a wait was interrupted for."""
        since = self._interrupted.pop(rank, None)
        if since is None:
            return
        worker = self.by_rank[rank]
        warnings.warn(
            f"worker {rank} ({worker.host}, pid {worker.pid}) still does what was queued before Ctrl-C,"
            f" {time.monotonic() - since:.1f} s ago{_process_state(worker)}, and"
            f" is waited for. mw.respawn({rank}, force=True) ends it, and its tensors with it",
            RuntimeWarning,
            stacklevel=2,
        )

    def _decode_received(self, rank: int) -> None:
        received = self._received[rank]
        while len(received) >= 8:
            length, number = wire.ECHOED.unpack_from(received)
            if len(received) < 4 + (length or 4):
                return
            answer = _decode(bytes(received[4 : 4 + length])) if length else Answer(number)
            self._answers[rank, answer.number] = answer
            del received[: 4 + (length or 4)]

    def _receive_while_full(self, seconds: float) -> None:
        """While a worker's queue is full: receives answers, as the worker may wait until they are taken.

        Raises:
            TimeoutError: it takes too long.
        """
        full = [rank for rank, index in self.indices.items() if self.outbox.pending(index) and rank not in self.lost]
        for rank in full:
            with self._guard, contextlib.suppress(BlockingIOError, OSError):
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
                f"{stuck} has not taken what is queued for {seconds:.0f} s.\n  Longer: init_master_worker(timeout=...)"
            )

    # What may not be there.

    def lose(self, rank: int, how: str | None = None) -> None:
        """A worker is gone: its handles, and its groups', raise `WorkerLost` from now on. Called by any thread."""
        worker = self.by_rank[rank]
        if how is None:
            how = self.workers.how_ended(rank)
        with self._losing:
            if rank in self.lost or self.by_rank[rank] is not worker or self.closed:
                return
            self.lost[rank] = (
                f"worker {rank} ({worker.host}, pid {worker.pid}) is gone{': ' + how if how else ''}.\n"
                f"  mw.respawn({rank}) starts another in its place; what was on it is lost"
            )
            self.outbox.lose(self.indices[rank])
            self.on_lost(rank, self.lost[rank])

    def gone(self, rank: int, why: str) -> WorkerLost:
        """What is to be raised where a worker is needed that is gone. It has been replaced then, if that is wanted."""
        if self.recover is not None and not self._in_recovery:
            with self.lock, self.without_recovery():
                found = self.recover()
            if found is not None:
                return found
        return WorkerLost(why, rank)

    @contextlib.contextmanager
    def without_recovery(self) -> Iterator[None]:
        """Meanwhile this thread replaces no lost workers: what meets one is no step of the program, or replaces it."""
        before, self._own.recovering = self._in_recovery, True
        try:
            yield
        finally:
            self._own.recovering = before

    @property
    def _in_recovery(self) -> bool:
        return getattr(self._own, "recovering", False)

    def _cause(self, fault: wire.Fault, error: Exception) -> Exception:
        """What is to be raised of a fault: where lost workers are replaced, the loss that it follows from."""
        # Where a worker dies while a link is made with it, the other one may see only that the meeting has failed.
        of_loss = fault.kind in _OF_LOSSES or fault.op == wire.LINKING
        if self.recover is None or self._in_recovery or not of_loss:
            return error
        until = time.monotonic() + _CAUSE_S
        while not self.lost and time.monotonic() < until:
            time.sleep(_LOOK_S / 100)
        if not self.lost:
            return error
        rank = min(self.lost)
        return self.gone(rank, self.lost[rank])

    def check(self, place: DeviceTarget) -> None:
        """
        Raises:
            WorkerLost: a worker of the place is gone.
        """
        self.check_open()
        if isinstance(place.calls, WorkerGone):
            raise self.gone(place.calls.rank, place.calls.why)
        for rank in place.ranks:
            self.check_worker(rank)

    def check_worker(self, rank: int) -> None:
        """
        Raises:
            WorkerLost: it is gone.
        """
        if rank not in self.lost and self.outbox.failure(self.indices[rank]):
            self.lose(rank)
        if rank in self.lost:
            raise self.gone(rank, self.lost[rank])
        if rank in self.unrecovered and not self._in_recovery:
            raise self.gone(rank, self.unrecovered[rank])

    def check_process(self) -> None:
        """
        Raises:
            NotInitializedError: this is a forked child of the master's process.
        """
        if self._forks != forks():
            raise refusal("the master of the workers", CPU)

    def check_open(self) -> None:
        """
        Raises:
            WorkerLost: the workers have been shut down.
        """
        self.check_process()
        if self.closed:
            raise WorkerLost("the workers have been shut down", 0)

    def refuse_recording(self, why: str, always: bool = True) -> None:
        """Reports to a recorder what a captured step cannot do; `always`: not in its first calls either."""
        if self.recorder is not None:
            self.recorder.refuse(why, always)

    def close(self) -> None:
        """Ends the outbox. The workers end with their connections, which `workers` closes."""
        self.closed = True
        _core.while_waiting(None)
        self.outbox.close()


class _HasConnections(Protocol):
    @property
    def connections(self) -> Connections: ...


S = TypeVar("S", bound=_HasConnections)
P = ParamSpec("P")
R = TypeVar("R")


def exclusive(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """One thread at a time: for what consists of several commands. It must not wait for an answer."""

    @functools.wraps(method)
    def called(self: S, *args: P.args, **kwargs: P.kwargs) -> R:
        connections = self.connections
        connections.check_process()
        with connections.lock:
            return method(self, *args, **kwargs)

    return called  # type: ignore[return-value]


def _category(warned: wire.Warned) -> type[Warning]:
    """The class of a worker's warning, if the program here knows it; else the builtin one that it is of."""
    module, _, name = warned.kind.rpartition(".")
    for found in (getattr(sys.modules.get(module), name, None), getattr(builtins, warned.builtin, None)):
        if isinstance(found, type) and issubclass(found, Warning):
            return found
    return UserWarning


def has_ended(sock: socket.socket) -> bool:
    """Whether the other end of a connection is closed."""
    poll = select.poll()
    poll.register(sock, select.POLLRDHUP)
    return bool(poll.poll(_END_S * 1e3))


def _set_receive_timeout(worker: WorkerConnection, seconds: float) -> None:
    """How long a receive blocks: the kernel's own timeout, as Python's costs a poll before each."""
    worker.socket.setsockopt(
        socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", *divmod(int(seconds * 1e6), 10**6))
    )


def _process_state(worker: WorkerConnection) -> str:
    """What the kernel reports of a worker of this host that does not answer."""
    if worker.host != socket.gethostname():
        return ""
    try:
        state = Path(f"/proc/{worker.pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""
    return {"T": "; it is stopped (SIGSTOP)", "t": "; a debugger has stopped it", "R": "; it computes"}.get(state, "")
