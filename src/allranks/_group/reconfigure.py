"""Reconfiguration: processes that exchanged handles become the members of a group, in the same object.

The semantics are those of c10d (torch 2.14 and later). Every process has a handle of its group, a text, which the
program passes to other processes in any way. Each process that is to be a member calls ``reconfigure`` with the same
handles, and with a number that has not been used before. This one call can keep the ranks, remove or add ranks, or
combine the ranks of several groups.

A handle is the address of a small store in its process. The store exists as long as the group does in that process. The
callers meet on the store of the first handle, by ``join_protocol``. Each of them first writes the arguments of its call
to its own store. A waiting process can therefore use the handles of the missing processes to find out which have
exited, and which were called with other handles. The old engine stays until the new one is connected. If the connection
fails, the group is unchanged.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import ipaddress
import os
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from allranks import _engines
from allranks._base.errors import (
    AllranksError,
    JoinError,
    MismatchError,
    NotInitializedError,
    StoreLostError,
    TimeoutError,
    UsageError,
    rank_list,
)
from allranks._base.system import reason
from allranks._cluster.network import machine, published_addresses
from allranks._elastic.history import GroupHistory
from allranks._elastic.slot_table import ELASTIC
from allranks._engines.base import Engine
from allranks._net.secret import load_secret
from allranks._rendezvous.driver import drive
from allranks._rendezvous.finders.interface import notify
from allranks._rendezvous.join_protocol import (
    GRACE_S,
    TABLE,
    Act,
    Answer,
    Connect,
    JoinProtocol,
    Leave,
    Lost,
    Member,
    Notify,
    Pause,
    exchange,
    unpack_members,
)
from allranks._rendezvous.rendezvous import this_member
from allranks._store import PrefixStore, Store, StoreClient, StoreServer
from allranks._store.wire import Reply, WaitForKeys, WaitTimedOut

if TYPE_CHECKING:
    from allranks._call.types import Stats
    from allranks._group.base import BaseGroup

__all__ = ["HandleStore", "Unconnected", "reconfigure"]

_FORM = "allranks:"
_LOOKS_S = (0.05, 1.0)  # seconds that a process waits before it checks the missing processes: at first, and at most
_LOOKED_AT = 8  # number of missing processes that it checks each time
_DIAL_S = 1.0  # seconds to connect to one address
_BOARD = "allranks/1/join/"  # the prefix under which JoinProtocol registers members, the first time on a store
_LINGER_S = 3.0  # seconds for which a store stays open for processes that have not left it yet
# The record that members exchange: the rank in the world, digests of the engine and of the store on which they decide
# after a loss, and the rank slot and start in the job.
_ABOUT = struct.Struct("!q16s16sqq")


class _ProcessHandle(msgspec.Struct, frozen=True, array_like=True):
    """The contents of a handle.

    Attributes:
        number: The rank when the handle was created. Sorted handles are in this order.
        pid: The process ID.
        host: The name of its host.
        machine: As in ``Member``.
        here: The address of its store for processes of its host.
        far: Addresses for other hosts. Empty if the job is known to use one host.
    """

    number: int
    pid: int
    host: str
    machine: str
    here: str
    far: tuple[str, ...]

    def __str__(self) -> str:
        return f"host {self.host}, pid {self.pid}"

    def text(self) -> str:
        packed = base64.urlsafe_b64encode(msgspec.msgpack.encode(self)).decode()
        return f"{_FORM}{max(self.number, 0):08d}:{packed}"

    @classmethod
    def parse(cls, text: object) -> _ProcessHandle:
        try:
            if not isinstance(text, str) or not text.startswith(_FORM):
                raise ValueError
            packed = base64.urlsafe_b64decode(text.rpartition(":")[2])
            return msgspec.msgpack.decode(packed, type=cls)
        except (ValueError, binascii.Error, msgspec.MsgspecError):
            raise UsageError(
                f"reconfigure: {text!r:.60} is not a handle. Expected a result of reconfigure_handle()"
            ) from None


class _Call(msgspec.Struct, frozen=True, array_like=True):
    """The arguments of a process's call, as stored in its store."""

    size: int
    members: bytes
    order: bytes

    @classmethod
    def of(cls, handles: Sequence[str]) -> _Call:
        return cls(len(handles), _digest(sorted(handles)), _digest(handles))

    def compare(self, other: _Call) -> str:
        """Return how the other call differs from this one."""
        if self.members == other.members:
            return f"the same {self.size} handles in another order"
        if self.size == other.size:
            return f"{other.size} different handles"
        return f"{other.size} handles, but this rank with {self.size}"


