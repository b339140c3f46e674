"""Connects the ranks of the native engine.

Ranks of one host exchange descriptors of their memory over unix sockets in the abstract namespace, which leave no file.
The sockets stay open as liveness sockets: if one closes, its rank has exited. A group created from another group uses
the liveness sockets of that group. If all its ranks share the host, its first rank creates one memory for all and
passes it to them. Otherwise its ranks exchange their memories, and close the new sockets. Ranks of different hosts
connect over TCP, or over a fabric (`fabric`), when they need it (`tcp`). At the start, only the first ranks of the
hosts connect, for heartbeats. The caller provides the exchange of the ranks' addresses (`Exchange`): a store for the
world, the parent group for a group created later.

Ranks are on one host if they use the same running kernel and the same network namespace (`_cluster.network.machine`).
Their unix sockets must then connect. Host names and numbers of local ranks are not trusted.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import os
import secrets
import select
import selectors
import socket
import struct
import time
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from allranks import _core
from allranks._base.errors import JoinError, rank_list
from allranks._base.forks import Descriptor, Socket, guard
from allranks._engines.native import fabric
from allranks._engines.native.tcp import ConnectionServer, PeerConnections, Target
from allranks._engines.spec import RECORD_BYTES, Exchange
from allranks._net.secret import load_secret
from allranks._net.sockets import unix_peer

if TYPE_CHECKING:
    from allranks._rendezvous.rendezvous import Member

__all__ = ["OFFER_BYTES", "HostConnections", "GroupMemory", "SegmentExchange", "confirm", "connect"]

# The data that a rank publishes about its SegmentExchange: the random name of the address, and a token. Every process
# on the host can read the name (/proc/net/unix). The token of the host's first rank proves that a peer belongs to the
# group.
_NAME_BYTES, _TOKEN_BYTES = 7, 16
OFFER_BYTES = _NAME_BYTES + _TOKEN_BYTES
_HELLO = struct.Struct(f"!{_TOKEN_BYTES}sI")

# A record: the published data, the port for ranks of other hosts, and the number of the fabric that the rank can use.
# Port and number are 0 if there are none. The first rank's token is part of what ranks of different hosts prove to each
# other.
_NETWORK = struct.Struct("!HB")
assert OFFER_BYTES + _NETWORK.size <= RECORD_BYTES

# Seconds. After an exchange, all ranks are present. A rank that dies before it has connected keeps the others waiting,
# and the timeout of their calls may be long.
_THERE_S = 60.0
_LOOPBACK = "127.0.0.1"
_OTHERS = "Check the end of the output of the other ranks."

# Seconds without a new connection before a rank checks whether missing peers have exited, and the number of missing
# peers that it checks.
_LOOK_S = 0.2
_LOOKED_AT = 8


class HostConnections(NamedTuple):
    """The connections of a rank with the other ranks.

    Attributes:
        segments: The memories of this host's ranks, in order, or the single memory of all of them.
        liveness: The sockets to these ranks that stay connected, None for this rank. In a group that uses the sockets
            of another group, they serve ``confirm`` only.
        heartbeats: The connections for heartbeats, by rank, None for ranks without one. Empty if this rank has none.
        peers: Creates connections with other hosts that are needed later. None if all ranks share this host.
        fabric: The network of these connections. None: TCP.
    """

    segments: list[Descriptor]
    liveness: list[Socket | None]
    heartbeats: list[Socket | None]
    peers: PeerConnections | None
    fabric: _core.FabricChoice | None = None


class GroupMemory(NamedTuple):
    """The functions that create a group's memory.

    Attributes:
        of_rank: Creates the memory of this rank, and returns its descriptor.
        of_all: Creates one memory for all ranks of the host.
    """

    of_rank: Callable[[], int]
    of_all: Callable[[], int]


def connect(
    rank: int,
    members: Sequence[Member],
    host_of: Sequence[int],
    exchange: Exchange,
    create: GroupMemory,
    timeout_s: float,
    group_name: str,
    has_liveness: bool = False,
) -> HostConnections:
    """Connect a rank with all other ranks.

    Args:
        rank: The rank of this process in the group.
        members: The members of the group, by rank.
        host_of: A number for each rank. Ranks with the same number share memory.
        exchange: Gives every rank the records of all ranks.
        create: Creates memory.
        timeout_s: The timeout of the whole call, in seconds.
        group_name: The name of the group.
        has_liveness: Liveness sockets already exist. The same on all ranks.

    Raises:
        JoinError: A rank could not be reached in time.
        SecretError: Ranks of different hosts have different secrets.
    """
    if len(members) == 1:  # no other rank exists, so the exchange is not called
        return HostConnections([Descriptor.of(create.of_rank)], [None], [], None)
    # The condition is the same on all ranks, so all of them use the same protocol.
    if has_liveness and len(set(host_of)) == 1:
        with SegmentExchange(Descriptor.of(create.of_all) if rank == 0 else None) as offer:
            records = exchange(offer.record + _NETWORK.pack(0, 0))
            return HostConnections(*offer.share(rank, records, min(timeout_s, _THERE_S)), [], None)
    memory = Descriptor.of(create.of_rank)
    deadline = time.monotonic() + timeout_s
    near = [r for r, host in enumerate(host_of) if host == host_of[rank]]
    # All ranks are on one machine, so the loopback interface connects them.
    local = len({member.machine for member in members}) == 1
    # The listener exists before its address is published, so a connection never precedes it.
    with SegmentExchange(memory) as offer:
        if len(near) == len(members):
            records = exchange(offer.record + _NETWORK.pack(0, 0))
            return HostConnections(*offer.meet(rank, records, min(timeout_s, _THERE_S)), [], None)
        secret = load_secret()
        addresses = (_LOOPBACK,) if local else members[rank].addresses
        usable = fabric.offer(os.environ, addresses, local)
        server = ConnectionServer.of(addresses)
        peers = None
        heartbeats: list[Socket | None] = []
        try:
            records = exchange(offer.record + _NETWORK.pack(server.port, usable))
            networks = [_NETWORK.unpack(record[OFFER_BYTES:]) for record in records]
            targets: list[Target | None] = [
                None if r in near else ((_LOOPBACK,) if local else members[r].addresses, port)
                for r, (port, _) in enumerate(networks)
            ]
            chosen = fabric.agree([n for _, n in networks], rank, members, addresses, near.index(rank), group_name)
            peers = PeerConnections(
                server, group_name, rank, members, targets, secret, records[0][_NAME_BYTES:OFFER_BYTES]
            )
            # Heartbeats connect first. If a leader does not reach the other hosts, the ranks of its host miss it and
            # fail, too.
            heartbeats = peers.connect_heartbeats(
                _core.neighbours(rank, list(host_of)), max(deadline - time.monotonic(), 0.1)
            )
            # Not limited by _THERE_S: the first rank of the host first connects its heartbeats, which may take all the
            # time.
            left_s = max(deadline - time.monotonic(), 0.1)
            segments, liveness = offer.meet(near.index(rank), [records[r] for r in near], left_s, near)
        except BaseException:
            for heartbeat in heartbeats:
                if heartbeat is not None:
                    heartbeat.close()
            # Closing the connections also releases the server, so only one of the two is called.
            peers.close() if peers is not None else server.let_go()
            raise
    return HostConnections(segments, liveness, heartbeats, peers, chosen)


def confirm(rank: int, made: HostConnections, timeout_s: float) -> None:
    """Return when every rank of this host has created its group, and close the sockets.

    It is used for a group that shares the liveness sockets of another group. Those sockets do not close if a rank fails
    to create the new group, but these do.

    Raises:
        JoinError: A rank has failed, or did not arrive in time.
    """
    own = [connection for connection in made.liveness if connection is not None]
    # One memory for all ranks means that only the first rank has connections to all others.
    through_first = len(made.segments) == 1 and len(made.liveness) > 1
    try:
        _agree(rank, own, time.monotonic() + min(timeout_s, _THERE_S), last=through_first and rank == 0)
    except JoinError:
        raise
    except OSError as error:
        raise JoinError(f"rank {rank}: another rank did not create the group ({error}).\n  {_OTHERS}") from error
    finally:
        for connection in own:
            connection.close()


class SegmentExchange:
    """Passes a rank's memory to the other ranks of its host, and receives theirs. Used once.

    Args:
        memory: The memory of this rank, or on the first rank the memory of all. The object takes ownership. None: no
            memory.

    Attributes:
        record: The data that the other ranks need.

    Raises:
        OSError: No socket could be created. The memory is closed.
    """

    def __init__(self, memory: Descriptor | None) -> None:
        self._memory = memory
        try:
            self._listener = Socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
            name = secrets.token_bytes(_NAME_BYTES)
            self._listener.bind(_address(name))
            self._listener.listen(socket.SOMAXCONN)
        except OSError:
            self._close_memory()
            raise
        self.record = name + secrets.token_bytes(_TOKEN_BYTES)

    def __enter__(self) -> SegmentExchange:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        self._close_memory()

    def _close_memory(self) -> None:
        if self._memory is not None:
            self._memory.close()

    def share(self, rank: int, records: list[bytes], timeout_s: float) -> tuple[list[Descriptor], list[Socket | None]]:
        """Receive the memory of all ranks from the first rank, or pass it to the others.

        Args:
            rank: The rank of this process among them.
            records: Their records, by rank.
            timeout_s: The timeout of the whole call, in seconds.

        Returns:
            The memory, and the sockets by rank: on the first rank to all others, on another rank to the first.

        Raises:
            JoinError: A rank could not be reached in time.
        """
        sockets: dict[int, Socket] = {}
        try:
            if rank == 0:
                memory = self._memory
                assert memory is not None
                _hand_out(records, self._listener, sockets, memory, time.monotonic() + timeout_s)
                self._memory = None
            else:
                sockets[0], memory = _fetch(rank, records[0], timeout_s)
        # Closed connections make the other ranks fail immediately instead of at their timeout.
        except BaseException:
            for connection in sockets.values():
                connection.close()
            raise
        return [memory], [sockets.get(r) for r in range(len(records))]

    def meet(
        self, rank: int, records: list[bytes], timeout_s: float, numbers: Sequence[int] | None = None
    ) -> tuple[list[Descriptor], list[Socket | None]]:
        """Exchange memory descriptors with the other ranks of this host.

        Args:
            rank: The rank of this process among them.
            records: Their records, by rank.
            timeout_s: The timeout of the whole call, in seconds.
            numbers: Their rank numbers in error messages.

        Returns:
            The memories and the sockets that stay connected (None for this rank), by rank.

        Raises:
            JoinError: A rank could not be reached in time.
        """
        numbers = range(len(records)) if numbers is None else numbers
        assert self._memory is not None
        # From here on, the result owns the memory, so `__exit__` must not close it.
        segments, self._memory = {rank: self._memory}, None
        sockets: dict[int, Socket] = {}
        try:
            _meet(rank, records, self._listener, sockets, segments, time.monotonic() + timeout_s, numbers)
        except BaseException:
            for connection in sockets.values():
                connection.close()
            for segment in segments.values():
                segment.close()
            raise
        return [segments[r] for r in range(len(records))], [sockets.get(r) for r in range(len(records))]


# A leading zero byte selects the abstract namespace, which leaves no file after a crash.
def _address(name: bytes) -> str:
    return f"\0allranks-{name.hex()}"


def _meet(
    rank: int,
    records: list[bytes],
    listener: Socket,
    sockets: dict[int, Socket],
    segments: dict[int, Descriptor],
    deadline: float,
    numbers: Sequence[int],
) -> None:
    size = len(records)
    token = records[0][_NAME_BYTES:OFFER_BYTES]

    def left() -> float:
        # At least 1 ms: a timeout of 0 would make the socket nonblocking.
        return max(0.001, deadline - time.monotonic())

    def look_for_ended() -> None:
        absent = [peer for peer in range(rank + 1, size) if peer not in sockets]
        _check_there(numbers[rank], {numbers[peer]: records[peer][:_NAME_BYTES] for peer in absent[:_LOOKED_AT]})

    try:
        # Each rank connects to all lower ranks first. This needs no reply: the kernel queues it at their listeners.
        for peer in range(rank):
            connection = Socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
            sockets[peer] = connection
            connection.settimeout(left())
            connection.connect(_address(records[peer][:_NAME_BYTES]))
            _check_owner(connection, numbers[rank], numbers[peer])
            _send(connection, token, rank, segments[rank])
        # `closing` runs the generator's `finally` now. It closes connections of silent peers.
        with contextlib.closing(_callers(listener, token, deadline, look_for_ended)) as callers:
            while len(sockets) < size - 1:
                connection, peer, segment = next(callers)
                # The token is right, but another rank already has this slot: a second connection must not replace it.
                if not rank < peer < size or peer in sockets or segment is None:
                    connection.close()
                    if segment is not None:
                        segment.close()
                    continue
                sockets[peer], segments[peer] = connection, segment
                connection.settimeout(left())
                _send(connection, token, rank, segments[rank])
        # A lower rank replies after its own connections, which wait for no reply. The ranks therefore cannot wait in a
        # circle.
        for peer in range(rank):
            sockets[peer].settimeout(left())
            other, given = _receive(sockets[peer], token)
            if given is not None:
                segments[peer] = given
            if other != peer or given is None:
                raise JoinError(
                    f"rank {numbers[rank]}: the process at the address of rank {numbers[peer]} is not that rank.\n"
                    f"  If rank {numbers[peer]} exited while connecting, check the end of its output."
                )
        # No rank returns before all are connected, because the store of the exchange may close afterwards.
        _agree(numbers[rank], sockets.values(), deadline)
    except JoinError:  # it is an OSError, too
        raise
    except OSError as error:
        missing = [r for r in range(size) if r not in segments]
        why = "in time" if isinstance(error, builtins.TimeoutError) else f"({error.strerror})"
        raise JoinError(
            f"rank {numbers[rank]}: {_unreached([numbers[r] for r in missing], [numbers[r] for r in sockets])} {why}.\n"
            "  If one of these ranks exited while connecting, check the end of its output."
        ) from error


def _unreached(missing: list[int], connected: list[int]) -> str:
    """Describe the ranks that have not connected, or if all have, those that did not confirm the connection."""
    if missing:
        return f"no connection with {rank_list(missing)}"
    return f"no confirmation of the connection from {rank_list(connected)}"


def _hand_out(
    records: list[bytes], listener: Socket, sockets: dict[int, Socket], memory: Descriptor, deadline: float
) -> None:
    """Pass the memory of the first rank to the other ranks, which connect. Called on the first rank."""
    size, token = len(records), records[0][_NAME_BYTES:OFFER_BYTES]

    def look_for_ended() -> None:
        absent = [peer for peer in range(1, size) if peer not in sockets]
        _check_there(0, {peer: records[peer][:_NAME_BYTES] for peer in absent[:_LOOKED_AT]})

    try:
        with contextlib.closing(_callers(listener, token, deadline, look_for_ended)) as callers:
            while len(sockets) < size - 1:
                connection, peer, segment = next(callers)
                if segment is not None:  # an allranks rank does not send one
                    segment.close()
                if not 0 < peer < size or peer in sockets:
                    connection.close()
                    continue
                sockets[peer] = connection
                # At least 1 ms: a timeout of 0 would make the socket nonblocking.
                connection.settimeout(max(0.001, deadline - time.monotonic()))
                _send(connection, token, 0, memory)
    except JoinError:  # it is an OSError, too
        raise
    except OSError as error:
        missing = [r for r in range(1, size) if r not in sockets]
        why = "in time" if isinstance(error, builtins.TimeoutError) else f"({error.strerror})"
        raise JoinError(
            f"rank 0: {_unreached(missing, list(sockets))} {why}.\n"
            "  If one of these ranks exited while connecting, check the end of its output."
        ) from error


def _fetch(rank: int, record: bytes, timeout_s: float) -> tuple[Socket, Descriptor]:
    """Connect with the first rank. Return the connection and the memory. Called on the other ranks."""
    name, token = record[:_NAME_BYTES], record[_NAME_BYTES:OFFER_BYTES]
    connection = Socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        connection.settimeout(timeout_s)
        connection.connect(_address(name))
        # After the rank has exited, a process of another user can take over its abstract name.
        _check_owner(connection, rank, 0)
        connection.sendall(_HELLO.pack(token, rank))
        other, memory = _receive(connection, token)
    except JoinError:  # it is an OSError, too
        connection.close()
        raise
    except OSError as error:
        connection.close()
        raise JoinError(
            f"rank {rank}: cannot create the group: rank 0 did not send the shared memory ({error}).\n"
            "  If rank 0 exited while connecting, check the end of its output."
        ) from error
    except BaseException:
        connection.close()
        raise
    if other != 0 or memory is None:
        connection.close()
        raise JoinError(
            f"rank {rank}: cannot create the group: rank 0 closed its connection.\n  Check the end of its output."
        )
    return connection, memory


def _check_owner(connection: Socket, number: int, other: int) -> None:
    # The kernel reports the user, so the other process cannot claim another one.
    _, uid = unix_peer(connection)
    if uid != os.geteuid():
        raise JoinError(
            f"rank {number}: the process at the address of rank {other} runs as user {uid}, "
            f"but this process runs as user {os.geteuid()}.\n  Run all ranks of a host as the same user."
        )


def _agree(number: int, sockets: Collection[Socket], deadline: float, last: bool = False) -> None:
    """Return when every rank has called this. ``last``: the other ranks are connected with this rank only."""
    # The first rank replies only after it has a confirmation of every rank. A reply therefore means that all are ready.
    if not last:
        for connection in sockets:
            connection.sendall(b"!")
    for connection in sockets:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        if connection.recv(1) != b"!":
            raise JoinError(
                f"rank {number}: another rank closed its connection while the ranks were connecting.\n  {_OTHERS}"
            )
    if last:
        for connection in sockets:
            connection.sendall(b"!")


def _check_there(number: int, names: Mapping[int, bytes]) -> None:
    """Raise if a rank has closed its listener, which it does not do before all ranks are connected."""
    for other, name in names.items():
        # Nonblocking: a full backlog gives EAGAIN, which shows that the rank exists.
        with Socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK) as probe:
            if probe.connect_ex(_address(name)) == errno.ECONNREFUSED:
                raise JoinError(
                    f"rank {number}: rank {other} exited while the ranks were connecting.\n"
                    "  Check the end of its output."
                )


def _callers(
    listener: Socket, token: bytes, deadline: float, look: Callable[[], None]
) -> Generator[tuple[Socket, int, Descriptor | None], None, None]:
    """Yield the peers that connect and have the token: the connection, the rank, and the segment if it sent one.

    Other peers are dropped: those of another user immediately, those that send no data at the end. No peer delays
    another one. While no peer connects, ``look`` is called at intervals.

    Raises:
        TimeoutError: The deadline has passed.
    """
    silent: set[Socket] = set()
    listener.setblocking(False)
    selector = selectors.PollSelector()  # it uses no descriptor, which a forked child would inherit
    selector.register(listener, selectors.EVENT_READ)
    try:
        while time.monotonic() < deadline:
            # An interval without a new connection, not a fixed one: ranks that connect continuously are not probed.
            ready = selector.select(min(max(0.0, deadline - time.monotonic()), _LOOK_S))
            if not ready:
                look()
            for key, _ in ready:
                connection = key.fileobj
                assert isinstance(connection, Socket)
                if connection is listener:
                    if (caller := _accepted(listener)) is not None:
                        silent.add(caller)
                        selector.register(caller, selectors.EVENT_READ)
                    continue
                # Before the connection is handed over or closed: the selector must not poll a number that may be
                # reused.
                selector.unregister(connection)
                silent.remove(connection)
                peer, segment = _receive(connection, token)
                if peer >= 0:
                    yield connection, peer, segment
                else:
                    connection.close()
        # The built-in error: allranks's own TimeoutError is another class.
        raise builtins.TimeoutError
    finally:
        for connection in silent:
            connection.close()


def _accepted(listener: Socket) -> Socket | None:
    """Return the next connection if it belongs to this user, else None."""
    try:
        connection, _ = listener.accept()
    except (BlockingIOError, ConnectionAbortedError):  # the peer disconnected before the accept
        return None
    # Another user's process can connect to an abstract socket, which has no file permissions.
    if unix_peer(connection)[1] != os.geteuid():
        connection.close()
        return None
    connection.setblocking(False)
    return connection


def _send(connection: Socket, token: bytes, rank: int, segment: Descriptor) -> None:
    socket.send_fds(connection, [_HELLO.pack(token, rank)], [segment.fileno()])


def _receive(connection: Socket, token: bytes) -> tuple[int, Descriptor | None]:
    """Return the rank and the segment, if any, of a peer that has the token. Return (-1, None) for any other peer."""
    timeout = connection.gettimeout()
    if timeout != 0:  # wait without `guard`, which blocks forks: the wait may be long
        poll = select.poll()
        poll.register(connection, select.POLLIN)
        if not poll.poll(None if timeout is None else timeout * 1000):
            raise builtins.TimeoutError("timed out")
    try:
        # No fork between the receipt of a descriptor and its registration: the child would keep the memory.
        with guard:
            message, fds, _, _ = socket.recv_fds(connection, _HELLO.size, 1, socket.MSG_CMSG_CLOEXEC)
            segments = [Descriptor(fd) for fd in fds]
    except (BlockingIOError, ConnectionError):
        return -1, None
    if len(message) == _HELLO.size:
        given, rank = _HELLO.unpack(message)
        # A comparison in constant time does not reveal how many bytes of a guessed token are right.
        if secrets.compare_digest(given, token):
            return rank, segments[0] if segments else None
    # The peer has no valid token, so its descriptor would otherwise leak.
    for segment in segments:
        segment.close()
    return -1, None
