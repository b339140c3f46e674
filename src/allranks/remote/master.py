"""The master's side: what it queues, what it asks for, what it hears.

There is one master in a process, and one order of everything it does; for each worker the order is the same. An answer
is waited for only where a value, or a shape that depends on one, is needed here.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import select
import socket
import struct
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import msgspec
import torch

from allranks import _core
from allranks._base.errors import (
    AllranksError,
    PeerLostError,
    RemoteError,
    TimeoutError,
    UsageError,
    WorkerLost,
    rank_list,
    spans,
)
from allranks._base.forks import follow, forks, refusal
from allranks._call.bytes import view_of
from allranks.remote import flags, wire
from allranks.remote import tensor as handles
from allranks.remote.faults import error_of
from allranks.remote.functions import RemoteFunction
from allranks.remote.groups import Group, shard, total
from allranks.remote.lines import here, line_of
from allranks.remote.signature import (
    OURS,
    Facts,
    Signature,
    believable,
    facts,
    flatten,
    indexes_by_mask,
    infer,
    signature,
)
from allranks.remote.tensor import Call, Place, RemoteTensor, form, make, operands
from allranks.remote.wire import Answer, Ask, Define, Hold, Order

if TYPE_CHECKING:
    from allranks._group.process_group import ProcessGroup
    from allranks.remote.meet import Line, Workers

__all__ = ["Asked", "Master"]

_PROGRAMS = range(0xF000, 0x10000)  # of all numbers of templates
_UNNOTICED = (
    "keep", "drop", "forget", "forget_generator", "unmark", "copied", "group", "ungroup", "kind",
)  # fmt: skip
"""Orders that a captured step can do without."""

_OFFERED = ("closed", "group", "lost", "ranks", "remote", "respawn", "shutdown", "synchronize")
_END_S = 0.2  # between the end of a process and that of its connection
_LAST_INDEX = 127  # torch keeps a device's index in a signed byte
_LATEST = 4  # groups that do not end
_LOOK_S = 0.5
_CPU = "What the child needs is fetched before it is forked, with .cpu()"
P = ParamSpec("P")
R = TypeVar("R")


def _alone(method: Callable[Concatenate[Master, P], R]) -> Callable[Concatenate[Master, P], R]:
    """One thread at a time: for what takes several commands, or a command and its answer."""

    @functools.wraps(method)
    def called(self: Master, *args: P.args, **kwargs: P.kwargs) -> R:
        self.check_process()
        with self._lock:
            return method(self, *args, **kwargs)

    return called  # type: ignore[return-value]


_answers = msgspec.msgpack.Decoder(Answer).decode


class Asked:
    """What an operator has returned that could not be queued."""

    __slots__ = ("result",)

    def __init__(self, result: Any) -> None:
        self.result = result


class Master:
    """What the process that drives the workers holds of them."""

    def __init__(self, workers: Workers, timeout_s: float) -> None:
        self.workers = workers
        self._forks = forks()
        self.timeout_s = timeout_s
        self.outbox = _core.Outbox()
        self.lines: dict[int, Line] = {}
        self._indices: dict[int, int] = {}  # of a rank in the outbox
        self._answers: dict[tuple[int, int], Answer] = {}
        self._heard: dict[int, bytearray] = {}
        self._lock = threading.RLock()
        self._losing = threading.RLock()
        self._numbers = itertools.count(1)
        self._templates = wire.CALL
        self.programs = list(_PROGRAMS)  # numbers that no captured step has
        self.templates: dict[int, tuple[Any, Any, Any, Call]] = {}  # operator, forms and call, by number
        self._trusted: dict[Any, bool] = {}
        self._known: dict[Any, tuple[Any, ...]] = {}
        self._shared: dict[Any, tuple[Call, set[int]]] = {}  # calls that some workers know, and which
        self._made = 0
        self._all: Place | None = None
        self._ended: list[tuple[tuple[int, ...], int]] = []  # links that not all of their workers know to have ended
        self._spoilt: wire.Fault | None = None  # what the last answer with a fault tells of an operand
        self._told: set[tuple[int, int]] = set()  # the faults that have been raised
        self._groups: dict[int, ProcessGroup] = {}
        self.recorder: Any = None
        self.flags = flags.read()  # the workers', which follow the master's
        self._states = {self.flags: 0}
        self.state = 0  # the number of these flags
        self.seed = torch.initial_seed()  # of workers to come
        self.closed = False
        self._interrupted: dict[int, float] = {}  # waits for these workers by Ctrl-C: when
        self.lost: dict[int, str] = {}
        self.places: weakref.WeakValueDictionary[tuple[int, ...], Place] = weakref.WeakValueDictionary()
        self._own: dict[int, Place] = {}  # the workers', which last
        self._targets: dict[tuple[int, ...], int] = {}
        # A device's name does not hold its group, and a loop may make the same one again.
        self._latest: deque[Place] = deque(maxlen=_LATEST)
        self._index = _LAST_INDEX + 1  # of the last group
        for line in workers.lines:
            self.admit(line)
        workers.on_lost = self.lose
        follow(self)
        _core.while_waiting(self._wait_for_room)

    def admit(self, line: Line) -> None:
        """Takes up a worker."""
        self._all = None
        line.socket.settimeout(None)
        _look(line, _LOOK_S)
        self.lines[line.rank] = line
        self.lost.pop(line.rank, None)
        self._heard[line.rank] = bytearray()
        if line.rank in self._indices:
            self.outbox.replace(self._indices[line.rank], line.socket.fileno())
        else:
            self._indices[line.rank] = self.outbox.add(line.socket.fileno())
        # It knows nothing, and is to be told nothing of the tensors of the one before it.
        self._targets = {ranks: target for ranks, target in self._targets.items() if line.rank not in ranks}
        for _, told in self._shared.values():
            told.discard(line.rank)
        place = self._own[line.rank] = self.place([line.rank], line.rank)
        self.invoke(place, "flags", 0, [], [self.flags])
        self.order(place, "seed", seed=self.seed)

    @_alone
    def follow_flags(self) -> None:
        """Tells workers what has been set here. Calls are learnt anew: flags may decide what a result looks like."""
        now, before = flags.read(), set(self.flags)
        changed = tuple([each for each in now if each not in before])
        if not changed:
            return
        self.flags, self.state = now, self._states.setdefault(now, len(self._states))
        for place in handles.places():
            if place.master is self and not isinstance(place.calls, Gone):
                place.calls = place.learnt.setdefault(self.state, {})
        for rank in self.ranks:
            self.invoke(self._own[rank], "flags", 0, [], [changed])

    def place(self, ranks: Sequence[int], index: int) -> Place:
        """Makes a place: some workers, and the index of their device."""
        self.refuse_recording("a group is made")
        made = Place(self, index, tuple(ranks), self._target(tuple(ranks)))
        handles._places[index] = weakref.ref(made)
        self.places[made.ranks] = made
        # Whatever thread it dies in: the orders are left to the one that gives them.
        weakref.finalize(made, _end, made.links, self._ended).atexit = False
        return made

    def index_of(self, device: torch.device) -> int:
        return handles.place_of(device).index

    # What is queued.

    def put(self, place: Place, message: Any, data: Any = None) -> None:
        """Queues a message."""
        self.outbox.put(place.target, wire.pack(message), data)

    def order(self, place: Place, name: str, /, **said: Any) -> None:
        """Queues an order that is not answered."""
        if name not in _UNNOTICED:
            self.refuse_recording(f"workers are given the order {name!r}")
        self.put(place, Order(name, 0, said))

    @_alone
    def define(
        self, place: Place, key: Any, op: Any, args: list[wire.Form], kwargs: dict[str, wire.Form], values: list[Any],
        results: list[Any], resized: list[tuple[int, Signature]], checked: bool,
    ) -> Call:  # fmt: skip
        """Tells a place's workers a template."""
        known = (op, args, kwargs, values, results, resized, checked)
        self._known[self.state, key] = known
        return self._tell(place, key, *known)

    def _tell(
        self,
        place: Place,
        key: Any,
        op: Any,
        args: Any,
        kwargs: Any,
        values: Any,
        results: Any,
        resized: Any,
        checked: Any,
        guessed: bool = False,
    ) -> Call:
        """Makes a call known to a place's workers; those that have heard of it for another place know its number."""
        with self._lock:
            if (self.state, key, guessed) not in self._shared:
                about = OURS if isinstance(op, str) else facts(op)
                outputs = sum(each is not None and each[0] == "new" for each in _entries(results))
                called = Call(self._number(), about, values, results, outputs, resized)
                self.templates[called.number] = (op, args, kwargs, called)
                self._shared[self.state, key, guessed] = called, set()
            called, told = self._shared[self.state, key, guessed]
            if untold := [rank for rank in place.ranks if rank not in told]:
                metas = [each[1].meta if each is not None and each[0] == "new" else None for each in _entries(results)]
                name = op if isinstance(op, str) else facts(op).name
                everyone = len(untold) == len(place.ranks)
                for each in [place] if everyone else [self._own[rank] for rank in untold]:
                    self.put(each, Define(called.number, name, args, kwargs, metas, checked))
                told.update(untold)
        place.calls[key] = called
        return called

    def _number(self) -> int:
        """A number for a template."""
        if self._templates == _PROGRAMS.start:
            self.refuse_recording("all numbers of templates are given anew", always=False)
            for each in handles.places():
                for calls in (each.calls, *each.learnt.values()):
                    calls.clear()
            self._known.clear()
            self._shared.clear()
            self._templates = wire.CALL
        self._templates += 1
        return self._templates - 1

    @_alone
    def prepare(
        self,
        op: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        key: Any,
        place: Place,
        refs: list[Any],
        values: list[Any],
    ) -> Call | Asked:
        """A call that has not been made before on this place, or the result where it cannot be foreseen."""
        self.check(place)
        if (known := self._known.get((self.state, key))) is not None:
            return self._tell(place, key, *known)
        about = facts(op)
        if about.composite:
            return Asked(op.decompose(*args, **kwargs))
        forms = [form(each, i in about.numbers, about.floats_matter) for i, each in enumerate(args)]
        named = {name: form(each, name in about.numbers, about.floats_matter) for name, each in kwargs.items()}
        if about.python is not None:
            return Asked(about.python(*args, **kwargs))
        kind = (self.state, _kind(op, args, kwargs))
        trust = self._trusted.get(kind) if believable(about, args, kwargs) else False
        if about.dynamic or indexes_by_mask(op, args):
            self.refuse_recording(f"the shape, or value, of what {about.name} returns depends on the data")
            return Asked(self._ask(op, about, args, kwargs, forms, named, place, refs, values)[0])
        foreseen = None
        if trust is not False:
            try:
                foreseen = self._foresee(op, about, args, kwargs)
            except Exception:  # noqa: BLE001 - the worker says what is wrong, or does it all the same
                trust = False
        if trust:
            assert foreseen is not None
            return self.define(place, key, op, forms, named, values, *foreseen, False)
        try:
            result, seen = self._ask(op, about, args, kwargs, forms, named, place, refs, values)
        except RemoteError:
            if self._spoilt is None or foreseen is None:
                raise
            # An operand is spoilt: so is the result, of which nobody need hear before it is looked at.
            self._told.discard((self._spoilt.rank, self._spoilt.serial))
            return self._tell(place, key, op, forms, named, values, *foreseen, True, guessed=True)
        if foreseen is None:
            self._trusted.setdefault(kind, False)
        else:
            self._trusted[kind] = foreseen == seen
        if seen is not None:
            self._known[self.state, key] = (op, forms, named, values, *seen, not self._trusted.get(kind, False))
        return Asked(result)

    def _foresee(self, op: Any, about: Facts, args: Any, kwargs: Any) -> tuple[list[Any], list[tuple[int, Signature]]]:
        result, after = infer(op, args, kwargs)
        metas = [
            (each.dtype, each.shape, each.stride(), each.storage_offset(), wire.bits_of(each))
            if isinstance(each, torch.Tensor)
            else each
            for each in flatten(result)
        ]
        before = operands(args, kwargs)
        changed = {
            i: (meta.dtype, meta.shape, meta.stride(), 0, wire.bits_of(meta))
            for i, (meta, handle) in enumerate(zip(after, before, strict=True))
            if (meta.shape, meta.stride(), wire.bits_of(meta)) != handle._sig.look
        }
        return _arrange(about, counts_of(about, result), metas, changed)

    def _ask(
        self,
        op: Any,
        about: Facts,
        args: Any,
        kwargs: Any,
        forms: Any,
        named: Any,
        place: Place,
        refs: Any,
        values: Any,
    ) -> tuple[Any, Any]:
        """Has an operator run at once; what it returned, and how that looks."""
        self.refuse_recording(f"{about.name} needs an answer from the workers", always=False)
        packed = struct.pack("<" + "".join("d" if type(each) is float else "q" for each in values), *values)
        for ref in refs:
            if ref.target != place.target:
                raise handles._apart(about.name, args, kwargs)
        if about.writes and about.resizes:
            refs = handles.unshare(operands(args, kwargs))
        number = self.next()
        ids = [each.id for each in refs]
        self.put(place, Ask(number, about.name, forms, named, ids, packed))
        said, changed, counts = self._answered(number, place, about.name)
        metas = [
            (wire.dtype_of(each[0]), torch.Size(each[1]), tuple(each[2]), *each[3:]) if isinstance(each, list) else each
            for each in said
        ]
        before = operands(args, kwargs)
        resized = {
            i: (wire.dtype_of(d), torch.Size(s), tuple(t), 0, bits)
            for i, (d, s, t, _, bits) in ((int(i), meta) for i, meta in changed.items())
            if (torch.Size(s), tuple(t), bits) != before[i]._sig.look
        }
        base = before[0]._off if before else 0
        results, resize = _arrange(about, counts, metas, resized, base)
        new = [each for each in _entries(results) if each is not None and each[0] == "new"]
        made = self.outbox.reserve(place.target, len(new))
        plain = [each for each in metas if not isinstance(each, tuple)]
        ids_of = iter(made)
        kept = [next(ids_of).id if each is not None and each[0] == "new" else None for each in _entries(results)]
        self.order(place, "keep", of=number, ids=kept)
        if plain and all(each is not None for each in plain):
            return (metas[0] if len(metas) == 1 else tuple(metas)), None
        call = Call(0, about, values, results, len(made), resize)
        call.only = None
        return call.build(place, made[0] if len(made) == 1 else made, args, kwargs), (results, resize)

    def _answered(self, number: int, place: Place, what: str) -> Any:
        """What all workers of a place answer.

        Raises:
            UsageError: not all the same: no handle could stand for all of it.
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
        for rank, said in found:
            if said != found[0][1]:
                raise UsageError(
                    f"{what}: the workers of {place} differ: worker {found[0][0]} has {found[0][1][0]}, worker {rank}"
                    f" {said[0]}. What a shape, or a value here, depends on must be asked of each: x.shard({rank})"
                )
        return found[0][1]

    # What is waited for.

    def next(self) -> int:
        """A new number, for an answer."""
        return next(self._numbers)

    def request(self, place: Place, name: str, /, **said: Any) -> Any:
        """Gives an order and waits for the answer of the place's first worker."""
        if name not in _UNNOTICED:
            self.refuse_recording(f"an answer of a worker's is waited for, {name!r}")
        self.check(place)
        number = self.next()
        self.put(self.places[(place.ranks[0],)], Order(name, number, said))
        return self.wait(number, place.ranks[0], name)

    def wait(self, number: int, rank: int, what: str, timeout_s: float | None = None) -> Any:
        """Waits for an answer.

        Raises:
            RemoteError: the operation, or one before that it depends on, has failed on the worker.
            WorkerLost: the worker is gone.
            TimeoutError: it does not answer.
        """
        self.check_process()
        self.outbox.flush()
        with self._lock:
            timeout_s = self.timeout_s if timeout_s is None else timeout_s
            deadline = time.monotonic() + timeout_s
            self._read(rank)
            try:
                while (rank, number) not in self._answers:
                    self._hear(rank, deadline, timeout_s, what)
            except KeyboardInterrupt:
                self._interrupted.setdefault(rank, time.monotonic())
                raise
            self._interrupted.pop(rank, None)
            answer = self._answers.pop((rank, number))
        if answer.fault is not None:
            self._spoilt = None if answer.said == "now" else answer.fault
            self._told.add((answer.fault.rank, answer.fault.serial))
            raise error_of(answer.fault, line_of(answer.fault.line), answer.said == "now")
        return answer.said

    def _hear(self, rank: int, deadline: float, timeout_s: float, what: str) -> None:
        if rank in self.lost:
            raise WorkerLost(self.lost[rank], rank)
        line, heard = self.lines[rank], self._heard[rank]
        left = deadline - time.monotonic()
        if left < _LOOK_S:
            _look(line, max(left, 1e-3))
        try:
            part = line.socket.recv(1 << 18)
        except BlockingIOError:
            if time.monotonic() < deadline:
                self._tell_interrupted(rank)
                return
            raise TimeoutError(
                f"{what}: worker {rank} ({line.host}, pid {line.pid}) has not answered for {timeout_s:g} s"
                f"{_state(line.pid) if line.host == socket.gethostname() else ''}.\n"
                "  Longer: init_master_worker(timeout=...)"
            ) from None
        except OSError:
            part = b""
        finally:
            if left < _LOOK_S:
                _look(line, _LOOK_S)
        if not part:
            self.lose(rank)
            raise WorkerLost(self.lost[rank], rank)
        heard += part
        self._read(rank)

    def _tell_interrupted(self, rank: int) -> None:
        """Tells, once, that a worker still does what a wait was interrupted for."""
        since = self._interrupted.pop(rank, None)
        if since is None:
            return
        line = self.lines[rank]
        warnings.warn(
            f"worker {rank} ({line.host}, pid {line.pid}) still does what was queued before Ctrl-C,"
            f" {time.monotonic() - since:.1f} s ago{_state(line.pid) if line.host == socket.gethostname() else ''}, and"
            f" is waited for. mw.respawn({rank}, force=True) ends it, and its tensors with it",
            RuntimeWarning,
            stacklevel=2,
        )

    def _read(self, rank: int) -> None:
        heard = self._heard[rank]
        while len(heard) >= 8:
            length, number = wire.ECHOED.unpack_from(heard)
            if len(heard) < 4 + (length or 4):
                return
            answer = _answers(bytes(heard[4 : 4 + length])) if length else Answer(number)
            self._answers[rank, answer.number] = answer
            del heard[: 4 + (length or 4)]

    def _wait_for_room(self, seconds: float) -> None:
        """While a worker's queue is full: hears what workers answer, as one may wait for that.

        Raises:
            TimeoutError: it takes too long.
        """
        full = [rank for rank, index in self._indices.items() if self.outbox.pending(index) and rank not in self.lost]
        for rank in full:
            with contextlib.suppress(BlockingIOError, OSError):
                while part := self.lines[rank].socket.recv(1 << 18, socket.MSG_DONTWAIT):
                    self._heard[rank] += part
        if seconds > self.timeout_s:
            stuck = ", ".join(f"worker {rank} ({self.lines[rank].host}, pid {self.lines[rank].pid})" for rank in full)
            raise TimeoutError(
                f"{stuck} has not taken what is queued for {seconds:.0f} s.\n  Longer: init_master_worker(timeout=...)"
            )

    def lose(self, rank: int, how: str | None = None) -> None:
        """A worker is gone: its handles raise `WorkerLost` from now on, and its groups'. Called by any thread."""
        line = self.lines[rank]
        if how is None:
            how = self.workers.how_ended(rank)
        with self._losing:
            if rank not in self.lost and self.lines[rank] is line and not self.closed:
                self._lose(line, how)

    def _lose(self, line: Line, how: str) -> None:
        rank = line.rank
        self.lost[rank] = (
            f"worker {rank} ({line.host}, pid {line.pid}) is gone{': ' + how if how else ''}.\n"
            f"  mw.respawn({rank}) starts another in its place; what was on it is lost"
        )
        self.outbox.lose(self._indices[rank])
        for place in [each for each in handles.places() if each.master is self]:
            if rank in place.ranks:
                place.calls = Gone(self.lost[rank], rank)
                if place.index != rank:
                    handles._places[place.index] = handles.nowhere
            # This may be another thread than the master's: the orders are left to that one.
            for ranks in [each for each in list(place.links) if rank in each]:
                number = place.links.pop(ranks)
                if (group := self._groups.pop(number, None)) is not None:
                    group.close()
                self._ended.append((ranks, number))

    def check(self, place: Place) -> None:
        """
        Raises:
            WorkerLost: a worker of the place is gone.
        """
        self._check_open()
        if isinstance(place.calls, Gone):
            raise WorkerLost(place.calls.why, place.calls.rank)
        for rank in place.ranks:
            if rank not in self.lost and self.outbox.failure(self._indices[rank]):
                self.lose(rank)
            if rank in self.lost:
                raise WorkerLost(self.lost[rank], rank)

    def check_process(self) -> None:
        """
        Raises:
            NotInitializedError: this is a forked child of the master's process.
        """
        if self._forks != forks():
            raise refusal("the master of the workers", _CPU)

    def _check_open(self) -> None:
        self.check_process()
        if self.closed:
            raise WorkerLost("the workers have been shut down", 0)

    def refuse_recording(self, why: str, always: bool = True) -> None:
        """Tells a recorder of what a captured step cannot do; `always`: not in its first calls either."""
        if self.recorder is not None:
            self.recorder.refuse(why, always)

    def target(self, ranks: Sequence[int]) -> int:
        """How the outbox calls some workers."""
        found = [each.target for each in self.places.values() if set(each.ranks) == set(ranks)]
        return found[0] if found else self._target(tuple(ranks))

    def _target(self, ranks: tuple[int, ...]) -> int:
        if ranks not in self._targets:
            self._targets[ranks] = self.outbox.target([self._indices[each] for each in ranks])
        return self._targets[ranks]

    # Tensors that come and go.

    @_alone
    def upload(self, place: Place, plain: torch.Tensor) -> RemoteTensor:
        """Sends a tensor of the master's to a place."""
        self.refuse_recording("a tensor of the master's is sent to a worker")
        self.check(place)
        wire.refuse_odd(plain, "the tensor")
        plain = plain.detach().resolve_conj().resolve_neg()
        dense = plain if is_dense(plain.shape, plain.stride()) else plain.clone()
        sig = signature(dense.dtype, dense.shape, dense.stride())
        (ref,) = self.outbox.reserve(place.target, 1)
        self.hold(place, ref, sig, dense)
        return make(place, sig, ref)

    @_alone
    def hold(self, place: Place, ref: Any, sig: Signature, dense: torch.Tensor) -> None:
        """Sends a tensor's data: what is large by the native channel, which waits until the worker comes to it."""
        if dense.nbytes > wire.LARGE and len(place.ranks) == 1:
            (rank,) = place.ranks
            link = self.link(place, 0, rank)
            self._start(place, link, "upload", outputs=[ref.id], meta=sig.meta, line=here(1))
            self._exchange(place, link, lambda group: group.send(flat(dense), 1))
            return
        self.put(place, Hold(ref.id, sig.meta), view_of(dense) if dense.numel() else None)

    def _start(self, place: Place, link: int, name: str, **said: Any) -> None:
        """Has a worker begin to send or receive on a link as soon as it has answered.

        Raises:
            RemoteError: it cannot, and will not.
        """
        (rank,) = place.ranks
        try:
            self.request(place, name, link=link, **said)
        except AllranksError as error:
            if not isinstance(error, RemoteError):
                self._unlink(place, (0, rank))
            raise
        except BaseException:  # Ctrl-C: the worker will begin all the same
            self._unlink(place, (0, rank))
            raise

    def _exchange(self, place: Place, link: int, move: Callable[[ProcessGroup], Any]) -> None:
        """Sends or receives on a link with a worker.

        Raises:
            WorkerLost: it is gone.
        """
        (rank,) = place.ranks
        try:
            move(self._groups[link])
        except BaseException as error:  # also Ctrl-C: the two ends do not stand at the same place any more
            self._unlink(place, (0, rank))
            if isinstance(error, PeerLostError) or rank in self.lost:
                self.lose(rank)
                raise WorkerLost(self.lost[rank], rank) from None
            raise

    def _unlink(self, place: Place, ranks: tuple[int, ...]) -> None:
        """Drops a link on whose ends something else may be under way; the next use makes another."""
        number = place.links.pop(ranks, None)
        if number is None:
            return
        if (group := self._groups.pop(number, None)) is not None:
            group.close()
        self._ended.append((ranks, number))
        self._leave_links()

    @_alone
    def item(self, x: RemoteTensor) -> Any:
        self.refuse_recording("a value is fetched: .item(), or an if or while on a tensor")
        value = self.request(self.single(x), "item", id=x._ref.id)
        return complex(*value) if isinstance(value, list) else value

    @_alone
    def fetch(self, x: RemoteTensor) -> torch.Tensor:
        """A tensor's data, here."""
        self.refuse_recording("a tensor is fetched")
        place = self.single(x)
        dense = self.dense(x)
        sig = dense._sig
        nbytes = sig.shape.numel() * sig.dtype.itemsize
        if nbytes <= wire.SMALL:
            data = self.request(place, "fetch", id=dense._ref.id, link=0)
            return _tensor(sig, data)
        (rank,) = place.ranks
        link = self.link(place, 0, rank)
        made = torch.empty_strided(sig.shape, sig.strides, dtype=sig.dtype)
        self._start(place, link, "fetch", id=dense._ref.id)
        self._exchange(place, link, lambda group: group.recv(flat(made), 1))
        return made

    def single(self, x: RemoteTensor) -> Place:
        """Where it is.

        Raises:
            UsageError: on the workers of a group.
        """
        if len(x._place.ranks) > 1:
            raise UsageError(f"the tensor is on {x._place}: say whose data is meant, x.shard({x._place.ranks[0]})")
        return x._place

    def dense(self, x: RemoteTensor) -> RemoteTensor:
        """The tensor, or a copy of it without gaps in its memory."""
        return (
            x
            if not x._sig.bits and is_dense(x._sig.shape, x._sig.strides)
            else handles.run(torch.ops.aten.clone.default, (x,), None)
        )

    @_alone
    def link(self, place: Place, *ranks: int) -> int:
        """The number of a place's native group of these ranks, where there is none yet a new one."""
        if (number := place.links.get(ranks)) is not None:
            return number
        for rank in ranks:
            if rank:
                self.check(self._own[rank])
        self.refuse_recording("workers meet for the first time", always=False)
        self._leave_links()
        self._made += 1
        number = place.links[ranks] = self._made
        name = f"{'-'.join(map(str, ranks[:4]))}#{number}"
        said = {"number": number, "name": name, "ranks": list(ranks), "timeout_s": self.timeout_s}
        with self._both(place, ranks):
            for rank in ranks:
                if rank:
                    self.put(self._own[rank], Order("group", 0, said))
            if 0 in ranks:
                self.outbox.flush()
                self._groups[number] = self.workers.make_group(name, ranks, self.timeout_s)
        return number

    @_alone
    def _leave_links(self) -> None:
        """Has workers leave the links that have ended: with a place that nothing uses, or with a lost worker."""
        while self._ended:
            ranks, number = self._ended.pop()
            for rank in ranks:
                if rank and rank not in self.lost:
                    self.order(self._own[rank], "ungroup", number=number)

    def shard(self, x: RemoteTensor, rank: int) -> RemoteTensor:
        return shard(x, rank)

    def total(self, x: RemoteTensor) -> RemoteTensor:
        return total(x)

    def show(self, x: RemoteTensor) -> str:
        """How a handle is printed."""
        if len(x._place.ranks) > 1:
            each = ",\n".join(f"  worker {rank}: {self.shard(x, rank).detach()!r}" for rank in x._place.ranks)
            return f"group tensor(\n{each})"
        inner = repr(self.fetch(x))
        grad = (
            f", grad_fn=<{type(x.grad_fn).__name__}>" if x.grad_fn is not None
            else ", requires_grad=True" if x.requires_grad else ""
        )  # fmt: skip
        text = f"{inner[:-1]}, device='{x.device}'{grad})"
        return f"Parameter containing:\n{text}" if isinstance(x, torch.nn.Parameter) else text

    def copy(self, x: RemoteTensor, place: Place) -> RemoteTensor:
        """Copies a tensor to another worker, or to all of a group, directly."""
        return self.copies([x], place)[0]

    @_alone
    def copies(self, tensors: Sequence[RemoteTensor], place: Place) -> list[RemoteTensor]:
        """Copies tensors of one worker, as one command for each of the two."""
        source = self.single(tensors[0])
        self.check(source)
        self.check(place)
        tensors = [self.dense(each) for each in tensors]
        (sender,) = source.ranks
        if place.ranks != (receiver := place.ranks[0],) or sender == receiver:  # a group, maybe of one
            return [self._spread(each, place) for each in tensors]
        pair = (min(sender, receiver), max(sender, receiver))
        meeting = self._own[pair[0]]
        link = self.link(meeting, *pair)
        sigs = [each._sig for each in tensors]
        metas = tuple((sig.meta[0], tuple(sig.shape), sig.strides) for sig in sigs)
        with self._both(meeting, pair):
            self.invoke(source, "send", link, tensors, [int(receiver > sender)])
            return self.invoke(place, "recv", link, [], [int(sender > receiver), metas], sigs)

    @contextlib.contextmanager
    def _both(self, place: Place, ranks: tuple[int, ...]) -> Iterator[None]:
        """Around what is told to several workers: all of it, or they do not meet on that link again."""
        try:
            yield
        except BaseException:
            self._unlink(place, ranks)
            raise

    @_alone
    def invoke(
        self,
        place: Place,
        name: str,
        link: int,
        tensors: Sequence[RemoteTensor],
        said: Sequence[Any],
        results: Sequence[Signature] = (),
    ) -> list[RemoteTensor]:
        """Queues an operation of ours, one of ``orders.OPERATIONS``; of one that needs no link that is 0."""
        key = (name, *said, len(tensors), *(each._sig for each in tensors), *results)
        call = place.calls.get(key)
        if call is None:
            forms: list[wire.Form] = [["l", *(["t"] for _ in tensors)], ["i"], *(["c", each] for each in said)]
            new = [("new", sig, which, False, 0) for which, sig in enumerate(results)]
            call = self.define(place, key, f"allranks::{name}", forms, {}, [link], new, [], False)
        refs = [each._ref for each in tensors]
        made: Any = place.call(place.target, here(1), call.number, refs, call.outputs, call.pack(link))
        made = [made] if len(results) == 1 else made or []
        return [make(place, sig, ref) for sig, ref in zip(results, made, strict=True)]

    @_alone
    def _spread(self, x: RemoteTensor, place: Place) -> RemoteTensor:
        self.refuse_recording("a tensor is copied to a group")
        (sender,) = x._place.ranks
        (ref,) = self.outbox.reserve(place.target, 1)
        ranks = place.ranks if sender in place.ranks else (sender, *place.ranks)
        link = self.link(place, *ranks) if len(ranks) > 1 else 0
        said = {"link": link, "root": ranks.index(sender), "id": x._ref.id, "meta": x._sig.meta, "line": here(1)}
        with self._both(place, ranks):
            for rank in ranks:
                outputs = [ref.id] if rank in place.ranks else []
                self.order(self._own[rank], "spread", outputs=outputs, sends=rank == sender, **said)
        return make(place, x._sig, ref)

    @_alone
    def synchronize(self, place: Place | None = None) -> None:
        """Waits until everything that is queued is done.

        Raises:
            RemoteError: something has failed that nothing has told of yet.
        """
        self.refuse_recording("the workers are waited for")
        self._check_open()
        if place is None:
            place = self._everyone()
        self.check(place)
        self._leave_links()
        number = self.next()
        self.outbox.echo(place.target, number)
        plain = wire.ECHOED.pack(0, number)
        said: list[Any] = []
        # Backwards: when the last has answered most others have too, and the master has slept meanwhile.
        for rank in reversed(place.ranks):
            line, heard = self.lines[rank], self._heard[rank]
            if not heard:
                with contextlib.suppress(OSError):
                    heard += line.socket.recv(1 << 18)
                if heard == plain:
                    heard.clear()
                    continue
            said += self.wait(number, rank, "synchronize") or []
        faults = [msgspec.convert(each, wire.Fault) for each in said]
        new = [each for each in faults if (each.rank, each.serial) not in self._told]
        self._told -= {(each.rank, each.serial) for each in faults}
        if new:
            raise error_of(new[0], line_of(new[0].line), False, len(new) - 1)

    def _everyone(self) -> Place:
        """All workers that are there."""
        ranks = tuple(self.ranks)
        if self._all is None or self._all.ranks != ranks or isinstance(self._all.calls, Gone):
            self._all = Place(self, _LAST_INDEX, ranks, self.outbox.target([self._indices[each] for each in ranks]))
        return self._all

    # What users call.

    @_alone
    def group(self, ranks: Sequence[int]) -> Group:
        """One handle for several workers.

        Args:
            ranks: of the workers, each once.

        Raises:
            UsageError: there are no such workers, or too many groups.
            WorkerLost: one of them is gone.
        """
        self._check_open()
        wanted = tuple(ranks)
        if not wanted or len(set(wanted)) < len(wanted) or not set(wanted) <= set(self.lines):
            raise UsageError(f"group: expected ranks of workers, 1 to {max(self.lines)}, each once, not {list(ranks)}")
        place = self.places.get(wanted)
        if place is None or len(wanted) == 1 or isinstance(place.calls, Gone):
            place = self.place(wanted, self._spare_index()) if len(wanted) > 1 else self.places[wanted]
        self.check(place)
        self._leave_links()
        if len(wanted) > 1:
            self._latest.append(place)
        return Group(place)

    def _spare_index(self) -> int:
        """An index for a group: the one that has been free for longest, as programs may still name the others.

        Raises:
            UsageError: there is none.
        """
        indices = range(_LAST_INDEX, max(self.lines), -1)
        free = [each for each in indices if handles._places[each]() is None]
        if not free:
            self._latest.clear()
            gc.collect()  # handles that only a cycle holds
            free = [each for each in indices if handles._places[each]() is None]
        if not free:
            raise UsageError(
                f"group: {len(indices)} groups are in use, and torch knows no more devices. A group ends when neither"
                " it nor a tensor on it is held any more"
            )
        self._index = next((each for each in free if each < self._index), free[0])
        return self._index

    def remote(self, function: Callable[..., Any], on: Any = None) -> RemoteFunction:
        """Makes a function run on workers, see `RemoteFunction`.

        Args:
            function: pickled, with what it refers to, by cloudpickle.
            on: ``"worker:2"``, 2, a group, or None: where its arguments are.
        """
        return RemoteFunction(self, function, on)

    def place_on(self, on: Any) -> Place:
        """The workers that a device, a rank or a group means."""
        if isinstance(on, Group):
            return on._place
        return handles.place_of(torch.device("worker", on) if isinstance(on, int) else torch.device(on))

    def respawn(self, rank: int, force: bool = False) -> None:
        """Starts a new worker in the place of one that is gone.

        What was on it is lost: its handles, and its groups', go on to raise `WorkerLost`.

        Args:
            rank: the worker's.
            force: kills it if it still lives.

        Raises:
            UsageError: there is no such worker, or it lives, or nobody is there who could start another.
            ConfigError: it ended while it was started.
            JoinError: it did not come in time.

        Cost:
            a start of Python and an import of torch.
        """
        self._check_open()
        if rank not in self.lines:
            raise UsageError(f"respawn: there is no worker {rank}; there are 1 to {max(self.lines)}")
        if rank not in self.lost and not force and not _is_over(self.lines[rank].socket):
            raise UsageError(
                f"respawn: worker {rank} lives, and what is on it would be lost. To kill it:"
                f" respawn({rank}, force=True)"
            )
        if rank not in self.lost:
            self.lose(rank, "its place is taken by another")
        self._interrupted.pop(rank, None)
        self.admit(self.workers.respawn(rank))

    @property
    def ranks(self) -> list[int]:
        """The workers that are there."""
        return [each for each in self.lines if each not in self.lost]

    def shutdown(self) -> None:
        """Ends the workers, when they have done what is queued. Idempotent.

        Raises:
            RemoteError: something has failed that nothing has told of yet.
        """
        if self.closed:
            return
        try:
            self.synchronize()
        finally:
            self.close()

    def __repr__(self) -> str:
        if self.closed:
            return "Master(shut down)"
        hosts: dict[str, list[int]] = {}
        for rank in self.ranks:
            hosts.setdefault(self.lines[rank].host, []).append(rank)
        told = [
            f"{'worker' if len(ranks) == 1 else 'workers'} {spans(ranks, ', ')} on {host}"
            for host, ranks in hosts.items()
        ]
        gone = [f"{rank_list(sorted(self.lost))} lost"] if self.lost else []
        return f"Master({'; '.join(told + gone)})"

    def __dir__(self) -> list[str]:
        """What programs call; the rest is of this package's own use."""
        return sorted([*_OFFERED, *(each for each in object.__dir__(self) if each.startswith("_"))])

    def __enter__(self) -> Master:
        return self

    def __exit__(self, kind: Any, *exception: Any) -> None:
        if kind is None:
            self.shutdown()
        else:
            self.close()

    def close(self) -> None:
        """Ends the workers at once."""
        if self.closed:
            return
        self.closed = True
        _core.while_waiting(None)
        self.outbox.close()
        for group in self._groups.values():
            group.close()
        self._groups.clear()
        self._latest.clear()
        self.workers.close()
        for place in handles.places():
            if place.master is self:
                place.calls = Gone("the workers have been shut down", 0)
                handles._places[place.index] = handles.nowhere

    def abandon(self) -> None:
        """In a forked child: the workers are the parent's."""
        self.closed = True
        for place in handles.places():
            if place.master is self:
                place.calls = Inherited()