class HandleStore:
    """The store through which the other processes find this process's part of a group.

    Attributes:
        handle: Its address, as a text.
        lock: Held while the group is reconfigured.
        used: The numbers of earlier reconfigurations.
    """

    def __init__(self, number: int, environ: Mapping[str, str] = os.environ) -> None:
        far = not _has_one_host(environ) and bool(published_addresses(environ))
        # A unix socket needs no secret, because the kernel reports the user. A TCP port does.
        self._server = StoreServer.unix(load_secret(environ) if far else b"").start()
        try:
            addresses = tuple(self._server.listen_to_other_hosts()) if far else ()
        except BaseException:
            self._server.close()
            raise
        me = this_member(0, 1)
        self.handle = _ProcessHandle(number, me.pid, me.host, me.machine, self._server.address, addresses).text()
        self.lock = threading.Lock()
        self.used: set[int] = set()

    def close(self) -> None:
        self._server.close(_LINGER_S)


class Unconnected(Engine):
    """Placeholder for the engine of a group that has no members before its first reconfiguration."""

    def __init__(self, backend: str, group_name: str) -> None:
        self.name = backend
        self._group_name = group_name

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise NotInitializedError(f"process group '{self._group_name}' has no members yet: call reconfigure() first")

    all_reduce = reduce = broadcast = all_gather = gather = scatter = reduce_scatter = all_to_all = barrier = _refuse
    send = recv = irecv = empty_shared = abort = _refuse

    def parts(self) -> Mapping[str, Engine]:
        return {}

    def set_timeout(self, timeout_s: float) -> None:
        """Do nothing: the first engine gets the timeout of the group."""

    def stats(self) -> Stats:
        self._refuse()

    def close(self) -> None: ...

    def abandon(self) -> None: ...


def reconfigure(
    group: BaseGroup, store: HandleStore, uuid: int, handles: Sequence[str] | AbstractSet[str], timeout_s: float
) -> None:
    """See ``ProcessGroup.reconfigure``."""
    backend = group.backend
    if _engines.meets_by(backend) is not None:
        raise UsageError(
            f"reconfigure: group '{group.name}' on {backend} cannot be reconfigured: the engine has its own"
            " rendezvous.\n  Create the group with backend='native'."
        )
    texts = _in_order(handles, store.handle)
    if isinstance(uuid, bool) or not isinstance(uuid, int):
        raise UsageError(f"reconfigure: uuid must be a whole number, not {uuid!r}")
    if not store.lock.acquire(blocking=False):
        raise UsageError(
            f"reconfigure: another thread is already reconfiguring process group '{group.name}'.\n"
            "  Call it from one thread at a time."
        )
    try:
        if uuid in store.used:
            raise UsageError(
                f"reconfigure: uuid {uuid} was already used for process group '{group.name}'.\n"
                "  Pass a new number, the same one on every member."
            )
        # The number is used up even if the attempt fails, because its keys remain on the stores.
        store.used.add(uuid)
        rank = texts.index(store.handle)
        attempt = _Attempt(uuid, texts, rank, timeout_s)
        try:
            members, engine = attempt.connect(group, backend, attempt.meet())
        finally:
            attempt.close()
        # Only after the new engine is connected: until here, a failure leaves the group unchanged.
        group._become(engine, rank, members)
        before, group.history = group.history, None
        if before is not None and attempt.slots:
            # A prefix of its own, so that decisions of the earlier members are not found.
            prefix = f"{before.membership.prefix}reconfigured/{uuid}/{attempt.digest}/"
            slot = attempt.slots[rank][0]
            group.history = GroupHistory(
                before.membership, prefix, backend, group.name, group.timeout_s, slot, attempt.slots
            )
        elif before is not None:
            before.membership.close()
        group.reconfigured = True
    finally:
        store.lock.release()


