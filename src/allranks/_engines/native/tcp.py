"""Connects ranks of the native engine that are on different hosts.

A process that is in groups across hosts has one `ConnectionServer` for all of them. It is a thread that listens only on
the addresses that its host publishes. It also creates the connections that the core requests. The subject of the
handshake (`_net.handshake`) names the group, the two ranks and the purpose, so a connection cannot be mistaken for
another one.

Either side may connect. If both do at the same time, the connection of the higher rank is accepted and the other one is
declined. The server waits for a stopped rank. It gives up a rank whose host does not answer, or whose port is closed.
Data sent after the handshake is not encrypted.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import os
import select
import selectors
import socket
import struct
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from allranks import _core
from allranks._base.errors import AllranksError, ConfigError, JoinError, rank_list
from allranks._base.forks import Descriptor, Socket, guard
from allranks._base.system import reason, refusal
from allranks._base.threads import Daemon
from allranks._cluster.network import listen, nearest_first
from allranks._engines.native.window_connections import WindowConnections
from allranks._net.admission import Admission, UnprovedPeer
from allranks._net.frames import FrameDecoder, TlsError, WireError, pack_frame
from allranks._net.handshake import DECLINED, HANDSHAKE_FRAME, PROVED, ClientHandshake, Protocol, ServerHandshake
from allranks._net.sockets import check_connected, keep_alive

if TYPE_CHECKING:
    from allranks._rendezvous.rendezvous import Member

__all__ = [
    "COLLECTIVE",
    "HEARTBEAT",
    "MESSAGE",
    "WINDOW",
    "PeerConnections",
    "ConnectionSubject",
    "ConnectionServer",
    "group_key",
    "group_id",
]

COLLECTIVE, MESSAGE, HEARTBEAT, WINDOW = range(4)
"""The purpose of a connection (core/channel/net.h). The core does not know the last one, which ``window`` uses."""

_NAME = 16
_HELLO = struct.Struct(f"!{_NAME}sIIB")
_ASK = struct.Struct("=III")  # number of the group, rank, kind of connection
_CLOSE = 99  # used instead of a kind
# Seconds for one connection attempt, without which a filtered port would delay the other addresses for minutes
_CONNECT_S = 3.0
_GIVE_UP_S = 10.0  # seconds without an answer after which a rank is given up
_ASKED_S = 0.3  # seconds for the reply whether a rank is present
# Seconds between two rounds over all addresses. The pause grows by half up to the longest pause.
_PAUSE_S = 0.02
_LONGEST_PAUSE_S = 0.2
# Seconds. kUnreachableMs in core/channel/net.cc, which survives a network cut of 7 s (docs/decisions/028)
_LOST_AFTER_S = 15

_FABRIC_ADVICE = "Run `allranks doctor` on both hosts, or set ALLRANKS_FABRIC=off to use TCP."

PROTOCOL = Protocol(b"allranks-channel/", b"5", _HELLO.size)
"""The version covers the handshake, and the data that the core sends (core/channel, collective and p2p)."""

Target = tuple[tuple[str, ...], int]
"""Addresses and port."""


# --- the subject of a connection -------------------------------------------------------------------------------


class ConnectionSubject(NamedTuple):
    """The subject of a connection.

    Attributes:
        group: Identifier of the group, see ``group_id``.
        from_: The rank that connects.
        to: The rank that it connects to.
        kind: COLLECTIVE, MESSAGE, HEARTBEAT or WINDOW.
    """

    group: bytes
    from_: int
    to: int
    kind: int

    def pack(self) -> bytes:
        """Return the bytes that the handshake proves."""
        return _HELLO.pack(*self)

    @classmethod
    def unpack(cls, subject: bytes) -> ConnectionSubject:
        """Return the subject from its bytes, which have the right size."""
        return cls(*_HELLO.unpack(subject))


def group_key(secret: bytes, token: bytes) -> bytes:
    """Return the key that the ranks of one group prove to have."""
    return hmac.digest(secret, b"allranks-channel|" + token, "sha256")


def group_id(token: bytes) -> bytes:
    """Return the identifier of the group, which is sent before the key is proved."""
    return hashlib.sha256(b"allranks-circle|" + token).digest()[:_NAME]


# --- a group ---------------------------------------------------------------------------------------------------


class PeerConnections:
    """The connections of a group with other hosts, in this process.

    Attributes:
        number: The number of the group in the core.
        comm: The communicator that takes over its connections. None while the group is created.
        windows: Takes over the connections of windows.
        troubles: Why there is no connection with a rank that was given up.
    """

    def __init__(
        self,
        server: ConnectionServer,
        group_name: str,
        rank: int,
        members: Sequence[Member],
        targets: Sequence[Target | None],
        secret: bytes,
        token: bytes,
    ) -> None:
        self.comm: _core.Comm | None = None
        self.windows = WindowConnections(group_name, rank, lambda peer: server.ask(self.number, peer, WINDOW))
        self.troubles: dict[int, str] = {}
        self._server = server
        self.rank = rank
        self._members = members
        self.targets = targets
        self.key = group_key(secret, token)
        self.name = group_id(token)
        self.refusals: dict[str, str] = {}
        self.heartbeats: dict[int, Socket] = {}
        self.open: set[tuple[int, int]] = set()
        self.failed: AllranksError | None = None
        self.changed = threading.Condition()
        # Last: from here on, the server's thread may use this object.
        self.number = server.enter(self)

    @property
    def asking_pipe(self) -> int:
        """The pipe to which the core writes the connections that it needs."""
        return self._server.asking_pipe

    def connect_heartbeats(self, peers: Sequence[int], timeout_s: float) -> list[Socket | None]:
        """Connect with the first ranks of other hosts.

        Returns:
            The connections by rank, None for other ranks. Empty if there are no peers.

        Raises:
            JoinError: A peer could not be reached in time.
            SecretError: A peer has another secret.
        """
        if not peers:
            return []
        deadline = time.monotonic() + timeout_s
        for peer in peers:
            # The higher rank of a pair connects, and the lower rank waits for it. Two connections would need a
            # tie-break.
            if peer < self.rank:
                self._server.ask(self.number, peer, HEARTBEAT)
        with self.changed:
            while (missing := [p for p in peers if p not in self.heartbeats]) and self.failed is None:
                if not self.changed.wait(max(deadline - time.monotonic(), 0.001)) and time.monotonic() >= deadline:
                    break
            if self.failed is not None:
                raise self.failed
            if missing:
                raise JoinError(self._who_is_missing(missing, timeout_s))
            # Removed here, so that `close` does not close connections that belong to the core.
            return [self.heartbeats.pop(r) if r in peers else None for r in range(len(self._members))]

    def _who_is_missing(self, missing: list[int], timeout_s: float) -> str:
        me = self._members[self.rank]
        tried = "".join(f"\n  {self.troubles[p]}" for p in missing if p in self.troubles)
        refused = "".join(f"\n  {line}" for line in self.refusals.values())
        return (
            f"rank {self.rank} (host {me.host}): {rank_list(missing)}"
            f" ({', '.join(self._members[p].host for p in missing[:4])}) did not connect in {timeout_s:.1f} s. This"
            f" rank listened on port {self._server.port} of {', '.join(me.addresses)}.{tried}{refused}\n"
            "  Check that they can reach one of these addresses, and that no firewall blocks ranks. Set ALLRANKS_IFACE"
            " to choose the interface."
        )

    def trouble_with(self, peer: int) -> str | None:
        """Return why there is no connection with a rank, if the reason is known."""
        if peer in self.troubles:
            return self.troubles[peer]
        comm = self.comm
        error = comm.fabric_error(peer) if comm is not None and peer >= 0 else ""
        return f"the fabric reported an error ({error}).\n  {_FABRIC_ADVICE}" if error else None

    def note_trouble(self, peer: int, port: int, addresses: Sequence[str], seconds: float, last: str) -> None:
        """Keep the reason why a rank cannot be reached."""
        self.troubles[peer] = (
            f"no connection with rank {peer} (host {self._members[peer].host}) for {seconds:.1f} s; tried port {port}"
            f" of {', '.join(addresses) or 'no address'} (last: {last}).\n"
            "  Check that this host can reach one of these addresses, and that no firewall blocks ranks. Set"
            " ALLRANKS_IFACE to choose the interface."
        )

    def find_gone(self, ranks: Sequence[int]) -> list[int]:
        """Return the ranks, of these ranks on other hosts, that no longer listen: they have exited, or left the group.

        The host then refuses a connection, at each of its addresses. If a host does not reply soon, the state is
        unknown, and the rank is not returned.
        """
        calls = []
        for rank in ranks:
            addresses, port = self.targets[rank] or ((), 0)
            calls += [(rank, _begun_call(address, port)) for address in addresses]
        try:
            deadline = time.monotonic() + _ASKED_S
            waiting = {call.fileno(): call for _, call in calls}
            polled = select.poll()
            for number in waiting:
                polled.register(number, select.POLLOUT)
            # One refused address is not enough: a rank is gone only if each of its addresses refuses.
            refused = set()
            while waiting and (left_s := deadline - time.monotonic()) > 0:
                for number, _ in polled.poll(left_s * 1000):
                    polled.unregister(number)
                    call = waiting.pop(number)
                    if call.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == errno.ECONNREFUSED:
                        refused.add(call)
        finally:
            for _, call in calls:
                call.close()
        # No reply counts as present: the process may be stopped, or a firewall may drop the probe.
        there = {rank for rank, call in calls if call not in refused}
        return sorted({rank for rank, _ in calls} - there)

    # Called by the thread of the server.

    def takes(self, peer: int, kind: int) -> bool:
        """Return whether such a connection can be used now."""
        # Until the core has the communicator, only heartbeats can be kept. The peer retries other connections.
        return (
            peer < len(self.targets) and self.targets[peer] is not None and (kind == HEARTBEAT or self.comm is not None)
        )

    def give(self, peer: int, kind: int, connection: Socket, greeting: bytes) -> None:
        """Hand a connection over to the group."""
        # Before the handover: a second connection with the same purpose is declined from here on.
        self.open.add((peer, kind))
        if kind == HEARTBEAT:
            # The verdict fits into the empty buffer of a new connection, so this send does not block.
            if greeting:
                with suppress(OSError):  # the connection has closed, which the core detects
                    connection.send(greeting)
            with self.changed:
                self.heartbeats[peer] = connection
                self.changed.notify_all()
            return
        if kind == WINDOW:
            self.windows.take(peer, connection, greeting)
            return
        # Read once: `close` may set it to None in another thread.
        comm = self.comm
        if comm is None:  # the group was closed before
            connection.close()
        else:
            # The core sends the greeting itself, so that its first bytes cannot overtake the verdict.
            try:
                with guard:
                    comm.adopt(peer, kind, connection.detach(), greeting.decode())
            except _core.Failure as failure:  # the fabric refuses the connection
                self.troubles[peer] = f"its connection cannot use the fabric: {failure.args[9]}.\n  {_FABRIC_ADVICE}"
                comm.give_up(peer)

    def give_up(self, peer: int, kind: int, error: AllranksError | None) -> None:
        """Report that there will be no connection with a rank."""
        if kind == HEARTBEAT:
            with self.changed:
                self.failed = error
                self.changed.notify_all()
            return
        if error is not None:
            self.troubles[peer] = str(error)
        if kind == WINDOW:
            self.windows.give_up(peer, self.troubles.get(peer, "no answer"))
            return
        if (comm := self.comm) is not None:
            comm.give_up(peer)

    def close(self) -> None:
        """Release the group, which was closed or could not be created. Idempotent. A forked child does not call it."""
        # First, so that the server's thread adopts no further connection for this group.
        self._server.leave(self)
        self.comm = None
        self.windows.close()
        for connection in self.heartbeats.values():
            connection.close()
        self.heartbeats.clear()


# --- connections in progress --------------------------------------------------------------------------------------


class _Dial:
    """A requested connection. It tries one address after the other until one leads to the rank."""

    connection: Socket | None = None  # None: waiting for the next attempt
    handshake: ClientHandshake
    decoder: FrameDecoder

    def __init__(self, group: PeerConnections, peer: int, kind: int) -> None:
        target = group.targets[peer]
        assert target is not None
        self.group, self.peer, self.kind = group, peer, kind
        self.addresses, self.port = nearest_first(target[0]), target[1]
        # The clock of _GIVE_UP_S begins at the last answer, not at the request.
        self.began = self.answered = time.monotonic()
        self.next = 0  # index of the address
        self.until: float | None = self.began  # end of the present state
        self.pause_s = _PAUSE_S
        self.connected = self.proved = False
        self.trouble = "it publishes no address"

    @property
    def address(self) -> str:
        return self.addresses[self.next % len(self.addresses)]


# --- the server ------------------------------------------------------------------------------------------------


class ConnectionServer:
    """Accepts connections of ranks on other hosts, and connects to them.

    Attributes:
        port: The port, the same on all addresses.
    """

    _all: ClassVar[dict[tuple[str, ...], ConnectionServer]] = {}
    _guard = threading.RLock()  # reentrant: a signal handler may leave a group while its thread enters one

    @classmethod
    def of(cls, addresses: Sequence[str]) -> ConnectionServer:
        """Return the server on these addresses. Open it if it does not exist. The caller later calls ``let_go``.

        Raises:
            ConfigError: There is no address, or none on which the process can listen.
        """
        with cls._guard:
            found = cls._all.get(tuple(addresses))
            if found is None:
                found = cls._all[tuple(addresses)] = cls(tuple(addresses))
            found._users += 1
            return found

    def __init__(self, addresses: tuple[str, ...]) -> None:
        if not addresses:
            raise ConfigError(
                f"host {socket.gethostname()} has no network address that other hosts could reach (loopback and bridges"
                " of containers do not count).\n  Set the interface, for example ALLRANKS_IFACE=eth0."
            )
        self._addresses = addresses
        self._users = 0
        self._groups: dict[int, PeerConnections] = {}
        self._made = 0
        self._dials: dict[_Dial, None] = {}
        self._stopping = False
        self._listeners = _listen(addresses)
        self.port: int = self._listeners[0].getsockname()[1]
        # Nonblocking: the server's thread must not wait for requests, and a core thread must not wait for the server.
        self._requests, self._asking = map(Descriptor, os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK))
        # poll, unlike epoll, has no descriptor of its own that a forked child would inherit.
        self._selector = selectors.PollSelector()
        self._admission = Admission(
            self._selector,
            lambda: ServerHandshake(PROTOCOL, self._key_of),
            self._admit,
            self._refuse,
            f"port {self.port}",
        )
        for listener in self._listeners:
            self._admission.listen(listener)
        self._selector.register(self._requests, selectors.EVENT_READ, self._take_requests)
        # The last step: the thread uses all of the above.
        self._thread = Daemon(target=self._run, name="allranks-connections")
        self._thread.start()

    def let_go(self) -> None:
        """Release the server. Close it if there is no other user."""
        with self._guard:
            self._users -= 1
            if self._users > 0:
                return
            del self._all[self._addresses]
        # Set before the request, which only wakes the thread from its selector. Groups are numbered from 1.
        self._stopping = True
        self.ask(0, 0, _CLOSE)
        # Outside of the lock, which other threads need to open a server. Descriptors are closed after their last user.
        self._thread.join()
        self._close_descriptors()

    @classmethod
    def forget_all(cls) -> None:
        """Forget all servers in a forked child, which has none of their threads."""
        # A thread of the parent may have held the lock during the fork. No thread of the child releases it.
        cls._guard = threading.RLock()
        # The parent's objects are dropped without `let_go`: their thread, which it would join, does not exist here.
        cls._all.clear()

    @property
    def asking_pipe(self) -> int:
        """The pipe to which a group's number, a rank and a kind are written to request a connection."""
        return self._asking.fileno()

    def _close_descriptors(self) -> None:
        for listener in self._listeners:
            listener.close()
        self._requests.close()
        self._asking.close()

    def enter(self, group: PeerConnections) -> int:
        """Register a group. Return its number."""
        with self._guard:
            self._made += 1
            self._groups[self._made] = group
            return self._made

    def leave(self, group: PeerConnections) -> None:
        """Remove a group."""
        with self._guard:
            known = self._groups.pop(group.number, None)
        # The pop makes this idempotent: `close` may run a second time, and must not release the server twice.
        if known is not None:
            self.ask(group.number, 0, _CLOSE)
            self.let_go()

    def ask(self, number: int, peer: int, kind: int) -> None:
        """Request a connection."""
        # Shorter than PIPE_BUF, so the kernel writes it atomically, also beside the threads of the core.
        os.write(self.asking_pipe, _ASK.pack(number, peer, kind))

    # The following methods run in the thread of the server.

    def _run(self) -> None:
        while not self._stopping:
            now = time.monotonic()
            marks = [d.until for d in self._dials if d.until is not None]
            if (deadline := self._admission.deadline()) is not None:
                marks.append(deadline)
            ready = self._selector.select(max(min(marks) - now, 0.0) if marks else None)
            # The listeners are polled last, so that established candidates are not evicted by new ones.
            for key, events in self._admission.in_order(ready):
                key.data(events)
            now = time.monotonic()
            self._admission.expire(now)
            # A copy of the list, because both branches may remove a dial.
            for dial in [d for d in self._dials if d.until is not None and now >= d.until]:
                if dial.connection is None:
                    self._start(dial)
                else:
                    self._fail(dial, "no answer")
        self._admission.close()
        for dial in list(self._dials):
            self._end(dial)

    def _take_requests(self, _: object) -> None:
        # A whole number of records: writes are atomic, so a read never splits one.
        data = os.read(self._requests.fileno(), 512 * _ASK.size)
        for number, peer, kind in _ASK.iter_unpack(data):
            if kind == _CLOSE:
                for dial in [d for d in self._dials if d.group.number == number]:
                    self._end(dial)
                continue
            group = self._groups.get(number)
            # An open or pending connection serves the request: both sides may have requested it.
            if group is not None and (peer, kind) not in group.open and self._dial_of(group, peer, kind) is None:
                dial = _Dial(group, peer, kind)
                self._dials[dial] = None
                self._start(dial)

    def _dial_of(self, group: PeerConnections, peer: int, kind: int) -> _Dial | None:
        return next((d for d in self._dials if d.group is group and (d.peer, d.kind) == (peer, kind)), None)

    # Connections from other ranks.

    def _group_of(self, hello: ConnectionSubject) -> PeerConnections | None:
        """Return the group to which this connection belongs, if it can be used now."""
        # A copy: other threads add and remove groups.
        for group in list(self._groups.values()):
            if group.name == hello.group and group.rank == hello.to and group.takes(hello.from_, hello.kind):
                return group
        return None  # not created yet, or left

    def _key_of(self, subject: bytes) -> bytes | None:
        group = self._group_of(ConnectionSubject.unpack(subject))
        # None makes the server reply UNKNOWN. The client then tries again, until this rank has created the group.
        return None if group is None else group.key

    def _admit(self, candidate: UnprovedPeer) -> None:
        hello = ConnectionSubject.unpack(candidate.handshake.subject)
        group = self._group_of(hello)
        if group is None:  # left since the handshake began
            candidate.sock.close()
            return
        peer, kind = hello.from_, hello.kind
        own = self._dial_of(group, peer, kind)
        # If both sides connect at the same time, the connection of the higher rank wins, as in BGP (RFC 4271, 6.8).
        # Both sides decide the same way without a message.
        if (peer, kind) in group.open or (own is not None and group.rank > peer):
            candidate.send(DECLINED)
            candidate.sock.close()
            return
        if own is not None:
            # The connection of the peer replaces it. The peer declines the own attempt by the same rule.
            self._end(own)
        assert isinstance(candidate.sock, Socket)
        group.give(peer, kind, candidate.sock, pack_frame(PROVED))

    def _refuse(self, name: str, handshake: ServerHandshake | None, error: ConfigError | WireError) -> None:
        # Other errors are noise of strangers such as port scanners. These two name a mistake of the user.
        if not isinstance(error, ConfigError | TlsError):
            return
        group = self._group_of(ConnectionSubject.unpack(handshake.subject)) if handshake and handshake.subject else None
        for each in [group] if group else list(self._groups.values()):
            each.refusals[name] = f"{name} was refused: {error}"

    # Connections to other ranks.

    def _start(self, dial: _Dial) -> None:
        if not dial.addresses:
            self._fail(dial, dial.trouble)
            return
        family = socket.AF_INET6 if ":" in dial.address else socket.AF_INET
        try:
            dial.connection = Socket(family, socket.SOCK_STREAM)
            # Before it connects: a socket that BBR has paced once stays paced (docs/decisions/042).
            _do_without_pacing(dial.connection)
        except OSError as error:
            self._fail(dial, reason(error))
            return
        dial.connection.setblocking(False)
        dial.connected = dial.proved = False
        dial.until = time.monotonic() + _CONNECT_S
        # The usual case: a nonblocking connect is in progress.
        with suppress(BlockingIOError):
            try:
                dial.connection.connect((dial.address, dial.port))
            except BlockingIOError:
                raise
            except OSError as error:
                self._fail(dial, reason(error))
                return
        self._selector.register(dial.connection, selectors.EVENT_WRITE, lambda _: self._go_on(dial))

    def _go_on(self, dial: _Dial) -> None:
        connection = dial.connection
        # An earlier event of the same round has ended this dial.
        if dial not in self._dials or connection is None:
            return
        try:
            if not dial.connected:
                self._begin(dial, connection)
                return
            while True:
                # No byte after the verdict is read: it belongs to the core.
                dial.decoder.feed(_some(connection, dial.decoder.missing))
                if (frame := dial.decoder.next()) is None:
                    continue
                if dial.proved:
                    self._receive_verdict(dial, connection, frame)
                    return
                connection.sendall(pack_frame(dial.handshake.prove(frame)))
                dial.handshake.check_server()
                dial.proved = True
        except BlockingIOError:
            return
        except ConfigError as error:
            # A wrong secret or version does not become right by another attempt.
            self._end(dial)
            where = f"rank {dial.group.rank}: rank {dial.peer} ({dial.address})"
            dial.group.give_up(dial.peer, dial.kind, type(error)(f"{where}: {error}"))
        except (OSError, WireError) as error:
            self._fail(dial, reason(error))

    def _begin(self, dial: _Dial, connection: Socket) -> None:
        if trouble := connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            raise OSError(trouble, os.strerror(trouble))
        check_connected(connection)
        # There is no time limit from here on, because the other rank may be stopped. A lost connection ends the
        # attempt.
        keep_alive(connection, _LOST_AFTER_S, must_read=False)
        dial.connected, dial.until = True, None
        hello = ConnectionSubject(dial.group.name, dial.group.rank, dial.peer, dial.kind)
        dial.handshake = ClientHandshake(PROTOCOL, dial.group.key, hello.pack())
        dial.decoder = FrameDecoder(HANDSHAKE_FRAME)
        connection.sendall(pack_frame(dial.handshake.begin()))
        self._selector.modify(connection, selectors.EVENT_READ, lambda _: self._go_on(dial))

    def _receive_verdict(self, dial: _Dial, connection: Socket, answer: bytes) -> None:
        if answer == DECLINED:  # the other side's own connection exists or is in progress
            self._end(dial)
            return
        if answer != PROVED:
            raise WireError("its reply does not follow allranks's protocol")
        self._selector.unregister(connection)
        del self._dials[dial]
        # The group was closed during the handshake.
        if self._groups.get(dial.group.number) is not dial.group:
            connection.close()
            return
        dial.group.give(dial.peer, dial.kind, connection, b"")

    def _fail(self, dial: _Dial, trouble: str) -> None:
        """Handle a failed attempt: try again after a pause, or give up."""
        now = time.monotonic()
        where = f"{dial.address}: " if dial.addresses else ""
        dial.trouble = f"{where}{trouble}"
        # An answer, even an unsuccessful one, shows that the host is alive. The rank may be stopped, or not ready yet.
        if dial.connected:
            dial.answered = now
        self._hang_up(dial)
        dial.next += 1
        dial.group.note_trouble(dial.peer, dial.port, dial.addresses, now - dial.began, dial.trouble)
        # A heartbeat is not given up here: `PeerConnections.connect_heartbeats` has its own timeout.
        if dial.kind != HEARTBEAT and now - dial.answered > _GIVE_UP_S and dial.next >= len(dial.addresses):
            del self._dials[dial]
            dial.group.give_up(dial.peer, dial.kind, None)
            return
        whole_round = not dial.addresses or dial.next % len(dial.addresses) == 0
        dial.until = now + (dial.pause_s if whole_round else 0.0)
        dial.pause_s = min(dial.pause_s * 1.5, _LONGEST_PAUSE_S)

    def _hang_up(self, dial: _Dial) -> None:
        if dial.connection is not None:
            # Not registered if `connect` failed immediately.
            with suppress(KeyError):
                self._selector.unregister(dial.connection)
            # After `unregister`: the selector must not poll a number that may be reused.
            dial.connection.close()
            dial.connection = None

    def _end(self, dial: _Dial) -> None:
        self._hang_up(dial)
        del self._dials[dial]