class Inherited(dict[Any, Any]):
    """Stands where the calls of the parent's workers were, in a forked child."""

    def get(self, key: Any, default: Any = None) -> Any:
        raise refusal("a tensor on a worker", _CPU)


class Gone(dict[Any, Any]):
    """Stands where the calls of a lost worker were: every operation asks for one."""

    def __init__(self, why: str, rank: int) -> None:
        self.why = why
        self.rank = rank

    def get(self, key: Any, default: Any = None) -> Any:
        raise WorkerLost(self.why, self.rank)


def _end(links: dict[tuple[int, ...], int], ended: list[tuple[tuple[int, ...], int]]) -> None:
    """The links of a place that nothing uses have ended."""
    ended += links.items()


def _is_over(sock: socket.socket) -> bool:
    """Whether the other end of a connection is closed."""
    poll = select.poll()
    poll.register(sock, select.POLLRDHUP)
    return bool(poll.poll(_END_S * 1e3))


def _look(line: Line, seconds: float) -> None:
    """How long a receive blocks: the kernel's own timeout, as Python's costs a poll before each."""
    line.socket.setsockopt(
        socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", *divmod(int(seconds * 1e6), 10**6))
    )


def _state(pid: int) -> str:
    """What the kernel says of a process of this host that does not answer."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""
    return {"T": "; it is stopped (SIGSTOP)", "t": "; a debugger has stopped it", "R": "; it computes"}.get(state, "")


def _kind(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """What a call has in common with those of other shapes: a meta kernel may be right for one kind only, as that of
    batch_norm is in training, and that of embedding_bag in one of its modes."""
    sized = not operands(args, kwargs)  # by its integers, as arange

    def look(value: Any) -> Any:
        if isinstance(value, RemoteTensor):
            return value._sig.kind
        if isinstance(value, list | tuple) and value and all(type(each) is bool for each in value):
            return type(value), tuple(value)  # a mask of the results that are wanted
        if isinstance(value, list | tuple | float | torch.Generator) or (sized and type(value) is int):
            return type(value)
        return type(value), value

    return (op, *map(look, args), *((name, look(value)) for name, value in kwargs.items()))


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether a tensor's memory has no gaps and no overlaps."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(strides, shape, strict=True) if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def flat(dense: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor without gaps, in the order of its memory."""
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)