class _Attempt:
    """The part of one process in one reconfiguration.

    Attributes:
        slots: Rank slot and start of each member, by rank, for decisions after a loss. Set when it is connected. Empty
            if the members share no store that outlives them.
        digest: Digest of the handles in their order.
    """

    def __init__(self, uuid: int, texts: Sequence[str], rank: int, timeout_s: float) -> None:
        self._uuid = uuid
        self._handles = [_ProcessHandle.parse(text) for text in texts]
        self._rank = rank
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._call = _Call.of(texts)
        self.slots: list[tuple[int, int]] = []
        self.digest = self._call.order.hex()
        self._key = f"called/{uuid}"
        self._machine = machine()
        self._client: StoreClient | None = None
        self._store: Store | None = None
        self._watched: list[str] = []  # the key of each rank whose absence means that the rank is missing
        self._looks = 0
        self._missing: list[int] = []  # at the last check
        self._trouble: JoinError | None = None

    def meet(self) -> tuple[Member, ...]:
        """Wait for the other processes, and return the members."""
        size = len(self._handles)
        me = this_member(self._rank, size)
        if size == 1:
            return (me,)
        self._publish()
        joining = JoinProtocol(
            me,
            self._handles[self._rank].here,
            time.monotonic(),
            self._timeout_s,
            f"the store of rank 0 ({self._handles[0]})",
            "Check that this process runs and that this host can reach it.",
            longer="reconfigure(timeout=...)",
        )
        self._watched = [f"{_BOARD}member/{r}" for r in range(size)]
        try:
            prefix = drive(joining.steps(), self._perform)
        except JoinError as error:
            if error is not self._trouble and self._missing:
                named = "; ".join(f"rank {r} is {self._handles[r]}" for r in self._missing[:_LOOKED_AT])
                error.args = (f"{error}\n  Missing: {named}.",)
                error.ranks = tuple(self._missing)
            raise
        assert self._store is not None
        self._store = PrefixStore(prefix, self._store)
        return unpack_members(self._store.get(TABLE, self._left()))

    def connect(self, group: BaseGroup, backend: str, members: Sequence[Member]) -> tuple[list[Member], Engine]:
        """Return the members with their ranks in the world, and an engine that connects them."""
        world_rank = self._rank if group.is_world else group.ranks[group.rank()]
        about = self._tell(group.history, world_rank, _digest([backend]))
        others = [r for r, (_, engine, *_) in enumerate(about) if engine != about[self._rank][1]]
        if others:
            raise MismatchError(
                f"reconfigure: {rank_list(others)} {'has' if len(others) == 1 else 'have'} a group with another "
                f"engine than this process, rank {self._rank}, whose group is on '{backend}'.\n"
                "  Create the groups of all members with the same backend."
            )
        found = [msgspec.structs.replace(m, rank=number) for m, (number, *_) in zip(members, about, strict=True)]
        times = iter(range(_engines.meetings(backend)))

        def meet(record: bytes) -> list[bytes]:
            return self._exchange(f"engine/{next(times)}", record)

        made = _engines.make_engine(
            backend, self._rank, found, meet, group.name, group.timeout_s, connect_s=max(self._left(), 0.1)
        )
        return found, made

    def _tell(
        self, history: GroupHistory | None, world_rank: int, engine: bytes
    ) -> list[tuple[int, bytes, bytes, int, int]]:
        """Exchange the records of all members. Sets ``slots``."""
        membership = history.membership if history is not None else None
        store = membership.identity() if membership is not None else b""
        # The launcher of an elastic job identifies processes by their rank slots. In other jobs, the new ranks serve as
        # slots.
        launched = membership is not None and membership.launched
        slot = membership.me.rank if membership is not None and launched else self._rank
        start = membership.start if membership is not None else 0
        rows = self._exchange("about", _ABOUT.pack(world_rank, engine, store, slot, start))
        about: list[tuple[int, bytes, bytes, int, int]] = [_ABOUT.unpack(row) for row in rows]
        # After a loss, the members decide on one store, so all of them must have the same one.
        if store and {row[2] for row in about} == {store}:
            self.slots = [row[3:] for row in about]
        return about

    def close(self) -> None:
        if self._client is not None:
            self._client.close()

    def _publish(self) -> None:
        with self._dial(self._rank) as own:
            own.set(self._key, msgspec.msgpack.encode(self._call))

    def _exchange(self, name: str, record: bytes) -> list[bytes]:
        size = len(self._handles)
        if size == 1:
            return [record]
        place = f"{name}/"
        # Each exchange has its own keys, and begins again with short intervals.
        self._watched, self._looks = [f"{place}{r}" for r in range(size)], 0
        try:
            return drive(exchange(place, self._rank, size, record, self._left()), self._ask_and_look)
        except StoreLostError as error:
            raise JoinError(
                f"reconfigure: rank 0 ({self._handles[0]}) was lost while the ranks connected: {error}\n"
                "  Call reconfigure again without its handle, with a new uuid."
            ) from error

    # --- Requests of the protocols ---

    def _perform(self, act: Act) -> Answer:
        match act:
            case Pause(seconds):
                time.sleep(max(seconds, 0.0))
            case Notify(line):
                notify(line)
            case Leave():
                self.close()
            case Connect():
                return self._connect()
            case request:
                try:
                    return self._ask_and_look(request)
                except (StoreLostError, TimeoutError) as error:
                    # `_look` has found the cause, which must not be reported as a loss of the store.
                    if error is self._trouble:
                        raise
                    return Lost(reason(error.__cause__ or error), error)
        return None

    def _connect(self) -> Answer:
        try:
            self._client = self._dial(0)
        except (StoreLostError, TimeoutError) as error:
            # No process listens there: the member has exited, so a further attempt is pointless.
            if _is_refusal(error):
                raise self._gone(0) from error
            return Lost(reason(error.__cause__ or error), error)
        self._client.timeout_s = self._timeout_s
        self._client.deadline = self._deadline + GRACE_S
        self._store = PrefixStore(f"{self._uuid}/{self._call.order.hex()}", self._client)
        return None

    def _ask_and_look(self, request: Any) -> Reply:
        """Send a request to the store. While it waits, check the missing processes."""
        assert self._store is not None
        if not isinstance(request, WaitForKeys):
            return self._store._execute(request)
        until = time.monotonic() + request.timeout_s
        while True:
            left_s = max(until - time.monotonic(), 0.0)
            # The interval doubles: a short wait needs few checks, and a long one checks once per second.
            slice_s = min(left_s, _LOOKS_S[0] * 2**self._looks, _LOOKS_S[1])
            answer = self._store._execute(msgspec.structs.replace(request, timeout_s=slice_s))
            if not isinstance(answer, WaitTimedOut) or slice_s == left_s:
                return answer
            self._look(self._store)

    # --- Missing processes ---

    def _look(self, store: Store) -> None:
        """Raise if a missing process has exited, or was called with other handles."""
        self._looks += 1
        found = store.peek(self._watched)
        self._missing = missing = [r for r, value in enumerate(found) if value is None and r != self._rank]
        # If no process is missing, the last to arrive died before it could notify the others.
        suspects = missing or [rank for rank in range(len(found)) if rank != self._rank]
        # Each check starts after the suspects of the last one, so that all suspects are checked in turn.
        first = self._looks * _LOOKED_AT % len(suspects)
        for rank in (suspects + suspects)[first : first + min(_LOOKED_AT, len(suspects))]:
            self._look_at(rank)

    def _look_at(self, rank: int) -> None:
        try:
            with self._dial(rank) as client:
                (found,) = client.peek([self._key])
        except (StoreLostError, TimeoutError) as error:
            if _is_refusal(error):
                raise self._gone(rank) from error
            # No answer proves nothing: the process may be stopped or slow.
            return
        if found is None:
            return
        theirs = msgspec.msgpack.decode(found, type=_Call)
        if theirs != self._call:
            raise MismatchError(
                f"reconfigure: rank {rank} ({self._handles[rank]}) was called with uuid {self._uuid} and "
                f"{self._call.compare(theirs)} (this is rank {self._rank}).\n"
                "  Call it on every member with the same handles, and with a new uuid."
            )

    def _gone(self, rank: int) -> JoinError:
        error = JoinError(
            f"reconfigure: rank {rank} ({self._handles[rank]}) is gone: its process has exited, or has destroyed the "
            "group.\n  Call reconfigure again without its handle, with a new uuid. A replacement process has a new"
            " handle."
        )
        error.ranks = (rank,)
        self._trouble = error
        return error

    def _dial(self, rank: int) -> StoreClient:
        """Connect to the store of a member.

        Raises:
            TimeoutError: It did not answer. The cause is a refusal if no process listens at any of its addresses.
        """
        handle = self._handles[rank]
        near = handle.machine == self._machine
        addresses = (handle.here,) if near else handle.far
        if not addresses:
            raise UsageError(
                f"reconfigure: rank {rank} ({handle}) accepts connections only from its own host, because its job was"
                " started for a single host.\n  In that process, unset LOCAL_WORLD_SIZE, and any loopback address in"
                " MASTER_ADDR, before the first reconfigure_handle()."
            )
        secret = b"" if near and not handle.far else load_secret()
        errors: list[AllranksError] = []
        for address in addresses:
            left_s = max(min(_DIAL_S, self._left()), 0.01)
            try:
                return StoreClient.connect(address, secret, left_s, retry=False)
            except (StoreLostError, TimeoutError) as error:
                errors.append(error)
        # An error other than a refusal comes first, because only refusals at all addresses mean that the process has
        # exited.
        raise next((error for error in errors if not _is_refusal(error)), errors[0])

    def _left(self) -> float:
        return max(self._deadline - time.monotonic(), 0.0)


