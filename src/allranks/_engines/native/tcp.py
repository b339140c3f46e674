"""Connects ranks of the native engine that are on different hosts.

A process that is in groups which span hosts has one `ConnectionServer` for all of them: a thread that listens on the
addresses which its host publishes, and on no others. It also makes the connections that the core requests. Both sides
prove that they have the job's secret. The proof names the group, the two ranks and the purpose, so that no connection
can be taken for another. Strangers neither delay a rank nor use much of its memory: at most 64 are served at a time,
for 5 s, with a quarter of a kilobyte each.

Either side may connect. If both do at once, the connection of the higher rank is taken and the other one is refused.
A rank that is stopped is waited for. One whose host does not answer, or where nobody listens, is given up.

What is sent afterwards is not encrypted.
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

from allranks._base.errors import AllranksError, ConfigError, JoinError, SecretError, rank_list
from allranks._base.forks import Descriptor, Socket, guard
from allranks._base.frames import pack_frame
from allranks._base.threads import Daemon
from allranks._cluster.network import listen, nearest_first
from allranks._store import reason
from allranks._store.wire import (
    GREETING_LIMIT,
    GREETING_S,
    KNOCK,
    NONCE,
    SHARE_SECRET,
    FrameDecoder,
    WireError,
)

if TYPE_CHECKING:
    from allranks import _core
    from allranks._rendezvous.rendezvous import Member

__all__ = [
    "COLLECTIVE",
    "HEARTBEAT",
    "MESSAGE",
    "PeerConnections",
    "Hello",
    "ConnectionServer",
    "group_key",
    "group_id",
    "greet",
    "proof",
]

COLLECTIVE, MESSAGE, HEARTBEAT = range(3)
"""What a connection is for (core/channel/net.h)."""

PROTOCOL = b"allranks-channel/3|"
"""Its number counts versions of the greeting, and of what the core sends (core/channel, collective and p2p)."""

_NAME = 16
_HELLO = struct.Struct(f"!{_NAME}sIIB")
_TAKEN, _TURNED_DOWN, _UNKNOWN = b"!", b"x", b"?"
_ASK = struct.Struct("=III")  # number of the group, rank, kind
_CLOSE = 99  # in place of a kind
_STRANGERS = 64
_CONNECT_S = 3.0
_GIVE_UP_S = 10.0
_ASKED_S = 0.3  # for an answer whether a rank is there
_PAUSE_S = 0.02
_LONGEST_PAUSE_S = 0.2

Target = tuple[tuple[str, ...], int]
"""Addresses and port."""


# --- the greeting: pure ----------------------------------------------------------------------------------------


class Hello(NamedTuple):
    """What a connection is for. It is sent first, and is part of what both sides prove.

    Attributes:
        group: the group, see ``group_id``.
        from_: the rank that connects.
        to: the rank that is meant.
        kind: what for.
    """

    group: bytes
    from_: int
    to: int
    kind: int


def group_key(secret: bytes, token: bytes) -> bytes:
    """The key that the ranks of one group prove to have."""
    return hmac.digest(secret, b"allranks-channel|" + token, "sha256")


def group_id(token: bytes) -> bytes:
    """The identifier of the group, which is sent before anything is proved."""
    return hashlib.sha256(b"allranks-circle|" + token).digest()[:_NAME]


def greet(hello: Hello, nonce: bytes) -> bytes:
    """The first frame, of the side that connects. The second is a nonce and a proof, the third a proof."""
    return PROTOCOL + _HELLO.pack(*hello) + nonce + KNOCK


def read_greeting(frame: bytes) -> tuple[Hello, bytes]:
    """Its hello and nonce.

    Raises:
        WireError: not an allranks rank.
        ConfigError: one of another version.
    """
    if not frame.startswith(PROTOCOL[:-2]):
        raise WireError("not an allranks rank")
    if not frame.startswith(PROTOCOL):
        raise ConfigError("it has another version of allranks: install one on all hosts")
    if len(frame) != len(PROTOCOL) + _HELLO.size + NONCE + len(KNOCK):
        raise WireError("no greeting of a rank")
    return Hello(*_HELLO.unpack_from(frame, len(PROTOCOL))), frame[len(PROTOCOL) + _HELLO.size : -len(KNOCK)]


def proof(key: bytes, role: bytes, hello: Hello, nonces: bytes) -> bytes:
    """Proves that one has the key. It holds for this connection and this role only."""
    return hmac.digest(key, PROTOCOL + role + b"|" + _HELLO.pack(*hello) + nonces, "sha256")


# --- a group ---------------------------------------------------------------------------------------------------


class PeerConnections:
    """The connections of a group with other hosts, in this process.

    Attributes:
        number: of the group in the core.
        comm: what takes over its connections; None while the group is made.
        troubles: why there is no connection with a rank that was given up.
    """

    def __init__(
        self,
        server: ConnectionServer,
        rank: int,
        members: Sequence[Member],
        targets: Sequence[Target | None],
        secret: bytes,
        token: bytes,
    ) -> None:
        self.comm: _core.Comm | None = None
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
        self.number = server.enter(self)

    @property
    def asking_pipe(self) -> int:
        """Where the core writes which connections it needs."""
        return self._server.asking_pipe

    def connect_heartbeats(self, peers: Sequence[int], timeout_s: float) -> list[Socket | None]:
        """Connects with the leaders of other hosts.

        Returns:
            The connections by rank, None of others; nothing where there are no peers.

        Raises:
            JoinError: one could not be reached in time.
            SecretError: one has another secret.
        """
        if not peers:
            return []
        deadline = time.monotonic() + timeout_s
        for peer in peers:
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
            return [self.heartbeats.pop(r) if r in peers else None for r in range(len(self._members))]

    def _who_is_missing(self, missing: list[int], timeout_s: float) -> str:
        me = self._members[self.rank]
        tried = "".join(f"\n  {self.troubles[p]}" for p in missing if p in self.troubles)
        refused = "".join(f"\n  {line}" for line in self.refusals.values())
        return (
            f"rank {self.rank} (host {me.host}): {rank_list(missing)}"
            f" ({', '.join(self._members[p].host for p in missing[:4])}) did not connect in {timeout_s:.1f} s. It"
            f" listened on port {self._server.port} of {', '.join(me.addresses)}.{tried}{refused}\n"
            "  Can they reach one of these addresses? A firewall between the hosts must let ranks connect;"
            " ALLRANKS_IFACE names the interface to use."
        )

    def note_trouble(self, peer: int, port: int, addresses: Sequence[str], seconds: float, last: str) -> None:
        """Keeps why a rank cannot be reached."""
        self.troubles[peer] = (
            f"no connection with rank {peer} (host {self._members[peer].host}) for {seconds:.1f} s; tried port {port}"
            f" of {', '.join(addresses) or 'no address'} (last: {last}).\n"
            "  Can this host reach one of these addresses? A firewall between the hosts must let ranks connect;"
            " ALLRANKS_IFACE names the interface to use."
        )

    def find_gone(self, ranks: Sequence[int]) -> list[int]:
        """Those of these ranks, of other hosts, where nobody listens any more: they have ended, or left the group.

        The host refuses a connection then, at each of its addresses. One that does not answer soon says nothing.
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
        there = {rank for rank, call in calls if call not in refused}
        return sorted({rank for rank, _ in calls} - there)

    # Of the server's thread.

    def takes(self, peer: int, kind: int) -> bool:
        """Whether such a connection can be used now."""
        return (
            peer < len(self.targets) and self.targets[peer] is not None and (kind == HEARTBEAT or self.comm is not None)
        )

    def give(self, peer: int, kind: int, connection: Socket, greeting: bytes) -> None:
        """Hands a connection over."""
        self.open.add((peer, kind))
        if kind == HEARTBEAT:
            if greeting:
                with suppress(OSError):  # it has ended, which the core detects
                    connection.send(greeting)
            with self.changed:
                self.heartbeats[peer] = connection
                self.changed.notify_all()
            return
        comm = self.comm
        if comm is None:  # closed meanwhile
            connection.close()
        else:
            with guard:
                comm.adopt(peer, kind, connection.detach(), greeting.decode())

    def give_up(self, peer: int, kind: int, error: AllranksError | None) -> None:
        """There will be no connection with a rank."""
        if kind == HEARTBEAT:
            with self.changed:
                self.failed = error
                self.changed.notify_all()
            return
        if error is not None:
            self.troubles[peer] = str(error)
        if (comm := self.comm) is not None:
            comm.give_up(peer)

    def close(self) -> None:
        """The group has ended, or was never made. Idempotent. A forked child does not call it."""
        self._server.leave(self)
        self.comm = None
        for connection in self.heartbeats.values():
            connection.close()
        self.heartbeats.clear()