def _listen(addresses: Sequence[str]) -> list[socket.socket]:
    def prepare(listener: socket.socket) -> None:
        listener.setblocking(False)
        # Linux passes the congestion control of a listener on to the sockets that it accepts.
        _do_without_pacing(listener)

    try:
        return listen(addresses, 0, socket.SOMAXCONN, prepare)
    except OSError as error:
        what = f"host {socket.gethostname()} cannot listen on {', '.join(addresses)}"
        raise ConfigError(refusal(what, error)) from None


def _begun_call(address: str, port: int) -> Socket:
    """Return a socket that has begun to connect to an address."""
    call = Socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    call.setblocking(False)
    with suppress(OSError):  # it is in progress, or has failed, which the state of the socket shows
        call.connect((address, port))
    return call


def _some(connection: socket.socket, most: int) -> bytes:
    data = connection.recv(most)
    if not data:
        raise ConnectionResetError(errno.ECONNRESET, "it closed the connection")
    return data


os.register_at_fork(after_in_child=ConnectionServer.forget_all)


def _do_without_pacing(connection: socket.socket) -> None:
    """Replace BBR on a socket that has not connected yet: a socket that it has paced once stays paced.

    On short paths, the timers of pacing cost more than pacing gains. On long paths, the core restores BBR.
    """
    # 16 bytes is TCP_CA_NAME_MAX of Linux.
    if connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0") != b"bbr":
        return
    for name in (b"cubic", b"reno"):
        with suppress(OSError):  # not every user may select every algorithm
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name)
            return