def _in_order(handles: Sequence[str] | AbstractSet[str], own: str) -> list[str]:
    if isinstance(handles, str) or not isinstance(handles, Sequence | AbstractSet):
        raise UsageError(f"reconfigure: handles must be a list (by rank) or a set of handles, not {handles!r:.80}")
    texts = list(handles) if isinstance(handles, Sequence) else sorted(handles)
    if not texts:
        raise UsageError("reconfigure: handles is empty. Pass at least the handle of this process")
    for text in texts:
        _ProcessHandle.parse(text)
    if len(set(texts)) != len(texts):
        twice = next(text for text in texts if texts.count(text) > 1)
        raise UsageError(f"reconfigure: the handles must be unique, but that of {_ProcessHandle.parse(twice)} is not")
    if own not in texts:
        raise UsageError(
            f"reconfigure: the handle of this process is not among the {len(texts)} handles.\n  Add its"
            " reconfigure_handle(), or call reconfigure only on the members."
        )
    return texts


def _has_one_host(environ: Mapping[str, str]) -> bool:
    """Return whether the job is known to use this host only, so that no port has to be opened."""
    if environ.get(ELASTIC) == "1":
        return False
    size = environ.get("WORLD_SIZE")
    if size and size == environ.get("LOCAL_WORLD_SIZE"):
        return True
    master = environ.get("MASTER_ADDR", "")
    try:
        return master == "localhost" or ipaddress.ip_address(master).is_loopback
    except ValueError:
        return False


def _is_refusal(error: BaseException) -> bool:
    return isinstance(error.__cause__ or error.__context__, ConnectionRefusedError)


def _digest(texts: Sequence[str]) -> bytes:
    return hashlib.sha256("\n".join(texts).encode()).digest()[:16]