# --- connections on their way -------------------------------------------------------------------------------------


class _Caller:
    """A connection whose rank is not known yet, or not proved."""

    group: PeerConnections | None = None
    hello: Hello
    expected: bytes

    def __init__(self, connection: Socket, name: str) -> None:
        self.connection = connection
        self.name = name
        self.since = time.monotonic()
        self.decoder = FrameDecoder(GREETING_LIMIT)


class _Dial:
    """A connection that is wanted, address after address until one leads to the rank."""

    connection: Socket | None = None  # None: pausing
    nonce: bytes
    decoder: FrameDecoder

    def __init__(self, group: PeerConnections, peer: int, kind: int) -> None:
        target = group.targets[peer]
        assert target is not None
        self.group, self.peer, self.kind = group, peer, kind
        self.addresses, self.port = nearest_first(target[0]), target[1]
        self.began = self.answered = time.monotonic()
        self.next = 0  # which address
        self.until: float | None = self.began  # of the present state
        self.pause_s = _PAUSE_S
        self.connected = self.proved = False
        self.trouble = "it publishes no address"

    @property
    def address(self) -> str:
        return self.addresses[self.next % len(self.addresses)]


# --- the server ------------------------------------------------------------------------------------------------


class ConnectionServer:
    """Accepts connections of ranks on other hosts, and makes connections with them.

    Attributes:
        port: the same on all addresses.
    """

    _all: ClassVar[dict[tuple[str, ...], ConnectionServer]] = {}
    _guard = threading.RLock()  # a signal handler may leave a group while its thread enters one

    @classmethod
    def of(cls, addresses: Sequence[str]) -> ConnectionServer:
        """The server on these addresses, which is opened if there is none. The caller calls ``let_go``.

        Raises:
            ConfigError: there is no address, or none can be listened on.
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
                " of containers do not count). Name an interface: ALLRANKS_IFACE=eth0"
            )
        self._addresses = addresses
        self._users = 0
        self._groups: dict[int, PeerConnections] = {}
        self._made = 0
        self._callers: dict[_Caller, None] = {}
        self._dials: dict[_Dial, None] = {}
        self._stopping = False
        self._listeners = _listen(addresses)
        self.port: int = self._listeners[0].getsockname()[1]
        self._requests, self._asking = map(Descriptor, os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK))
        self._selector = selectors.PollSelector()
        for listener in self._listeners:
            self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._requests, selectors.EVENT_READ, self._take_requests)
        self._thread = Daemon(target=self._run, name="allranks-connections")
        self._thread.start()

    def let_go(self) -> None:
        """Closes it, if nobody else uses it."""
        with self._guard:
            self._users -= 1
            if self._users > 0:
                return
            del self._all[self._addresses]
        self._stopping = True
        self.ask(0, 0, _CLOSE)
        self._thread.join()
        self._close_descriptors()

    @classmethod
    def forget_all(cls) -> None:
        """In a forked child, where there is no thread."""
        cls._guard = threading.RLock()
        cls._all.clear()

    @property
    def asking_pipe(self) -> int:
        """Where a group's number, a rank and a kind are written to have them connected."""
        return self._asking.fileno()

    def _close_descriptors(self) -> None:
        for listener in self._listeners:
            listener.close()
        self._requests.close()
        self._asking.close()

    def enter(self, group: PeerConnections) -> int:
        """A group is to be known here from now on. Returns its number."""
        with self._guard:
            self._made += 1
            self._groups[self._made] = group
            return self._made

    def leave(self, group: PeerConnections) -> None:
        """A group is no longer known here."""
        with self._guard:
            known = self._groups.pop(group.number, None)
        if known is not None:
            self.ask(group.number, 0, _CLOSE)
            self.let_go()

    def ask(self, number: int, peer: int, kind: int) -> None:
        """Wants a connection."""
        os.write(self.asking_pipe, _ASK.pack(number, peer, kind))

    # What follows is the thread's.

    def _run(self) -> None:
        while not self._stopping:
            now = time.monotonic()
            marks = [c.since + GREETING_S for c in self._callers]
            marks += [d.until for d in self._dials if d.until is not None]
            for key, _ in self._selector.select(max(min(marks) - now, 0.0) if marks else None):
                key.data(key.fileobj)
            now = time.monotonic()
            for caller in [c for c in self._callers if now - c.since > GREETING_S]:
                self._drop(caller)
            for dial in [d for d in self._dials if d.until is not None and now >= d.until]:
                if dial.connection is None:
                    self._start(dial)
                else:
                    self._fail(dial, "no answer")
        for caller in list(self._callers):
            self._drop(caller)
        for dial in list(self._dials):
            self._end(dial)

    def _take_requests(self, _: object) -> None:
        data = os.read(self._requests.fileno(), 512 * _ASK.size)
        for number, peer, kind in _ASK.iter_unpack(data):
            if kind == _CLOSE:
                for dial in [d for d in self._dials if d.group.number == number]:
                    self._end(dial)
                continue
            group = self._groups.get(number)
            if group is not None and (peer, kind) not in group.open and self._dial_of(group, peer, kind) is None:
                dial = _Dial(group, peer, kind)
                self._dials[dial] = None
                self._start(dial)

    def _dial_of(self, group: PeerConnections, peer: int, kind: int) -> _Dial | None:
        return next((d for d in self._dials if d.group is group and (d.peer, d.kind) == (peer, kind)), None)

    # Who connects to this process.

    def _accept(self, listener: Socket) -> None:
        try:
            connection, where = listener.accept()
        except OSError as error:  # gone again; or no descriptor is free, and some may be soon
            if error.errno in (errno.EMFILE, errno.ENFILE):
                time.sleep(_PAUSE_S)
            return
        connection.setblocking(False)
        if len(self._callers) >= _STRANGERS:
            self._drop(next(iter(self._callers)))
        caller = _Caller(connection, str(where[0]))
        self._callers[caller] = None
        self._selector.register(connection, selectors.EVENT_READ, lambda _: self._hear(caller))

    def _hear(self, caller: _Caller) -> None:
        if caller not in self._callers:
            return
        try:
            caller.decoder.feed(_some(caller.connection))
            while caller in self._callers and (frame := caller.decoder.next()) is not None:
                if caller.group is None:
                    self._answer(caller, frame)
                else:
                    self._check(caller, caller.group, frame)
        except BlockingIOError:
            return
        except ConfigError as error:  # another secret or version
            for group in [caller.group] if caller.group else list(self._groups.values()):
                group.refusals[caller.name] = f"{caller.name} was refused: {error}"
            self._drop(caller)
        except (OSError, WireError):
            self._drop(caller)

    def _answer(self, caller: _Caller, frame: bytes) -> None:
        hello, nonce = read_greeting(frame)
        for group in list(self._groups.values()):
            if group.name == hello.group and group.rank == hello.to and group.takes(hello.from_, hello.kind):
                break
        else:  # not made yet, or left
            caller.connection.sendall(_UNKNOWN)
            self._drop(caller)
            return
        mine = os.urandom(NONCE)
        caller.group, caller.hello = group, hello
        caller.expected = proof(group.key, b"client", hello, nonce + mine)
        caller.connection.sendall(pack_frame(PROTOCOL + mine + proof(group.key, b"server", hello, nonce + mine)))

    def _check(self, caller: _Caller, group: PeerConnections, frame: bytes) -> None:
        if not hmac.compare_digest(frame, caller.expected):
            raise SecretError(f"its secret differs from ours; {SHARE_SECRET}")
        peer, kind = caller.hello.from_, caller.hello.kind
        own = self._dial_of(group, peer, kind)
        if (peer, kind) in group.open or (own is not None and group.rank > peer):
            caller.connection.sendall(_TURNED_DOWN)
            self._drop(caller)
            return
        if own is not None:
            self._end(own)
        self._forget(caller)
        if self._groups.get(group.number) is not group:  # left meanwhile
            caller.connection.close()
            return
        group.give(peer, kind, caller.connection, _TAKEN)

    def _forget(self, caller: _Caller) -> None:
        self._selector.unregister(caller.connection)
        del self._callers[caller]

    def _drop(self, caller: _Caller) -> None:
        self._forget(caller)
        caller.connection.close()

    # To whom this process connects.

    def _start(self, dial: _Dial) -> None:
        if not dial.addresses:
            self._fail(dial, dial.trouble)
            return
        family = socket.AF_INET6 if ":" in dial.address else socket.AF_INET
        try:
            dial.connection = Socket(family, socket.SOCK_STREAM)
            _do_without_pacing(dial.connection)
        except OSError as error:
            self._fail(dial, reason(error))
            return
        dial.connection.setblocking(False)
        dial.connected = dial.proved = False
        dial.until = time.monotonic() + _CONNECT_S
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
        if dial not in self._dials or connection is None:
            return
        hello = Hello(dial.group.name, dial.group.rank, dial.peer, dial.kind)
        try:
            if not dial.connected:
                if trouble := connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    raise OSError(trouble, os.strerror(trouble))
                if connection.getsockname() == connection.getpeername():  # TCP's simultaneous open, with itself
                    raise ConnectionRefusedError(errno.ECONNREFUSED, "nobody listens there")
                # From here on no clock: it may be stopped, and the end of the connection is enough.
                _keep_alive(connection)
                dial.connected, dial.until = True, None
                dial.nonce, dial.decoder = os.urandom(NONCE), FrameDecoder(GREETING_LIMIT)
                connection.sendall(pack_frame(greet(hello, dial.nonce)))
                self._selector.modify(connection, selectors.EVENT_READ, lambda _: self._go_on(dial))
                return
            if dial.proved:
                self._receive_verdict(
                    dial, connection, _some(connection, 1)
                )  # and no more: the core's words may be next
                return
            data = _some(connection)
            if data == _UNKNOWN:
                dial.answered = time.monotonic()
                self._fail(dial, "it is not in the group yet, or no longer")
                return
            dial.decoder.feed(data)
            if (frame := dial.decoder.next()) is None:
                return
            self._prove(dial, connection, hello, frame)
        except BlockingIOError:
            return
        except ConfigError as error:
            self._end(dial)
            who = f"rank {dial.group.rank}: rank {dial.peer} ({dial.address})"
            dial.group.give_up(dial.peer, dial.kind, type(error)(f"{who}: {error}"))
        except (OSError, WireError) as error:
            self._fail(dial, reason(error))

    def _prove(self, dial: _Dial, connection: Socket, hello: Hello, frame: bytes) -> None:
        if not frame.startswith(PROTOCOL[:-2]):
            raise WireError("its answer is not of allranks' protocol")
        theirs, their_proof = frame[len(PROTOCOL) : len(PROTOCOL) + NONCE], frame[len(PROTOCOL) + NONCE :]
        nonces = dial.nonce + theirs
        right = hmac.compare_digest(their_proof, proof(dial.group.key, b"server", hello, nonces))
        # Even to one that has another secret, which can then report it.
        connection.sendall(pack_frame(proof(dial.group.key, b"client", hello, nonces)))
        if not right:
            raise SecretError(f"its secret differs from ours; {SHARE_SECRET}")
        dial.proved = True

    def _receive_verdict(self, dial: _Dial, connection: Socket, answer: bytes) -> None:
        if answer == _TURNED_DOWN:  # the other side's own connection is there or on its way
            self._end(dial)
            return
        if answer != _TAKEN:
            raise WireError("its answer is not of allranks' protocol")
        self._selector.unregister(connection)
        del self._dials[dial]
        if self._groups.get(dial.group.number) is not dial.group:
            connection.close()
            return
        dial.group.give(dial.peer, dial.kind, connection, b"")

    def _fail(self, dial: _Dial, trouble: str) -> None:
        """One attempt has failed: another follows, after a pause, or none."""
        now = time.monotonic()
        where = f"{dial.address}: " if dial.addresses else ""
        dial.trouble = f"{where}{trouble}"
        if dial.connected:
            dial.answered = now
        self._hang_up(dial)
        dial.next += 1
        dial.group.note_trouble(dial.peer, dial.port, dial.addresses, now - dial.began, dial.trouble)
        if dial.kind != HEARTBEAT and now - dial.answered > _GIVE_UP_S and dial.next >= len(dial.addresses):
            del self._dials[dial]
            dial.group.give_up(dial.peer, dial.kind, None)
            return
        whole_round = not dial.addresses or dial.next % len(dial.addresses) == 0
        dial.until = now + (dial.pause_s if whole_round else 0.0)
        dial.pause_s = min(dial.pause_s * 1.5, _LONGEST_PAUSE_S)

    def _hang_up(self, dial: _Dial) -> None:
        if dial.connection is not None:
            with suppress(KeyError):
                self._selector.unregister(dial.connection)
            dial.connection.close()
            dial.connection = None

    def _end(self, dial: _Dial) -> None:
        self._hang_up(dial)
        del self._dials[dial]