def _tensor(sig: Signature, data: bytes) -> torch.Tensor:
    made = torch.empty_strided(sig.shape, sig.strides, dtype=sig.dtype)
    if data:
        flat(made).copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    return made


def _entries(results: list[Any]) -> list[Any]:
    return [one for each in results for one in (each if type(each) is list else [each])]


def _arrange(
    about: Facts, counts: list[int], metas: list[Any], changed: dict[int, Any], base: int = 0
) -> tuple[list[Any], list[tuple[int, Signature]]]:
    """What a call returns, in the words of `Call.results`, and which operands it reshapes.

    Args:
        about: the operator.
        counts: for each value returned how many tensors are in it; -1 where it is no list.
        metas: dtype, shape, strides and offset of each tensor; anything else that is returned as it is.
        changed: the same of operands that look different afterwards.
        base: where the first operand begins in its storage.
    """
    following, made = iter(metas), [0]

    def entry(kind: str) -> Any:
        meta = next(following)
        if not isinstance(meta, tuple):
            return None
        if kind not in ("new", "view"):
            return ("same", kind)
        dtype, shape, strides, offset, bits = meta
        made[0] += 1
        return (
            "new",
            signature(dtype, shape, strides, bits),
            made[0] - 1,
            kind == "view",
            offset - base * (kind == "view"),
        )

    found: list[Any] = []
    for kind, count in zip(about.returns, counts, strict=True):
        plain = kind.removeprefix("*")
        found.append(entry(plain) if count < 0 else [entry(plain) for _ in range(count)])
    return found, [(i, signature(meta[0], meta[1], meta[2], meta[4])) for i, meta in changed.items()]


def counts_of(about: Facts, result: Any) -> list[int]:
    """For each value that an operator has returned how many there are in it; -1 where it is no list."""
    values = [] if not about.returns else [result] if len(about.returns) == 1 else result
    return [len(each) if isinstance(each, list | tuple) else -1 for each in values]