def _listen(addresses: Sequence[str]) -> list[socket.socket]:
    def prepare(listener: socket.socket) -> None:
        listener.setblocking(False)
        _do_without_pacing(listener)

    try:
        return listen(addresses, 0, socket.SOMAXCONN, prepare)
    except OSError as error:
        raise ConfigError(f"Cannot listen on {', '.join(addresses)}: {reason(error)}.") from None


def _begun_call(address: str, port: int) -> Socket:
    """A socket that is on its way to an address."""
    call = Socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    call.setblocking(False)
    with suppress(OSError):  # it is in progress; or has failed, which its state shows
        call.connect((address, port))
    return call


def _keep_alive(connection: socket.socket) -> None:
    """A host that has gone is noticed in 15 s, as by the heartbeats (``kUnreachableMs`` in core/channel/net.cc)."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 2), (socket.TCP_KEEPINTVL, 1), (socket.TCP_KEEPCNT, 13)):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _some(connection: socket.socket, most: int = GREETING_LIMIT) -> bytes:
    data = connection.recv(most)
    if not data:
        raise ConnectionResetError(errno.ECONNRESET, "it closed the connection")
    return data


os.register_at_fork(after_in_child=ConnectionServer.forget_all)


def _do_without_pacing(connection: socket.socket) -> None:
    """Takes BBR from a socket that has not connected yet: one that it has once paced stays paced, whatever follows.

    Between neighbours the timers cost more than pacing brings; on long ways the core gives BBR back.
    """
    if connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0") != b"bbr":
        return
    for name in (b"cubic", b"reno"):
        with suppress(OSError):  # not every user may choose every one
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name)
            return
